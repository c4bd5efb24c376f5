"""Samples that carry over from one step to the next (`rollout.max_staleness`)."""

from __future__ import annotations

import dataclasses
import functools
import json
import shutil
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sdpo_jax.config import Config, LoraConfig, MeshConfig, overrides
from sdpo_jax.distributed import accelerators
from sdpo_jax.environments import registry
from sdpo_jax.errors import UserError
from sdpo_jax.models import cache as kv_cache
from sdpo_jax.planner.simulation import SamplingSpec, SimulatedRun
from sdpo_jax.rollout.results import Completion
from sdpo_jax.training import carry_over, loop, saving
from sdpo_jax.training import step as steps
from sdpo_jax.training.alarm_watch import AlarmVerdict, AlarmWatch
from sdpo_jax.training.carry_over import OpenGroup, OpenSample, learned_next
from sdpo_jax.training.metrics import MetricsWriter
from tests import tiers, tiny
from tests.resumed_runs import start_two
from tests.training import cartridge_runs, compared_runs
from tests.training.compared_runs import Killed, lines, log_probs

STEPS, GROUPS, STALENESS = 6, 2, 2


@pytest.fixture(scope='module')
def settings(tmp_path_factory) -> Config:
  """Return a run of SDPO with five slots for batches of six, and completions of about one to forty tokens.

  It learns fast enough for every step to be another model.
  """
  made: dict = {}
  exec(tiny.make_experiment(tmp_path_factory.mktemp('carry_over')).read_text(), made)
  config = made['get_config']()
  config.optimizer.lr, config.optimizer.lr_warmup_steps = 0.02, 0
  config.trainer.total_training_steps, config.trainer.test_freq = STEPS, 0
  config.trainer.val_before_train = False
  config.data.max_response_length, config.rollout.decode_chunk, config.rollout.max_batch_rows = 48, 4, 5
  config.rollout.n, config.rollout.stop_token_ids = 3, tuple(range(40, 60))
  config.mesh = MeshConfig(1, 1)
  return config.validate()


@pytest.fixture(autouse=True)
def one_device(monkeypatch):
  monkeypatch.setattr(accelerators, 'devices', lambda: jax.devices()[:1])


def changed(config: Config, **changes) -> Config:
  """Return settings with samples that carry over, and with these changes."""
  return compared_runs.changed(config, **{'rollout__max_staleness': STALENESS, **changes})


@dataclasses.dataclass
class Whole:
  """An uninterrupted run."""

  lines: list[dict]
  learned: list[tuple]  # (session, parameters before the update, graded batch) of every step.


def run(config: Config, workdir) -> Whole:
  """Run to the end; no program is compiled late."""
  learned, build = [], steps.build_batch

  def noted(session, state, graded, *rest):
    learned.append((session, jax.device_get(state.trainable), graded))
    return build(session, state, graded, *rest)

  with pytest.MonkeyPatch.context() as patched:
    patched.setattr(steps, 'build_batch', noted)
    loop.train(config, workdir)
  written = [json.loads(line) for line in (workdir / 'metrics.jsonl').read_text().splitlines()]
  assert not any(line['programs/compiled'] for line in written)
  return Whole(lines(workdir), learned)


@pytest.fixture(scope='module')
def whole(settings, tmp_path_factory) -> Whole:
  with pytest.MonkeyPatch.context() as patched:
    patched.setattr(accelerators, 'devices', lambda: jax.devices()[:1])
    return run(changed(settings), tmp_path_factory.mktemp('whole') / 'run')


def questions(whole: Whole) -> list[list[int]]:
  return [[int(example.id.split('-')[1]) for example in graded.examples] for *_, graded in whole.learned]


