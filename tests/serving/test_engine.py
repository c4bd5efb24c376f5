"""Many adapters in one process: what each gets is its own, whatever the others do, and versions never change."""

from concurrent import futures
import contextlib
import dataclasses
import re
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sdpo_jax.config import TeacherEndpointConfig
from sdpo_jax.environments import json_server
from sdpo_jax.errors import UserError
from sdpo_jax.learning.losses import Sdpo
from sdpo_jax.learning.requests import AdamW, Taught, UpdateOptions
from sdpo_jax.models import huggingface
from sdpo_jax.objective.jsd_pg import JsdPg
from sdpo_jax.rollout.results import Completion
from sdpo_jax.serving import lessons, shelf
from sdpo_jax.serving.engine import Engine, Feedback
from sdpo_jax.serving.kept_programs import KeptPrograms
from sdpo_jax.serving.records import BASE, optimizer_name
from sdpo_jax.serving.shelf import NoPlaceError
from sdpo_jax.teacher.endpoint import Endpoint
from tests.letters import CONFIG, TOKENIZER
from tests.local_server import Server
from tests.scoring_server import Scorer as EndpointScorer
from tests.serving.engines import OPTIMIZER, SETTINGS, feedback, lesson, make_model, random_factors, start
from tests.tiny import REPOSITORY


@pytest.fixture(scope='module')
def model():
  return make_model()


def sample(engine, version, seed=0, n=2):
  handle = engine.submit(version, [3, 4, 5], n=n, seed=seed, step=0, max_tokens=8)
  while engine.turn():
    pass
  return handle.result()


def fingerprint(engine, version):
  """All that can be seen of a version: its samples, its scores, its factors and their average."""
  drawn = [(done.tokens.tolist(), done.model_log_probs.tolist()) for done in sample(engine, version)]
  [scored] = engine.score(version, [([3, 4], [5, 6, 7])], topk=4)
  kept = [] if version == BASE else [engine.factors(version, kind) for kind in ('factors', 'average')]
  arrays = [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves((kept, dataclasses.asdict(scored)))]
  return drawn, arrays


@pytest.mark.parametrize('rounds', [12, pytest.param(200, marks=pytest.mark.slow)])
def test_no_bit_of_a_version_depends_on_what_is_done_beside_it(model, tmp_path, rounds):
  """Random interleavings of sampling, scoring and learning with more adapters than places, decay and clipping on."""
  many = 6 if rounds == 12 else 16
  engine, draw = start(model, tmp_path / 'shelf', many, memory_bytes=100_000), np.random.default_rng(rounds)
  heads = [f'{index}@0' for index in range(many)]
  known = {version: fingerprint(engine, version) for version in (BASE, *heads)}
  waiting = []
  for number in range(rounds):
    action, index = draw.choice(['sample', 'score', 'learn', 'turn']), int(draw.integers(many))
    if action == 'sample' and len({version for version, _, _ in waiting}) < 3:
      version, seed = draw.choice(list(known)), int(draw.integers(3))
      waiting.append((version, seed, engine.submit(version, [3, 4, 5], n=2, seed=seed, step=0, max_tokens=8)))
    elif action == 'score':
      engine.score(heads[index], [([1, 2, 3], [4, 5])])
    elif action == 'learn':
      new = f'{index}@{number + 1}'
      teacher = draw.choice(['live', 'average', 'base', f'version:{index}@0'])
      engine.learn([feedback(heads[index], new, seed=number, teacher=str(teacher))])
      heads[index] = new
    engine.turn()
    waiting = [each for each in waiting if not each[2].done]
  while engine.turn():
    pass
  for version, expected in known.items():
    assert fingerprint(engine, version) == expected, version
  learned = [(f'{index}@0', head) for index, head in enumerate(heads) if head != f'{index}@0']
  assert learned and all(fingerprint(engine, head) != known[first] for first, head in learned)


def test_samples_of_versions_are_those_of_an_engine_with_that_version_alone(model, tmp_path):
  engine = start(model, tmp_path / 'shelf')
  handles = [(index, engine.submit(f'{index}@0', [3, 4, 5], n=2, seed=7, step=0, max_tokens=8)) for index in range(3)]
  assert [engine.served(version) for version in ('0@0', '3@0', BASE)] == [2, None, 0]
  with pytest.raises(NoPlaceError):
    engine.submit('3@0', [3, 4, 5], n=1, seed=7, step=0, max_tokens=8)
  while engine.turn():
    pass
  assert [engine.served(version) for version in ('0@0', '3@0')] == [2, 0]
  assert engine.submit('3@0', [3, 4, 5], n=1, seed=7, step=0, max_tokens=8) is not None
  assert [engine.served(version) for version in ('0@0', '3@0', '2@0')] == [0, 1, 2]  # The first place was given away.
  for index, handle in handles:
    alone = start(model, tmp_path / f'alone{index}')
    for one, other in zip(handle.result(), sample(alone, f'{index}@0', seed=7), strict=True):
      assert isinstance(one, Completion) and one.tokens.tolist() == other.tokens.tolist()
      np.testing.assert_allclose(one.model_log_probs, other.model_log_probs, atol=1e-5)


