"""The sizes that a sampler compiles for: rows of a prefill, rows and slots of the cache, and the moves between them.

Everything that a sampler does to its arrays is one of a few programs, and which ones is decided here, from the limits of
a request alone: no length that happens to be drawn adds a program. A cache has at most three sizes. It starts with all
rows and few slots (`SMALL`); when a sample outgrows these it has all slots (`WHOLE`); and when nothing waits any more and
few rows are live it has few rows and all slots (`FEW`). That many bytes are read by a step of the first as of the last.
A cache that keeps its size, because what is not filled is not read, has all rows and slots from the beginning, and steps
half of its rows, a quarter or an eighth once the others have run out.
"""

from __future__ import annotations

import dataclasses
import math

SMALLEST_CACHE = 128  # Slots of a row; smaller caches would not pay for their compilation.
FEWEST_ROWS = 8  # Rows of a shard; a step of fewer does little but read weights.
PREFILL_TOKENS = 256  # Tokens of a shard that are prefilled at once, where a prompt is no longer than that.
SHARE = 4  # The small cache has a quarter of the slots; the few rows are a quarter of all.
HALVINGS = 3  # How often a cache that keeps its size halves the rows that it steps.


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
  moves: tuple[tuple[Size, Size], ...]  # (before, after): from an earlier stage to a later one.

  @property
  def rows(self) -> int:
    """Rows of a shard at first."""
    return self.stages[0].rows

  def prompts(self, width: int) -> int:
    """Return how many prompts of a shard are prefilled together in a bucket of `width` tokens."""
    return prompts_together(width, self.rows)

  def grown(self, now: Size | None, needed: int) -> Size:
    """Return the size of a cache whose fullest row is to hold `needed` slots, with all rows; `now` if that will do."""
    if now is not None and now.slots >= needed:
      return now
    return next(size for size in self.stages if size.rows == self.rows and size.slots >= needed)

  def shrunk(self, now: Size, live: int) -> Size:
    """Return the size with the fewest rows to which a cache with `live` rows of its fullest shard may go in one move."""
    few = [after for before, after in self.moves if before == now and live <= after.rows < now.rows]
    return few[0] if few else now


def sizes(
  *, rows: int, refilled: bool, widest: int, room: int, chunk: int, keeps_size: bool, resized: bool = True
) -> Sizes:
  """Return what a request may need.

  Args:
    rows: slots of each shard, from `shard_rows`.
    refilled: there are more samples than slots.
    widest: the largest bucket of prompts.
    room: tokens of a completion at most.
    chunk: tokens drawn between two looks at most.
    keeps_size: the cache is as large at first as it may come to be.
    resized: False: it is so, and keeps all of its rows.
  """
  whole = Size(rows, widest + room + chunk)
  # What is drawn at one go leaves no time to run out.
  shrinks = resized and room > chunk
  if keeps_size or not resized:
    counts = [rows, *(math.ceil(rows / 2**i) for i in range(1, HALVINGS + 1) if shrinks)]
    stages = tuple(Size(count, whole.slots) for count in dict.fromkeys(counts))
    return Sizes(widest, stages, 1, tuple(zip(stages, stages[1:], strict=False)))
  # Every prompt fits into the small cache, with what two looks add.
  slots = max(math.ceil(whole.slots / SHARE), widest + 2 * chunk, SMALLEST_CACHE)
  small = (Size(rows, slots),) if 4 * slots <= 3 * whole.slots else ()
  few = (Size(math.ceil(rows / SHARE), whole.slots),) if shrinks and rows >= FEWEST_ROWS else ()
  moves = [(before, after) for before, after in ((small, (whole,)), (small, few), ((whole,), few)) if before and after]
  stages = (*small, whole, *few)
  return Sizes(widest, stages, 2 if small and refilled else 1, tuple((before[0], after[0]) for before, after in moves))


def prompts_together(width: int, rows: int) -> int:
  """Return how many prompts of a shard with so many rows are prefilled together in a bucket of `width` tokens."""
  return min(math.ceil(PREFILL_TOKENS / width), rows)


def shard_rows(samples: int, max_rows: int, shards: int) -> int:
  """Return the slots of each shard when there are `samples` to draw and `max_rows` slots at most; at least one."""
  return max(min(math.ceil(samples / shards), max_rows // shards), 1)
