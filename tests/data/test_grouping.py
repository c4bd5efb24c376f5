"""Examples that ask the same are found, and only those; in a run that groups them they share what a group shares."""

import dataclasses
import types

import jax
import numpy as np
import pytest

from sdpo_jax.config import Config
from sdpo_jax.data import grouping
from sdpo_jax.environments.grading import Graders
from sdpo_jax.rollout.results import SamplingStats
from sdpo_jax.training import step
from sdpo_jax.training.specs import objective_spec
from sdpo_jax.types import Example, Outcome, Rollouts
from tests import tiny
from tests.generation_batches import NO_MEMBERS
from tests.golden.tokenizer import CharacterTokenizer

ASKED = Example('a', [{'role': 'user', 'content': 'Why?'}], 'math', '42', 'gsm8k', {'elo': 1})


def test_rows_that_ask_the_same_take_the_index_of_the_first():
  other = dataclasses.replace(ASKED, messages=[{'role': 'user', 'content': 'How?'}])
  again = dataclasses.replace(ASKED, id='b', data_source='math500', extra={'elo': 2})
  assert grouping.first_of_same([other, ASKED, other, again, ASKED]).tolist() == [0, 1, 0, 1, 1]


def test_another_answer_grader_or_system_prompt_is_another_question():
  different = [
    ASKED,
    dataclasses.replace(ASKED, ground_truth='43'),
    dataclasses.replace(ASKED, environment='mcq'),
    dataclasses.replace(ASKED, messages=[{'role': 'system', 'content': ''}, *ASKED.messages]),
    dataclasses.replace(ASKED, ground_truth={'answers': ['42']}),
  ]
  assert grouping.first_of_same(different).tolist() == [0, 1, 2, 3, 4]


class Sampler:
  """n completions a question, each its own number."""

  stats = SamplingStats()

  def sample(self, base, trainable, prompts, *, n, on_finished, **options):
    rows = len(prompts) * n
    ones = np.ones((rows, 1), bool)
    drawn = Rollouts(
      group=np.repeat(np.arange(len(prompts), dtype=np.int32), n),
      prompt_tokens=ones.astype(np.int32),
      prompt_mask=ones,
      completion_tokens=ones.astype(np.int32),
      completion_mask=ones,
      sampling_log_probs=np.zeros((rows, 1), np.float32),
      model_log_probs=np.zeros((rows, 1), np.float32),
      entropy=np.zeros((rows, 1), np.float32),
      finish_reason=['stop'] * rows,
      text=[str(row) for row in range(rows)],
    )
    for completion in tiny.completions(drawn):
      on_finished(completion)
    return drawn


@pytest.mark.parametrize(('grouped', 'taught'), [(False, [0]), (True, [0, 4, 5])])
def test_a_success_teaches_the_failures_of_a_repeated_row_only_where_duplicates_are_grouped(
  grouped, taught, registering
):
  @registering.register('row_1')
  def row_1_is_right(examples, texts, *, truncated):
    return [Outcome(float(text == '1')) for text in texts]

  config = Config()
  config.rollout.n = 2
  config.data.group_duplicates = grouped
  config.data.train_batch_size = config.actor.ppo_mini_batch_size = 3
  config.algorithm.rollout_correction.rollout_is = None  # No log-probs are computed before the update.
  session = types.SimpleNamespace(
    config=config,
    spec=objective_spec(config),
    tokenizer=CharacterTokenizer(),
    writer=lambda trainable: (Sampler(), None, trainable),
    **NO_MEMBERS,
    base=None,
    references={},
  )
  asked = dataclasses.replace(ASKED, environment='row_1')
  other = dataclasses.replace(asked, ground_truth='43')
  batch = [asked, other, dataclasses.replace(asked, id='again')]
  state = types.SimpleNamespace(trainable=None, rng=jax.random.key(0))
  graded = step.rollout_and_grade(session, Graders(config.environments), state, batch, 0, step.Timer())
  context = step.build_teacher_prompts(session, graded, seed=0, step=0)
  assert np.flatnonzero(context.mask).tolist() == taught
  assert all('Correct solution:\n\n1\n' in context.messages[row][-1]['content'] for row in taught)
  assert step.build_batch(session, state, graded, context, {}).advantages is None  # No term reads them.
  session.spec = dataclasses.replace(session.spec, policy_gradient=True)
  batch = step.build_batch(session, state, graded, context, {})
  mean = 1 / 4 if grouped else 1 / 2
  assert batch.advantages[:2, 0].tolist() == [-mean, 1 - mean]
  assert batch.advantages[4:, 0].tolist() == ([-mean, -mean] if grouped else [0, 0])
