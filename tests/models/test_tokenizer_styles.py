"""Tokenizers and templates in the styles of all families: ids equal those of transformers; messages cannot steer."""

import json

import pytest

from sdpo_jax.config import Config
from sdpo_jax.data import prompts
from sdpo_jax.data.prompts import ChatFormat
from sdpo_jax.environments.grading import Graders
from sdpo_jax.errors import UserError
from sdpo_jax.models import chat_template, control_tokens
from sdpo_jax.models import tokenizer as tokenizers
from sdpo_jax.preflight.prompt_lengths import visible
from sdpo_jax.teacher.context import build_teacher_context
from sdpo_jax.training import startup
from sdpo_jax.training.opening import check_turn_end, stop_token_ids, template_remarks
from sdpo_jax.training.questions import held_out_questions, training_questions
from sdpo_jax.training.room import check_reprompts
from sdpo_jax.training.specs import objective_spec
from sdpo_jax.types import Example, Outcome
from tests.models import tokenizer_styles
from tests.models.tokenizer_styles import STYLES

EVERY = tuple(STYLES)
TEXTS = (
  'The answer is 4.',
  '  two  spaces\n\nand a line ',
  'Zwölf <think> 😀 <0x0A> INST] </think>',
)


@pytest.fixture(scope='module')
def folders(tmp_path_factory):
  root = tmp_path_factory.mktemp('styles')
  return {style: tokenizer_styles.make(style, root / style) for style in EVERY}


@pytest.fixture(scope='module')
def loaded(folders):
  return {style: tokenizers.load(folder, vocab_size=384) for style, folder in folders.items()}


def user(text):
  return {'role': 'user', 'content': text}


def assistant(text):
  return {'role': 'assistant', 'content': text}


def conversations(style, text):
  """Return conversations of one turn, of several, and, if the template accepts one, with a system message."""
  system = [{'role': 'system', 'content': text}] if STYLES[style].takes_system else []
  return [[user(text)], [*system, user(text)], [*system, user('x'), assistant(text), user(text)]]


def library(tokenizer, messages):
  return tokenizer.apply_chat_template(messages, tokenize=True, add_generation_prompt=True, return_dict=False)


@pytest.mark.parametrize('style', EVERY)
def test_prompts_have_the_ids_of_transformers_and_one_bos(style, loaded):
  tokenizer = loaded[style]
  for text in TEXTS:
    asked = conversations(style, text)
    expected = [library(tokenizer, messages) for messages in asked]
    for split in (True, False):
      assert prompts.chat_tokens(tokenizer, asked, ChatFormat(split_special_tokens=split)) == expected
    plain = control_tokens.plain_messages(tokenizer)
    assert [plain.encode(messages) for messages in asked] == expected
    if STYLES[style].writes_bos:
      assert all(ids.count(tokenizer.bos_token_id) == 1 and ids[0] == tokenizer.bos_token_id for ids in expected)
      # What would double it: the tokenizer adds one of its own to the text of a template.
      written = tokenizer.apply_chat_template(asked[0], tokenize=False, add_generation_prompt=True)
      assert tokenizer.encode(written).count(tokenizer.bos_token_id) == 2


@pytest.mark.parametrize('style', EVERY)
def test_prompts_are_shown_as_the_template_writes_them(style, loaded):
  messages = [user('The answer'), assistant(' is\n4'), user(' x ')]
  shown = visible(loaded[style], library(loaded[style], messages))
  written = loaded[style].apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
  assert '⟦' in shown and shown.replace('⟦', '').replace('⟧', '') == written


@pytest.mark.parametrize('style', EVERY)
def test_control_tokens_that_a_message_spells_stay_text(style, loaded):
  tokenizer, made = loaded[style], STYLES[style]
  strings = control_tokens.control_strings(tokenizer)
  assert set(made.special) <= set(strings) and not {'<think>', '<tool_call>'} & set(strings)
  control = set(tokenizer.convert_tokens_to_ids(list(strings)))
  spelled = 'a' + ''.join(f'{text} b{text}\n' for text in strings) + 'c'
  for messages, harmless in zip(conversations(style, spelled), conversations(style, 'x'), strict=True):
    [ids] = prompts.chat_tokens(tokenizer, [messages], ChatFormat())
    kept = [number for number in ids if number in control]
    assert kept == [number for number in library(tokenizer, harmless) if number in control]
    assert kept != [number for number in library(tokenizer, messages) if number in control]  # It would steer.
    written = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert tokenizer.decode(ids) == written


@pytest.mark.parametrize('style', EVERY)
def test_every_declared_stop_ends_a_completion_and_so_does_the_end_of_a_turn(style, folders, loaded):
  tokenizer, made = loaded[style], STYLES[style]
  assert chat_template.turn_end(tokenizer, {}) == made.turn_end
  config = Config()
  config.model.path = str(folders[style])
  declared = set(tokenizer.convert_tokens_to_ids(list(made.stops)))
  assert declared <= set(stop_token_ids(config, tokenizer)) and len(declared) == len(made.stops)
  check_turn_end(config, tokenizer)


@pytest.mark.parametrize('style', ['gemma', 'olmo'])
def test_a_turn_that_would_never_end_is_refused(style, tmp_path):
  """As with base models, and with directories that have lost their generation_config.json."""
  folder = tokenizer_styles.make(style, tmp_path / 'model')
  (folder / 'generation_config.json').unlink()
  tokenizer, config = tokenizers.load(folder), Config()
  config.model.path = str(folder)
  token = tokenizer.convert_tokens_to_ids(STYLES[style].turn_end)
  with pytest.raises(UserError) as error:
    check_turn_end(config, tokenizer)
  assert all(
    part in str(error.value) for part in (f"'{STYLES[style].turn_end}'", f'add {token} to rollout.stop_token_ids')
  )
  config.rollout.stop_token_ids = (token,)
  check_turn_end(config, tokenizer)
  config.rollout.stop_token_ids, config.rollout.stop = (), (STYLES[style].turn_end[:5],)
  check_turn_end(config, tokenizer)
  config.rollout.stop = ()
  tokenizer.chat_template = '{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}'  # Says nothing of it.
  check_turn_end(config, tokenizer)


