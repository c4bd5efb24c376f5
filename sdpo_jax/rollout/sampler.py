"""The sampler: checks requests, pads them to buckets, applies stop strings, and decodes completions."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
import dataclasses
import functools
import math
from typing import Any, Required, TypedDict, Unpack

import jax
import numpy as np

from sdpo_jax import liveness
from sdpo_jax.errors import UserError
from sdpo_jax.models.cache import KVCache
from sdpo_jax.models.policy import NO_MEMBER, Policy
from sdpo_jax.rollout import decode
from sdpo_jax.rollout.buckets import padded, smallest_bucket
from sdpo_jax.rollout.functions import Keep, SamplerFunctions, sampler_functions
from sdpo_jax.rollout.queue import KNOBS, Queue, Samples
from sdpo_jax.rollout.results import Completion, Draft, SamplingStats
from sdpo_jax.rollout.sizes import SamplerSizes, shard_rows, sizes
from sdpo_jax.rollout.slots import RECORDS, Finished, Slots
from sdpo_jax.rollout.stops import StopStrings, Tokenizer
from sdpo_jax.rollout.weights import PreparedBase
from sdpo_jax.types import Rollouts, Tree

PerSample = float | Sequence[float] | np.ndarray  # One value for all, or [N].


class SamplingOptions(TypedDict, total=False):
  """How to sample from G prompts; a `PerSample` is one value or one for each of the N = G · n samples."""

  n: Required[int]  # Completions per prompt.
  seed: Required[int]  # Seed of the noise, together with step and each sample's number (prompt · n + completion).
  step: Required[int]  # Number of the generation batch, not of a decode step.
  max_tokens: Required[PerSample]  # Maximum number of tokens of a completion.
  temperature: PerSample  # 0 is greedy; default 1.
  top_p: PerSample  # 1, the default, keeps all.
  top_k: PerSample  # -1, the default, keeps all.
  min_p: PerSample  # 0, the default, keeps all.
  members: Sequence[Any] | np.ndarray | None  # Of each prompt, see `Policy.apply`; default: none.


@dataclasses.dataclass(frozen=True)
class Request:
  """A checked request for N = G · n samples of G prompts, in order."""

  samples: list[Samples]  # G.
  n: int
  room: int  # Maximum number of tokens of a completion.


class Sampler:
  """Samples completions of prompts in a bounded number of slots.

  A sample depends on the prompt, the settings, the seed, the step and the number of the sample, not on slots, buckets,
  the order in which samples are drawn or other rows (up to the rounding of the model's own matrix products). Frozen
  parameters are prepared once; the prepared copy lives as long as the sampler.
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
    decode_chunk: int = 32,
    quantized: bool = False,
    resized: bool = True,
    least: int | None = None,
    keep: Keep | None = None,
  ):
    """Make a sampler of `policy`.

    Args:
      policy: the language model.
      tokenizer: a transformers tokenizer, for text and stop strings.
      prompt_buckets: lengths to which prompts are padded, the largest of which is their limit; empty: powers of two.
      response_buckets: the same for completions; a request uses the smallest that holds its largest max_tokens.
      max_batch_rows: number of slots, i.e. of completions decoded at once.
      stop: strings that end a completion. The token that completes one is the completion's last.
      stop_token_ids: tokens that end a completion, and are part of it.
      mesh: rows are spread over its devices; None: the default device.
      decode_chunk: maximum number of tokens drawn in every row before the host reads them. Changes no sample.
      quantized: hold keys and values as int8, in about half the memory of bfloat16. Changes probabilities slightly.
      resized: let the cache grow and shrink with the live samples, where that pays; False: it always has its largest
        size and all of its rows, so that a bucket of prompts compiles once.
      least: make arrays at least as large as for a request of `least` samples from the largest prompt bucket, so that
        compiled programs depend on nothing else; None: as large as each request needs.
      keep: see `SamplerFunctions.kept`; None: JAX's own cache is used.

    Raises:
      UserError: a stop string is empty.
      ValueError: `least` is given without `prompt_buckets`.
    """
    if any(not text for text in stop):
      raise UserError('rollout.stop holds an empty string, which would end every completion at once: remove it.')
    self.tokenizer = tokenizer
    self._prompt_buckets = tuple(sorted(set(prompt_buckets)))
    self._response_buckets = tuple(sorted(set(response_buckets)))
    self._max_batch_rows = max_batch_rows
    self._stops = StopStrings(tokenizer, stop)
    self._stop_ids = np.asarray(sorted(set(stop_token_ids)) or [-1], np.int32)
    functions = sampler_functions(policy, mesh, quantized)
    self._functions: SamplerFunctions = functions if keep is None else functions.kept(keep)
    self._base = PreparedBase(self._functions.prepare_base)
    if least is not None and not self._prompt_buckets:
      raise ValueError('A sampler with `least` needs prompt_buckets.')
    self._chunk, self._resized, self._least = decode_chunk, resized, least
    self.stats = SamplingStats()  # Statistics of the last request.

  @property
  def stop_ids(self) -> int:
    """Number of token ids that end a completion."""
    return len(self._stop_ids)

  def members_of(self, adapter: int, cartridge: int) -> int | tuple[int, int]:
    """Return what `Samples.member` is for members of a pool, in which there may be no cartridges."""
    return adapter if self._functions.rows_alike is None else (adapter, cartridge)

  def sample(
    self,
    base: Tree,
    trainable: Tree,
    prompt_token_ids: Sequence[Sequence[int]],
    *,
    on_finished: Callable[[Completion], None] | None = None,
    between: Callable[[], None] = lambda: None,
    **options: Unpack[SamplingOptions],
  ) -> Rollouts:
    """Sample `n` completions of each prompt, in order.

    Args:
      base: frozen parameters.
      trainable: trainable parameters.
      prompt_token_ids: token ids of each prompt, at least one.
      on_finished: called with every completion when it is finished, while others are decoded.
      between: called before every `decode_chunk` tokens; an exception ends the request.
      **options: `SamplingOptions`.

    Returns:
      N = len(prompt_token_ids) · n rollouts, the n of a prompt next to each other.

    Raises:
      UserError: as in `stream`.
    """
    request = self.request(prompt_token_ids, **options)
    completions = []
    for done in self._stream(base, trainable, request, between):
      completions.append(done)
      if on_finished is not None:
        on_finished(done)
    return request_rollouts(request, completions)

  def stream(
    self,
    base: Tree,
    trainable: Tree,
    prompt_token_ids: Sequence[Sequence[int]],
    *,
    numbers: Sequence[int] | None = None,
    between: Callable[[], None] = lambda: None,
    drafts: bool = False,
    **options: Unpack[SamplingOptions],
  ) -> Iterator[Any]:
    """Return an iterator of completions as they finish; the next steps run while the caller handles one.

    Args:
      base: frozen parameters.
      trainable: trainable parameters.
      prompt_token_ids: token ids of each prompt, at least one.
      numbers: number of the first sample of each prompt, from which the others count on; None: 0, n, 2·n and so on.
      between: called before every `decode_chunk` tokens; an exception ends the request.
      drafts: whether a `Draft` of each unfinished sample is also yielded every `decode_chunk` tokens.
      **options: `SamplingOptions`.

    Returns:
      N = len(prompt_token_ids) · n completions, each once.

    Raises:
      UserError: a prompt is empty or too long, or max_tokens is above its limit or below 1.
    """
    request = self.request(prompt_token_ids, **options)
    if numbers is not None:
      pairs = zip(request.samples, numbers, strict=True)
      request = dataclasses.replace(request, samples=[dataclasses.replace(each, first=first) for each, first in pairs])
    return self._stream(base, trainable, request, between, drafts)

  def request(
    self,
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
    members: Sequence[Any] | np.ndarray | None = None,
  ) -> Request:
    """Return a checked request for samples of some prompts; arguments as in `sample`.

    Raises:
      UserError: as in `stream`.
    """
    knobs = dict(max_tokens=max_tokens, temperature=temperature, top_p=top_p, top_k=top_k, min_p=min_p)
    widths = self._check_prompts([len(tokens) for tokens in prompt_token_ids])
    shape = (len(widths) * n,)
    of_samples = {name: np.broadcast_to(np.asarray(value, KNOBS[name]), shape) for name, value in knobs.items()}
    room = self._check_max_tokens(of_samples['max_tokens'])
    samples = [
      Samples(
        prompt=np.asarray(tokens, np.int32),
        width=width,
        first=index * n,
        knobs={name: values[index * n : index * n + n] for name, values in of_samples.items()},
        stop_ids=self._stop_ids,
        seed=seed,
        step=step,
        prefix=index,
        member=NO_MEMBER if members is None else members[index],
      )
      for index, (tokens, width) in enumerate(zip(prompt_token_ids, widths, strict=True))
    ]
    return Request(samples, n, room)

  def _check_prompts(self, lengths: Sequence[int]) -> list[int]:
    """Return the bucket of each prompt; raises UserError for one that is empty or too long."""
    if not lengths:
      raise UserError('There is no prompt to sample from: check that data.train_files / data.val_files hold rows.')
    widths = []
    for index, length in enumerate(lengths):
      if not length:
        raise UserError(f'Prompt {index} of the batch is empty: every prompt needs at least one token.')
      width = smallest_bucket(self._prompt_buckets, length)
      if width is None:
        raise UserError(
          f'Prompt {index} of the batch has {length} tokens, more than data.max_prompt_length='
          f'{self._prompt_buckets[-1]}: raise that setting (and data.prompt_buckets where declared), or set '
          'data.filter_overlong_prompts=True to leave such rows out.'
        )
      widths.append(width)
    return widths

  def _check_max_tokens(self, max_tokens: np.ndarray) -> int:
    """Return the bucket of the completions; raises UserError if it is out of range."""
    if int(max_tokens.min()) < 1:
      raise UserError(f'max_tokens must be at least 1, not {int(max_tokens.min())}.')
    most = int(max_tokens.max())
    room = smallest_bucket(self._response_buckets, most)
    if room is None:
      raise UserError(
        f'max_tokens={most} is more than data.max_response_length={self._response_buckets[-1]}: raise that setting '
        '(and data.response_buckets where declared), or ask for fewer tokens.'
      )
    return room

  def _stream(
    self, base: Tree, trainable: Tree, request: Request, between: Callable[[], None], drafts: bool = False
  ) -> Iterator[Any]:
    """Yield completions as they finish and, with `drafts`, drafts of the others."""
    slots = Slots(
      self._functions,
      self.prepare(base, trainable),
      self._sizes(request),
      # Prompts of the same bucket are adjacent, so that they are prefilled together.
      Queue(self._functions.shards, sorted(request.samples, key=lambda samples: samples.width)),
      stop_ids=len(self._stop_ids),
    )
    self.stats = slots.stats
    ended, running = [], []
    while slots.admit():
      between()
      drawn = slots.advance()
      # The device works while these are decoded to text and handled.
      yield from self._seen(ended, running)
      ended = self.collect(slots, drawn)
      liveness.progress()
      running = slots.running() if drafts else []
    yield from self._seen(ended, running)

  def prepare(self, base: Tree, trainable: Tree) -> tuple[Tree, Tree]:
    """Return both trees as `open_slots` takes them; a base is prepared only once."""
    return self._base(base), self._functions.prepare(trainable)

  def share_base(self, other: Sampler) -> None:
    """Share the prepared frozen parameters of another sampler of the same policy, so that there is one copy."""
    self._base = other._base

  def open_slots(
    self, parameters: tuple[Tree, Tree], queue_of: Any, stop_ids: int, kept_prefixes: int = 0, most: int | None = None
  ) -> Slots:
    """Return empty slots that serve any number of requests, with any of the sampler's buckets.

    Args:
      parameters: base and trainable tree, from `prepare`.
      queue_of: makes a queue for a number of shards.
      stop_ids: maximum number of tokens that end a sample.
      kept_prefixes: minimum number of rows that keep keys and values of finished samples, split evenly over shards.
      most: maximum number of samples at once, for which the cache may be resized; None: as many as there are slots, and
        the cache has its largest size.
    """
    shards = self._functions.shards
    return Slots(
      self._functions,
      parameters,
      self._open_sizes(most),
      queue_of(shards),
      stop_ids=stop_ids,
      closed=False,
      kept=math.ceil(kept_prefixes / shards),
    )

  def parked(self, most: int) -> KVCache:
    """Return `Slots.parked` of `open_slots` with at most so many samples, as abstract arrays."""
    taken, functions = self._open_sizes(most), self._functions
    whole = functools.partial(functions.empty, rows=functions.shards * taken.rows, slots=taken.stages[-1].slots)
    return jax.eval_shape(whole)

  def _open_sizes(self, most: int | None) -> SamplerSizes:
    return sizes(
      rows=shard_rows(most or self._max_batch_rows, self._max_batch_rows, self._functions.shards),
      refilled=True,
      widths=self._prompt_buckets,
      room=self._response_buckets[-1],
      chunk=self._chunk,
      keeps_size=self._functions.keeps_size,
      resized=self._resized and most is not None,
    )

  def collect(self, slots: Slots, drawn: decode.Drawn) -> list[Finished]:
    """Wait for decode steps and return the samples that are done, also those that a stop string of the sampler ends."""
    return slots.collect(drawn, lambda _, *sample: self._stops.end(*sample))

  def _sizes(self, request: Request) -> SamplerSizes:
    """Return the array sizes of a request."""
    samples, shards = len(request.samples) * request.n, self._functions.shards
    rows = shard_rows(max(samples, self._least or 0), self._max_batch_rows, shards)
    return sizes(
      rows=rows,
      refilled=samples > rows * shards,
      widths=self._prompt_buckets
      if self._least is not None
      else sorted({samples.width for samples in request.samples}),
      room=request.room,
      chunk=self._chunk,
      keeps_size=self._functions.keeps_size,
      resized=self._resized,
    )

  def _seen(
    self, ended: Sequence[Finished], running: Sequence[tuple[Samples, int, np.ndarray]]
  ) -> Iterator[Draft | Completion]:
    for done in ended:
      yield done.completion(self.tokenizer)
    for _, number, tokens in running:
      yield Draft(number, tokens)


