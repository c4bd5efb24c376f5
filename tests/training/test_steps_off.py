"""Completions that are drawn steps ahead of the update that learns from them."""

from __future__ import annotations

import dataclasses
import json

import jax
import numpy as np
import pytest

from sdpo_jax.config import Config, MeshConfig, overrides
from sdpo_jax.distributed import accelerators
from sdpo_jax.training import ahead, around_step, loop, saving
from sdpo_jax.training import step as steps
from sdpo_jax.training.graded import GradedRollouts
from sdpo_jax.types import Example, Outcome
from tests import tiers, tiny
from tests.generation_batches import make_config, make_samples
from tests.training.compared_runs import Killed, lines, log_probs

STEPS = 4


@pytest.fixture(scope='module')
def settings(tmp_path_factory) -> Config:
  """Return a run of SDPO that learns fast enough for every step to be another model."""
  made: dict = {}
  exec(tiny.make_experiment(tmp_path_factory.mktemp('steps_off')).read_text(), made)
  config = made['get_config']()
  config.optimizer.lr, config.optimizer.lr_warmup_steps = 0.02, 0
  config.trainer.total_training_steps, config.trainer.test_freq = STEPS, 0
  config.trainer.val_before_train = False
  config.mesh = MeshConfig(1, 1)
  return config.validate()


@pytest.fixture(autouse=True)
def one_device(monkeypatch):
  monkeypatch.setattr(accelerators, 'devices', lambda: jax.devices()[:1])


def with_steps_off(config: Config, steps_off: int, **optimizer) -> Config:
  return dataclasses.replace(
    config,
    rollout=dataclasses.replace(config.rollout, steps_off=steps_off),
    optimizer=dataclasses.replace(config.optimizer, **optimizer),
  ).validate()


@dataclasses.dataclass
class Whole:
  """An uninterrupted run."""

  lines: list[dict]
  drawn: list[tuple[int, list[str]]]  # (step, ids of its questions) of every batch that was drawn.
  learned: list[tuple]  # (session, parameters before the update, graded batch) of every step.


@pytest.fixture(scope='module')
def wholes(settings, tmp_path_factory):
  """Uninterrupted runs by `steps_off`, each made when it is first asked for."""
  folder, made = tmp_path_factory.mktemp('wholes'), {}

  def run(steps_off: int) -> Whole:
    drawn, learned, build, roll_out = [], [], steps.build_batch, around_step.rollout_and_grade

    def noted(session, state, graded, *rest):
      learned.append((session, jax.device_get(state.trainable), graded))
      return build(session, state, graded, *rest)

    def counted(session, graders, state, examples, step, *rest):
      drawn.append((step, [example.id for example in examples]))
      return roll_out(session, graders, state, examples, step, *rest)

    with pytest.MonkeyPatch.context() as patched:
      patched.setattr(steps, 'build_batch', noted)
      patched.setattr(around_step, 'rollout_and_grade', counted)
      loop.train(with_steps_off(settings, steps_off), folder / str(steps_off))
    return Whole(lines(folder / str(steps_off)), drawn, learned)

  def whole(steps_off: int) -> Whole:
    if steps_off not in made:
      made[steps_off] = run(steps_off)
    return made[steps_off]

  return whole


