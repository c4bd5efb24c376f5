"""Estimates of memory, time and price of an engine on a TPU slice, from compiling its programs.

The numbers are derived as in `planner.plan`; none is a measurement.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
import dataclasses
import json
import math
import time
from typing import Any

from sdpo_jax.config import Config
from sdpo_jax.distributed import mesh as meshes
from sdpo_jax.distributed.programs import Program
from sdpo_jax.errors import UserError
from sdpo_jax.files import check_output, jsonable, write_output
from sdpo_jax.models import parameters as parameter_tables
from sdpo_jax.models.adapters import lora
from sdpo_jax.models.decoder import DecoderPolicy
from sdpo_jax.planner import model, plan_text, program_facts, topology
from sdpo_jax.planner import plan as planning
from sdpo_jax.planner.plan import GIB, Estimate
from sdpo_jax.rollout import sizes
from sdpo_jax.rollout.buckets import smallest_bucket
from sdpo_jax.serving.engine import EngineSettings, check_divides, memory_for
from sdpo_jax.serving.engine_programs import engine_programs
from sdpo_jax.serving.engine_settings import as_run, engine_settings
from sdpo_jax.tables import markdown
from sdpo_jax.training.opening import model_mesh
from sdpo_jax.training.run_programs import abstract_teacher

# Bytes per second between host and devices: an assumption, not from a compiler or a data sheet.
HOST_LINK = 8e9
# Arrays that stay in device memory besides the base, whichever program runs.
POOLS = ('snapshots', 'teachers', 'slots', 'moments', 'cache', 'kept prefixes')
_MOMENTS = 2  # Of each factor. The moving average of an 'ema' teacher is not counted.


@dataclasses.dataclass
class EnginePlan:
  """The estimated memory, time and price of an engine."""

  topology: str
  compiler: str
  chips: int
  mesh: dict[str, int]
  model: str
  parameters: int  # Parameters of the model.
  adapter: int  # Parameters of one adapter.
  hbm_limit_gib: float
  fits: bool
  settings: EngineSettings
  programs: dict[str, Estimate]  # By label for the largest buckets, by name for others.
  base_gib: float  # The base on each chip.
  pools_gib: dict[str, float]  # Each of `POOLS` on each chip.
  version_gib: float  # A version on the host, and in storage.
  state_gib: float  # Its optimizer state.
  versions_in_memory: int  # How many versions with their states fit into the memory of the host.
  # An adapter in storage: 'busy', with as many versions as are kept, or a hundred if all are; and 'idle'.
  stored_gib: dict[str, float]
  lengths: dict[str, float]  # Mean numbers of tokens of a feedback: 'prompt', 'completion', 'teacher'.
  feedback_s: dict[str, float]  # Seconds of one feedback, by operation.
  sampling_s: float  # Seconds per completion, with all rows in use.
  storage_s: float  # Seconds in which storage takes what one feedback writes: its version and then its state.
  feedbacks_per_hour: float  # With full micro-batches, and completions sampled elsewhere.
  sampled_feedbacks_per_hour: float  # Likewise, with completions sampled on the slice.
  price_per_chip_hour: float | None  # US dollars.
  cost_per_1000_feedbacks: float | None  # US dollars, including completions, without storage; None: no price is known.
  storage_cost: dict[str, float]  # US dollars per month for 1,000 adapters, as in `stored_gib`.

  @property
  def latency_s(self) -> float:
    """The seconds from a feedback to its new version, on an otherwise idle engine."""
    return sum(self.feedback_s.values())

  def to_json(self) -> dict[str, Any]:
    """Return the plan as JSON; numbers that are not finite become None."""
    return jsonable(dataclasses.asdict(self) | {'latency_s': self.latency_s})


def make(
  config: Config,
  policy: DecoderPolicy,
  slice_: topology.Topology,
  *,
  source: str = '',
  price: float | None = None,
  only: Iterable[str] | None = None,
  keep: str | None = None,
  announce: Callable[[str], None] = lambda _: None,
) -> EnginePlan:
  """Compile the programs of an engine for a slice, one after the other, and add up their cost.

  Args:
    config: settings; `serve` has the sizes, `plan` the mean lengths.
    policy: the model with its adapter.
    slice_: the TPU slice.
    source: where the sizes of the model come from, for the report.
    price: US dollars per chip-hour; None: `plan.price_per_chip_hour`.
    only: the kinds of programs to compile, each with the largest buckets; None: all.
    keep: a folder that caches results of the compiler; None: nothing is cached.
    announce: receives a line after each compilation.

  Raises:
    UserError: the policy has no LoRA adapter, or the mesh does not fit the slice, the model or the sizes.
  """
  if not isinstance(policy.adapter, lora.Adapter):
    raise UserError('An engine serves LoRA adapters: set model.lora.rank.')
  settings, run = engine_settings(config), as_run(config)
  mesh = model_mesh(config, policy, slice_.devices)
  policy = policy.on(mesh, config.model.attention)
  check_divides(settings, policy)
  other = abstract_teacher(config, mesh) if config.actor.self_distillation.teacher_model else None
  found = engine_programs(config, policy, mesh, other)
  assumed = planning.Assumptions.of(run, slice_.chip, price=price)
  scenario = planning.Scenario(run, slice_.chip, mesh, assumed)
  lengths = {
    'prompt': assumed.mean_prompt,
    'completion': assumed.mean_completion,
    'teacher': assumed.mean_reprompt,
  }
  labels = planning.select(found, False, _of_feedback(settings, lengths).values())
  if only is not None:
    labels = {label: name for label, name in labels.items() if found[name].kind in set(only)}
  names = {name: label for label, name in labels.items()}
  pools, estimates, sampling_weights = pool_bytes(found), {}, None
  resident = {'base': pools.pop('base')}
  if other is not None:
    resident |= planning.held_bytes(next(program for program in found.values() if program.kind == 'model'))
    resident = {part: resident[part] for part in ('base', 'teacher base')}
  first = [name for name, program in found.items() if program.kind in ('prepare_base', 'prepare')]
  began = time.monotonic()
  for name, answer in planning.compiled_for(slice_, mesh, found, [*first, *names], keep):
    program = found[name]
    if isinstance(answer, program_facts.ProgramFacts) and program.kind == 'prepare':
      sampling_weights = answer.results
      if not sampling_weights:  # The sampler reads the snapshots directly.
        pools.pop('snapshots')
    elif isinstance(answer, program_facts.ProgramFacts) and program.kind == 'prepare_base':
      resident['sampling base'] = answer.results
    one = planning.estimated(scenario, name, program, answer, resident, sampling_weights)
    one.compile_seconds = time.monotonic() - began
    _add_pools(one, program, pools, sampling_weights or 0.0, slice_.chip.hbm_gib)
    if name in names or one.error is not None:
      estimates[names.get(name, name)] = one
    said = f'{one.hbm_gib:.2f} GiB, {one.seconds:.3g} s' if one.error is None else one.error
    announce(f'  {name}: {said} (compiled in {one.compile_seconds:.0f} s)')
    began = time.monotonic()
  return _summary(config, policy, slice_, mesh, settings, source, estimates, resident, pools, lengths, price)


def _of_feedback(settings: EngineSettings, lengths: dict[str, float]) -> dict[str, str]:
  """Return the names of the programs that a feedback of these lengths runs, by their purpose."""

  def bucket(declared: tuple[int, ...], length: float) -> int:
    return smallest_bucket(declared, math.ceil(length))

  prompt = bucket(settings.prompt_buckets, lengths['prompt'])
  teacher = bucket(settings.teacher_buckets, lengths['teacher'])
  completion = bucket(settings.response_buckets, lengths['completion'])
  return {
    'what the student says': f'student/{prompt}×{completion}',
    'what the teacher says': f'teacher/{teacher}×{completion}',
    'scores and support': f'first/{completion}',
    'gradients': f'accumulate/{prompt}×{completion}',
    'what is reported of them': f'report/{completion}',
    'zeros': 'zero',
    'the step': 'step',
    'the student afterwards': f'student/{prompt}×{completion}',
    'its log-probs': f'log probs/{completion}',
  }


def pool_bytes(found: dict[str, Program]) -> dict[str, float]:
  """Return the bytes of the base and of each of `POOLS` on one device."""
  found_bytes: dict[str, float] = {}
  for program, kinds in (
    (found['put snapshot'], ('snapshots',)),
    (next(program for program in found.values() if program.kind == 'teacher'), ('base', 'teachers')),
    (found['step'], ('slots', 'moments')),
    (next(program for program in found.values() if program.kind == 'decode'), ('cache',)),
  ):
    own = planning.held_bytes(program)
    found_bytes |= {kind: own[kind] for kind in kinds}
  keep = next((program for program in found.values() if program.kind == 'keep'), None)
  found_bytes['kept prefixes'] = 0.0 if keep is None else planning.held_bytes(keep)['kept prefixes']
  return found_bytes


def _add_pools(estimate: Estimate, program: Program, pools: dict[str, float], weights: float, limit: float) -> None:
  """Add the pools and weights to an estimate that stay in memory although the program does not read them."""
  if estimate.error is not None:
    return
  own_cache = program.kind in ('decode', 'admit', 'empty', 'keep')
  kept = {part: size / GIB for part, size in pools.items() if not (part == 'cache' and own_cache)}
  more = {part: max(size, estimate.hbm.get(part, 0.0)) for part, size in kept.items() if part != 'cache'}
  if 'cache' in kept:  # The cache of a prompt comes in addition to that of the rows.
    more['cache'] = kept['cache'] + estimate.hbm.get('cache', 0.0)
  if weights:
    more['sampling weights'] = max(weights / GIB, estimate.hbm.get('sampling weights', 0.0))
  estimate.hbm |= more
  estimate.hbm_gib = sum(estimate.hbm.values())
  estimate.fits = estimate.hbm_gib <= limit


def _summary(
  config: Config,
  policy: DecoderPolicy,
  slice_: topology.Topology,
  mesh: Any,
  settings: EngineSettings,
  source: str,
  estimates: dict[str, Estimate],
  resident: dict[str, float],
  pools: dict[str, float],
  lengths: dict[str, float],
  price: float | None,
) -> EnginePlan:
  by_name = {estimate.name: estimate for estimate in estimates.values()}

  def seconds(name: str, of: str = 'seconds') -> float:
    estimate = by_name.get(name)
    return math.nan if estimate is None or estimate.error is not None else getattr(estimate, of)

  table = policy.parameter_table()
  adapter = parameter_tables.count(parameter_tables.trainable(table))
  version, state, store = 4 * adapter, 4 * _MOMENTS * adapter, config.serve.store
  if settings.memory_bytes is None:  # Assume a host with enough memory.
    settings = dataclasses.replace(settings, memory_bytes=memory_for(settings, adapter, policy.config))
  # A version stays in its slot after the step that made it; as a teacher it is sent again. After each step its factors
  # and both moments are fetched.
  sent, fetched = version / HOST_LINK, (version + state) / HOST_LINK
  alone = {'the teacher to its place': sent + seconds('put teacher'), 'to the host': fetched + seconds('get slot')}
  feedback = {what: seconds(name) for what, name in _of_feedback(settings, lengths).items()} | alone
  # Others go on while a version is written, and the state is written after the answer.
  speed = 1e6 * config.plan.storage_mb_s
  kept_state = state * {'float32': 1.0, 'bfloat16': 0.5, 'none': 0.0}[store.moments]
  stored = {
    'busy': (1 + 2 * store.keep_versions if store.keep_versions else 100) * version + kept_state,
    'idle': version,
  }
  together = min(settings.training_rows, settings.slots)  # Feedbacks in a micro-batch, each of another version.
  shards = mesh.shape[meshes.FSDP]
  prompts = shards * sizes.prompts_per_prefill(settings.prompt_buckets[-1], settings.rows // shards)
  prefill, decode = (estimates[kind].name if kind in estimates else '' for kind in ('prefill', 'decode'))
  a_token = seconds(decode, 'busy_step_seconds') / settings.rows
  # For one completion per version, which must be copied to the snapshots first.
  placed = sent + seconds('put snapshot') + seconds('prepare')
  sampling = placed + seconds(prefill) / prompts + lengths['completion'] * a_token
  writing = (version + kept_state) / speed
  learning = max(writing, (sum(feedback.values()) - sum(alone.values())) / together + sum(alone.values()))
  feedback['to storage'] = version / speed
  price = config.plan.price_per_chip_hour if price is None else price
  chips = mesh.size
  return EnginePlan(
    topology=slice_.name,
    compiler=slice_.compiler,
    chips=chips,
    mesh=dict(mesh.shape),
    model=source,
    parameters=parameter_tables.count(table) - adapter,
    adapter=adapter,
    hbm_limit_gib=slice_.chip.hbm_gib,
    fits=all(estimate.fits for estimate in estimates.values()),
    settings=settings,
    programs=estimates,
    base_gib=resident['base'] / GIB,
    pools_gib={part: size / GIB for part, size in pools.items()},
    version_gib=version / GIB,
    state_gib=state / GIB,
    versions_in_memory=int(settings.memory_bytes // (version + state)),
    stored_gib={what: size / GIB for what, size in stored.items()},
    lengths=lengths,
    feedback_s=feedback,
    sampling_s=sampling,
    storage_s=writing,
    feedbacks_per_hour=3600 / learning,
    sampled_feedbacks_per_hour=3600 / (learning + sampling),
    price_per_chip_hour=price,
    cost_per_1000_feedbacks=None if price is None else 1000 * (learning + sampling) / 3600 * chips * price,
    storage_cost={what: 1000 * size / GIB * config.plan.price_per_gib_month for what, size in stored.items()},
  )


def text(plan: EnginePlan) -> str:
  """Return the plan as a report in plain text."""
  settings, mesh = plan.settings, ' × '.join(f'{name}={size}' for name, size in plan.mesh.items())
  cartridges = f' with {settings.cartridges} cartridges of {settings.cartridge_slots} slots' * bool(settings.cartridges)
  parts = [
    f'An engine for adapters of {plan.adapter:,} parameters beside {plan.parameters:,} ({plan.model}) on '
    f'{plan.topology}: {plan.chips} chips, mesh {mesh}; {plan.compiler}.',
    plan_text.memory(plan.programs, plan.hbm_limit_gib),
    f'On the devices at once: {settings.snapshots} versions to sample from{cartridges}, {settings.teachers} to score '
    f'with and {settings.slots} in training. A version takes {1024 * plan.version_gib:,.0f} MiB on the host and its '
    f'optimizer state {1024 * plan.state_gib:,.0f}; the memory of {settings.memory_bytes / GIB:g} GiB holds '
    f'{plan.versions_in_memory} of both, and the others are in storage.',
  ]
  for label, estimate in plan.programs.items():
    if estimate.error is not None:
      parts.append(f'{label}: {estimate.error}')
  parts.append(plan_text.times(plan.programs))
  rows = [[what, f'{1e3 * seconds:.3g}'] for what, seconds in plan.feedback_s.items()]
  parts.append(markdown(['a feedback', 'ms'], [*rows, ['together', f'{1e3 * plan.latency_s:.3g}']]))
  lengths = plan.lengths
  parts.append(
    f'Assumed (the settings plan.…, or else the limits): prompts of {lengths["prompt"]:g} tokens, completions '
    f'of {lengths["completion"]:g}, teacher prompts of {lengths["teacher"]:g}, each padded to its bucket; one step per '
    f'feedback; {HOST_LINK / 1e9:g} GB/s between devices and host [assumption].'
  )
  parts.append(
    f'{plan.feedbacks_per_hour:,.0f} feedbacks per hour, {min(settings.training_rows, settings.slots)} at once; '
    f'{plan.sampled_feedbacks_per_hour:,.0f} if the slice also samples their completions, {settings.rows} at once '
    '[arithmetic].'
  )
  if plan.cost_per_1000_feedbacks is not None:
    parts.append(
      f'1,000 feedbacks and their completions: ${plan.cost_per_1000_feedbacks:.3g} at ${plan.price_per_chip_hour:g} '
      'per chip-hour [arithmetic].'
    )
  busy, idle = plan.stored_gib['busy'], plan.stored_gib['idle']
  parts.append(
    f'In storage, a feedback writes for {plan.storage_s:.3g} s [assumption: plan.storage_mb_s], before its answer only '
    f'the version. A busy adapter takes {busy:.3g} GiB and an idle one {idle:.3g} (serve.store); 1,000 of them cost '
    f'${plan.storage_cost["busy"]:.3g} or ${plan.storage_cost["idle"]:.3g} a month [assumption: '
    'plan.price_per_gib_month].'
  )
  if not plan.fits:
    names = ', '.join(label for label, estimate in plan.programs.items() if not estimate.fits)
    parts.append(
      f'DOES NOT FIT: {names}. Lower serve.rows, serve.training_rows, serve.kept_prefixes, the places for versions '
      '(serve.snapshots, serve.teachers, serve.slots) or the buckets.'
    )
  return '\n\n'.join(part for part in parts if part)


def plan(
  config: Config,
  slice_name: str,
  *,
  output: str | None = None,
  model_config: str | None = None,
  price: float | None = None,
  keep: str | None = None,
  announce: Callable[[str], None],
  show: Callable[[str], None],
) -> EnginePlan:
  """Plan an engine for a slice, show the report and write the numbers; see `planner.run.plan` for the arguments.

  Raises:
    UserError: as `make`, or as `planner.run.plan`.
  """
  if output is not None:
    check_output(output)
  slice_ = topology.describe(slice_name)
  policy, source = model.read(config, model_config)
  announce(f'The model: {source}.')
  made = make(config, policy, slice_, source=source, price=price, keep=keep, announce=announce)
  show(text(made))
  if output is not None:
    write_output(output, json.dumps(made.to_json(), indent=2) + '\n')
  return made