def test_results_that_are_told_between_turns_free_their_places(model, tmp_path):
  engine = start(model, tmp_path / 'shelf')
  handle = engine.submit('0@0', [3, 4, 5], n=2, seed=7, step=0, max_tokens=8)
  turns = 0
  while not handle.done:
    assert engine.turn() and turns < 20
    engine.tell()
    turns += 1
  assert len(handle.result()) == 2
  engine.forget('0@0')  # Not in use, although no turn came after.
  assert '0@0' not in engine


def test_scores_are_what_was_said_when_it_was_drawn(model, tmp_path):
  engine = start(model, tmp_path / 'shelf')
  for version in ('1@0', BASE):
    for done in sample(engine, version):
      ids = np.tile(np.arange(5, dtype=np.int32), (len(done.tokens), 1))
      [scored] = engine.score(version, [([3, 4, 5], done.tokens.tolist())], topk=8, ids=[ids])
      np.testing.assert_allclose(scored.log_probs, done.model_log_probs, atol=2e-5)
      np.testing.assert_allclose(scored.entropy, done.entropy, atol=2e-5)
      assert (np.diff(scored.top_log_probs) <= 0).all() and scored.of_ids.shape == ids.shape
      named = scored.top_ids == done.tokens[:, None]
      np.testing.assert_allclose(scored.top_log_probs[named], scored.log_probs[named.any(1)], atol=1e-6)


def test_texts_beyond_the_buckets_are_scored_as_they_are_in_parts(model, tmp_path):
  """Where the buckets of prompts and completions are too small, a row is one text; what is said of its tokens is the
  same.
  """
  short, long = start(model, tmp_path / 'a', 1), start(model, tmp_path / 'b', 1, score_buckets=(23,))
  text = np.random.default_rng(0).integers(1, 29, 24).tolist()
  rows = [(text[:1], text[1:]), (text[:17], text[17:]), (text[:12], text[12:21]), (text[:5], text[5:9])]
  ids = [np.random.default_rng(at).integers(0, 40, (len(row[1]), 11), np.int32) for at, row in enumerate(rows)]
  found = long.score('0@0', rows, topk=4, ids=ids)
  assert [len(one.log_probs) for one in found] == [23, 7, 9, 4]
  for (prompt, tokens), own, one in zip(rows, ids, found, strict=True):
    for at in range(0, len(tokens), 8):
      before, part = [*prompt, *tokens[:at]], tokens[at : at + 8]
      if len(before) > 16:
        continue
      [expected] = short.score('0@0', [(before, part)], topk=4, ids=[own[at : at + 8]])
      for field in dataclasses.fields(expected):
        mine, theirs = getattr(one, field.name)[at : at + 8], getattr(expected, field.name)
        np.testing.assert_allclose(mine, theirs, atol=2e-5, err_msg=field.name)
  [alone] = long.score(BASE, rows[:1], topk=0)
  assert alone.top_ids.shape == (23, 0) and alone.log_probs.shape == (23,) and alone.of_ids is None
  with pytest.raises(UserError, match='has 25 tokens, more than the limit of 24'):
    long.score('0@0', [(text[:20], [*text[20:], 1])])
  for empty in (([], text), (text, [])):
    with pytest.raises(UserError, match='is empty|has 24 tokens'):
      long.score('0@0', [empty])


def test_a_version_is_its_own_teacher_unless_another_is_named(model, tmp_path):
  engine = start(model, tmp_path / 'shelf', 2)
  taught = {}
  for teacher in ('live', 'version:0@0', 'version:1@0', 'base'):
    [learned] = engine.learn([feedback('0@0', f'of {teacher}', teacher=teacher)])
    taught[teacher] = learned.said[0].teacher_log_probs
  np.testing.assert_array_equal(taught['live'], taught['version:0@0'])
  prompt, completion = (list(part) for part in (lesson(0).teacher_prompt, lesson(0).completion))
  for teacher, version in (('live', '0@0'), ('version:1@0', '1@0'), ('base', BASE)):
    [scored] = engine.score(version, [(prompt, completion)])
    np.testing.assert_allclose(taught[teacher], scored.log_probs, atol=1e-5)
    assert teacher == 'live' or np.abs(taught[teacher] - taught['live']).max() > 1e-2


