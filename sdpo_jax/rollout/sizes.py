"""The sizes that a sampler compiles for: rows of a prefill, rows and slots of the cache, and changes between them.

A sampler runs only a few programs on its arrays. Their sizes are chosen here, from the limits of a request alone, so
that the lengths that happen to be drawn never add a program. A cache goes through a few stages. It starts with all rows
and few slots; when a sample outgrows these, it gets all slots; and when no sample waits and rows finish, it gets fewer
rows with all slots, and then fewer again. A cache that keeps its size, because unfilled slots are not read, has all
slots from the beginning, and steps only over fewer of its rows.
"""

from __future__ import annotations

from collections.abc import Sequence
import dataclasses
import math

SMALLEST_CACHE = 128  # Minimum slots of a row; smaller caches would not pay for their compilation.
SHORT_CACHE = 512  # A cache starts with half its slots, at most this many, or with a quarter if that is more.
FEWEST_ROWS = 8  # Minimum rows of a shard to shrink; a step of fewer does little but read weights.
PREFILL_TOKENS = 256  # Tokens of a shard that are prefilled at once, if prompts are not longer than that.
# Shares of the rows that remain in the last stages. The second costs two more programs, which a sampler with several
# prompt buckets spends on those.
FEWER = (1 / 3, 1 / 12)
FEWER_OF_SEVERAL = (1 / 4,)
# A prompt is extended by at most PIECE tokens of a row at once, and at most 1 / PIECES of the longest prompt: more
# would pad short turns, fewer would read the weights for less.
PIECE, PIECES = 64, 8
# Rows of a shard whose unfinished samples are recomputed at once: enough tokens in a piece to use the weights well, few
# enough that short samples seldom wait for long ones.
RECOMPUTED = 8
# A piece of these is 1 / SHORTEST of the longest one, from LEAST_PIECE to PIECE tokens.
SHORTEST, LEAST_PIECE = 32, 8
HALVINGS = (1 / 2, 1 / 4, 1 / 8)  # Shares of the rows in the stages of a cache that keeps its size.
LEAST_HALVED = 2  # Minimum rows of these: a step of one takes nearly twice as long, by the TPU's compiler.


@dataclasses.dataclass(frozen=True)
class Size:
  """Size of a cache: rows of each shard that are stepped, and slots of a row."""

  rows: int
  slots: int


@dataclasses.dataclass(frozen=True)
class SamplerSizes:
  """The sizes that a sampler compiles for a kind of request."""

  room: int  # Maximum number of tokens of a completion.
  chunk: int  # Maximum number of tokens drawn per call of the decode loop.
  prefix: int  # Slots of a prefilled prompt, whatever its bucket.
  stages: tuple[Size, ...]  # Sizes of the cache, in the order in which it may have them.
  admitting: int  # Number of stages, from the first, in which samples are admitted.

  @property
  def rows(self) -> int:
    """Rows of a shard in the first stage."""
    return self.stages[0].rows

  @property
  def piece(self) -> int:
    """Tokens of a row that go through the model at once when a prompt is extended."""
    return max(1, min(PIECE, self.prefix // PIECES))

  @property
  def recomputed(self) -> int:
    """Unfinished samples of a shard that are recomputed together under new weights."""
    return min(RECOMPUTED, self.rows)

  @property
  def recomputed_piece(self) -> int:
    """Tokens of such a sample that go through the model at once."""
    return max(LEAST_PIECE, min(PIECE, self.stages[-1].slots // SHORTEST))

  @property
  def moves(self) -> tuple[tuple[Size, Size], ...]:
    """(before, after) of every change of size: from one stage to the next, so that each costs one program."""
    return tuple(zip(self.stages, self.stages[1:], strict=False))

  def prompts(self, width: int) -> int:
    """Return how many prompts of a shard are prefilled together in a bucket of `width` tokens."""
    return prompts_per_prefill(width, self.rows)

  def path(self, now: Size | None, needed: int, live: int) -> tuple[Size, ...]:
    """Return the stages that a cache goes through, one after the other, to reach the size that it should have.

    Args:
      now: its present size; None: there is no cache yet, and one is made with the first stage returned.
      needed: slots that its fullest row needs.
      live: rows that must stay, in the fullest shard; all rows if more samples may come.
    """
    begin = 0 if now is None else self.stages.index(now)
    fitting = [at for at, size in enumerate(self.stages) if at >= begin and size.slots >= needed and size.rows >= live]
    # The first stage with the fewest rows that fits.
    fewest = min(self.stages[at].rows for at in fitting)
    end = next(at for at in fitting if self.stages[at].rows == fewest)
    return self.stages[end : end + 1] if now is None else self.stages[begin + 1 : end + 1]

  def enough(self, live: int, shards: int) -> int:
    """Return how many of the `live` rows of all shards must finish to reach a smaller stage; `live` if none is."""
    return next(
      (live - shards * size.rows for size in self.stages if shards * size.rows < min(live, shards * self.rows)), live
    )


def sizes(
  *,
  rows: int,
  refilled: bool,
  widths: Sequence[int],
  room: int,
  chunk: int,
  keeps_size: bool,
  resized: bool = True,
) -> SamplerSizes:
  """Return the sizes that a request may need.

  Args:
    rows: slots of each shard, from `shard_rows`.
    refilled: whether there are more samples than slots.
    widths: the prompt buckets.
    room: maximum number of tokens of a completion.
    chunk: maximum number of tokens drawn per call of the decode loop.
    keeps_size: whether the cache has its largest size from the beginning.
    resized: False: it has its largest size from the beginning, and keeps all of its rows.
  """
  widest = max(widths)
  slots = widest + room + chunk
  small = resized and not keeps_size
  shares = HALVINGS if keeps_size else FEWER if len(widths) == 1 else FEWER_OF_SEVERAL
  # If one call draws a whole completion, rows never finish earlier than others.
  shrinks = resized and room > chunk and (keeps_size or rows >= FEWEST_ROWS)
  least = min(rows, LEAST_HALVED) if keeps_size else 1
  counts = dict.fromkeys([rows, *(max(math.ceil(rows * share), least) for share in shares if shrinks)])
  stages = tuple(Size(count, slots) for count in counts)
  # Every prompt fits into the small cache, with the tokens of two calls.
  fewer = max(math.ceil(slots / 4), min(math.ceil(slots / 2), SHORT_CACHE), widest + 2 * chunk, SMALLEST_CACHE)
  if small and 4 * fewer <= 3 * slots:
    return SamplerSizes(room, chunk, widest, (Size(rows, fewer), *stages), 2 if refilled else 1)
  return SamplerSizes(room, chunk, widest, stages, 1)


def prompts_per_prefill(width: int, rows: int) -> int:
  """Return how many prompts of a shard with `rows` rows are prefilled together in a bucket of `width` tokens."""
  return min(math.ceil(PREFILL_TOKENS / width), rows)


def shard_rows(samples: int, max_rows: int, shards: int) -> int:
  """Return the number of slots of each shard, at least 1, for `samples` samples and at most `max_rows` slots in all."""
  return max(min(math.ceil(samples / shards), max_rows // shards), 1)
