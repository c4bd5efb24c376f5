"""The host side of sampling: padding to buckets, splitting into calls, stop strings, text."""

from __future__ import annotations

from collections.abc import Sequence
import dataclasses
import math
from typing import Any

import jax
import numpy as np

from models.policy import Policy
from sdpo_jax.errors import UserError
from sdpo_jax.rollout import decode
from sdpo_jax.rollout.programs import Programs, programs
from sdpo_jax.rollout.sampling import SamplingParams
from sdpo_jax.rollout.stops import StopStrings, Tokenizer, to_text
from sdpo_jax.types import Rollouts

Tree = Any
PerSample = float | Sequence[float] | np.ndarray  # One value for all, or [N].
SMALLEST_BUCKET = 16
SMALLEST_STAGE = 64


def buckets(declared: Sequence[int], limit: int | None) -> tuple[int, ...]:
  """The lengths to pad to, ascending: the declared ones, else powers of two, up to `limit` (which is one of them).

  Empty when nothing is declared and there is no limit: any power of two.
  """
  if limit is None:
    return tuple(sorted(set(declared)))
  if not declared:
    declared = [2**i for i in range(SMALLEST_BUCKET.bit_length() - 1, limit.bit_length())]
  return tuple(sorted({length for length in declared if length < limit} | {limit}))


def pick(lengths: tuple[int, ...], length: int) -> int | None:
  """The smallest of the bucket `lengths` that holds `length`, None if none does; powers of two when empty."""
  if not lengths:
    return max(SMALLEST_BUCKET, 1 << (length - 1).bit_length())
  return next((bucket for bucket in lengths if bucket >= length), None)


