"""Search over settings that change memory and speed but not what is learned."""

from __future__ import annotations

from collections.abc import Callable, Sequence
import copy
import dataclasses
import functools
import math
from typing import Any

from sdpo_jax.config import Config
from sdpo_jax.config.fields import did_you_mean
from sdpo_jax.config.overrides import assign
from sdpo_jax.errors import UserError
from sdpo_jax.models.policy import Policy
from sdpo_jax.objective.objective_spec import REFERENCES
from sdpo_jax.planner import plan as planning
from sdpo_jax.planner.topology import Topology

SEARCHED = ('mesh', 'micro_batch', 'remat', 'rows')
_MICRO = (1, 2, 4)  # Rows per chip.
_ROWS = (64, 128, 256, 384, 512, 1024)
REMATS = ('full', 'save_attention', 'dots', 'none')  # From least to most memory.
_TRAINING = (*REFERENCES, 'score', 'update')
_SAMPLING = ('prepare', 'prefill', 'decode')


@dataclasses.dataclass(frozen=True)
class CompiledHalf:
  """One half of a candidate, compiled: the update or the sampler."""

  settings: dict[str, Any]
  fits: bool
  hbm_gib: float  # Memory of its largest program.
  seconds: float  # Seconds per step.


@dataclasses.dataclass(frozen=True)
class Candidate:
  """A combination of an update and a sampler, and its cost."""

  settings: dict[str, Any]
  fits: bool
  hbm_gib: float
  update_seconds: float
  sampling_seconds: float
  seconds: float


def search(
  config: Config,
  policy: Policy,
  topology: Topology,
  assumptions: planning.Assumptions,
  over: Sequence[str],
  announce: Callable[[str], None] = lambda _: None,
  keep: str | None = None,
) -> list[Candidate]:
  """Return combinations of mesh, micro-batch, remat and decoded rows, best first.

  The update and the sampler share only the mesh, so each is tried on its own: for every mesh the fastest update that
  fits is combined with every sampler, and the fastest sampler with every update.

  Raises:
    UserError: `over` has a name that cannot be searched.
  """
  check(over)
  chips = len(topology.devices)
  plan = functools.partial(planning.make, topology=topology, assumptions=assumptions, keep=keep, announce=announce)
  results: list[Candidate] = []
  for mesh in meshes(config, policy, chips, over):
    here = changed(config, mesh)
    updates = _halves(here, policy, update_options(here, chips, over), _TRAINING, plan, announce)
    samplers = _halves(here, policy, sampling_options(here, over), _SAMPLING, plan, announce)
    quickest_update, quickest_sampler = min(updates, key=_order), min(samplers, key=_order)
    pairs = [(update, quickest_sampler) for update in updates]
    pairs += [(quickest_update, sampler) for sampler in samplers if sampler is not quickest_sampler]
    for update, sampler in pairs:
      results.append(
        Candidate(
          settings=mesh | update.settings | sampler.settings,
          fits=update.fits and sampler.fits,
          hbm_gib=max(update.hbm_gib, sampler.hbm_gib),
          update_seconds=update.seconds,
          sampling_seconds=sampler.seconds,
          seconds=update.seconds + sampler.seconds,
        )
      )
  return sorted(results, key=_order)


def check(over: Sequence[str]) -> None:
  """Check the names of the settings to vary.

  Raises:
    UserError: a name is unknown.
  """
  unknown = [name for name in over if name not in SEARCHED]
  if unknown:
    raise UserError(f'--search_over={unknown[0]} is none of {", ".join(SEARCHED)}{did_you_mean(unknown[0], SEARCHED)}')


def _order(part: CompiledHalf | Candidate) -> tuple[bool, float, float]:
  def known(value: float) -> float:
    return value if math.isfinite(value) else math.inf

  # Candidates that fit by speed, others by their memory.
  return (False, known(part.seconds), 0.0) if part.fits else (True, known(part.hbm_gib), known(part.seconds))


def meshes(config: Config, policy: Policy, chips: int, over: Sequence[str]) -> list[dict[str, Any]]:
  """Return the settings of the meshes to try: every `tensor` that divides chips, heads, MLP and vocabulary."""
  if 'mesh' not in over:
    return [{}]
  model = policy.config
  split = (chips, model.heads, model.kv_heads, model.intermediate_size, model.padded_vocab_size)
  return [
    {'mesh.fsdp': chips // tensor, 'mesh.tensor': tensor}
    for tensor in range(1, min(chips, model.kv_heads) + 1)
    if not any(size % tensor for size in split)
  ]


def update_options(config: Config, chips: int, over: Sequence[str]) -> list[dict[str, Any]]:
  """Return the updates to try: micro-batches of one, two and four rows per chip, with every remat policy."""
  micro, remats = [{}], [{}]
  if 'micro_batch' in over:
    most = max(config.actor.ppo_mini_batch_size * config.rollout.n, chips)
    micro = [{'actor.ppo_micro_batch_size': chips * size} for size in _MICRO if chips * size <= most]
  if 'remat' in over:
    remats = [{'model.remat': remat} for remat in REMATS]
  return [one | other for one in micro for other in remats]


def sampling_options(config: Config, over: Sequence[str]) -> list[dict[str, Any]]:
  """Return the numbers of rows to decode at once, up to a whole generation batch."""
  if 'rows' not in over:
    return [{}]
  total = config.data.train_batch_size * config.rollout.n
  return [{'rollout.max_batch_rows': rows} for rows in sorted({min(rows, total) for rows in _ROWS})]


def changed(config: Config, settings: dict[str, Any]) -> Config:
  """Return a validated copy of a config with other settings, by dotted name."""
  other = copy.deepcopy(config)
  for name, value in settings.items():
    assign(other, name, value)
  return other.validate()


def _demand(settings: dict[str, Any]) -> tuple[int, ...]:
  """Return the settings with which a candidate's memory grows, as sortable numbers."""
  remat = settings.get('model.remat', REMATS[0])
  return (
    settings.get('actor.ppo_micro_batch_size', 0),
    REMATS.index(remat),
    settings.get('rollout.max_batch_rows', 0),
  )


def _halves(
  config: Config,
  policy: Policy,
  options: Sequence[dict[str, Any]],
  labels: Sequence[str],
  plan: Callable[..., planning.Plan],
  announce: Callable[[str], None],
) -> list[CompiledHalf]:
  """Compile options from least to most memory, skipping those that need more than one that did not fit."""
  found: list[CompiledHalf] = []
  for settings in sorted(options, key=_demand):
    refused = [_demand(half.settings) for half in found if not half.fits]
    if any(all(a <= b for a, b in zip(less, _demand(settings), strict=True)) for less in refused):
      continue
    here = changed(config, settings)
    listed = ', '.join(f'{name}={value}' for name, value in settings.items()) or 'as configured'
    announce(f'{", ".join(labels)} with mesh fsdp={here.mesh.fsdp} tensor={here.mesh.tensor}, {listed}:')
    made = plan(here, policy.with_remat(here.model.remat) if 'model.remat' in settings else policy, only=labels)
    sizes = [estimate.hbm_gib for estimate in made.programs.values() if math.isfinite(estimate.hbm_gib)]
    found.append(CompiledHalf(settings, made.fits, max(sizes, default=math.nan), made.step_seconds))
  return found
