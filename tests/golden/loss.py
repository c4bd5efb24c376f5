"""Golden losses: value, per-token values and gradient, from logits and through the chunked path."""

from __future__ import annotations

import functools
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from sdpo_jax.config import Config
from sdpo_jax.errors import UserError
from sdpo_jax.objective.aggregation import loss_coefficients
from sdpo_jax.objective.loss import ObjectiveConfig, objective
from sdpo_jax.types import TeacherSignal
from tests.golden.compiling import quick
from tests.golden.report import Report, load
from tests.objective.objective_from_logits import objective_from_logits

TOLERANCES = {
  'float64': {'loss': 2e-8, 'per_token': 2e-8, 'grad': 2e-8},
  'float32': {'loss': 2e-6, 'per_token': 5e-6, 'grad': 1e-6},
}

PATHS = 'logits', 'chunks'


def check(
  directory: Path,
  only: slice = slice(None),
  dtypes: tuple[str, ...] = tuple(TOLERANCES),
  paths: tuple[str, ...] = PATHS,
) -> Report:
  """Check `directory`/*.npz (or the part `only` of them), which are counted, and errors.json, which is not.

  Every case runs in each of `dtypes` on those of `paths`: from logits, and through hidden states with an identity
  unembedding and chunks that divide neither tokens nor vocabulary. Logits that are not finite are read as such only.
  """
  report = Report('loss')
  for path in sorted(directory.glob('*.npz'))[only]:
    report.cases += 1
    _check_case(report, path.stem, load(path), dtypes, paths)
  errors = directory / 'errors.json'
  if errors.exists() and only == slice(None):
    for case in json.loads(errors.read_text()):
      _check_error(report, f'errors/{case["name"]}', case)
  return report


