"""Metrics and files of a step: rollouts, update, throughput, `rollouts/<step>.jsonl` and `eval/<step>.json`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
import dataclasses
import math

from etils import epath
import jax
import numpy as np

from sdpo_jax.config import Config
from sdpo_jax.distributed import accelerators
from sdpo_jax.environments.outcomes import graded_of, scores_of
from sdpo_jax.evaluation.completions import describe, metric_values, reward_names, reward_values, samples_by_source
from sdpo_jax.evaluation.evaluate import Evaluation, sample_record
from sdpo_jax.evaluation.excerpts import excerpt, excerpt_messages
from sdpo_jax.files import jsonable, make_directory, write_atomically
from sdpo_jax.learning.batching import GenerationBatch
from sdpo_jax.models.token_texts import TokenTexts
from sdpo_jax.objective.terms import POLICY_METRICS, TEACHER_METRICS
from sdpo_jax.teacher.context import TeacherContext
from sdpo_jax.training import feedback_writing, samples
from sdpo_jax.training.directory.lines import RECORDED
from sdpo_jax.training.directory.sealed import seal, seal_lines
from sdpo_jax.training.gathering import GatheredBatch, Gathering
from sdpo_jax.training.graded import GradedRollouts
from sdpo_jax.training.metrics import MetricsWriter
from sdpo_jax.training.session import Session
from sdpo_jax.training.step import Taken, UpdateReport, rollout_correction
from sdpo_jax.training.token_records import TokenRecords
from sdpo_jax.types import Outcome


def token_mean(values: Mapping[str, np.ndarray], name: str, mask: np.ndarray) -> float:
  """Return the mean of a per-token quantity over the tokens for which it was computed; NaN if there are none."""
  picked = values[name][mask & np.isfinite(values[name])] if name in values else np.array([])
  return float(picked.mean()) if len(picked) else float('nan')


def rollout_metrics(graded: GradedRollouts, config: Config) -> dict[str, float]:
  """Return metrics of a graded batch: `rollout/<name>`, and `rollout/<source>/<name>` if it has several sources."""
  everything = np.arange(len(graded.rollouts))
  metrics = {f'rollout/{name}': value for name, value in _rollout_metrics(graded, everything, config).items()}
  sources = samples_by_source(graded.examples, graded.rollouts.group)
  if len(sources) > 1:
    for source, rows in sources.items():
      named = _rollout_metrics(graded, rows, config)
      metrics.update({f'rollout/{source}/{name}': value for name, value in named.items()})
  return metrics


def _rollout_metrics(graded: GradedRollouts, rows: np.ndarray, config: Config) -> dict[str, float]:
  rollouts, outcomes = graded.rollouts, [graded.outcomes[row] for row in rows]
  known = graded_of(outcomes)
  scores, groups = scores_of(outcomes)[known], rollouts.group[rows][known]
  success = scores >= config.actor.self_distillation.success_reward_threshold
  metrics = {
    'score_mean': _mean(scores),
    'success_rate': _mean(success),
    'solved_group_fraction': len(set(groups[success])) / len(set(groups)) if len(groups) else math.nan,
    'prompt_length_mean': float(np.mean([len(graded.prompts[group]) for group in rollouts.group[rows]])),
    **describe(rollouts, graded.outcomes, rows, config.alarms.epistemic_words),
  }
  for grader in reward_names(outcomes):
    given = reward_values(outcomes, grader)
    metrics[f'reward/{grader}'] = float(np.nanmean(given))
    metrics[f'reward_std/{grader}'] = float(np.nanstd(given))
  acc = metric_values(outcomes, 'acc')
  return metrics if acc is None else {**metrics, 'acc_mean': acc[known].mean()}


def _mean(values: np.ndarray) -> float:
  """Return the mean of `values`; NaN if it is empty."""
  return values.mean() if len(values) else math.nan


def feedback_metrics(graded: GradedRollouts) -> dict[str, float]:
  """Return `feedback/*`: the failures for which feedback was requested, failed requests, and the mean length."""
  written = [len(outcome.written) for outcome in graded.outcomes if outcome.written is not None]
  failed = sum(outcome.unwritten is not None for outcome in graded.outcomes)
  return {
    'feedback/asked': len(written) + failed,
    'feedback/failed': failed,
    'feedback/characters_mean': _mean(np.array(written)),
  }


def success_rates(graded: GradedRollouts, config: Config) -> dict[str, float]:
  """Return the success rate of each data source's rollouts; NaN if none of them is graded."""
  threshold = config.actor.self_distillation.success_reward_threshold
  rates = {}
  for source, rows in samples_by_source(graded.examples, graded.rollouts.group).items():
    scores = scores_of([graded.outcomes[row] for row in rows])
    rates[source] = float(_mean(scores[~np.isnan(scores)] >= threshold))
  return rates


