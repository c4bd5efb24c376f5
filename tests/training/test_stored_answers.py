"""Runs on published conversations: a teacher's stored log-probs are learned from, and nothing is sampled."""

from __future__ import annotations

import copy
import json

import jax
import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

from sdpo_jax.config import Config, MeshConfig
from sdpo_jax.config.overrides import assign, reset_unread
from sdpo_jax.configs import cartridge_quickstart
from sdpo_jax.data.conversations import ANSWER
from sdpo_jax.data.prompts import ChatFormat, chat_tokens
from sdpo_jax.distributed import accelerators
from sdpo_jax.errors import UserError
from sdpo_jax.models.forward import forward
from sdpo_jax.preflight import check
from sdpo_jax.training import loop
from sdpo_jax.training.opening import load_tokenizer
from sdpo_jax.training.questions import training_questions
from sdpo_jax.types import TokenRows

VOCABULARY = 486
SD = 'actor.self_distillation'


def flat(rng, breadths, k=20) -> dict:
  """Return log-probs of tokens, as many each as `breadths` says, as `FlatTopLogprobs` are stored."""
  logits = [np.sort(rng.normal(size=k) * 3)[::-1] for _ in breadths]
  log_probs = [(own - np.logaddexp.reduce(own) - 0.01)[:count] for own, count in zip(logits, breadths, strict=True)]
  ids = [rng.permutation(VOCABULARY)[:count] for count in breadths]
  return {
    'token_idx': np.repeat(np.arange(len(breadths)), breadths),
    'token_id': np.concatenate(ids),
    'logprobs': np.concatenate(log_probs).astype(np.float32),
    'shape': (len(breadths), k),
  }


def message(role: str, content: str, token_ids=None, top_logprobs=None) -> dict:
  return {'content': content, 'role': role, 'token_ids': token_ids, 'top_logprobs': top_logprobs}


def conversation(*messages: dict) -> dict:
  return {
    'messages': [*messages],
    'system_prompt': 'Not read.',
    'metadata': {'seed_prompt': 's', 'initial_system_prompt': 'i', 'tool_calls': []},
    'type': 'question',
  }


def write(path, rows) -> str:
  pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path, compression='snappy')
  return str(path)


def make_config(*files: str) -> Config:
  config = cartridge_quickstart.get_config()
  config.data.train_files = files
  config.data.train_batch_size = config.actor.ppo_mini_batch_size = config.actor.ppo_micro_batch_size = 4
  config.data.max_prompt_length, config.data.prompt_buckets = 16, (16,)
  config.rollout.sampled_by = 'data'
  config.actor.self_distillation.distillation_topk = 20
  config.optimizer.name, config.optimizer.lr, config.optimizer.grad_clip = 'sgd', 100.0, 1e6
  config.optimizer.lr_scheduler_type, config.optimizer.lr_warmup_steps = 'constant', 0
  config.trainer.total_training_steps = 1
  config.trainer.test_freq, config.trainer.tensorboard = 0, False
  config.mesh = MeshConfig(1, 1)
  return reset_unread(config)


def dense(rng, tokens: int, k: int, filled: int) -> dict:
  """Return log-probs [tokens, k] as `TopLogprobs` are stored, not sorted; from column `filled` on there are none."""
  log_probs = np.log(rng.dirichlet(np.full(k, 0.3), tokens)) - 0.001
  ids = np.stack([rng.permutation(VOCABULARY)[:k] for _ in range(tokens)])
  log_probs[:, filled:], ids[:, filled:] = -1000, -1
  return {'logprobs': log_probs.tolist(), 'token_ids': ids.tolist()}


@pytest.fixture(scope='module')
def rows() -> list[dict]:
  """Rows as v3, v2 and a client store them, with one, a few and all of 20 log-probs at a position."""
  rng, question = np.random.default_rng(0), message('user', 'bika')
  spoken = rng.integers(0, VOCABULARY, (6, 5))
  return [
    conversation(question, message('assistant', 'a', spoken[0, :3], flat(rng, (1, 5, 20)))),
    conversation(question, message('assistant', 'b', spoken[1, :2], flat(rng, (1, 1)))),  # v2 below 0.99: the top 1.
    conversation(question, message('assistant', 'c', spoken[2, :2], flat(rng, (20, 20)))),  # v3 below 0.99: all.
    conversation(
      message('system', 'Not read.'),
      question,
      message('assistant', 'mota sipo ;', spoken[3, :3]),
      message('user', 'bako'),
      message('assistant', 'd', spoken[4], flat(rng, (3, 1, 2, 20, 20))),  # Cut to three tokens.
    ),
  ]