@functools.partial(jax.jit, static_argnums=0)
def append(policy, base, trainable, cache, tokens, count):
  """Append the first `count` of some tokens to a cache of one row; return it, and the log-probs after each token."""
  index = jnp.arange(tokens.shape[1])[None]
  valid = index < count
  positions = jnp.where(valid, cache.lengths[:, None] + index, 0)
  recent = policy.with_recent(cache, tokens.shape[1])
  hidden, unembedding, grown = policy.apply(base, trainable, tokens, positions, valid.astype(jnp.int32), recent)
  grown = kv_cache.commit(grown, jnp.ones(1, bool)).replace(lengths=cache.lengths + count)
  return grown, jax.nn.log_softmax(hidden[0] @ unembedding[: policy.vocab_size].T)


def kept_log_probs(session, models, prompt, tokens, drawn_by) -> np.ndarray:
  """Log-probs of a completion, each part of which is read by the weights that drew it, after older keys and values."""
  policy, base = session.policy.in_any_order(), session.base
  cache, done, found = policy.init_cache(1, 256), 0, []
  inputs = [*prompt, *tokens[:-1]]
  for version, count in drawn_by:
    end = len(prompt) - 1 + len(found) + count
    part = np.zeros((1, 96), np.int32)
    part[0, : end - done] = inputs[done:end]
    cache, scores = append(policy, base, models[version], cache, part, end - done)
    found += [float(scores[end - done - count + at, tokens[len(found) + at]]) for at in range(count)]
    done = end
  return np.array(found)


def check(whole: Whole) -> None:
  """Every group is learned from once and in time, and each token was drawn by the weights that are recorded."""
  assert sorted(sum(questions(whole), [])) == list(range(STEPS * GROUPS))
  models = [trainable for _, trainable, _ in whole.learned]
  for step, (session, _, graded) in enumerate(whole.learned, 1):
    rollouts = graded.rollouts
    prompts = [graded.prompts[group] for group in rollouts.group]
    own = [log_probs(session, model, prompts, rollouts) for model in models[:step]]
    for row, drawn_by in enumerate(graded.drawn_by):
      drew = np.repeat(*np.array(drawn_by).T)
      assert rollouts.completion_mask[row].sum() == len(drew)
      assert step - 1 - STALENESS <= drew[0] and np.all(np.diff(drew) >= 0) and drew[-1] <= step - 1
      for model, scores in enumerate(own):
        off = np.abs(scores[row] - rollouts.model_log_probs[row])[: len(drew)][drew == model]
        assert off.max(initial=0) < 1e-5, (step, row, model)


def test_samples_go_on_under_the_weights_that_are_recorded(whole):
  check(whole)
  found = [(ages := [len(each) for each in graded.drawn_by], max(ages)) for *_, graded in whole.learned]
  assert max(most for _, most in found) == STALENESS + 1 and any(1 in ages for ages, _ in found)
  assert questions(whole) != [[2 * step, 2 * step + 1] for step in range(STEPS)]
  for step, (line, (_, _, graded)) in enumerate(zip(whole.lines, whole.learned, strict=True)):
    oldest = [step - each[0][0] for each in graded.drawn_by]
    assert line['rollout/staleness_mean'] == np.mean(oldest) and line['rollout/staleness_max'] == max(oldest)
    assert line['rollout/staleness_p95'] == np.percentile(oldest, 95)
    before = sum(count for each in graded.drawn_by for after, count in each if after < step)
    assert line['rollout/older_tokens'] == before / graded.rollouts.completion_mask.sum()
    # A batch may be complete from the start, as others ended together with the one before.
    assert line['rollout/live_rows'] <= 5 and (line['rollout/recomputed_tokens'] > 0) == (
      step > 0 and line['rollout/live_rows'] > 0
    )
  drawn = sum(graded.sampling.tokens for *_, graded in whole.learned)
  assert drawn == sum(graded.rollouts.completion_mask.sum() for *_, graded in whole.learned)