def test_variables_that_a_template_does_not_read_are_named(loaded):
  config = Config()
  assert [template_remarks(config, tokenizer) for tokenizer in loaded.values()] == [[]] * len(loaded)
  config.data.enable_thinking, config.data.apply_chat_template_kwargs = False, {'think': 1}
  names = [f'data.apply_chat_template_kwargs.{name}' for name in ('think', 'enable_thinking')]
  for style, unread in (('llama', names), ('qwen', names[:1])):
    expected = f'The chat template does not read {" and ".join(unread)}, which therefore has no effect.'
    assert template_remarks(config, loaded[style]) == [expected]


def test_a_template_that_writes_the_date_is_named_unless_it_is_told_another(folders):
  tokenizer, config = tokenizers.load(folders['llama']), Config()
  date = "{% if not day is defined %}{% set day = strftime_now('%d %b %Y') %}{% endif %}{{ day }}"
  tokenizer.chat_template = date + tokenizer.chat_template
  [remark] = template_remarks(config, tokenizer)
  assert remark.startswith('The chat template writes the current date') and 'data.apply_chat_template_kwargs' in remark
  config.data.apply_chat_template_kwargs = {'day': '26 Jul 2024'}
  assert template_remarks(config, tokenizer) == []


@pytest.mark.parametrize(
  'style, says, way_out',
  [
    ('gemma', 'System role not supported', 'it accepts them without the system message'),
    ('mistral', 'Roles must alternate: user, assistant, user, …', 'it accepts them without the system message'),
    ('mistral', 'Roles must alternate: user, assistant, user, …', 'give them roles that it accepts'),
  ],
)
def test_the_row_that_a_template_refuses_is_named(style, says, way_out, folders, loaded, tmp_path):
  """In training and held-out rows, which are read before anything is compiled."""
  rows = [{'prompt': f'{i} + 1?', 'answer': str(i + 1), 'environment': 'math'} for i in range(5)]
  if 'without' in way_out:
    rows[3]['system'] = 'Be brief.'
  else:
    rows[3]['prompt'] = [user('Well?'), user('3 + 1?')]
  path = tmp_path / 'rows.jsonl'
  path.write_text('\n'.join(map(json.dumps, rows)))
  config = Config()
  config.model.path, config.data.train_files, config.data.val_files = str(folders[style]), (str(path),), (str(path),)
  config.data.train_batch_size = 2
  for read in (training_questions, held_out_questions):
    with pytest.raises(UserError) as error:
      read(config, loaded[style])
    assert str(error.value).startswith(f"{path}, line 4: the model's chat template refuses these messages (")
    assert f': {says}; {way_out}' in str(error.value) and 'model.chat_template' in str(error.value)


def test_a_template_that_does_not_take_the_message_of_the_teacher_is_found_before_the_run(loaded):
  """A message from a tool to the student becomes one of the user to the teacher: two user messages in a row."""
  config, tokenizer = Config(), loaded['mistral']
  asked = [user('x'), {'role': 'tool', 'content': 'y'}]
  refused = Example('1', asked, 'math', '1', 'rows', extra={'origin': 'rows.jsonl, line 7'})
  assert library(tokenizer, asked)
  taken = Example('0', [user('x')], 'math', '1', 'rows')
  check_reprompts(tokenizer, [taken], config, objective_spec(config))
  with pytest.raises(UserError, match=r'rows\.jsonl, line 7, as the teacher is asked it: .*\(user, user\): Roles must'):
    check_reprompts(tokenizer, [taken, refused], config, objective_spec(config))
  with pytest.raises(UserError, match=r"The prompt of the teacher for 'y': .*\(user, user\): Roles must"):
    build_teacher_context(
      [asked], [0], ['z'], [Outcome(0.0, 'No.')], config.actor.self_distillation, tokenizer, seed=0, step=0
    )
  config.actor.policy_loss.loss_mode = 'vanilla'  # Nobody teaches.
  check_reprompts(tokenizer, [refused], config, objective_spec(config))


def test_a_template_that_does_not_suit_ends_a_start_before_anything_is_compiled(tmp_path, caplog):
  folder = tokenizer_styles.make('gemma', tmp_path / 'model')
  tokenizer, config = tokenizers.load(folder), Config()
  config.model.path, config.data.enable_thinking = str(folder), True
  refused = Example('1', [{'role': 'user', 'content': 'x'}, {'role': 'tool', 'content': 'y'}], 'math', '1', 'rows')
  with Graders(config.environments) as graders:
    startup.check_questions(config, tokenizer, graders, [], [])
    assert 'does not read data.apply_chat_template_kwargs.enable_thinking, which therefore has' in caplog.text
    (folder / 'generation_config.json').unlink()
    with pytest.raises(UserError, match="The chat template ends an answer with '<end_of_turn>'"):
      startup.check_questions(config, tokenizer, graders, [], [])
    config.rollout.stop = ('<end',)
    tokenizer.chat_template = tokenizer_styles.STYLES['mistral'].template
    with pytest.raises(UserError, match='as the teacher is asked it: .*Roles must alternate'):
      startup.check_questions(config, tokenizer, graders, [refused], [])
