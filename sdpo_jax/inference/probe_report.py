"""The report of a probe: a table, and a recommendation based on the thresholds below."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
import math

from sdpo_jax.config import Config
from sdpo_jax.training.specs import objective_spec

NO_SIGNAL = 0.05  # If fewer questions have a signal, nearly all samples of a run are wasted.
LITTLE_SIGNAL = 0.25
MASTERED = 0.95  # Above it, the student has nothing left to learn from these questions.
SMALL_GAP = 0.03  # At a slope of one, this gap predicts a gain of three points.
ERRORS = 2.0  # Standard errors by which a difference must exceed 0 to count.
TRUNCATED = 0.05  # Fraction of completions or teacher prompts.
UNGRADED = 0.01  # Above it, a warning; above NO_RUN_UNGRADED, no run.
NO_RUN_UNGRADED = 0.2
FORMAT_VALID = 0.8

_PREFIX = 'actor.self_distillation'
_BOTH = {'include_demonstration': True, 'include_environment_feedback': True}
# Rules that select the teacher's context: name → (what the teacher reads, the settings for it).
RULES: Mapping[str, tuple[str, Mapping[str, bool]]] = {
  'solution': ('a demonstration only', {'include_demonstration': True, 'include_environment_feedback': False}),
  'feedback': ('feedback only', {'include_demonstration': False, 'include_environment_feedback': True}),
  'feedback_without_solution': (
    'a demonstration, or feedback where there is none',
    {**_BOTH, 'environment_feedback_only_without_solution': True},
  ),
  'both': (
    'a demonstration and feedback together',
    {**_BOTH, 'environment_feedback_only_without_solution': False},
  ),
}


def configured_rule(config: Config) -> str:
  """Return the key in `RULES` of the configured rule."""
  sd = config.actor.self_distillation
  as_configured = (
    name for name, (_, chosen) in RULES.items() if all(getattr(sd, field) == value for field, value in chosen.items())
  )
  return next(as_configured, 'feedback')


def recommend(numbers: Mapping[str, float], config: Config) -> list[str]:
  """Return recommendations as sentences, the verdict first.

  Args:
    numbers: numbers from `probe_model` (or `probe`, without the lengths of all prompts).
    config: settings of the planned run.
  """
  distils = objective_spec(config).distillation
  against = [*_broken(numbers), *(_against_sdpo(numbers) if distils else _against_grpo(numbers))]
  if against:
    verdict = 'Do not start this run as it is. ' + ' '.join(against)
  else:
    mixed = f'Scores differ within the group of {_percent(numbers["signal/grpo_questions"])} of the questions.'
    verdict = 'Worth a run. ' + (_expectation(numbers) if distils else mixed)
  notes = [
    *(_context(numbers, config) if distils else ()),
    *_signal(numbers, distils),
    *_limits(numbers, config),
    *_grading(numbers),
  ]
  return [verdict, *notes]


def believed(numbers: Mapping[str, float], name: str) -> bool:
  """Return whether a difference exceeds 0 by more than `ERRORS` standard errors; False for a single question."""
  return name in numbers and numbers[name] > ERRORS * numbers.get(f'{name}_se', math.inf)


def _broken(numbers: Mapping[str, float]) -> Iterator[str]:
  if numbers['completion/ungraded'] > NO_RUN_UNGRADED:
    yield f'The grader could not grade {_percent(numbers["completion/ungraded"])} of the completions: fix it first.'
  if numbers['student/sampled'] >= MASTERED:
    yield (
      f'The student is right with {_percent(numbers["student/sampled"])} of its samples already: use harder questions.'
    )


def _against_sdpo(numbers: Mapping[str, float]) -> list[str]:
  questions = numbers['signal/sdpo_questions']
  if questions < NO_SIGNAL:
    return [
      f'The teacher knows more than the student at only {_percent(questions)} of the questions: there are hardly any '
      f'successes to show, and hardly any feedback that the settings let it read. {_way_to_signal(numbers)}'
    ]
  if 'teacher/gap' not in numbers:
    return ["None of the teacher's answers could be graded."]
  if believed(numbers, 'teacher/gap'):
    return []
  gap = _gap(numbers, 'teacher')
  return [
    f'The context does not measurably help: with it the same model is right {gap} more often than without. Distilling '
    'such a teacher is not expected to teach anything; change the context (below, or its templates), the model or the '
    'feedback, or probe more questions.'
  ]


def _against_grpo(numbers: Mapping[str, float]) -> list[str]:
  mixed = numbers['signal/grpo_questions']
  if mixed >= NO_SIGNAL:
    return []
  return [
    f'Scores differ within the group of only {_percent(mixed)} of the questions, and GRPO learns from no others. '
    f'{_way_to_signal(numbers)}'
  ]


def _way_to_signal(numbers: Mapping[str, float]) -> str:
  if numbers['signal/all_right'] > numbers['signal/all_wrong']:
    return 'Most questions are answered right every time: use harder ones.'
  return 'Use easier questions, more completions each (rollout.n), a grader with feedback, or a better model.'


def _expectation(numbers: Mapping[str, float]) -> str:
  gap = numbers['teacher/gap']
  text = (
    f'With its context the same model is right {_gap(numbers, "teacher")} more often ('
    f'{_percent(numbers["teacher/accuracy"])} against {_percent(numbers["teacher/plain_accuracy"])}), at '
    f'{_percent(numbers["teacher/signal"])} of the completions. Final gains were found to be about linear in this gap '
    '(arXiv 2605.30070): that is an expectation, not a promise, and says which of two runs to prefer.'
  )
  return text + (' This gap is small, and so is the expected gain.' if gap < SMALL_GAP else '')


def _context(numbers: Mapping[str, float], config: Config) -> list[str]:
  """Return a sentence on the best context, by its gain over all completions."""
  gains = {name: numbers[f'rule/{name}/gain'] for name in RULES if f'rule/{name}/gain' in numbers}
  own = configured_rule(config)
  if own not in gains:
    return []
  best = max(gains, key=lambda name: (gains[name], name == own))
  told = ', '.join(f'{100 * gain:+.1f} points with {RULES[name][0]}' for name, gain in gains.items())
  text = f'Over all completions the teacher is ahead by {told}.'
  if best != own and believed(numbers, f'rule/{best}/over_configured'):
    changes = ', '.join(f'{_PREFIX}.{name}={str(value).lower()}' for name, value in RULES[best][1].items())
    return [f'{text} The best of these is not the configured one: consider {changes}.']
  if gains[best] - gains[own] <= 0:
    return [f'{text} The configured one is the best of these.']
  return [f'{text} None of these is measurably better than the configured one.']


def _signal(numbers: Mapping[str, float], distils: bool) -> Iterator[str]:
  """Return sentences on the other method's signal, and a warning where the signal is weak."""
  questions = numbers['signal/sdpo_questions' if distils else 'signal/grpo_questions']
  if NO_SIGNAL <= questions < LITTLE_SIGNAL:
    yield f'Only {_percent(questions)} of the questions carry a signal: progress will be slow at first.'
  other = numbers['signal/grpo_questions' if distils else 'signal/sdpo_questions']
  name = 'GRPO would learn from' if distils else 'SDPO with these settings would have a teacher at'
  yield f'For comparison, {name} {_percent(other)} of the questions.'


