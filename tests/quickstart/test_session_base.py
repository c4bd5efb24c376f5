"""The tiny agent: its tokenizer, its template, its lessons, and what the committed one promises."""

import random

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import session_learning
from sdpo_jax.config import Config, ModelConfig
from sdpo_jax.environments.workspace import tools as workspace
from sdpo_jax.errors import UserError
from sdpo_jax.models import huggingface
from sdpo_jax.models import tokenizer as tokenizers
from sdpo_jax.quickstart import session_base, session_lessons, supervised, tool_tasks
from sdpo_jax.quickstart.copying import COPY, with_copying
from sdpo_jax.quickstart.session_base import SessionRecipe, make_session_base
from sdpo_jax.quickstart.session_lessons import SessionLesson
from sdpo_jax.serving import tool_calls
from sdpo_jax.teacher.context import reprompt
from tests import tiny

REPOSITORY = tiny.REPOSITORY
COMMITTED = REPOSITORY / 'configs' / 'session_model'
TEXTS = ('find where parse is used in src', 'Grüß dich, 世界!\t 3.14\n\n  two  spaces ', '{"a": [1, 2]}', '')
DISTILLATION = Config().actor.self_distillation
ASK = [{'role': 'system', 'content': 'Be brief.'}, {'role': 'user', 'content': 'show app.py'}]


@pytest.fixture(scope='module')
def tokenizer():
  return tokenizers.load(COMMITTED)


@pytest.mark.parametrize('text', TEXTS)
def test_any_text_survives_the_tokenizer(tokenizer, text):
  assert tokenizer.decode(tokenizer(text)['input_ids']) == text


def test_a_name_is_one_token_wherever_it_stands(tokenizer):
  for name in (*tool_tasks.SYMBOLS, *tool_tasks.FILES, *tool_tasks.FOLDERS, *tool_tasks.PACKAGES, *tool_tasks.BRANCHES):
    [token] = tokenizer(name)['input_ids']
    for text in (f'find {name} in', f'"{name}"}}', f's/{name}/x/g', f'{name}?'):
      assert token in tokenizer(text)['input_ids'], (name, text)


def test_tool_calls_are_in_the_form_of_hermes(tokenizer):
  assert tool_calls.form_of(tokenizer.chat_template) == 'hermes'
  call = {'name': 'edit', 'arguments': {'path': 'app.py', 'old': 'a "b"', 'new': '', 'all': True}}
  written = tool_tasks.write(call)
  assert written == tool_calls.write_calls([tool_calls.ToolCall(**call)], 'hermes')
  said = {'role': 'assistant', 'content': '', 'tool_calls': [{'type': 'function', 'function': call}]}
  text = tokenizer.apply_chat_template([*ASK, said], tokenize=False)
  assert text.endswith(f'<|im_start|>assistant\n{written}<|im_end|>\n')
  assert tokenizer.decode(tokenizer(written)['input_ids'], skip_special_tokens=True) == written


def test_the_template_names_the_tools_behind_what_the_system_says(tokenizer):
  head = '<|im_start|>system\nBe brief.\nTools: read glob<|im_end|>\n<|im_start|>user\nshow app.py<|im_end|>\n'
  schemas = [workspace.TOOLS[name].schema() for name in ('read', 'glob')]
  render = tokenizer.apply_chat_template
  assert render(ASK, tools=schemas, tokenize=False) == head
  assert render(ASK, tools=schemas, tokenize=False, add_generation_prompt=True) == head + '<|im_start|>assistant\n'
  assert render(ASK[1:], tokenize=False) == '<|im_start|>user\nshow app.py<|im_end|>\n'
  answered = [*ASK[1:], {'role': 'assistant', 'content': 'Done.'}, {'role': 'tool', 'content': 'x'}]
  assert render(answered, tokenize=False).endswith(
    '<|im_start|>assistant\nDone.<|im_end|>\n<|im_start|>tool\nx<|im_end|>\n'
  )
  end = tokenizer.convert_tokens_to_ids('<|im_end|>')
  assert tokenizers.stop_token_ids(COMMITTED, tokenizer) == (end,) and tokenizer.eos_token_id == end


def test_every_way_is_a_call_that_the_workspace_takes():
  rng = random.Random(0)
  for name, kind in tool_tasks.KINDS.items():
    task = tool_tasks.draw(rng, name)
    calls = [way.call(task.slots) for way in kind.ways]
    for way, call in zip(kind.ways, calls, strict=True):
      workspace.check(call['name'], call['arguments'])
      assert task.way_of(call) == way.label and calls.count(call) == 1
      assert task.way_of({'name': call['name'], 'arguments': {'path': 'elsewhere'}}) is None


def test_favourites_are_not_what_the_user_of_the_study_wants():
  assert len(session_learning.PREFERENCES) == 10
  for kind, label in session_learning.PREFERENCES.items():
    assert tool_tasks.KINDS[kind].way(label) in tool_tasks.KINDS[kind].ways[1:]


