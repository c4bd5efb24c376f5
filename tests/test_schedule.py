"""The benchmark path as a schedule of a run: hybrid objectives, feedback that a model writes, examples that gather."""

from __future__ import annotations

import copy
import dataclasses
import functools
import json

import chex
import jax
import numpy as np
import pytest

from models.forward import forward
from sdpo_jax.config import Config, MeshConfig
from sdpo_jax.data.prompts import ChatFormat
from sdpo_jax.distributed import accelerators
from sdpo_jax.errors import UserError
from sdpo_jax.objective.spec import ObjectiveSpec
from sdpo_jax.teacher import feedback
from sdpo_jax.teacher.context import build_teacher_context
from sdpo_jax.training import batching, loop
from sdpo_jax.training.session import load_tokenizer, make_session
from sdpo_jax.types import Outcome
from tests import tiny
from tests.local_server import Answer, Server, dead_address
from tests.test_batching import make_samples, per_token
from tests.test_step import make_model, run, settings

HYBRID = {
  'algorithm__mode': 'hybrid',
  'actor__ppo_mini_batch_size': 2,  # Two optimizer steps, so that both ratios are others than 1.
  'optimizer__grad_clip': 1e9,
}


def samples_of(config: Config) -> batching.GenerationBatch:
  """Eight samples: some taught, most with an advantage, one ungraded, one that a teacher reads and nobody graded."""
  samples = make_samples(config)
  spec = ObjectiveSpec.from_config(config)
  return dataclasses.replace(
    samples,
    teacher_prompts=samples.teacher_prompts if spec.reads_teacher else None,
    graded=np.array([1, 1, 1, 0, 1, 1, 1, 1], bool),
    scored=np.array([1, 1, 0, 0, 1, 1, 1, 1], bool),
    advantages=per_token([1, -1, 0, 0, 0, 0, 2, -0.5]),
    old_log_probs=samples.rollouts.model_log_probs - 4 if spec.needs_old_log_probs else None,
  )


def test_without_a_policy_gradient_hybrid_is_sdpo_bit_for_bit():
  pure, hybrid = (
    settings(**{**HYBRID, 'algorithm__mode': 'pure_sdpo'}),
    settings(**HYBRID, algorithm__policy_gradient_coef=0.0),
  )
  assert ObjectiveSpec.from_config(pure) == ObjectiveSpec.from_config(hybrid)
  one, other = (run(config, samples_of(config)) for config in (pure, hybrid))
  chex.assert_trees_all_equal(one.state, other.state)
  assert one.losses == other.losses and one.losses[0] > 0


@pytest.mark.slow
def test_without_a_divergence_hybrid_is_grpo():
  grpo = settings(**{**HYBRID, 'algorithm__mode': 'pure_sdpo'}, actor__policy_loss__loss_mode='vanilla')
  hybrid = settings(**HYBRID, algorithm__sdpo_coef=0.0)
  assert ObjectiveSpec.from_config(hybrid).coefficients == ('policy_coef',)
  one, other = (run(config, samples_of(config)) for config in (grpo, hybrid))
  chex.assert_trees_all_close(one.state.trainable, other.state.trainable, rtol=1e-6)
  assert one.losses == pytest.approx(other.losses, rel=1e-6)


def log_softmax(policy, parameters, prompts, rollouts) -> np.ndarray:
  """Log-probs of every token at every place of completions, float64: [N, T, V]."""
  rows = batching.token_rows(prompts, rollouts.completion_tokens, rollouts.completion_mask, 17)
  hidden, unembedding = forward(policy, {}, parameters, rows)
  scores = np.asarray(hidden, np.float64) @ np.asarray(unembedding, np.float64)[: policy.vocab_size].T
  return scores - np.logaddexp.reduce(scores, axis=-1, keepdims=True)


def kl(p: np.ndarray, q: np.ndarray) -> np.ndarray:
  return (np.exp(p) * (p - q)).sum(-1)


