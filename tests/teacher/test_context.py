"""Re-prompting: templates, choice of demonstrations, shortening that keeps the instruction, and the tokens."""

import re

from hypothesis import given, settings
from hypothesis import strategies as st
import numpy as np
import pytest
import tokenizers
import transformers

from sdpo_jax.config import SelfDistillationConfig
from sdpo_jax.data.prompts import ChatFormat
from sdpo_jax.environments import thinking
from sdpo_jax.errors import UserError
from sdpo_jax.teacher import context
from sdpo_jax.types import Outcome
from tests.golden.tokenizer import CharacterTokenizer
from tests.teacher.teacher_contexts import QUESTION, build

CLOSING = 'Correctly solve the original question.<|end|>\n<|assistant|>\n'


def text_of(built, row):
  return CharacterTokenizer().decode(built.prompt_tokens[row])


def test_the_paper_templates_to_the_letter():
  built = build(['bad', 'good'], [0, 1], ['no', ''], environment_feedback_only_without_solution=False)
  assert built.messages[0] == [
    {'role': 'system', 'content': 'S'},
    {
      'role': 'user',
      'content': 'Q\nCorrect solution:\n\ngood\nThe following is feedback from your unsuccessful earlier attempt:\n\nno'
      '\n\nCorrectly solve the original question.',
    },
  ]
  assert built.messages[1] == QUESTION
  assert built.mask.tolist() == [1, 0] and built.mask.dtype == np.float32


def test_without_demonstrations_feedback_alone_teaches():
  built = build(['bad', 'good'], [0, 1], ['no', ''], include_demonstration=False)
  assert built.solutions == [None, None] and built.mask.tolist() == [1, 0]
  # Of the prompts that are read alone.
  assert built.metrics['teacher/prompt_length_mean'] == len(built.prompt_tokens[0]) != len(built.prompt_tokens[1])
  assert np.isnan(build(['good'], [1]).metrics['teacher/prompt_length_mean'])
  assert 'good' not in built.messages[0][-1]['content'] and 'no' in built.messages[0][-1]['content']


def test_a_failed_attempt_is_shown_before_the_feedback_and_only_beside_a_signal():
  shown = build(
    ['<think>x</think>bad', 'good'],
    [0, 1],
    ['no', ''],
    include_failed_attempt=True,
    dont_reprompt_on_self_success=False,
  )
  assert shown.messages[0][-1]['content'] == (
    'Q\nCorrect solution:\n\ngood\nYour unsuccessful earlier attempt:\n\nbad\n\nCorrectly solve the original question.'
  )
  assert 'unsuccessful' not in shown.messages[1][-1]['content']  # A success is no failed attempt.
  feedback_only = build(['bad'], [0], ['no'], include_failed_attempt=True).messages[0][-1]['content']
  assert feedback_only.index('bad') < feedback_only.index('The following is feedback')
  assert build(['bad'], [0], include_failed_attempt=True).messages[0] == QUESTION
  long = build(['b' * 500], [0], ['no'], include_failed_attempt=True, max_reprompt_len=300)
  assert long.truncated[0] and len(long.prompt_tokens[0]) <= 300 and text_of(long, 0).endswith(CLOSING)


def test_the_random_demonstration_is_another_success_of_the_group_and_every_one_is_drawn():
  texts = [f't{i}' for i in range(8)]
  scores = [1, 1, 0, 1, 1, 0, 0, 1]
  seen = set()
  for step in range(40):
    built = build(texts, scores, group=[0, 0, 0, 0, 1, 1, 1, 1], step=step)
    for row, solution in enumerate(built.solutions):
      chosen = texts.index(solution)
      assert scores[chosen] == 1 and chosen // 4 == row // 4 and chosen != row
      seen.add((row, chosen))
  assert {c for r, c in seen if r == 2} == {0, 1, 3} and {c for r, c in seen if r == 0} == {1, 3}


def test_the_draw_repeats_itself_and_depends_on_seed_and_step():
  texts, scores = [f't{i}' for i in range(32)], [1] * 32

  def draw(**keys):
    return build(texts, scores, **keys).solutions

  assert draw(seed=1, step=2) == draw(seed=1, step=2)
  assert draw(seed=1, step=2) != draw(seed=2, step=2) != draw(seed=2, step=3)


