"""Multiple choice and tool use in both profiles: what scores, what is said, what never leaks, what never hangs.

The reference profile's scores and texts are checked against the reference's own in tests/golden (kind `reward`); here
are the clean profile, and what both must survive.
"""

import json

import pytest

from sdpo_jax.config import EnvironmentsConfig
from sdpo_jax.environments import code, mathematics, registry
from sdpo_jax.environments.grading import Graders
from sdpo_jax.environments.judge import read_critique
from sdpo_jax.environments.thinking import without_thinking
from sdpo_jax.types import Example, Outcome
from tests import tiers
from tests.environments.processor_time import processor_seconds_at_most


def judge(name, truth, completion, *, truncated=False, **settings):
  example = Example('q', [{'role': 'user', 'content': 'Q'}], name, truth, name, {'split': 'train'})
  (outcome,) = registry.get(name, EnvironmentsConfig(**settings))([example], [completion], truncated=[truncated])
  return outcome


@pytest.mark.parametrize(
  'inside, letter',
  [('B', 'B'), ('\nb\n', 'B'), ('(B)', 'B'), ('**B**', 'B'), ('B.', 'B'), ('B: 1.4', 'B'), ('B) five', 'B')],
)
def test_a_letter_in_tags_is_found_however_it_is_dressed(inside, letter):
  outcome = judge('mcq', 'B', f'<reasoning>\nA or B\n</reasoning>\n<answer>{inside}</answer>')
  assert (outcome.score, outcome.metrics['pred'], outcome.metrics['format_valid']) == (1.0, letter, 1.0)


@pytest.mark.parametrize(
  'text', ['', 'B', '<answer>B', 'B</answer>', '<answer></answer>', '<answer>A protein</answer>']
)
def test_without_a_letter_in_tags_the_format_is_wrong(text):
  outcome = judge('mcq', 'B', text)
  assert outcome.score == 0.0 and outcome.metrics['format_valid'] == 0.0 and outcome.metrics['incorrect_format'] == 1
  assert 'between <answer> and </answer>' in outcome.feedback


def test_the_last_answer_counts_and_thinking_does_not():
  assert judge('mcq', 'B', '<answer>A</answer> no: <answer>B</answer>').score == 1.0
  assert judge('mcq', 'B', '<think><answer>B</answer></think> I do not know').score == 0.0


def test_incorrect_format_is_inverted_in_the_reference_and_format_valid_is_not():
  right, wrong = '<answer>B</answer>', 'B'
  reference = [judge('mcq', 'B', text, profile='reference') for text in (right, wrong)]
  assert [outcome.metrics['incorrect_format'] for outcome in reference] == [1, 0]
  assert [outcome.metrics['format_valid'] for outcome in reference] == [1.0, 0.0]
  assert [outcome.score for outcome in reference] == [1.0, 1.0]  # The reference needs no tags.


@pytest.mark.parametrize(
  'text, pred',
  [
    ('The answer is (C).', 'C'),
    ('Answer: **D**', 'D'),
    ('so \\boxed{B}', 'B'),
    ('\\boxed{\\text{B}}', 'B'),
    ('B follows, because a reason exists', 'B'),
    ('the answer is (c)', 'C'),
    ("C, I'd say", 'C'),
    ('The correct answer is C. Option A and choice B are wrong.', 'C'),
    ('The answer is A. No: the answer is C.', 'C'),
    ('nothing', ''),
  ],
)
def test_gpqa_finds_the_stated_choice(text, pred):
  assert judge('gpqa', 'C', text).metrics['pred'] == pred


def test_ten_options_of_mmlu_pro():
  assert judge('mmlu_pro', 'J', 'The answer is (J).').score == 1.0
  assert judge('gpqa', 'J', 'The answer is (J).').score == 0.0


@pytest.mark.parametrize('name, wrong', [('mcq', '<answer>A</answer>'), ('gpqa', 'The answer is A.')])
def test_feedback_shows_the_right_choice_only_when_asked(name, wrong):
  assert 'C' not in judge(name, 'C', wrong).feedback.replace('Call', '')
  assert judge(name, 'C', wrong, reveal_answer=True).feedback.endswith('The right answer is C.')


def call(name, **arguments):
  return f'Thought: x\nAction: {name}\nAction Input: {json.dumps(arguments)}\n'


def truth(*calls):
  return json.dumps([{'Action': name, 'Action_Input': json.dumps(arguments)} for name, arguments in calls])


GOLD = truth(('getA', {'place': {'city': 'Ulm', 'geo': [1, 2]}}), ('get-b', {'n': 3}))


