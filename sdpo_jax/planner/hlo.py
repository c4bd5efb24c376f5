"""Analysis of a scheduled HLO module (`compiled.as_text()`): executions and the compiler's cost estimates.

XLA's own cost analysis counts the body of a loop once and ignores the TPU's schedule. The text has both: most
instructions carry `estimated_cycles`, and loops carry their bounds. Everything here is per device.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
import dataclasses
import functools
import math
import re

import numpy as np

# A loop in jax.named_scope('at_most_12') or 'about_12', without a constant bound, counts as 12 trips.
SCOPE = re.compile(r'\b(?:at_most|about)_(\d+)\b')
CASE = re.compile(r'\bif_(\w+)/cond$')  # A conditional whose cheapest branch counts unless the case is usual.
ITEM_BITS = {
  'pred': 8,
  **dict.fromkeys(('s2', 'u2'), 2),
  **dict.fromkeys(('s4', 'u4', 'f4e2m1fn'), 4),
  **dict.fromkeys(('s8', 'u8', 'f8e4m3fn', 'f8e5m2', 'f8e4m3b11fnuz', 'f8e4m3fnuz', 'f8e5m2fnuz', 'f8e8m0fnu'), 8),
  **dict.fromkeys(('s16', 'u16', 'f16', 'bf16'), 16),
  **dict.fromkeys(('s32', 'u32', 'f32'), 32),
  **dict.fromkeys(('s64', 'u64', 'f64', 'c64'), 64),
  'c128': 128,
}
COLLECTIVES = (
  'all-gather',
  'all-reduce',
  'reduce-scatter',
  'all-to-all',
  'ragged-all-to-all',
  'collective-permute',
  'collective-broadcast',
)
# Instructions that move no data themselves.
FREE = frozenset(
  (
    'parameter',
    'constant',
    'tuple',
    'get-tuple-element',
    'bitcast',
    'after-all',
    'add-dependency',
    'partition-id',
    'replica-id',
    'opt-barrier',
    'copy-done',
    'slice-start',
    'slice-done',
    'async-done',
    'async-update',
  )
)
# Custom calls that are annotations or allocations.
FREE_CALLS = frozenset(
  ('AllocateBuffer', 'AssumeGatherIndicesInBound', 'ConcatBitcast', 'GatherScatterIndicesBitpacked', 'Sharding')
)
_ARRAY = re.compile(r'([a-z]\w*)\[([\d,<=]*)\](?:\{([^}]*)\})?')
_NAME = re.compile(r'%([\w.\-]+)')
_COMPUTATION = re.compile(r'(ENTRY )?%?([\w.\-]+) \(.*\{$')
_INSTRUCTION = re.compile(r' +(ROOT )?%?([\w.\-]+) = ')


@dataclasses.dataclass(frozen=True)
class Array:
  """Dtype, shape and memory space of an array."""

  dtype: str
  shape: tuple[int, ...]
  space: int  # Memory space: 0 is HBM, 1 VMEM.

  @property
  def size(self) -> int:
    """Return the number of elements."""
    return math.prod(self.shape)

  @property
  def bytes(self) -> int:
    """Return the bytes of the elements, without the padding of tiles."""
    return self.size * ITEM_BITS.get(self.dtype, 0) // 8


@dataclasses.dataclass(eq=False)
class Instruction:
  """An HLO instruction."""

  name: str
  opcode: str
  arrays: tuple[Array, ...]  # Results; several for a tuple.
  operands: tuple[str, ...]  # Names.
  attributes: str  # The rest of the line, backend_config included.
  literal: str = ''  # The text in parentheses: the value of a constant or the number of a parameter.
  computation: Computation | None = dataclasses.field(default=None, repr=False)  # The computation it is part of.

  @property
  def bytes(self) -> int:
    """Return the bytes of all results."""
    return sum(array.bytes for array in self.arrays)

  @property
  def cycles(self) -> int | None:
    """Return the compiler's estimate of the cycles of one execution; None if there is none."""
    text = self._first(r'"estimated_cycles":"(\d+)"')
    return int(text) if text else None

  @property
  def op_name(self) -> str:
    """Return the operation's name in the traced program."""
    return self._first(r'op_name="([^"]*)"')

  @property
  def target(self) -> str:
    """Return the target of a custom call."""
    return self._first(r'custom_call_target="([^"]*)"')

  def attribute(self, name: str) -> str | None:
    """Return the value of the first attribute `name=value`, without its braces or brackets."""
    match = re.search(rf'\b{name}=(?:\{{([^}}]*)\}}|\[([^\]]*)\]|([^,\s]+))', self.attributes)
    return next((group for group in match.groups() if group is not None), None) if match else None

  def called(self, *names: str) -> list[str]:
    """Return the computations that the attributes `names` refer to."""
    return [name for key in names for name in _NAME.findall(self._first(rf'\b{key}=(\{{[^}}]*\}}|%[\w.\-]+)'))]

  @functools.cached_property
  def fused(self) -> Computation | None:
    """Return the computation of a fusion; None for other instructions."""
    return self.computation.module.computations[self.called('calls')[0]] if self.opcode == 'fusion' else None

  @property
  def read(self) -> list[Array]:
    """Return the arrays of all operands."""
    return [array for name in self.operands for array in self.computation.instructions[name].arrays]

  def _first(self, pattern: str) -> str:
    """Return the group of the first match of a pattern in the attributes; empty if there is none."""
    match = re.search(pattern, self.attributes)
    return match.group(1) if match else ''


