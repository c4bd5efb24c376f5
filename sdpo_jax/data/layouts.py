"""Recognition of common layouts of data sets, and conversion of their rows to the schema of docs/data.md."""

from __future__ import annotations

import ast
from collections.abc import Callable, Mapping, Sequence
import dataclasses
import itertools
import re
from string import ascii_uppercase as LETTERS
from typing import Any

from sdpo_jax.config.fields import did_you_mean
from sdpo_jax.data import ground_truth, rows
from sdpo_jax.data.converters.mathematics import PROMPT, after_hashes
from sdpo_jax.data.rows import RawRow
from sdpo_jax.errors import UserError, short_repr

# Usual names of columns, the most likely first, in lower case and with _ in place of other characters.
QUESTIONS = 'question prompt problem instruction query question_stem input text sentence ctx'.split()
ANSWERS = 'answer final_answer ground_truth solution output target label response completion reference expected'.split()
ANSWERS += 'answerkey answer_key answer_idx correct correct_answer gold cop'.split()
CHOICES = ('choices', 'options', 'endings')
LETTERED = ('', 'option_', 'option', 'choice_', 'choice', 'ending_', 'ending', 'answer_', 'op')  # … A, B; … 1, 2.
CONTEXTS = ('context', 'passage', 'article')  # Their text precedes the question.
# Columns that mark rows in the schema of docs/data.md, if there is also `prompt` or `messages`.
OWN = ('messages', 'environment', 'reward_model', 'kind', 'tests')
_RESULT = re.compile(r'[-+]?[$€£]?[\d.,/]*\d\s*%?|.*(?:\\[a-z]|\d\^).*|\$.*\$', re.DOTALL)  # A number, or LaTeX.
_BOX = re.compile(r'\\boxed\{((?:[^{}]|\{(?:[^{}]|\{[^{}]*\})*\})*)\}')
LETTER = '\n\nPut the letter of the right option between <answer> and </answer>.'
WAY_OUT = 'name the right columns in --prompt_column and --answer_column (--answer_column= if there is none)'


@dataclasses.dataclass(frozen=True)
class RowLayout:
  """The recognised layout of a data set, and its rows converted to the schema of docs/data.md."""

  said: str  # Description of the layout for the user.
  rows: list[RawRow]
  environment: str | None = None  # The built-in grader that fits; None: none does.
  answered: bool = True  # Whether rows have a ground truth.


def recognise(given: Sequence[RawRow], prompt_column: str | None = None, answer_column: str | None = None) -> RowLayout:
  """Recognise the layout of rows by the names of their columns, regardless of case.

  Args:
    given: all rows of a data set, at least one.
    prompt_column: name of the column with the question; None: recognise it.
    answer_column: name of the column with the answer, '' if there is none; None: recognise it.

  Raises:
    UserError: the columns are not recognised, or a row has another layout than the others.
  """
  columns = list(dict.fromkeys(name for row in given for name in rows.fields(row)))
  named = {re.sub(r'[\W_]+', '_', str(name).lower()).strip('_'): name for name in reversed(columns)}
  own = [name for name in OWN if name in columns]
  own += ['dataset'] if all(row.value.get('dataset') in [*rows.ENVIRONMENTS] for row in given) else []
  if own and {'prompt', 'messages'} & {*columns} and prompt_column is None is answer_column:
    return _own_rows(given, own)
  asked = next((named[name] for name in QUESTIONS if name in named), None) if prompt_column is None else prompt_column
  answer = next((named[name] for name in ANSWERS if named.get(name, asked) != asked), None if len(columns) > 1 else '')
  answer = answer if answer_column is None else answer_column
  if asked not in columns or answer not in (*columns, ''):
    missing, flag, name = ('question', '--prompt_column', prompt_column)
    if asked in columns:
      missing, flag, name = ('answer', '--answer_column', answer_column)
    there = f'there are {", ".join(map(short_repr, columns[:50]))}{", …" if columns[50:] else ""}'
    if name is not None:
      raise UserError(f'{flag}={name!r} names no column; {there}{did_you_mean(name, columns)}')
    raise UserError(f'No column is recognised as the {missing}; {there}: {WAY_OUT}.')
  behind = ['input'] if asked == named.get('instruction') else []
  parts = [*map(named.get, CONTEXTS), asked, *map(named.get, behind)]
  parts = [name for name in parts if name not in (None, answer)] if prompt_column is None else [asked]
  if not answer:
    made = [_row(row, parts, '') for row in given]
    return RowLayout(f'questions in {_listed(parts)}, no answers', made, answered=False)
  others = {key: name for key, name in named.items() if name not in (asked, answer)}
  if held := [others[name] for name in CHOICES if name in others][:1] or _lettered(others):
    return _multiple_choice(given, parts, answer, held)
  return _questions_and_answers(given, parts, answer)