def test_the_planner_simulates_what_a_run_does(settings, whole):
  """Of the steps that need no question after the last: the last ones draw only what is open."""
  config, samples = whole.learned[0][0].config, {}
  for numbers, (*_, graded) in zip(questions(whole), whole.learned, strict=True):
    for row, group in enumerate(graded.rollouts.group):
      own = samples.setdefault(numbers[group], ([], len(graded.prompts[group])))[0]
      own.append(int(graded.rollouts.completion_mask[row].sum()))
  spec = SamplingSpec(
    shards=1,
    max_rows=config.rollout.max_batch_rows,
    widths=config.data.prompt_buckets or (config.data.max_prompt_length,),
    room=config.data.max_response_length,
    chunk=config.rollout.decode_chunk,
    keeps_size=False,
    questions=GROUPS,
    n=config.rollout.n,
    max_staleness=STALENESS,
    keeps_carried=False,
    held_out=0,
    held_out_n=1,
    test_freq=0,
    prompts=tuple(samples[number][1] for number in sorted(samples)),
    completions=tuple(length for number in sorted(samples) for length in samples[number][0]),
    steps=1,
  )
  simulated = SimulatedRun(spec)
  for step, (*_, graded) in enumerate(whole.learned[: STEPS - STALENESS], 1):
    stale, own = simulated.step(step), graded.sampling
    assert [*stale] == questions(whole)[step - 1]
    assert sum(stale.values(), []) == [step - 1 - each[0][0] for each in graded.drawn_by]
    for name in ('tokens', 'prompts', 'prefilled', 'recomputed', 'dispatches', 'decode_steps', 'row_steps'):
      assert getattr(simulated.stats, name) == getattr(own, name), (step, name)


def texts(whole: Whole) -> dict[str, list[str]]:
  """Return the completions of each question."""
  return {
    example.id: [graded.rollouts.text[row] for row in np.flatnonzero(graded.rollouts.group == group)]
    for *_, graded in whole.learned
    for group, example in enumerate(graded.examples)
  }


def test_kept_keys_and_values_are_those_of_the_weights_that_drew(settings, wholes, tmp_path, monkeypatch):
  park, sizes = carry_over.Slots.parked, []

  def parked(slots):
    """Nothing is kept but what is under way, so that checkpoints are small."""
    carried, cache = slots.carried(), park(slots)
    held = np.zeros(cache.lengths.shape, int)
    for each in carried:
      held[each.slot] = len(each.samples.prompt) + len(each.tokens) - 1
    values = np.stack(cache.stores.values)  # [L, B, KV, C, head_dim]
    taken = np.repeat((np.arange(values.shape[3]) < held[:, None])[None], len(values), 0)
    np.testing.assert_array_equal((values != 0).any((2, 4)), taken)
    np.testing.assert_array_equal((np.stack(cache.stores.keys) != 0).any((2, 3)), taken)
    np.testing.assert_array_equal(cache.lengths, held)
    sizes.append(held.sum())
    return cache

  monkeypatch.setattr(carry_over.Slots, 'parked', parked)
  config = changed(settings, **CASES['kept'])
  found, several = run(config, tmp_path / 'run'), 0
  models = [trainable for _, trainable, _ in found.learned]
  for session, _, graded in found.learned:
    for row, drawn_by in enumerate(graded.drawn_by):
      if len(drawn_by) > 1:
        length, several = sum(count for _, count in drawn_by), several + 1
        tokens = graded.rollouts.completion_tokens[row, :length].tolist()
        own = kept_log_probs(session, models, graded.prompts[graded.rollouts.group[row]], tokens, drawn_by)
        assert np.abs(own - graded.rollouts.model_log_probs[row, :length]).max() < 1e-5
  assert several > 5 and all(line['rollout/recomputed_tokens'] == 0 for line in found.lines)
  assert max(sizes) > 0 and min(sizes) == 0
  assert wholes('kept', config) == found.lines