@dataclasses.dataclass(eq=False)
class Computation:
  """An HLO computation: the entry, a loop's body or condition, a branch, or the inside of a fusion."""

  name: str
  module: Module = dataclasses.field(repr=False)
  instructions: dict[str, Instruction]
  root: str = ''

  def parameters(self) -> list[str]:
    """Return the names of the computation's parameters, in order."""
    found = [(int(i.literal), i.name) for i in self.instructions.values() if i.opcode == 'parameter']
    return [name for _, name in sorted(found)]


@dataclasses.dataclass
class Module:
  """An HLO module: its computations by name, and the name of the entry computation."""

  computations: dict[str, Computation]
  entry: str


@dataclasses.dataclass(frozen=True)
class Execution:
  """A top-level instruction and its number of executions."""

  instruction: Instruction
  count: float
  frame: _Frame  # The call stack of its computation.


def parse(text: str) -> Module:
  """Parse the text that `compiled.as_text()` prints.

  Raises:
    ValueError: the text has no entry computation, or an instruction cannot be parsed.
  """
  module, current = Module({}, ''), None
  for line in _logical_lines(text):
    header = _COMPUTATION.match(line)
    if header:
      current = Computation(header.group(2), module, {})
      module.computations[current.name] = current
      module.entry = current.name if header.group(1) else module.entry
    elif current is not None and (match := _INSTRUCTION.match(line)):
      instruction = _instruction(match.group(2), line[match.end() :], current)
      current.instructions[instruction.name] = instruction
      if match.group(1):
        current.root = instruction.name
  if not module.entry:
    raise ValueError('The text holds no ENTRY computation.')
  return module


def _logical_lines(text: str) -> Iterator[str]:
  """Yield lines, joining attribute values that contain line breaks."""
  held = ''
  for line in text.splitlines():
    starts = line.startswith(('  ', 'ENTRY ', '%', 'HloModule')) or line == '}' or not line or held == ''
    if starts or _COMPUTATION.match(line):
      if held:
        yield held
      held = line
    else:
      held += line
  if held:
    yield held


def _instruction(name: str, rest: str, computation: Computation) -> Instruction:
  end = _closing(rest, 0) if rest.startswith('(') else re.match(r'\S+', rest).end()
  match = re.compile(r' ?([\w\-]+)\(').match(rest, end)
  if match is None:
    raise ValueError(f'This instruction cannot be parsed: %{name} = {rest[:200]}')
  stop = _closing(rest, match.end() - 1)
  inside = rest[match.end() : stop - 1]
  return Instruction(
    name=name,
    opcode=match.group(1),
    arrays=tuple(_arrays(rest[:end])),
    operands=tuple(_NAME.findall(inside)),
    attributes=rest[stop:],
    literal=inside if match.group(1) in ('constant', 'parameter') else '',
    computation=computation,
  )


def _closing(text: str, start: int) -> int:
  """Return the index after the parenthesis that closes the one at `start`."""
  depth = 0
  for match in re.compile(r'[()]').finditer(text, start):
    depth += 1 if match.group() == '(' else -1
    if depth == 0:
      return match.end()
  raise ValueError(f'A parenthesis is not closed: {text[start : start + 200]}')


