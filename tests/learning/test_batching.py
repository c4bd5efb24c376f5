"""From rollouts to device rows: alignment, denominators, and rows without a signal left out."""

import dataclasses

import numpy as np
import pytest

from sdpo_jax.errors import UserError
from sdpo_jax.learning import batching, packing
from sdpo_jax.rollout.buckets import bucket
from sdpo_jax.training.specs import batch_spec
from tests.generation_batches import make_config, make_samples, per_token


def test_rows_join_prompt_and_completion_and_point_at_the_predicting_state():
  completions = np.array([[7, 8, 9], [5, 0, 0]], np.int32)
  rows = batching.token_rows([[1, 2], [3, 4, 6]], completions, completions > 0, prompt_length=4)
  np.testing.assert_array_equal(rows.tokens, [[1, 2, 7, 8, 9, 0, 0], [3, 4, 6, 5, 0, 0, 0]])
  np.testing.assert_array_equal(rows.segment_ids, [[1, 1, 1, 1, 1, 0, 0], [1, 1, 1, 1, 0, 0, 0]])
  np.testing.assert_array_equal(rows.positions[0], [0, 1, 2, 3, 4, 0, 0])
  np.testing.assert_array_equal(rows.target_index, [[1, 2, 3], [2, 0, 0]])


def held(micros):
  """Return the samples of micro-batches."""
  return [sample for micro in micros for row in micro.samples for sample in row]


def test_packed_rows_restart_positions_and_number_their_segments():
  rows = packing.packed_rows([[([1, 2], [7]), (None, [8, 9]), ([3], [5, 6])], []], length=8, width=6)
  np.testing.assert_array_equal(rows.tokens, [[1, 2, 7, 3, 5, 6, 0, 0], [0] * 8])
  np.testing.assert_array_equal(rows.positions, [[0, 1, 2, 0, 1, 2, 0, 0], [0] * 8])
  np.testing.assert_array_equal(rows.segment_ids, [[1, 1, 1, 2, 2, 2, 0, 0], [0] * 8])
  np.testing.assert_array_equal(rows.target_index, [[1, 0, 0, 3, 4, 0], [0] * 6])