def test_without_learning_the_samples_are_those_of_a_run_that_waits(settings, tmp_path, monkeypatch):
  """The noise of a sample does not depend on when it is drawn; nor does a grader that hangs change who is learned from.

  It costs its time limit, and the sample is ungraded.
  """
  still = functools.partial(changed, settings, optimizer__lr=0.0)
  one = run(still(rollout__max_staleness=0), tmp_path / '0')
  other = run(still(), tmp_path / '2')
  assert texts(one) == texts(other) and questions(one) != questions(other)
  assert all(graded.drawn_by is None for *_, graded in one.learned)
  grade, hung, done = registry.get('parity', settings.environments), [], threading.Event()
  slow = texts(other)['train-3'][1]

  def hangs(examples, completions, *, truncated):
    if ('train-3', slow) in [(example.id, text) for example, text in zip(examples, completions, strict=True)]:
      hung.append(len(completions))
      done.wait(60)
    return grade(examples, completions, truncated=truncated)

  limit = dataclasses.replace(settings.environments, grader_timeout_s=0.3)
  monkeypatch.setattr(registry, 'get', lambda name, settings: hangs)
  third = run(still(environments=limit), tmp_path / 'hangs')
  done.set()
  assert hung and questions(third) == questions(other) and texts(third) == texts(other)
  outcomes = [outcome for *_, graded in third.learned for outcome in graded.outcomes]
  [ungraded] = [outcome for outcome in outcomes if not outcome.graded]
  assert 'gave no answer within 0.3 s' in ungraded.reason


def test_an_evaluation_in_the_same_slots_is_that_of_an_evaluation_alone(settings, tmp_path):
  """Open groups go on beside it; without learning all samples are those of a run that waits."""
  still = functools.partial(
    changed,
    settings,
    optimizer__lr=0.0,
    trainer__test_freq=2,
    trainer__val_before_train=True,
    val_kwargs=dataclasses.replace(settings.val_kwargs, n=4, temperature=0.7, top_p=0.9),
  )
  one, other = (run(still(rollout__max_staleness=most), tmp_path / str(most)) for most in (0, 2))
  for step in (0, 2, 4, 6):
    alone, shared = (json.loads((tmp_path / name / f'eval/{step}.json').read_text()) for name in ('0', '2'))
    assert alone == shared and len(alone['samples']) == 8
  assert texts(one) == texts(other)
  assert other.learned[0][2].sampling.recomputed > 0  # The samples of the first step began beside the evaluation.


def test_what_a_rollback_discards_is_drawn_again(settings, tmp_path, monkeypatch):
  after = AlarmWatch.after

  def once(watch, step, *rest, **more):
    after(watch, step, *rest, **more)
    return AlarmVerdict(back_to=2) if step == 3 else AlarmVerdict()

  monkeypatch.setattr(AlarmWatch, 'after', once)
  whole = run(changed(settings, trainer__save_freq=1), tmp_path / 'run')
  assert sorted(sum(questions(whole), [])) == list(range(STEPS * GROUPS))
  for step, (_, _, graded) in enumerate(whole.learned, 1):
    assert all(step <= 3 or each[0][0] >= 3 for each in graded.drawn_by)


@pytest.mark.parametrize('seed', range(3))
@pytest.mark.parametrize(('most', 'count', 'n'), [(0, 3, 2), (1, 1, 3), (2, 4, 1), (4, 2, 4), (8, 3, 2)])
def test_every_group_is_learned_from_once_and_in_time(seed, most, count, n):
  """Whatever the lengths and the number of slots; groups that are complete first come first as far as that allows."""
  draw, total = np.random.default_rng(seed), 25
  slots, clock, admitted = int(draw.integers(1, 3 * count * n)), 0, 0
  groups: dict[int, OpenGroup] = {}
  live: list[tuple[int, int, int]] = []  # (end, group, index).
  waiting: list[tuple[int, int]] = []
  learned = []
  nothing = Completion(0, *[np.zeros(0)] * 4, stopped=True, text='')
  for step in range(1, total + 1):
    while (chosen := learned_next([*groups.values()], step, most, count)) is None:
      while len(waiting) < slots - len(live) and len(groups) < (most + 1) * count and admitted < total * count:
        groups[admitted] = OpenGroup(admitted, None, None, [OpenSample(nothing)] * n, step - 1)
        waiting += [(admitted, index) for index in range(n)]
        admitted += 1
      while waiting and len(live) < slots:
        live.append((clock + int(np.ceil(draw.lognormal(3, 1.5))), *waiting.pop(0)))
      live.sort()
      clock, number, index = live.pop(0)
      groups[number].samples[index] = OpenSample(nothing, done=True)
      groups[number].last = clock
    assert len(chosen) == count and all(step - 1 - group.begun <= most for group in chosen)
    later = [group for group in groups.values() if group.complete and group not in chosen]
    # Who is complete earlier and waits is due later than whoever is taken instead.
    for group in later:
      before = [one for one in chosen if (group.last, group.number) < (one.last, one.number)]
      assert all(one.begun < group.begun for one in before)
    learned += [groups.pop(group.number).number for group in chosen]
  assert sorted(learned) == list(range(total * count))


