"""Memory, time and cost of a run's programs on a TPU slice, from compiling them for it.

Every number is of one of three kinds. [compiler]: what the TPU compiler says of its own program (memory, estimated
cycles, what is sent). [table]: kernels for which it says nothing, scaled from schedules that were once dumped and
counted. [arithmetic]: bytes ÷ bandwidth, operations ÷ peak. None is a measurement.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
import contextlib
import dataclasses
import functools
import math
import re
import time
from typing import Any

import jax

from models import cache as kv_cache
from models.flops import forward_flops
from models.policy import Policy
from sdpo_jax import programs as registry
from sdpo_jax.config import Config
from sdpo_jax.distributed import mesh as meshes
from sdpo_jax.errors import UserError
from sdpo_jax.files import jsonable
from sdpo_jax.objective.spec import ObjectiveSpec
from sdpo_jax.planner import hlo, kernels, traffic
from sdpo_jax.planner.topology import Chip, Topology
from sdpo_jax.rollout import sizes
from sdpo_jax.rollout.buckets import Buckets
from sdpo_jax.training.run_programs import abstract_parameters, run_programs
from sdpo_jax.training.session import model_mesh
from sdpo_jax.types import TrainState

GIB = 2**30
# What lies in memory all the time, whichever program runs.
RESIDENT = ('base', 'parameters', 'optimizer', 'teacher', 'teacher base')
# Programs that read the sampler's copy of the weights.
SAMPLING = ('prefill', 'empty', 'decode', 'admit', 'resize', 'compact')


@dataclasses.dataclass(frozen=True)
class Assumptions:
  """What the programs do not tell about a run."""

  mean_completion: float  # Tokens of a completion on average.
  longest_completion: float  # Tokens of the longest of the rows that are decoded together.
  mean_prompt: float  # Tokens of a prompt on average; with packed rows.
  mean_reprompt: float  # Tokens of a teacher's prompt on average; with packed rows.
  evaluation_questions: int | None  # Of one evaluation; None: evaluation is not in the cost.
  price: float  # US dollars a chip-hour.

  @classmethod
  def of(cls, config: Config, chip: Chip, **given: float | None) -> Assumptions:
    """Those given, else: every length at its limit but the mean completion, half of the longest; the list price.

    Raises:
      UserError: a length that the settings, or another one, rule out.
    """
    data, reprompt = config.data, config.actor.self_distillation.max_reprompt_len
    longest = given.get('longest_completion') or float(data.max_response_length)
    defaults = {
      'mean_completion': longest / 2,
      'longest_completion': longest,
      'mean_prompt': float(data.max_prompt_length),
      'mean_reprompt': float(reprompt),
      'evaluation_questions': data.val_max_samples,
      'price': chip.price,
    }
    assumed = cls(**{name: value if given.get(name) is None else given[name] for name, value in defaults.items()})
    bounds = (
      ('longest_completion', data.max_response_length, 'data.max_response_length'),
      ('mean_completion', longest, '--longest_completion'),
      ('mean_prompt', data.max_prompt_length, 'data.max_prompt_length'),
      ('mean_reprompt', reprompt, 'actor.self_distillation.max_reprompt_len'),
    )
    for name, most, bound in bounds:
      value = getattr(assumed, name)
      if not 0 < value <= most:
        raise UserError(f'--{name}={value:g} must be more than 0 and at most {most:g}, which is {bound}.')
    return assumed


@dataclasses.dataclass
class Estimate:
  """One program on one chip; times are of one execution."""

  name: str
  hbm: dict[str, float]  # GiB by what is held, that of other programs included.
  hbm_gib: float
  fits: bool
  matmul_tflop: float = 0.0
  seconds: float = 0.0
  seconds_by_source: dict[str, float] = dataclasses.field(default_factory=dict)
  overlapped_collectives: float = 0.0  # Seconds on the wire of those that run beside other work.
  collective_gb: dict[str, float] = dataclasses.field(default_factory=dict)
  kernel_seconds: dict[str, float] = dataclasses.field(default_factory=dict)
  step_seconds: float | None = None  # Of a decode loop: one token of every row.
  step_reads: traffic.StepReads | None = None  # Of a decode loop.
  hottest: list[dict[str, Any]] = dataclasses.field(default_factory=list)  # Of a decode loop: one turn.
  copies: list[dict[str, Any]] = dataclasses.field(default_factory=list)
  buffers: list[dict[str, Any]] = dataclasses.field(default_factory=list)
  unbounded: list[str] = dataclasses.field(default_factory=list)  # Loops counted once for want of a bound.
  error: str | None = None
  compile_seconds: float = 0.0


@dataclasses.dataclass
class Plan:
  """What a run would need and take."""

  topology: str
  compiler: str  # Its release.
  chips: int
  mesh: dict[str, int]
  model: str
  parameters: int
  hbm_limit_gib: float
  fits: bool
  assumptions: Assumptions
  programs: dict[str, Estimate]
  phases: dict[str, float]  # Seconds of a generation batch.
  step_seconds: float
  tokens_per_second: float
  tokens_per_second_per_chip: float
  update_mfu: float
  step_mfu: float
  device_hours_per_100_steps: float
  cost_per_100_steps: float
  bottleneck: str

  def to_json(self) -> dict[str, Any]:
    """Plain values; absent numbers are None."""
    return jsonable(dataclasses.asdict(self))


def make(
  config: Config,
  policy: Policy,
  topology: Topology,
  assumptions: Assumptions,
  *,
  source: str = '',
  everything: bool = False,
  only: Iterable[str] | None = None,
  announce: Callable[[str], None] = lambda _: None,
) -> Plan:
  """Compiles the programs of a run for a slice, one after the other, and adds up what they take.

  Args:
    config: settings.
    policy: the model.
    topology: the slice.
    assumptions: about the run.
    source: where the sizes of the model come from.
    everything: every bucket and size of the cache, not only the largest.
    only: labels (`update`, `decode` …) to keep to; None: all.
    announce: gets a line before and after each compilation.

  Raises:
    UserError: a mesh that does not fit the slice or the model.
  """
  if assumptions.evaluation_questions is not None:
    data = dataclasses.replace(config.data, val_max_samples=assumptions.evaluation_questions)
    config = dataclasses.replace(config, data=data)
  mesh = model_mesh(config, policy, topology.devices)
  policy = policy.on(mesh, config.model.attention)
  base, trainable = abstract_parameters(policy, mesh)
  found = run_programs(config, policy, base, trainable, mesh, stop_ids=2)
  labels = select(found, everything)
  if only is not None:
    labels = {label: name for label, name in labels.items() if label in set(only)}
  names = {name: label for label, name in labels.items()}
  resident = _held(found['prepare'], None) | _held(found['apply'], None)
  estimates: dict[str, Estimate] = {}
  began = time.monotonic()
  announce(f'Compiling {len(names)} programs for {topology.name}, one after the other …')
  sampling_weights, refused = None, []
  for name, compiled in _compiled(mesh, found, names):
    took = time.monotonic() - began
    if found[name].kind == 'prepare' and isinstance(compiled, jax.stages.Compiled):
      # A copy may live on two layouts' worth of memory while it is made; afterwards only the result is left.
      sampling_weights = compiled.memory_analysis().output_size_in_bytes
    cost = functools.partial(
      _estimate,
      compiled=compiled,
      config=config,
      chip=topology.chip,
      axes=dict(mesh.shape),
      resident=resident,
      sampling_weights=sampling_weights,
      assumptions=assumptions,
    )
    estimate = cost(name, found[name])
    estimate.compile_seconds = took
    if name in names:
      estimates[names[name]] = estimate
    if names.get(name) == 'decode' and config.trainer.test_freq and registry.EVALUATION + name not in found:
      # The same program; what it spends on leaving out unlikely tokens is decided while it runs.
      same = dataclasses.replace(found[name], evaluation=True)
      estimates[same.label] = cost(registry.EVALUATION + name, same)
    said = f'{estimate.hbm_gib:.2f} GiB, {estimate.seconds:.3g} s' if estimate.error is None else estimate.error
    announce(f'  {name}: {said} (compiled in {took:.0f} s)')
    if estimate.error is not None:
      refused.append(name)
    began = time.monotonic()
  for name, label in names.items():
    if label not in estimates:
      error = f'could not be compiled: it continues {", ".join(refused)}, refused for want of memory or worse'
      estimates[label] = Estimate(name, {}, math.nan, fits=False, error=error)
  return _summary(config, policy, topology, mesh, assumptions, source, estimates)


def _compiled(
  mesh: jax.sharding.Mesh, found: Mapping[str, registry.Program], names: Iterable[str]
) -> Iterator[tuple[str, jax.stages.Compiled | jax.errors.JaxRuntimeError]]:
  """Compile programs as `programs.compile_programs` does, and tell kernels which chip they are for.

  Kernels ask for it while they are traced. On several chips each shard's mesh answers; on one chip nothing is sharded,
  and the answer would be the device of this process.
  """
  with jax.set_mesh(mesh) if mesh.size == 1 else contextlib.nullcontext():
    yield from registry.compile_programs(found, names)


def select(found: Mapping[str, registry.Program], everything: bool) -> dict[str, str]:
  """Return label → registered name: the largest of each kind under its label; with `everything` all others too."""
  named: dict[str, list[str]] = {}
  for name, program in found.items():
    named.setdefault(program.label, []).append(name)
  chosen = {label: max(names, key=lambda name: found[name].size) for label, names in named.items()}
  if everything:
    chosen |= {name: name for name in found if name not in chosen.values()}
  return chosen


# --- memory --------------------------------------------------------------------------------------------------------


def _held(program: registry.Program, shardings: Any) -> dict[str, float]:
  """Bytes on one device of a program's arguments by what they are; `shardings` None: those of the abstract arrays."""
  held: dict[str, float] = {}

  def add(kind: str, tree: Any, placed: Any) -> None:
    leaves, structure = jax.tree.flatten(tree)
    # An argument that a program does not use has no sharding: it is not passed.
    places = [leaf.sharding for leaf in leaves] if placed is None else structure.flatten_up_to(placed)
    for leaf, sharding in zip(leaves, places, strict=True):
      if sharding is not None:
        held[kind] = held.get(kind, 0.0) + math.prod(sharding.shard_shape(leaf.shape)) * _itemsize(leaf.dtype)

  for index, (argument, kind) in enumerate(zip(program.arguments, program.holds, strict=True)):
    placed = None if shardings is None else shardings[index]
    if isinstance(argument, TrainState):

      def part(name: str, placed: Any = placed) -> Any:
        return None if placed is None else getattr(placed, name)

      add('parameters', argument.trainable, part('trainable'))
      add('optimizer', argument.opt_state, part('opt_state'))
      add('teacher', argument.teacher, part('teacher'))
    else:
      add(kind, argument, placed)
  return held


