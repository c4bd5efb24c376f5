"""The sizes that a sampler compiles for: rows of a prefill, rows and slots of the cache, and the moves between them.

Everything that a sampler does to its arrays is one of a few programs, and which ones is decided here, from the limits
of a request alone: no length that happens to be drawn adds a program. A cache goes through a few stages. It starts with
all rows and few slots; when a sample outgrows these it has all slots; and when nothing waits any more and rows run out,
it has all slots of fewer rows, and then of fewer again. A cache that keeps its size, because what is not filled is not
read, has all slots from the beginning, and only steps fewer of its rows.
"""

from __future__ import annotations

from collections.abc import Sequence
import dataclasses
import math

SMALLEST_CACHE = 128  # Slots of a row; smaller caches would not pay for their compilation.
SHORT_CACHE = 512  # Slots up to which a cache is small enough to begin with half of what it may need, not a quarter.
FEWEST_ROWS = 8  # Rows of a shard; a step of fewer does little but read weights.
PREFILL_TOKENS = 256  # Tokens of a shard that are prefilled at once, where a prompt is no longer than that.
# Shares of the rows that are left in the last stages. The second costs two programs more, which a sampler with several
# buckets of prompts spends on these.
FEWER = (1 / 3, 1 / 12)
FEWER_OF_SEVERAL = (1 / 4,)
# Tokens of a row that go through the model at once where a prompt is continued, at most, and of the longest prompt:
# more would pad short turns, fewer would read the weights for less.
PIECE, PIECES = 64, 8
HALVINGS = (1 / 2, 1 / 4, 1 / 8)  # Of a cache that keeps its size.


@dataclasses.dataclass(frozen=True)
class Size:
  """Of a cache: rows that are stepped, on each shard, and slots of a row."""

  rows: int
  slots: int


@dataclasses.dataclass(frozen=True)
class Sizes:
  """What a sampler compiles for a kind of request."""

  prefix: int  # Slots of a prefilled prompt, whatever its bucket.
  stages: tuple[Size, ...]  # Of the cache, in the order in which it may have them.
  admitting: int  # Samples are admitted at the first so many stages.

  @property
  def rows(self) -> int:
    """Rows of a shard at first."""
    return self.stages[0].rows

  @property
  def piece(self) -> int:
    """Tokens of a row that go through the model at once where a prompt is continued."""
    return max(1, min(PIECE, self.prefix // PIECES))

  @property
  def moves(self) -> tuple[tuple[Size, Size], ...]:
    """(before, after) of every change of size: from one stage to the next, so that each costs one program."""
    return tuple(zip(self.stages, self.stages[1:], strict=False))

  def prompts(self, width: int) -> int:
    """Return how many prompts of a shard are prefilled together in a bucket of `width` tokens."""
    return prompts_together(width, self.rows)

  def path(self, now: Size | None, needed: int, live: int) -> tuple[Size, ...]:
    """Return the stages that a cache goes through, one after the other, until it has the size that it should have.

    Args:
      now: its size; None: it is made, with the first stage that is returned.
      needed: slots that its fullest row is to hold.
      live: rows that must stay, of the fullest shard; as many as there are where more samples may come.
    """
    begin = 0 if now is None else self.stages.index(now)
    fitting = [at for at, size in enumerate(self.stages) if at >= begin and size.slots >= needed and size.rows >= live]
    # The last of those with as few rows, or, where rows cannot go, the first that has the slots.
    fewest = min(self.stages[at].rows for at in fitting)
    end = next(at for at in fitting if self.stages[at].rows == fewest)
    return self.stages[end : end + 1] if now is None else self.stages[begin + 1 : end + 1]

  def enough(self, live: int, shards: int) -> int:
    """Return how many of the `live` rows of all shards must run out for the next stage with fewer; `live` if none
    is.
    """
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
) -> Sizes:
  """Return what a request may need.

  Args:
    rows: slots of each shard, from `shard_rows`.
    refilled: there are more samples than slots.
    widths: the buckets of prompts.
    room: tokens of a completion at most.
    chunk: tokens drawn between two looks at most.
    keeps_size: the cache is as large at first as it may come to be.
    resized: False: it is so, and keeps all of its rows.
  """
  widest = max(widths)
  slots = widest + room + chunk
  small = resized and not keeps_size
  shares = HALVINGS if keeps_size else FEWER if len(widths) == 1 else FEWER_OF_SEVERAL
  # What is drawn at one go leaves no time to run out.
  shrinks = resized and room > chunk and (keeps_size or rows >= FEWEST_ROWS)
  counts = dict.fromkeys([rows, *(math.ceil(rows * share) for share in shares if shrinks)])
  stages = tuple(Size(count, slots) for count in counts)
  # Every prompt fits into the small cache, with what two looks add.
  fewer = max(math.ceil(slots / 4), min(math.ceil(slots / 2), SHORT_CACHE), widest + 2 * chunk, SMALLEST_CACHE)
  if small and 4 * fewer <= 3 * slots:
    return Sizes(widest, (Size(rows, fewer), *stages), 2 if refilled else 1)
  return Sizes(widest, stages, 1)


def prompts_together(width: int, rows: int) -> int:
  """Return how many prompts of a shard with so many rows are prefilled together in a bucket of `width` tokens."""
  return min(math.ceil(PREFILL_TOKENS / width), rows)


def shard_rows(samples: int, max_rows: int, shards: int) -> int:
  """Return the slots of each shard when there are `samples` to draw and `max_rows` slots at most; at least one."""
  return max(min(math.ceil(samples / shards), max_rows // shards), 1)
