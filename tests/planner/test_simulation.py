"""The simulation of sampling: against counts by hand and token by token, and laws of conservation.

`tests/training/test_carry_over.py` compares it with a run.
"""

from __future__ import annotations

import dataclasses
import math

import jax
import numpy as np
import pytest

from sdpo_jax.config import MeshConfig
from sdpo_jax.configs import quickstart, qwen3_8b_livecodebench
from sdpo_jax.distributed import mesh as meshes
from sdpo_jax.models import huggingface
from sdpo_jax.planner import plan as planning
from sdpo_jax.planner import simulation, topology
from sdpo_jax.rollout import sizes
from sdpo_jax.training.run_programs import abstract_parameters, run_programs
from tests.planner import planned_engines

SPEC = simulation.SamplingSpec(
  shards=2,
  max_rows=32,
  widths=(8,),
  room=64,
  chunk=1,
  keeps_size=True,
  questions=4,
  n=8,
  max_staleness=0,
  keeps_carried=False,
  held_out=0,
  held_out_n=1,
  test_freq=0,
  prompts=(5,),
  completions=tuple(np.random.default_rng(1).integers(1, 60, 4 * 8 * 3).tolist()),
  steps=3,
)


def steps_by_rows(work):
  return {rows: each.turns for (kind, rows, _), each in work.items() if kind == 'decode'}


def test_steps_are_those_that_the_fullest_shard_needs_at_each_token():
  """Everything fits at once: as many steps as the longest sample, each with the fewest rows that hold the live ones."""
  found, expected = simulation.simulate(SPEC), {32: 0, 16: 0, 8: 0, 4: 0}
  for batch in np.reshape(SPEC.completions, (3, 4, 8)):
    # The first two free slots belong to shard 0, which takes prompts as they come: it has those of the first two.
    shards = batch.reshape(2, 16)
    for step in range(batch.max()):
      live = int((shards > step).sum(1).max())
      expected[2 * min(rows for rows in (16, 8, 4, 2) if rows >= live)] += 1
  assert steps_by_rows(found.training) == pytest.approx({rows: steps / 3 for rows, steps in expected.items()})
  assert found.decode_steps == pytest.approx(np.mean([max(batch) for batch in np.reshape(SPEC.completions, (3, 32))]))
  assert found.tokens == sum(SPEC.completions) / 3 and found.recomputed == found.staleness_max == 0


def test_samples_follow_each_other_in_slots_that_become_free():
  """Two slots: 3 and 5 begin, 2 follows 3, and 9 begins when both end; chunks of 4 steps are interrupted for them."""
  spec = dataclasses.replace(SPEC, shards=1, max_rows=2, chunk=4, questions=4, n=1, completions=(3, 5, 2, 9), steps=1)
  found = simulation.simulate(spec)
  # 3 steps, 2 more until 5 and 2 end together, and 9 alone, with both rows: one is too few for a step of its own.
  assert steps_by_rows(found.training) == {2: 14}
  calls = {(kind, rows): each.calls for (kind, rows, _), each in found.training.items()}
  expected = {
    ('empty', 2): 1,
    ('prefill', 2): 3,
    ('admit', 2): 3,
    ('decode', 2): 5,
  }
  assert calls == expected


@pytest.mark.parametrize('most', [1, 3])
def test_no_sample_is_older_than_allowed_and_no_token_is_lost(most):
  spec = dataclasses.replace(SPEC, max_staleness=most, chunk=8, max_rows=16, held_out=6, held_out_n=4, test_freq=3)
  waits = simulation.simulate(dataclasses.replace(spec, max_staleness=0, steps=30))
  carries = simulation.simulate(dataclasses.replace(spec, steps=30))
  assert 0 < carries.staleness_mean <= carries.staleness_p95 <= carries.staleness_max <= most
  assert carries.decode_steps < waits.decode_steps and carries.recomputed > 0
  live = sum(each.live for work in (carries.training, carries.evaluation) for each in work.values())
  assert live == pytest.approx(carries.tokens)
  # In the long run as much is drawn as is learned from, and all of the evaluations.
  lengths = np.array(spec.completions)
  assert carries.tokens == pytest.approx(lengths.mean() * (32 + 24 / 3), rel=0.1)