def _itemsize(dtype: Any) -> int:
  return 8 if jax.dtypes.issubdtype(dtype, jax.dtypes.extended) else dtype.itemsize


def _memory(
  program: registry.Program,
  compiled: jax.stages.Compiled,
  resident: Mapping[str, float],
  sampling_weights: float | None,
) -> dict[str, float]:
  """GiB on one device by what is held while a program runs."""
  used = compiled.memory_analysis()
  held = _held(program, compiled.input_shardings[0])
  padding = used.argument_size_in_bytes - sum(held.values())
  if program.kind in SAMPLING:
    # All of the copy is there, also what this program does not read.
    held['sampling weights'] = max(held.pop('parameters', 0.0), sampling_weights or 0.0)
  made = max(0, used.output_size_in_bytes - used.alias_size_in_bytes)
  made_of = {
    'prefill': 'cache',
    'empty': 'cache',
    'resize': 'cache',
    'prepare': 'sampling weights',
    'zero': 'gradients',
  }
  results = made_of.get(program.kind, 'results')
  held[results] = held.get(results, 0.0) + made
  held['temporaries'] = used.temp_size_in_bytes
  held['padding'] = padding
  held |= {part: resident.get(part, 0.0) for part in RESIDENT}
  return {part: size / GIB for part, size in held.items() if abs(size) >= 2**10}