def test_a_run_resumes_with_the_same_slots_and_questions(settings, tmp_path, monkeypatch):
  config = changed(settings, trainer__total_training_steps=3)
  loop.train(config, tmp_path / 'run')
  saved = json.loads(config.to_json())
  for name, value in {
    'rollout__decode_chunk': 8,
    'rollout__max_batch_rows': 6,
    'rollout__max_staleness': 3,
    'trainer__test_freq': 3,
    'val_kwargs__n': 5,
    'data__prompt_buckets': (16, 32),
    'model__attention': 'xla',
  }.items():
    assert [name.replace('__', '.')] == [
      phrase.partition(' was ')[0] for phrase in overrides.differences(saved, changed(config, **{name: value})).refused
    ]
  assert overrides.differences(saved, changed(config, rollout__max_staleness=0)).refused == [
    'rollout.max_staleness was 2 and is now 0'
  ]
  longer = changed(config, trainer__total_training_steps=STEPS)
  assert overrides.EXTENDED in overrides.differences(saved, longer).named
  open_at_the_end = changed(settings, mesh=MeshConfig(-1, 1))
  with pytest.raises(Killed), monkeypatch.context() as patched:
    calls = []
    patched.setattr(steps, 'build_batch', lambda *rest, built=steps.build_batch: killed_at(calls, 3, built, rest))
    loop.train(open_at_the_end, tmp_path / 'other')
  monkeypatch.setattr(accelerators, 'devices', jax.devices)
  with pytest.raises(UserError, match="samples under way in the slots of a mesh {'fsdp': 1, 'tensor': 1}"):
    loop.train(open_at_the_end, tmp_path / 'other')


def killed_at(calls: list, step: int, function, arguments):
  calls.append(1)
  if len(calls) == step:
    raise Killed
  return function(*arguments)


@pytest.mark.parametrize(
  ('changes', 'expected'),
  [
    ({'rollout__steps_off': 1}, 'rollout.max_staleness=2 with rollout.steps_off=1'),
    ({'rollout__max_staleness': 0, 'rollout__carried_cache': 'kept'}, 'rollout.carried_cache'),
    ({'rollout__max_staleness': 17}, 'rollout.max_staleness must lie in'),
    ({'rollout__max_staleness': True}, 'rollout.max_staleness'),
  ],
)
def test_what_does_not_go_with_open_slots_is_refused(settings, changes, expected):
  with pytest.raises(UserError, match=expected):
    changed(settings, **changes)


@pytest.mark.parametrize('mesh', tiers.cases([MeshConfig(4, 2), MeshConfig(8, 1)], slow=[MeshConfig(4, 2)]), ids=str)
def test_slots_of_several_shards_stay_open(settings, tmp_path, monkeypatch, mesh):
  monkeypatch.setattr(accelerators, 'devices', jax.devices)
  config = changed(settings, mesh=mesh, rollout__max_batch_rows=8)
  check(run(config, tmp_path / 'run'))
  kept = changed(config, rollout__carried_cache='kept', trainer__save_freq=2, trainer__total_training_steps=3)
  run(kept, tmp_path / 'kept')
  run(changed(kept, trainer__total_training_steps=4), tmp_path / 'kept')
  assert len(lines(tmp_path / 'kept')) == 4


# ———— Killed and resumed ————