def gap_metrics(rates: Mapping[str, float], evaluated: Mapping[str, float]) -> dict[str, float]:
  """Return `gap/<source>`: the rollouts' success rate minus the held-out mean score of the latest evaluation.

  If scores are 0 or 1 and evaluations sample as training does, both are the same quantity, and the gap is 0 unless the
  student overfits.

  Args:
    rates: result of `success_rates`.
    evaluated: `eval/…` metrics of the latest evaluation; sources without such metrics get no gap.
  """
  gaps = {}
  for source, rate in rates.items():
    held_out = [value for name, value in evaluated.items() if name.startswith(f'eval/{source}/mean@')]
    if held_out and held_out[0] is not None and math.isfinite(held_out[0]):
      gaps[f'gap/{source}'] = rate - held_out[0]
  return gaps


def update_metrics(report: UpdateReport, batch: GenerationBatch, session: Session) -> dict[str, float]:
  """Return metrics of the update, with the sampler-trainer mismatch unless `build_batch` has measured it."""
  values, mask = report.token_values, batch.rollouts.completion_mask
  log_probs, correction = values.get('log_prob') if report.log_probs is None else report.log_probs, {}
  if log_probs is not None and not session.spec.computes_log_probs:
    _, correction = rollout_correction(session, log_probs, batch)
  distilled = mask & (batch.distill_mask > 0)
  return {
    'train/loss': report.loss,
    'train/grad_norm': report.grad_norm,
    'train/learning_rate': report.learning_rate,
    'train/optimizer_steps': report.optimizer_steps,
    'train/skipped_steps': report.skipped,
    'train/entropy': token_mean(values, 'entropy', mask),
    **correction,
    **{name: token_mean(values, key, distilled) for name, key in TEACHER_METRICS.items() if key in values},
    **{name: token_mean(values, key, mask) for name, key in POLICY_METRICS.items() if key in values},
  }


# Metrics of a generation batch without an update.
NO_UPDATE = {'train/optimizer_steps': 0, 'train/skipped_steps': 0}


def gathering_metrics(step: int, gathering: Gathering, lesson: GatheredBatch | None) -> dict[str, float]:
  """Return `gathering/*`: the completions of an update, their mean wait in steps, and those that still wait."""
  steps = np.zeros(0) if lesson is None else lesson.steps[lesson.steps > 0]
  return {
    'gathering/trained': len(steps),
    'gathering/waited_mean': _mean(step - steps),
    'gathering/rows': gathering.rows,
    'gathering/examples': gathering.examples,
  }


def staleness_metrics(step: int, graded: GradedRollouts) -> dict[str, float]:
  """Return how old the samples of the batch of `step` are, in updates, and what carrying them over cost and saved."""
  tokens = np.array([count for each in graded.drawn_by for _, count in each])
  ages = step - 1 - np.array([after for each in graded.drawn_by for after, _ in each])
  oldest = step - 1 - np.array([each[0][0] for each in graded.drawn_by])
  stats = graded.sampling
  rows = {'rollout/live_rows': stats.live_row_steps / stats.decode_steps} if stats.decode_steps else {}
  return {
    'rollout/staleness_mean': _mean(oldest),
    'rollout/staleness_p95': float(np.percentile(oldest, 95)),
    'rollout/staleness_max': int(oldest.max()),
    'rollout/older_tokens': tokens[ages > 0].sum() / tokens.sum(),
    **rows,
    'rollout/recomputed_tokens': stats.recomputed,
  }


