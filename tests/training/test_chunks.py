"""Runs whose teacher reads, before each prompt, the part of a document that the prompt was written about."""

from __future__ import annotations

import dataclasses
import json

import jax
import numpy as np
import pytest
import torch
import transformers

from sdpo_jax.config import MeshConfig
from sdpo_jax.data.prompts import ChatFormat, document_tokens
from sdpo_jax.data.self_study import Document
from sdpo_jax.distributed import accelerators
from sdpo_jax.errors import UserError
from sdpo_jax.inference import runs
from sdpo_jax.models import parameters
from sdpo_jax.planner.document import tokens as planned_tokens
from sdpo_jax.training import chunk_bank, documents, loop, step
from sdpo_jax.training.opening import load_tokenizer
from sdpo_jax.training.questions import training_questions
from tests.training.cartridge_runs import changed, lines, log_probs, make_config, opened

TEXTS = {
  'one.txt': 'The keeper counts the boats at noon, and again when the tide has turned. Nobody else may count.\n' * 2,
  'two.txt': 'A ledger lists what each boat has brought: nets, salt and rope. It is kept under the stairs.\n',
}
# (question, document, first token of its window, end of it)
ROWS = (
  ('Who counts?', 'one.txt', 0, 20),
  ('And when?', 'one.txt', 11, 40),
  ('What is in it?', 'two.txt', 3, 25),
  ('Where is it kept?', 'two.txt', 3, 25),
)


@pytest.fixture(scope='module')
def config(tmp_path_factory):
  """Return the settings of a run on two documents."""
  folder = tmp_path_factory.mktemp('chunks')
  config = make_config(folder)
  for name, text in TEXTS.items():
    (folder / name).write_text(text)
  rows = [dict(prompt=q, document=name, window_start=start, window_end=end) for q, name, start, end in ROWS]
  (folder / 'rows.jsonl').write_text(''.join(json.dumps(row) + '\n' for row in rows))
  config.data.train_batch_size, config.rollout.n = 4, 2
  config.actor.ppo_mini_batch_size = 4
  named = ','.join(str(folder / name) for name in TEXTS)
  return changed(config, document=named, tokens=12, teacher_scope='chunk', max_chunk=64).validate()


def tokens_of(tokenizer, row):
  """Return the tokens that the teacher reads before a row of `ROWS`: its window, as the template's system message."""
  _, name, start, end = row
  return document_tokens(tokenizer, Document(TEXTS[name], tokenizer).passage((start, end)).strip(), ChatFormat())


def graded_batch(session, state, examples):
  """Return (graded rollouts, batch) of a step on these questions."""
  from sdpo_jax.environments.grading import Graders

  with Graders(session.config.environments) as graders:
    graded = step.rollout_and_grade(session, graders, state, examples, 1, step.Timer())
  context = step.build_teacher_prompts(session, graded, step.sampling_seed(state), 1)
  return graded, step.build_batch(session, state, graded, context, {})


