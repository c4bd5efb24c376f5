"""Memory, time and cost of a run's programs on a TPU slice, from compiling them for it.

Every number is of one of three kinds. [compiler]: figures of the TPU compiler for a program (memory, estimated cycles,
bytes sent). [table]: times of kernels without an estimate, scaled from dumped schedules. [arithmetic]: bytes ÷
bandwidth, operations ÷ peak. None is a measurement.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
import contextlib
import dataclasses
import functools
import itertools
import math
import operator
import re
import time
from typing import Any

import jax
import numpy as np

from sdpo_jax.config import Config, SamplingConfig
from sdpo_jax.distributed import mesh as meshes
from sdpo_jax.distributed import programs as registry
from sdpo_jax.errors import UserError
from sdpo_jax.files import jsonable
from sdpo_jax.learning import batching
from sdpo_jax.models import parameters as parameter_tables
from sdpo_jax.models.adapters.kv_prefix import KVPrefix
from sdpo_jax.models.policy import Policy
from sdpo_jax.objective.objective_spec import REFERENCES
from sdpo_jax.planner import hlo, kernels, lengths, program_facts, simulation, traffic, workload
from sdpo_jax.planner.topology import Chip, Topology
from sdpo_jax.teacher.signal import self_teacher
from sdpo_jax.training import cartridges, teacher_model
from sdpo_jax.training.opening import model_mesh
from sdpo_jax.training.run_programs import abstract_parameters, abstract_teacher, run_programs
from sdpo_jax.training.specs import batch_spec, declared_buckets, teacher_spec
from sdpo_jax.types import TrainState

GIB = 2**30
# Assumed seconds, from neither compiler nor data sheet. A message over the interconnect to the next chip:
HOP = 0.7e-6
# Host time between two chunks of a decode loop, and additional time per row: waiting for the results, finding finished
# rows, refilling them, and starting the next chunk.
HOST_CHUNK, HOST_ROW = 2e-3, 15e-6
DRAWN_TOKENS = 25e6  # Of completions, in a simulation of sampling.
# Memory that is always in use, whichever program runs.
RESIDENT = ('base', 'sampling base', 'parameters', 'optimizer', 'teacher', 'teacher base')
RESIDENT += 'carried', *(f'{name} policy' for name in REFERENCES)
# Label of the program that reads part of a document, while only the model and the document are in memory.
READING = 'read document'
BEFORE_THE_RUN = {'gather document': ('base',), READING: ('base', 'teacher base')}
# Programs that read the sampler's copy of the trainable parameters.
SAMPLING = ('prefill', 'extend', 'empty', 'empty kept', 'decode', 'admit', 'keep', 'resize', 'compact')
SAMPLING += ('empty recomputed', 'recompute', 'readmit', 'park', 'clear')
# The phase that a kind of the sampler's programs belongs to, if not that of decoding.
OF_PHASE = {'prefill': 'prefill', 'admit': 'prefill'} | dict.fromkeys(
  ('recompute', 'readmit', 'park', 'clear'), 'recompute'
)


@dataclasses.dataclass(frozen=True)
class Assumptions:
  """Properties of a run that its programs do not determine."""

  mean_completion: float  # Average tokens per completion.
  longest_completion: float  # Upper limit of a completion's tokens.
  mean_prompt: float  # Average tokens per prompt.
  mean_reprompt: float  # Average tokens per teacher's prompt.
  trained_fraction: float  # Fraction of samples that have a signal.
  evaluation_questions: int  # Per evaluation; 0: no evaluation.
  document: int  # Tokens of the document that a cartridge's teacher reads; 0: none.
  price: float  # US dollars per chip-hour.
  completion_spread: float = lengths.COMPLETION_SPREAD  # Standard deviation of the logarithm of completion lengths.
  measured: str = ''  # Source of measured lengths; empty: not measured.

  @classmethod
  def of(
    cls, config: Config, chip: Chip, *, price: float | None = None, run: str | None = None, document: int = 0
  ) -> Assumptions:
    """Return the assumptions of the settings `plan`, with limits as defaults where these are None.

    Args:
      config: settings.
      chip: the chip whose list price is the default.
      price: US dollars per chip-hour.
      run: directory or metrics.jsonl of a run whose lengths override the settings.
      document: tokens of the document that a cartridge's teacher reads; 0: none.

    Raises:
      UserError: a length contradicts the settings or another length, or the metrics lack lengths.
    """
    data, given, reprompt = config.data, config.plan, declared_buckets(config).reprompt[-1]
    measured = {} if run is None else lengths.of_run(run)

    def known(name: str, otherwise: float) -> float:
      value = measured.get(name, getattr(given, name, None))
      return float(otherwise if value is None else value)

    longest = known('longest_completion', data.max_response_length)
    mean_prompt = known('mean_prompt', data.max_prompt_length)
    # A teacher that reads the student's own prompts reads as many tokens.
    reads_prompts = config.actor.self_distillation.teacher_context == 'prompt'
    questions = data.val_max_samples or given.evaluation_questions
    if questions is None:
      questions = math.ceil(config.rollout.max_batch_rows / config.val_kwargs.n)
    assumed = cls(
      mean_completion=known('mean_completion', longest / 2),
      longest_completion=longest,
      mean_prompt=mean_prompt,
      mean_reprompt=mean_prompt if reads_prompts else known('mean_reprompt', reprompt),
      trained_fraction=known('trained_fraction', 1.0),
      evaluation_questions=questions if config.trainer.test_freq else 0,
      document=document,
      price=next(each for each in (price, given.price_per_chip_hour, chip.price) if each is not None),
      completion_spread=known('completion_spread', lengths.COMPLETION_SPREAD),
      measured='' if run is None else str(run),
    )
    bounds = (
      ('longest_completion', data.max_response_length, 'data.max_response_length'),
      ('mean_completion', longest, 'the longest completion'),
      ('mean_prompt', data.max_prompt_length, 'data.max_prompt_length'),
      ('mean_reprompt', reprompt, 'actor.self_distillation.max_reprompt_len'),
    )
    for name, most, bound in bounds:
      value = getattr(assumed, name)
      if not 0 < value <= most:
        source = f' (measured in {run})' if name in measured else ''
        raise UserError(f'plan.{name}={value:g}{source} must be more than 0 and at most {most:g}, which is {bound}.')
    return assumed


@dataclasses.dataclass(frozen=True)
class Scenario:
  """A run on a slice: whatever the costs of its programs depend on, except the programs themselves."""

  config: Config
  chip: Chip
  mesh: jax.sharding.Mesh
  assumptions: Assumptions

  @functools.cached_property
  def drawn(self) -> workload.SampleLengths:
    """The samples of all generation batches that are simulated, question by question."""
    a, data, period = self.assumptions, self.config.data, max(self.config.trainer.test_freq, 1)
    samples, held_out = data.train_batch_size * self.config.rollout.n, a.evaluation_questions * self.config.val_kwargs.n
    # Few steps of long completions say as much as many of short ones, whose longest differ more.
    steps = DRAWN_TOKENS / (samples + held_out / period) / a.mean_completion
    return drawn_samples(self.config, a, round(min(max(steps, 20), 100)))

  def sampling(self, keeps_size: bool) -> simulation.SimulatedSampling:
    """Return the work of the sampler; `keeps_size` is that of `rollout.functions.SamplerFunctions`."""
    data, rollout, declared = self.config.data, self.config.rollout, declared_buckets(self.config)
    return simulation.simulate(
      simulation.SamplingSpec(
        shards=self.mesh.shape[meshes.FSDP],
        max_rows=rollout.max_batch_rows,
        widths=declared.prompt,
        room=declared.response[-1],
        chunk=rollout.decode_chunk,
        keeps_size=keeps_size,
        questions=data.train_batch_size,
        n=rollout.n,
        max_staleness=rollout.max_staleness,
        keeps_carried=rollout.carried_cache == 'kept',
        held_out=self.assumptions.evaluation_questions,
        held_out_n=self.config.val_kwargs.n,
        test_freq=max(self.config.trainer.test_freq, 1),
        prompts=tuple(self.drawn.prompt[:: rollout.n].tolist()),
        completions=tuple(self.drawn.completion.tolist()),
        steps=len(self.drawn) // (data.train_batch_size * rollout.n),
      )
    )

  def batches(self, sampling: simulation.SimulatedSampling | None) -> list[workload.SampleLengths]:
    """Return generation batches of the simulated questions; None: in their order, as if none waited for another."""
    count, n = self.config.data.train_batch_size, self.config.rollout.n
    chosen = np.arange(len(self.drawn) // n).reshape(-1, count) if sampling is None else np.array(sampling.chosen)
    return [self.drawn.of((rows[:, None] * n + np.arange(n)).ravel() % len(self.drawn)) for rows in chosen]


@dataclasses.dataclass
class Estimate:
  """Memory and time of one program on one chip; times are per execution."""

  name: str
  hbm: dict[str, float]  # GiB by purpose, including memory of other programs.
  hbm_gib: float
  fits: bool
  matmul_tflop: float = 0.0
  seconds: float = 0.0
  seconds_by_source: dict[str, float] = dataclasses.field(default_factory=dict)
  overlapped_collectives: float = 0.0  # Seconds on the wire of overlapped collectives.
  collective_gb: dict[str, float] = dataclasses.field(default_factory=dict)
  kernel_seconds: dict[str, float] = dataclasses.field(default_factory=dict)
  call_seconds: float = 0.0  # Of a program of the sampler: once per call,
  turn_seconds: float = 0.0  # and per turn of its loop, without `step_kernels`.
  busy_step_seconds: float | None = None  # For a decode loop: one token per row while a sample follows each that ends.
  step_kernels: list[kernels.DecodeKernel] = dataclasses.field(default_factory=list)  # Attention to the cache.
  step_reads: traffic.StepReads | None = None  # For a decode loop.
  hottest: list[dict[str, Any]] = dataclasses.field(default_factory=list)  # For a decode loop: of one iteration.
  copies: list[dict[str, Any]] = dataclasses.field(default_factory=list)
  buffers: list[dict[str, Any]] = dataclasses.field(default_factory=list)
  unbounded: list[str] = dataclasses.field(default_factory=list)  # Loops counted once because their bound is unknown.
  error: str | None = None
  compile_seconds: float = 0.0

  def spent(self, work: simulation.Work, rate: float = 1.0) -> float:
    """Return the seconds of some work of the sampler, if kernels take `rate` times their bounds."""
    if self.error is not None:
      return math.nan
    read = work.blocks / max(work.turns, 1e-9)
    attention = sum(kernel.seconds(min(read, kernel.blocks)) for kernel in self.step_kernels)
    stalled = (rate - 1) * self.seconds_by_source.get('table', 0.0)
    return work.calls * (self.call_seconds + stalled) + work.turns * (self.turn_seconds + rate * attention)


@dataclasses.dataclass
class Plan:
  """Memory, time and cost of a run."""

  topology: str
  compiler: str  # Releases of jax and libtpu.
  chips: int
  mesh: dict[str, int]
  model: str
  parameters: int
  hbm_limit_gib: float
  fits: bool
  assumptions: Assumptions
  programs: dict[str, Estimate]
  phases: dict[str, float]  # Seconds per generation batch.
  step_seconds: float
  tokens_per_second: float
  tokens_per_second_per_chip: float
  update_mfu: float  # Of live tokens, as everywhere: padding does not count.
  step_mfu: float
  fill: dict[str, float]  # Live fraction: 'rows' and 'tokens' of the update, 'sampler' of the rows of decode steps.
  micro_batches: dict[str, float]  # Per generation batch: executions by program of the required shape.
  device_hours_per_100_steps: float
  cost_per_100_steps: float
  bottleneck: str
  warnings: list[str] = dataclasses.field(default_factory=list)
  # Per generation batch, as simulated: totals, and decode steps by program.
  sampling: dict[str, float] = dataclasses.field(default_factory=dict)
  decoding: list[dict[str, Any]] = dataclasses.field(default_factory=list)
  likely_phases: dict[str, float] = dataclasses.field(default_factory=dict)  # As `phases`, with `kernels.LIKELY`.
  trained: int = 0  # Trainable parameters; the others are frozen.
  base_gib: float = 0.0  # GiB per chip of the frozen parameters, which the update reads for student and teacher.
  sampling_base_gib: float = 0.0  # GiB per chip of the sampler's own arrays, which replace some of them.
  slots: int = 0  # Slots of a cartridge; 0: none.
  frozen_slots: int = 0
  slots_gib: float = 0.0  # GiB per chip of the trained slots.
  moments_gib: float = 0.0  # GiB per chip of their optimizer state.
  document_gib: float = 0.0  # GiB per chip of the document as the teacher reads it.
  chunks: int | None = None  # Chunks that are held; None: the teacher reads the whole document.
  reading_parts: int = 0  # Parts of the document, read one after the other, once per run, or of a chunk.
  reading_seconds: float = 0.0  # Time to read the document.

  def to_json(self) -> dict[str, Any]:
    """Return the plan as JSON values, with None for missing numbers."""
    return jsonable(dataclasses.asdict(self))


def make(
  config: Config,
  policy: Policy,
  topology: Topology,
  assumptions: Assumptions,
  *,
  source: str = '',
  everything: bool = False,
  only: Collection[str] | None = None,
  keep: str | None = None,
  announce: Callable[[str], None] = lambda _: None,
) -> Plan:
  """Compile the programs of a run for a slice, one after the other, and add up their costs.

  Args:
    config: settings.
    policy: the model.
    topology: the slice.
    assumptions: properties of the run.
    source: the source of the model's sizes.
    everything: whether to plan every bucket and cache size, not only the largest and those of the micro-batches.
    only: labels (`update`, `decode` …) to plan, at the largest bucket of each; None: all.
    keep: folder of cached compiler results; None: no cache.
    announce: called with a line before and after each compilation.

  Raises:
    UserError: the mesh does not fit the slice or the model.
  """
  if assumptions.evaluation_questions:
    data = dataclasses.replace(config.data, val_max_samples=assumptions.evaluation_questions)
    config = dataclasses.replace(config, data=data)
  mesh = model_mesh(config, policy, topology.devices)
  policy = policy.on(mesh, config.model.attention)
  base, trainable = abstract_parameters(policy, mesh)
  teacher = None
  if assumptions.document:
    teacher = cartridges.abstract_document_teacher(config, policy, mesh, assumptions.document)
  elif teacher_model.is_used(config):
    teacher = abstract_teacher(config, mesh)
  found, parts = run_programs(config, policy, base, trainable, mesh, stop_ids=2, teacher=teacher), 0
  if assumptions.document:
    reading, parts = cartridges.reading_programs(config, policy, base, mesh, assumptions.document)
    found = reading | found
  scenario = Scenario(config, topology.chip, mesh, assumptions)
  reader = teacher or self_teacher(policy, teacher_spec(config))
  share = batching.shares_prompts(batch_spec(config), *reader.readers(policy, teacher_spec(config)))
  draws = config.rollout.sampled_by != 'data' and (only is None or {'prefill', 'decode'} <= set(only))
  sampling = scenario.sampling(policy.reads_filled) if draws else None
  batches = scenario.batches(sampling)
  works_of = (workload.of_batch(config, policy, each, mesh.size, share, reader.policy) for each in batches)
  work = functools.reduce(operator.add, works_of)
  used = workload.used(found, work)
  works = {} if sampling is None else sampling_work(found, sampling)
  steps = [name for work in works.values() for name, *_ in work if found[name].kind in ('prefill', 'decode')]
  labels = select(found, everything, [*(name for names in used.values() for name in names), *steps])
  if only is not None:
    labels = {label: name for label, name in labels.items() if label in only or label in steps}
  names = {name: label for label, name in labels.items()}
  resident = resident_bytes(found)
  estimates: dict[str, Estimate] = {}
  began = time.monotonic()
  announce(f'Compiling {len(names)} programs for {topology.name}, one after the other …')
  sampling_weights, refused = None, []
  # The sampler's arrays for the base are always in memory.
  first = [name for name, program in found.items() if program.kind == 'prepare_base']
  for name, answer in compiled_for(topology, mesh, found, [*first, *names], keep):
    took = time.monotonic() - began
    # Making a copy may take memory for two layouts; afterwards only the result remains.
    if found[name].kind == 'prepare' and isinstance(answer, program_facts.ProgramFacts):
      sampling_weights = answer.results
    elif found[name].kind == 'prepare_base' and isinstance(answer, program_facts.ProgramFacts):
      resident['sampling base'] = answer.results
    estimate = estimated(scenario, name, found[name], answer, resident, sampling_weights)
    estimate.compile_seconds = took
    if name in names or (name in first and estimate.error is not None):
      estimates[names.get(name, name)] = estimate
    held_out = registry.EVALUATION + name
    if found[name].label == 'decode' and name in names and config.trainer.test_freq and held_out not in found:
      # The same program; the cost of truncated sampling is decided at run time.
      same = dataclasses.replace(found[name], evaluation=True)
      more = estimated(scenario, held_out, same, answer, resident, sampling_weights)
      estimates[registry.EVALUATION + names[name]] = more
    said = f'{estimate.hbm_gib:.2f} GiB, {estimate.seconds:.3g} s' if estimate.error is None else estimate.error
    announce(f'  {name}: {said} (compiled in {took:.0f} s)')
    if estimate.error is not None:
      refused.append(name)
    began = time.monotonic()
  for name, label in names.items():
    if label not in estimates:
      error = f'could not be compiled: it continues {", ".join(refused)}, which the compiler rejected'
      estimates[label] = Estimate(name, {}, math.nan, fits=False, error=error)
  made = _summary(scenario, policy, topology, source, estimates, work, used, resident, sampling, works)
  read = estimates.get(READING)
  if read is not None:
    made.chunks = teacher.policy.adapter.members
    made.reading_parts, made.reading_seconds = parts, math.nan if read.error else parts * read.seconds
  return made


def drawn_samples(config: Config, assumptions: Assumptions, batches: int) -> workload.SampleLengths:
  """Return the samples of some batches, equal at every call: quantiles of log-normal lengths in a random order."""
  data, n, a, shuffle = config.data, config.rollout.n, assumptions, np.random.default_rng(0).permutation
  questions, samples = data.train_batch_size * batches, data.train_batch_size * batches * n
  prompt = np.repeat(
    shuffle(lengths.quantiles(a.mean_prompt, data.max_prompt_length, questions, lengths.PROMPT_SPREAD)), n
  )
  completion = shuffle(lengths.quantiles(a.mean_completion, a.longest_completion, samples, a.completion_spread))
  limit = declared_buckets(config).reprompt[-1]
  reprompt = shuffle(lengths.quantiles(a.mean_reprompt, limit, samples, lengths.PROMPT_SPREAD))
  return workload.SampleLengths(
    prompt=prompt,
    completion=completion,
    reprompt=prompt if config.actor.self_distillation.teacher_context == 'prompt' else reprompt,
    trained=shuffle(np.arange(samples) < max(round(a.trained_fraction * samples), 1)),
  )


def compiled_for(
  topology: Topology,
  mesh: jax.sharding.Mesh,
  found: Mapping[str, registry.Program],
  names: Iterable[str],
  keep: str | None,
) -> Iterator[tuple[str, program_facts.ProgramFacts | jax.errors.JaxRuntimeError]]:
  """Compile programs as `distributed.programs.compile_programs` does, with the target chip set for kernels.

  Kernels ask for the chip while they are traced. On several chips each shard's mesh tells; on one chip nothing is
  sharded, and the answer would be the device of this process.

  Args:
    topology: the slice.
    mesh: mesh over its chips.
    found: programs by name.
    names: names of the programs to compile.
    keep: folder of cached compiler results; None: no cache.
  """
  asked = program_facts.asked_of(found, f'{topology.name}, {topology.compiler}', keep)
  with jax.set_mesh(mesh) if mesh.size == 1 else contextlib.nullcontext():
    yield from registry.compile_programs(asked, names)


def select(found: Mapping[str, registry.Program], everything: bool, used: Iterable[str] = ()) -> dict[str, str]:
  """Select programs to plan; return registered names by label or name.

  The largest program of each label determines whether the run fits; those in `used`, under their own names, determine
  the time; with `everything`, all others are included too.
  """
  named: dict[str, list[str]] = {}
  for name, program in found.items():
    named.setdefault(program.label, []).append(name)
  chosen = {label: max(names, key=lambda name: found[name].size) for label, names in named.items()}
  others = found if everything else dict.fromkeys(used)
  return chosen | {name: name for name in others if name not in chosen.values()}


# --- memory --------------------------------------------------------------------------------------------------------


def resident_bytes(found: Mapping[str, registry.Program]) -> dict[str, float]:
  """Return the bytes on one device by kind of argument; those in `RESIDENT` stay in memory whichever program runs."""
  held: dict[str, float] = {}
  for kind in (*REFERENCES, 'update', 'apply', 'readmit'):
    held |= next((held_bytes(program) for program in found.values() if program.kind == kind), {})
  return {part: size for part, size in held.items() if part in RESIDENT}


def held_bytes(
  program: registry.Program, argument_bytes: Sequence[Sequence[int | None]] | None = None
) -> dict[str, float]:
  """Return the bytes on one device of a program's arguments, by purpose.

  Without `argument_bytes`, they follow from the abstract arrays.
  """
  held: dict[str, float] = {}
  parts = {'trainable': 'parameters', 'opt_state': 'optimizer', 'teacher': 'teacher'}
  for index, (argument, kind) in enumerate(zip(program.arguments, program.holds, strict=True)):
    kinds = kind if isinstance(kind, tuple) else [kind] * len(jax.tree.leaves(argument))
    if isinstance(argument, TrainState):
      kinds = [parts.get(path[0].name) for path, _ in jax.tree_util.tree_leaves_with_path(argument)]
    of_leaves = registry.leaf_bytes(argument) if argument_bytes is None else argument_bytes[index]
    for each, size in zip(kinds, of_leaves, strict=True):
      if each is not None and size is not None:
        held[each] = held.get(each, 0.0) + size
  return held


def _memory(
  program: registry.Program,
  answer: program_facts.ProgramFacts,
  resident: Mapping[str, float],
  sampling_weights: float | None,
) -> dict[str, float]:
  """Return the GiB in use on one device, by purpose, while a program runs."""
  held = held_bytes(program, answer.argument_bytes)
  padding = answer.arguments_in_all - sum(held.values())
  kind = program.kind.removeprefix(registry.FEEDBACK)  # A sampler like that of the completions.
  if kind in SAMPLING:
    # The whole copy is in memory, even what this program does not read.
    held['sampling weights'] = max(held.pop('parameters', 0.0), sampling_weights or 0.0)
  elif kind not in BEFORE_THE_RUN:
    held['next carried'] = resident.get('carried', 0.0)  # Until the update is done, a checkpoint may need those before.
  made = max(0, answer.results - answer.aliased)
  made_of = {
    'prefill': 'cache',
    'extend': 'cache',
    'empty': 'cache',
    'empty kept': 'kept prefixes',
    'resize': 'cache',
    'prepare': 'sampling weights',
    'prepare_base': 'sampling base',
    'gather document': 'gathered base',
    'zero': 'gradients',
  }
  results = made_of.get(kind, 'results')
  held[results] = held.get(results, 0.0) + made
  held['temporaries'] = answer.temporaries
  held['padding'] = padding
  held |= {part: resident.get(part, 0.0) for part in BEFORE_THE_RUN.get(program.kind, RESIDENT)}
  return {part: size / GIB for part, size in held.items() if abs(size) >= 2**10}


_USED = (
  re.compile(r'Used (?P<used>[\d.]+)(?P<unit>[KMGT]?) of (?P<limit>[\d.]+[KMGT]?)', re.IGNORECASE),
  re.compile(r'\((?P<used>[\d.]+)(?P<unit>[KMGT]?)\) exceeds available HBM'),
  re.compile(r'allocat\w* (?P<used>[\d.]+)(?P<unit>[KMGT]?)', re.IGNORECASE),
)
_UNITS = {'': 1, 'K': 2**10, 'M': 2**20, 'G': 2**30, 'T': 2**40}


def parse_out_of_memory(text: str) -> tuple[float | None, list[dict[str, Any]]]:
  """Return the GiB that a program would have used, and its largest buffers, from the compiler's error message.

  The GiB are None if the message lacks them.
  """
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


def estimated(
  scenario: Scenario,
  name: str,
  program: registry.Program,
  answer: program_facts.ProgramFacts | jax.errors.JaxRuntimeError,
  resident: Mapping[str, float],
  sampling_weights: float | None,
) -> Estimate:
  """Return the memory and time of a program on one chip.

  Args:
    scenario: where it runs, and how completions are sampled.
    name: the program's name.
    program: the compiled program.
    answer: the compiler's result.
    resident: bytes that are always in use, by purpose.
    sampling_weights: bytes of the sampler's copy of the trainable parameters; None: unknown.
  """
  if not isinstance(answer, program_facts.ProgramFacts):
    return _refused(name, answer, resident)
  chip, memory = scenario.chip, _memory(program, answer, resident, sampling_weights)
  total = sum(memory.values())
  estimate = Estimate(name, memory, total, fits=total <= chip.hbm_gib)
  module = hlo.parse(answer.text)
  cases = sampled_cases(scenario.config.val_kwargs if program.evaluation else scenario.config.rollout)
  once = hlo.trace(module, unknown_trips=1, cases=cases)
  estimate.hottest = [
    {'op_name': name, 'seconds': taken / chip.clock, 'times': count} for name, taken, count in hlo.hottest(once, 12)
  ]
  estimate.copies = [_described(buffer) for buffer in hlo.copies(once, 3)]
  estimate.buffers = [_described(buffer) for buffer in hlo.largest(once, limit=5)]
  if program.kind not in SAMPLING:
    _fill(estimate, _costs(once, scenario), 1.0)
    estimate.unbounded = [loop.op_name or loop.name for loop in once.unbounded]
    return estimate
  # Cost per step of the loop: one more iteration without one-time costs.
  none = _costs(hlo.trace(module, unknown_trips=0, cases=cases), scenario)
  turn = _minus(_costs(once, scenario), none)
  # A step's kernels attend to the cache and to the chunk's own tokens.
  estimate.step_kernels = [kernels.decode_kernel(kernel, chip) for kernel in turn.decoding]
  if program.kind == 'decode':
    # Between two chunks the host checks every row while the device waits.
    none.sources['host'] = HOST_CHUNK + HOST_ROW * (program.rows or 0)
    estimate.step_reads = traffic.of_step(module, program.static['steps'], cases)
  estimate.call_seconds, estimate.turn_seconds = sum(none.sources.values()), sum(turn.sources.values())
  _fill(estimate, none, 1)
  turns = program.static.get('steps', 1)
  busy = functools.partial(lengths.live_blocks, scenario.drawn.completion, scenario.assumptions.mean_prompt)
  turn.sources['cache'] = sum(each.seconds(busy(each.block, each.blocks)) for each in estimate.step_kernels)
  _fill(estimate, turn, turns)
  estimate.busy_step_seconds = estimate.seconds / turns if program.kind == 'decode' else None
  return estimate


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
  named = {name: getattr(buffer, name) for name in ('name', 'op_name', 'shape')}
  return {**named, 'gib': buffer.bytes / GIB, 'times': buffer.count}


def sampled_cases(knobs: SamplingConfig) -> set[str]:
  """Return the cases of `rollout.sampling` that hold with these settings."""
  drawn = knobs.temperature > 0
  held = {
    'drawn': drawn,
    'greedy': not drawn,
    'tempered': drawn and knobs.temperature != 1,
    'top_k': drawn and knobs.top_k > 0,
    'top_p': drawn and knobs.top_p < 1,
  }
  return {case for case, holds in held.items() if holds}


@dataclasses.dataclass
class _Costs:
  sources: dict[str, float]  # Seconds.
  flops: float
  collectives: dict[str, float]  # Bytes on the wire.
  overlapped: float  # Seconds.
  kernels: dict[str, float]  # Seconds by kernel.
  decoding: list[hlo.Kernel]  # Kernels that attend to the cache; their time is not in `sources`.


def _costs(trace: hlo.Trace, scenario: Scenario) -> _Costs:
  chip, axes = scenario.chip, dict(scenario.mesh.shape)
  sent = hlo.collectives(trace, axes)
  wire: dict[str, float] = {}
  for collective in sent:
    manner = 'async' if collective.asynchronous else 'sync'
    key = f'{collective.kind} {"+".join(collective.axes)} {manner}'
    wire[key] = wire.get(key, 0.0) + collective.wire
  by_kernel: dict[str, float] = {}
  sources = {'compiler': hlo.cycles(trace) / chip.clock, 'table': 0.0, 'roofline': 0.0}
  decoding = []
  for kernel in hlo.kernels(trace):
    if kernels.reads_cache(kernel):
      decoding.append(kernel)
      continue
    took, origin = kernels.seconds(kernel, chip)
    sources[origin] += took
    label = kernels.splash_part(kernel)
    label = f'splash {label}' if label else kernel.kind
    by_kernel[f'{label} [{origin}]'] = by_kernel.get(f'{label} [{origin}]', 0.0) + took
  sources['synchronous collectives'] = hlo.total(sent, asynchronous=False) / chip.ici_bandwidth
  sources['collective latency'] = HOP * sum(each.count * each.hops(axes) for each in sent if not each.asynchronous)
  overlapped = hlo.total(sent, asynchronous=True) / chip.ici_bandwidth
  return _Costs(sources, hlo.matmul_flops(trace), wire, overlapped, by_kernel, decoding)


def _minus(one: _Costs, other: _Costs) -> _Costs:
  def less(a: Any, b: Any) -> Any:
    return {key: value - b.get(key, 0.0) for key, value in a.items()} if isinstance(a, dict) else a - b

  values = {name: less(value, getattr(other, name)) for name, value in vars(one).items() if name != 'decoding'}
  return _Costs(**values, decoding=one.decoding)


def _fill(estimate: Estimate, costs: _Costs, times: float) -> None:
  """Add `times` executions of `costs` to the estimate."""

  def add(into: dict[str, float], values: Mapping[str, float], scale: float) -> None:
    into.update({key: into.get(key, 0.0) + value * times * scale for key, value in values.items() if value})

  add(estimate.seconds_by_source, costs.sources, 1)
  add(estimate.collective_gb, costs.collectives, 1e-9)
  add(estimate.kernel_seconds, costs.kernels, 1)
  estimate.matmul_tflop += costs.flops * times / 1e12
  estimate.overlapped_collectives += costs.overlapped * times
  estimate.seconds = sum(estimate.seconds_by_source.values())
  # Work that hides communication cannot take less time than it.
  hidden = estimate.overlapped_collectives - estimate.seconds
  if hidden > 0:
    estimate.seconds_by_source['collectives that outlast the work beside them'] = hidden
    estimate.seconds += hidden


# --- the run ---------------------------------------------------------------------------------------------------------


def _summary(
  scenario: Scenario,
  policy: Policy,
  topology: Topology,
  source: str,
  estimates: dict[str, Estimate],
  work: workload.Workload,
  used: Mapping[str, Sequence[str]],
  resident: Mapping[str, float],
  sampling: simulation.SimulatedSampling | None,
  works: Mapping[str, Works],
) -> Plan:
  chips = scenario.mesh.size
  phases = phase_seconds(scenario, estimates, used, work.batches, works)
  total = sum(phases.values())
  hours = 100 * total * chips / 3600
  table = policy.parameter_table()
  useful = {
    'update': work.useful_flops,
    'score': work.scored_flops,
    **dict.fromkeys(REFERENCES, work.reference_flops),
    'decode': work.drawn_flops,
  }
  useful = {phase: flops / work.batches for phase, flops in useful.items()}
  drawn = work.drawn_tokens / work.batches
  decoding, totals = _decoding(estimates, works), {} if sampling is None else vars(sampling)

  def rate(flops: float, seconds: float) -> float:
    return flops / chips / topology.chip.flops / seconds if seconds > 0 else math.nan

  return Plan(
    topology=topology.name,
    compiler=topology.compiler,
    chips=chips,
    mesh=dict(scenario.mesh.shape),
    model=source,
    parameters=parameter_tables.count(table),
    trained=parameter_tables.count(parameter_tables.trainable(table)),
    hbm_limit_gib=topology.chip.hbm_gib,
    fits=all(estimate.fits for estimate in estimates.values()),
    assumptions=scenario.assumptions,
    programs=estimates,
    phases=phases,
    step_seconds=total,
    tokens_per_second=drawn / total if total > 0 else math.nan,
    tokens_per_second_per_chip=drawn / total / chips if total > 0 else math.nan,
    update_mfu=rate(useful['update'], phases.get('update', math.nan)),
    # Programs that were not planned count as zero. All may be drawn beside evaluations, which are another phase.
    step_mfu=rate(sum(useful[phase] for phase in useful if phase in phases or (phase == 'decode' and works)), total),
    fill={
      'rows': work.live_rows / max(work.rows, 1),
      'tokens': work.live_tokens / max(work.tokens, 1),
      'sampler': sum(each['live_rows'] * each['steps'] for each in decoding)
      / max(sum(each['rows'] * each['steps'] for each in decoding), 1),
    },
    micro_batches={
      name: ran / work.batches for name, ran in collections.Counter(itertools.chain(*used.values())).items()
    },
    device_hours_per_100_steps=hours,
    cost_per_100_steps=hours * scenario.assumptions.price,
    bottleneck=_bottleneck(phases),
    warnings=idle_warnings(scenario.config, scenario.mesh),
    sampling={name: value for name, value in totals.items() if not isinstance(value, dict)},
    decoding=decoding,
    likely_phases=phase_seconds(scenario, estimates, used, work.batches, works, kernels.LIKELY),
    base_gib=resident.get('base', 0.0) / GIB,
    sampling_base_gib=resident.get('sampling base', 0.0) / GIB,
    **_cartridge(policy, resident),
  )


def _cartridge(policy: Policy, resident: Mapping[str, float]) -> dict[str, float]:
  """Return the plan's fields about a cartridge; empty without one."""
  prefix = policy.adapter
  if not isinstance(prefix, KVPrefix):
    return {}
  held = {'slots_gib': 'parameters', 'moments_gib': 'optimizer', 'document_gib': 'teacher base'}
  sizes = {field: resident.get(part, 0.0) / GIB for field, part in held.items()}
  return {'slots': prefix.slots, 'frozen_slots': prefix.frozen, **sizes}