_USED = (
  re.compile(r'Used (?P<used>[\d.]+)(?P<unit>[KMGT]?) of (?P<limit>[\d.]+[KMGT]?)', re.IGNORECASE),
  re.compile(r'\((?P<used>[\d.]+)(?P<unit>[KMGT]?)\) exceeds available HBM'),
  re.compile(r'allocat\w* (?P<used>[\d.]+)(?P<unit>[KMGT]?)', re.IGNORECASE),
)
_UNITS = {'': 1, 'K': 2**10, 'M': 2**20, 'G': 2**30, 'T': 2**40}


def parse_out_of_memory(text: str) -> tuple[float | None, list[dict[str, Any]]]:
  """GiB that a program would have used (None: the message does not say) and its largest buffers, from the compiler's
  message."""
  found = next((match for pattern in _USED if (match := pattern.search(text))), None)
  used = float(found['used']) * _UNITS[found['unit'].upper()] / GIB if found else None
  buffers = []
  for block in re.split(r'\n\s*\d+\. (?=Size: )', text)[1:]:
    size = re.match(r'Size: ([\d.]+)([KMGT]?)', block)

    def field(name: str, block: str = block) -> str:
      return next(iter(re.findall(rf'{name}: (.*)', block)), '').strip()

    shape, operator = field('Shape'), re.search(r'op_name="([^"]*)"', block)
    buffers.append(
      {
        'gib': float(size.group(1)) * _UNITS[size.group(2)] / GIB,
        'shape': re.sub(r'\{.*', '', shape),
        'op_name': operator.group(1) if operator else '',
        'kind': field('Allocation type'),
      }
    )
  return used, buffers


