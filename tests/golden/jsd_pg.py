"""Golden losses of `jsd_pg`: loss, what is reported of it and the gradient, through chunked hidden states."""

from __future__ import annotations

import functools
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from sdpo_jax.errors import UserError
from sdpo_jax.learning.requests import Lesson, Task, Taught, UpdateOptions
from sdpo_jax.objective import reported
from sdpo_jax.objective.jsd_pg import JsdPg
from sdpo_jax.objective.loss import ObjectiveConfig, objective
from tests.golden.compiling import quick
from tests.golden.loss import chunk_sizes
from tests.golden.report import Report, load
from tests.learning.first_batches import first_batch

TOLERANCES = {'float64': 1e-10, 'float32': 2e-5}
REPORTED = (
  'loss',
  'pg_loss',
  'jsd_reg',
  'mean_advantage',
  'frac_positive_advantage',
  'mean_is_ratio',
  'clip_fraction',
)


def check(directory: Path, dtypes: tuple[str, ...] = tuple(TOLERANCES)) -> Report:
  """Check every *.npz in `directory` in these types; all cases take the shape of the largest, and one program."""
  report = Report('jsd_pg')
  cases = {path: load(path) for path in sorted(directory.glob('*.npz'))}
  sizes = [(*case['student_logits'].shape, case['teacher_token_ids'].shape[2]) for case in cases.values()]
  largest = np.max(sizes, axis=0) if sizes else None
  for path, case in cases.items():
    report.cases += 1
    try:
      settings = JsdPg(**case['config_json'])
    except (TypeError, UserError) as problem:
      report.fail(path.stem, f'its settings are refused: {problem}')
      continue
    for dtype in dtypes:
      tolerance = TOLERANCES[dtype]
      with jax.enable_x64(dtype == 'float64'):
        loss, values, gradient = _evaluate(settings, case, largest, dtype)
      if gradient.dtype != dtype:
        report.fail(path.stem, f'{dtype} inputs gave a {gradient.dtype} gradient')
      found = values | {'loss (of the gradient)': loss, 'grad_student_logits': gradient}
      for name, ours in found.items():
        expected = case.get(f'exp_{name.split(" ")[0]}')
        if expected is not None:
          report.compare(path.stem, f'{name} ({dtype})', ours, expected, tolerance, float64=dtype == 'float64')
  return report


def _task(settings: JsdPg, case: dict, topk: int) -> Task:
  """Return the rows of a case as lessons whose teacher answered from outside, with room for `topk` tokens."""
  targets, ids, log_probs = case['responses'], case['teacher_token_ids'], case['teacher_log_probs']
  named = ids == targets[..., None]
  known = np.where(named.any(-1), np.where(named, log_probs, 0).sum(-1), -np.inf)
  missing = (0, 0), (0, topk - ids.shape[2])
  lessons = []
  for row, length in enumerate(case['response_mask'].sum(1).astype(int)):
    taught = Taught(
      np.pad(ids[row, :length], missing, constant_values=-1),
      np.pad(log_probs[row, :length], missing),
      known[row, :length],
    )
    lessons.append(Lesson([0], targets[row, :length], None, case['old_log_probs'][row, :length], taught=taught))
  return Task(slot=0, lessons=lessons, update=UpdateOptions(settings))


def _evaluate(settings: JsdPg, case: dict, largest: np.ndarray, dtype: str):
  """Loss [], what is reported, and the gradient [B, T, V] by the student's logits."""
  rows, length, vocab = case['student_logits'].shape
  room = [(0, int(size) - here) for size, here in zip(largest, case['student_logits'].shape, strict=False)]
  logits = jnp.asarray(np.pad(case['student_logits'], room, constant_values=-1e9), dtype)  # No probability.
  topk = int(largest[3])
  chunk_size, vocab_block = chunk_sizes(logits[..., 0].size, logits.shape[-1])
  identity = jnp.eye(logits.shape[-1], dtype=dtype)
  batch, floored = first_batch(
    _task(settings, case, topk),
    logits,
    jnp.zeros_like(logits),
    identity,
    topk=topk,
    vocab_size=logits.shape[-1],
    chunk_size=chunk_size,
    dtype=np.dtype(dtype).type,
  )
  (loss, aux), gradient = _program(chunk_size, vocab_block)(logits, identity, batch)
  values = reported.means(jax.device_get(reported.row_sums(batch, aux, floored)))
  assert not gradient[rows:].any() and not gradient[:, length:].any() and not gradient[..., vocab:].any()
  loss, gradient = jax.device_get((loss, gradient[:rows, :length, :vocab]))
  return loss, {name: np.asarray(values[name]) for name in REPORTED}, gradient


@functools.cache
def _program(chunk_size: int, vocab_block: int):
  def value(logits, identity, batch):
    return objective(
      logits,
      identity,
      batch.signal,
      batch.targets,
      batch.mask,
      batch.distill_coef,
      policy_coef=batch.policy_coef,
      old_log_probs=batch.old_log_probs,
      advantages=batch.advantages,
      config=ObjectiveConfig(chunk_size=chunk_size, vocab_block=vocab_block),
      numbers=batch.numbers,
    )

  return jax.jit(jax.value_and_grad(value, has_aux=True), compiler_options=quick())
