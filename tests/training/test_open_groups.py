"""Open groups with random samples, sizes, kills and evaluations, and with arithmetic in place of a model.

Drawn tokens follow from the keys and values that are in the cache, whose slots hold which token they are of and which
weights computed them: a sample is right only if the cache is.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import types
import zlib

import hypothesis
from hypothesis import strategies
import jax
import numpy as np
import pytest

from sdpo_jax.config import Config
from sdpo_jax.distributed.stopping import NEVER
from sdpo_jax.models.cache import KVCache, Stores
from sdpo_jax.planner.simulation import HELD_OUT, SamplingSpec, SimulatedRun
from sdpo_jax.rollout import sampler
from sdpo_jax.rollout.decode import Drawn
from sdpo_jax.rollout.functions import SamplerFunctions
from sdpo_jax.training import ahead, carry_over
from sdpo_jax.training.ahead import WAITING, decoded
from sdpo_jax.training.checkpoint.checkpoints import ARRAYS
from sdpo_jax.types import Example, Outcome

SEEDS = {'train': 7, 'val': 8}


@dataclasses.dataclass(frozen=True)
class Case:
  """A run: how much it samples, in how many slots, how long samples are, and when it is killed."""

  sampling: SamplingSpec
  steps: int
  kills: tuple[int, ...]  # Steps after which it goes on from its checkpoint.
  evaluated_first: bool  # Whether these checkpoints are from after the evaluation, if the step has one.


@strategies.composite
def cases(draw) -> Case:
  whole = lambda least, most: draw(strategies.integers(least, most))  # noqa: E731
  seed, room, shards = whole(0, 10**6), whole(1, 48), whole(1, 3)
  random = np.random.default_rng(seed)
  lengths = np.clip(random.lognormal(whole(0, 3), 1.0, 97), 1, room).astype(int)
  sampling = SamplingSpec(
    shards=shards,
    max_rows=shards * whole(1, 10),
    widths=draw(strategies.sampled_from([(8,), (4, 8)])),
    room=room,
    chunk=whole(1, 8),
    keeps_size=draw(strategies.booleans()),
    questions=whole(1, 4),
    n=whole(1, 4),
    max_staleness=whole(1, 5),
    keeps_carried=draw(strategies.booleans()),
    held_out=whole(0, 5),
    held_out_n=whole(1, 3),
    test_freq=whole(1, 3),
    prompts=tuple(random.integers(1, 9, 5).tolist()),
    completions=tuple(lengths.tolist()),
    steps=1,
  )
  steps = whole(1, 8)
  kills = tuple(sorted(draw(strategies.sets(strategies.integers(1, steps), max_size=3))))
  return Case(sampling, steps, kills, draw(strategies.booleans()))


def prompt_of(spec: SamplingSpec, first: int, n: int) -> list[int]:
  """Return the prompt of the question whose first sample has this number in the run."""
  return [1 + (first + at) % 96 for at in range(spec.prompts[first // n % len(spec.prompts)])]


def next_token(seed: int, number: int, context: list[int]) -> int:
  return 1 + zlib.crc32(json.dumps([seed, number, context]).encode()) % 96


class Device:
  """In place of `SamplerFunctions`, in NumPy; a parameter tree is the number of a version of the weights."""

  pooled = False
  members_at_once = rows_alike = prepare_base = None
  no_members, copied = SamplerFunctions.no_members, SamplerFunctions.copied
  put = fetch = staticmethod(lambda tree: tree)

  def __init__(self, spec: SamplingSpec):
    self.spec, self.shards, self.keeps_size = spec, spec.shards, spec.keeps_size
    self.clock = 0  # Decode steps so far; may be changed by assignment.

  def empty(self, *, rows: int, slots: int) -> KVCache:
    keys, values = np.zeros((2, 1, rows, 1, slots, 1), np.int32)
    return KVCache(Stores(keys, values), np.zeros(rows, np.int32))

  def prefill(self, base, version: int, tokens: np.ndarray, lengths: np.ndarray, *, slots: int) -> KVCache:
    cache = self.empty(rows=len(tokens), slots=slots)
    for row, length in enumerate(lengths):
      self._write(cache, row, tokens[row, : length - 1], version)
    return cache

  @staticmethod
  def _write(cache: KVCache, row: int, tokens: np.ndarray, version: int) -> None:
    part = slice(cache.lengths[row], cache.lengths[row] + len(tokens))
    cache.stores.keys[0, row, 0, part, 0], cache.stores.values[0, row, 0, part, 0] = tokens, version
    cache.lengths[row] += len(tokens)

  def extend(self, base, version: int, cache: KVCache, source, tokens, held, new, *, piece: int) -> KVCache:
    assert not held.any() and not cache.lengths.any()
    for row, count in enumerate(new):
      self._write(cache, row, tokens[row, :count], version)
    return cache

  def _rows(self, rows: int, of_shard: np.ndarray) -> np.ndarray:
    """Return the indices among `rows` rows of those with some indices in their shards."""
    per_shard = len(of_shard) // self.shards
    return of_shard + np.repeat(np.arange(self.shards), per_shard) * (rows // self.shards)

  def copy(self, into: KVCache, rows: KVCache, source: np.ndarray, target: np.ndarray, count: np.ndarray) -> KVCache:
    taken = (np.arange(len(source) // self.shards) < count[:, None]).reshape(-1)
    here = self._rows(len(into.lengths), target)[taken]
    there = self._rows(len(rows.lengths), source)[taken]
    width = min(into.stores.keys.shape[3], rows.stores.keys.shape[3])
    for to, of in zip(jax.tree.leaves(into.stores), jax.tree.leaves(rows.stores), strict=True):
      to[:, here, :, :width] = of[:, there, :, :width]
    into.lengths[here] = rows.lengths[there]
    return into

  def resize(self, cache: KVCache, source: np.ndarray, *, slots: int) -> KVCache:
    rows = len(source)
    target = np.tile(np.arange(rows // self.shards), self.shards)
    return self.copy(self.empty(rows=rows, slots=slots), cache, source, target, np.full(self.shards, rows))

  def compact(self, stores: Stores, lengths: np.ndarray, source: np.ndarray) -> KVCache:
    there = self._rows(len(lengths), source)
    here = self._rows(stores.keys.shape[1], np.tile(np.arange(len(source) // self.shards), self.shards))
    of = self._rows(stores.keys.shape[1], source)
    for store in jax.tree.leaves(stores):
      store[:, here] = store[:, of]
    return KVCache(stores, lengths[there])

  def clear(self, stores: Stores, filled: np.ndarray) -> KVCache:
    taken = (np.arange(stores.keys.shape[3]) < filled[:, None])[None, :, None, :, None]
    return KVCache(jax.tree.map(lambda store: store * taken, stores), filled)

  def advance(self, base, version: int, cache: KVCache, state, enough: int, *, steps: int):
    rows, per_shard = len(state.token), len(state.token) // self.shards
    at = self._rows(cache.stores.keys.shape[1], np.tile(np.arange(per_shard), self.shards))
    held = KVCache(jax.tree.map(lambda store: store[:, at], cache.stores), cache.lengths.copy())
    tokens, entropy = np.zeros((2, steps, rows), np.int32)
    count, stopped, taken, token = np.zeros(rows, np.int32), np.zeros(rows, bool), 0, state.token.copy()
    done = ~state.active
    while taken < steps and (done & state.active).sum() < enough:
      for row in np.flatnonzero(~done):
        self._write(held, row, token[row : row + 1], version)
        seed, number = int(state.params.seed[row]), number_in_run(self.spec, state.params, row)
        context = held.stores.keys[0, row, 0, : held.lengths[row], 0].tolist()
        tokens[taken, row] = token[row] = next_token(seed, number, context)
        entropy[taken, row] = held.stores.values[0, row, 0, : held.lengths[row], 0].sum()
        count[row] += 1
        drawn, length = state.drawn[row] + count[row], self.spec.completions[number % len(self.spec.completions)]
        stopped[row] = drawn == length
        done[row] = stopped[row] or drawn >= state.params.max_tokens[row]
      taken += 1
    for store, own in zip(jax.tree.leaves(cache.stores), jax.tree.leaves(held.stores), strict=True):
      store[:, at] = own
    # As in `decode`, a row that was done grows with the others.
    cache = KVCache(cache.stores, np.where(state.active, cache.lengths + taken, 0).astype(np.int32))
    versions, clocks = np.full((steps, rows), version), np.broadcast_to(np.arange(steps)[:, None], (steps, rows))
    self.clock += taken
    records = (each.astype(np.float32) for each in (self.clock - taken + 1 + clocks, versions, entropy))
    return cache, Drawn(taken, count, stopped, tokens, *records)


def number_in_run(spec: SamplingSpec, params, row: int) -> int:
  """Return the number of a row's sample in the run."""
  of_batch, batch = int(params.sample_id[row]), int(params.step[row])
  if params.seed[row] == SEEDS['train']:
    return (batch - 1) * spec.questions * spec.n + of_batch
  return HELD_OUT + batch * spec.held_out * spec.held_out_n + of_batch