def _arrays(text: str) -> Iterator[Array]:
  for dtype, sizes, layout in _ARRAY.findall(text):
    space = re.search(r'S\((\d+)\)', layout)
    shape = tuple(int(size.removeprefix('<=')) for size in sizes.split(',') if size)
    yield Array(dtype, shape, int(space.group(1)) if space else 0)


# --- executions ------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class _Frame:
  """A call of a computation, to look up the values of its parameters."""

  computation: Computation
  caller: _Frame | None = None
  call: Instruction | None = None


@dataclasses.dataclass
class Trace:
  """The executed instructions of a program, and its loops with an unknown trip count."""

  executions: list[Execution]
  unbounded: list[Instruction]


def trace(module: Module, *, unknown_trips: int = 1, cases: Collection[str] = ()) -> Trace:
  """Walk the call graph from the entry computation.

  Args:
    module: a module from `parse`.
    unknown_trips: trips of a loop without a known bound.
    cases: scopes `if_…` of conditionals whose dearest branch counts; of other such the cheapest does. Without such a
      scope it is the dearest.
  """
  executions: list[Execution] = []
  unbounded: list[Instruction] = []

  @functools.cache
  def weight(name: str) -> int:
    """Return the cycles of a computation and all it calls, counting loops once."""
    total = 0
    for instruction in module.computations[name].instructions.values():
      total += instruction.cycles or 0
      total += sum(weight(called) for called in _subprograms(instruction))
    return total

  def visit(frame: _Frame, count: float) -> None:
    for instruction in frame.computation.instructions.values():
      executions.append(Execution(instruction, count, frame))
      called = _subprograms(instruction)
      times = count
      if instruction.opcode == 'while':
        trips = trip_count(instruction, frame)
        if trips is None:
          unbounded.append(instruction)
          trips = unknown_trips
        times = count * trips
      elif instruction.opcode == 'conditional':
        case = CASE.search(instruction.op_name)
        called = [(min if case and case[1] not in cases else max)(called, key=weight)]
      for name in called:
        visit(_Frame(module.computations[name], frame, instruction), times)

  visit(_Frame(module.computations[module.entry]), 1)
  return Trace(executions, unbounded)


def _subprograms(instruction: Instruction) -> list[str]:
  """Return the computations whose instructions run as separate instructions."""
  if instruction.opcode == 'while':
    return instruction.called('body', 'condition')
  if instruction.opcode == 'conditional':
    return instruction.called('branch_computations', 'true_computation', 'false_computation')
  if instruction.opcode == 'call':
    return instruction.called('to_apply')
  if instruction.opcode == 'async-start':
    return instruction.called('calls')
  return []


def trip_count(loop: Instruction, frame: _Frame) -> int | None:
  """Return the trips of a `while`, from its annotation, the constants of its condition, or its named scope."""
  known = re.search(r'known_trip_count":\{"n":"(\d+)"', loop.attributes)
  if known:
    return int(known.group(1))
  counted = _count(loop, frame)
  if counted is not None:
    return counted
  scope = SCOPE.search(loop.op_name.rpartition('/while/body')[2])  # Not of the loops around it.
  return int(scope.group(1)) if scope else None