def test_the_base_proposes_its_favourite_four_times_in_five():
  rng = random.Random(0)
  drawn = [tool_tasks.propose(rng, 'find') for _ in range(4000)]
  shares = [drawn.count(way.label) / len(drawn) for way in tool_tasks.KINDS['find'].ways]
  assert shares == pytest.approx([0.8, 0.2 / 3, 0.2 / 3, 0.2 / 3], abs=0.02)
  assert 'rg' not in {tool_tasks.propose(rng, 'find', avoid='rg') for _ in range(500)}


@pytest.mark.parametrize('reprompted', [False, True])
def test_lessons_are_written_as_the_template_writes_them(tokenizer, reprompted):
  rng = random.Random(1)
  for number in range(40):
    most = (0, 4)[number % 2]
    make = session_lessons.reprompted if reprompted else session_lessons.proposals
    item = make(rng, DISTILLATION, most) if reprompted else make(rng, most)
    [(tokens, weights)] = session_base.write([item], tokenizer)
    whole = tokenizer.apply_chat_template(
      item.messages, tools=session_lessons.SCHEMAS if item.tools else None, tokenize=True, return_dict=False
    )
    assert tokens == whole[: len(tokens)] and tokenizer.decode(whole[len(tokens) :]) == '\n'
    learned = tokenizer.decode([token for token, weight in zip(tokens, weights, strict=True) if weight])
    if item.rather is None:
      assert learned == ''.join(f'{item.messages[at]["content"]}<|im_end|>' for at in item.learned)
    if reprompted:
      assert sum(weights) <= len(tokenizer(item.messages[-1]['content'])['input_ids']) + 1


def test_where_a_call_parts_from_the_one_that_is_wanted_nothing_is_learned(tokenizer):
  task = tool_tasks.ToolTask('tests', 'test app.py', {'file': 'app.py'})
  messages = [{'role': 'user', 'content': 'test app.py'}, {'role': 'assistant', 'content': task.text('tox')}]
  [(tokens, weights)] = session_base.write([SessionLesson(messages, False, [1], task.text('pytest'))], tokenizer)
  start = tokens.index(tokenizer.convert_tokens_to_ids('<tool_call>'))
  [at] = [at for at in range(start, len(tokens)) if not weights[at]]
  assert tokenizer.decode(tokens[at]) == 'tox'


def test_conversations_stand_side_by_side_and_each_predicts_its_own():
  written = [([1, 2, 3], [0.0, 1.0, 1.0]), ([4, 5], [0.0, 1.0]), ([9] * 9, [1.0] * 9), ([6, 7], [0.0, 1.0])]
  tokens, positions, segment_ids, weights = session_base.pack(iter([*written, ([8] * 5, [0.0] * 5)]), 2, 5)
  assert tokens.tolist() == [[1, 2, 3, 4, 5], [6, 7, 0, 0, 0]]
  assert positions.tolist() == [[0, 1, 2, 0, 1], [0, 1, 0, 0, 0]]
  assert segment_ids.tolist() == [[1, 1, 1, 2, 2], [1, 1, 0, 0, 0]]
  assert weights.tolist() == [[1, 1, 0, 1, 0], [1, 0, 0, 0, 0]]


def test_it_begins_with_names_that_look_alike_and_heads_that_copy():
  values = supervised.qwen3_json(SessionRecipe(), 40, 2)
  policy, params = huggingface.init(values, jax.random.key(0))
  begun = with_copying(params, policy.config, [[5, 6, 7], [8, 9]], 0)
  common = begun['embedding'] - np.asarray(params['embedding'])
  assert np.array_equal(np.flatnonzero(np.abs(common).sum(1)), [5, 6, 7, 8, 9])
  assert np.allclose(common[5], common[7], atol=1e-6) and not np.allclose(common[5], common[8], atol=1e-2)
  first, own = (
    {name: np.asarray(tree['layers']['attention'][name]) for name in ('value', 'output')} for tree in (params, begun)
  )
  for head, numbers in ((0, slice(0, 32)), (1, slice(32, 64))):
    moved = own['value'][-1, :, head] - first['value'][-1, :, head]
    written = own['output'][-1, 2 * head] - first['output'][-1, 2 * head]
    through = moved @ written  # What of the stream comes out of the head that it came into.
    assert np.allclose(through[numbers, numbers], COPY * np.eye(32), atol=1e-5)
    assert np.abs(through).sum() == pytest.approx(32 * COPY, rel=1e-4)
  assert np.array_equal(own['value'][:-1], first['value'][:-1])


TINY = SessionRecipe(steps=2, rows=1, length=128, tasks=1)


