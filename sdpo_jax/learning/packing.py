"""Packed rows: which samples share a row, and the positions of their tokens in it (host side, NumPy)."""

from __future__ import annotations

import collections
from collections.abc import Sequence

import chex
import numpy as np

from sdpo_jax.types import TokenRows

Parts = Sequence[tuple[Sequence[int] | None, Sequence[int]]]  # (prompt, completion) of each sample of a row.


def packed_rows(rows: Sequence[Parts], length: int, width: int, share: bool = False) -> TokenRows:
  """Return rows of several samples each, as segments 1, 2, … with positions restarting at 0; padding is segment 0.

  In `target_index`, the completion tokens of a row's samples are concatenated.

  Args:
    rows: (prompt, completion) token ids of each row's samples. If the prompt is None, the sample has no tokens in this
      row, but places among the targets (which point at state 0).
    length: S, tokens of a row.
    width: T, targets of a row.
    share: whether a prompt of several samples in a row is stored once, as a segment of its own and the parent of their
      completions. The result then has `parents`, whether there are such prompts or not.
  """
  # Not `zeros_like`, which writes the zeros to memory: in a step with few samples most rows stay empty.
  tokens, positions, segment_ids, parents = (np.zeros((len(rows), length), np.int32) for _ in range(4))
  target_index = np.zeros((len(rows), width), np.int32)

  def put(row: int, begin: int, values: Sequence[int], position: int, segment: int, parent: int) -> int:
    place = slice(begin, begin + len(values))
    tokens[row, place], segment_ids[row, place] = values, segment
    if parent:
      parents[row, place] = parent
    positions[row, place] = np.arange(position, position + len(values))
    return place.stop

  for row, samples in enumerate(rows):
    shared = _repeated(samples) if share else set()
    known: dict[tuple[int, ...], tuple[int, int]] = {}  # Prompt → its segment and the slot of its last token.
    place = target = segment = 0
    for prompt, completion in samples:
      count = len(completion)
      if prompt is not None:
        key, parent = tuple(prompt), 0
        if key not in shared or key not in known:
          segment += 1
          place = put(row, place, prompt, 0, segment, 0)
          known[key] = segment, place - 1
        own, last = known[key]
        if key in shared:
          parent, segment = own, segment + 1
        states = np.concatenate([[last], np.arange(place, place + count - 1)])
        target_index[row, target : target + count] = states[:count]
        place = put(row, place, completion, len(prompt), segment, parent)
      target += count
  return TokenRows(tokens, positions, segment_ids, target_index, parents if share else None)


def taken(samples: Parts, share: bool) -> tuple[int, int]:
  """Return the numbers of prompt tokens and of completion tokens that `packed_rows` puts into a row."""
  prompts = [tuple(prompt) for prompt, _ in samples if prompt is not None]
  completions = sum(len(completion) for prompt, completion in samples if prompt is not None)
  return sum(map(len, set(prompts) if share else prompts)), completions


def _repeated(samples: Parts) -> set[tuple[int, ...]]:
  """Return the prompts that more than one sample of a row has."""
  counts = collections.Counter(tuple(prompt) for prompt, _ in samples if prompt is not None)
  return {prompt for prompt, count in counts.items() if count > 1}


def pack(
  sizes: np.ndarray,
  room: Sequence[int],
  multiple: int,
  keys: np.ndarray | None = None,
  shared: np.ndarray | None = None,
  smaller: Sequence[Sequence[int]] = (),
) -> list[list[int]]:
  """Distribute items over as few rows as first-fit decreasing needs.

  The number of rows is rounded up to a multiple of `multiple`; the last `multiple` rows get the first of the `smaller`
  rooms with which everything fits. Then every item, the largest first, goes to the least filled row that has room for
  it, so that rows take equally long. Items that share something are dealt one after the other, to rows that already
  hold one of them if there is room. The result is deterministic.

  Args:
    sizes: [M, D], what each item takes of each of D resources; no item takes more than `room`.
    room: D, what a row has of each resource.
    multiple: the number of rows, before empty ones are dropped, is a multiple of it.
    keys: [M] int, equal for items that share something; None: nothing is shared.
    shared: [M, D], what an item saves in a row with another item of its key.
    smaller: rooms [D] that the last rows may have instead, in the order in which they are tried.

  Returns:
    The items of each row that is not empty.
  """
  chex.assert_rank(sizes, 2)
  chex.assert_axis_dimension(sizes, 1, len(room))
  chex.assert_type(sizes, int)
  if keys is not None:
    chex.assert_shape(keys, (len(sizes),))
    chex.assert_equal_shape([sizes, shared])
    chex.assert_type([keys, shared], int)
  if keys is None:
    keys, shared = np.arange(len(sizes)), np.zeros_like(sizes)
  together = np.bincount(keys, sizes.sum(1), minlength=keys.max(initial=0) + 1)
  order = np.lexsort((-sizes.sum(1), keys, -together[keys]))
  room = np.asarray(room)
  first = _deal(sizes, keys, shared, order, room[None], grows=True)
  count = -(-len(first) // multiple) * multiple
  rooms = np.tile(room, (count, 1))
  least = (sizes - shared).sum(0)
  for last in (*smaller, room) if count else ():
    rooms[-multiple:] = last
    if (least <= rooms.sum(0)).all():
      rows = _deal(sizes, keys, shared, order, rooms, grows=False)
      if rows:
        return [row for row in rows if row]
  return first


def _deal(
  sizes: np.ndarray,
  keys: np.ndarray,
  shared: np.ndarray,
  order: np.ndarray,
  rooms: np.ndarray,
  grows: bool,
) -> list[list[int]]:
  """Deal items to rows: by first fit to new rows of the only room in `rooms` [1, D] (`grows`), or to one row per room.

  In the second case each item goes to the least filled row that has room for it; returns [] if an item fits in none.
  """
  rows: list[list[int]] = [[] for _ in range(0 if grows else len(rooms))]
  whole = rooms.sum(1)
  used = np.zeros((len(rows), rooms.shape[1]), np.int64)
  holding: dict[int, set[int]] = collections.defaultdict(set)  # Key → rows with an item of it.
  for item in order:
    held = np.zeros(len(rows), bool)
    held[list(holding[int(keys[item])])] = True
    taken = sizes[item] - held[:, None] * shared[item]
    fits = np.flatnonzero((used + taken <= rooms).all(1))
    fits = fits[held[fits]] if held[fits].any() else fits
    if not len(fits):
      if not grows:
        return []
      rows.append([])
      used = np.concatenate([used, np.zeros((1, rooms.shape[1]), np.int64)])
      taken = np.concatenate([taken, sizes[item][None]])
      fits = np.array([len(rows) - 1])
    row = int(fits[0] if grows else fits[np.argmin(used[fits].sum(1) / whole[fits])])
    rows[row].append(int(item))
    used[row] += taken[row]
    holding[int(keys[item])].add(row)
  return rows
