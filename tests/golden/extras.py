"""Golden aggregation, GRPO advantages, PPO loss, rollout importance weights and KL estimates."""

from __future__ import annotations

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from sdpo_jax.objective.advantages import grpo_advantages
from sdpo_jax.objective.aggregation import loss_coefficients
from sdpo_jax.objective.importance import rollout_is_weights
from sdpo_jax.objective.policy_gradient import dual_clip_ppo, kl_penalty
from tests.golden.report import Report, load

DTYPES = ('float64', 'float32')


def check(directory: Path) -> Report:
  """Check every npz file of a known name in `directory`."""
  report = Report('extras')
  checkers = {
    'agg_loss': _check_aggregation,
    'grpo_advantage': _check_advantages,
    'ppo_policy_loss': _check_ppo,
    'rollout_is_weights': _check_rollout_weights,
  }
  for path in sorted(directory.glob('*.npz')):
    data = load(path)
    if path.stem == 'kl_penalty':
      _check_kl(report, data)
    elif path.stem in checkers:
      for meta in data['meta_json']:
        prefix = f'case{meta["i"]:02d}_'
        arrays = {key.removeprefix(prefix): value for key, value in data.items() if key.startswith(prefix)}
        report.cases += 1
        checkers[path.stem](report, f'{path.stem}/{meta["i"]:02d}', meta, arrays)
    else:
      report.note(path.stem, 'unknown file, not checked')
  return report


def _compare(report: Report, case: str, what: str, ours, theirs, dtype: str, tolerance=1e-12, **options) -> None:
  tolerance = tolerance if dtype == 'float64' else 1e-5
  report.compare(case, f'{what} ({dtype})', ours, theirs, tolerance, float64=dtype == 'float64', **options)


def _coefficients(mask: np.ndarray, mode: str, info: dict) -> np.ndarray:
  """Return the reference's denominators: its data-parallel size multiplies all but the length-normalised mode."""
  coefficients = loss_coefficients(
    mask,
    mode,
    scale=info.get('loss_scale_factor'),
    num_tokens=info.get('batch_num_tokens'),
    num_sequences=info.get('global_batch_size'),
  )
  return coefficients * (1 if mode == 'seq-mean-token-sum-norm' else info.get('dp_size', 1))


def _check_aggregation(report: Report, case: str, meta: dict, arrays: dict) -> None:
  for dtype in DTYPES:
    mask = arrays['mask'].astype(dtype)
    coefficients = _coefficients(mask, meta['mode'], meta['kwargs']).astype(dtype)
    loss = np.sum(np.where(mask > 0, arrays['loss_mat'].astype(dtype), 0) * coefficients)
    expected, gradient = meta['exp_loss_f64'], arrays['grad_f64']
    undefined = expected is None or not np.isfinite(expected)
    _compare(report, case, 'loss', loss, np.nan if expected is None else expected, dtype, informational=undefined)
    _compare(report, case, 'grad', coefficients, gradient, dtype, informational=undefined)


def _check_advantages(report: Report, case: str, meta: dict, arrays: dict) -> None:
  _, group = np.unique(arrays['uid'], return_inverse=True)
  for dtype in DTYPES:
    scores = arrays['token_level_rewards'].astype(dtype).sum(-1)
    advantages = grpo_advantages(scores, group, meta['norm_adv_by_std_in_grpo'], meta['epsilon'])
    informational = meta['name'] == 'tiny_std' and dtype == 'float32'
    ours = advantages[:, None] * arrays['response_mask'].astype(dtype)
    _compare(
      report, case, 'advantages', ours, arrays['advantages_f64'], dtype, tolerance=1e-7, informational=informational
    )


def _check_ppo(report: Report, case: str, meta: dict, arrays: dict) -> None:
  ratios = (meta['clip_ratio_low'], meta['clip_ratio_high'], meta['clip_ratio_c'])
  for dtype in DTYPES:

    def cast(name, dtype=dtype):
      return arrays[name].astype(dtype)

    mask = cast('response_mask')
    weights = cast('rollout_is_weights') if meta['has_rollout_is_weights'] else np.ones_like(mask)
    coefficients = (_coefficients(mask, meta['loss_agg_mode'], meta['global_batch_info']) * weights).astype(dtype)
    with jax.enable_x64(dtype == 'float64'):

      def value(log_probs, cast=cast, coefficients=coefficients):
        loss, metrics = dual_clip_ppo(log_probs, jnp.asarray(cast('old_log_prob')), cast('advantages'), *ratios)
        return (coefficients * loss).sum(), metrics

      (loss, metrics), gradient = jax.value_and_grad(value, has_aux=True)(jnp.asarray(cast('log_prob')))
      loss, gradient = np.asarray(loss), np.asarray(gradient)

    def mean(name, metrics=metrics, mask=mask):
      return np.sum(np.asarray(metrics[name]) * mask) / (np.sum(mask) + 1e-8)

    _compare(report, case, 'loss', loss, meta['exp_loss_f64'], dtype)
    _compare(report, case, 'grad', gradient, arrays['grad_log_prob_f64'], dtype)
    for name, ours in (('pg_clipfrac', 'clipped'), ('pg_clipfrac_lower', 'clipped_lower'), ('ppo_kl', 'approx_kl')):
      _compare(report, case, name, mean(ours), meta['exp_metrics'][f'actor/{name}'], dtype)


def _check_rollout_weights(report: Report, case: str, meta: dict, arrays: dict) -> None:
  kwargs = meta['kwargs']
  for dtype in DTYPES:
    weights, metrics = rollout_is_weights(
      arrays['old_log_prob'].astype(dtype),
      arrays['rollout_log_prob'].astype(dtype),
      arrays['response_mask'].astype(dtype),
      kwargs.get('rollout_is_threshold', 2.0),
      kwargs.get('rollout_is_batch_normalize', False),
      kwargs.get('rollout_is'),
    )
    if (weights is None) != ('rollout_is_weights_f64' not in arrays):
      report.fail(case, 'weights are there in one implementation only')
    elif weights is not None:
      _compare(report, case, 'weights', weights, arrays['rollout_is_weights_f64'], dtype)
    for name, expected in meta['exp_metrics_f64'].items():
      if name not in metrics:
        report.fail(case, f'{name} is missing')
        continue
      # The reference counts fractions of sequences in float32 throughout.
      exact = 1e-7 if 'fraction' in name else 1e-12
      _compare(report, case, name, metrics[name], expected, dtype, tolerance=exact)


def _check_kl(report: Report, data: dict) -> None:
  kinds = sorted({key.split('__')[0] for key in data if '__' in key})
  for kind in kinds:
    report.cases += 1
    case = f'kl_penalty/{kind}'
    raises = f'{kind}__exception' in data
    for dtype in DTYPES:
      with jax.enable_x64(dtype == 'float64'):
        ours, theirs = (jnp.asarray(data[name], dtype) for name in ('logprob', 'ref_logprob'))
        try:
          values = kl_penalty(ours, theirs, kind)
        except ValueError as problem:
          if not raises:
            report.fail(case, str(problem))
          continue
        if raises:
          report.fail(case, f'no exception, the reference raises {data[f"{kind}__exception"]}')
          continue
        gradient = jax.grad(lambda x, theirs=theirs, kind=kind: kl_penalty(x, theirs, kind).sum())(ours)
        _compare(report, case, 'value', np.asarray(values), data[f'{kind}__value_f64'], dtype)
        _compare(report, case, 'grad', np.asarray(gradient), data[f'{kind}__grad_f64'], dtype)