@pytest.mark.parametrize(
  'completion, score',
  [
    (call('getA', place={'city': 'Ulm', 'geo': [1, 2]}) + call('get-b', n=3), 1.0),
    (call('get-b', n=3.0) + call('getA', place={'geo': [1, 2], 'city': 'Ulm'}), 1.0),  # Order of calls and keys.
    (call('getA', n=3) + call('get-b', place={'city': 'Ulm', 'geo': [1, 2]}), 0.0),  # Arguments of the other call.
    (call('getA', place={'city': 'Ulm', 'geo': [2, 1]}) + call('get-b', n=3), 0.0),
    (call('getA', place={'city': 'Ulm', 'geo': [1, 2]}), 0.0),
    (call('getA', place={'city': 'Ulm', 'geo': [1, 2]}) + call('get-b', n=3) * 2, 0.0),
    (call('getA', place={'city': 'Ulm', 'geo': [1, 2]}) + call('get-b', n=True), 0.0),
    (
      'Action: `getA`\nAction Input: ```json\n{"place": {"city": "Ulm", "geo": [1, 2]}}\n```\n' + call('get-b', n=3),
      1.0,
    ),
  ],
)
def test_calls_are_compared_one_by_one_as_json(completion, score):
  assert judge('tooluse', GOLD, completion).score == score


def test_tool_feedback_names_the_fault_and_not_the_answer():
  gold = truth(('search', {'secret': 'xyzzy', 'limit': 7}))
  outcome = judge('tooluse', gold, call('search', secret='plugh', extra=1))
  assert (
    outcome.feedback
    == "Call 1 (search): the value of 'secret' is wrong, 'extra' is not to be given, an argument is missing."
  )
  assert 'xyzzy' in judge('tooluse', gold, call('search', secret='plugh'), reveal_answer=True).feedback
  assert 'xyzzy' in judge('tooluse', gold, call('search', secret='plugh'), profile='reference').feedback
  assert judge('tooluse', gold, 'I would search.').feedback.startswith('You called no function')
  hidden = [judge('tooluse', gold, text).feedback for text in (call('find', q=1), call('search'), 'Action: search', '')]
  assert not any('xyzzy' in text or 'limit' in text for text in hidden)


# Texts on which a careless pattern takes hours, or a parser gives up.
BOMBS = {
  'ten megabytes': 'a' * 10_000_000,
  'open tags': '<answer>' * 300_000,
  'open thoughts': '<think>' * 300_000,
  'open actions': 'Action: f\nAction Input: {' * 200_000,
  'actions': 'Action:' * 500_000,
  'spaces': 'answer ' + ' ' * 2_000_000 + '\\boxed{' + ' ' * 2_000_000 + '<answer>' + ' ' * 2_000_000,
  'nested JSON': 'Action: f\nAction Input: ' + '{"a":' * 100_000,
  'nested lists': 'Action: f\nAction Input: {"a": ' + '[' * 100_000 + ']' * 100_000 + '}',
  'digits': 'Action: f\nAction Input: {"a": ' + '9' * 100_000 + '}',
  'surrogates': '\ud800\udfff<answer>\ud800</answer>',
  'null': 'Action: f\nAction Input: {"a": "\x00"}\x00',
}


@pytest.mark.parametrize('bomb', BOMBS)
@pytest.mark.parametrize('profile', tiers.cases(('clean', 'reference'), default=('clean',), slow=('reference',)))
@pytest.mark.parametrize('name', ['mcq', 'gpqa', 'mmlu_pro', 'tooluse'])
def test_no_completion_hangs_or_ends_a_run(name, profile, bomb):
  example = Example('q', [], name, GOLD if name == 'tooluse' else 'B', name, {'split': 'train'})
  with Graders(EnvironmentsConfig(profile=profile)) as graders:
    outcomes = graders.grade([example] * 2, [BOMBS[bomb], 'nothing'], truncated=[True, False])
  assert [outcome.score for outcome in outcomes] == [0.0, 0.0]
  assert all(outcome.graded for outcome in outcomes)


def test_a_ground_truth_that_cannot_be_read_fails_its_completions_and_no_other():
  good = Example('good', [], 'tooluse', GOLD, 'tooluse')
  bad = Example('bad', [], 'tooluse', 'not json', 'tooluse')
  answer = call('getA', place={'city': 'Ulm', 'geo': [1, 2]}) + call('get-b', n=3)
  with Graders(EnvironmentsConfig()) as graders:
    outcomes = graders.grade([bad, good, bad], [answer] * 3, truncated=[False] * 3)
  assert [outcome.score for outcome in outcomes] == [None, 1.0, None]