def test_the_sum_of_both_terms_is_that_of_numpy():
  """The first optimizer step, of samples 0 to 3: Jensen–Shannon over the top 8 with a tail, dual-clip PPO."""
  weights = {'algorithm__sdpo_coef': 0.7, 'algorithm__policy_gradient_coef': 0.3}
  config = settings(**HYBRID, **weights)
  samples = samples_of(config)
  rollouts, taught = samples.rollouts, samples.distill_mask.any(1)
  policy, parameters = make_model()
  student = log_softmax(policy, parameters, samples.prompts, rollouts)
  teacher = log_softmax(policy, parameters, samples.teacher_prompts, rollouts)
  top = np.argsort(-student, axis=-1)[..., :8]

  def bucketed(log_probs):
    support = np.take_along_axis(log_probs, top, -1)
    return np.concatenate([support, np.log1p(-np.exp(support).sum(-1, keepdims=True))], -1)

  s, t = bucketed(student), bucketed(teacher)
  mixed = np.logaddexp(s, t) - np.log(2)
  divergence = 0.5 * kl(s, mixed) + 0.5 * kl(t, mixed)
  token = np.take_along_axis(student, rollouts.completion_tokens[..., None], -1)[..., 0]
  ratio = np.exp(token - samples.old_log_probs)
  a, clip = samples.advantages.astype(np.float64), config.actor.policy_loss
  ppo = np.maximum(-a * ratio, -a * np.clip(ratio, 1 - clip.clip_ratio_low, 1 + clip.clip_ratio_high))
  ppo = np.where(a < 0, np.minimum(ppo, -a * clip.clip_ratio_c), ppo)
  first = np.arange(8) < 4
  mask = rollouts.completion_mask & samples.graded[:, None] & first[:, None]

  def mean(values, rows):
    chosen = mask & rows[:, None]
    return values[chosen].sum() / chosen.sum()

  wanted = 0.7 * mean(np.minimum(ratio, 2) * divergence, taught) + 0.3 * mean(ppo, samples.scored)
  outcome = run(config, samples)
  assert outcome.losses[0] == pytest.approx(wanted, rel=1e-4)
  assert np.abs(ratio[mask] - 1).max() > 0.5 and (a[:4] != 0).any()


@pytest.mark.parametrize(
  ('changes', 'sentence'),
  [
    ({'algorithm__sdpo_coef': 2.0}, 'algorithm.sdpo_coef=2.0 has no effect'),
    ({'algorithm__mode': 'hybrid', 'actor__policy_loss__loss_mode': 'vanilla'}, "loss_mode='vanilla'"),
    ({**HYBRID, 'algorithm__sdpo_coef': 0.0, 'algorithm__policy_gradient_coef': 0.0}, 'nothing is minimised'),
    ({**HYBRID, 'algorithm__policy_gradient_coef': -1.0}, 'must be at least 0'),
    ({'actor__self_distillation__feedback_max_tokens': 8}, 'nobody writes feedback'),
    ({'actor__self_distillation__feedback_model': 'endpoint'}, 'feedback_endpoint.url is empty'),
    ({'actor__self_distillation__feedback_endpoint__model': 'm'}, "model has no effect with .*feedback_model=''"),
    ({'actor__self_distillation__feedback_model': 'self', 'actor__policy_loss__loss_mode': 'vanilla'}, 'reads it'),
  ],
)
def test_settings_that_contradict_each_other_are_refused(changes, sentence):
  with pytest.raises(UserError, match=sentence):
    settings(**changes)


# ———— Feedback that a model writes ————


@pytest.fixture(scope='module')
def tiny_settings(tmp_path_factory) -> Config:
  """A run whose completions fail about every other time; the grader says why."""
  made: dict = {}
  exec(tiny.make_experiment(tmp_path_factory.mktemp('schedule')).read_text(), made)
  config = made['get_config']()
  config.optimizer.lr, config.optimizer.lr_warmup_steps = 0.02, 0
  config.trainer.total_training_steps, config.trainer.test_freq = 3, 0
  config.trainer.val_before_train = False
  config.mesh = MeshConfig(1, 1)
  return config.validate()


@pytest.fixture(autouse=True)
def one_device(monkeypatch):
  monkeypatch.setattr(accelerators, 'devices', lambda: jax.devices()[:1])


def changed(config: Config, **changes) -> Config:
  """A copy with other values, by names with `__` for dots."""
  config = copy.deepcopy(config)
  for name, value in changes.items():
    *sections, leaf = name.split('__')
    setattr(functools.reduce(getattr, sections, config), leaf, value)
  return config.validate()