@pytest.mark.parametrize(
  ('mesh', 'divided', 'packed'),
  [
    (MeshConfig(1, 1), None, True),
    *(pytest.param(MeshConfig(4, 2), divided, False, marks=pytest.mark.slow) for divided in (None, True)),
  ],
)
def test_each_prompt_is_taught_by_its_chunk(config, tmp_path, monkeypatch, mesh, divided, packed):
  """The divergence is that from what transformers says behind the chunk; three places serve any number of chunks."""
  monkeypatch.setattr(accelerators, 'devices', lambda: jax.devices()[: mesh.fsdp * mesh.tensor])
  rows = {'pack_sequences': True, 'ppo_micro_batch_size': 1} if packed else {}
  config = changed(config, mesh, divide_document=divided)
  config = dataclasses.replace(config, actor=dataclasses.replace(config.actor, **rows))
  session, state = opened(config, tmp_path)
  bank = session.teacher.policy.adapter
  assert (bank.member_slots, bank.members, bank.parts) == (64, 4, 4 if divided else None)
  alone = parameters.count(session.policy.base_policy().parameter_table())
  assert session.teacher_flops_per_token == session.flops_per_token == session.update_flops_per_token / 2 == 2 * alone
  examples = training_questions(config, session.tokenizer).questions
  graded, batch = graded_batch(session, state, examples)
  if packed:
    batch.rollouts.completion_mask[:, 2:] = False  # So that a row has room for two samples.
  reference = transformers.AutoModelForCausalLM.from_pretrained(config.model.path, dtype=torch.float64)
  rollouts, first = graded.rollouts, documents.read_document(config, session.tokenizer)[:12]
  lengths, expected = rollouts.completion_mask.sum(1).tolist(), []
  for sample, length in enumerate(lengths):
    group = rollouts.group[sample]
    row = [*graded.prompts[group], *rollouts.completion_tokens[sample, :length].tolist()]
    whole = torch.tensor([[*tokens_of(session.tokenizer, ROWS[group]), *row]])
    with torch.no_grad():
      teacher = reference(whole).logits[0, -length - 1 : -1].log_softmax(-1).numpy()
    [student] = log_probs(config, [[*first, *row]], [length])
    expected.append(np.sum(np.exp(teacher) * (teacher - student), axis=-1))
  _, report = step.run_update(session, state, batch)
  # Questions about different chunks share no row.
  assert report.student.rows == (6 if packed else 8)
  for sample, length in enumerate(lengths):
    found = report.token_values['divergence'][sample, :length]
    np.testing.assert_allclose(found, expected[sample], rtol=1e-4, atol=2e-6)
  assert np.concatenate(expected).mean() > 0.01


def test_chunks_that_were_not_used_for_long_make_room(config, tmp_path, monkeypatch):
  monkeypatch.setattr(accelerators, 'devices', lambda: jax.devices()[:1])
  config = changed(config, MeshConfig(1, 1))
  tokenizer = load_tokenizer(config)
  examples = training_questions(config, tokenizer).questions
  session, _ = opened(changed(config, chunks_held=4), tmp_path)
  more = [dataclasses.replace(examples[0], columns=examples[0].columns | {'window_end': end}) for end in (15, 16, 17)]
  read = []
  tokens = chunk_bank.Chunks.tokens
  monkeypatch.setattr(chunk_bank.Chunks, 'tokens', lambda self, *of: read.append(of) or tokens(self, *of))
  places = session.members(examples).tolist()
  assert places == [0, 1, 2, 2] and len(read) == 3
  assert session.members(examples[1:3]).tolist() == [1, 2] and len(read) == 3
  assert session.members([examples[1], more[0]]).tolist() == [1, 3] and len(read) == 4
  # The first chunk is the one not used for the longest time.
  assert session.members(more[:2]).tolist() == [3, 0] and len(read) == 5
  assert session.members(examples[:1]).tolist() == [2] and len(read) == 6
  counts = np.asarray(session.teacher.base['layers']['prefix']['filled'])
  wanted = {0: 16, 2: 20, 3: 15}  # Place → tokens of the text; the template adds as many to each.
  frame = {counts[0, place] - count for place, count in wanted.items()}
  assert len(frame) == 1 and min(frame) > 0
  with pytest.raises(UserError, match='5 questions ask about 5 chunks, and 4 are held at once: raise .*chunks_held'):
    session.members([*examples[:2], *more])


@pytest.mark.slow
def test_a_run_samples_learns_and_evaluates_with_chunks(config, tmp_path, monkeypatch):
  """Also if the teacher writes the answers; all programs are compiled before the first step, and it can be resumed."""
  monkeypatch.setattr(accelerators, 'devices', lambda: jax.devices()[:1])
  config = changed(config, MeshConfig(1, 1))
  config = dataclasses.replace(
    config,
    data=dataclasses.replace(config.data, val_files=config.data.train_files),
    rollout=dataclasses.replace(config.rollout, sampled_by='teacher'),
    trainer=dataclasses.replace(
      config.trainer, test_freq=2, test_divergence=True, total_training_steps=2, save_freq=1, val_before_train=False
    ),
  ).validate()
  loop.train(config, tmp_path / 'whole')
  whole = lines(tmp_path / 'whole')
  assert [line['programs/compiled'] for line in whole if 'train/loss' in line] == [0, 0]
  one = dataclasses.replace(config, trainer=dataclasses.replace(config.trainer, total_training_steps=1))
  loop.train(one, tmp_path / 'two')
  loop.train(config, tmp_path / 'two')
  last = [found[-1] for found in (whole, lines(tmp_path / 'two'))]
  for name in ('train/loss', 'eval/rows/kl_on_student', 'eval/rows/kl_on_teacher'):
    assert last[0][name] == last[1][name] > 0
  assert planned_tokens(config, 1024) == 64
  # An evaluation of the exported cartridge measures the same, with the same chunks.
  runs.export(str(tmp_path / 'whole'), str(tmp_path / 'exported'), 'student')
  source = runs.RunOrModel(model=config.model.path, cartridge=str(tmp_path / 'exported'))
  measured = runs.evaluate_source(config, source).metrics['rows']
  np.testing.assert_allclose(measured['kl_on_teacher'], whole[-1]['eval/rows/kl_on_teacher'], rtol=1e-5)