def of_device(monkeypatch) -> None:
  monkeypatch.setattr(accelerators, 'devices', lambda: jax.devices()[:1])


def entries_of(rows: list[dict]) -> list[tuple[int, int, int, float]]:
  """Return (row, position, token id, probability) of every log-prob within three tokens, of flat rows."""
  stored = [row['messages'][-1]['top_logprobs'] for row in rows]
  return [
    (row, position, token, np.exp(np.float64(value)))
    for row, own in enumerate(stored)
    for position, token, value in zip(own['token_idx'], own['token_id'], own['logprobs'], strict=True)
    if position < 3
  ]


def test_a_run_minimises_the_published_loss_and_goes_on_with_the_same_rows_only(tmp_path, monkeypatch, caplog, rows):
  """Loss and gradient of the slots are those of the published formula, computed in float64, up to Σ p·log p."""
  of_device(monkeypatch)
  config, seen, said = make_config(write(tmp_path / 'rows.parquet', rows)), [], []
  kept, make_session = [], loop.make_session
  monkeypatch.setattr(
    loop, 'make_session', lambda *given, **named: kept.append(make_session(*given, **named)) or kept[0]
  )
  loop.train(config, tmp_path / 'run', on_step=seen.append, announce=said.append)
  assert seen[0].session.teacher is None and not any('teacher' in line for line in said)
  assert 'cut 1 of 4 answers to data.max_response_length=3.' in caplog.text
  assert seen[0].metrics['rollout/truncated_fraction'] == 0.25 and seen[0].metrics['programs/compiled'] == 0
  [(session, slots)] = kept
  asked = [
    [{key: each[key] for key in ('role', 'content')} for each in row['messages'][:-1] if each['role'] != 'system']
    for row in rows
  ]
  prompts = chat_tokens(session.tokenizer, asked, ChatFormat(behind_document=True))
  answers = [row['messages'][-1]['token_ids'][:3].tolist() for row in rows]
  width = max(len(prompt) + len(answer) for prompt, answer in zip(prompts, answers, strict=True))
  whole = [[*prompt, *answer] for prompt, answer in zip(prompts, answers, strict=True)]
  places = np.tile(np.arange(width, dtype=np.int32), (4, 1))
  inside = places < np.array([[len(own)] for own in whole])
  student = TokenRows(
    tokens=np.array([own + [0] * (width - len(own)) for own in whole], np.int32),
    positions=places * inside,
    segment_ids=inside.astype(np.int32),
    target_index=np.array([[len(prompt) - 1 + at for at in range(3)] for prompt in prompts], np.int32),
  )
  (hidden, unembedding), pull_back = jax.vjp(lambda own: forward(session.policy, session.base, own, student), slots)
  words = np.asarray(unembedding, np.float64)[:VOCABULARY]
  logits = np.asarray(hidden, np.float64) @ words.T
  log_probs = logits - np.logaddexp.reduce(logits, axis=-1, keepdims=True)
  entries = entries_of(rows)
  assert len(entries) == 26 + 2 + 40 + 6
  cross_entropy = -np.mean([p * log_probs[row, at, token] for row, at, token, p in entries])
  constant = np.mean([p * np.log(p) for *_, p in entries])
  np.testing.assert_allclose(seen[0].metrics['train/loss'], cross_entropy + constant, rtol=1e-5)
  by_logits = np.zeros_like(logits)
  for row, at, token, p in entries:
    by_logits[row, at] += p * np.exp(log_probs[row, at])
    by_logits[row, at, token] -= p
  by_hidden = (by_logits / len(entries)) @ words
  [gradient] = pull_back((by_hidden.astype(np.float32), np.zeros_like(unembedding)))
  moved = jax.tree.map(lambda old, new: (old - new) / 100, slots, seen[0].state.trainable)
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-6), moved, gradient)
  assert max(np.abs(leaf).max() for leaf in jax.tree.leaves(gradient)) > 1e-3
  [line] = [line for line in (tmp_path / 'run' / 'rollouts' / '1.jsonl').read_text().splitlines() if '"c"' in line]
  assert json.loads(line)['prompt'][-1]['content'] == 'bika' and json.loads(line)['score'] is None
  # Another log-prob is another answer.
  other = copy.deepcopy(rows)
  other[1]['messages'][1]['top_logprobs']['logprobs'][0] -= 0.1
  changed = make_config(write(tmp_path / 'other.parquet', other))
  changed.trainer.total_training_steps = 2
  with pytest.raises(UserError, match='other.parquet'):
    loop.train(changed, tmp_path / 'run')