def test_updates_are_of_the_batches_that_sampling_forms(monkeypatch):
  monkeypatch.setattr(planning, 'DRAWN_TOKENS', 0)  # Twenty steps.
  config, chip = qwen3_8b_livecodebench.get_config(), topology.CHIPS['v5e']
  config.data.train_batch_size, config.rollout.n, config.rollout.max_batch_rows, config.trainer.test_freq = 4, 2, 8, 0
  config.plan.mean_completion, config.plan.longest_completion = 20.0, 60.0
  mesh, batches = meshes.make_mesh(MeshConfig(fsdp=4, tensor=2), jax.devices()), {}
  for most in (0, 2):
    config.rollout.max_staleness = most
    scenario = planning.Scenario(config, chip, mesh, planning.Assumptions.of(config, chip))
    sampling = scenario.sampling(keeps_size=True)
    batches[most] = [batch.completion.tolist() for batch in scenario.batches(sampling)]
    assert len(batches[most]) == sampling.steps == 20 and {len(batch) for batch in batches[most]} == {8}
    drawn = scenario.drawn.completion.reshape(-1, 2)
    asked = [sorted(map(tuple, drawn[np.array(numbers) % len(drawn)].tolist())) for numbers in sampling.chosen]
    assert [sorted(map(tuple, np.reshape(batch, (-1, 2)).tolist())) for batch in batches[most]] == asked
    numbers = np.concatenate(sampling.chosen)
    assert len({*numbers.tolist()}) == 80  # Nothing is learned from twice.
  assert np.reshape(batches[0], -1).tolist() == scenario.drawn.completion.tolist()
  # Groups with a long completion wait for each other.
  assert np.std([max(batch) for batch in batches[2]]) > np.std([max(batch) for batch in batches[0]])


def test_attention_reads_whole_blocks_of_what_is_in_the_cache():
  spec = dataclasses.replace(SPEC, room=4096, n=1, questions=2, prompts=(8,), completions=(3000,), chunk=32, steps=1)
  ((_, work),) = (item for item in simulation.simulate(spec).training.items() if item[0][0] == 'decode')
  filled = 8 + 32 * np.arange(math.ceil(3000 / 32))
  taken = np.minimum(32, 3000 - 32 * np.arange(len(filled)))
  assert work.blocks == pytest.approx((np.ceil(filled / 1024) * taken).sum())
  assert work.turns == 3000 and work.live == 2 * 3000 and work.calls == len(filled)


def test_recomputed_samples_go_through_in_pieces():
  spec = dataclasses.replace(SPEC, shards=1, max_rows=4, questions=1, n=2, max_staleness=1, chunk=8, room=32)
  run = simulation.SimulatedRun(dataclasses.replace(spec, completions=(3, 4, 20, 20)))
  assert run.step(1) == {0: [0, 0]} and run.stats.decode_steps == 4  # Half of the rows are done then.
  run.counter.work.clear()
  assert run.step(2) == {1: [1, 1]}  # The second question began beside the first.
  # Prompts of 5 tokens and the 4 that were drawn, without the newest: it is the next input.
  assert run.stats.recomputed == 2 * (5 + 4 - 1)
  ((_, work),) = (item for item in run.counter.work.items() if item[0][0] == 'recompute')
  assert (work.calls, work.turns) == (1, math.ceil(8 / sizes.LEAST_PIECE))


@pytest.mark.parametrize(('most', 'cache'), [(0, 'recomputed'), (2, 'recomputed'), (2, 'kept')])
@pytest.mark.parametrize('config', [quickstart, qwen3_8b_livecodebench])
def test_every_call_is_of_a_registered_program(config, most, cache, monkeypatch):
  monkeypatch.setattr(planning, 'DRAWN_TOKENS', 0)  # As few steps as possible.
  config = config.get_config()
  config.rollout.max_batch_rows, config.rollout.max_staleness, config.rollout.carried_cache = 32, most, cache
  config.plan.mean_completion, config.plan.longest_completion = 4.0, 6.0
  policy = huggingface.describe(planned_engines.SIZES, config.model)
  mesh = meshes.make_mesh(MeshConfig(fsdp=4, tensor=2), jax.devices())
  policy, chip = policy.on(mesh, config.model.attention), topology.CHIPS['v5e']
  found = run_programs(config, policy, *abstract_parameters(policy, mesh), mesh)
  scenario = planning.Scenario(config, chip, mesh, planning.Assumptions.of(config, chip))
  works = planning.sampling_work(found, scenario.sampling(policy.reads_filled))
  assert {'prefill', 'decode', 'evaluation'} <= set(works) and ('recompute' in works) == (most > 0)
  assert all(found[name].rows == rows for of_phase in works.values() for name, rows, _ in of_phase)