class Questions:
  """The iterator over the questions."""

  def __init__(self, count: int):
    self._count, self._batch = count, 0

  def get_state(self) -> dict:
    return {'batch': self._batch}

  def set_state(self, state: dict, *, other_rows: bool = False) -> None:
    self._batch = state['batch']

  def __next__(self) -> list[Example]:
    self._batch += 1
    numbers = range((self._batch - 1) * self._count, self._batch * self._count)
    return [Example(str(number), [], 'none', None, 'none') for number in numbers]


class Echo:
  """Graders whose feedback repeats question and answer."""

  def prepare(self, environments) -> None:
    """As those of a run."""

  def end_batch(self) -> None:
    """As those of a run."""

  def grade_part(self, examples, completions, *, truncated) -> list[Outcome]:
    parts = zip(examples, completions, truncated, strict=True)
    return [Outcome(float(cut), f'{example.id}: {text}') for example, text, cut in parts]


class RunOf:
  """The part of a run that samples, and its checkpoints."""

  def __init__(self, case: Case):
    spec = self._spec = case.sampling
    config = Config()
    config.data.train_batch_size, config.data.max_response_length = spec.questions, spec.room
    config.data.prompt_buckets, config.data.response_buckets = spec.widths, (spec.room,)
    config.data.max_prompt_length = spec.widths[-1]
    config.rollout.n, config.rollout.max_staleness = spec.n, spec.max_staleness
    config.rollout.carried_cache = 'kept' if spec.keeps_carried else 'recomputed'
    config.trainer.total_training_steps, config.trainer.batch_order = case.steps, 'sampled'
    self._config = config
    self._begin()

  def _begin(self) -> None:
    spec = self._spec
    tokenizer = types.SimpleNamespace(decode=lambda tokens, **_: ' '.join(map(str, tokens)))
    self._device = Device(spec)
    sampling = sampler.Sampler(
      self._device,
      tokenizer,
      prompt_buckets=spec.widths,
      response_buckets=(spec.room,),
      max_batch_rows=spec.max_rows,
      decode_chunk=spec.chunk,
    )
    sampling.prepare = lambda base, trainable: (base, trainable)
    session = types.SimpleNamespace(
      config=self._config,
      sampler=sampling,
      tokenizer=tokenizer,
      mesh=types.SimpleNamespace(shape={'fsdp': spec.shards, 'tensor': 1}),
      writer=lambda trainable: (None, None, trainable),
    )
    self.open = carry_over.CarryOver(
      session, Echo(), Questions(spec.questions), SEEDS['train'], NEVER, spec.held_out * spec.held_out_n
    )

  def step(self, step: int):
    """Return the batch of a step, drawn by as many versions of the weights as there were updates."""
    self._set_clock()
    return self.open.draw(types.SimpleNamespace(trainable=step), step, lambda _: contextlib.nullcontext())

  def _set_clock(self) -> None:
    self._device.clock = decoded(self.saved()[WAITING][0])['clock']

  def evaluate(self, step: int):
    """Return the rollouts of an evaluation after a step."""
    self._set_clock()
    spec, first = self._spec, HELD_OUT + step * self._spec.held_out * self._spec.held_out_n
    prompts = [prompt_of(spec, first + index * spec.held_out_n, spec.held_out_n) for index in range(spec.held_out)]
    return self.open.sample(
      None,
      step + 1,
      prompts,
      n=spec.held_out_n,
      seed=SEEDS['val'],
      step=step,
      max_tokens=spec.room,
      on_finished=lambda _: None,
      between=lambda: None,
    )

  def saved(self) -> dict:
    """Return a checkpoint's host state."""
    position, [waiting] = self.open.saved()
    parked = {} if self.open.parked is None else {ARRAYS: jax.tree.map(np.copy, self.open.parked)}
    return {'iterator': dict(position), WAITING: [waiting.to_json()], **parked}

  def go_on(self, host: dict) -> None:
    """Go on from a checkpoint in another process."""
    self.open.close()
    self._begin()
    assert self.open.restore(host, other_rows=False) is None