# --- time ----------------------------------------------------------------------------------------------------------


def _estimate(
  name: str,
  program: registry.Program,
  compiled: jax.stages.Compiled | jax.errors.JaxRuntimeError,
  config: Config,
  chip: Chip,
  axes: Mapping[str, int],
  resident: Mapping[str, float],
  sampling_weights: float | None,
  assumptions: Assumptions,
) -> Estimate:
  if not isinstance(compiled, jax.stages.Compiled):
    return _refused(name, compiled, resident)
  memory = _memory(program, compiled, resident, sampling_weights)
  total = sum(memory.values())
  estimate = Estimate(name, memory, total, fits=total <= chip.hbm_gib)
  module = hlo.parse(compiled.as_text())
  branch = 'cheapest' if program.kind == 'decode' and not _truncates(config, program) else 'dearest'
  once = hlo.trace(module, unknown_trips=1, branch=branch)
  estimate.hottest = [
    {'op_name': name, 'seconds': taken / chip.clock, 'times': count} for name, taken, count in hlo.hottest(once, 12)
  ]
  estimate.copies = [_described(buffer) for buffer in hlo.copies(once, 3)]
  estimate.buffers = [_described(buffer) for buffer in hlo.largest(once, limit=5)]
  if program.kind != 'decode':
    _fill(estimate, _costs(once, chip, axes), 1.0, chip)
    estimate.unbounded = [loop.op_name or loop.name for loop in once.unbounded]
    return estimate
  # Steps of the loop: what one more turn adds, beside what happens once.
  none = _costs(hlo.trace(module, unknown_trips=0, branch=branch), chip, axes)
  turn = _minus(_costs(once, chip, axes), none)
  prompt, response = program.buckets
  capacity = program.capacity
  room = min(response, capacity - prompt - program.static['steps'])
  steps = min(assumptions.longest_completion, room)
  if turn.cached:
    # Of a row that draws the longest completion, the prompt and half of the completion on average.
    filled = (prompt + steps / 2) / capacity
    turn.sources['cache roofline'] = _cache_bytes(program, compiled) * filled / chip.hbm_bandwidth
  # What happens once, happens before and after every chunk of steps.
  none = _times(none, steps / program.static['steps'])
  _fill(estimate, none, 1.0, chip)
  _fill(estimate, turn, steps, chip)
  estimate.step_seconds = sum(turn.sources.values())
  estimate.step_reads = traffic.of_step(module, program.static['steps'], branch)
  return estimate