@settings(max_examples=25, deadline=None)
@given(order=st.permutations(range(12)), step=st.integers(0, 5))
def test_the_draw_depends_neither_on_batch_order_nor_on_which_process_holds_the_group(order, step):
  texts, scores, group = [f't{i}' for i in range(12)], [1, 1, 0, 1] * 3, np.repeat(range(3), 4)
  whole = build(texts, scores, group=group, step=step).solutions

  def pick(values, rows):
    return [values[i] for i in rows]

  shuffled = build(
    pick(texts, order), pick(scores, order), group=pick(group, order), step=step, sample_ids=np.array(order)
  ).solutions
  assert shuffled == pick(whole, order)
  rows = list(range(4, 8))
  part = build(pick(texts, rows), pick(scores, rows), group=pick(group, rows), step=step, sample_ids=rows).solutions
  assert part == whole[4:8]


def test_first_follows_batch_order():
  assert build(['a', 'b', 'c'], [1, 1, 0], demonstration='first').solutions == ['b', 'a', 'a']


def test_a_lone_success_learns_only_where_it_may_see_itself():
  assert build(['a', 'b'], [1, 0]).mask.tolist() == [0, 1]
  assert build(['a', 'b'], [1, 0], dont_reprompt_on_self_success=False).mask.tolist() == [1, 1]


def test_scores_are_compared_in_float32():
  scores = [np.float32(0.7), 0.7 - 1e-12, 0.6999]
  assert context.successes_by_group(scores, 'aab', 0.7) == {'a': [0, 1]}


@settings(max_examples=60, deadline=None)
@given(
  solution=st.none() | st.text(min_size=1, max_size=300),
  feedback=st.none() | st.text('xyz\n', min_size=1, max_size=300).filter(str.strip),
  room=st.integers(0, 250),
)
def test_content_truncation_fits_and_never_cuts_question_instruction_or_header(solution, feedback, room):
  texts, scores = ['wrong', solution or 'wrong too'], [0, 0 if solution is None else 1]
  keys = dict(environment_feedback_only_without_solution=False, remove_thinking_from_demonstration=False)
  full = build(texts, scores, [feedback, None], **keys)
  shortest = build(texts, scores, [feedback, None], max_reprompt_len=10**6, **keys)
  assert not shortest.truncated.any()
  least = len(
    context.reprompt(
      QUESTION, context.shorten_middle(solution, 1), context.shorten_end(feedback, 1), SelfDistillationConfig()
    )[-1]['content']
  )
  overhead = len(full.prompt_tokens[0]) - len(full.messages[0][-1]['content'])
  built = build(texts, scores, [feedback, None], max_reprompt_len=least + overhead + room, **keys)
  limit = least + overhead + room
  assert len(built.prompt_tokens[0]) <= limit or not full.mask[0]
  assert built.truncated[0] == (len(full.prompt_tokens[0]) > limit and full.mask[0] > 0)
  if full.mask[0]:
    assert text_of(built, 0).endswith(CLOSING) and '<|user|>\nQ' in text_of(built, 0)
    if built.truncated[0]:  # Hardly any room is wasted.
      assert len(built.prompt_tokens[0]) > limit - 8
  else:
    assert built.prompt_tokens == full.prompt_tokens


def test_the_middle_is_left_out_and_the_beginning_may_have_a_character_more():
  assert [context.shorten_middle('abcdefgh', length, '|') for length in (9, 8, 7, 4, 1, 0)] == [
    'abcdefgh',
    'abcdefgh',
    'abcd|fgh',
    'ab|gh',
    'a|',
    '|',
  ]


def test_a_shortened_demonstration_keeps_its_beginning_and_its_end():
  solution = 'Plan: ' + 'x' * 500 + ' <answer>B</answer>'
  built = build(['bad', solution], [0, 1], max_reprompt_len=250)
  shown = built.messages[0][-1]['content']
  assert 'Correct solution:\n\nPlan: xxx' in shown and '\n...\n' in shown and '<answer>B</answer>\n\nCorrectly' in shown
  assert built.solutions[0] == solution
  assert built.metrics['self_distillation/truncated_fraction'] == 0.5 and built.metrics['teacher/truncation'] == 1.0