def test_a_version_is_restored_as_it_was(model, tmp_path):
  one, other = start(model, tmp_path / 'a', 2), start(model, tmp_path / 'b', 0)
  one.learn([feedback('0@0', '0@1', teacher='average')])
  for name in ('0@1', optimizer_name('0@1')):
    arrays = one.arrays(name)
    assert sum(array.nbytes for array in arrays.values()) == one.bytes_of(name)
    assert not any(array.flags.writeable for array in arrays.values())
    other.restore(name.replace('0@1', 'x@7'), {name: array.copy() for name, array in arrays.items()})
  state = arrays
  for engine, names in ((one, ('0@1', '0@2')), (other, ('x@7', 'x@8'))):
    engine.learn([feedback(*names, seed=1)])
  for name in ('0@2', optimizer_name('0@2')):
    for key, array in one.arrays(name).items():
      np.testing.assert_array_equal(array, other.arrays(name.replace('0@2', 'x@8'))[key])
  assert fingerprint(one, '0@2') == fingerprint(other, 'x@8')
  fresh = other.fresh(3)
  other.create('new@0', seed=3)
  for name, array in other.arrays('new@0').items():
    np.testing.assert_array_equal(array, fresh[name])
  name = next(name for name in state if name.startswith('nu/'))
  for change, said in (
    ({name: None}, f'x@9.optimizer lacks {name}'),
    ({'more': np.zeros(1)}, 'x@9.optimizer also holds more'),
    ({name: state[name][:0]}, 'of shape'),
    ({name: np.float64(state[name])}, 'is float64 of'),
    ({name: state[name] - 1}, 'negative'),
    ({name: state[name] * np.inf}, 'not finite'),
    ({'count': np.int32(-1)}, 'negative'),
    ({'count': np.zeros(1, np.int32)}, 'of shape'),
  ):
    arrays = {key: value for key, value in {**state, **change}.items() if value is not None}
    with pytest.raises(UserError, match=said):
      other.restore(optimizer_name('x@9'), arrays)
  with pytest.raises(UserError, match='lacks factors/'):
    other.restore('x@9', state)
  assert 'x@9' not in other and optimizer_name('x@9') not in other
  with pytest.raises(ValueError, match='exists already'):
    other.restore('x@8', one.arrays('0@2'))
  other.drop('x@8')
  assert 'x@8' not in other and optimizer_name('x@8') in other
  other.restore('x@8', one.arrays('0@2'))
  assert fingerprint(other, 'x@8') == fingerprint(one, '0@2')


def test_what_a_state_leaves_out_is_zero_or_the_factors(model, tmp_path):
  """A version without a state, one with an empty state and one with zeros learn alike, with an average or without."""
  engine = start(model, tmp_path, 3)
  factors = engine.arrays('0@0')
  zeros = {
    name.replace('factors', kind): np.zeros_like(array) for kind in ('mu', 'nu') for name, array in factors.items()
  }
  average = {name.replace('factors', 'average'): array for name, array in factors.items()}
  for name, state in (
    ('none', None),
    ('empty', {}),
    ('zeros', zeros | {'count': np.zeros((), np.int32)}),
    ('average', average),
    ('whole', zeros | average | {'count': np.zeros((), np.int32)}),
  ):
    engine.restore(name, factors)
    if state is not None:
      engine.restore(optimizer_name(name), state)
    engine.learn([feedback(name, f'{name}@1', teacher='average')])
    for of in (str, optimizer_name):
      for key, array in engine.arrays(of('none@1')).items():
        np.testing.assert_array_equal(engine.arrays(of(f'{name}@1'))[key], array)
  engine.learn([feedback('none@1', 'none@2', average_rate=None)])
  assert {name.partition('/')[0] for name in engine.arrays(optimizer_name('none@2'))} == {'mu', 'nu', 'count'}
  engine.forget('none@2')
  assert 'none@2' not in engine and optimizer_name('none@2') not in engine


def test_a_version_that_is_renamed_keeps_its_arrays_and_places(model, tmp_path):
  engine, other = (start(model, tmp_path / name) for name in ('a', 'b'))
  engine.learn([feedback('0@0', 'trial', teacher='average')])
  other.learn([feedback('0@0', '0@1', teacher='average')])
  row = [([3, 4, 5], [6, 7, 8])]
  drawn, [scored] = sample(engine, 'trial', seed=7), engine.score('trial', row)
  before = [engine.arrays(of('trial')) for of in (str, optimizer_name)]
  engine.rename('trial', '0@1')
  assert not {'trial', optimizer_name('trial')} & set(engine.names)
  for arrays, of in zip(before, (str, optimizer_name), strict=True):
    assert all(engine.arrays(of('0@1'))[name] is array for name, array in arrays.items())  # Nothing was copied.
  assert engine.served('0@1') == len(drawn)  # It has the place to sample from.
  for one, again in zip(drawn, sample(engine, '0@1', seed=7), strict=True):
    np.testing.assert_array_equal(one.tokens, again.tokens)
  np.testing.assert_array_equal(engine.score('0@1', row)[0].log_probs, scored.log_probs)
  for each in (engine, other):
    each.learn([feedback('0@1', '0@2', teacher='average')])
  for of in (str, optimizer_name):
    for name, array in other.arrays(of('0@2')).items():
      np.testing.assert_array_equal(engine.arrays(of('0@2'))[name], array)
  engine.forget('0@1')
  assert '0@1' not in engine and engine.served('0@1') == 0
  # One that was loaded by that name meanwhile, and trimmed since, may still have a place.
  engine.restore('0@3', engine.arrays('0@2'))
  sample(engine, '0@3', seed=7)
  engine.drop('0@3')
  engine.rename('0@2', '0@3')
  assert not {'0@2', '0@3'} & set(engine.names) and engine.served('0@3') == len(drawn)