def whole_run(case: Case, kills: tuple[int, ...]) -> tuple[list, dict, dict]:
  """Return the batches of a run, its evaluations by step, and its last checkpoint."""
  spec, run, batches, evaluations = case.sampling, RunOf(case), [], {}
  try:
    for step in range(1, case.steps + 1):
      batches.append(run.step(step))
      evaluates = spec.held_out and not step % spec.test_freq
      saved = run.saved()
      if evaluates:
        evaluations[step] = run.evaluate(step)
      if step in kills:
        if evaluates and case.evaluated_first:
          run.go_on(run.saved())
        else:
          run.go_on(saved)
          if evaluates:
            same(evaluations[step], run.evaluate(step))
    return batches, evaluations, run.saved()
  finally:
    run.open.close()


def same(one, other) -> None:
  for name, value in vars(one).items():
    np.testing.assert_array_equal(value, getattr(other, name), err_msg=name)


def check_batches(case: Case, batches: list) -> None:
  """Check that every question is learned from once and in time, by samples drawn by the weights that are recorded."""
  spec = case.sampling
  learned = [number for batch in batches for number in batch.groups]
  assert sorted(learned) == list(range(case.steps * spec.questions))
  for step, batch in enumerate(batches, 1):
    graded = batch.graded
    assert [example.id for example in graded.examples] == [*map(str, batch.groups)] and batch.step == step
    for row, (drawn_by, outcome) in enumerate(zip(graded.drawn_by, graded.outcomes, strict=True)):
      group, index = divmod(row, spec.n)
      number = batch.groups[group] * spec.n + index
      length = int(graded.rollouts.completion_mask[row].sum())
      tokens = graded.rollouts.completion_tokens[row, :length].tolist()
      prompt = prompt_of(spec, batch.groups[group] * spec.n, spec.n)
      assert graded.prompts[group] == prompt and graded.rollouts.group[row] == group
      check_sample(spec, SEEDS['train'], number, prompt, tokens)
      assert outcome.feedback == f'{graded.examples[group].id}: {graded.rollouts.text[row]}'
      assert graded.rollouts.text[row] == ' '.join(map(str, tokens))
      after = np.repeat(*np.array(drawn_by).T)
      assert len(after) == length and step - 1 - spec.max_staleness <= after[0] and after[-1] <= step - 1
      assert np.all(np.diff([each for each, _ in drawn_by]) > 0)
      # The weights after an update have the number of the next step.
      np.testing.assert_array_equal(graded.rollouts.model_log_probs[row, :length], after + 1)
      check_cache(spec, len(prompt), after + 1, graded.rollouts.entropy[row, :length])