def _cache_bytes(program: registry.Program, compiled: jax.stages.Compiled) -> float:
  """Bytes on one device of a decode loop's keys and values, in the rows that it steps."""
  index = program.holds.index('cache')
  cache, placed = program.arguments[index], compiled.input_shardings[0][index]
  stores, places = cache.stores, placed.stores
  held = sum(
    math.prod(sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
    for leaf, sharding in zip(jax.tree.leaves(stores), jax.tree.leaves(places), strict=True)
  )
  return held * cache.lengths.shape[0] / kv_cache.store_rows(cache)


def _refused(name: str, error: Exception, resident: Mapping[str, float]) -> Estimate:
  text = str(error)
  used, buffers = parse_out_of_memory(text)
  sentence = ' '.join(text.split('\n')[0].split())
  if 'RESOURCE_EXHAUSTED' not in text:
    sentence = f'the compiler fails: {sentence}'
  total = math.nan if used is None else used
  held = {} if used is None else {'whole program': used}
  return Estimate(name, held, total, fits=False, buffers=buffers, error=sentence)


def _described(buffer: hlo.Buffer) -> dict[str, Any]:
  return {
    'name': buffer.name,
    'op_name': buffer.op_name,
    'shape': buffer.shape,
    'gib': buffer.bytes / GIB,
    'times': buffer.count,
  }


def _truncates(config: Config, program: registry.Program) -> bool:
  """Return whether sampling leaves tokens out, which takes the dearer branches of the loop."""
  knobs = config.val_kwargs if program.evaluation else config.rollout
  return knobs.top_p < 1 or knobs.top_k > 0 or knobs.temperature <= 0


@dataclasses.dataclass
class _Costs:
  sources: dict[str, float]  # Seconds.
  flops: float
  collectives: dict[str, float]  # Bytes on the wire.
  overlapped: float  # Seconds.
  kernels: dict[str, float]  # Seconds by kernel.
  cached: bool  # Holds kernels that read the cache, whose time is not in `sources`.


def _costs(trace: hlo.Trace, chip: Chip, axes: Mapping[str, int]) -> _Costs:
  sent = hlo.collectives(trace, axes)
  wire: dict[str, float] = {}
  for collective in sent:
    manner = 'async' if collective.asynchronous else 'sync'
    key = f'{collective.kind} {"+".join(collective.axes)} {manner}'
    wire[key] = wire.get(key, 0.0) + collective.wire
  by_kernel: dict[str, float] = {}
  sources = {'compiler': hlo.cycles(trace) / chip.clock, 'table': 0.0, 'roofline': 0.0}
  cached = False
  for kernel in hlo.kernels(trace):
    if kernels.reads_cache(kernel):
      cached = True
      continue
    took, origin = kernels.seconds(kernel, chip)
    sources[origin] += took
    label = kernels.splash_part(kernel)
    label = f'splash {label}' if label else kernel.kind
    by_kernel[f'{label} [{origin}]'] = by_kernel.get(f'{label} [{origin}]', 0.0) + took
  sources['synchronous collectives'] = hlo.total(sent, asynchronous=False) / chip.ici_bandwidth
  overlapped = hlo.total(sent, asynchronous=True) / chip.ici_bandwidth
  return _Costs(sources, hlo.matmul_flops(trace), wire, overlapped, by_kernel, cached)


def _minus(one: _Costs, other: _Costs) -> _Costs:
  def less(a: Mapping[str, float], b: Mapping[str, float]) -> dict[str, float]:
    return {key: value - b.get(key, 0.0) for key, value in a.items()}

  return _Costs(
    less(one.sources, other.sources),
    one.flops - other.flops,
    less(one.collectives, other.collectives),
    one.overlapped - other.overlapped,
    less(one.kernels, other.kernels),
    one.cached,
  )


def _times(costs: _Costs, times: float) -> _Costs:
  def by(values: Mapping[str, float]) -> dict[str, float]:
    return {key: value * times for key, value in values.items()}

  return _Costs(
    by(costs.sources),
    costs.flops * times,
    by(costs.collectives),
    costs.overlapped * times,
    by(costs.kernels),
    costs.cached,
  )


def _fill(estimate: Estimate, costs: _Costs, times: float, chip: Chip) -> None:
  """Adds `times` executions of `costs`."""

  def add(into: dict[str, float], values: Mapping[str, float], scale: float) -> None:
    into.update({key: into.get(key, 0.0) + value * times * scale for key, value in values.items() if value})

  add(estimate.seconds_by_source, costs.sources, 1)
  add(estimate.collective_gb, costs.collectives, 1e-9)
  add(estimate.kernel_seconds, costs.kernels, 1)
  estimate.matmul_tflop += costs.flops * times / 1e12
  estimate.overlapped_collectives += costs.overlapped * times
  estimate.seconds = sum(estimate.seconds_by_source.values())
  # Work that hides communication cannot be shorter than it.
  hidden = estimate.overlapped_collectives - estimate.seconds
  if hidden > 0:
    estimate.seconds_by_source['collectives that outlast the work beside them'] = hidden
    estimate.seconds += hidden


# --- the run ---------------------------------------------------------------------------------------------------------


def _summary(
  config: Config,
  policy: Policy,
  topology: Topology,
  mesh: jax.sharding.Mesh,
  assumptions: Assumptions,
  source: str,
  estimates: dict[str, Estimate],
) -> Plan:
  chips = mesh.size
  rows = config.data.train_batch_size * config.rollout.n
  phases = phase_seconds(config, mesh, assumptions, estimates)
  total = sum(phases.values())
  hours = 100 * total * chips / 3600
  mini = rows // (config.data.train_batch_size // config.actor.ppo_mini_batch_size)
  optimizer_steps = rows // mini * config.actor.ppo_epochs
  micro, micro_rows = micro_batch_counts(config, mesh, assumptions)
  largest = Buckets.of(config)
  useful = useful_flops(config, policy, largest, micro_rows)
  update_useful = useful * micro * optimizer_steps
  scored = forward_flops(policy, micro_rows, largest.prompt[-1] + largest.response[-1], largest.response[-1])
  sampled = rows * decode_flops(policy, assumptions.mean_prompt, assumptions.mean_completion)
  everything = update_useful + sampled + (scored * micro * optimizer_steps if 'score' in estimates else 0)

  def rate(flops: float, seconds: float) -> float:
    return flops / chips / topology.chip.flops / seconds if seconds > 0 else math.nan

  tokens = rows * assumptions.mean_completion / total if total > 0 else math.nan
  return Plan(
    topology=topology.name,
    compiler=topology.compiler,
    chips=chips,
    mesh=dict(mesh.shape),
    model=source,
    parameters=sum(math.prod(parameter.shape) for parameter in policy.parameter_table()),
    hbm_limit_gib=topology.chip.hbm_gib,
    fits=all(estimate.fits for estimate in estimates.values()),
    assumptions=assumptions,
    programs=estimates,
    phases=phases,
    step_seconds=total,
    tokens_per_second=tokens,
    tokens_per_second_per_chip=tokens / chips,
    update_mfu=rate(update_useful, phases.get('update', math.nan)),
    step_mfu=rate(everything, total),
    device_hours_per_100_steps=hours,
    cost_per_100_steps=hours * assumptions.price,
    bottleneck=_bottleneck(phases),
  )


def _bottleneck(phases: Mapping[str, float]) -> str:
  """The phase that takes longest; one of unknown length counts as the longest."""
  if not phases:
    return ''
  return max(phases, key=lambda phase: phases[phase] if math.isfinite(phases[phase]) else math.inf)


def phase_seconds(
  config: Config, mesh: jax.sharding.Mesh, assumptions: Assumptions, estimates: Mapping[str, Estimate]
) -> dict[str, float]:
  """Seconds of a generation batch by phase, every program at its largest bucket; evaluation as its share of a step."""

  def seconds(label: str) -> float:
    return math.nan if estimates[label].error is not None else estimates[label].seconds

  rows = config.data.train_batch_size * config.rollout.n
  mini = config.actor.ppo_mini_batch_size * config.rollout.n
  optimizer_steps = rows // mini * config.actor.ppo_epochs
  micro, _ = micro_batch_counts(config, mesh, assumptions)
  phases = {}

  def have(*labels: str) -> bool:
    return all(label in estimates for label in labels)

  if have('prefill', 'decode'):
    copy = seconds('prepare') if have('prepare') else 0.0
    prefills, decodes = _turns(config, mesh, assumptions, config.data.train_batch_size, config.rollout.n)
    phases['prefill'] = copy + prefills * seconds('prefill')
    phases['decode'] = decodes * seconds('decode')
  if have('score'):
    phases['score'] = micro * rows // mini * seconds('score')
  if have('update'):
    phases['update'] = optimizer_steps * micro * seconds('update')
  if have('zero', 'apply', 'finish'):
    phases['optimizer'] = optimizer_steps * (seconds('zero') + seconds('apply')) + seconds('finish')
  questions = assumptions.evaluation_questions
  if questions and config.trainer.test_freq and have('prefill', 'decode'):

    def own(label: str) -> str:
      return registry.EVALUATION + label if have(registry.EVALUATION + label) else label

    prefills, decodes = _turns(config, mesh, assumptions, questions, config.val_kwargs.n)
    once = prefills * seconds(own('prefill')) + decodes * seconds(own('decode'))
    phases['evaluation'] = once / config.trainer.test_freq
  return phases


def _turns(
  config: Config, mesh: jax.sharding.Mesh, assumptions: Assumptions, questions: int, n: int
) -> tuple[float, float]:
  """(prefills, decode loops as long as the longest completion) that `questions` with `n` completions each take.

  Slots are refilled: while samples wait, each takes the mean completion's time; those admitted last take the longest's.
  """
  shards = mesh.shape[meshes.FSDP]
  rows = sizes.shard_rows(questions * n, config.rollout.max_batch_rows, shards)
  prompts = shards * sizes.prompts_together(Buckets.of(config).prompt[-1], rows)
  waiting = max(questions * n / (rows * shards) - 1, 0) * assumptions.mean_completion
  return math.ceil(questions / prompts), 1 + waiting / assumptions.longest_completion


def micro_batch_counts(config: Config, mesh: jax.sharding.Mesh, assumptions: Assumptions) -> tuple[int, int]:
  """(micro-batches of an optimizer step, rows of one), every row trained on; packed rows by the mean lengths."""
  size = -(-config.actor.ppo_micro_batch_size // mesh.size) * mesh.size
  rows = float(config.actor.ppo_mini_batch_size * config.rollout.n)
  if config.actor.pack_sequences:
    largest = Buckets.of(config)
    prompt, response, reprompt = largest.prompt[-1], largest.response[-1], largest.reprompt[-1]
    mean = assumptions.mean_completion
    shares = [(assumptions.mean_prompt + mean) / (prompt + response), mean / response]
    if ObjectiveSpec.from_config(config).needs_teacher:
      shares.append((assumptions.mean_reprompt + mean) / (reprompt + response))
    rows *= min(1.0, max(shares))
  return math.ceil(rows / size), size


def decode_flops(policy: Policy, prompt: float, completion: float) -> float:
  """Operations of sampling one completion: as one forward pass over all its tokens."""
  return forward_flops(policy, 1, int(prompt + completion), int(completion))


def useful_flops(config: Config, policy: Policy, largest: Buckets, rows: int) -> float:
  """Operations that a micro-batch cannot do without: forward and backward of the student, forward of the teacher."""
  prompt, response, reprompt = largest.prompt[-1], largest.response[-1], largest.reprompt[-1]
  useful = 3 * forward_flops(policy, rows, prompt + response, response)
  if ObjectiveSpec.from_config(config).needs_teacher:
    useful += forward_flops(policy, rows, reprompt + response, response)
  return useful