def test_the_base_scores_as_the_model_without_an_adapter(model, tmp_path):
  policy, base = model
  engine = start(model, tmp_path / 'shelf')
  prompt, tokens = [3, 4, 5], [6, 7, 8]
  rows = jnp.asarray([prompt + tokens])
  positions = jnp.arange(6)[None]
  hidden, unembedding, _ = policy.base_policy().apply(base, {}, rows, positions, jnp.ones_like(rows))
  logits = np.asarray(hidden[0, 2:5] @ unembedding.T, np.float64)
  expected = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
  [scored] = engine.score(BASE, [(prompt, tokens)])
  np.testing.assert_allclose(scored.log_probs, expected[np.arange(3), tokens], atol=1e-5)


def test_a_version_goes_on_from_where_it_was_whatever_had_its_place(model, tmp_path):
  """Moments and counts belong to the version: ten steps with interruptions are ten steps."""
  calm, busy = (start(model, tmp_path / name, memory_bytes=limit) for name, limit in (('a', 2**30), ('b', 1)))
  for engine in (calm, busy):
    for step in range(4):
      engine.learn([feedback(f'0@{step}', f'0@{step + 1}', seed=step, teacher='average')])
      if engine is busy:  # Others take all slots, and memory holds nothing.
        engine.learn([feedback(f'1@{step}', f'1@{step + 1}'), feedback(f'2@{step}', f'2@{step + 1}')])
  for kind in ('factors', 'average'):
    jax.tree.map(np.testing.assert_array_equal, calm.factors('0@4', kind), busy.factors('0@4', kind))


def test_the_average_is_the_closed_form(model, tmp_path):
  engine, rate = start(model, tmp_path / 'shelf'), 0.3
  factors = [engine.factors('0@0')]
  for step in range(3):
    engine.learn([feedback(f'0@{step}', f'0@{step + 1}', average_rate=rate)])
    factors.append(engine.factors(f'0@{step + 1}'))
  weights = [(1 - rate) ** 3, *[rate * (1 - rate) ** (2 - step) for step in range(3)]]
  expected = jax.tree.map(
    lambda *leaves: sum(w * np.float64(leaf) for w, leaf in zip(weights, leaves, strict=True)), *factors
  )
  jax.tree.map(
    lambda one, other: np.testing.assert_allclose(one, other, atol=1e-6), engine.factors('0@3', 'average'), expected
  )


def test_a_feedback_learned_in_pieces_is_the_one_learned_at_once(model, tmp_path):
  """To the last bit, whatever other versions and its own are used for between two pieces; a dropped one is none."""
  engine, calm = start(model, tmp_path / 'shelf'), start(model, tmp_path / 'calm')
  asked = [feedback('0@0', '0@1', teacher='average'), feedback('1@0', '1@1', teacher='version:2@0')]
  update = dataclasses.replace(asked[0].update, steps=3)
  asked = [dataclasses.replace(each, update=update, lessons=[lesson(at) for at in range(3)]) for each in asked]
  expected = [dataclasses.asdict(each) for each in calm.learn(asked)]
  before, drawn = fingerprint(engine, '0@0'), []
  for last in (1, 7, None):
    pieces, shares = engine.learn_in_pieces(asked), []
    with pytest.raises(StopIteration) if last is None else contextlib.nullcontext() as ended:
      while last is None or len(shares) < last:
        shares.append(next(pieces))
        version = f'{len(shares) % 5}@0'
        engine.score(version, [([1, 2, 3], [4, 5])])
        drawn.append((version, sample(engine, version, 1)))
        assert '0@1' not in engine and '1@1' not in engine
    pieces.close()
    if last is not None:
      assert fingerprint(engine, '0@0') == before
  assert sum(shares) == pytest.approx(1) and len(shares) == 3 * 5  # Micro-batches, and passes over each.
  jax.tree.map(np.testing.assert_array_equal, [dataclasses.asdict(each) for each in ended.value.value], expected)
  for name in ('0@1', '1@1', optimizer_name('0@1'), optimizer_name('1@1')):
    for key, array in calm.arrays(name).items():
      np.testing.assert_array_equal(engine.arrays(name)[key], array)
  for version, done in drawn[:5]:
    np.testing.assert_array_equal(done[0].tokens, sample(calm, version, 1)[0].tokens)