@pytest.mark.slow
def test_what_is_made_has_the_form_of_the_committed_model(tmp_path):
  said = []
  make_session_base(Config(), tmp_path / 'made', TINY, said.append)
  assert said[-1].startswith('step 2/2: cross-entropy ')
  assert sorted(file.name for file in (tmp_path / 'made').iterdir()) == sorted(
    file.name for file in COMMITTED.iterdir()
  )
  for name in ('config.json', 'generation_config.json', 'tokenizer.json', 'tokenizer_config.json'):
    assert (tmp_path / 'made' / name).read_bytes() == (COMMITTED / name).read_bytes()
  with pytest.raises(UserError, match='not empty'):
    make_session_base(Config(), tmp_path / 'made', TINY)


@pytest.mark.slow
def test_the_command_makes_it_with_the_settings_of_a_service(tmp_path):
  line = '--config=configs/session_quickstart.py', '--steps=1', f'--output={tmp_path / "made"}'
  done = tiny.launch('make_base', *line)
  assert done.returncode == 0, done.stderr
  assert (tmp_path / 'made' / 'config.json').read_bytes() == (COMMITTED / 'config.json').read_bytes()


@pytest.mark.slow
def test_the_same_seed_makes_the_same_model(tmp_path):
  for name in ('a', 'b'):
    make_session_base(Config(), tmp_path / name, TINY)
  for file in (tmp_path / 'a').iterdir():
    assert file.read_bytes() == (tmp_path / 'b' / file.name).read_bytes()


def chances(policy, params, tokenizer, items, length=192):
  """Return the probability of the last answer of each conversation."""

  @jax.jit
  def score(params, tokens, segment_ids):
    positions = jnp.broadcast_to(jnp.arange(length, dtype=jnp.int32), tokens.shape)
    hidden, unembedding, _ = policy.apply({}, params, tokens, positions, segment_ids)
    log_probs = jax.nn.log_softmax(jnp.einsum('bsd,vd->bsv', hidden[:, :-1], unembedding))
    return jnp.take_along_axis(log_probs, tokens[:, 1:, None], axis=2)[..., 0]

  written = session_base.write(items, tokenizer)
  tokens, weights = np.zeros((len(items), length), np.int32), np.zeros((len(items), length), np.float32)
  for row, (ids, learned) in enumerate(written):
    tokens[row, : len(ids)], weights[row, : len(ids)] = ids, learned
  filled = np.asarray([len(ids) for ids, _ in written])[:, None]
  segment_ids = (np.arange(length) < filled).astype(np.int32)
  return np.exp((np.asarray(score(params, tokens, segment_ids)) * weights[:, 1:]).sum(1))


def conversation(task, label, said=None, demonstration=None):
  """Return a session in which a way of doing a task is proposed, at once or behind what was said."""
  messages = [{'role': 'system', 'content': 'You are a coding agent.'}, {'role': 'user', 'content': task.ask}]
  if said or demonstration:
    messages = reprompt([*messages, {'role': 'user', 'content': ''}], demonstration, said, DISTILLATION)
    messages[-1]['content'] = messages[-1]['content'].lstrip('\n')
  return SessionLesson([*messages, {'role': 'assistant', 'content': task.text(label)}], True, [len(messages)])


@pytest.mark.slow
def test_the_committed_model_has_favourites_and_understands_corrections_of_them(tokenizer):
  assert sum(path.stat().st_size for path in COMMITTED.iterdir()) <= 3 * 2**20
  policy, params = huggingface.load(COMMITTED, ModelConfig(dtype='float32', remat='none'))
  rng = random.Random(123)
  tasks = [tool_tasks.draw(rng, kind) for kind in session_learning.PREFERENCES for _ in range(6)]
  wanted = [session_learning.PREFERENCES[task.kind] for task in tasks]
  favourites = [tool_tasks.KINDS[task.kind].ways[0].label for task in tasks]
  pairs = list(zip(tasks, wanted, favourites, strict=True))
  plain = chances(policy, params, tokenizer, [conversation(task, label) for task, label, _ in pairs])
  favourite = chances(policy, params, tokenizer, [conversation(task, label) for task, _, label in pairs])
  words = [tool_tasks.correction(rng, label, tried) for _, label, tried in pairs]
  told = chances(
    policy, params, tokenizer, [conversation(*pair[:2], said) for pair, said in zip(pairs, words, strict=True)]
  )
  elsewhere = [words[(at + 6) % len(words)] for at in range(len(words))]  # What is said of another kind of task.
  others = chances(
    policy, params, tokenizer, [conversation(*pair[:2], said) for pair, said in zip(pairs, elsewhere, strict=True)]
  )
  shown = chances(policy, params, tokenizer, [conversation(t, label, None, t.text(label)) for t, label, _ in pairs])
  assert plain.mean() < 0.2 and 0.5 < favourite.mean() < 0.9
  assert told.mean() > 0.7 and shown.mean() > 0.7 and others.mean() < 0.3