@pytest.fixture(scope='module')
def tokenizer():
  return load_tokenizer(make_config('rows.parquet'))


def answers_of(path: str, tokenizer, **settings) -> list:
  config = make_config(path)
  config.data.train_batch_size = 1
  for name, value in settings.items():
    assign(config, name.replace('__', '.'), value)
  found = training_questions(config, tokenizer).questions
  return [example.extra[ANSWER] for example in found]


def test_dense_log_probs_are_kept_as_the_third_version_does(tmp_path, tokenizer):
  """The fewest that reach 0.99, the most likely first, or all; as Parquet and as JSON lines."""
  rng = np.random.default_rng(1)
  narrow, short = dense(rng, 3, 8, 8), dense(rng, 3, 8, 2)
  made = [
    conversation(message('user', 'bika'), message('assistant', 'x', [1, 2, 3], stored)) for stored in (narrow, short)
  ]
  (tmp_path / 'rows.jsonl').write_text('\n'.join(map(json.dumps, made)))
  for path in (write(tmp_path / 'rows.parquet', made), str(tmp_path / 'rows.jsonl')):
    kept, fewer = sorted(answers_of(path, tokenizer), key=lambda answer: -len(answer.log_probs))
    for position, (ids, values) in enumerate(zip(narrow['token_ids'], narrow['logprobs'], strict=True)):
      ranked = sorted(zip(values, ids, strict=True), reverse=True)
      count = next((n for n in range(1, 8) if sum(np.exp(value) for value, _ in ranked[:n]) >= 0.99), 8)
      own = kept.positions == position
      assert kept.entry_ids[own].tolist() == [token for _, token in ranked[:count]]
      np.testing.assert_allclose(kept.log_probs[own], [value for value, _ in ranked[:count]], rtol=1e-6)
    assert len(set(np.bincount(kept.positions))) > 1  # Broad and narrow positions.
    assert {1, 2} >= set(np.bincount(fewer.positions)) and (fewer.entry_ids >= 0).all()


FAULTS = [
  ({'top_logprobs': None}, {}, "rows.parquet, row 1: no answer has 'top_logprobs'"),
  ({'token_ids': None}, {}, "row 1, message 2: field 'token_ids' must hold whole numbers, not None"),
  ({'token_ids': [1, 2, 486]}, {}, 'its token ids go from 1 to 486, those of the model from 0 to 485'),
  ({'token_ids': [1, 2]}, {}, "must be those of the 2 'token_ids', not of 3 tokens"),
  ({'role': None}, {}, "field 'messages' must be a list of messages with 'role' and 'content'"),
  ({}, {'token_id': [5, -1, 6]}, 'its token ids go from -1 to 6'),
  ({}, {'token_id': [5, 6]}, "the fields of 'top_logprobs' differ in length"),
  ({}, {'token_id': [5, 6, 0.5]}, "field 'token_id' must hold whole numbers"),
  ({}, {'token_idx': [0, 1, 3]}, "must be those of the 3 'token_ids'"),
  ({}, {'logprobs': [-0.1, 0.2, -0.1]}, 'log-probs must be numbers of at most 0, not 0.2'),
  ({}, {'logprobs': [-0.1, float('nan'), -0.1]}, 'log-probs must be numbers of at most 0, not nan'),
  ({}, {'logprobs': [-0.1, None, -0.1]}, 'log-probs must be numbers of at most 0, not nan'),
  ({}, {'token_idx': [1, 1, 1]}, 'a token has 3 log-probs: raise distillation_topk=2'),
  ({}, {'shape': [2, 20]}, "must be those of the 3 'token_ids', not of 2 tokens"),
]