def chunk_sizes(tokens: int, vocab: int) -> tuple[int, int]:
  """Return a number of tokens and of vocabulary entries per chunk that divide neither."""

  def smallest(total):
    return next((size for size in range(max(total // 3, 2), total) if total % size), total)

  return smallest(tokens), smallest(vocab)


def _settings(config: dict, tokens: int, vocab: int) -> tuple[dict, dict]:
  """Return static and traced settings; what is traced lets cases share compiled programs.

  An alpha at an end is static where the clip is, and data where the clip is data: both must be exact.
  """
  chunk_size, vocab_block = chunk_sizes(tokens, vocab)
  static = {
    'full_logit_distillation': config['full_logit_distillation'],
    'distillation_topk': config['distillation_topk'] or None,
    'distillation_add_tail': config['distillation_add_tail'],
    'chunk_size': chunk_size,
    'vocab_block': vocab_block,
  }
  traced = {'temperature': config['temperature']}
  clipped = config['is_clip'] is not None and not config['old_is_detached_current']
  (traced if clipped else static)['is_clip'] = config['is_clip'] if clipped else None
  data = config['full_logit_distillation'] and (clipped or config['alpha'] not in (0.0, 1.0))
  (traced if data else static)['alpha'] = config['alpha']
  return static, traced


def _evaluate(static, path, traced, *arguments):
  return _program(static, path)(traced, *arguments)


@functools.cache
def _program(static, path):
  return jax.jit(functools.partial(_value_and_gradient, static, path), compiler_options=quick())


def _value_and_gradient(static, path, traced, student, teacher, targets, mask, coefficients, old, support):
  settings = ObjectiveConfig(**dict(static), **traced)
  arguments = {'old_log_probs': old, 'config': settings, 'support': support}

  def value(student):
    if path == 'logits':
      return objective_from_logits(student, teacher, targets, mask, coefficients, **arguments)
    identity = jnp.eye(student.shape[-1], dtype=student.dtype)
    signal = TeacherSignal(hidden=teacher, unembedding=identity)
    return objective(student, identity, signal, targets, mask, coefficients, **arguments)

  (loss, aux), gradient = jax.value_and_grad(value, has_aux=True)(student)
  return loss, aux['divergence'] * aux['ratio'], gradient


def _check_case(report: Report, name: str, case: dict, dtypes: tuple[str, ...], paths: tuple[str, ...]) -> None:
  config, info = case['config_json'], case['info_json']
  student, teacher = case['student_logits'], case['teacher_logits']
  loss_mask = case['response_mask'] * case.get('self_distillation_mask', np.ones(len(student)))[:, None]
  if np.any(loss_mask != case['exp_loss_mask']):
    report.fail(name, 'the loss mask is not response_mask × self_distillation_mask')
  usable = ~(np.isnan(student).any(-1) | np.isnan(teacher).any(-1))
  mask = np.where(usable, 1.0, loss_mask)  # Values at masked positions are compared as well.
  informational = not (info['loss_finite'] and info['per_token_all_finite'] and info['grad_all_finite'])
  finite = np.isfinite(np.where((usable | (loss_mask > 0))[..., None], student, 0)).all()
  finite = finite and np.isfinite(np.where((usable | (loss_mask > 0))[..., None], teacher, 0)).all()
  static, traced = _settings(config, loss_mask.size, student.shape[-1])
  support = case['topk_indices'] if info['topk_boundary_tie'] else None
  for dtype in dtypes:

    def cast(x, dtype=dtype):
      return None if x is None else jnp.asarray(x, dtype)

    rollout = np.asarray(case.get('rollout_is_weights', np.ones_like(mask)), dtype)
    coefficients = loss_coefficients(loss_mask.astype(dtype), config['loss_agg_mode']) * rollout
    old = case.get('old_log_probs') if 'is_clip' in traced else None
    for path in paths if finite else PATHS[:1]:
      with jax.enable_x64(dtype == 'float64'):
        results = _evaluate(
          tuple(sorted(static.items())),
          path,
          {key: jnp.asarray(value, dtype) for key, value in traced.items()},
          cast(student),
          cast(teacher),
          jnp.asarray(case['responses']),
          cast(mask),
          cast(coefficients),
          cast(old),
          None if support is None else jnp.asarray(support),
        )
        loss, per_token, gradient = (np.asarray(value) for value in results)
      if loss.dtype != dtype or gradient.dtype != dtype:
        report.fail(name, f'{dtype} inputs gave a {loss.dtype} loss and a {gradient.dtype} gradient')
      for what, ours, key in (
        ('loss', loss, 'loss'),
        ('per_token', per_token * rollout, 'per_token'),
        ('grad', gradient, 'grad_student_logits'),
      ):
        drift = info['f32_vs_f64'].get(what) or 0.0
        tolerance = TOLERANCES[dtype][what]
        if dtype == 'float32':
          tolerance = max(tolerance, 4 * drift)
        report.compare(
          name,
          f'{what} ({dtype}, {path})',
          ours,
          case[f'exp_{key}_f64'],
          tolerance,
          float64=dtype == 'float64',
          informational=informational,
        )


def _check_error(report: Report, name: str, case: dict) -> None:
  """Return the reference raises; so must whichever part of ours takes these settings."""
  settings = case['config']
  if case['stage'] == 'config':
    config = Config()
    config.model.path, config.data.train_files, config.trainer.test_freq = 'model', ('rows.json',), 0
    for key, value in settings.items():
      setattr(config.actor.self_distillation, key, value)
    attempt = config.validate
  elif case['name'] == 'bad_agg_mode':

    def attempt():
      return loss_coefficients(np.ones((2, 3), np.float32), 'mean')
  elif not settings.get('full_logit_distillation', True) and settings['alpha'] != 1.0:

    def attempt():
      return ObjectiveConfig(full_logit_distillation=False, alpha=settings['alpha'])
  elif case['name'].endswith('no_old'):
    report.note(name, 'not an error here: without old log-probs the current ones are meant, as on-policy')
    return
  else:
    zeros = jnp.zeros((1, 2))
    signal = TeacherSignal(hidden=jnp.zeros((1, 2, 4)))  # A teacher without its distribution.

    def attempt():
      return objective(
        jnp.zeros((1, 2, 4)), jnp.zeros((4, 4)), signal, zeros.astype(int), zeros, zeros, config=ObjectiveConfig()
      )

  try:
    attempt()
  except (UserError, ValueError):
    return
  report.fail(name, f'no exception, the reference raises {case["exception"]}')
