"""Groups of completions under way across steps (`rollout.max_staleness`): who gets a slot, and who is learned from.

Samples that a step leaves unfinished go on in the next one, under the weights after the update; their keys and values
are computed again, or kept (`rollout.carried_cache`). The clock is the number of decode steps of the run, the same on
all processes and in every attempt: no order depends on seconds, nor on graders. Evaluations decode in the same slots.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
import dataclasses
from typing import Any, Unpack

import numpy as np

from sdpo_jax import liveness
from sdpo_jax.config import Config
from sdpo_jax.data import pipeline
from sdpo_jax.data.prompts import prompt_tokens
from sdpo_jax.distributed import mesh as meshes
from sdpo_jax.distributed.stopping import Stop
from sdpo_jax.environments.grading import Graders
from sdpo_jax.errors import UserError
from sdpo_jax.models.cache import KVCache
from sdpo_jax.rollout.functions import cache_shardings
from sdpo_jax.rollout.grading_thread import GradingThread
from sdpo_jax.rollout.queue import Queue, Samples
from sdpo_jax.rollout.results import Completion, SamplingStats
from sdpo_jax.rollout.sampler import SamplingOptions, request_rollouts, rollouts_of
from sdpo_jax.rollout.slots import RECORDS, Carried, Finished, Slots
from sdpo_jax.training.ahead import WAITING, Ahead, SampledBatch, decoded, encoded
from sdpo_jax.training.checkpoint.checkpoints import ARRAYS
from sdpo_jax.training.graded import GradedRollouts
from sdpo_jax.training.joint_errors import JointErrors
from sdpo_jax.training.session import Session
from sdpo_jax.training.specs import declared_buckets, prompt_spec
from sdpo_jax.training.step import Timer, graded_batch
from sdpo_jax.types import Example, Outcome, Rollouts, TrainState, Tree

EVALUATION = 'evaluation'
LATER = Outcome.ungraded('it is graded when it is learned from')


@dataclasses.dataclass(frozen=True)
class OpenSample:
  """A sample of an open group, as far as it has been drawn."""

  completion: Completion  # Without text until it is done.
  drawn_by: tuple[tuple[int, int], ...] = ()  # (step after which the weights drew them, number of tokens), in order.
  slot: tuple[int, int] | None = None  # Its shard and slot in it; None: it waits for one, or is done.
  done: bool = False


@dataclasses.dataclass(eq=False)
class OpenGroup:
  """The samples of a question that were admitted but not learned from."""

  number: int  # Of the question in the run, from 0.
  example: Example
  request: Samples
  samples: list[OpenSample]
  begun: int  # The step after which the weights drew its first token.
  last: int = 0  # Decode steps of the run at which the last of its done samples ended.

  @property
  def complete(self) -> bool:
    """Whether all samples are done."""
    return all(sample.done for sample in self.samples)


def new_group(number: int, example: Example, request: Samples, begun: int) -> OpenGroup:
  """Return a group of which nothing has been drawn; see `OpenGroup`."""
  empty = np.zeros(0, np.float32)
  nothing = Completion(0, np.zeros(0, np.int32), empty, empty, empty, stopped=False, text='')
  first = number * len(request)
  samples = [OpenSample(dataclasses.replace(nothing, sample=first + index)) for index in range(len(request))]
  return OpenGroup(number, example, request, samples, begun)


@dataclasses.dataclass(frozen=True)
class OpenGroups:
  """The open groups after a step, for its checkpoint."""

  step: int
  admitted: int  # Groups so far.
  clock: int  # Decode steps so far.
  groups: tuple[OpenGroup, ...]
  room: int  # Longest completion.
  mesh: Mapping[str, int]  # Sizes of its axes; slots are numbered in its shards.

  def to_json(self) -> str:
    """Return the groups as text for `CarryOver.restore`, without questions and outcomes."""
    saved = {
      'step': self.step,
      'admitted': self.admitted,
      'clock': self.clock,
      'mesh': dict(self.mesh),
      'groups': [group.number for group in self.groups],
      'begun': [group.begun for group in self.groups],
      'last': [group.last for group in self.groups],
      'slot': [sample.slot for group in self.groups for sample in group.samples],
      'done': [sample.done for group in self.groups for sample in group.samples],
    }
    if self.groups:
      rollouts = rollouts_of_groups(self.groups, self.room)
      graded = GradedRollouts(
        [group.example for group in self.groups],
        [group.request.prompt.tolist() for group in self.groups],
        rollouts,
        [LATER] * len(rollouts),
        np.arange(len(rollouts)),
        0.0,
        drawn_by=[sample.drawn_by for group in self.groups for sample in group.samples],
      )
      saved['batch'] = SampledBatch(self.step, self.step, {}, graded, tuple(saved['groups'])).to_json()
    return encoded(saved)


def rollouts_of_groups(groups: Sequence[OpenGroup], room: int) -> Rollouts:
  """Return the samples of groups, in order, as far as they have been drawn."""
  completions = [sample.completion for group in groups for sample in group.samples]
  rows = np.repeat(np.arange(len(groups), dtype=np.int32), len(completions) // len(groups))
  prompts, width = [group.request.prompt for group in groups], max(group.request.width for group in groups)
  return rollouts_of(completions, rows, prompts, width, room)


def learned_next(groups: Sequence[OpenGroup], step: int, most: int, count: int) -> list[OpenGroup] | None:
  """Return the `count` groups that the update of `step` learns from; None: it must wait for one of them.

  A group is due `most` updates after the one before its first token. Groups that are due come first, and, of those that
  are due later, as many as must be learned from now so that all can be in time; then the earliest complete ones.

  Args:
    groups: the open groups, no more than (`most` + 1) · `count`.
    step: number of the step.
    most: `rollout.max_staleness`.
    count: groups of a batch.
  """
  complete = sorted((group for group in groups if group.complete), key=lambda group: (group.last, group.number))
  chosen: set[OpenGroup] = set()
  for later in range(most + 1):  # Batches between this one and the last in time; in that, all of them are due.
    due = {group for group in groups if group.begun + 1 + most <= step + later}
    missing = len(due) - later * count if later < most else count
    ready = [group for group in complete if group in due and group not in chosen]
    chosen |= set(ready[: max(missing - len(chosen), 0)])
    if missing > len(chosen):
      return None
  return sorted(chosen, key=lambda group: group.number)


def most_samples(config: Config, evaluated: int) -> int:
  """Return the largest number of samples at once, if an evaluation has `evaluated`."""
  return max((config.rollout.max_staleness + 1) * config.data.train_batch_size * config.rollout.n, evaluated)


def abstract_parked(session: Session, evaluated: int) -> KVCache | None:
  """Return the arrays that checkpoints hold of samples under way, with shardings; None: they hold none."""
  rollout = session.config.rollout
  if not (rollout.max_staleness and rollout.carried_cache == 'kept'):
    return None
  parked = session.sampler.parked(most_samples(session.config, evaluated))
  return meshes.abstract(parked, cache_shardings(session.mesh, parked))


@dataclasses.dataclass(frozen=True)
class OtherRequest:
  """Samples that are drawn beside those of open groups."""

  samples: frozenset[Samples]
  left: set[int]  # Numbers of those that are not done.
  on_finished: Callable[[Completion], None]


class CarryOver(Ahead):
  """The open groups of a run, in place of the batches sampled ahead; one batch is drawn in each step."""

  def __init__(
    self,
    session: Session,
    graders: Graders,
    iterator: pipeline.TrainIterator,
    seed: int,
    stop: Stop,
    evaluated: int,
  ):
    """Begin without a group.

    Args:
      session: session of the run.
      graders: graders of the run.
      iterator: iterator over the questions.
      seed: seed of the sampling noise.
      stop: whether the run is to stop.
      evaluated: number of samples of an evaluation.
    """
    super().__init__(session.config, iterator, session.tokenizer)
    self._session, self._graders, self._seed, self._stop = session, graders, seed, stop
    self._count = session.config.data.train_batch_size  # Groups of a batch.
    self._most = (session.config.rollout.max_staleness + 1) * self._count  # Open groups at once.
    self._rows = most_samples(session.config, evaluated)
    self._room = declared_buckets(session.config).response[-1]
    self._step = self._admitted = self._clock = 0  # As in `OpenGroups`.
    self._after = 0  # The step after which the weights are that draw now.
    self._groups: dict[int, OpenGroup] = {}  # By number.
    self._asked: list[Example] = []  # The newest batch of questions.
    self._positions: dict[int, Mapping[str, Any]] = {}  # The iterator's before each batch of questions in use.
    self._examples: dict[int, Example] = {}  # Of open groups and of those that are being learned from.
    self._grading: GradingThread | None = None  # It outlives a step.
    self._busy_s = 0.0
    self._errors = JointErrors()
    self._held = self._snapshot()

  def draw(self, state: TrainState, step: int, timer: Timer) -> SampledBatch:
    """Sample until the batch of `step` is complete, and return it, graded.

    Args:
      state: state before the update.
      step: number of the step.
      timer: timer of the phases.

    Raises:
      UserError: a question cannot be made, or the batch cannot be graded; what was saved before is intact.
      StoppedError: the run was told to stop; likewise.
    """
    config, self._step, self._after = self._config, step, step - 1
    stats, chosen = SamplingStats(), self._next_batch()
    if chosen is None:  # Else it was completed beside an evaluation, or with an earlier batch.
      _, base, trainable = self._session.writer(state.trainable)
      with timer('sample'):
        slots = self._slots(base, trainable)
        self._resume(slots)
        self._turns(slots, lambda: self._next_batch() is not None, self._stop.check)
        stats, chosen = slots.stats, self._next_batch()
    with timer('grade'):
      grading = self._open_grading()
      outcomes = grading.outcomes([sample.completion.sample for group in chosen for sample in group.samples])
    busy_s, self._busy_s = grading.busy_s - self._busy_s, grading.busy_s
    graded = graded_batch(
      config,
      [group.example for group in chosen],
      [group.request.prompt.tolist() for group in chosen],
      rollouts_of_groups(chosen, self._room),
      outcomes,
      busy_s,
      stats,
      [sample.drawn_by for group in chosen for sample in group.samples],
    )
    numbers = tuple(group.number for group in chosen)
    for number in numbers:
      del self._groups[number], self._examples[number]
    batch = SampledBatch(step, step, self._positions[min(numbers) // self._count], graded, numbers)
    self._held = self._snapshot()
    return batch

  def sample(
    self,
    base: Tree,
    trainable: Tree,
    prompt_token_ids: Sequence[Sequence[int]],
    *,
    on_finished: Callable[[Completion], None],
    between: Callable[[], None],
    **options: Unpack[SamplingOptions],
  ) -> Rollouts:
    """Sample for an evaluation after the last step, while open groups fill the slots that it leaves free.

    Arguments, result and errors are those of `Sampler.sample`; the result is the same, too.
    """
    self._after = self._step
    request = self._session.sampler.request(prompt_token_ids, **options)
    asked = [dataclasses.replace(each, prefix=(EVALUATION, each.prefix)) for each in request.samples]
    completions: list[Completion] = []

    def hear(completion: Completion) -> None:
      completions.append(completion)
      on_finished(completion)

    other = OtherRequest(frozenset(asked), set(range(len(asked) * request.n)), hear)
    slots = self._slots(base, trainable)
    for each in sorted(asked, key=lambda samples: samples.width):
      slots.queue.add(each)
    self._resume(slots)
    self._turns(slots, lambda: not other.left, between, other)
    self._held = self._snapshot()
    return request_rollouts(request, completions)

  def _slots(self, base: Tree, trainable: Tree) -> Slots:
    sampler = self._session.sampler
    return sampler.open_slots(sampler.prepare(base, trainable), Queue, sampler.stop_ids, most=self._rows)

  def _turns(
    self,
    slots: Slots,
    enough: Callable[[], bool],
    between: Callable[[], None],
    other: OtherRequest | None = None,
  ) -> None:
    """Draw samples until `enough` returns True, and note what is drawn of those of open groups.

    Args:
      slots: open slots.
      enough: called after every few decode steps.
      between: called before them; an exception ends the work.
      other: samples that are of no group.
    """
    ended: list[Finished] = []
    while not enough():
      self._admit(slots)
      between()
      slots.admit()
      drawn = slots.advance()
      # The device works while these are decoded to text and handed to graders.
      self._finish(ended, other)
      clock = self._clock + slots.stats.decode_steps
      ended = self._session.sampler.collect(slots, drawn)
      liveness.progress()
      for done in ended:
        if other is not None and done.samples in other.samples:
          other.left.remove(done.number)
        else:
          self._note(done, clock)
    self._finish(ended, other)
    for each in slots.carried():
      self._put(each, slot=(each.shard, each.slot))
    if self._config.rollout.carried_cache == 'kept':
      self.parked = slots.parked()
    self._clock += slots.stats.decode_steps

  def _next_batch(self) -> list[OpenGroup] | None:
    most = self._config.rollout.max_staleness
    return learned_next([*self._groups.values()], self._step, most, self._count)

  def _may_open(self) -> bool:
    """Return whether another group may be admitted."""
    total = self._config.trainer.total_training_steps * self._count
    return len(self._groups) < self._most and self._admitted < total

  def _request(self, number: int, prompt: Sequence[int]) -> Samples:
    """Return the request for the samples of a group, whose noise is that of the batch of questions that it is in."""
    config, (batch, index) = self._config, divmod(number, self._count)
    [samples] = self._session.sampler.request(
      [prompt],
      n=config.rollout.n,
      **config.rollout.method(),
      max_tokens=config.data.max_response_length,
      seed=self._seed,
      step=batch + 1,
    ).samples
    return dataclasses.replace(samples, first=index * config.rollout.n, prefix=number)

  def _admit(self, slots: Slots) -> None:
    """Open groups for the free slots."""
    while slots.queue.left < slots.free and self._may_open():
      batch, index = divmod(self._admitted, self._count)
      if not index:
        with self._errors.alone():
          self._positions[batch], self._asked = self.ask()
        self._errors.meet(f'the questions of batch {batch + 1}')
      self._add(self._admitted, self._asked[index], begun=self._after)
      slots.queue.add(self._groups[self._admitted].request)
      self._admitted += 1
    slots.closed = not self._may_open()

  def _add(self, number: int, example: Example, begun: int) -> None:
    prompt = prompt_tokens(self._tokenizer, example, prompt_spec(self._config))
    self._groups[number] = new_group(number, example, self._request(number, prompt), begun)
    self._examples[number] = example

  def _resume(self, slots: Slots) -> None:
    """Give the samples of open groups their slots, and let the others wait."""
    carried = []
    for group in self._groups.values():
      first, waiting = group.request.first, []
      for index, sample in enumerate(group.samples):
        drawn = sample.completion
        if sample.slot is not None:
          records = {name: getattr(drawn, name) for name in RECORDS}
          carried.append(Carried(group.request, first + index, *sample.slot, drawn.tokens, records))
        elif not sample.done:
          waiting.append(index)
      for part in group.request.parts(waiting):
        slots.queue.add(part)
    slots.resume(carried, self.parked)

  def _at(self, drawn: Carried | Finished) -> tuple[OpenGroup, int]:
    """Return the group of a sample, and its index in it."""
    number, index = divmod(drawn.number, self._config.rollout.n)
    return self._groups[(drawn.samples.step - 1) * self._count + number], index

  def _put(self, drawn: Carried | Finished, **fields: Any) -> OpenGroup:
    """Note what the weights of now have drawn of a sample; return its group."""
    group, index = self._at(drawn)
    sample = group.samples[index]
    counts = dict(sample.drawn_by)
    if more := len(drawn.tokens) - sum(counts.values()):
      counts[self._after] = counts.get(self._after, 0) + more
    completion = dataclasses.replace(sample.completion, tokens=drawn.tokens, **drawn.records)
    drawn_by = tuple(counts.items())
    group.samples[index] = OpenSample(completion, drawn_by, **fields)
    return group

  def _note(self, done: Finished, clock: int) -> None:
    """Note that a sample is done, after some decode steps that began at `clock`."""
    group = self._put(done, done=True)
    group.last = max(group.last, clock + done.new)

  def _finish(self, ended: Sequence[Finished], other: OtherRequest | None) -> None:
    """Decode samples that are done to text, and hand them to graders."""
    grading = self._open_grading()
    for done in ended:
      completion = done.completion(self._tokenizer)
      if other is not None and done.samples in other.samples:
        other.on_finished(completion)
        continue
      group, index = self._at(done)
      completion = dataclasses.replace(completion, sample=group.samples[index].completion.sample)
      group.samples[index] = dataclasses.replace(group.samples[index], completion=completion)
      grading.add(completion)

  def _open_grading(self) -> GradingThread:
    if self._grading is None:
      self._grading = GradingThread(self._graders, self._examples, self._config.rollout.n, self._stop)
      self._grading.__enter__()
      self._busy_s = 0.0
      for group in self._groups.values():  # Those of a run that is resumed.
        for sample in filter(lambda sample: sample.done, group.samples):
          self._grading.add(sample.completion)
    return self._grading

  def close(self) -> None:
    """Give up the completions that are being graded."""
    if self._grading is not None:
      self._grading.__exit__()
      self._grading = None

  # ———— Checkpoints and rollbacks ————

  def _snapshot(self) -> tuple[Mapping[str, Any], tuple[OpenGroups, ...]]:
    oldest = min([*self._groups, self._admitted]) // self._count
    self._positions = {batch: position for batch, position in self._positions.items() if batch >= oldest}
    position = self._positions[oldest] if oldest in self._positions else self._iterator.get_state()
    groups = tuple(dataclasses.replace(group, samples=list(group.samples)) for group in self._groups.values())
    mesh = self._session.mesh.shape
    if not groups:  # It orders open groups only: an evaluation that is repeated after the last step changes nothing.
      self._clock = 0
    return position, (OpenGroups(self._step, self._admitted, self._clock, groups, self._room, mesh),)

  def saved(self) -> tuple[Mapping[str, Any], tuple[OpenGroups, ...]]:
    """Return the iterator's position before the first open group, and the open groups after the last step."""
    return self._held

  def ask_again(self) -> None:
    """Drop what was drawn of the open groups, so that it is drawn again."""
    self.close()
    for number, group in self._groups.items():
      self._groups[number] = new_group(number, group.example, group.request, begun=self._step)
    self._held = self._snapshot()

  def _read(self, numbers: Sequence[int], end: int) -> list[Example]:
    """Read the questions of some numbers, and those up to number `end`; the iterator is before the first of them."""
    found: dict[int, Example] = {}
    for batch in range(min([*numbers, end]) // self._count, -(-end // self._count)):
      self._positions[batch], self._asked = self.ask()
      found |= {batch * self._count + index: example for index, example in enumerate(self._asked)}
    return [found[number] for number in numbers]

  def read(self, text: str) -> SampledBatch | None:
    """As in `Ahead`."""
    numbers = decoded(text)['groups']
    position, examples = self._iterator.get_state(), self._read(numbers, max(numbers) + 1)
    prompts = [prompt_tokens(self._tokenizer, example, prompt_spec(self._config)) for example in examples]
    return SampledBatch.from_json(text, position, examples, prompts)

  def restore(self, host: Mapping[str, Any], *, other_rows: bool) -> str | None:
    """Restore the open groups from a checkpoint; arguments and result as in `Ahead`.

    Raises:
      UserError: they have slots in the shards of another mesh.
    """
    self.seek(host['iterator'], other_rows=other_rows)
    saved, mesh = decoded(host[WAITING][0]), dict(self._session.mesh.shape)
    if saved['mesh'] != mesh:
      raise UserError(
        f'The checkpoint has samples under way in the slots of a mesh {saved["mesh"]}, and the mesh is now {mesh}: '
        'with rollout.max_staleness a run resumes on as many devices, with the same settings of mesh.'
      )
    self._step, self._admitted, self._clock = (saved[name] for name in ('step', 'admitted', 'clock'))
    numbers, self.parked = saved['groups'], host.get(ARRAYS)
    examples = self._read(numbers, self._admitted)
    for number, example, begun in zip(numbers, examples, saved['begun'], strict=True):
      self._add(number, example, begun)
    groups, lost = [*self._groups.values()], None
    if groups:
      prompts = [group.request.prompt.tolist() for group in groups]
      batch = SampledBatch.from_json(saved['batch'], {}, examples, prompts)
      if batch is None:
        self.ask_again()
        lost = 'The questions of completions under way have changed; the completions are sampled again.'
      else:
        self._recall(groups, saved, batch.graded)
    self._held = self._snapshot()
    return lost

  def _recall(self, groups: Sequence[OpenGroup], saved: Mapping[str, Any], drawn: GradedRollouts) -> None:
    """Restore what was drawn of groups."""
    rollouts, lengths = drawn.rollouts, drawn.rollouts.completion_mask.sum(1)
    row = 0
    for group, group.last in zip(groups, saved['last'], strict=True):
      for index, sample in enumerate(group.samples):
        part = row, slice(lengths[row])
        completion = dataclasses.replace(
          sample.completion,
          tokens=rollouts.completion_tokens[part],
          **{name: getattr(rollouts, name)[part] for name in RECORDS},
          stopped=rollouts.finish_reason[row] == 'stop',
          text=rollouts.text[row],
        )
        slot = saved['slot'][row]
        if slot is not None:  # Evaluations may have become smaller, and with them the slots.
          self._rows = max(self._rows, (slot[1] + 1) * self._session.mesh.shape[meshes.FSDP])
        group.samples[index] = OpenSample(completion, drawn.drawn_by[row], slot and tuple(slot), saved['done'][row])
        row += 1