def divergence_metrics(report: UpdateReport, batch: GenerationBatch, graded: GradedRollouts) -> dict[str, float]:
  """Return `teacher/<source>/divergence`, the mean divergence by data source; empty if the batch has only one."""
  sources = samples_by_source(graded.examples, graded.rollouts.group)
  if len(sources) < 2 or 'divergence' not in report.token_values:
    return {}
  values, distilled = report.token_values['divergence'], batch.rollouts.completion_mask & (batch.distill_mask > 0)
  return {
    f'teacher/{source}/divergence': token_mean({'divergence': values[rows]}, 'divergence', distilled[rows])
    for source, rows in sources.items()
  }


def throughput_metrics(
  session: Session, drawn: Sequence[GradedRollouts], report: UpdateReport, seconds: Mapping[str, float]
) -> dict[str, float]:
  """Return tokens per second, MFU (model FLOPs utilisation) if the device's peak is known, and fill fractions.

  Tokens are those of prompts and completions, never padding. MFU counts 2 FLOPs per parameter and token for prefill,
  decode, the student's forward and backward pass, and the teacher's forward pass. It leaves out attention scores,
  recomputation, scoring outside of the update, and the second forward pass of a trust region. `throughput/fill_*` are
  the fractions of the compiled shapes that held data: of the sampler's slots × decode steps, of the tokens of student
  and teacher rows, and of the student's rows. Where samples may be packed, `throughput/samples_per_row` is how many a
  row held that was not padding.

  Args:
    session: session of the run.
    drawn: the generation batches that were sampled during the step, its own or those of later steps.
    report: report of the step's update.
    seconds: duration of each phase.
  """
  sampled = sum(int(graded.rollouts.completion_mask.sum()) for graded in drawn)
  prefilled = sum(sum(map(len, graded.prompts)) + graded.sampling.recomputed for graded in drawn)
  whole = sum(seconds.values())
  devices = jax.device_count()
  metrics = {
    'throughput/tokens_per_s': sampled / whole,
    'throughput/tokens_per_s_per_device': sampled / whole / devices,
    'throughput/trained_tokens_per_s': report.student.tokens / max(seconds.get('train', 0.0), 1e-9),
  }
  if seconds.get('sample'):  # Else the batch was complete, as samples that carry over may be.
    metrics['throughput/sampled_tokens_per_s'] = sampled / seconds['sample']
  if row_steps := sum(graded.sampling.row_steps for graded in drawn):
    metrics['throughput/fill_sample'] = sum(graded.sampling.tokens for graded in drawn) / row_steps
  if report.student.rows:
    metrics['throughput/fill_train'] = report.student.tokens / report.student.token_room
    metrics['throughput/fill_train_rows'] = report.student.rows / report.student.row_room
    if session.config.actor.pack_sequences:
      metrics['throughput/samples_per_row'] = report.student.samples / report.student.rows
  if report.teacher.rows:
    metrics['throughput/fill_teacher'] = report.teacher.tokens / report.teacher.token_room
  peak = accelerators.peak_flops(jax.devices()[0])
  if peak:
    done = session.flops_per_token * (sampled + prefilled) + session.update_flops_per_token * report.student.tokens
    done += session.teacher_flops_per_token * report.teacher.tokens
    metrics['throughput/mfu'] = done / (whole * devices * peak)
  return metrics


def step_metrics(
  session: Session, step: int, taken: Taken, gathering: Gathering | None, seconds: Mapping[str, float]
) -> dict[str, float]:
  """Return the metrics of a step before its evaluation, for its line of metrics.jsonl.

  With gathering, the per-token values in `taken.report` are reduced to those of the step's own batch.
  """
  config, graded, learned, report = session.config, taken.own.graded, taken.learned, taken.report
  metrics = taken.metrics | rollout_metrics(graded, config)
  if feedback_writing.is_used(config):
    metrics.update(feedback_metrics(graded))
  if learned is None:
    metrics.update(NO_UPDATE)
  else:
    metrics.update(update_metrics(report, taken.batch, session))
    metrics.update(divergence_metrics(report, taken.batch, learned.graded))
  if gathering is not None:
    metrics.update(gathering_metrics(step, gathering, learned))
    values = {} if learned is None else learned.of_batch(step, report.token_values, len(graded.rollouts))
    taken.report = report = dataclasses.replace(report, token_values=values)
  if config.trainer.writes_rollouts(step):
    metrics[RECORDED] = len(graded.rollouts)
  if config.rollout.steps_off:
    metrics['rollout/steps_off'] = step - taken.own.at
  if graded.drawn_by is not None:
    metrics.update(staleness_metrics(step, graded))
  metrics.update(throughput_metrics(session, taken.sampled, report, seconds))
  if taken.context is not None:
    metrics.update(taken.context.metrics)
  return {
    **metrics,
    **{f'time/{name}_s': value for name, value in seconds.items()},
    # Not a phase: graders work during other phases.
    'time/graders_busy_s': sum(batch.graders_busy_s for batch in taken.sampled),
  }