def idle_warnings(config: Config, mesh: jax.sharding.Mesh) -> list[str]:
  """Return warnings about settings that leave devices idle."""
  sequences = config.actor.ppo_mini_batch_size * config.rollout.n
  if sequences >= mesh.size:
    return []
  return [
    f'An optimizer step has {sequences} sequences for {mesh.size} devices, each of which takes at least one row: '
    f'{mesh.size - sequences} rows of every micro-batch are padding. Use a slice of at most {sequences} chips, or '
    'raise actor.ppo_mini_batch_size or rollout.n, which changes what is learned.'
  ]


def _bottleneck(phases: Mapping[str, float]) -> str:
  """Return the longest phase; one of unknown length counts as the longest."""
  if not phases:
    return ''
  return max(phases, key=lambda phase: phases[phase] if math.isfinite(phases[phase]) else math.inf)


Works = list[tuple[str, int, simulation.Work]]  # Programs, their rows, and their work per generation batch.


def sampling_work(found: Mapping[str, registry.Program], sampling: simulation.SimulatedSampling) -> dict[str, Works]:
  """Return which programs do the work of sampling, by phase.

  Raises:
    KeyError: no program is registered for some work.
  """
  named: dict[tuple[bool, simulation.Program], str] = {}
  for name, program in found.items():
    if program.kind in SAMPLING:
      wide = program.buckets[0] if program.kind == 'prefill' else program.capacity
      named[program.evaluation, (program.kind.partition(' ')[0], program.rows, wide)] = name
  works: dict[str, Works] = collections.defaultdict(list)
  for program, work in sampling.training.items():
    works[OF_PHASE.get(program[0], 'decode')].append((named[False, program], program[1], work))
  for program, work in sampling.evaluation.items():
    works['evaluation'].append((named.get((True, program)) or named[False, program], program[1], work))
  return works


