"""A service whose teacher is another process: it learns what it learns from the same model beside the student, and what
becomes of feedback when that process dies.
"""

import numpy as np
import pytest

from sdpo_jax.config import TeacherEndpointConfig
from sdpo_jax.serving import feedback
from sdpo_jax.serving.account import Account
from sdpo_jax.serving.errors import TeacherUnavailable
from sdpo_jax.serving.feedback_request import Item, make_request
from tests import tiny
from tests.serving import served_process, service_world

CONFIG = """
import pathlib
from tests.serving import service_world

def get_config():
  config = service_world.make_config(pathlib.Path({model!r}), pathlib.Path({root!r}))
  config.serve.score_buckets = ()  # So short that most texts of the student are scored in pieces.
  config.serve.limits.max_logprobs = service_world.WIDE
  config.serve.http.port = 0
  return config
"""
LOSSES = {
  'sdpo': {},
  'of the teacher': {'support': 'teacher', 'alpha': 0.0, 'topk': 20},
  'hybrid': {'policy_weight': 0.5, 'is_clip': None},
  'jsd_pg': {'loss': 'jsd_pg', 'jsd_weight': 1.0},
  'with a tail': {'loss': 'jsd_pg', 'tail': True},
  'union': {'loss': 'jsd_pg', 'support': 'union'},
}


def learned(folder, name, set_teacher, teacher, after=lambda *_: None):
  """Return the metrics of a feedback for each loss, learned by a new adapter; then call `after`."""
  config = service_world.make_config(folder / 'small', folder / f'root_{name}')
  config.serve.union_support = True
  config.actor.self_distillation.teacher_regularization = 'base'
  set_teacher(config)
  draw, found = np.random.default_rng(0), {}
  items = [
    Item(
      prompt_tokens=draw.integers(250, size=size).tolist(), tokens=draw.integers(250, size=8).tolist(), feedback=text
    )
    for size, text in ((5, 'No.'), (60, 'This is longer, so that the prompt of the teacher is long. ' * 3))
  ]
  with service_world.running(config) as service:
    ada = Account(service, 'ada')

    def ask(update):
      adapter, _ = ada.create(f'a{len(ada.adapters())}', seed=1)
      request = make_request(items, update, service.settings, teacher=teacher)
      return adapter, feedback.learn(ada, adapter.id, None, request).said

    for loss, update in LOSSES.items():
      adapter, said = ask(update)
      assert said['accepted'] and ada.adapter(adapter.id).head == 1
      found[loss] = said['metrics'] | {
        f'{place}': item['mean_log_prob_after'] for place, item in enumerate(said['items'])
      }
    after(service, ada, ask)
  return found


@pytest.mark.slow
def test_a_teacher_in_another_process_teaches_what_it_teaches_in_this_one(tmp_path):
  service_world.model_folder(tmp_path / 'small')
  large = tiny.make_model(tmp_path / 'large', seed=1, num_hidden_layers=3)
  (tmp_path / 'config.py').write_text(CONFIG.format(model=str(large), root=str(tmp_path / 'root')))

  def beside(config):
    config.actor.self_distillation.teacher_model = str(large)

  expected = learned(tmp_path, 'beside', beside, {'kind': 'model', 'name': 'large'})
  with served_process.served(tmp_path) as running:
    served_process.until(lambda: any(line.startswith('Ready') for line in running.lines))

    def behind(config):
      config.actor.self_distillation.teacher_endpoint = TeacherEndpointConfig(
        url=f'{running.url}/v1', model='tiny', tokenizer=str(large), retries=0
      )
      config.serve.learning.teacher = 'endpoint'

    def away(service, ada, ask):
      running.process.kill()
      running.process.wait()
      for _ in range(4):
        with pytest.raises(TeacherUnavailable) as caught:
          ask({})
        assert running.url not in str(caught.value)
      assert service.endpoint.state['breaker'] == 'open' and service.endpoint.counts['refused'] == 1
      assert all(adapter.head <= 1 for adapter in ada.adapters())
      assert [adapter.head for adapter in ada.adapters()[len(LOSSES) :]] == [0] * 4
      assert service_world.sample(ada, 'a0')[0].tokens  # Who needs no teacher goes on.

    found = learned(tmp_path, 'behind', behind, None, away)
  worst = {}
  for loss, metrics in expected.items():
    worst[loss] = max(abs(found[loss][name] - value) for name, value in metrics.items())
    assert worst[loss] <= 1e-6, (loss, {name: (value, found[loss][name]) for name, value in metrics.items()})
    assert metrics['teacher_gap'] != 0 and metrics['grad_norm'] > 0
  print(worst)