def test_what_is_not_to_be_kept_leaves_nothing(model, tmp_path):
  engine = start(model, tmp_path / 'shelf')
  before = fingerprint(engine, '0@0')
  [dry, kept] = engine.learn([feedback('0@0', '0@1'), feedback('1@0', '1@1')], keep=lambda index, came: index == 1)
  assert dry.stepped and kept.stepped and '0@1' not in engine and '1@1' in engine
  assert fingerprint(engine, '0@0') == before
  again = start(model, tmp_path / 'other')
  again.learn([feedback('0@0', '0@1')])
  engine.learn([feedback('0@0', '0@1')])  # From the same start, though another had been tried.
  jax.tree.map(np.testing.assert_array_equal, engine.factors('0@1'), again.factors('0@1'))


def test_a_measured_feedback_says_how_likely_the_teachers_tokens_are_to_both_versions(model, tmp_path):
  """They are those of a score of each version; a feedback that is not measured has none."""
  engine = start(model, tmp_path / 'shelf')
  measured = feedback('0@0', '0@1')
  measured = dataclasses.replace(measured, update=dataclasses.replace(measured.update, measured=True))
  [learned] = engine.learn([measured])
  [said], [each] = learned.said, measured.lessons
  for version, found in (('0@0', said.named_before), ('0@1', said.named_after)):
    [scored] = engine.score(version, [(each.prompt, each.completion)], ids=[said.teacher_top_ids])
    assert found.shape == said.teacher_top_ids.shape
    np.testing.assert_allclose(found, scored.of_ids, atol=1e-5)
  assert not np.array_equal(said.named_before, said.named_after)
  [alone] = engine.learn([feedback('1@0', '1@1')])
  assert alone.said[0].named_before is None and alone.said[0].named_after is None


def test_an_engine_whose_device_failed_learns_again(model, tmp_path, monkeypatch):
  keep, failing = KeptPrograms.keep, set()

  def fragile(self, name, function):
    kept = keep(self, name, function)

    def call(*arguments, **static):
      if name in failing:
        raise RuntimeError('out of memory')
      return kept(*arguments, **static)

    return call

  with monkeypatch.context() as patched:
    patched.setattr(KeptPrograms, 'keep', fragile)
    engine = start(model, tmp_path / 'shelf')
  engine.learn([feedback('0@0', '0@1')])
  failing.add('step')
  with pytest.raises(RuntimeError, match='out of memory'):
    engine.learn([feedback('0@1', '0@2'), feedback('1@0', '1@1')])
  failing.clear()
  assert '0@2' not in engine
  engine.learn([feedback('0@1', '0@2'), feedback('1@0', '1@1')])
  calm = start(model, tmp_path / 'calm')
  calm.learn([feedback('0@0', '0@1')])
  calm.learn([feedback('0@1', '0@2')])
  jax.tree.map(
    lambda one, other: np.testing.assert_allclose(one, other, atol=1e-6), engine.factors('0@2'), calm.factors('0@2')
  )


def test_another_model_teaches_as_it_does_from_elsewhere(model, tmp_path):
  """A larger vocabulary and other layers; what it says in the engine is what is given as an answer of an endpoint."""
  larger = CONFIG | dict(vocab_size=48, num_hidden_layers=2)
  other, its_parameters = huggingface.init(larger, jax.random.key(5))
  policy, base = model
  engine = Engine(policy, base, TOKENIZER, SETTINGS, tmp_path / 'shelf', models={'larger': (other, its_parameters)})
  for name in 'ab':
    engine.put(f'{name}@0', random_factors(policy, 0))
  request = feedback('a@0', 'a@1', teacher='model:larger')
  [each] = request.lessons
  row = jnp.asarray([[*each.teacher_prompt, *each.completion]])
  hidden, unembedding, _ = other.apply({}, its_parameters, row, jnp.arange(row.shape[1])[None], jnp.ones_like(row))
  logits = np.asarray(hidden[0] @ unembedding.T, np.float64)[len(each.teacher_prompt) - 1 : -1, : policy.vocab_size]
  said = (
    logits - np.log(np.exp(logits - logits.max(-1, keepdims=True)).sum(-1, keepdims=True)) - logits.max(-1)[:, None]
  )
  ids = np.argsort(-said, axis=-1, kind='stable')[:, :8].astype(np.int32)
  top = np.take_along_axis(said, ids, 1).astype(np.float32)
  own = said[np.arange(len(said)), each.completion].astype(np.float32)
  [came] = engine.learn([request])
  np.testing.assert_allclose(came.said[0].teacher_log_probs, own, atol=1e-5)
  np.testing.assert_array_equal(came.said[0].teacher_top_ids, ids)
  given = dataclasses.replace(each, teacher_prompt=None, taught=Taught(ids, top, own))
  [same] = engine.learn([dataclasses.replace(request, version='b@0', new='b@1', lessons=[given], teacher='given')])
  np.testing.assert_allclose(same.said[0].divergence, came.said[0].divergence, atol=1e-5)
  # By the formula: JSD over the tokens that the teacher named and a bucket for the others.
  [scored] = engine.score('a@0', [(each.prompt, each.completion)], ids=[ids])
  p, q = (
    np.concatenate([np.exp(x), 1 - np.exp(x).sum(-1, keepdims=True)], -1)
    for x in (np.float64(scored.of_ids), np.float64(top))
  )
  m = (p + q) / 2
  expected = 0.5 * (p * np.log(p / m)).sum(-1) + 0.5 * (q * np.log(q / m)).sum(-1)
  np.testing.assert_allclose(came.said[0].divergence, expected, atol=1e-5)
  few = dataclasses.replace(given, taught=Taught(ids[:, :2], top[:, :2], own))
  update = dataclasses.replace(request.update, loss=JsdPg())
  engine.learn([dataclasses.replace(request, version='b@1', new='b@2', lessons=[few], teacher='given', update=update)])
  jax.tree.map(
    lambda one, other: np.testing.assert_allclose(one, other, atol=1e-6), engine.factors('a@1'), engine.factors('b@1')
  )
  for wrong, said in (
    (dict(teacher='model:none'), "no model 'none' to teach, only: larger"),
    (dict(teacher='given'), "teacher='given' requires lessons"),
    (dict(lessons=[given]), 'requires lessons without log-probs'),
    (
      dict(teacher='given', lessons=[dataclasses.replace(given, taught=Taught(ids[:2], top[:2], own[:2]))]),
      'scored 2 tokens, but the completion has',
    ),
  ):
    with pytest.raises(UserError, match=said):
      engine.learn([dataclasses.replace(request, version='a@1', new='a@2', **wrong)])