@pytest.mark.parametrize('seed', range(20))
def test_packing_holds_every_item_once_within_the_room_in_few_rows(seed):
  rng = np.random.default_rng(seed)
  room = np.array([30, 50, 20])
  sizes = np.stack([rng.integers(0, limit + 1, 40) for limit in room // rng.integers(1, 4)], axis=1)
  rows = packing.pack(sizes, room, 4)
  assert sorted(item for row in rows for item in row) == list(range(40))
  assert all((sizes[row].sum(0) <= room).all() for row in rows)
  least = int(np.ceil(sizes.sum(0) / room).max())
  assert len(rows) <= 2 * least + 4
  assert rows == packing.pack(sizes, room, 4)


@pytest.mark.parametrize('seed', range(20))
def test_packing_counts_what_is_shared_once_a_row(seed):
  rng = np.random.default_rng(seed)
  room = np.array([30, 50, 20])
  keys = rng.integers(0, 6, 40)
  shared = np.stack([np.zeros(6, int), rng.integers(0, 30, 6), np.zeros(6, int)], axis=1)[keys]
  sizes = shared + np.stack([rng.integers(1, 8, 40) for _ in room], axis=1)
  rows = packing.pack(sizes, room, 1, keys, shared)
  assert sorted(item for row in rows for item in row) == list(range(40))
  for row in rows:
    first = [item for place, item in enumerate(row) if keys[item] not in keys[row[:place]]]
    taken = (sizes - shared)[row].sum(0) + shared[first].sum(0)
    assert (taken <= room).all()
  assert len(rows) <= len(packing.pack(sizes, room, 1))
  assert rows == packing.pack(sizes, room, 1, keys, shared)


def test_the_last_rows_of_a_packing_may_be_smaller():
  # Nine items of ten tokens take three rows of forty, so four: two whole ones and two of ten, not of five.
  sizes = np.full((9, 1), 10)
  rows = packing.pack(sizes, [40], 2, smaller=[[5], [10], [20]])
  assert [len(row) for row in rows] in ([4, 3, 1, 1], [3, 4, 1, 1], [4, 4, 1])
  assert sorted(item for row in rows for item in row) == list(range(9))
  assert [len(row) for row in packing.pack(sizes, [40], 2)] == [3, 2, 2, 2]
  # The 15 fit into none of the whole rows, so the last ones have room for it; else they are whole too.
  rows = packing.pack(np.array([[15], [10], [10], [30], [30]]), [40], 2, smaller=[[10], [15], [20]])
  assert [sum([15, 10, 10, 30, 30][item] for item in row) for row in rows] == [40, 30, 15, 10]
  rows = packing.pack(np.array([[30], [30], [30]]), [40], 2, smaller=[[10], [20]])
  assert sorted(map(tuple, rows)) == [(0,), (1,), (2,)]


@pytest.mark.parametrize('seed', range(10))
@pytest.mark.parametrize('size', [1, 2, 4])
def test_packed_micro_batches_have_the_cheapest_declared_lengths_that_hold_them(size, seed):
  config = make_config(ppo_micro_batch_size=size, pack_sequences=True)
  config.data.prompt_buckets, config.data.response_buckets = (4, 8), (3, 6)
  config.data.reprompt_buckets = (6, 16)
  samples = make_samples(config.validate(), seed)
  micros = list(batching.micro_batches(samples, np.arange(8), batch_spec(config)))
  assert sorted(held(micros)) == [0, 2, 3, 5]
  expected, found = (np.where(samples.rollouts.completion_mask, x, 0) for x in (samples.distill_mask, np.zeros((8, 6))))
  for micro in micros:
    targets = max(int(row.sum()) for row in micro.batch.mask)
    student, teacher = ((side.segment_ids > 0).sum(1).max() for side in (micro.batch.student, micro.batch.teacher))
    width = micro.batch.targets.shape[1]
    shape = micro.batch.student.tokens.shape[1], micro.batch.teacher.tokens.shape[1], width
    possible = [
      (prompt + response, reprompt + response, response)
      for prompt in (4, 8)
      for reprompt in (6, 16)
      for response in (3, 6)
      if response >= targets and prompt + response >= student and reprompt + response >= teacher
    ]
    # A row of the student goes forward and backward, for one forward pass of the teacher.
    assert shape in possible and 3 * shape[0] + shape[1] == min(3 * a + b for a, b, _ in possible)
    samples.scatter(micro.samples, np.asarray(micro.batch.distill_coef > 0, np.float64), found)
  np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize('seed', range(5))
@pytest.mark.parametrize('size', [1, 3, 8])
def test_packing_never_computes_more_tokens_than_rows_of_one_sample(size, seed):
  def computed(packed):
    config = make_config(ppo_micro_batch_size=size, pack_sequences=packed)
    config.data.prompt_buckets, config.data.response_buckets = (4, 8), (3, 6)
    config.data.reprompt_buckets = (6, 16)
    samples = dataclasses.replace(make_samples(config.validate(), seed), distill_mask=per_token(np.ones(8)))
    micros = list(batching.micro_batches(samples, np.arange(8), batch_spec(config)))
    assert sorted(held(micros)) == list(range(8))
    scored = sum(
      micro.batch.student.tokens.size for micro in batching.student_micro_batches(samples, batch_spec(config))
    )
    return sum(3 * micro.batch.student.tokens.size + micro.batch.teacher.tokens.size for micro in micros), scored

  assert all(packed <= single for packed, single in zip(computed(True), computed(False), strict=True))


def test_samples_that_read_different_members_share_no_row():
  config = make_config(ppo_micro_batch_size=1, pack_sequences=True)
  samples = dataclasses.replace(make_samples(config), distill_mask=per_token(np.ones(8)))
  samples.prompts, samples.teacher_prompts = [[7]] * 8, [[8]] * 8
  samples.rollouts.completion_mask[:, 1:] = False
  samples.members = np.array([0, 0, 1, 1, 1, 1, -1, -1], np.int32)
  samples.mixtures = np.array([[0, 1]] * 4 + [[1, 0]] * 4, np.int32)
  micros = list(batching.micro_batches(samples, np.arange(8), batch_spec(config)))
  assert sorted(map(sorted, (micro.samples[0] for micro in micros))) == [[0, 1], [2, 3], [4, 5], [6, 7]]
  for micro in micros:
    first = micro.samples[0][0]
    np.testing.assert_array_equal(micro.batch.teacher.members, samples.members[[first]])
    np.testing.assert_array_equal(micro.batch.student.members, samples.mixtures[[first]])


def test_completions_of_one_prompt_share_it():
  parts = [([1, 2, 3], [7, 8]), ([4], [9]), (None, [5]), ([1, 2, 3], [6, 5, 4]), ([1, 2, 3], [])]
  rows = packing.packed_rows([parts, [([1, 2], [3])]], length=12, width=8, share=True)
  np.testing.assert_array_equal(rows.tokens[0], [1, 2, 3, 7, 8, 4, 9, 6, 5, 4, 0, 0])
  np.testing.assert_array_equal(rows.segment_ids[0], [1, 1, 1, 2, 2, 3, 3, 4, 4, 4, 0, 0])
  np.testing.assert_array_equal(rows.parents[0], [0, 0, 0, 1, 1, 0, 0, 1, 1, 1, 0, 0])
  np.testing.assert_array_equal(rows.positions[0], [0, 1, 2, 3, 4, 0, 1, 3, 4, 5, 0, 0])
  np.testing.assert_array_equal(rows.target_index[0], [2, 3, 5, 0, 2, 7, 8, 0])
  alone = packing.packed_rows([[([1, 2], [3])]], length=12, width=8)
  assert alone.parents is None and not rows.parents[1].any()
  for name in ('tokens', 'segment_ids', 'positions', 'target_index'):
    np.testing.assert_array_equal(getattr(rows, name)[1], getattr(alone, name)[0])


def test_samples_of_a_row_that_have_the_same_teacher_prompt_share_it():
  config = make_config(ppo_micro_batch_size=1, pack_sequences=True)
  samples = make_samples(config)
  samples.distill_mask = per_token([1, 1, 1, 1, 0, 1, 0, 1])
  for same in ([0, 1, 3], [2, 4, 7]):  # The fourth has no teacher.
    samples.teacher_prompts = [
      samples.teacher_prompts[same[0]] if i in same else p for i, p in enumerate(samples.teacher_prompts)
    ]
  apart, together = (
    list(batching.micro_batches(samples, np.arange(8), batch_spec(config), share=share)) for share in (False, True)
  )
  assert sorted(held(together)) == sorted(held(apart)) == [0, 1, 2, 3, 5, 7]

  def tokens(micros):
    return sum(micro.tokens(micro.batch.teacher) for micro in micros)

  assert tokens(together) < tokens(apart) and len(together) <= len(apart)
  assert any(micro.batch.teacher.parents.any() for micro in together)
  for micro in together:
    ids, teacher = micro.samples[0], micro.batch.teacher
    start = 0
    for sample in ids:
      length = int(samples.rollouts.completion_mask[sample].sum())
      completion = samples.rollouts.completion_tokens[sample, :length]
      index = teacher.target_index[0, start : start + length]
      # What the state that predicts the last token sees: all of the prompt, all of the completion but that token.
      at = index[-1]
      seen = np.arange(len(teacher.tokens[0])) <= at
      segments = teacher.segment_ids[0]
      if length > 1:
        seen &= (segments == segments[at]) | ((segments == teacher.parents[0, at]) & (segments > 0))
        np.testing.assert_array_equal(teacher.tokens[0][index[1:]], completion[:-1])
      else:
        seen &= segments == segments[at]
      whole = [*samples.teacher_prompts[sample], *completion[:-1]]
      np.testing.assert_array_equal(teacher.tokens[0][seen], whole)
      np.testing.assert_array_equal(teacher.positions[0][seen], np.arange(len(whole)))
      start += length


def test_packed_teacher_rows_take_the_smallest_declared_bucket():
  config = make_config(ppo_micro_batch_size=1, pack_sequences=True)
  config.data.reprompt_buckets = (4, 10, 16)
  samples = make_samples(config)
  micros = list(batching.micro_batches(samples, np.arange(8), batch_spec(config.validate())))
  rooms = [micro.batch.teacher.tokens.shape[1] - 6 for micro in micros]
  for micro, room in zip(micros, rooms, strict=True):
    taken = micro.tokens(micro.batch.teacher)
    assert taken <= room + 6 and (room == 4 or taken > {10: 4, 16: 10}[room] + 6)
  assert rooms == sorted(rooms, reverse=True) and len(set(rooms)) > 1


@pytest.mark.parametrize('size', [1, 2, 5])
def test_a_packed_batch_holds_what_an_unpacked_one_does(size):
  config = make_config(ppo_micro_batch_size=size, pack_sequences=True)
  samples = make_samples(config)
  expected = batching.coefficients(samples, np.arange(8), batch_spec(config))['distill_coef']
  found = np.zeros_like(expected)
  micros = list(batching.micro_batches(samples, np.arange(8), batch_spec(config)))
  assert sorted(held(micros)) == [0, 2, 3, 5]
  assert len({micro.batch.student.tokens.shape + micro.batch.teacher.tokens.shape for micro in micros}) == 1
  for micro in micros:
    samples.scatter(micro.samples, micro.batch.distill_coef, found)
    for row, ids in enumerate(micro.samples):
      start = 0
      for segment, sample in enumerate(ids, 1):
        length = int(samples.rollouts.completion_mask[sample].sum())
        completion = samples.rollouts.completion_tokens[sample, :length]
        place = slice(start, start + length)
        np.testing.assert_array_equal(micro.batch.targets[row, place], completion)
        for side, prompts in ((micro.batch.student, samples.prompts), (micro.batch.teacher, samples.teacher_prompts)):
          inside = side.segment_ids[row] == segment
          np.testing.assert_array_equal(side.tokens[row][inside], [*prompts[sample], *completion])
          np.testing.assert_array_equal(side.positions[row][inside], np.arange(inside.sum()))
          np.testing.assert_array_equal(side.tokens[row][side.target_index[row, place] + 1], completion)
        start += length
  np.testing.assert_array_equal(found, expected)


def test_every_live_row_is_in_exactly_one_micro_batch_and_silent_rows_in_none():
  config = make_config()
  samples = make_samples(config)
  micros = list(batching.micro_batches(samples, np.arange(8), batch_spec(config)))
  assert sorted(held(micros)) == [0, 2, 3, 5]
  for micro in micros:
    size, width = micro.batch.targets.shape
    assert size == 3
    for i, (row,) in enumerate(filter(None, micro.samples)):
      length = int(samples.rollouts.completion_mask[row].sum())
      np.testing.assert_array_equal(micro.batch.targets[i, :length], samples.rollouts.completion_tokens[row, :length])
      for side, prompts in ((micro.batch.student, samples.prompts), (micro.batch.teacher, samples.teacher_prompts)):
        whole = [*prompts[row], *samples.rollouts.completion_tokens[row, :length]]
        np.testing.assert_array_equal(side.tokens[i, : len(whole)], whole)
        assert side.segment_ids[i].sum() == len(whole)
        predicted = side.tokens[i][side.target_index[i, :length] + 1]
        np.testing.assert_array_equal(predicted, samples.rollouts.completion_tokens[row, :length])
    empty = [not row for row in micro.samples]
    assert (micro.batch.distill_coef[empty] == 0).all() and (micro.batch.student.segment_ids[empty] == 0).all()


@pytest.mark.parametrize('size', [1, 2, 3, 8])
@pytest.mark.parametrize('mode', ['token-mean', 'seq-mean-token-sum', 'seq-mean-token-mean', 'seq-mean-token-sum-norm'])
def test_denominators_do_not_depend_on_the_micro_batch(size, mode):
  config = make_config(loss_agg_mode=mode)
  samples = make_samples(config)
  expected = batching.coefficients(samples, np.arange(8), batch_spec(config))['distill_coef']
  config = make_config(loss_agg_mode=mode, ppo_micro_batch_size=size)
  found = np.zeros_like(expected)
  for micro in batching.micro_batches(samples, np.arange(8), batch_spec(config)):
    samples.scatter(micro.samples, micro.batch.distill_coef, found)
  np.testing.assert_array_equal(found, expected)
  mask = samples.rollouts.completion_mask * samples.distill_mask
  by_hand = {
    'token-mean': mask / mask.sum(),
    'seq-mean-token-sum': mask / 4,
    'seq-mean-token-mean': mask / np.maximum(mask.sum(1, keepdims=True), 1) / 4,
    'seq-mean-token-sum-norm': mask / 6,
  }[mode]
  np.testing.assert_allclose(expected, by_hand, rtol=1e-6)


def test_group_size_one_counts_masked_sequences_as_the_reference():
  config = make_config(loss_group_size=1)
  samples = make_samples(config)
  coef = batching.coefficients(samples, np.arange(8), batch_spec(config))['distill_coef']
  lengths = samples.rollouts.completion_mask.sum(1)
  for row in range(8):
    expected = samples.distill_mask[row, 0] / lengths[row] / 8
    np.testing.assert_allclose(coef[row, : lengths[row]], expected, rtol=1e-6)


@pytest.mark.parametrize(('group_size', 'weight'), [(None, 1.0), (8, 1.0), (2, 0.25), (1, 0.125)])
def test_one_taught_sample_of_eight_has_the_weight_of_its_group(group_size, weight):
  config = make_config(loss_group_size=group_size)
  samples = dataclasses.replace(make_samples(config), distill_mask=per_token([0, 0, 0, 0, 0, 1, 0, 0]))
  coef = batching.coefficients(samples, np.arange(8), batch_spec(config))['distill_coef']
  assert coef.sum(1).tolist() == [0, 0, 0, 0, 0, pytest.approx(weight, rel=1e-6), 0, 0]


@pytest.mark.parametrize('packed', [False, True])
def test_no_signal_no_micro_batches(packed):
  config = make_config(pack_sequences=packed)
  samples = dataclasses.replace(make_samples(config), distill_mask=per_token(np.zeros(8)))
  samples.members, samples.mixtures = np.arange(8, dtype=np.int32), np.zeros((8, 2), np.int32)
  assert not list(batching.micro_batches(samples, np.arange(8), batch_spec(config)))


def test_policy_gradient_rows_need_an_advantage():
  config = make_config()
  config.actor.policy_loss.loss_mode = 'vanilla'
  samples = dataclasses.replace(
    make_samples(config), teacher_prompts=None, advantages=per_token([0, 0, 1, -1, 0, 0, 0, 0])
  )
  [micro] = batching.micro_batches(samples, np.arange(8), batch_spec(config))
  assert sorted(held([micro])) == [2, 3]
  assert micro.batch.teacher is None
  assert micro.batch.distill_coef is None


def test_micro_batches_are_rounded_up_to_the_devices_that_share_them():
  config = make_config()
  [micro] = batching.micro_batches(make_samples(config), np.arange(8), batch_spec(config), multiple=8)
  assert micro.batch.targets.shape[0] == 8


def test_a_length_over_the_largest_bucket_is_named():
  assert bucket(17, (16, 32), 'x') == 32
  with pytest.raises(UserError, match='largest bucket of data.response_buckets, 32'):
    bucket(33, (16, 32), 'data.response_buckets')


def test_optimizer_steps_take_consecutive_rows_of_every_partition():
  config = make_config(ppo_mini_batch_size=2)

  def steps():
    return [rows.tolist() for rows in batching.mini_batches(batch_spec(config.validate()))]

  assert steps() == [[0, 1, 2, 3], [4, 5, 6, 7]]
  config.trainer.batch_order, config.trainer.balance_partitions = 'balanced', 2
  assert steps() == [[0, 1, 4, 5], [2, 3, 6, 7]]
  config.trainer.balance_partitions = 3
  with pytest.raises(UserError, match='balance_partitions=3 does not divide the 4 sequences'):
    config.validate()