def _limits(numbers: Mapping[str, float], config: Config) -> Iterator[str]:
  data = config.data
  if numbers.get('prompt/over_limit', 0) > 0:
    share, longest = _percent(numbers['prompt/over_limit']), int(numbers['prompt/tokens_max'])
    yield (
      f'{share} of the prompts exceed data.max_prompt_length={data.max_prompt_length} and are left out (the longest '
      f'has {longest} tokens): raise it if they matter.'
      if data.filter_overlong_prompts
      else f'{share} of the prompts exceed data.max_prompt_length={data.max_prompt_length}, which ends the run: raise '
      f'it to {longest} or set data.filter_overlong_prompts=true.'
    )
  if numbers['completion/truncated'] > TRUNCATED:
    yield (
      f'{_percent(numbers["completion/truncated"])} of the completions are cut off at data.max_response_length='
      f'{data.max_response_length}: raise it, or the run learns to answer within it before anything else.'
    )
  if numbers.get('teacher/truncated', 0) > max(TRUNCATED, 2 * numbers['completion/truncated']):
    yield (
      f'With the context {_percent(numbers["teacher/truncated"])} of the answers are cut off, more than without: the '
      'gap is larger than measured if data.max_response_length is raised.'
    )
  if numbers.get('reprompt/truncated', 0) > TRUNCATED:
    yield (
      f"{_percent(numbers['reprompt/truncated'])} of the teacher's prompts do not fit {_PREFIX}.max_reprompt_len="
      f'{config.actor.self_distillation.max_reprompt_len} (the longest has {int(numbers["reprompt/tokens_max"])} '
      'tokens): raise it.'
    )


