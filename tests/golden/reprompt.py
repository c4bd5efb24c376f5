"""Checks the golden files of kind `reprompt`: messages, masks, metrics, token sequences, thinking removal, defaults."""

from __future__ import annotations

from collections.abc import Callable
import json
import pathlib
from typing import Any

import numpy as np

from sdpo_jax.config import SelfDistillationConfig
from sdpo_jax.data.prompts import ChatFormat
from sdpo_jax.environments.thinking import without_closed_thinking
from sdpo_jax.learning.batching import token_rows
from sdpo_jax.teacher import context
from sdpo_jax.types import Outcome
from tests.golden.report import Report
from tests.golden.tokenizer import CharacterTokenizer

KIND = 'reprompt'
_METRIC_TOLERANCE = 1e-6
# Our default differs on purpose: the reference's cuts the instruction and the assistant header off.
_OWN_DEFAULTS = {'reprompt_truncation': 'content'}


def check(directory: pathlib.Path | str) -> Report:
  """Every case of every file of this kind in `directory`; files may be missing."""
  directory = pathlib.Path(directory)
  report = Report(KIND)
  for file, checker in (('scenarios.json', _scenario), ('assembly.json', _scenario)):
    for case in _read(directory / file, {}).get('cases', []):
      _run(report, f'{file} {case["name"]}', lambda case=case, checker=checker: checker(case))
  for index, case in enumerate(_read(directory / 'remove_thinking.json', [])):
    _run(report, f'remove_thinking.json {index}', lambda case=case: _thinking(case))
  if defaults := _read(directory / 'default_config.json', {}):
    _run(report, 'default_config.json', lambda: _defaults(defaults))
  return report


def _read(path: pathlib.Path, missing: Any) -> Any:
  return json.loads(path.read_text(encoding='utf-8')) if path.exists() else missing


def _run(report: Report, name: str, case: Callable[[], float]) -> None:
  report.cases += 1
  try:
    report.worst = max(report.worst, case())
  except Exception as error:  # Whatever goes wrong is this case's failure; the others still run.
    report.failed += 1
    report.messages.append(f'{name}: {type(error).__name__}: {error}')


def _same(name: str, ours: Any, expected: Any) -> None:
  if ours != expected:
    raise AssertionError(f'{name}: {ours!r}, expected {expected!r}')


def _thinking(case: dict[str, str]) -> float:
  _same('text', without_closed_thinking(case['input']), case['expected'])
  return 0.0


def _defaults(data: dict[str, Any]) -> float:
  ours = SelfDistillationConfig()
  for key, value in {**data.get('yaml_all', {}), **data.get('yaml_templates', {})}.items():
    _same(key, getattr(ours, key), _OWN_DEFAULTS.get(key, value))
  return 0.0


def _outcomes(inputs: dict[str, Any]) -> list[Outcome]:
  count = len(inputs['responses'])
  extra = inputs.get('reward_extra_infos') or {}
  feedback = (list(extra.get('feedback', [])) + [None] * count)[:count]
  # A list is a reward per token, summed in float32 as the reference does.
  scores = [float(np.sum(np.asarray(reward, np.float32), dtype=np.float32)) for reward in inputs['rewards']]
  return [Outcome(score=score, feedback=text) for score, text in zip(scores, feedback, strict=True)]


def _build(inputs: dict[str, Any]) -> context.TeacherContext:
  known = {key: value for key, value in inputs['config'].items() if hasattr(SelfDistillationConfig, key)}
  thinking = inputs.get('enable_thinking')
  return context.build_teacher_context(
    inputs['raw_prompts'],
    inputs['uids'],
    inputs['responses'],
    _outcomes(inputs),
    SelfDistillationConfig(**{**known, 'demonstration': 'first', 'thinking_rule': 'closed'}),
    CharacterTokenizer(),
    seed=0,
    step=0,
    chat=ChatFormat({'enable_thinking': True if thinking is None else thinking}, split_special_tokens=False),
  )


def _scenario(case: dict[str, Any]) -> float:
  """One call of the reference's batch builder; returns the largest error of a metric."""
  inputs, expected = case['inputs'], case['expected']
  if inputs.get('loss_mode', 'sdpo') != 'sdpo':
    _same('result', expected.get('result', 'absent'), None)  # No teacher is asked: there is nothing to build.
    return 0.0
  if 'exception' in expected:
    try:
      _build(inputs)
    except Exception:  # That it raises is checked, not the wording.
      return 0.0
    raise AssertionError(f'nothing was raised, the reference raises {expected["exception"]}')
  built = _build(inputs)
  _same('teacher_messages', built.messages, expected['teacher_messages'])
  _same('self_distillation_mask', built.mask.tolist(), expected['self_distillation_mask'])
  _same('solutions', built.solutions, expected['solutions'])
  _same('feedback_list', built.feedback, expected['feedback_list'])
  threshold = inputs['config'].get('success_reward_threshold', SelfDistillationConfig.success_reward_threshold)
  successes = context.successes_by_group([o.score for o in _outcomes(inputs)], inputs['uids'], threshold)
  if 'success_indices_by_uid' in expected:
    groups = {str(group): rows for group, rows in successes.items()}
    _same('success_indices_by_uid', groups, expected['success_indices_by_uid'])
  errors = [0.0]
  for name, value in expected['metrics'].items():
    errors.append(abs(built.metrics[name] - value))
    if errors[-1] > _METRIC_TOLERANCE:
      raise AssertionError(f'{name}: {built.metrics[name]}, expected {value}')
  if 'assembly' in expected:
    _assembly(built, expected['assembly'])
  return max(errors)


def _assembly(built: context.TeacherContext, expected: dict[str, Any]) -> None:
  """Token sequences and positions, apart from where the padding sits (left and right there, right here)."""
  completions = np.array(expected['responses_ids'], np.int32)
  width = max(map(len, built.prompt_tokens))
  rows = token_rows(built.prompt_tokens, completions, np.array(expected['response_mask'], bool), width)
  for row, mask in enumerate(np.array(expected['teacher_attention_mask'], bool)):
    ours = rows.segment_ids[row] > 0
    for name, values in (('teacher_input_ids', rows.tokens), ('teacher_position_ids', rows.positions)):
      _same(f'{name} {row}', values[row][ours].tolist(), np.array(expected[name][row])[mask].tolist())