def request_rollouts(request: Request, completions: Sequence[Completion]) -> Rollouts:
  """Return the completions of a whole request, in any order, as rollouts."""
  group = np.repeat(np.arange(len(request.samples), dtype=np.int32), request.n)
  width = max(samples.width for samples in request.samples)
  prompts = [samples.prompt for samples in request.samples]
  return rollouts_of(sorted(completions, key=lambda done: done.sample), group, prompts, width, request.room)


def rollouts_of(
  completions: Sequence[Completion], group: np.ndarray, prompts: Sequence[Sequence[int]], width: int, room: int
) -> Rollouts:
  """Return N completions as rollouts.

  Args:
    completions: N completions.
    group: [N] int32, index of each one's prompt.
    prompts: token ids of each prompt.
    width: P, the length to which prompts are padded.
    room: T, the length to which completions are padded.
  """
  shape = len(completions), room
  tokens, mask = np.zeros(shape, np.int32), np.zeros(shape, bool)
  numbers = {name: np.zeros(shape, np.float32) for name in RECORDS}
  for row, done in enumerate(completions):
    length = len(done.tokens)
    tokens[row, :length], mask[row, :length] = done.tokens, True
    for name, values in numbers.items():
      values[row, :length] = getattr(done, name)
  prompt_tokens, prompt_mask = padded(prompts, width)
  return Rollouts(
    group=group,
    prompt_tokens=prompt_tokens[group],
    prompt_mask=prompt_mask[group],
    completion_tokens=tokens,
    completion_mask=mask,
    **numbers,
    finish_reason=['stop' if done.stopped else 'length' for done in completions],
    text=[done.text for done in completions],
  )