SD = 'actor__self_distillation__'
CASES = {
  'sdpo': {},
  'grpo': {'actor__policy_loss__loss_mode': 'vanilla', 'algorithm__rollout_correction__rollout_is': 'token'},
  'hybrid': {'algorithm__mode': 'hybrid', 'actor__ppo_mini_batch_size': 1, 'trainer__batch_order': 'balanced'},
  'lora': {'model__lora': LoraConfig(rank=2)},
  'kept': {'rollout__carried_cache': 'kept', 'trainer__test_freq': 2},
  'evaluates': {'trainer__test_freq': 2, 'trainer__val_before_train': True},
  'gathers': {
    'algorithm__min_sdpo_examples': 5,
    SD + 'teach_successes': False,
    SD + 'feedback_model': 'self',
    SD + 'feedback_max_tokens': 8,
    SD + 'feedback_prompt_template': 'Q:{prompt} A:{attempt} E:{output}',
  },
}


@pytest.fixture(scope='module')
def wholes(settings, whole, tmp_path_factory):
  """Return the lines of uninterrupted runs by case, each made when it is first asked for."""
  made = {'sdpo': whole.lines}

  def of(kind: str, config: Config) -> list[dict]:
    if kind not in made:
      made[kind] = run(config, tmp_path_factory.mktemp(kind) / 'run').lines
    return made[kind]

  return of


def test_what_is_saved_during_an_evaluation_goes_on_from_before_it(settings, wholes, tmp_path, monkeypatch):
  """Even if the line of the step is written after that: the evaluation draws tokens of open groups again."""
  config = changed(settings, **CASES['evaluates'])
  expected, runs = wholes('evaluates', config), []
  begun, write, step = loop._Run.__init__, MetricsWriter.write, loop._Run.step  # noqa: SLF001

  def noted(self, *arguments, **named):
    begun(self, *arguments, **named)
    runs.append(self)

  def saved(self, number, line):
    if number == 4:
      runs[0].saving.save_meanwhile()
    write(self, number, line)

  def dies(self, state, number):
    if number == 5:
      raise Killed
    return step(self, state, number)

  with pytest.raises(Killed), monkeypatch.context() as patched:
    patched.setattr(loop._Run, '__init__', noted)  # noqa: SLF001
    patched.setattr(loop._Run, 'step', dies)  # noqa: SLF001
    patched.setattr(MetricsWriter, 'write', saved)
    patched.setattr(saving.Saving, 'rescue', lambda self, error: None)
    loop.train(changed(config, trainer__save_freq=0), tmp_path / 'run')
  shutil.copytree(tmp_path / 'run', tmp_path / 'other')
  loop.train(config, tmp_path / 'run')
  assert lines(tmp_path / 'run') == expected
  # An evaluation that cannot succeed any more need not end the run.
  without = changed(config, trainer__test_freq=0, trainer__val_before_train=False)
  with pytest.raises(UserError, match='trainer.test_freq was 2 and is now 0.*accept_changes=evaluation'):
    loop.train(without, tmp_path / 'other')
  loop.train(changed(without, trainer__accept_changes=('evaluation',)), tmp_path / 'other')
  assert [line['step'] for line in lines(tmp_path / 'other')] == list(range(STEPS + 1))


def config_of(kind: str, settings: Config, folder) -> Config:
  if kind != 'cartridge':
    return changed(settings, **CASES[kind])
  config = cartridge_runs.make_config(folder)
  config.data.max_response_length, config.data.response_buckets = 48, (48,)
  config.rollout.stop_token_ids, config.rollout.max_batch_rows, config.rollout.decode_chunk = tuple(range(60)), 5, 4
  config.trainer.total_training_steps, config.mesh = STEPS, MeshConfig(1, 1)
  return changed(config)