def lines(workdir) -> list[dict]:
  """What a run has measured, without what depends on the clock or on how often it was started."""
  found = [json.loads(line) for line in (workdir / 'metrics.jsonl').read_text().splitlines()]
  clock = 'time/', 'throughput/', 'programs/', 'fencing_epoch'
  return [{name: value for name, value in line.items() if not name.startswith(clock)} for line in found]


def rollouts(workdir, step: int) -> list[dict]:
  return [json.loads(line) for line in (workdir / 'rollouts' / f'{step}.jsonl').read_text().splitlines()]


SD = 'actor__self_distillation__'


def test_the_model_writes_feedback_on_failures_that_its_teacher_reads(tiny_settings, tmp_path):
  config = changed(
    tiny_settings,
    **{
      SD + 'feedback_model': 'self',
      SD + 'feedback_max_tokens': 8,
      SD + 'feedback_temperature': 1.0,
      SD + 'feedback_prompt_template': 'Q:{prompt} A:{attempt} E:{output}',
      SD + 'environment_feedback_only_without_solution': False,
      'trainer__total_training_steps': 2,
    },
  )
  loop.train(config, tmp_path / 'run')
  measured = [json.loads(line) for line in (tmp_path / 'run' / 'metrics.jsonl').read_text().splitlines()]
  assert [line['programs/compiled'] for line in measured] == [0, 0]
  for step, line in enumerate(measured, 1):
    samples = rollouts(tmp_path / 'run', step)
    failures = [sample for sample in samples if sample['score'] == 0]
    assert line['feedback/asked'] == len(failures) > 0
    for sample in samples:
      asked = {'written_feedback', 'unwritten'} & sample.keys()
      assert len(asked) == (sample['score'] == 0)
      if 'written_feedback' in asked:
        said = sample['teacher_prompt'][-1]['content']
        assert f'{sample["feedback"]}\n\n{sample["written_feedback"]}' in said
    assert line['feedback/failed'] == sum('unwritten' in sample for sample in samples) < len(failures)


def test_what_a_model_writes_depends_on_the_sample_alone(tiny_settings, tmp_path):
  """Not on which others have failed, nor on the noise with which completions are drawn."""
  config = changed(
    tiny_settings,
    **{SD + 'feedback_model': 'self', SD + 'feedback_max_tokens': 8, SD + 'feedback_temperature': 1.0},
  )
  session, trainable = make_session(config, tmp_path)
  prompts = [session.tokenizer.encode(text) for text in ('abc', 'de', 'fgh')]

  def written(numbers):
    found = session.feedback_sampler.stream(
      session.base, trainable, [prompts[n % 3] for n in numbers], numbers=numbers, n=1, seed=5, step=2, max_tokens=8
    )
    return {each.sample: each.tokens.tolist() for each in found}

  whole = written([3, 4, 5, 6])
  assert whole.keys() == {3, 4, 5, 6} and whole[3] != whole[6]
  assert written([6, 4]) == {6: whole[6], 4: whole[4]}


def answer(text: str) -> Answer:
  return Answer({'choices': [{'message': {'role': 'assistant', 'content': text}, 'finish_reason': 'stop'}]})


def endpoint(config: Config, url: str, **changes) -> Config:
  return changed(
    config,
    **{
      SD + 'feedback_model': 'endpoint',
      SD + 'feedback_endpoint__url': url + '/v1',
      SD + 'feedback_endpoint__model': 'critic',
      SD + 'feedback_endpoint__retries': 0,
      SD + 'environment_feedback_only_without_solution': False,
      'trainer__total_training_steps': 1,
      **changes,
    },
  )