def test_shortened_feedback_keeps_its_beginning():
  built = build(['bad'], [0], ['Runtime Error\n' + 'y' * 500], max_reprompt_len=250)
  assert 'attempt:\n\nRuntime Error\nyyy' in built.messages[0][-1]['content']
  assert '...\n\nCorrectly solve' in built.messages[0][-1]['content']


def test_the_longer_text_is_shortened_first():
  keys = dict(environment_feedback_only_without_solution=False, max_reprompt_len=350)
  shown = build(['bad', 's' * 900], [0, 1], ['short feedback', ''], **keys).messages[0][-1]['content']
  assert 'short feedback' in shown and 's\n...\ns' in shown


def test_no_room_for_anything_names_the_setting():
  with pytest.raises(UserError, match='max_reprompt_len=80 leaves no room'):
    build(['bad', 'good solution'], [0, 1], max_reprompt_len=80)


def test_error_truncation_raises_only_for_long_prompts():
  build(['bad', 'good'], [0, 1], reprompt_truncation='error')
  with pytest.raises(UserError, match='max_reprompt_len=100'):
    build(['bad', 'good'], [0, 1], reprompt_truncation='error', max_reprompt_len=100)


@pytest.mark.parametrize('side', ['left', 'right'])
def test_the_reference_truncation_cuts_tokens(side):
  full = build(['bad', 'good'], [0, 1])
  built = build(['bad', 'good'], [0, 1], reprompt_truncation=side, max_reprompt_len=40)
  for row in range(2):
    tokens = full.prompt_tokens[row]
    assert built.prompt_tokens[row] == (tokens[:40] if side == 'right' else tokens[-40:])
  assert built.truncated.tolist() == [len(t) > 40 for t in full.prompt_tokens]


def test_each_distinct_prompt_is_tokenised_once():
  calls = []

  class Counting(CharacterTokenizer):
    def encode(self, text):
      calls.append(text)
      return super().encode(text)

  built = build(['bad'] * 7 + ['good'], [0] * 7 + [1], tokenizer=Counting())
  assert len(calls) == 2 and len(built.prompt_tokens) == 8


def test_an_empty_batch():
  built = build([], [])
  assert np.isnan(built.metrics.pop('teacher/prompt_length_mean'))
  assert built.prompt_tokens == [] and set(built.metrics.values()) == {0.0}


def chat_tokenizer():
  """Return a byte-level tokenizer with a Qwen-like template."""
  core = tokenizers.Tokenizer(
    tokenizers.models.BPE(
      vocab={c: i for i, c in enumerate(sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet()))}, merges=[]
    )
  )
  core.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
  core.decoder = tokenizers.decoders.ByteLevel()
  tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=core, eos_token='<|im_end|>')
  tokenizer.add_special_tokens({'additional_special_tokens': ['<|im_start|>']})
  tokenizer.chat_template = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}{% if "
    "add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% if enable_thinking is defined and enable_thinking is "
    "false %}{{ '<think>\n\n</think>\n\n' }}{% endif %}{% endif %}"
  )
  return tokenizer


@pytest.mark.parametrize('thinking', [None, True, False])
def test_a_transformers_tokenizer(thinking):
  tokenizer = chat_tokenizer()
  args = [[QUESTION] * 3, [0, 0, 0], ['bad é', 'gööd ' * 200, 'x'], [Outcome(0), Outcome(1), Outcome(0)]]
  config = SelfDistillationConfig(max_reprompt_len=300)
  chat = ChatFormat({} if thinking is None else {'enable_thinking': thinking})
  built = context.build_teacher_context(*args, config, tokenizer, seed=0, step=0, chat=chat)
  closing = 'question.<|im_end|>\n<|im_start|>assistant\n' + ('<think>\n\n</think>\n\n' if thinking is False else '')
  for row in (0, 2):
    assert tokenizer.decode(built.prompt_tokens[row]).endswith(closing)
    assert 290 <= len(built.prompt_tokens[row]) <= 300
  assert all(isinstance(token, int) for token in built.prompt_tokens[0])