def _spent(estimates: Mapping[str, Estimate], phase: str, works: Works, rate: float = 1.0) -> list[float]:
  """Return the seconds of programs of the sampler, or else of the largest of its kind; 0 if there is neither."""
  by_name, seconds = {estimate.name: estimate for estimate in estimates.values()}, []
  for name, _, work in works:
    kind = name.partition('/')[0]
    held_out = [registry.EVALUATION + each for each in (name, kind)] if phase == 'evaluation' else ['', '']
    options = [by_name.get(each) or estimates.get(each) for each in (held_out[0], name, held_out[1], kind)]
    seconds.append(next((estimate.spent(work, rate) for estimate in options if estimate is not None), 0.0))
  return seconds


def _decoding(estimates: Mapping[str, Estimate], works: Mapping[str, Works]) -> list[dict[str, Any]]:
  """Return decode steps per generation batch and their seconds, by stage of the cache, in training and evaluation."""
  found, names = [], ('phase', 'program', 'rows', 'live_rows', 'steps', 'calls', 'seconds')
  for phase in ('decode', 'evaluation'):
    steps = [each for each in works.get(phase, ()) if each[2].live]
    for (name, rows, work), seconds in zip(steps, _spent(estimates, phase, steps), strict=True):
      values = phase, name, rows, work.live / work.turns, work.turns, work.calls, seconds
      found.append(dict(zip(names, values, strict=True)))
  return found