def _grading(numbers: Mapping[str, float]) -> Iterator[str]:
  if UNGRADED < numbers['completion/ungraded'] <= NO_RUN_UNGRADED:
    yield (
      f'The grader could not grade {_percent(numbers["completion/ungraded"])} of the completions, which are left out.'
    )
  if numbers.get('completion/format_valid', 1.0) < FORMAT_VALID:
    yield (
      f'Only {_percent(numbers["completion/format_valid"])} of the completions have the format that the grader reads: '
      'part of what is learned will be the format; make sure that the prompt states it.'
    )


def summary(numbers: Mapping[str, float], advice: list[str]) -> str:
  """Return the report of a probe as text: the numbers in sections, then the recommendations."""
  lines = [f'{numbers["questions"]} questions, {numbers["completions"]} completions']
  for title, rows in _sections(numbers):
    lines += ['', title, *(f'  {label:<44}{value:>24}' for label, value in rows)]
  return '\n'.join([*lines, '', 'Recommendation', *(f'- {sentence}' for sentence in advice)])


def _sections(numbers: Mapping[str, float]) -> list[tuple[str, list[tuple[str, str]]]]:

  def share(label: str, name: str) -> list[tuple[str, str]]:
    return [(label, _percent(numbers[name]))] if name in numbers else []

  def spread(label: str, name: str) -> list[tuple[str, str]]:
    values = [numbers.get(f'{name}/tokens_{part}') for part in ('mean', 'p50', 'p95', 'max')]
    return [] if None in values else [(label, ' / '.join(f'{value:.0f}' for value in values))]

  best = sorted(
    (name for name in numbers if name.startswith('student/best@')), key=lambda name: int(name.split('@')[1])
  )
  sections: dict[str, list[tuple[str, str]]] = {}
  sections['Student, right'] = [
    *share('sampled', 'student/sampled'),
    *share('greedy', 'student/greedy'),
    *(row for name in best for row in share(f'best of {name.split("@")[1]}', name)),
  ]
  names = {'solution': 'demonstration', 'feedback': 'feedback', 'both': 'both'}
  contexts = sections['Self-teacher, right, by what it reads'] = []
  for label, prefix, fraction in [
    ('as configured', 'teacher', 'teacher/signal'),
    *((label, f'context/{name}', f'context/{name}/fraction') for name, label in names.items()),
  ]:
    if f'{prefix}/gap' in numbers:
      contexts += [
        (f'{label}, at {_percent(numbers[fraction])} of completions', _percent(numbers[f'{prefix}/accuracy'])),
        ('  without context, same questions', _percent(numbers[f'{prefix}/plain_accuracy'])),
        ('  gap', _gap(numbers, prefix)),
      ]
  if numbers.get('common/completions'):
    common = share('without context', 'common/plain_accuracy')
    common += [row for name, label in names.items() for row in share(label, f'common/{name}')]
    sections[f'… at the {numbers["common/completions"]} completions with all three'] = common
  sections['Questions with a signal'] = [
    *share('scores differ (GRPO)', 'signal/grpo_questions'),
    *share('the teacher knows more (SDPO)', 'signal/sdpo_questions'),
    *share('all completions right', 'signal/all_right'),
    *share('all completions wrong', 'signal/all_wrong'),
  ]
  sections['Tokens, mean / median / 95 % / most'] = [
    *spread('prompts', 'prompt'),
    *share('  over data.max_prompt_length', 'prompt/over_limit'),
    *spread('completions', 'completion'),
    *share('  cut off at data.max_response_length', 'completion/truncated'),
    *spread("teacher's prompts", 'reprompt'),
    *share('  over max_reprompt_len', 'reprompt/truncated'),
  ]
  sections['Grading'] = [
    *share('completions in the right format', 'completion/format_valid'),
    *share('ungraded', 'completion/ungraded'),
  ]
  return [(title, rows) for title, rows in sections.items() if rows]


def _percent(value: float) -> str:
  return f'{value:.1%}'.replace('%', ' %')


def _gap(numbers: Mapping[str, float], prefix: str) -> str:
  error = numbers.get(f'{prefix}/gap_se')
  return f'{100 * numbers[f"{prefix}/gap"]:+.1f}{"" if error is None else f" ± {100 * error:.1f}"} points'