def write_step(
  session: Session,
  step: int,
  taken: Taken,
  gathering: Gathering | None,
  writer: MetricsWriter,
  announce: Callable[[str], None],
) -> None:
  """Write `rollouts/<step>.jsonl`, and show samples on terminal and boards, if they are due at this step."""
  trainer, graded = session.config.trainer, taken.own.graded
  if trainer.writes_rollouts(step):
    waiting = () if gathering is None else gathering.rows_of(step)
    advantages = None if taken.batch is None else taken.batch.advantages
    if advantages is not None and gathering is not None:
      advantages = taken.learned.of_batch(step, {'advantages': advantages}, len(graded.rollouts))['advantages']
    tokens = TokenRecords(TokenTexts(session.tokenizer), graded.rollouts, advantages, taken.read)
    write_rollouts(session, step, graded, taken.context, taken.report, waiting, tokens)
  if trainer.sample_table_freq and step % trainer.sample_table_freq == 0:
    picked = samples.pick(graded, trainer.sample_table_rows)
    announce(samples.as_text(step, picked))
    writer.write_samples(step, picked)


def write_rollouts(
  session: Session,
  step: int,
  graded: GradedRollouts,
  context: TeacherContext | None,
  report: UpdateReport,
  waiting: Sequence[int] = (),
  tokens: TokenRecords | None = None,
) -> None:
  """Write `rollouts/<step>.jsonl`, a line per sample: prompt, completion, score, feedback, teacher prompt, divergence.

  Fields that evaluations have, too, are those of `sample_record`.

  Args:
    session: session of the run.
    step: step of the run.
    graded: completions with their outcomes.
    context: the teacher's prompts; None: there is no teacher.
    report: report of the update.
    waiting: samples that wait for a later update; their lines say so and have no divergence.
    tokens: records whose fields (`TokenRecords.of`) are added to each line; None: no such fields.
  """
  folder = session.workdir / 'rollouts'
  make_directory(folder)
  divergence = report.token_values.get('divergence')
  lines = []
  for row, group in enumerate(graded.rollouts.group):
    length = int(graded.rollouts.completion_mask[row].sum())
    taught = context is not None and context.mask[row] > 0
    lines.append(
      {
        'step': step,
        'group': int(group),
        **sample_record(graded.examples[group], graded.rollouts, row, graded.outcomes[row]),
        **_written(graded.outcomes[row]),
        **({'waiting': True} if row in waiting else {}),
        **({} if graded.drawn_by is None else {'drawn_by': graded.drawn_by[row]}),
        'teacher_prompt': excerpt_messages(context.messages[row]) if taught else None,
        'divergence': [jsonable(round(float(value), 6)) for value in divergence[row, :length]]
        if taught and divergence is not None and row not in waiting
        else None,
        **({} if tokens is None else tokens.of(row)),
      }
    )
  write_atomically(folder / f'{step}.jsonl', seal_lines(lines, str(step)))


def _written(outcome: Outcome) -> dict[str, str]:
  """Return the fields of a line of `rollouts/<step>.jsonl` about feedback requested from a model."""
  entries = {'written_feedback': outcome.written, 'unwritten': outcome.unwritten}
  return {name: excerpt(text) for name, text in entries.items() if text is not None}


def write_evaluation(workdir: epath.Path, step: int, evaluation: Evaluation) -> None:
  """Write `eval/<step>.json` with the metrics and every sample."""
  folder = workdir / 'eval'
  make_directory(folder)
  content = {'step': step, 'metrics': evaluation.metrics, 'samples': evaluation.samples}
  write_atomically(folder / f'{step}.json', seal(jsonable(content)))
