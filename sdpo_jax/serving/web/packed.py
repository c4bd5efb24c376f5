"""A compact binary format for scores: token ids in as few bits as possible, top log-probs as float16.

The layout, all numbers little-endian:

  4 bytes    length H of the header, unsigned
  H bytes    header, JSON: {"id_bits": b, "none": V, "rows": [{"tokens": T, "topk": K, "ids": M}, …]}
  then for every row, without gaps:
  4·T        log_probs, float32: of the tokens
  4·T        entropy, float32
  ⌈T·K·b/8⌉  top_ids, b bits each, the lowest first, T·K of them; `none` where there are fewer than K
  2·T·K      top_log_probs, float16
  4·T·M      of_ids, float32: of the ids that were asked for
"""

from __future__ import annotations

from collections.abc import Sequence
import json

import numpy as np

from sdpo_jax.learning.scoring import Scored

CONTENT_TYPE = 'application/vnd.sdpo.scores'


def pack(rows: Sequence[Scored], vocab_size: int) -> bytes:
  """Serialize scores in this format; `vocab_size` determines the bits per token id."""
  bits = max(1, vocab_size.bit_length())
  sizes = [
    {
      'tokens': len(row.log_probs),
      'topk': row.top_ids.shape[1],
      'ids': 0 if row.of_ids is None else row.of_ids.shape[1],
    }
    for row in rows
  ]
  header = json.dumps({'id_bits': bits, 'none': vocab_size, 'rows': sizes}).encode()
  parts = [len(header).to_bytes(4, 'little'), header]
  for row in rows:
    ids = np.where(row.top_ids < 0, vocab_size, row.top_ids).astype(np.uint32).ravel()
    of_bits = (ids[:, None] >> np.arange(bits, dtype=np.uint32)) & 1
    parts += [
      np.asarray(row.log_probs, '<f4').tobytes(),
      np.asarray(row.entropy, '<f4').tobytes(),
      np.packbits(of_bits.astype(np.uint8).ravel(), bitorder='little').tobytes(),
      np.asarray(row.top_log_probs, '<f2').tobytes(),
      b'' if row.of_ids is None else np.asarray(row.of_ids, '<f4').tobytes(),
    ]
  return b''.join(parts)


def unpack(content: bytes) -> list[Scored]:
  """Parse scores from this format; top log-probs are rounded to the 11 significant bits of float16."""
  length = int.from_bytes(content[:4], 'little')
  header, at = json.loads(content[4 : 4 + length]), 4 + length
  bits, rows = header['id_bits'], []

  def taken(count: int, dtype: str) -> np.ndarray:
    nonlocal at
    found = np.frombuffer(content, dtype, count, at)
    at += found.nbytes
    return found

  for size in header['rows']:
    t, k, m = size['tokens'], size['topk'], size['ids']
    log_probs, entropy = taken(t, '<f4'), taken(t, '<f4')
    of_bits = np.unpackbits(taken((t * k * bits + 7) // 8, 'u1'), count=t * k * bits, bitorder='little')
    ids = (of_bits.reshape(-1, bits).astype(np.int64) << np.arange(bits)).sum(axis=1)
    ids = np.where(ids == header['none'], -1, ids).astype(np.int32).reshape(t, k)
    top = taken(t * k, '<f2').astype(np.float32).reshape(t, k)
    of_ids = taken(t * m, '<f4').reshape(t, m) if m else None
    rows.append(Scored(log_probs, entropy, ids, top, of_ids))
  return rows