def test_real_tool_use_gold_texts_all_score_one(pytestconfig):
  folder = pytestconfig.getoption('--datasets')
  if folder is None:
    pytest.skip('needs --datasets')
  rows = [json.loads(line) for line in open(f'{folder}/tooluse/test.json', encoding='utf-8')]
  scores = {'clean': 0.0, 'reference': 0.0}
  for row in rows:
    calls = json.loads(row['answer'])
    text = ''.join(f'Action: {c["Action"]}\nAction Input: {c["Action_Input"]}\n' for c in calls)
    for profile in scores:
      scores[profile] += judge('tooluse', row['answer'], text, profile=profile).score
  assert scores == {'clean': 68.0, 'reference': 66.0}  # The reference cannot score two of its own answers.


def test_an_outcome_that_cannot_be_used_is_ungraded(caplog):
  made = [
    Outcome(float('nan')),
    Outcome('1'),
    Outcome(1.0, feedback=5),
    Outcome(1.0, metrics=None),
    Outcome(True, 'ok'),
  ]
  registry.register('nonsense')(lambda examples, completions, *, truncated: made)
  with Graders(EnvironmentsConfig()) as graders:
    outcomes = graders.grade([Example('q', [], 'nonsense', '', 'x')] * 5, ['text'] * 5, truncated=[False] * 5)
  assert [outcome.score for outcome in outcomes] == [None, None, None, None, 1.0]
  assert 'could not grade 4 of 5 completions' in caplog.text and 'not a finite number: nan' in caplog.text


def test_feedback_on_thousands_of_wrong_calls_stays_short():
  said = judge('tooluse', '[{"Action": "a", "Action_Input": "{}"}]', 'Action: b\nAction Input: {}\n' * 2000).feedback
  assert said.startswith("Call 1: 'b' is not to be called") and len(said) < 1000


def test_half_a_character_in_what_a_grader_says_does_not_reach_the_tokenizer():
  example = Example('q', [{'role': 'user', 'content': 'Q'}], 'half_a_character', '', 'x', {})
  registry.register('half_a_character')(
    lambda examples, completions, *, truncated: [Outcome(0.0, 'a\ud800b', {'pred': '\udfff', 'acc': 0.0})]
  )
  with Graders(EnvironmentsConfig()) as graders:
    (outcome,) = graders.grade([example], ['text'], truncated=[False])
  assert (outcome.feedback, outcome.metrics) == ('a?b', {'pred': '?', 'acc': 0.0})


# (beginning, what is repeated): texts on which a pattern or a parser may take the square of their length.
REPEATED = [
  ('```', ' '),
  ('```', '\t'),
  ('', '``` '),
  ('', '```a\n'),
  ('```python', ' x'),
  ('', 'Action: a\nAction Input: {\n'),
  ('', 'Action: a\nAction Input: {"a":1}\n'),
  ('', 'Action: a\n'),
  ('Action: a\nAction Input: {', '"a":1,\n'),
  ('', 'Action Input:\n{'),
  ('\\boxed{', '{'),
  ('\\boxed{', '\\text{'),
  ('\\boxed{', '1,111'),
  ('', '<answer>'),
  ('<answer>A', ' '),
  ('', 'answer '),
  ('', 'answer is ('),
  ('', '<think>'),
  ('', 'Score-ab: 1 \n'),
  ('', '```\n'),
  ('final score-ab', ' '),
  ('Score-', 'a'),
  ('Score-ab: 1', '0'),
]
READERS = {
  'program': code.last_python_block,
  "the reference's program": code.extract_code,
  'box': mathematics.last_boxed,
  'answer': lambda text: mathematics.quickly('42', text, 0.0),
  'said': without_thinking,
  'critique': lambda text: read_critique(text, 'ab'),
  **{
    f'{name}, {profile}': lambda text, name=name, profile=profile: judge(
      name, GOLD if name == 'tooluse' else 'B', text, profile=profile
    )
    for name in ('mcq', 'gpqa', 'mmlu_pro', 'tooluse')
    for profile in ('clean', 'reference')
  },
}


SLOW_READERS = [name for name in READERS if name.endswith(', reference')]


@pytest.mark.parametrize('reader', tiers.cases(READERS, default=READERS.keys() - SLOW_READERS, slow=SLOW_READERS))
def test_no_completion_is_read_in_time_that_grows_as_the_square_of_its_length(reader):
  for beginning, repeated in REPEATED:
    # Milliseconds if the time is proportional to the length, and otherwise a minute or more.
    with processor_seconds_at_most(2.5):
      READERS[reader](beginning + repeated * (300_000 // len(repeated)))


def test_names_that_feedback_repeats_are_short():
  long = 'x' * 100_000
  keys = ', '.join(f'"{i}{long[:9]}": 1' for i in range(10_000))
  for text in (
    f'Action: {long}\nAction Input: {{}}',
    f'Action: a\nAction Input: {{{keys}}}',
    f'Action: a\nAction Input: {{"{long}": 1}}',
  ):
    said = judge('tooluse', '[{"Action": "a", "Action_Input": "{}"}]', text).feedback
    assert said and len(said) < 1000