def stages(room: int) -> tuple[int, ...]:
  """The completion lengths for which room is made in the cache, one after the other: a quarter, half, all of `room`.

  A decode step attends to all slots that there are. Each stage compiles a program, for which short ones are too short.
  """
  return tuple(length for length in (room // 4, room // 2) if length >= SMALLEST_STAGE) + (room,)


@dataclasses.dataclass(frozen=True)
class Shapes:
  """What makes the compiled programs of a call (one prefill, one advance a stage) differ from those of another."""

  prompts: int
  n: int  # Completions of each prompt.
  prompt_length: int
  max_new_tokens: int


class Sampler:
  """Samples completions of prompts in calls of bounded size.

  What is sampled depends on the prompt, the settings, the seed, the step and the number of the sample, not on buckets,
  batch sizes or other rows (up to the rounding of the model's own matrix products).
  """

  def __init__(
    self,
    policy: Policy,
    tokenizer: Tokenizer,
    *,
    prompt_buckets: Sequence[int] = (),
    response_buckets: Sequence[int] = (),
    max_batch_rows: int = 256,
    stop: Sequence[str] = (),
    stop_token_ids: Sequence[int] = (),
    mesh: jax.sharding.Mesh | None = None,
    max_prompt_length: int | None = None,
    max_response_length: int | None = None,
    stop_check_interval: int = 32,
  ):
    """A sampler of `policy`.

    Args:
      policy: the language model.
      tokenizer: a transformers tokenizer, for text and stop strings.
      prompt_buckets: lengths to which prompts are padded; empty: powers of two up to the limit.
      response_buckets: the same for completions; the smallest that holds the largest max_tokens of a call is used.
      max_batch_rows: completions decoded at once.
      stop: strings that end a completion. The token that completes one is the completion's last.
      stop_token_ids: tokens that end a completion, and are part of it.
      mesh: rows are spread over its devices; None: the default device.
      max_prompt_length: limit of prompts; None: the largest bucket.
      max_response_length: limit of max_tokens; None: the largest bucket.
      stop_check_interval: tokens drawn between two looks for stop strings. Changes no sample.

    Raises:
      UserError: an empty stop string.
    """
    if any(not text for text in stop):
      raise UserError('rollout.stop holds an empty string, which would end every completion at once: remove it.')
    self._tokenizer = tokenizer
    self._prompt_buckets = buckets(prompt_buckets, max_prompt_length)
    self._response_buckets = buckets(response_buckets, max_response_length)
    self._max_batch_rows = max_batch_rows
    self._stops = StopStrings(tokenizer, stop)
    self._stop_ids = np.asarray(sorted(set(stop_token_ids)) or [-1], np.int32)
    self._programs: Programs = programs(policy, mesh)
    self._interval = stop_check_interval
    self.shapes: set[Shapes] = set()  # Used so far.

  def sample(
    self,
    base: Tree,
    trainable: Tree,
    prompt_token_ids: Sequence[Sequence[int]],
    *,
    n: int,
    seed: int,
    step: int,
    max_tokens: PerSample,
    temperature: PerSample = 1.0,
    top_p: PerSample = 1.0,
    top_k: PerSample = -1,
    min_p: PerSample = 0.0,
  ) -> Rollouts:
    """`n` completions of each prompt.

    Args:
      base: frozen parameters.
      trainable: trainable parameters.
      prompt_token_ids: token ids of each prompt, at least one.
      n: completions a prompt.
      seed: of the noise; with it go the step and each sample's number (prompt · n + completion).
      step: number of the generation batch.
      max_tokens: tokens of a completion at most; like the following, one value or one for each of N samples.
      temperature: 0 is greedy.
      top_p: 1 keeps all.
      top_k: -1 keeps all.
      min_p: 0 keeps all.

    Returns:
      N = len(prompt_token_ids) · n rollouts, the n of a prompt next to each other.

    Raises:
      UserError: a prompt that is empty or over its limit, or max_tokens over its limit or below 1.
    """
    lengths = np.asarray([len(tokens) for tokens in prompt_token_ids], np.int32)
    widths = self._check_prompts(lengths)
    total = len(lengths) * n
    per_sample = lambda value, dtype: np.broadcast_to(np.asarray(value, dtype), (total,))
    knobs = dict(
      temperature=per_sample(temperature, np.float32),
      top_p=per_sample(top_p, np.float32),
      top_k=per_sample(top_k, np.int32),
      min_p=per_sample(min_p, np.float32),
      max_tokens=per_sample(max_tokens, np.int32),
    )
    room = self._check_max_tokens(knobs['max_tokens'])
    prompts = np.zeros((len(lengths), max(widths)), np.int32)
    for row, tokens in zip(prompts, prompt_token_ids, strict=True):
      row[: len(tokens)] = tokens
    completions = {
      'tokens': np.zeros((total, room), np.int32),
      'mask': np.zeros((total, room), bool),
      'sampling_log_probs': np.zeros((total, room), np.float32),
      'model_log_probs': np.zeros((total, room), np.float32),
      'entropy': np.zeros((total, room), np.float32),
      'stopped': np.zeros(total, bool),
    }
    parameters = self._programs.prepare(base, trainable)
    groups, repeats = self.call_shape(len(lengths), n)
    units = _units(widths, n, repeats)
    for first in range(0, len(units), groups):
      chunk = units[first : first + groups]
      samples = np.full((groups, repeats), -1, np.int32)
      chosen = np.zeros((groups, max(widths[prompt] for prompt, _ in chunk)), np.int32)
      chosen_lengths = np.ones(groups, np.int32)
      for row, (prompt, start) in enumerate(chunk):
        count = min(repeats, n - start)
        samples[row, :count] = prompt * n + start + np.arange(count, dtype=np.int32)
        chosen[row] = prompts[prompt, : chosen.shape[1]]
        chosen_lengths[row] = lengths[prompt]
      ids = samples.reshape(-1)
      params = self._params(ids, knobs, seed, step)
      done = self._call(parameters, chosen, chosen_lengths, params, repeats, room)
      real = ids >= 0
      for name, target in completions.items():
        target[ids[real]] = getattr(done, name)[real]
    return self._rollouts(prompts, lengths, n, completions)

  def call_shape(self, prompts: int, n: int) -> tuple[int, int]:
    """(prompts a call, completions of a prompt in a call) when `prompts` prompts get `n` completions each."""
    return call_shape(prompts, n, self._max_batch_rows, self._programs.shards)

  def _check_prompts(self, lengths: np.ndarray) -> list[int]:
    """The bucket of each prompt."""
    if not len(lengths):
      raise UserError('There is no prompt to sample from: check that data.train_files / data.val_files hold rows.')
    widths = []
    for row, length in enumerate(lengths.tolist()):
      if not length:
        raise UserError(f'Prompt {row} of the batch is empty: every prompt needs at least one token.')
      width = pick(self._prompt_buckets, length)
      if width is None:
        raise UserError(
          f'Prompt {row} of the batch has {length} tokens, more than data.max_prompt_length='
          f'{self._prompt_buckets[-1]}: raise that setting (and data.prompt_buckets where declared), or set '
          'data.filter_overlong_prompts=True to leave such rows out.'
        )
      widths.append(width)
    return widths

  def _check_max_tokens(self, max_tokens: np.ndarray) -> int:
    """The bucket of the completions."""
    if int(max_tokens.min()) < 1:
      raise UserError(f'max_tokens must be at least 1, not {int(max_tokens.min())}.')
    most = int(max_tokens.max())
    room = pick(self._response_buckets, most)
    if room is None:
      raise UserError(
        f'max_tokens={most} is more than data.max_response_length={self._response_buckets[-1]}: raise that setting '
        '(and data.response_buckets where declared), or ask for fewer tokens.'
      )
    return room

  def _params(self, ids: np.ndarray, knobs: dict[str, np.ndarray], seed: int, step: int) -> SamplingParams:
    """Of the samples `ids` [B]; -1 is a row of padding, which is done before it begins."""
    at = np.maximum(ids, 0)
    rows = {name: values[at] for name, values in knobs.items()}
    rows['max_tokens'] = np.where(ids >= 0, rows['max_tokens'], 0).astype(np.int32)
    return SamplingParams(
      **rows,
      seed=np.full(len(ids), seed % 2**32, np.uint32),
      sample_id=ids,
      step=np.int32(step),
      stop_ids=np.broadcast_to(self._stop_ids, (len(ids), len(self._stop_ids))),
    )

  def _call(
    self,
    parameters: tuple[Tree, Tree],
    prompts: np.ndarray,
    lengths: np.ndarray,
    params: SamplingParams,
    repeats: int,
    room: int,
  ) -> decode.DecodeResult:
    """One batch, from prompts [G, P] to completions [G · repeats, room] as host arrays."""
    run, width = self._programs, prompts.shape[1]
    self.shapes.add(Shapes(len(prompts), repeats, width, room))
    prompts, lengths, params = run.put((prompts, lengths, params))
    checked, slots = 0, (width,)
    for stage in stages(room):
      slots = (*slots, width + stage)
      if checked == 0:
        state = run.prefill(*parameters, prompts, lengths, params, n=repeats, max_new_tokens=room, slots=stage)
      else:
        state = run.grow(state, n=repeats, slots=slots)
      step = self._interval if self._stops else stage
      for limit in (*range(checked + step, stage, step), stage):
        state = run.advance(*parameters, params, state, np.int32(limit))
        if self._stops:
          state = self._apply_stops(state, checked)
        checked = limit
        if limit == room or run.fetch(state.done).all():
          return run.fetch(run.result(state))
    raise AssertionError('The last stage ends with the room.')

  def _apply_stops(self, state: decode.DecodeState, checked: int) -> decode.DecodeState:
    """The state with the rows ended in whose text a stop string has appeared.

    Rows that run on are looked at by their tail beyond `checked` tokens; every row gets a look at its whole text when
    it is done, which alone decides where it ends, so that the interval between looks changes nothing.
    """
    tokens, length, stopped, done = self._programs.fetch((state.tokens, state.length, state.stopped, state.done))
    length, stopped, ended = length.copy(), stopped.copy(), done.copy()
    for row in np.flatnonzero(length > checked):
      drawn = tokens[: length[row], row].tolist()
      if not done[row] and not self._stops.may_end(drawn, checked):
        continue
      end = self._stops.find(drawn)
      if end is not None:
        length[row], stopped[row], ended[row] = end, True, True
    new = self._programs.put(dict(length=length, stopped=stopped, done=ended))
    return state.replace(**new)

  def _rollouts(self, prompts: np.ndarray, lengths: np.ndarray, n: int, completions: dict[str, np.ndarray]) -> Rollouts:
    group = np.repeat(np.arange(len(lengths), dtype=np.int32), n)
    mask = completions['mask']
    return Rollouts(
      group=group,
      prompt_tokens=prompts[group],
      prompt_mask=(np.arange(prompts.shape[1])[None] < lengths[:, None])[group],
      completion_tokens=completions['tokens'],
      completion_mask=mask,
      sampling_log_probs=completions['sampling_log_probs'],
      model_log_probs=completions['model_log_probs'],
      entropy=completions['entropy'],
      finish_reason=['stop' if stopped else 'length' for stopped in completions['stopped']],
      text=[
        to_text(self._tokenizer, row[kept].tolist()) for row, kept in zip(completions['tokens'], mask, strict=True)
      ],
    )


def call_shape(prompts: int, n: int, max_rows: int, shards: int) -> tuple[int, int]:
  """(prompts a call, completions of a prompt in a call), the same for all calls of a request.

  Calls are as few as `max_rows` allows and of equal size. A group is spread over several calls where it has more rows
  than that, or over several shards where there are fewer prompts than shards; what a call has too many are rows of
  padding, of which the shape with the fewest is taken.
  """
  best = None
  for pieces in range(math.ceil(n / max_rows), n + 1):
    repeats = math.ceil(n / pieces)
    units = prompts * math.ceil(n / repeats)
    most = max(max_rows // repeats // shards, 1) * shards
    calls = math.ceil(units / most)
    groups = math.ceil(units / calls / shards) * shards
    rows = calls * groups * repeats
    if best is None or rows < best[0]:
      best = rows, groups, repeats
    if shards == 1 or units >= shards and units % shards == 0:
      break
  return best[1], best[2]


def _units(widths: Sequence[int], n: int, repeats: int) -> list[tuple[int, int]]:
  """(prompt, first completion) of every piece of a group, prompts of the same bucket next to each other."""
  order = sorted(range(len(widths)), key=lambda prompt: widths[prompt])
  return [(prompt, start) for prompt in order for start in range(0, n, repeats)]