@pytest.mark.parametrize(
  ('text', 'aloud'),
  [
    ('<think>a</think>\n\nB', 'B'),
    ('a, so b.\n</think>\n\nB', 'B'),  # The chat template opened the block.
    ('a</think>b<think>c</think> d</think> B', 'B'),
    ('B <think>but then', 'B '),  # Cut off.
    ('a</think>B<think>c', 'B'),
    ('B.<think>a</think>\nC', 'B.\nC'),
    ('a\n</think>\n', ''),
    ('<think>a', ''),
    (' B < C ', ' B < C '),
  ],
)
def test_a_demonstration_holds_what_is_said_aloud(text, aloud):
  built = build(['bad', text], [0, 1])
  assert built.solutions[0] == (aloud or None) and built.mask[0] == bool(aloud)
  assert build(['bad', text], [0, 1], remove_thinking_from_demonstration=False).solutions[0] == text


@settings(max_examples=200, deadline=None)
@given(st.lists(st.sampled_from(['<think>', '</think>', ' ', '\n', 'a', '\x1c', '<']), max_size=10).map(''.join))
def test_the_rule_of_the_reference_is_its_regular_expression(text):
  expected = re.sub(r'<think>.*?</think>\s*', '', text, flags=re.DOTALL)
  assert thinking.without_closed_thinking(text) == expected
  assert build(['bad', text], [0, 1], thinking_rule='closed').solutions[0] == expected
  assert '<think>' not in thinking.without_thinking(text) and '</think>' not in thinking.without_thinking(text)


def test_a_success_of_which_nothing_is_left_gives_way_to_another():
  texts, scores = ['bad', 'thought</think>', 'x</think>B', ' \n'], [0, 1, 1, 1]
  for step in range(8):
    assert build(texts, scores, step=step).solutions == ['B', 'B', None, 'B']
  assert build(texts, scores).metrics['self_distillation/success_group_fraction'] == 1.0
  kept = build(texts, scores, demonstration='first', thinking_rule='closed')
  assert kept.solutions == ['thought</think>', 'x</think>B', 'thought</think>', 'thought</think>']
  alone = build(['bad', '<think>x</think>'], [0, 1], ['no', ''])
  assert alone.solutions[0] is None and 'no' in alone.messages[0][-1]['content'] and alone.mask.tolist() == [1, 0]
  empty = build(['bad', '<think>x</think>'], [0, 1], ['no', ''], thinking_rule='closed')
  assert empty.solutions[0] == '' and empty.mask[0] == 1


def test_a_failed_attempt_that_was_cut_off_while_thinking_is_not_shown():
  shown = build(['thinking of', '<think>and then'], [0, 0], ['no', 'no'], include_failed_attempt=True).messages
  assert 'earlier attempt:\n\nthinking of' in shown[0][-1]['content']
  assert 'Your unsuccessful earlier attempt' not in shown[1][-1]['content']


class Reader(CharacterTokenizer):
  """Counts the characters that it reads; `per_token` of them are a token."""

  def __init__(self, per_token=1):
    self.read, self.per_token = 0, per_token

  def encode(self, text):
    self.read += len(text)
    return super().encode(text[:: self.per_token])


@pytest.mark.parametrize('per_token', [1, 3, 40])
def test_a_text_of_megabytes_is_shortened_to_the_same_without_being_read(per_token):
  keys = dict(environment_feedback_only_without_solution=False, include_failed_attempt=True, max_reprompt_len=420)
  feedback = ''.join(f'line {i}\n' for i in range(200_000))
  built, read = [], []
  for said in (feedback[:100_000], feedback):
    reader = Reader(per_token)
    built.append(build(['bad' * 200, 'good' * 300], [0, 1], [said, ''], tokenizer=reader, **keys))
    read.append(reader.read)
  long, longer = built
  assert long.messages == longer.messages and long.prompt_tokens == longer.prompt_tokens
  assert longer.truncated[0] and 420 - 8 < len(longer.prompt_tokens[0]) <= 420
  assert read[0] == read[1] < 420 * (2 * 16 + 12 * per_token)


