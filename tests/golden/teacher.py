"""Golden teachers: the moving average, when it must refuse, and the trust region's mixed logits."""

from __future__ import annotations

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from sdpo_jax.objective.loss import ObjectiveConfig, objective
from sdpo_jax.teacher import averaging
from sdpo_jax.types import TeacherSignal
from tests.golden.report import Report, load

TOLERANCES = {'float64': 1e-12, 'float32': 1e-6}
MIX_TOLERANCES = {'float64': 1e-12, 'float32': 1e-5}


def check(directory: Path) -> Report:
  """Check ema_*.npz, trust_region_*.npz and ema_guards.json in `directory`."""
  report = Report('teacher')
  for path in sorted(directory.glob('ema_*.npz')):
    report.cases += 1
    _check_ema(report, path.stem, load(path))
  for path in sorted(directory.glob('trust_region_*.npz')):
    report.cases += 1
    _check_trust_region(report, path.stem, load(path))
  guards = directory / 'ema_guards.json'
  if guards.exists():
    for case in json.loads(guards.read_text()):
      report.cases += 1
      _check_guard(report, f'ema_guards/{case["name"]}', case)
  return report


def _check_ema(report: Report, case: str, data: dict) -> None:
  config = data['config_json']
  transform = averaging.make(averaging.TeacherSpec('ema', config['teacher_update_rate'], None))
  for dtype in ('float64', 'float32'):
    with jax.enable_x64(dtype == 'float64'):

      def tree(prefix, dtype=dtype):
        return {name: jnp.asarray(data[f'{prefix}_{name}'], dtype) for name in config['params']}

      teacher = transform.init(tree('teacher0'))
      for step in range(1, config['steps'] + 1):
        teacher = transform.update(teacher, tree(f'student{step}'), step - 1)
        for name, ours in teacher.items():
          theirs = data[f'exp_teacher{step}_{name}_f64']
          # Relative to the largest entry of the tensor.
          scale = 1 + np.max(np.abs(theirs))
          report.compare(
            case,
            f'{name} after {step} ({dtype})',
            np.asarray(ours, np.float64) / scale,
            theirs / scale,
            TOLERANCES[dtype],
            float64=dtype == 'float64',
          )


@jax.jit
def _mixed_log_probs(reference, student, rate, temperature):
  """Return the trust region's log-prob of every token: logits [B, T, V] twice -> [B, T, V], read off the objective."""
  vocab = reference.shape[-1]

  def every(logits):
    return jnp.repeat(logits.reshape(-1, vocab), vocab, axis=0)[None]

  identity = jnp.eye(vocab, dtype=reference.dtype)
  signal = TeacherSignal(
    hidden=every(reference),
    unembedding=identity,
    mix_hidden=every(student),
    mix_unembedding=identity,
    mix_rate=rate,
  )
  targets = jnp.tile(jnp.arange(vocab), reference.size // vocab)[None]
  ones = jnp.ones(targets.shape, reference.dtype)
  settings = ObjectiveConfig(full_logit_distillation=False, alpha=1.0, is_clip=None, temperature=temperature)
  _, aux = objective(every(student), identity, signal, targets, ones, ones, config=settings)
  return aux['teacher_log_prob'].reshape(reference.shape)


def _check_trust_region(report: Report, case: str, data: dict) -> None:
  config = data['config_json']
  for dtype in ('float64', 'float32'):
    with jax.enable_x64(dtype == 'float64'):

      def cast(value, dtype=dtype):
        return jnp.asarray(value, dtype)

      log_probs = _mixed_log_probs(
        cast(data['ref_logits']),
        cast(data['student_logits']),
        cast(config['mix_coef']),
        cast(config['temperature']),
      )
      ours = {
        'teacher_log_probs': np.take_along_axis(np.asarray(log_probs), data['responses'][..., None], -1)[..., 0],
        'teacher_topk_logps': np.take_along_axis(np.asarray(log_probs), data['student_topk_indices'], -1),
      }
    for name, values in ours.items():
      theirs = data[f'exp_{name}_f64']
      report.compare(case, f'{name} ({dtype})', values, theirs, MIX_TOLERANCES[dtype], float64=dtype == 'float64')


def _check_guard(report: Report, case: str, guard: dict) -> None:
  """When an update raises, changes the teacher or leaves it alone."""
  arguments = guard['args']
  params = {'w': jnp.ones((2, 2))}
  teacher = {'w': jnp.zeros((2, 2))}
  if 'no_teacher' in case:
    teacher = {}
  elif 'teacher_is_student' in case:
    teacher = params
  if arguments.get('mode') == 'vanilla':
    report.note(case, 'without self-distillation there is no teacher to update')
    return
  transform = averaging.make(averaging.TeacherSpec(arguments.get('reg', 'ema'), arguments.get('rate', 0.05), None))
  try:
    after = transform.update(teacher, params, 0)
  except ValueError as problem:
    if guard['exception'] is None:
      report.fail(case, f'raised {problem}')
    return
  if guard['exception'] is not None:
    report.fail(case, f'no exception, the reference raises {guard["exception"]}')
    return
  changed = any(np.any(a != b) for a, b in zip(jax.tree.leaves(after), jax.tree.leaves(teacher), strict=True))
  if changed != guard['teacher_changed']:
    report.fail(case, f'teacher changed: {changed}, in the reference: {guard["teacher_changed"]}')