@dataclasses.dataclass(frozen=True)
class Learned:
  """When a group was begun, complete and learned from."""

  step: int
  begun: int  # The step after which the weights drew its first token.
  complete: int  # The first step that could learn from it.
  ended: tuple[int, int]  # (decode steps of the run at its last token, its number).


def check_order(case: Case, batches: list) -> None:
  """Check that a group which is complete waits only for those that ended before it or must not wait."""
  spec, groups = case.sampling, []
  for batch in batches:
    rollouts, drawn_by = batch.graded.rollouts, batch.graded.drawn_by
    ends = rollouts.sampling_log_probs[np.arange(len(rollouts)), rollouts.completion_mask.sum(1) - 1]
    for index, number in enumerate(batch.groups):
      part = slice(index * spec.n, (index + 1) * spec.n)
      begun, last = min(each[0][0] for each in drawn_by[part]), max(each[-1][0] for each in drawn_by[part])
      groups.append(Learned(batch.step, begun, last + 1, (int(ends[part].max()), number)))
  for waits in groups:
    for other in groups:
      if waits.complete <= other.step < waits.step and waits.ended < other.ended:
        assert must_not_wait(spec, groups, other, waits.begun), (waits, other)


def must_not_wait(spec: SamplingSpec, groups: list[Learned], group: Learned, begun: int) -> bool:
  """Return whether a group was learned from because it was begun earlier, so that all are learned from in time."""
  for latest in range(group.begun, begun):
    due = [each for each in groups if each.begun <= latest and each.step >= group.step]
    now = [each for each in due if each.step == group.step]
    later = latest + 1 + spec.max_staleness - group.step  # Batches until the last one in time.
    if len(now) == len(due) - later * spec.questions:
      return True
  return False


def check_sample(spec: SamplingSpec, seed: int, number: int, prompt: list[int], tokens: list[int]) -> None:
  """Check that a sample is what it would be if it were drawn alone."""
  assert len(tokens) == spec.completions[number % len(spec.completions)]
  context = list(prompt)
  for token in tokens:
    assert token == next_token(seed, number, context)
    context.append(token)


