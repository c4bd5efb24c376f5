"""Trials of a run's graders on ground truths and on empty answers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
import dataclasses
import json
import math
from typing import Any

from sdpo_jax.config import rewards
from sdpo_jax.environments.grading import Graders
from sdpo_jax.errors import short_repr
from sdpo_jax.types import Example, Outcome


def _calls(truth: Any) -> str:
  """Return the tool calls of a ground truth as a completion writes them."""
  calls = json.loads(truth) if isinstance(truth, str) else truth
  lines = []
  for call in calls:
    arguments = call['Action_Input']
    written = arguments if isinstance(arguments, str) else json.dumps(arguments)
    lines.append(f'Action: {call["Action"]}\nAction Input: {written}')
  return '\n'.join(lines)


_CHOICE = (lambda truth: f'<answer>{truth}</answer>', lambda truth: f'The answer is \\boxed{{{truth}}}.')
# Environment → completions that state the ground truth. Unit tests do not provide an answer.
WRITTEN: Mapping[str, Sequence[Callable[[Any], str]]] = {
  'mcq': _CHOICE,
  'gpqa': _CHOICE,
  'mmlu_pro': _CHOICE,
  'math': (lambda truth: f'\\boxed{{{truth}}}',),
  'digits': (str,),
  'tooluse': (_calls,),
  'code': (),
}
PLAIN = (str, *_CHOICE)  # The same for all other environments.


@dataclasses.dataclass(frozen=True)
class GraderTrial:
  """A grader's outcomes for the ground truth of a question and for an empty answer."""

  example: Example
  answer: str | None  # The best-scoring form of the ground truth; None: it does not provide an answer.
  right: Outcome | None  # Its outcome.
  empty: Outcome


def answers(example: Example) -> list[str]:
  """Return completions that state a question's ground truth, for each of its graders; empty if that is impossible."""
  truth = example.ground_truth
  plain = isinstance(truth, str | int | float) and not isinstance(truth, bool)
  graders = [reward.name for reward in rewards.parse(example.environment)]
  forms = [form for name in graders for form in WRITTEN.get(name, PLAIN if plain else ())]
  return list(dict.fromkeys(form(truth) for form in forms))


def attempt(graders: Graders, examples: Sequence[Example]) -> list[GraderTrial]:
  """Grade an empty answer and the forms of the ground truth for every question.

  Raises:
    UserError: as `Graders.grade`.
  """
  forms = [answers(example) for example in examples]
  asked = [(example, text) for example, texts in zip(examples, forms, strict=True) for text in ('', *texts)]
  outcomes = iter(
    graders.grade([example for example, _ in asked], [text for _, text in asked], truncated=[False] * len(asked))
  )
  trials = []
  for example, texts in zip(examples, forms, strict=True):
    empty, pairs = next(outcomes), [(next(outcomes), text) for text in texts]
    best = max(pairs, key=lambda pair: -math.inf if pair[0].score is None else pair[0].score, default=(None, None))
    trials.append(GraderTrial(example, best[1], best[0], empty))
  return trials


def score(outcome: Outcome) -> str:
  """Return an outcome's score for a report."""
  if outcome.score is None:
    return 'ungraded' if outcome.wanted else 'none'
  return f'{outcome.score:g}'


def odd_trials(trials: Sequence[GraderTrial], threshold: float) -> list[str]:
  """Return a sentence for every environment that fails a ground truth or passes an empty answer.

  Args:
    trials: trials from `attempt`.
    threshold: the lowest score that is a success.
  """
  sentences: dict[tuple[str, str], str] = {}
  for trial in trials:
    environment = trial.example.environment
    for kind, outcome in (('truth', trial.right), ('empty', trial.empty)):
      if outcome is None or not outcome.wanted:
        continue
      if outcome.score is None:
        kind, what = 'ungraded', 'the ground truth' if kind == 'truth' else 'an empty answer'
        sentence = f'The grader {environment!r} cannot grade {what} of {trial.example.id}: {outcome.reason}.'
      elif kind == 'truth' and outcome.score < threshold:
        sentence = (
          f'The grader {environment!r} gives the ground truth of {trial.example.id} the score {score(outcome)}, below '
          f'the success_reward_threshold of {threshold:g}, written as {short_repr(trial.answer)}: look at the row, the '
          'grader and the threshold.'
        )
      elif kind == 'empty' and outcome.score >= threshold:
        sentence = (
          f'The grader {environment!r} gives an empty answer to {trial.example.id} the score {score(outcome)}, which '
          'counts as a success: look at the grader and at actor.self_distillation.success_reward_threshold.'
        )
      else:
        continue
      sentences.setdefault((environment, kind), sentence)
  return list(sentences.values())