@pytest.mark.parametrize(('of_message', 'of_log_probs', 'sentence'), FAULTS)
def test_a_faulty_row_is_named(tmp_path, tokenizer, of_message, of_log_probs, sentence):
  stored = {'token_idx': [0, 1, 2], 'token_id': [5, 6, 7], 'logprobs': [-0.1, -0.2, -0.3], 'shape': [3, 20]}
  answer = message('assistant', 'x', [1, 2, 3], stored | of_log_probs) | of_message
  path = write(tmp_path / 'rows.parquet', [conversation(message('user', 'bika'), answer)])
  with pytest.raises(UserError) as raised:
    answers_of(path, tokenizer, actor__self_distillation__distillation_topk=2)
  assert sentence in str(raised.value)


def test_files_without_conversations_are_refused_by_the_command(tmp_path, rows, tokenizer):
  with pytest.raises(UserError, match='data.train_files holds a generator'):
    training_questions(make_config('generator:facts'), tokenizer)
  late = copy.deepcopy(rows[:1])
  stored = late[0]['messages'][1]['top_logprobs']
  late[0]['messages'][1]['top_logprobs'] = {name: stored[name][6:] for name in ('token_idx', 'token_id', 'logprobs')}
  late[0]['messages'][1]['top_logprobs']['shape'] = (3, 20)
  with pytest.raises(UserError, match='none of the first data.max_response_length=2 tokens has log-probs'):
    answers_of(
      write(tmp_path / 'late.parquet', late), tokenizer, data__max_response_length=2, data__response_buckets=()
    )


@pytest.mark.parametrize(
  ('name', 'value', 'sentence'),
  [
    (f'{SD}.alpha', 1.0, 'alpha=1.0: others need more than stored log-probs'),
    (f'{SD}.alpha', 0.5, 'alpha=0.5: others'),
    (f'{SD}.distillation_topk', None, 'distillation_topk=None: set it to the most that a token has'),
    (f'{SD}.distillation_topk_of', 'teacher', "has no effect with rollout.sampled_by='data'"),
    ('rollout.temperature', 0.7, 'another rollout.temperature than that of the stored log-probs; set it to 1'),
    ('rollout.n', 2, 'rollout.n=2: every answer is stored once'),
    ('rollout.steps_off', 1, 'rollout.steps_off=1: only what the student samples depends on the step'),
    ('trainer.test_divergence', True, "test_divergence=True has no effect with rollout.sampled_by='data'"),
    ('model.cartridge.tokens', None, "'data' is only for cartridges"),
    ('actor.policy_loss.loss_mode', 'vanilla', 'which has no teacher'),
    (f'{SD}.teacher_context', 'reprompt', "='data' holds log-probs of a teacher that reads the student's prompts"),
    ('algorithm.rollout_correction.rollout_is', 'token', 'of the student, which does not draw the tokens'),
  ],
)
def test_settings_that_need_more_than_stored_log_probs_are_refused(name, value, sentence):
  config = make_config('rows.parquet')
  assign(config, name, value)
  with pytest.raises(UserError) as raised:
    reset_cartridge(config, name).validate()
  assert sentence in str(raised.value)


def reset_cartridge(config: Config, name: str) -> Config:
  if name == 'model.cartridge.tokens':
    config.model.cartridge.document = ''
  return config


@pytest.mark.slow
def test_the_student_is_evaluated_between_steps_and_a_check_reads_the_rows(tmp_path, monkeypatch, rows):
  of_device(monkeypatch)
  config = make_config(write(tmp_path / 'rows.parquet', rows))
  config.optimizer.lr = 1.0
  config.trainer.total_training_steps, config.trainer.test_freq, config.val_kwargs.n = 2, 1, 1
  config.trainer.batch_order, config.trainer.balance_partitions = 'balanced', 2
  seen = []
  loop.train(config.validate(), tmp_path / 'run', on_step=seen.append)
  assert all('eval/facts/mean@1' in step.metrics and step.metrics['programs/compiled'] == 0 for step in seen)
  assert seen[1].metrics['train/loss'] < seen[0].metrics['train/loss']
  text = check.check(config).text()
  assert '4 questions' in text and 'document' not in text