def check_cache(spec: SamplingSpec, prompt: int, versions: np.ndarray, sums: np.ndarray) -> None:
  """Check the sum of the versions that computed the keys and values which each token of a sample was drawn from.

  Kept: those that drew the tokens; recomputed: that of the token for all. The token itself is read when the next one
  is drawn.
  """
  if not spec.keeps_carried:
    np.testing.assert_array_equal(sums, versions * (prompt + np.arange(len(versions))))
    return
  own = prompt * versions[0] + np.cumsum(np.append(0, versions[1:]))
  np.testing.assert_array_equal(sums, own)


def check_evaluations(case: Case, evaluations: dict) -> None:
  spec = case.sampling
  for step, rollouts in evaluations.items():
    assert len(rollouts) == spec.held_out * spec.held_out_n
    for row in range(len(rollouts)):
      number = HELD_OUT + step * spec.held_out * spec.held_out_n + row
      prompt = prompt_of(spec, number - row % spec.held_out_n, spec.held_out_n)
      length = int(rollouts.completion_mask[row].sum())
      check_sample(spec, SEEDS['val'], number, prompt, rollouts.completion_tokens[row, :length].tolist())
      versions = np.full(length, step + 1)
      check_cache(spec, len(prompt), versions, rollouts.entropy[row, :length])


def check_simulation(case: Case, batches: list) -> None:
  """Check that the planner's simulation draws and chooses the same, as long as questions are left for both."""
  spec, simulated = case.sampling, SimulatedRun(case.sampling)
  for step, batch in enumerate(batches[: max(case.steps - spec.max_staleness, 0)], 1):
    ages = simulated.step(step)
    assert [*ages] == [*batch.groups]
    found = [step - 1 - drawn_by[0][0] for drawn_by in batch.graded.drawn_by]
    assert sum(map(sorted, ages.values()), []) == sum(map(sorted, np.reshape(found, (-1, spec.n)).tolist()), [])
    for name in ('tokens', 'prompts', 'recomputed', 'dispatches', 'decode_steps', 'row_steps', 'live_row_steps'):
      assert getattr(simulated.stats, name) == getattr(batch.graded.sampling, name), (step, name)
    if spec.held_out and not step % spec.test_freq:
      simulated.evaluate(step)


@contextlib.contextmanager
def made_up_model(spec: SamplingSpec):
  """Put arithmetic in place of a model's functions, and made-up prompts in place of a tokenizer's."""

  def prompt(tokenizer, example: Example, _) -> list[int]:
    return prompt_of(spec, int(example.id) * spec.n, spec.n)

  with pytest.MonkeyPatch.context() as patched:
    patched.setattr(sampler, 'sampler_functions', lambda device, *_: device)
    for module in (ahead, carry_over):
      patched.setattr(module, 'prompt_tokens', prompt)
    yield


# Group 1 waits in part while question 1 of an evaluation is asked.
SAME_NUMBERS = Case(
  SamplingSpec(
    shards=1,
    max_rows=2,
    widths=(8,),
    room=1,
    chunk=1,
    keeps_size=False,
    questions=1,
    n=3,
    max_staleness=1,
    keeps_carried=False,
    held_out=3,
    held_out_n=1,
    test_freq=1,
    prompts=(4, 7, 2, 4, 3),
    completions=(1, 1),
    steps=1,
  ),
  steps=2,
  kills=(),
  evaluated_first=False,
)


@hypothesis.settings(max_examples=100, deadline=None, derandomize=True)
@hypothesis.given(case=cases())
@hypothesis.example(case=SAME_NUMBERS)
def test_samples_are_drawn_once_and_killed_runs_go_on(case):
  """Whatever the lengths, the sizes, the evaluations and the kills; and the planner foresees it."""
  with made_up_model(case.sampling):
    batches, evaluations, last = whole_run(case, ())
    check_batches(case, batches)
    check_order(case, batches)
    check_evaluations(case, evaluations)
    check_simulation(case, batches)
    # Nothing is under way, so that another evaluation after the last step changes nothing that is saved.
    assert not decoded(last[WAITING][0])['clock']
    if case.kills:
      others, again, other_last = whole_run(case, case.kills)
      for one, other in zip(batches, others, strict=True):
        assert (one.groups, one.graded.drawn_by) == (other.groups, other.graded.drawn_by)
        same(one.graded.rollouts, other.graded.rollouts)
      assert evaluations.keys() == again.keys()
      for step, rollouts in evaluations.items():
        same(rollouts, again[step])
      assert last[WAITING] == other_last[WAITING] and last['iterator'] == other_last['iterator']
      jax.tree.map(np.testing.assert_array_equal, last.get(ARRAYS), other_last.get(ARRAYS))