@pytest.mark.parametrize(
  ('kind', 'where', 'step', 'save_freq', 'rescued'),
  tiers.cases(
    [
      (kind, where, step, save_freq, rescued)
      for kind in (*CASES, 'cartridge')
      for where in ('collect', 'build_batch', 'run_update')
      for step in range(1, STEPS + 1)
      for save_freq, rescued in ((1, False), (3, False), (0, True))
    ],
    default=[('sdpo', 'build_batch', 4, 1, False)],
    slow=[
      ('sdpo', 'collect', 2, 0, True),
      ('sdpo', 'run_update', 6, 3, False),
      ('grpo', 'build_batch', 5, 3, False),
      ('hybrid', 'run_update', 3, 1, False),
      ('lora', 'collect', 3, 1, False),
      ('kept', 'collect', 6, 1, False),
      ('kept', 'run_update', 5, 3, False),
      ('kept', 'build_batch', 3, 0, True),
      ('evaluates', 'collect', 6, 1, False),
      ('evaluates', 'run_update', 4, 3, False),
      ('gathers', 'run_update', 2, 1, False),
      ('cartridge', 'build_batch', 4, 1, False),
    ],
  ),
)
def test_a_run_that_was_killed_goes_on_as_if_it_were_not(
  settings, wholes, tmp_path, monkeypatch, kind, where, step, save_freq, rescued
):
  """Killed while it samples, before or after the update of a step; with what a checkpoint or nothing holds."""
  config = config_of(kind, settings, tmp_path)
  expected = wholes(kind, config)
  config = dataclasses.replace(config, trainer=dataclasses.replace(config.trainer, save_freq=save_freq))
  module, name = (carry_over.Slots, 'collect') if where == 'collect' else (steps, where)
  function = getattr(module, name)
  calls = []

  def dying(*arguments):
    calls.append(1)
    # Several turns are a step.
    if len(calls) < (4 * step if where == 'collect' else step):
      return function(*arguments)
    if where == 'run_update':
      function(*arguments)
    raise Killed

  with monkeypatch.context() as patched:
    patched.setattr(module, name, dying)
    if not rescued:
      patched.setattr(saving.Saving, 'rescue', lambda self, error: None)
    with pytest.raises(Killed):
      loop.train(config, tmp_path / 'run')
  loop.train(config, tmp_path / 'run')
  assert lines(tmp_path / 'run') == expected


@pytest.mark.slow
def test_two_processes_take_the_groups_of_one_and_go_on_after_a_kill(tmp_path, monkeypatch):
  """Each grades its share, and the slots of a step are spread over both."""
  changes = {
    'rollout.max_staleness': STALENESS,
    'rollout.max_batch_rows': 6,
    'rollout.decode_chunk': 4,
    'rollout.stop_token_ids': tuple(range(40, 60)),
    'data.max_response_length': 48,
    'data.response_buckets': (48,),
    'trainer.total_training_steps': STEPS,
    'trainer.val_before_train': False,
  }
  shown = {name: ','.join(map(str, value)) if isinstance(value, tuple) else value for name, value in changes.items()}
  config = tiny.make_experiment(tmp_path)
  arguments = [f'--config={config}', *(f'--config.{name}={value}' for name, value in shown.items())]
  processes = start_two(arguments, tmp_path / 'two')
  while not (tmp_path / 'two' / 'rollouts' / '4.jsonl').exists():
    assert processes[0].poll() is None
    time.sleep(0.01)
  for process in processes:
    process.kill()
    process.wait()
  assert [process.wait() for process in start_two(arguments, tmp_path / 'two')] == [0, 0]
  made: dict = {}
  exec(config.read_text(), made)
  monkeypatch.setattr(accelerators, 'devices', lambda: jax.devices()[:2])
  loop.train(changed(made['get_config'](), **{k.replace('.', '__'): v for k, v in changes.items()}), tmp_path / 'one')
  together, alone = lines(tmp_path / 'two'), lines(tmp_path / 'one')
  assert [line['step'] for line in together] == [line['step'] for line in alone] == list(range(1, STEPS + 1))
  for left, right in zip(together, alone, strict=True):
    assert {name: value for name, value in left.items() if 'rollout/' in name} == pytest.approx(
      {name: value for name, value in right.items() if 'rollout/' in name}, rel=1e-4
    )
  assert max(line['rollout/staleness_max'] for line in alone) == STALENESS
