"""The check of re-prompting files: it passes on what the code does and notices every kind of difference."""

import json

import pytest

from tests.golden import reprompt

CONFIG = {'success_reward_threshold': 0.5, 'max_reprompt_len': 80, 'reprompt_truncation': 'right'}
PROMPT = [{'role': 'user', 'content': 'Q'}]
SHOWN = 'Q\nCorrect solution:\n\na\n\nCorrectly solve the original question.'


def scenario():
  """Two samples of a question: the second learns from the first."""
  return {
    'name': 'one',
    'inputs': {
      'uids': ['u', 'u'],
      'raw_prompts': [PROMPT, PROMPT],
      'responses': ['a', 'b'],
      'rewards': [[0.25, 0.25, 0.25], 0],
      'reward_extra_infos': None,
      'config': dict(CONFIG),
      'loss_mode': 'sdpo',
      'enable_thinking': None,
    },
    'expected': {
      'teacher_messages': [PROMPT, [{'role': 'user', 'content': SHOWN}]],
      'self_distillation_mask': [0.0, 1.0],
      'metrics': {'self_distillation/success_sample_fraction': 0.5},
      'solutions': [None, 'a'],
      'feedback_list': [None, None],
      'success_indices_by_uid': {'u': [0]},
    },
  }


def report(folder, case, file='scenarios.json'):
  (folder / file).write_text(json.dumps({'cases': [case]}))
  return reprompt.check(folder)


def test_a_right_scenario_passes_and_missing_files_are_no_fault(tmp_path):
  assert reprompt.check(tmp_path).cases == 0
  found = report(tmp_path, scenario())
  assert (found.cases, found.failed, found.messages) == (1, 0, [])


@pytest.mark.parametrize(
  ('key', 'value'),
  [
    ('teacher_messages', [PROMPT, PROMPT]),
    ('self_distillation_mask', [1.0, 1.0]),
    ('metrics', {'self_distillation/success_sample_fraction': 0.50001}),
    ('metrics', {'self_distillation/unheard_of': 0.5}),
    ('solutions', [None, None]),
    ('feedback_list', [None, 'f']),
    ('success_indices_by_uid', {'u': [0, 1]}),
    ('exception', 'KeyError'),
  ],
)
def test_a_difference_is_found(tmp_path, key, value):
  case = scenario()
  case['expected'][key] = value
  assert report(tmp_path, case).failed == 1


def test_exceptions_and_other_losses(tmp_path):
  case = scenario()
  case['inputs']['config']['reprompt_template'] = '{nope}'
  case['expected'] = {'exception': 'KeyError', 'message': "'nope'"}
  assert report(tmp_path, case).failed == 0
  case = scenario()
  case['inputs']['loss_mode'], case['expected'] = 'vanilla', {'result': None}
  assert report(tmp_path, case).failed == 0


@pytest.mark.parametrize('fault', [None, 'teacher_input_ids', 'teacher_position_ids'])
def test_assembled_sequences(tmp_path, fault):
  case, tokenizer = scenario(), reprompt.CharacterTokenizer()
  header = '<|end|>\n<|assistant|>\n'
  prompts = [tokenizer.encode(f'<|user|>\n{text}{header}')[: CONFIG['max_reprompt_len']] for text in ('Q', SHOWN)]
  assert len(prompts[1]) == CONFIG['max_reprompt_len']  # Cut from the right.
  responses = [[107, 2], [108, 2]]
  pad = [len(prompts[1]) - len(prompt) for prompt in prompts]
  assembly = {
    'responses_ids': responses,
    'response_mask': [[1, 1], [1, 1]],
    'teacher_input_ids': [[0] * p + t + r for p, t, r in zip(pad, prompts, responses, strict=True)],
    'teacher_attention_mask': [[0] * p + [1] * (len(t) + 2) for p, t in zip(pad, prompts, strict=True)],
    'teacher_position_ids': [[0] * p + list(range(len(t) + 2)) for p, t in zip(pad, prompts, strict=True)],
  }
  if fault:
    assembly[fault][1][-1] += 1
  case['expected']['assembly'] = assembly
  assert report(tmp_path, case, 'assembly.json').failed == (fault is not None)


def test_defaults_and_thinking(tmp_path):
  (tmp_path / 'default_config.json').write_text(json.dumps({'yaml_all': {'alpha': 0.5, 'is_clip': 2}}))
  (tmp_path / 'remove_thinking.json').write_text(json.dumps([{'input': '<think>a</think> b', 'expected': 'b'}]))
  assert (reprompt.check(tmp_path).cases, reprompt.check(tmp_path).failed) == (2, 0)
  (tmp_path / 'default_config.json').write_text(json.dumps({'yaml_all': {'alpha': 0.4, 'unknown': 1}}))
  (tmp_path / 'remove_thinking.json').write_text(json.dumps([{'input': '<think>a</think> b', 'expected': ' b'}]))
  assert reprompt.check(tmp_path).failed == 2