@pytest.mark.parametrize('side', ['left', 'right'])
@pytest.mark.parametrize('per_token', [1, 40])
def test_the_reference_truncation_reads_no_more_than_it_needs(side, per_token):
  feedback = ''.join(f'line {i}\n' for i in range(200_000))
  reader = Reader(per_token)
  built = build(['bad'], [0], [feedback], tokenizer=reader, reprompt_truncation=side, max_reprompt_len=100)
  read = reader.read
  [whole] = reader.apply_chat_template(built.messages, tokenize=True, return_dict=False, add_generation_prompt=True)
  if side == 'right':
    assert built.prompt_tokens[0] == whole[:100]
  elif per_token == 1:  # Where every position is a token's beginning, the cut does not matter.
    assert built.prompt_tokens[0] == whole[-100:]
  assert built.truncated[0] and read < 100 * 16 * 32
  with pytest.raises(UserError, match='has more than 200 tokens, more than .*max_reprompt_len=100'):
    build(['bad'], [0], [feedback], reprompt_truncation='error', max_reprompt_len=100)


def test_a_long_text_of_few_tokens_is_shown_whole():
  built = build(['bad'], [0], ['x' * 9000], tokenizer=Reader(100), max_reprompt_len=100)
  assert not built.truncated[0] and built.messages[0][-1]['content'].count('x') == 9000


def test_one_question_is_asked_as_those_of_a_run_are():
  config = SelfDistillationConfig(environment_feedback_only_without_solution=False)
  for feedback, limit in (('no', 10_000), ('Runtime Error\n' + 'y' * 500, 250)):
    built = build(
      ['bad', 'good'],
      [0, 1],
      [feedback, None],
      environment_feedback_only_without_solution=False,
      max_reprompt_len=limit,
    )
    config.max_reprompt_len = limit
    tokens, truncated = context.reprompted(QUESTION, 'good', feedback, config, CharacterTokenizer())
    assert (tokens, truncated) == (built.prompt_tokens[0], built.truncated[0]) and truncated == (limit == 250)
  with pytest.raises(UserError, match=r'serve\.teacher_buckets=80 leaves no room'):
    config.max_reprompt_len = 80
    context.reprompted(QUESTION, None, 'no', config, CharacterTokenizer(), setting='serve.teacher_buckets')


def test_a_question_that_ends_with_a_tool_gets_a_turn_of_the_user():
  question = [{'role': 'user', 'content': 'Q'}, {'role': 'tool', 'content': 'T'}]
  tokens, _ = context.reprompted(question, None, 'no', SelfDistillationConfig(), CharacterTokenizer())
  text = CharacterTokenizer().decode(tokens)
  assert '<|tool|>\nT' in text and text.index('T') < text.index('The following is feedback') and text.endswith(CLOSING)


@settings(deadline=None, max_examples=25)
@given(feedback=st.text('ab <|end|>', min_size=1, max_size=600), limit=st.integers(130, 400))
def test_behind_a_prompt_that_is_no_conversation_the_question_stays_as_it_was(feedback, limit):
  config = SelfDistillationConfig(max_reprompt_len=limit)
  prompt = CharacterTokenizer().encode('2+2=')
  tokens, truncated = context.reprompted_behind(prompt, None, feedback, config, CharacterTokenizer())
  assert tokens[: len(prompt)] == prompt and len(tokens) <= limit
  said = CharacterTokenizer().decode(tokens[len(prompt) :])
  assert said.startswith('\nThe following is feedback') and said.endswith(
    '\n\nCorrectly solve the original question.\n\n'
  )
  assert truncated == (feedback not in said)
  with pytest.raises(UserError, match=r'max_reprompt_len=100 leaves no room'):
    context.reprompted_behind(
      prompt, None, feedback, SelfDistillationConfig(max_reprompt_len=100), CharacterTokenizer()
    )