def _count(loop: Instruction, frame: _Frame) -> int | None:
  """Return the trips of a loop `for i in range(start, stop, step)`; None for any other."""
  computations = loop.computation.module.computations
  (body,), (condition,) = loop.called('body'), loop.called('condition')
  inner = _Frame(computations[condition], frame, loop)
  compare, at = _through_fusions(inner, inner.computation.root)
  if compare.opcode != 'compare':
    return None
  direction = compare.attribute('direction')
  left, right = (_element(at, operand) for operand in compare.operands)
  if direction in ('GT', 'GE'):
    left, right, direction = right, left, {'GT': 'LT', 'GE': 'LE'}[direction]
  if direction not in ('LT', 'LE') or not isinstance(left, int):
    return None
  index = left
  stop = right.value if isinstance(right, _Constant) else _invariant(loop, frame, right)
  start = _constant(frame, _operand_element(frame, loop, index))
  step = _step(computations[body], index)
  if stop is None or start is None or not step or step < 0:
    return None
  return max(0, -(-(stop + (direction == 'LE') - start) // step))


@dataclasses.dataclass(frozen=True)
class _Constant:
  value: int


def _through_fusions(frame: _Frame, name: str) -> tuple[Instruction, _Frame]:
  """Follow copies and fusions to the instruction that makes a value; return it with the frame of its operands."""
  while True:
    instruction = frame.computation.instructions[name]
    if instruction.opcode in ('copy', 'bitcast', 'convert', 'reshape'):
      name = instruction.operands[0]
    elif instruction.opcode == 'fusion':
      frame = _Frame(instruction.fused, frame, instruction)
      name = frame.computation.root
    elif instruction.opcode == 'parameter' and frame.call is not None and frame.call.opcode == 'fusion':
      name, frame = frame.call.operands[int(instruction.literal)], frame.caller
    else:
      return instruction, frame


def _element(frame: _Frame, name: str) -> int | _Constant | None:
  """Return a value as a constant, or as an index into its computation's tuple parameter."""
  instruction, frame = _through_fusions(frame, name)
  if instruction.opcode == 'constant':
    value = _literal(instruction)
    return None if value is None else _Constant(value)
  if instruction.opcode == 'get-tuple-element':
    source, _ = _through_fusions(frame, instruction.operands[0])
    if source.opcode == 'parameter':
      return int(instruction.attribute('index'))
  return None


def _literal(constant: Instruction) -> int | None:
  text = constant.literal.strip().strip('{}')
  return int(text) if re.fullmatch(r'-?\d+', text) else None


def _operand_element(frame: _Frame, loop: Instruction, index: int) -> str | None:
  """Return the name of the initial value of element `index` of a loop's tuple."""
  source, _ = _through_fusions(frame, loop.operands[0])
  return source.operands[index] if source.opcode == 'tuple' else None


def _constant(frame: _Frame, name: str | None) -> int | None:
  """Return the constant value of a name, looked up through enclosing loops and calls."""
  if name is None:
    return None
  instruction, at = _through_fusions(frame, name)
  if instruction.opcode == 'constant':
    return _literal(instruction)
  index = _element(at, instruction.name)
  if isinstance(index, int) and at.call is not None and at.call.opcode == 'while':
    return _invariant(at.call, at.caller, index)
  return None


def _invariant(loop: Instruction, frame: _Frame, index: int | None) -> int | None:
  """Return the constant in element `index` of a loop's tuple, if the body passes it on unchanged."""
  if index is None:
    return None
  body = loop.computation.module.computations[loop.called('body')[0]]
  root = body.instructions[body.root]
  if root.opcode != 'tuple' or _element(_Frame(body), root.operands[index]) != index:
    return None
  return _constant(frame, _operand_element(frame, loop, index))


def _step(body: Computation, index: int) -> int | None:
  """Return the constant that a body adds to element `index` of its tuple."""
  root = body.instructions[body.root]
  if root.opcode != 'tuple':
    return None
  frame = _Frame(body)
  instruction, at = _through_fusions(frame, root.operands[index])
  if instruction.opcode != 'add':
    return None
  values = [_element(at, operand) for operand in instruction.operands]
  constants = [value.value for value in values if isinstance(value, _Constant)]
  return constants[0] if index in values and len(constants) == 1 else None


# --- costs ---------------------------------------------------------------------------------------------------------


def cycles(trace: Trace) -> float:
  """Return the cycles of all executions by the compiler's estimates."""
  return sum((execution.instruction.cycles or 0) * execution.count for execution in trace.executions)


def hottest(trace: Trace, limit: int = 10) -> list[tuple[str, float, float]]:
  """Return (name in the traced program, cycles of all executions, executions) of the operations with most cycles."""
  found: dict[str, list[float]] = {}
  for execution in trace.executions:
    instruction = execution.instruction
    if instruction.cycles:
      sums = found.setdefault(instruction.op_name or instruction.name, [0.0, 0.0])
      sums[0] += instruction.cycles * execution.count
      sums[1] += execution.count
  ranked = sorted(found.items(), key=lambda item: item[1][0], reverse=True)
  return [(name, *sums) for name, sums in ranked[:limit]]


def matmul_flops(trace: Trace) -> float:
  """Return the FLOPs of matrix products and convolutions (a multiply-add counts as two)."""

  @functools.cache
  def flops(instruction: Instruction) -> int:
    if instruction.opcode == 'dot':
      return _dot_flops(instruction)
    if instruction.opcode == 'convolution':
      return _convolution_flops(instruction)
    fused = instruction.fused
    return 0 if fused is None else sum(map(flops, fused.instructions.values()))

  return sum(flops(execution.instruction) * execution.count for execution in trace.executions)


def _dot_flops(instruction: Instruction) -> int:
  left = instruction.read[0]
  contracted = _numbers(instruction.attribute('lhs_contracting_dims') or '')
  return 2 * instruction.arrays[0].size * math.prod(left.shape[axis] for axis in contracted)


def _convolution_flops(instruction: Instruction) -> int:
  """Count the products that meet neither padding nor holes: batched matrix products are written as convolutions."""
  left, right = instruction.read[:2]
  labels = re.search(r'dim_labels=(\w+)_(\w+)->(\w+)', instruction.attributes)
  left_labels, right_labels, out_labels = labels.groups()
  out = instruction.arrays[0]
  spatial = sorted(label for label in right_labels if label.isdigit())
  window = _window(instruction, len(spatial))
  products = 1
  for label in spatial:
    axis = int(label)
    positions = np.arange(out.shape[out_labels.index(label)])[:, None] * window['stride'][axis]
    positions = positions + np.arange(window['size'][axis])[None] * window['rhs_dilate'][axis] - window['pad'][axis]
    dilation = window['lhs_dilate'][axis]
    size = left.shape[left_labels.index(label)]
    products *= int(((positions >= 0) & (positions % dilation == 0) & (positions // dilation < size)).sum())
  inputs = right.shape[right_labels.index('i')]
  return 2 * products * inputs * out.shape[out_labels.index('b')] * out.shape[out_labels.index('f')]


def _window(instruction: Instruction, axes: int) -> dict[str, list[int]]:
  """Return size, stride, low padding and dilations by spatial axis."""
  text = re.search(r'window=\{([^}]*)\}', instruction.attributes)
  found = dict(re.findall(r'(\w+)=(\S+)', text.group(1) if text else ''))
  given = {key: [int(part.split('_')[0]) for part in value.split('x')] for key, value in found.items()}
  defaults = {'size': 1, 'stride': 1, 'pad': 0, 'lhs_dilate': 1, 'rhs_dilate': 1}
  return {key: given.get(key, [default] * axes) for key, default in defaults.items()}


# --- reads from HBM -------------------------------------------------------------------------------------------------

# These read only the part of their first operand that they return.
_SELECTING = frozenset(('dynamic-slice', 'gather', 'slice', 'slice-start'))


@dataclasses.dataclass(frozen=True)
class Read:
  """A read of an operand in HBM by an instruction."""

  instruction: Instruction
  array: Array  # Type of the whole operand.
  source: Instruction  # Producer of the operand, followed through copies and loops; may be a program parameter.
  bytes: int  # Per execution, without the padding of tiles.
  count: float


def reads(trace: Trace) -> list[Read]:
  """Return every HBM operand of every instruction, each counted once; values within fusions are not in memory.

  Slices, gathers and in-place updates count only the part that is needed; a custom call, whose code is unknown here,
  counts its whole operands. Operands of loops and branches are counted where they are read.
  """
  found = []
  for execution in trace.executions:
    instruction = execution.instruction
    if instruction.opcode in FREE - {'slice-start'} or instruction.target in FREE_CALLS or _subprograms(instruction):
      continue
    for name in dict.fromkeys(instruction.operands):
      # A tuple of results is taken apart before it is read.
      arrays = instruction.computation.instructions[name].arrays
      if len(arrays) != 1 or arrays[0].space != 0:
        continue
      size = _read_of(instruction, name)
      if size:
        source = _source(execution.frame, name)
        found.append(Read(instruction, arrays[0], source, size, execution.count))
  return found


def _read_of(instruction: Instruction, name: str) -> int:
  """Return the bytes that an instruction needs of its operand `name`."""
  whole = instruction.computation.instructions[name].bytes
  places = [place for place, operand in enumerate(instruction.operands) if operand == name]
  if instruction.fused is not None:
    parameters = instruction.fused.parameters()
    return min(whole, sum(_needed(instruction.fused, parameters[place]) for place in places))
  if places != [0]:
    return whole
  if instruction.opcode == 'slice-start':
    return min(whole, instruction.arrays[1].bytes)  # Its results include the operand.
  if instruction.opcode in _SELECTING:
    return min(whole, instruction.bytes)
  return 0 if instruction.opcode == 'dynamic-update-slice' else whole


def _needed(computation: Computation, name: str) -> int:
  """Return the bytes that a fused computation needs of its value `name`."""
  whole = computation.instructions[name].bytes
  if name == computation.root:
    return whole
  total = 0
  for user in computation.instructions.values():
    if name in user.operands:
      if user.opcode in ('bitcast', 'tuple') or _is_bitcast(user):
        total += _needed(computation, user.name)
      else:
        total += _read_of(user, name)
  return min(total, whole)


def _is_bitcast(instruction: Instruction) -> bool:
  """Return whether an instruction is a fusion of only a bitcast."""
  return instruction.fused is not None and all(
    nested.opcode in ('parameter', 'bitcast') for nested in instruction.fused.instructions.values()
  )


def _source(frame: _Frame, name: str) -> Instruction:
  """Return the producer of a value, followed through copies, branches and (by initial values) loops."""
  instruction, at = _through_fusions(frame, name)
  if instruction.opcode in ('copy-done', 'copy-start', 'opt-barrier'):
    return _source(at, instruction.operands[0])
  if instruction.opcode == 'parameter' and at.call is not None:
    return _source(at.caller, _handed(at))
  if instruction.opcode != 'get-tuple-element':
    return instruction
  packed, at = _through_fusions(at, instruction.operands[0])
  while packed.opcode == 'while' or (packed.opcode == 'parameter' and at.call is not None):
    inside = packed.opcode == 'parameter'
    name, frame = (_handed(at), at.caller) if inside else (packed.operands[0], at)
    packed, at = _through_fusions(frame, name)
  if packed.opcode != 'tuple':
    return packed
  return _source(at, packed.operands[int(instruction.attribute('index'))])


def _handed(frame: _Frame) -> str:
  """Return the caller's name of the operand of a loop, branch or call."""
  call = frame.call
  if call.opcode != 'conditional':
    return call.operands[0]
  return call.operands[1 + _subprograms(call).index(frame.computation.name)]


# --- collectives -----------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Collective:
  """A kind of collective over a set of mesh axes."""

  kind: str
  axes: tuple[str, ...]  # Mesh axes along which the members of a group differ.
  asynchronous: bool  # Overlaps with other work.
  payload: float  # Bytes of the complete gathered or reduced array on one device, over all executions.
  wire: float  # Bytes that a device sends (ring algorithms).
  count: float  # Executions.

  def hops(self, axes: Mapping[str, int]) -> int:
    """Return the sequential chip-to-chip messages of one execution (rings over one axis after the other)."""
    if self.kind == 'collective-permute':
      return 1
    return (2 if self.kind == 'all-reduce' else 1) * sum(axes[name] - 1 for name in self.axes)


def collectives(trace: Trace, axes: Mapping[str, int]) -> list[Collective]:
  """Return the collectives by kind, axes, and whether they are asynchronous.

  An asynchronous collective appears several times, once in each fusion that overlaps it, all with the same channel;
  only its start counts. Collectives that run one after the other may share a channel too, so channels do not tell how
  often data is sent.

  Args:
    trace: the executed instructions.
    axes: names and sizes of the mesh axes, in the order of the device assignment.
  """
  found: dict[tuple[str, tuple[str, ...], bool], list[float]] = {}

  def add(instruction: Instruction, count: float, scattered: bool) -> None:
    kind = instruction.opcode.removesuffix('-start')
    config = instruction.attributes.partition('backend_config=')[2]
    asynchronous = instruction.opcode.endswith('-start') or 'async_collective_fusion_config' in config
    group = replica_group(instruction, math.prod(axes.values()))
    if len(group) < 2:
      return
    arrays = [instruction.read, instruction.arrays]
    payload = max(sum(array.bytes for array in side) for side in arrays)
    if instruction.opcode in ('all-gather-start', 'collective-permute-start'):
      payload = max(array.bytes for array in instruction.arrays)  # Its results include the operand.
    kind = 'reduce-scatter' if scattered and kind == 'all-reduce' else kind
    key = kind, _axes_of(group, axes), asynchronous
    share = 1 if kind == 'collective-permute' else (len(group) - 1) / len(group)
    sums = found.setdefault(key, [0.0, 0.0, 0.0])
    for place, value in enumerate((payload, payload * share * (2 if kind == 'all-reduce' else 1), 1)):
      sums[place] += value * count

  def within(computation: Computation, count: float, scattered: bool) -> None:
    continues = any(
      'async_collective_fusion_config' in instruction.attributes for instruction in computation.instructions.values()
    ) and not any(instruction.target == 'AsyncCollectiveStart' for instruction in computation.instructions.values())
    for instruction in computation.instructions.values():
      look(instruction, count, scattered, counted=not continues)

  def look(instruction: Instruction, count: float, scattered: bool, counted: bool) -> None:
    if instruction.opcode.removesuffix('-start') in COLLECTIVES and counted:
      add(instruction, count, scattered)
    if instruction.fused is not None:
      within(instruction.fused, count, 'AllReduceScatter' in instruction.attributes)

  for execution in trace.executions:
    look(execution.instruction, execution.count, scattered=False, counted=True)
  return sorted(
    (Collective(*key, *sums) for key, sums in found.items()), key=lambda collective: collective.wire, reverse=True
  )


def replica_group(instruction: Instruction, devices: int) -> list[int]:
  """Return the partitions of a collective's first group with more than one member, in any notation."""
  text = instruction.attributes
  pairs = re.search(r'source_target_pairs=\{(\{.*?\})\}', text)
  if pairs:
    moved = re.findall(r'\{(\d+),(\d+)\}', pairs.group(1))
    return next(([int(a), int(b)] for a, b in moved if a != b), [0])
  listed = re.search(r'replica_groups=\{(\{[\d,]*\})', text)
  if listed:
    return _numbers(listed.group(1).strip('{}'))
  iota = re.search(r'replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?', text)
  if iota:
    return _iota(*iota.groups()).reshape(_numbers(iota.group(1)))[0].tolist()
  named = re.search(r'replica_groups=mesh\[([^\]]*)\](?:, device_ids=\((.*?\](?:T\([\d,]+\))?)\))? *\{([^}]*)\}', text)
  if named:
    return _mesh_group(*named.groups())
  return list(range(devices))  # replica_groups={}: all devices.


def _numbers(text: str) -> list[int]:
  return [int(number) for number in text.split(',') if number]


def _iota(_: str, reshaped: str, transposed: str | None) -> np.ndarray:
  """Return 0, 1, … reshaped and transposed: [8,8]<=[8,8]T(1,0)."""
  sizes = _numbers(reshaped)
  numbers = np.arange(math.prod(sizes)).reshape(sizes)
  return numbers.transpose(_numbers(transposed)) if transposed else numbers


def _mesh_group(sizes: str, device_ids: str | None, grouped: str) -> list[int]:
  """Return the first group of mesh['a'=2,'b'=4], device_ids=([…]) {'b'}; 'b':(1)2 is a part of an axis."""
  names, shape = zip(*((name, int(size)) for name, size in re.findall(r"'([^']*)'=(\d+)", sizes)), strict=True)
  numbers = np.arange(math.prod(shape))
  if device_ids:
    order = re.match(r'\[([\d,]+)\](?:T\(([\d,]+)\))?', device_ids)
    numbers = _iota('', *order.groups())
  numbers = numbers.reshape(shape)
  selected: list[slice | int] = [0] * len(shape)
  for name, before, size in re.findall(r"'([^']*)'(?::\((\d+)\)(\d+))?", grouped):
    axis = names.index(name)
    if not size:
      selected[axis] = slice(None)
    else:
      rest = shape[axis] // (int(before) * int(size))
      selected[axis] = slice(0, rest * int(size), rest)
  return numbers[tuple(selected)].reshape(-1).tolist()


def _axes_of(group: Sequence[int], axes: Mapping[str, int]) -> tuple[str, ...]:
  places = np.array(np.unravel_index(group, list(axes.values())))
  return tuple(name for name, row in zip(axes, places, strict=True) if len(set(row.tolist())) > 1)


# --- instructions without an estimate, and large ones ----------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Kernel:
  """An instruction that does work but has no estimate, such as a Pallas kernel, TopK, a sort or a gather."""

  kind: str  # 'pallas', 'topk', 'sort', 'partial-reduce', or 'other'.
  name: str
  op_name: str
  operands: tuple[Array, ...]
  results: tuple[Array, ...]
  bytes: int  # Read and written per execution; for an in-place update only the updated part.
  count: float


def kernels(trace: Trace) -> list[Kernel]:
  """Return every instruction that does work but has no estimate, except collectives and loops."""
  found = []
  for execution in trace.executions:
    instruction = execution.instruction
    if instruction.cycles is not None or instruction.opcode in FREE or _subprograms(instruction):
      continue
    kind, at = _kernel_kind(instruction)
    if kind is not None:
      moved = _moved(at)
      found.append(Kernel(kind, instruction.name, at.op_name, tuple(at.read), at.arrays, moved, execution.count))
  return found


def _moved(instruction: Instruction) -> int:
  """Return the bytes that an instruction reads and writes."""
  if instruction.fused is not None:
    root = instruction.fused.instructions[instruction.fused.root]
    if root.opcode in ('dynamic-update-slice', 'scatter', 'gather', 'dynamic-slice'):
      return _moved(root)
  arguments = [instruction.computation.instructions[name].bytes for name in instruction.operands]
  if instruction.opcode == 'dynamic-update-slice':
    return 2 * arguments[1]
  if instruction.opcode == 'scatter':
    return 2 * sum(arguments[len(arguments) // 2 + 1 :])
  if instruction.opcode in ('gather', 'dynamic-slice'):
    return 2 * instruction.bytes
  return sum(arguments) + instruction.bytes


def _kernel_kind(instruction: Instruction) -> tuple[str | None, Instruction]:
  """Return the kind of a kernel (None: not a kernel), and its instruction, which may be inside a fusion."""
  opcode = instruction.opcode
  # Asynchronous operations overlap with other work.
  if opcode.endswith(('-start', '-done')) or opcode in COLLECTIVES:
    return None, instruction
  if opcode == 'custom-call':
    return _call_kind(instruction), instruction
  for nested in () if instruction.fused is None else instruction.fused.instructions.values():
    if nested.opcode.removesuffix('-start') in COLLECTIVES or nested.target.startswith('AsyncCollective'):
      return None, instruction
    if nested.opcode == 'sort':
      return 'sort', nested
    if nested.opcode == 'custom-call' and _call_kind(nested) not in (None, 'other'):
      return _call_kind(nested), nested
  return ('sort' if opcode == 'sort' else 'other'), instruction


def _call_kind(call: Instruction) -> str | None:
  if call.target in FREE_CALLS or call.target.startswith('AsyncCollective'):
    return None
  return {'tpu_custom_call': 'pallas', 'TopK': 'topk', 'PartialReduce': 'partial-reduce'}.get(call.target, 'other')


@dataclasses.dataclass(frozen=True)
class Buffer:
  """The largest result of an instruction in HBM."""

  name: str
  op_name: str  # Name of the operation in the traced program.
  opcode: str
  bytes: int
  count: float  # Number of executions.
  shape: str  # With the dtype: 'bf16[8,128]'.


def largest(trace: Trace, *, limit: int = 10, of: Callable[[Instruction], bool] | None = None) -> list[Buffer]:
  """Return the largest results in HBM of instructions that create new values.

  Args:
    trace: the executed instructions.
    limit: maximum number of results to return.
    of: selects instructions; None: all.
  """
  found = []
  for execution in trace.executions:
    instruction = execution.instruction
    if instruction.opcode in FREE or _subprograms(instruction) or (of is not None and not of(instruction)):
      continue
    arrays = [array for array in instruction.arrays if array.space == 0]
    if not arrays:
      continue
    array = max(arrays, key=lambda array: array.bytes)
    shape = f'{array.dtype}[{",".join(map(str, array.shape))}]'
    found.append(Buffer(instruction.name, instruction.op_name, instruction.opcode, array.bytes, execution.count, shape))
  found.sort(key=lambda buffer: buffer.bytes, reverse=True)
  return found[:limit]


def copies(trace: Trace, limit: int = 10) -> list[Buffer]:
  """Return the largest copies of arrays in HBM, which show failed in-place updates.

  A copy within a fusion does not count: it only sets the order in which the fusion reads its operand.
  """

  def copies_something(instruction: Instruction) -> bool:
    if instruction.fused is None:
      return instruction.opcode in ('copy', 'copy-start', 'transpose')
    return copies_something(instruction.fused.instructions[instruction.fused.root])

  return largest(trace, limit=limit, of=copies_something)


def total(collected: Iterable[Collective], *, asynchronous: bool | None = None) -> float:
  """Return the bytes on the wire of all collectives, or only of the (a)synchronous ones."""
  return sum(c.wire for c in collected if asynchronous is None or c.asynchronous == asynchronous)