@pytest.mark.parametrize(
  ('row', 'says'),
  [
    (
      {'window_start': 0, 'window_end': 9, 'window_digest': '0' * 16},
      'line 1: the window was cut out of another text than .*one.txt, or by another tokenizer',
    ),
    ({}, r"rows.jsonl, line 1: .*'window_start' and 'window_end' are \(None, None\)"),
    ({'document': 'three.txt'}, "line 1: field 'document' is 'three.txt', .* one.txt or two.txt"),
    ({'window_start': 3, 'window_end': 3}, 'tokens 3 to 3, its window, are not among the 192 of .*one.txt'),
    ({'window_start': 0, 'window_end': 10**6}, 'tokens 0 to 1000000, its window, are not among'),
    ({'window_start': 0, 'window_end': 40, 'max_chunk': 20}, 'has 40 tokens, and .* around them: raise .*max_chunk=20'),
  ],
)
def test_faulty_windows_end_the_run_at_its_start(config, tmp_path, row, says):
  most = row.pop('max_chunk', 64)
  rows = [{'prompt': 'Who?', 'document': 'one.txt', **row}]
  (tmp_path / 'rows.jsonl').write_text(''.join(json.dumps(row) + '\n' for row in rows * 4))
  data = dataclasses.replace(config.data, train_files=(str(tmp_path / 'rows.jsonl'),))
  config = changed(dataclasses.replace(config, data=data), max_chunk=most)
  with pytest.raises(UserError, match=says):
    loop.train(config, tmp_path / 'run')
  assert not (tmp_path / 'run').exists()


def test_rows_with_a_digest_are_bound_to_their_text(config, tmp_path):
  tokenizer = load_tokenizer(config)
  row = {'prompt': 'Who?', 'window_start': 0, 'window_end': 9, 'window_digest': Document('One text.', tokenizer).digest}
  (tmp_path / 'rows.jsonl').write_text(json.dumps(row))
  data = dataclasses.replace(config.data, train_files=(str(tmp_path / 'rows.jsonl'),), train_batch_size=1)
  config = changed(dataclasses.replace(config, data=data), document=str(tmp_path / 'text.txt'))
  questions = training_questions(config, tokenizer).questions
  (tmp_path / 'text.txt').write_text('One text.')
  assert chunk_bank.check(config, tokenizer, questions, []).of(questions[0])[1:] == (0, 9)
  (tmp_path / 'text.txt').write_text('Two texts.')
  with pytest.raises(UserError, match='line 1: the window was cut out of another text'):
    chunk_bank.check(config, tokenizer, questions, [])


def test_a_window_that_has_more_tokens_by_itself_is_found_at_the_start(config, tmp_path):
  """A character of two tokens is included whole."""
  (tmp_path / 'text.txt').write_text('é' * 40)
  (tmp_path / 'rows.jsonl').write_text('{"prompt": "Who?", "window_start": 1, "window_end": 39}\n' * 4)
  data = dataclasses.replace(config.data, train_files=(str(tmp_path / 'rows.jsonl'),))
  config = changed(dataclasses.replace(config, data=data), document=str(tmp_path / 'text.txt'))
  frame = chunk_bank.Chunks(config, load_tokenizer(config)).frame
  says = rf'rows.jsonl, line \d: .*text.txt, tokens 1 to 39, make {frame + 40} tokens by themselves: raise .*max_chunk='
  with pytest.raises(UserError, match=says):
    loop.train(changed(config, max_chunk=frame + 39), tmp_path / 'run')
  assert not (tmp_path / 'run').exists()