def test_a_server_writes_feedback_and_what_it_fails_at_keeps_the_graders(tiny_settings, tmp_path):
  asked = []

  def respond(body):
    asked.append(body)
    return Answer(status=500) if len(asked) == 1 else answer('<think>hm</think> Add one.')

  with Server(respond) as server:
    loop.train(
      endpoint(
        tiny_settings, server.url, **{SD + 'feedback_keeps_output': False, SD + 'feedback_endpoint__concurrency': 1}
      ),
      tmp_path / 'run',
    )
  [line] = lines(tmp_path / 'run')
  samples = rollouts(tmp_path / 'run', 1)
  failures = [sample for sample in samples if sample['score'] == 0]
  assert (line['feedback/asked'], line['feedback/failed']) == (len(failures), 1) and len(failures) > 1
  assert {path for path in server.paths} == {'/v1/chat/completions'}
  assert all(body['model'] == 'critic' and body['temperature'] == 0 and body['max_tokens'] == 512 for body in asked)
  assert all('The sum of the bytes must be odd.' in body['messages'][0]['content'] for body in asked)
  teachers = [sample['teacher_prompt'][-1]['content'] for sample in failures]
  assert [('Add one.' in said, 'must be odd' in said) for said in teachers] == [
    (sample.get('written_feedback') == 'Add one.', 'unwritten' in sample) for sample in failures
  ]
  assert 'status 500' in next(sample['unwritten'] for sample in failures if 'unwritten' in sample)


def test_a_server_that_writes_nothing_ends_the_run_with_a_sentence(tiny_settings, tmp_path):
  with pytest.raises(
    UserError, match=r'Nobody wrote feedback on any of \d+ failures: the connection failed.*feedback_endpoint.url'
  ):
    loop.train(endpoint(tiny_settings, dead_address()), tmp_path / 'run')


def outcomes_of(*scores) -> list[Outcome]:
  return [Outcome.ungraded('x') if score is None else Outcome(score, 'no' if score < 0.5 else '') for score in scores]


def test_only_graded_failures_whose_teacher_reads_it_get_feedback(tiny_settings):
  """Of a group with a success that can be shown nobody else is asked, where feedback comes only without solution."""
  outcomes = outcomes_of(0.0, 1.0, None, 0.2, 0.0, 1.0)
  group, texts = [0, 0, 0, 1, 2, 2], ['a', 'b', 'c', 'd', 'e', '<think>only']
  sd = tiny_settings.actor.self_distillation
  assert feedback.rows_to_write(group, texts, outcomes, sd) == [3, 4]
  both = dataclasses.replace(sd, environment_feedback_only_without_solution=False)
  assert feedback.rows_to_write(group, texts, outcomes, both) == [0, 3, 4]


def test_a_writers_prompt_is_shortened_to_its_limit(tiny_settings):
  tokenizer = load_tokenizer(tiny_settings)
  sd = dataclasses.replace(
    tiny_settings.actor.self_distillation,
    feedback_max_prompt_len=80,
    feedback_prompt_template='{prompt}|{attempt}|{output}',
  )
  question = [{'role': 'user', 'content': 'Why?'}]
  asked = feedback.ask(7, question, 'a' * 5000 + 'z', 'E' * 300, sd, tokenizer, ChatFormat())
  text = asked.messages[0]['content']
  assert asked.row == 7 and 70 < len(asked.tokens) <= 80
  assert text.startswith('Why?|aaa') and 'z|EEE' in text and text.endswith('...')
  with pytest.raises(feedback.UnwrittenError, match='feedback_max_prompt_len=20'):
    feedback.ask(7, question, 'a', None, dataclasses.replace(sd, feedback_max_prompt_len=20), tokenizer, ChatFormat())
  assert '(nothing)' in feedback.ask(7, question, 'a', ' ', sd, tokenizer, ChatFormat()).messages[0]['content']


def test_successes_that_are_not_taught_are_demonstrations_only(tiny_settings):
  sd = tiny_settings.actor.self_distillation
  questions = [[{'role': 'user', 'content': 'Q'}]] * 4
  outcomes = outcomes_of(1.0, 1.0, 0.0, 0.0)

  def context(config):
    tokenizer = load_tokenizer(tiny_settings)
    return build_teacher_context(questions, [0] * 4, list('abcd'), outcomes, config, tokenizer, seed=0, step=1)

  assert context(sd).mask.tolist() == [1, 1, 1, 1]
  alone = context(dataclasses.replace(sd, teach_successes=False))
  assert alone.mask.tolist() == [0, 0, 1, 1] and set(alone.solutions[2:]) <= {'a', 'b'}
