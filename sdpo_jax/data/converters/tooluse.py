"""ToolAlpaca (Tang et al. 2023): questions to answer by calling the functions of an API.

The prompt and the held-out questions of `eval_simulated` follow the reference's tooluse/test.json. How the reference
made its training rows is unknown; the ones here hold the calls that ToolAlpaca's own assistant made.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
import json
from typing import Any

from sdpo_jax.data import ground_truth
from sdpo_jax.data.converters.raw import ConversionOptions, Parts, Splits, field, make_row
from sdpo_jax.data.rows import RawRow
from sdpo_jax.errors import UserError, short_repr

PROMPT = (
  "Your task is to answer the user's question using available tools. \n"
  'You have access to the following tools:\n'
  'Name: {name}\n'
  'Description: {description}\n'
  'Documentation:\n'
  '{documentation}\n'
  'Use the following format:\n'
  'Thought: you should always think about what to do\n'
  'Action: the action to take, should be one of the tool names.\n'
  'Action Input: the input to the action, must be in JSON format. All of the action input must be realistic and from '
  'the user.\n\n'
  'Begin!\n'
  'Question: {question}'
)

TRAIN, TEST = 'train_data', 'eval_simulated'
_DETAILS = 'getDetails'  # The call with which ToolAlpaca's assistant asks the user; not a function of the API.
_HINT = '\nHint: '  # Begins a hint for the simulated user after the question.

Call = dict[str, str]  # 'Action': name of the function; 'Action_Input': JSON text.


def convert(parts: Parts, options: ConversionOptions) -> Splits:
  """Return one row per question whose calls all have JSON objects as inputs; other questions cannot be graded.

  Raises:
    UserError: a row is not in the source's schema, or a part has no usable question.
  """
  splits: Splits = {}
  idx = 0
  for split, part, read in (('train', TRAIN, _simulated), ('test', TEST, _golden)):
    splits[split] = []
    for api in parts[part]:
      for question, calls in read(api):
        if ground_truth.check('tooluse', json.dumps(calls)):
          continue
        splits[split].append(_row(api, idx, question, calls))
        idx += 1
    if not splits[split]:
      raise UserError(f'No question of {part} has calls with JSON objects as inputs: is this the right source?')
  return splits


def _golden(api: RawRow) -> Iterator[tuple[str, list[Call]]]:
  """Yield each instruction of an API with its golden answer."""
  questions, answers = field(api, 'Instructions', kind=list), field(api, 'Golden_Answers', kind=list)
  if len(questions) != len(answers):
    raise UserError(f"{api.origin}: {len(questions)} 'Instructions' have {len(answers)} 'Golden_Answers'.")
  yield from zip(questions, answers, strict=True)


def _simulated(api: RawRow) -> Iterator[tuple[str, list[Call]]]:
  """Yield the question of each simulated conversation about an API, and the calls of its functions that followed."""
  if 'Function_Description' not in api.value:  # It failed to build; ToolAlpaca's build_dataset.py skips it too.
    return
  functions = field(api, 'Function_Description', kind=dict)
  for instance in api.value.get('Instances') or []:
    steps = instance.get('intermediate_steps') or [] if isinstance(instance, Mapping) else []
    calls = [_call(api, step) for step in steps]
    calls = [call for call in calls if call['Action'] != _DETAILS]
    if calls and all(call['Action'] in functions for call in calls):
      yield field(RawRow(api.origin, api.number, instance), 'input').rsplit(_HINT, 1)[0], calls


def _call(api: RawRow, step: Any) -> Call:
  try:
    (name, arguments, *_), *_ = step
  except (TypeError, ValueError) as error:
    raise UserError(
      f"{api.origin}: a step of 'intermediate_steps' must be [[action, input, …], …], not {short_repr(step)}."
    ) from error
  return {'Action': name, 'Action_Input': arguments}


def _row(api: RawRow, idx: int, question: str, calls: list[Call]) -> RawRow:
  prompt = PROMPT.format(
    name=field(api, 'Name'),
    description=field(api, 'Description'),
    documentation=field(api, 'NLDocumentation'),
    question=question,
  )
  return make_row(
    api,
    idx,
    kind='tooluse',
    dataset='tooluse',
    prompt=prompt,
    description=prompt,
    answer=json.dumps(calls),
    tests=None,
    elo=1500,
  )
