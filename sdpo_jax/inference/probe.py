"""A probe of what a run could learn: the accuracy of the student, and of its self-teacher for several contexts.

The gap between the two predicts the gain of on-policy self-distillation: the final gain was found to be linear in it
(arXiv 2605.30070). A gap is measured against fresh answers to the same questions, never against the completions from
which the contexts were made: those with feedback are the failed ones, which would flatter any teacher.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
import dataclasses
import json
import sys

import numpy as np

from sdpo_jax.config import Config, SelfDistillationConfig
from sdpo_jax.data.grouping import first_of_same
from sdpo_jax.data.prompts import Tokenizer, chat_tokens, prompt_tokens
from sdpo_jax.environments.grading import Graders
from sdpo_jax.environments.outcomes import scores_of
from sdpo_jax.errors import UserError
from sdpo_jax.evaluation.completions import describe, describe_lengths
from sdpo_jax.evaluation.evaluate import best_at_k, reported_ks
from sdpo_jax.files import check_output, write_output
from sdpo_jax.inference.probe_report import RULES, recommend
from sdpo_jax.rollout.grading_thread import GradingThread
from sdpo_jax.rollout.sampler import Sampler
from sdpo_jax.teacher.context import TeacherContext, build_teacher_context
from sdpo_jax.training.opening import check_adapter, check_turn_end, load_tokenizer, make_sampler, make_session
from sdpo_jax.training.questions import held_out_questions
from sdpo_jax.training.specs import chat_format, prompt_spec
from sdpo_jax.types import Example, Outcome, Rollouts, Tree

QUESTIONS = 128  # As of launch.probe: enough to detect gaps of ten points, and cheap compared with a run.
_STUDENT, _TEACHER, _PLAIN, _CONTEXTS = range(4)  # Steps of the sample batches, so that no two share their noise.


def probe_to_file(
  config: Config,
  *,
  output: str | None = None,
  max_questions: int = QUESTIONS,
  overwrite: bool = False,
  announce: Callable[[str], None] = lambda text: None,
) -> tuple[dict[str, float], list[str]]:
  """Return the numbers of `probe_model` and the recommendations; write both to `output`.

  Raises:
    UserError: as `probe_model`, or the output cannot be written.
  """
  if output is not None:
    check_output(output, overwrite=overwrite)
  numbers = probe_model(config, max_questions=max_questions, announce=announce)
  advice = recommend(numbers, config)
  if output is not None:
    write_output(output, json.dumps({**numbers, 'recommendation': advice}, indent=2, ensure_ascii=False) + '\n')
  return numbers, advice


def probe_model(
  config: Config, *, max_questions: int = QUESTIONS, announce: Callable[[str], None] = lambda text: None
) -> dict[str, float]:
  """Run `probe` on the model directory `config.model.path` and held-out questions, and measure prompt lengths.

  Args:
    config: settings of the planned run.
    max_questions: maximum number of questions, drawn at random with the seed of `config`.
    announce: called with the progress.

  Returns:
    The numbers of `probe`, and over all held-out rows: prompt/rows, prompt/tokens_mean, _p50, _p95, _max, and
    prompt/over_limit, the fraction with more tokens than `data.max_prompt_length` (which are not asked).

  Raises:
    UserError: the model is missing, or there are no held-out rows, or none is short enough.
  """
  if not config.data.val_files:
    raise UserError('data.val_files of the config is empty: the probe asks held-out questions, so name some.')
  if config.model.cartridge.used:
    raise UserError(
      "launch.probe compares a model's answers with and without its teacher's prompts, but the teacher of a cartridge "
      'reads a document instead: leave model.cartridge out.'
    )
  tokenizer = load_tokenizer(config)
  check_turn_end(config, tokenizer)
  with Graders(config.environments) as graders:
    # Includes long rows, whose number is one of the findings.
    rows = held_out_questions(config, tokenizer, any_length=True)
    lengths = np.array(
      [len(tokens) for tokens in chat_tokens(tokenizer, [row.messages for row in rows], chat_format(config))]
    )
    fitting = np.flatnonzero(lengths <= config.data.max_prompt_length)
    if not len(fitting):
      raise UserError(
        f'Every held-out prompt is longer than data.max_prompt_length={config.data.max_prompt_length} tokens (the '
        f'shortest has {lengths.min()}): raise it.'
      )
    if len(fitting) > max_questions:
      fitting = np.sort(np.random.default_rng(config.seed).choice(fitting, max_questions, replace=False))
    examples = [rows[row] for row in fitting]
    graders.prepare({example.environment for example in examples})
    numbers = {
      'prompt/rows': len(rows),
      **describe_lengths('prompt/tokens', lengths),
      'prompt/over_limit': float(np.mean(lengths > config.data.max_prompt_length)),
    }
    check_adapter(config)
    session, trainable = make_session(config, '.', tokenizer, refit=True)
    sampler = make_sampler(config, session.policy, tokenizer, session.mesh, reprompts=True)
    return numbers | probe(config, sampler, session.base, trainable, tokenizer, graders, examples, announce)


def probe(
  config: Config,
  sampler: Sampler,
  base: Tree,
  trainable: Tree,
  tokenizer: Tokenizer,
  graders: Graders,
  examples: Sequence[Example],
  announce: Callable[[str], None] = lambda text: None,
) -> dict[str, float]:
  """Return the success rates (score at least `success_reward_threshold`) of the student and of its self-teacher.

  The self-teacher is the same model at the same temperature with the teacher's re-prompt of each completion; it answers
  once for every completion that has such a signal. It gets the configured context and each of three others: the
  demonstration alone (`solution`), the feedback alone (`feedback`), and the two together (`both`), for each completion
  for which it exists; `common` are the completions for which all three do.

  Args:
    config: settings of rollouts and re-prompting, and the seed.
    sampler: the sampler; its prompt limit bounds the teacher's prompts.
    base: frozen parameters.
    trainable: the other parameters of student and teacher.
    tokenizer: with a chat template.
    graders: graders of the questions.
    examples: G questions.
    announce: called with the progress.

  Returns:
    questions, completions; student/sampled, student/greedy, student/best@k, student/score_mean,
    student/groups_with_success; signal/grpo_questions, the fraction of questions whose completions differ in score;
    signal/sdpo_questions, the fraction with a teacher signal; signal/all_right and signal/all_wrong, the fractions
    whose completions all succeed or all fail; teacher/signal, the fraction of completions that have a signal; over
    these: teacher/accuracy, teacher/student_accuracy (of the completions themselves), teacher/truncated (of the
    teacher's answers), and teacher/feedback_accuracy and teacher/demonstration_accuracy where the teacher read one of
    the two (absent if it never did).

    For the configured context (teacher/) and each other one (context/solution/ …), where it exists: plain_accuracy, of
    fresh answers to the same questions without context; gap = accuracy − plain_accuracy; gap_se, its standard error
    (questions, not completions, count as independent; absent for a single question); context/*/fraction and
    context/*/completions, of the completions that have the context. common/completions, common/plain_accuracy,
    common/<context>. rule/<name>/gain, the teacher's mean gain over all completions if the settings chose contexts by
    that rule (0 for completions without a context), and rule/<name>/over_configured, the difference to the configured
    rule's gain; _se of both.

    completion/tokens_mean …, completion/truncated, completion/ungraded, completion/format_valid (if graders report it),
    completion/entropy; reprompt/tokens_mean …, before any shortening, reprompt/truncated.
  """
  sd = config.actor.self_distillation
  threshold = np.float32(sd.success_reward_threshold)

  def sample(
    asked: Sequence[Example], prompts: Sequence[Sequence[int]], n: int, temperature: float, step: int
  ) -> tuple[Rollouts, list[Outcome]]:
    announce(f'Sampling {len(prompts) * n} completions …')
    with GradingThread(graders, asked, n) as grading:
      rollouts = sampler.sample(
        base,
        trainable,
        prompts,
        n=n,
        **{**config.rollout.method(), 'temperature': temperature},
        max_tokens=config.data.max_response_length,
        seed=config.seed,
        step=step,
        on_finished=grading.add,
      )
      return rollouts, grading.outcomes()

  def correct(outcomes: Sequence[Outcome]) -> np.ndarray:
    """Return 1 or 0 for each completion, NaN for an ungraded one."""
    scores = scores_of(outcomes).astype(np.float32)
    return np.where(np.isnan(scores), np.nan, scores >= threshold)

  n, temperature = config.rollout.n, config.rollout.temperature
  prompts = [prompt_tokens(tokenizer, example, prompt_spec(config)) for example in examples]
  rollouts, outcomes = sample(examples, prompts, n, temperature, _STUDENT)
  success = correct(outcomes)
  group = rollouts.group
  # As in training, where equal questions may show each other's successes.
  sharing = first_of_same(examples)[group] if config.data.group_duplicates else group

  def build(settings: SelfDistillationConfig) -> TeacherContext:
    return build_teacher_context(
      [examples[question].messages for question in group],
      sharing,
      rollouts.text,
      outcomes,
      settings,
      tokenizer,
      seed=config.seed,
      step=0,
      chat=chat_format(config),
    )

  context = build(sd)
  _, greedy = sample(examples, prompts, 1, 0.0, _STUDENT)
  by_question = success.reshape(len(examples), n)
  known = [row[~np.isnan(row)] for row in by_question]
  known = [row for row in known if len(row)]
  scores = scores_of(outcomes).reshape(len(examples), n)
  taught_questions = np.asarray(context.mask > 0).reshape(len(examples), n).any(1)
  results = {
    'questions': len(examples),
    'completions': len(rollouts),
    'student/sampled': _mean(success),
    'student/greedy': _mean(correct(greedy)),
    'student/groups_with_success': float((by_question == 1).any(1).mean()),
    **{f'student/best@{k}': best_at_k(known, k) for k in reported_ks(n)[:-1] if known},
    f'student/best@{n}': float((by_question == 1).any(1).mean()),
    'student/score_mean': _mean(scores),
    'signal/grpo_questions': float(np.mean([len(set(row[~np.isnan(row)])) > 1 for row in scores])),
    'signal/sdpo_questions': float(taught_questions.mean()),
    'signal/all_right': float(np.sum([row.all() for row in known]) / len(examples)),
    'signal/all_wrong': float(np.sum([not row.any() for row in known]) / len(examples)),
    'teacher/signal': float(context.mask.mean()),
    **_completions(rollouts, outcomes),
  }
  # Fresh answers measure the student on any subset of completions, however it was chosen.
  _, fresh = sample(examples, prompts, n, temperature, _PLAIN)
  plain = np.array([_mean(row) for row in correct(fresh).reshape(len(examples), n)])[group]
  answers: dict[tuple[int, tuple[int, ...]], float] = {}

  def ask(asked: TeacherContext, rows: np.ndarray) -> list[tuple[int, tuple[int, ...]]]:
    return [(int(row), tuple(asked.prompt_tokens[row])) for row in rows]

  def answer(keys: Sequence[tuple[int, tuple[int, ...]]], step: int) -> Rollouts:
    """Sample the teacher's answer to each prompt once, and record whether it is right."""
    asked = [examples[group[row]] for row, _ in keys]
    said, graded = sample(asked, [tokens for _, tokens in keys], 1, temperature, step)
    answers.update(zip(keys, correct(graded), strict=True))
    return said

  def collect(keys: Sequence[tuple[int, tuple[int, ...]]]) -> np.ndarray:
    """Return [N]: 1 or 0 for each completion that the teacher answered and that was graded, NaN for the others."""
    taught = np.full(len(rollouts), np.nan)
    for key in keys:
      taught[key[0]] = answers[key]
    return taught

  rows = np.flatnonzero(context.mask)
  if not len(rows):
    return results
  configured = ask(context, rows)
  said = answer(configured, _TEACHER)
  taught = collect(configured)
  shown = np.asarray([context.solutions[row] is not None for row in rows])
  results['teacher/accuracy'] = _mean(taught[rows])
  results['teacher/student_accuracy'] = _mean(success[rows])
  for name, chosen in (('demonstration', shown), ('feedback', ~shown)):
    if chosen.any():
      results[f'teacher/{name}_accuracy'] = _mean(taught[rows][chosen])
  results |= _gap('teacher', taught, plain, group)
  results['teacher/truncated'] = float(np.mean([reason == 'length' for reason in said.finish_reason]))

  unshortened = build(dataclasses.replace(sd, max_reprompt_len=sys.maxsize))
  results |= describe_lengths('reprompt/tokens', np.array([len(unshortened.prompt_tokens[row]) for row in rows]))
  results['reprompt/truncated'] = float(context.truncated[rows].mean())

  keys = {}
  for name, settings in contexts(sd).items():
    try:
      built = build(settings)
    except UserError as error:  # The configured context fits; failure of another one must not end the probe.
      announce(f'The context {name!r} is not measured. {error}')
      continue
    exists = np.asarray(built.mask > 0)
    if name == 'both':
      exists &= np.asarray([None not in pair for pair in zip(built.solutions, built.feedback, strict=True)])
    keys[name] = ask(built, np.flatnonzero(exists))
  # Prompts that the teacher has already answered for a completion are not repeated: contexts share many.
  pending = list(dict.fromkeys(key for asked in keys.values() for key in asked if key not in answers))
  if pending:
    answer(pending, _CONTEXTS)
  right = {name: collect(asked) for name, asked in keys.items()}
  for name, values in right.items():
    there = ~np.isnan(values)
    results[f'context/{name}/completions'] = int(there.sum())
    results[f'context/{name}/fraction'] = float(there.mean())
    if there.any():
      results[f'context/{name}/accuracy'] = float(values[there].mean())
      results |= _gap(f'context/{name}', values, plain, group)
  return results | _common(right, plain) | _rules(right, taught, plain, group)


def contexts(sd: SelfDistillationConfig) -> dict[str, SelfDistillationConfig]:
  """Return settings that show the teacher only the demonstration, only the feedback, or both."""
  # Only the configured context may end a run for an overlong prompt.
  truncation = 'content' if sd.reprompt_truncation == 'error' else sd.reprompt_truncation
  names = 'solution', 'feedback', 'both'
  return {name: dataclasses.replace(sd, reprompt_truncation=truncation, **RULES[name][1]) for name in names}


def mean_and_error(values: np.ndarray, group: np.ndarray) -> tuple[float, float | None]:
  """Return the mean of `values` [M] and its standard error, for values that are correlated within groups.

  Args:
    values: finite numbers.
    group: [M] question of each value.

  Returns:
    Mean and error. The error is cluster-robust, with the correction G / (G − 1); None for fewer than two questions.
  """
  mean = float(values.mean())
  _, index = np.unique(group, return_inverse=True)
  sums = np.bincount(index, weights=values - mean)
  if len(sums) < 2:
    return mean, None
  return mean, float(np.sqrt((sums**2).sum() * len(sums) / (len(sums) - 1)) / len(values))


def _mean(values: np.ndarray) -> float:
  """Return the mean of the values, ignoring NaN; NaN if there are none."""
  known = values[~np.isnan(values)]
  return float(known.mean()) if len(known) else float('nan')


def _gap(prefix: str, taught: np.ndarray, plain: np.ndarray, group: np.ndarray) -> dict[str, float]:
  there = ~np.isnan(taught) & ~np.isnan(plain)
  if not there.any():
    return {}
  return {
    f'{prefix}/plain_accuracy': float(plain[there].mean()),
    **_with_error(f'{prefix}/gap', (taught - plain)[there], group[there]),
  }


def _common(right: dict[str, np.ndarray], plain: np.ndarray) -> dict[str, float]:
  """Return the accuracy with every context on the completions that have all contexts, so that they can be compared."""
  there = ~np.isnan(np.stack([*right.values(), plain])).any(0)
  if not there.any():
    return {'common/completions': 0}
  return {
    'common/completions': int(there.sum()),
    'common/plain_accuracy': float(plain[there].mean()),
    **{f'common/{name}': float(values[there].mean()) for name, values in right.items()},
  }


def _rules(
  right: dict[str, np.ndarray], configured: np.ndarray, plain: np.ndarray, group: np.ndarray
) -> dict[str, float]:
  """Return the teacher's gain over all completions under each rule that the settings can express."""

  def gain(values: np.ndarray) -> np.ndarray:
    return np.nan_to_num(values - plain)

  rules = {
    'solution': ('solution',),
    'feedback': ('feedback',),
    'feedback_without_solution': ('solution', 'feedback'),
    'both': ('both', 'solution', 'feedback'),
  }
  results: dict[str, float] = {}
  for name, preferred in rules.items():
    if not set(preferred) <= right.keys():
      continue
    values = right[preferred[0]]
    for context in preferred[1:]:
      values = np.where(np.isnan(values), right[context], values)
    results |= _with_error(f'rule/{name}/gain', gain(values), group)
    results |= _with_error(f'rule/{name}/over_configured', gain(values) - gain(configured), group)
  return results


def _with_error(name: str, values: np.ndarray, group: np.ndarray) -> dict[str, float]:
  mean, error = mean_and_error(values, group)
  return {name: mean} | ({} if error is None else {f'{name}_se': error})


def _completions(rollouts: Rollouts, outcomes: Sequence) -> dict[str, float]:
  found = describe(rollouts, outcomes, np.arange(len(rollouts)), ())
  short = {name: name.replace('completion_length', 'tokens').removesuffix('_fraction') for name in found}
  return {f'completion/{short[name]}': value for name, value in found.items()}