@pytest.mark.parametrize('loss', [Sdpo(topk=8), Sdpo(alpha=0.0, topk=3), Sdpo(alpha=1.0, topk=8), JsdPg(alpha=0.3)])
def test_a_teacher_that_agrees_teaches_exactly_nothing(model, tmp_path, loss):
  """No feedback: advantages, divergence, loss and gradient are 0 to the bit, and so there is no new version."""
  policy, base = model
  still = AdamW(weight_decay=0.0)
  each = lesson(0)
  plain = dataclasses.replace(each, teacher_prompt=each.prompt)

  def learned(engine, version, teacher, lesson=plain):
    [came] = engine.learn([Feedback(version, 'new', [lesson], UpdateOptions(loss, still, steps=2), teacher)])
    assert came.unchanged == ('new' not in engine)
    engine.forget('new')
    return came

  # Whatever lengths prompts are padded to; and with states of programs that pad them alike.
  apart, alike = start(model, tmp_path / 'apart'), start(model, tmp_path / 'alike', teacher_buckets=(8,))
  alike.create('fresh', seed=1)
  for engine, version, teacher in (
    (apart, '0@0', 'live'),
    (apart, '0@0', 'version:0@0'),
    (alike, '0@0', 'average'),
    (alike, 'fresh', 'base'),
    (alike, '1@0', 'version:1@0'),
  ):
    came = learned(engine, version, teacher)
    [said] = came.said
    assert not said.advantages.any() and not said.divergence.any(), teacher
    np.testing.assert_array_equal(said.teacher_log_probs, said.log_probs_before)
    for step in came.steps:
      assert step['loss'] == step['pg_loss'] == step['jsd_reg'] == step['grad_norm'] == 0.0, teacher
  # With the feedback in its context it teaches.
  assert learned(apart, '0@0', 'live', each).steps[0]['grad_norm'] > 1e-3


@pytest.mark.parametrize('loss', [Sdpo(topk=8), JsdPg()])
def test_a_teacher_elsewhere_that_agrees_teaches_nothing_but_rounding(model, tmp_path, loss):
  policy, base = model
  engine = Engine(policy, base, TOKENIZER, SETTINGS, tmp_path, models={'same': (policy.base_policy(), base)})
  engine.create('fresh', seed=1)
  each = lesson(0)
  each = dataclasses.replace(each, teacher_prompt=each.prompt)
  [scored] = engine.score('fresh', [(each.prompt, each.completion)], topk=8)
  taught = Taught(scored.top_ids, scored.top_log_probs, scored.log_probs)
  for number, (teacher, lesson_) in enumerate(
    (('model:same', each), ('given', dataclasses.replace(each, teacher_prompt=None, taught=taught)))
  ):
    [came] = engine.learn([Feedback('fresh', str(number), [lesson_], UpdateOptions(loss), teacher)])
    assert abs(came.said[0].advantages).max() < 1e-6 and abs(came.steps[0]['loss']) < 1e-6