def test_rows_of_csv_files_name_windows(config, tmp_path):
  (tmp_path / 'rows.csv').write_text('prompt,document,window_start,window_end\nWho?,two.txt,3,25\n')
  data = dataclasses.replace(config.data, train_files=(str(tmp_path / 'rows.csv'),), train_batch_size=1)
  config, tokenizer = dataclasses.replace(config, data=data), load_tokenizer(config)
  [question] = training_questions(config, tokenizer).questions
  file, *window = chunk_bank.check(config, tokenizer, [question], []).of(question)
  assert file.endswith('two.txt') and window == [3, 25]


def test_a_document_whose_name_has_a_comma_is_one(config, tmp_path):
  (tmp_path / 'salt, 1851.txt').write_text(TEXTS['one.txt'])
  named = changed(config, document=str(tmp_path / 'salt, 1851.txt'), teacher_scope='full', max_chunk=4352).validate()
  tokenizer = load_tokenizer(config)
  assert documents.read_document(named, tokenizer) == document_tokens(tokenizer, TEXTS['one.txt'], ChatFormat())


def test_each_document_is_tokenised_once_for_its_slots_and_once_for_its_windows(config, tmp_path, monkeypatch):
  seen = []

  def counted(module, name, text_of):
    function = getattr(module, name)
    monkeypatch.setattr(module, name, lambda *given: seen.append((name, text_of(*given))) or function(*given))

  class Opened(Exception):
    pass

  def opening(*given, **settings):
    loop_opens(*given, **settings)
    raise Opened

  loop_opens = loop.make_session
  monkeypatch.setattr(loop, 'make_session', opening)
  counted(documents, 'document_tokens', lambda tokenizer, text, chat: text)
  counted(documents, 'chat_tokens', lambda tokenizer, conversations, chat: conversations[0][0]['content'])
  counted(chunk_bank, 'Document', lambda text, tokenizer: text)
  with pytest.raises(Opened):
    loop.train(config, tmp_path / 'run')
  for text in TEXTS.values():
    assert sorted(name for name, given in seen if given == text) == ['Document', 'document_tokens']


def test_an_evaluation_that_asks_about_too_many_chunks_is_refused_at_the_start(config, tmp_path):
  rows = [dict(prompt='Who?', document='one.txt', window_start=at, window_end=at + 9) for at in range(5)]
  (tmp_path / 'held_out.jsonl').write_text(''.join(json.dumps(row) + '\n' for row in rows))
  config = dataclasses.replace(
    config,
    data=dataclasses.replace(config.data, val_files=(str(tmp_path / 'held_out.jsonl'),)),
    trainer=dataclasses.replace(config.trainer, test_freq=1, test_divergence=True),
  )
  with pytest.raises(UserError, match='5 questions ask about 5 chunks, and 4 are held at once: raise .*chunks_held'):
    loop.train(config.validate(), tmp_path / 'run')


def test_files_that_rows_cannot_tell_apart_are_refused(config, tmp_path):
  (tmp_path / 'one.txt').write_text('Another text of the same name.')
  with pytest.raises(UserError, match='names two files alike'):
    loop.train(changed(config, document=f'{config.model.cartridge.document},{tmp_path / "one.txt"}'), tmp_path / 'run')


def test_settings_that_contradict_are_refused(config):
  for settings, says in (
    ({'chunks_held': 2}, 'chunks_held=2 is fewer than data.train_batch_size=4'),
    ({'teacher_scope': 'full', 'max_chunk': 4352}, 'names several files'),
    ({'group_duplicates': True}, 'group_duplicates=true with model.cartridge.teacher_scope='),
    ({'distractors': ('a',), 'max_distractors': 1, 'document': 'a,b,c'}, 'must begin with a cartridge for each'),
  ):
    grouped = settings.pop('group_duplicates', False)
    made = dataclasses.replace(config, data=dataclasses.replace(config.data, group_duplicates=grouped))
    with pytest.raises(UserError, match=says):
      changed(made, **settings).validate()