@pytest.mark.parametrize('steps_off', [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_batch_is_drawn_by_the_model_of_so_many_steps_before(wholes, steps_off):
  """By log-probs of its tokens; every batch of questions is drawn once and learned from once, in order."""
  whole = wholes(steps_off)
  questions = [[f'train-{2 * step}', f'train-{2 * step + 1}'] for step in range(STEPS)]
  assert whole.drawn == [(step + 1, asked) for step, asked in enumerate(questions)]
  assert [[example.id for example in graded.examples] for *_, graded in whole.learned] == questions
  models = [trainable for _, trainable, _ in whole.learned]
  for step, (session, _, graded) in enumerate(whole.learned):
    rollouts = graded.rollouts
    prompts = [graded.prompts[group] for group in rollouts.group]
    writer = max(0, step - steps_off)
    for number, model in enumerate(models):
      off = np.abs(log_probs(session, model, prompts, rollouts) - rollouts.model_log_probs)[rollouts.completion_mask]
      assert off.max() < 5e-5 if number == writer else off.max() > 1e-3, (step, number)
  assert [line['rollout/steps_off'] for line in whole.lines] == [min(step, steps_off) for step in range(STEPS)]


@pytest.mark.slow
def test_a_policy_gradient_weighs_tokens_by_the_models_that_drew_them(settings, tmp_path, monkeypatch):
  """The old policy is the one before the update; what drew the tokens, two steps before, is in the weights."""
  config = with_steps_off(settings, 2)
  loss = dataclasses.replace(config.actor.policy_loss, loss_mode='vanilla')
  correction = dataclasses.replace(config.algorithm.rollout_correction, rollout_is='token')
  config = dataclasses.replace(
    config,
    actor=dataclasses.replace(config.actor, policy_loss=loss, ppo_mini_batch_size=1),
    algorithm=dataclasses.replace(config.algorithm, rollout_correction=correction),
  ).validate()
  learned, build = [], steps.build_batch

  def noted(session, state, *rest):
    batch = build(session, state, *rest)
    learned.append((session, jax.device_get(state.trainable), batch))
    return batch

  monkeypatch.setattr(steps, 'build_batch', noted)
  loop.train(config, tmp_path / 'run')
  for step, (session, trainable, batch) in enumerate(learned):
    mask = batch.rollouts.completion_mask
    before = log_probs(session, trainable, batch.prompts, batch.rollouts)
    np.testing.assert_allclose(batch.old_log_probs[mask], before[mask], atol=5e-5)
    writer = learned[max(0, step - 2)][1]
    drew = log_probs(session, writer, batch.prompts, batch.rollouts)
    weights = np.minimum(np.exp(before - drew), 2.0)
    np.testing.assert_allclose(batch.policy_weights[mask], weights[mask], rtol=2e-4)
    assert (np.abs(weights[mask] - 1).max() > 1e-3) == (step > 0)


@pytest.mark.slow
def test_without_learning_it_is_the_synchronous_run(settings, tmp_path):
  still = {steps_off: with_steps_off(settings, steps_off, lr=0.0) for steps_off in (0, 2)}
  for steps_off, config in still.items():
    loop.train(config, tmp_path / str(steps_off))
  synchronous, stale = lines(tmp_path / '0'), lines(tmp_path / '2')
  assert [line.pop('rollout/steps_off') for line in stale] == [0, 1, 2, 2]
  assert stale == synchronous
  rollouts = [(tmp_path / str(steps_off) / 'rollouts' / '4.jsonl').read_text() for steps_off in still]
  assert rollouts[0] == rollouts[1]


@pytest.mark.parametrize(
  ('steps_off', 'where', 'step', 'save_freq', 'rescued'),
  [
    (1, 'build_batch', 4, 2, False),
    *tiers.cases(
      [
        (steps_off, where, step, save_freq, rescued)
        for steps_off in (1, 2)
        for where in ('rollout_and_grade', 'build_batch', 'run_update')
        for step in range(1, STEPS + 1)
        for save_freq, rescued in ((1, False), (3, False), (0, True))
      ],
      slow=(
        (1, 'rollout_and_grade', 3, 0, True),
        (1, 'run_update', 1, 1, False),
        (2, 'rollout_and_grade', 2, 3, False),
        (2, 'build_batch', 4, 0, True),
        (2, 'run_update', STEPS, 3, False),
      ),
    ),
  ],
)
def test_a_run_that_was_killed_goes_on_as_if_it_were_not(
  settings, wholes, tmp_path, monkeypatch, steps_off, where, step, save_freq, rescued
):
  """Killed before the sampling, before or after the update of a step; with what a checkpoint or nothing holds."""
  config = with_steps_off(settings, steps_off)
  config = dataclasses.replace(config, trainer=dataclasses.replace(config.trainer, save_freq=save_freq))
  module = around_step if where == 'rollout_and_grade' else steps
  calls, function = [], getattr(module, where)

  def dying(*arguments):
    calls.append(1)
    if len(calls) < step:
      return function(*arguments)
    if where == 'run_update':
      function(*arguments)
    raise Killed

  with monkeypatch.context() as patched:
    patched.setattr(module, where, dying)
    if not rescued:
      patched.setattr(saving.Saving, 'rescue', lambda self, error: None)
    with pytest.raises(Killed):
      loop.train(config, tmp_path / 'run')
  loop.train(config, tmp_path / 'run')
  assert lines(tmp_path / 'run') == wholes(steps_off).lines


def test_a_resume_refuses_another_schedule_and_names_steps_that_are_added(settings):
  config = with_steps_off(settings, 1)
  saved = json.loads(config.to_json())
  assert overrides.differences(saved, with_steps_off(settings, 2)).refused == ['rollout.steps_off was 1 and is now 2']
  longer = dataclasses.replace(config, trainer=dataclasses.replace(config.trainer, total_training_steps=STEPS + 1))
  assert overrides.differences(saved, longer) == overrides.Differences(
    [], [], {overrides.EXTENDED: [f'trainer.total_training_steps was {STEPS} and is now {STEPS + 1}']}, []
  )
  synchronous = with_steps_off(longer, 0)
  assert overrides.differences(json.loads(with_steps_off(config, 0).to_json()), synchronous).named == {}


class Questions:
  """An iterator of one batch of questions after the other."""

  def __init__(self, *batches):
    self.batches, self.at = batches, 0

  def __next__(self):
    self.at += 1
    return self.batches[self.at - 1]

  def get_state(self):
    return {'at': self.at}

  def set_state(self, state, *, other_rows=False):
    self.at = state['at']


def test_a_batch_that_answers_other_questions_than_there_are_is_drawn_anew(monkeypatch):
  config, samples = make_config(), make_samples(make_config())
  prompts = samples.prompts[:: config.rollout.n]
  monkeypatch.setattr(ahead, 'prompt_tokens', lambda tokenizer, example, config: prompts[int(example.id)])

  def batch(answer: str) -> list[Example]:
    return [Example(str(g), [{'role': 'user', 'content': str(g)}], 'e', answer, 's') for g in range(len(prompts))]

  rollouts = dataclasses.replace(samples.rollouts, prompt_tokens=np.zeros((len(samples), 99), np.int32))
  outcomes = [Outcome(1.0)] * len(samples)
  drawn = GradedRollouts(batch('a'), prompts, rollouts, outcomes, np.arange(len(samples)), 0.0)
  first = ahead.Ahead(config, Questions(batch('z'), batch('a'), batch('b')), None)
  first.ask()
  position, _ = first.ask()
  first.add(ahead.SampledBatch(2, 1, position, drawn))
  position, waiting = first.saved()
  host = {'iterator': position, ahead.WAITING: [each.to_json() for each in waiting]}
  same = ahead.Ahead(config, Questions(batch('z'), batch('a'), batch('b')), None)
  assert same.restore(host, other_rows=False) is None
  assert same.ask()[1] == batch('b') and same.take(2).graded.outcomes == outcomes
  other = ahead.Ahead(config, Questions(batch('z'), batch('c'), batch('b')), None)
  assert 'The questions of the completions sampled ahead have changed' in other.restore(host, other_rows=True)
  assert list(other.missing(2)) == [2] and other.ask()[1] == batch('c')
  # After a rollback the same questions are asked again.
  same.restore(host, other_rows=False)
  same.ask_again()
  assert list(same.missing(2)) == [2] and same.ask()[1] == batch('a')


def test_what_is_drawn_survives_a_checkpoint_to_the_last_bit():
  """Odd numbers, ungraded completions and metrics of other types too; another question is told from the old one."""
  config = make_config()
  samples = make_samples(config)
  groups = len(samples.prompts) // config.rollout.n
  prompts = samples.prompts[:: config.rollout.n]
  draw = np.random.default_rng(0)
  mask = samples.rollouts.completion_mask
  numbers = {
    name: np.where(mask, draw.standard_normal(mask.shape) * 10.0 ** draw.integers(-40, 30, mask.shape), 0).astype(
      np.float32
    )
    for name in ('sampling_log_probs', 'model_log_probs', 'entropy')
  }
  numbers['model_log_probs'][mask] = np.where(draw.random(mask.sum()) < 0.2, -np.inf, numbers['model_log_probs'][mask])
  width = max(map(len, prompts)) + 3
  rollouts = dataclasses.replace(
    samples.rollouts,
    **numbers,
    group=samples.rollouts.group.astype(np.int32),
    completion_tokens=np.where(mask, samples.rollouts.completion_tokens, 0).astype(np.int32),
    prompt_tokens=np.stack([np.pad(prompts[g], (0, width - len(prompts[g]))) for g in samples.rollouts.group]).astype(
      np.int32
    ),
    prompt_mask=np.stack([np.arange(width) < len(prompts[g]) for g in samples.rollouts.group]),
    text=['“ü\ud800' if row else '' for row in range(len(mask))],
  )
  outcomes = [
    Outcome.ungraded('late')
    if row == 1
    else Outcome(np.float32(0.1), 'fb', {'acc': np.float64(1 / 3), 'nan': float('nan'), 'p': 'x', 'b': True})
    for row in range(len(mask))
  ]
  outcomes[2] = Outcome(1.0, rewards={'one': float('-inf')}, metrics={'other': object(), 'none': None})
  examples = [Example(str(g), [{'role': 'user', 'content': str(g)}], 'e', None, 's') for g in range(groups)]
  order = draw.permutation(len(mask))
  graded = GradedRollouts(
    examples, prompts, rollouts.take(order), [outcomes[row] for row in order], order, graders_busy_s=1.0
  )
  saved = json.loads(json.dumps(ahead.SampledBatch(5, 4, {}, graded).to_json()))
  found = ahead.SampledBatch.from_json(saved, {'position': 1}, examples, prompts)
  assert (found.step, found.at, found.position) == (5, 4, {'position': 1})
  for field in dataclasses.fields(graded.rollouts):
    one, other = getattr(graded.rollouts, field.name), getattr(found.graded.rollouts, field.name)
    np.testing.assert_array_equal(one, other)
    assert isinstance(one, list) or one.dtype == other.dtype
  np.testing.assert_array_equal(found.graded.sample_ids, order)
  for one, other in zip(graded.outcomes, found.graded.outcomes, strict=True):
    kept = {name: value for name, value in one.metrics.items() if name != 'other'}
    assert repr(dataclasses.replace(other)) == repr(
      dataclasses.replace(
        one,
        score=None if one.score is None else float(one.score),
        metrics={name: getattr(value, 'item', lambda value=value: value)() for name, value in kept.items()},
      )
    )
  elsewhere = [*examples[:-1], dataclasses.replace(examples[-1], ground_truth='another')]
  assert ahead.SampledBatch.from_json(saved, {}, elsewhere, prompts) is None
  assert ahead.SampledBatch.from_json(saved, {}, examples, [*prompts[:-1], [*prompts[-1], 1]]) is None