@pytest.mark.parametrize('dialect, named', [('vllm', 20), ('fireworks', 5)])
def test_an_endpoint_is_asked_before_the_engine_learns(model, tmp_path, monkeypatch, dialect, named):
  """From a thread that has nothing to do with the engine; the same model in the engine teaches the same."""
  policy, base = model
  monkeypatch.setattr(json_server, 'FIRST_PAUSE_S', 0.0)
  same = policy.base_policy()
  scorer = EndpointScorer(same, base, types.SimpleNamespace(decode=str))
  with Server(scorer) as server:
    asked = TeacherEndpointConfig(url=server.url, dialect=dialect, model='m', tokenizer='t', top_k=named, retries=0)
    with Endpoint(asked, policy.vocab_size) as endpoint, futures.ThreadPoolExecutor(1) as elsewhere:
      engine = Engine(policy, base, TOKENIZER, SETTINGS, tmp_path, models={'same': (same, base)})
      for name in 'ab':
        engine.put(f'{name}@0', random_factors(policy, 0))
      taught = elsewhere.submit(lessons.taught, endpoint, [lesson(0), lesson(1)], SETTINGS.topk).result()
  assert len(server.bodies) == 2
  loss = JsdPg(jsd_weight=0.5 if named > 5 else 0.0)
  [there] = engine.learn([Feedback('a@0', 'a@1', taught, UpdateOptions(JsdPg(), OPTIMIZER), 'given')])
  [here] = engine.learn([Feedback('b@0', 'b@1', [lesson(0), lesson(1)], UpdateOptions(loss, OPTIMIZER), 'model:same')])
  for name in ('loss', 'mean_advantage', 'grad_norm'):
    assert there.steps[0][name] == pytest.approx(here.steps[0][name], rel=1e-4, abs=1e-6)
  assert bool(there.warnings) == (named <= 5) and there.steps[0]['floored_fraction'] == 0
  jax.tree.map(
    lambda one, other: np.testing.assert_allclose(one, other, atol=1e-4), engine.factors('a@1'), engine.factors('b@1')
  )


def test_what_is_wrong_is_refused_and_changes_nothing(model, tmp_path):
  engine = start(model, tmp_path / 'shelf')
  for call, said in (
    (lambda: engine.learn([feedback('9@0', '9@1')]), 'no version 9@0'),
    (lambda: engine.learn([feedback('0@0', '1@0')]), 'version 1@0 exists already'),
    (lambda: engine.learn([feedback(BASE, 'x')]), 'cannot learn'),
    (lambda: engine.learn([feedback('0@0', 'x'), feedback('0@0', 'y')]), 'two feedbacks at once'),
    (lambda: engine.learn([feedback('0@0', 'x', teacher='me')]), 'teacher must be'),
    (lambda: engine.learn([feedback('0@0', 'x', teacher='version:7@7')]), 'no version 7@7'),
    (lambda: engine.learn([dataclasses.replace(feedback('0@0', 'x'), lessons=[])]), 'nothing to learn from'),
    (lambda: engine.score('0@0', [([1], [2])], topk=9), 'topk must be between 0 and 8'),
    (lambda: engine.score('0@0', [([1] * 17, [2])]), 'has 17 tokens'),
    (lambda: engine.submit('9@0', [1], n=1, seed=0, step=0, max_tokens=1), 'no version 9@0'),
    (lambda: engine.submit('0@0', [], n=1, seed=0, step=0, max_tokens=1), 'is empty'),
    (lambda: engine.learn([feedback('0@0', 'x'), feedback('1@0', 'x')]), 'the same name for their new version'),
    (lambda: engine.learn([feedback('0@0', BASE)]), 'needs a name'),
    (lambda: feedback('0@0', 'x', average_rate=float('nan')), 'average_rate must be between 0 and 1'),
    (lambda: engine.learn([feedback('0@0', 'x', teacher='given')]), "only teacher='given' takes"),
    (lambda: engine.learn([feedback('0@0', 'x', teacher='endpoint')]), 'teacher must be'),
    (lambda: engine.put(BASE, random_factors(model[0], 0)), 'needs a name'),
    (lambda: engine.restore(BASE, engine.arrays('0@0')), 'needs a name'),
    (lambda: engine.submit('0@0', [99], n=1, seed=0, step=0, max_tokens=1), 'token'),
    (lambda: engine.submit('0@0', [[3]], n=1, seed=0, step=0, max_tokens=1), 'token'),
    (lambda: engine.score('0@0', [([1], [2])], ids=[np.zeros((2, 1), np.int32)]), 'one row for each'),
    (lambda: engine.score('0@0', [([1], [2])], ids=[]), 'one row for each'),
    (lambda: engine.submit('0@0', [1.5], n=1, seed=0, step=0, max_tokens=1), 'token'),
    (lambda: engine.submit('0@0', [1], n=1, seed=0, step=0, max_tokens=99), 'max_tokens'),
    *(
      (lambda options=options: engine.submit('0@0', [1], **(dict(n=1, seed=0, step=0, max_tokens=1) | options)), said)
      for options, said in (
        (dict(temperature=float('nan')), 'temperature must be 0 or a positive number, not nan'),
        (dict(temperature=-1.0), 'temperature must be'),
        (dict(top_p=0.0), 'top_p must be more than 0'),
        (dict(top_k=0), 'top_k must be'),
        (dict(min_p=float('nan')), 'min_p must be'),
        (dict(n=0), 'n must be a whole number of 1'),
        (dict(n=1.5), 'n must be a whole number'),
        (dict(max_tokens=float('nan')), 'max_tokens must be'),
        (dict(step=2**40), 'step must be'),  # It would end the sampler for all.
        (dict(seed=2**100), 'seed must be'),
        (dict(stop=[3]), 'must be a string'),
      )
    ),
    (lambda: engine.score('0@0', [([1], [99])]), 'must hold token ids from'),
    (lambda: engine.score('0@0', [([1], [])]), 'is empty'),
  ):
    with pytest.raises(UserError, match=said):
      call()
  with pytest.raises(NoPlaceError):
    engine.learn([feedback(f'{index}@0', f'{index}@1') for index in range(3)])
  # All places are free again.
  assert all(came.stepped for came in engine.learn([feedback('0@0', '0@1'), feedback('1@0', '1@1')]))
  nan = jax.tree.map(lambda leaf: leaf * np.nan, random_factors(model[0], 0))
  with pytest.raises(UserError, match='not finite'):
    engine.put('n@0', nan)
  with pytest.raises(UserError, match='of shape .* but the engine serves'):
    engine.put('n@0', jax.tree.map(lambda leaf: leaf[..., :1], random_factors(model[0], 0)))
  engine.forget('0@0')
  assert '0@0' not in engine and '0@1' in engine