def _own_rows(given: Sequence[RawRow], own: Sequence[str]) -> RowLayout:
  """Return rows that need no conversion; only a final message of the assistant becomes the answer."""
  values = [dict(row.value) for row in given]
  for value in values:
    messages = value.get('messages')
    last = messages[-1] if isinstance(messages, list) and messages else None
    if isinstance(last, Mapping) and last.get('role') == 'assistant':
      value |= {'answer': value.get('answer', last.get('content')), 'messages': messages[:-1]}
  kinds = {str(value.get('kind')) for value in values}
  kind = kinds.pop() if len(kinds) == 1 else ''
  return RowLayout(
    f'rows with {_listed(own)}, as docs/data.md describes them',
    [dataclasses.replace(row, value=value) for row, value in zip(given, values, strict=True)],
    kind if ground_truth.is_checked(kind) else None,
    any(value.get(name) is not None for value in values for name in (*rows.TRUTHS, 'tests', 'reward_model')),
  )


def _questions_and_answers(given: Sequence[RawRow], parts: Sequence[str], answer: str) -> RowLayout:
  """Return the layout of questions and answers; `math` grades them if nine in ten answers are numbers or LaTeX."""
  truths, said = [_text(row, answer) for row in given], f'questions in {_listed(parts)}, answers in {answer!r}'
  if all('####' in text for text in truths):
    truths, said = list(map(after_hashes, truths)), f'{said} behind ####'
  elif all(map(_BOX.search, truths)):
    truths, said = [_BOX.findall(text)[-1] for text in truths], f'{said} in the last \\boxed{{}}'
  math = sum(map(bool, map(_RESULT.fullmatch, truths))) >= 0.9 * len(truths)
  ending = PROMPT.format(problem='') if math else ''
  made = [_row(row, parts, ending, answer, answer=text) for row, text in zip(given, truths, strict=True)]
  return RowLayout(said, made, 'math' if math else None)


def _multiple_choice(given: Sequence[RawRow], parts: Sequence[str], answer: str, held: Sequence[str]) -> RowLayout:
  """Return the layout of multiple-choice questions; answers are read by the one of `READINGS` that suits most rows."""
  choices, truths = [_choices(row, held) for row in given], [_text(row, answer) for row in given]
  read = {how: list(map(_place, truths, itertools.starmap(names, choices))) for how, names in READINGS.items()}
  how = max(read, key=lambda name: sum(place is not None for place in read[name]))
  made = []
  for row, (texts, _), place in zip(given, choices, read[how], strict=True):
    if place is None:
      raise _refused(row, answer, f'name one of the choices in {_listed(held)} by {how}, as other rows do')
    listed = '\n'.join(f'{letter}: {text}' for letter, text in zip(LETTERS, texts, strict=False))
    made.append(_row(row, parts, f'\n\n{listed}{LETTER}', answer, *held, choices=texts, answer=LETTERS[place]))
  said = f'multiple choice: questions in {_listed(parts)}, choices in {_listed(held)}, answers in {answer!r} by {how}'
  return RowLayout(said, made, 'mcq')


