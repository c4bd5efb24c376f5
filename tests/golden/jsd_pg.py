"""Golden losses of `jsd_pg`: loss, what is reported of it and the gradient, through chunked hidden states."""

from __future__ import annotations

import functools
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from sdpo_jax.errors import UserError
from sdpo_jax.objective import jsd_pg, reported
from sdpo_jax.objective.log_probs import token_log_probs
from sdpo_jax.objective.loss import ObjectiveConfig, objective
from sdpo_jax.types import Batch, TeacherSignal
from tests.golden.compiling import quick
from tests.golden.loss import chunk_sizes
from tests.golden.report import Report, load

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


# What stands where a case is smaller than the largest one, by the name of the array.
FILL = {'student_logits': -1e9, 'teacher_token_ids': -1}


def check(directory: Path, dtypes: tuple[str, ...] = tuple(TOLERANCES)) -> Report:
  """Check every *.npz in `directory` in these types; all cases take the shape of the largest, and one program."""
  report = Report('jsd_pg')
  cases = {path: load(path) for path in sorted(directory.glob('*.npz'))}
  sizes = [(*case['student_logits'].shape, case['teacher_token_ids'].shape[2]) for case in cases.values()]
  largest = np.max(sizes, axis=0) if sizes else None
  for path, case in cases.items():
    report.cases += 1
    try:
      settings = jsd_pg.JsdPg(**case['config_json'])
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


def _padded(case: dict, largest: np.ndarray) -> dict:
  """Return a case whose arrays have the sizes `largest`, of B, T, V and K; the rest is masked, or has no
  probability.
  """
  widths = {'student_logits': largest[2:3], 'teacher_token_ids': largest[3:], 'teacher_log_probs': largest[3:]}

  def pad(name: str, value: np.ndarray) -> np.ndarray:
    shape = (*largest[:2], *widths.get(name, ()))
    missing = [(0, int(size) - here) for size, here in zip(shape, value.shape, strict=True)]
    return np.pad(value, missing, constant_values=FILL.get(name, 0))

  names = ('responses', 'response_mask', 'old_log_probs', *widths)
  return {name: pad(name, case[name]) for name in names}


def _evaluate(settings: jsd_pg.JsdPg, case: dict, largest: np.ndarray, dtype: str):
  """Loss [], what is reported, and the gradient [B, T, V] by the student's logits."""
  rows, length, vocab = case['student_logits'].shape
  case = _padded(case, largest)
  logits = jnp.asarray(case['student_logits'], dtype)
  chunk_size, vocab_block = chunk_sizes(case['responses'].size, logits.shape[-1])
  batch = Batch(
    student=None,
    teacher=None,
    targets=jnp.asarray(case['responses']),
    mask=jnp.asarray(case['response_mask'], dtype),
    distill_coef=None,
    policy_coef=None,
    entropy_coef=None,
    old_log_probs=jnp.asarray(case['old_log_probs'], dtype),
    advantages=None,
    signal=TeacherSignal(
      token_ids=jnp.asarray(case['teacher_token_ids']), log_probs=jnp.asarray(case['teacher_log_probs'], dtype)
    ),
  )
  identity = jnp.eye(logits.shape[-1], dtype=dtype)
  log_probs, _ = token_log_probs(logits, identity, batch.targets)
  theirs, floored = jsd_pg.known_log_probs(batch.signal, batch.targets, settings.floor)
  batch = jsd_pg.prepare(batch, settings, log_probs, theirs)
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
      batch.policy_coef,
      None,
      batch.old_log_probs,
      batch.advantages,
      ObjectiveConfig(chunk_size=chunk_size, vocab_block=vocab_block),
      numbers=batch.numbers,
    )

  return jax.jit(jax.value_and_grad(value, has_aux=True), compiler_options=quick())