@pytest.mark.parametrize('error', [OSError(28, 'No space left on device'), RuntimeError('interrupted')])
def test_what_cannot_be_kept_leaves_nothing_of_the_feedbacks_beside_it(model, tmp_path, monkeypatch, error):
  """A full disk, and a failure while one decides; versions of the same call are kept all together or not at all."""
  engine = start(model, tmp_path / 'shelf', memory_bytes=1)
  odd = 'a/../b\n@0\0é' * 99
  engine.put(odd, random_factors(model[0], 7))
  before = {version: fingerprint(engine, version) for version in ('0@0', '1@0', '2@0', odd)}
  requests = [feedback('0@0', '0@1'), feedback('1@0', '1@1')]

  def fail(*_):
    raise error

  with monkeypatch.context() as broken:
    if isinstance(error, OSError):
      broken.setattr(shelf, 'write_atomically', fail)
      with pytest.raises(UserError, match='no room for more adapters'):
        engine.learn(requests)
    else:
      with pytest.raises(RuntimeError, match='interrupted'):
        engine.learn(requests, keep=lambda index, _: index == 0 or fail())
  assert '0@1' not in engine and '1@1' not in engine
  assert {version: fingerprint(engine, version) for version in before} == before
  assert all(came.stepped for came in engine.learn(requests))


@pytest.mark.parametrize('count', [40, pytest.param(1000, marks=pytest.mark.slow)])
def test_many_lessons_are_one_step(model, tmp_path, count):
  engine = start(model, tmp_path / 'shelf')
  few = [lesson(seed) for seed in range(3)]
  [all_of_them] = engine.learn([dataclasses.replace(feedback('0@0', '0@1'), lessons=(few * count)[:count])])
  assert all_of_them.steps[0]['tokens_processed'] == 6 * count and len(all_of_them.said) == count
  [once] = engine.learn([dataclasses.replace(feedback('0@0', '0@2'), lessons=few)])
  assert all_of_them.steps[0]['loss'] == pytest.approx(once.steps[0]['loss'], rel=0.05)


def test_a_new_adapter_says_what_the_model_says(model, tmp_path):
  engine = start(model, tmp_path / 'shelf', adapters=0)
  engine.create('new@0', seed=3)
  for one, other in zip(sample(engine, 'new@0'), sample(engine, BASE), strict=True):
    assert one.tokens.tolist() == other.tokens.tolist()
    np.testing.assert_array_equal(one.model_log_probs, other.model_log_probs)
  assert any(np.asarray(leaf).any() for leaf in jax.tree.leaves(engine.factors('new@0')))


def test_the_program_of_the_docs_runs(model, tmp_path):
  """Its lengths are replaced by those of these tests."""
  program = re.findall(r'```python\n(.*?)```', (REPOSITORY / 'docs' / 'engine.md').read_text(), re.DOTALL)[1]
  for shown, small in {
    'prompt_buckets=(64,), teacher_buckets=(128,), response_buckets=(32,), kept_prefixes=0': '**vars(SETTINGS)',
    'max_tokens=32': 'max_tokens=8',
    'Sdpo(alpha=0.5)': 'Sdpo(alpha=0.5, topk=8)',
  }.items():
    assert program.count(shown) == 1
    program = program.replace(shown, small)
  policy, base = model
  names = {'SETTINGS': SETTINGS, 'policy': policy, 'base': base, 'tokenizer': TOKENIZER, 'folder': tmp_path / 'shelf'}
  names |= {'prompt': [3, 4, 5], 'prompt_with_the_feedback': [3, 4, 5, 6], 'stop_token_ids': (30,)}
  exec(program, names)
  assert names['learned'].stepped and 'ada@1' in names['engine']