# How answers name a choice → the names of all choices, given their texts and the data set's own labels.
READINGS: Mapping[str, Callable[[Sequence[str], Sequence[str]], Sequence[str]]] = {
  'labels': lambda texts, labels: labels,
  'letters': lambda texts, labels: list(LETTERS[: len(texts)]),
  'texts': lambda texts, labels: texts,
  'numbers from 0': lambda texts, labels: list(map(str, range(len(texts)))),
  'numbers from 1': lambda texts, labels: list(map(str, range(1, len(texts) + 1))),
}


def _place(truth: str, names: Sequence[str]) -> int | None:
  return next((names.index(form) for form in (truth, truth.strip('(). :').upper()) if form in names), None)


def _lettered(named: Mapping[str, str]) -> list[str]:
  """Return the columns of choices, such as A, B, C or option_1, option_2; empty if there are none."""
  for prefix, labels in itertools.product(LETTERED, (LETTERS.lower(), '0123456789', '123456789')):
    there = list(itertools.takewhile(named.__contains__, map(prefix.__add__, labels)))
    if len(there) > 1:
      return [named[key] for key in there]
  return []


def _choices(row: RawRow, held: Sequence[str]) -> tuple[list[str], list[str]]:
  """Return the texts of a row's choices, and their labels if there are any.

  The choices are one column each; or a list, an object with texts and labels, or an object of texts by label, which
  may also be written as a string.
  """
  value = row.value.get(held[0])
  if len(held) > 1:
    there = [name for name in held if row.value.get(name) is not None]  # Some questions have fewer.
    value = {'text': [row.value[name] for name in there], 'label': [re.sub('.*[^0-9]', '', name) for name in there]}
  elif isinstance(value, str):
    try:
      value = ast.literal_eval(value)
    except (ValueError, SyntaxError, RecursionError, MemoryError):
      value = None
  texts, labels = value, []
  if isinstance(value, Mapping):
    texts, labels = (value['text'], value.get('label')) if 'text' in value else (list(value.values()), list(value))
  if not isinstance(texts, list) or not isinstance(labels, list) or not 2 <= len(texts) <= len(LETTERS):
    raise _refused(row, held[0], f'hold 2 to {len(LETTERS)} choices, or one if other columns hold the others')
  return [str(text).strip() for text in texts], list(map(str, labels))


def _text(row: RawRow, name: str) -> str:
  value = row.value.get(name)
  if isinstance(value, float) and value.is_integer():  # Columns of integers become floats if some are missing.
    value = int(value)
  if not isinstance(value, str | int | float) or not str(value).strip():
    raise _refused(row, name, 'hold a text or a number')
  return str(value).strip()


def _row(row: RawRow, parts: Sequence[str], ending: str, *used: str, **more: Any) -> RawRow:
  """Return a row with the question made of `parts`, and all columns that are not used up.

  Args:
    row: row of the data set.
    parts: columns of the question: texts, or a single one with a list of messages.
    ending: text to append to the question.
    *used: columns to leave out, because `more` has their content.
    **more: fields to add.
  """
  question: Any = row.value.get(parts[0])
  if isinstance(question, list) and len(parts) == 1:
    *others, last = rows.conversation(dataclasses.replace(row, value={'prompt': question}))
    question = [*others, {**last, 'content': last['content'] + ending}]
  else:
    there = [name for name in parts if row.value.get(name) not in (None, '')] or parts
    question = '\n\n'.join(_text(row, name) for name in there) + ending
  kept = {name: value for name, value in row.value.items() if name not in (*parts, *used, *OWN, 'data_source')}
  return dataclasses.replace(row, value={**kept, **more, 'prompt': question})


def _refused(row: RawRow, name: str, must: str) -> UserError:
  held = short_repr(row.value.get(name))
  return UserError(f'{row.origin}: {name!r} must {must}, but holds {held}: correct the row, or {WAY_OUT}.')


def _listed(names: Sequence[str]) -> str:
  return ', '.join(map(repr, names))