def phase_seconds(
  scenario: Scenario,
  estimates: Mapping[str, Estimate],
  used: Mapping[str, Sequence[str]],
  batches: int,
  works: Mapping[str, Works],
  rate: float = 1.0,
) -> dict[str, float]:
  """Return the seconds per generation batch by phase; evaluation is spread over the steps.

  Args:
    scenario: the run.
    estimates: estimates by label or name.
    used: programs from `workload.used`. A micro-batch whose program has no estimate takes the time of the largest.
    batches: number of generation batches that these are of.
    works: from `sampling_work`; likewise.
    rate: seconds that kernels take per second of the bound of their schedule.
  """
  config = scenario.config
  by_name = {estimate.name: estimate for estimate in estimates.values()}

  def have(*labels: str) -> bool:
    return all(label in estimates for label in labels)

  def seconds(estimate: Estimate) -> float:
    stalled = (rate - 1) * estimate.seconds_by_source.get('table', 0.0)
    return math.nan if estimate.error is not None else estimate.seconds + stalled

  def micro_batches(kind: str) -> float:
    return sum(seconds(by_name.get(name, estimates[kind])) for name in used[kind]) / batches

  def sampling(phase: str, copies: float) -> dict[str, float]:
    if not (works.get(phase) or copies == 1) or not (works and have('prefill', 'decode')):
      return {}
    copy = copies * seconds(estimates['prepare']) if have('prepare') else 0.0
    return {phase: copy + sum(_spent(estimates, phase, works.get(phase, []), rate))}

  phases = sampling('prefill', 1) | sampling('recompute', 0) | sampling('decode', 0)
  for phase in (*REFERENCES, 'score', 'update'):
    if have(phase):
      phases[phase] = micro_batches(phase)
  if have('zero', 'apply', 'finish'):
    steps = config.data.train_batch_size // config.actor.ppo_mini_batch_size * config.actor.ppo_epochs
    each = seconds(estimates['zero']) + seconds(estimates['apply'])
    after = seconds(estimates['finish']) + (seconds(estimates['digest']) if have('digest') else 0.0)
    phases['optimizer'] = steps * each + after
  return phases | sampling('evaluation', 1 / max(config.trainer.test_freq, 1))
