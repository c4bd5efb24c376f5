"""Reports of plans: text with Markdown tables that are readable on a terminal."""

from __future__ import annotations

from collections.abc import Sequence
import math
from typing import Literal

from sdpo_jax.distributed.mesh import FSDP
from sdpo_jax.objective.objective_spec import REFERENCES
from sdpo_jax.planner.plan import Estimate, Plan
from sdpo_jax.planner.search import Candidate
from sdpo_jax.tables import counted, markdown

_MEMORY = (
  'base',
  'sampling base',
  'gathered base',
  'parameters',
  'optimizer',
  'teacher',
  'teacher base',
  *(f'{name} policy' for name in REFERENCES),
  'snapshots',
  'teachers',
  'slots',
  'moments',
  'gradients',
  'sampling weights',
  'cache',
  'kept prefixes',
  'carried',
  'next carried',
  'states',
  'batch',
  'results',
  'temporaries',
  'padding',
)
# Source of seconds → heading with its kind.
_SOURCES = {
  'compiler': 'cycles [compiler]',
  'table': 'kernels [table]',
  'roofline': 'rest at HBM rate [arithmetic]',
  'cache': 'cache [table, arithmetic]',
  'synchronous collectives': 'sync collectives [arithmetic]',
  'collective latency': 'their latency [assumption]',
  'host': 'host [assumption]',
  'collectives that outlast the work beside them': 'collectives not hidden [arithmetic]',
}


def _number(value: float | None, digits: int = 3) -> str:
  if value is None or not math.isfinite(value):
    return '?'
  if value == 0:
    return '–'
  if abs(value) >= 1000:
    return f'{value:,.0f}'
  return f'{value:.{digits}g}' if abs(value) < 100 else f'{value:.0f}'


def _count(number: int) -> str:
  scale, word = next(((s, w) for s, w in ((1e9, ' billion'), (1e6, ' million')) if number >= s), (1, ''))
  return f'{number / scale:.3g}{word}' if word else f'{number:,}'


def _beside_base(trained: str) -> dict[str, str]:
  """Return labels of memory for runs that train something beside a frozen model."""
  return {
    'parameters': trained,
    'teacher': f"teacher's {trained}",
    'teacher base': 'document' if trained == 'slots' else 'teacher base',
    **{f'{name} policy': f'{name} {trained}' for name in REFERENCES},
    'sampling weights': f"sampler's {trained}",
  }


def memory(programs: dict[str, Estimate], limit: float, trained: Literal['', 'adapter', 'slots'] = '') -> str:
  """Return a table of GiB per chip by purpose; rows that are empty for all programs are left out.

  Args:
    programs: estimates by label.
    limit: GiB available to a program.
    trained: what is trained beside a frozen model; empty: the model itself.
  """
  parts = [part for part in _MEMORY if any(abs(e.hbm.get(part, 0)) >= 0.005 for e in programs.values())]
  rows = []
  for label, estimate in programs.items():
    cells = [f'{estimate.hbm[part]:.2f}' if part in estimate.hbm else '' for part in parts]
    total = f'{estimate.hbm_gib:.2f}' if math.isfinite(estimate.hbm_gib) else '?'
    rows.append([label, *cells, total, 'yes' if estimate.fits else 'NO'])
  called = _beside_base(trained) if trained else {}
  names = [called.get(part, part) for part in parts]
  return markdown([f'GiB of {limit} [compiler]', *names, 'total', 'fits'], rows)


def base(plan: Plan) -> str:
  """Return a sentence about the copies of the frozen parameters; '' if all are trained."""
  if not plan.base_gib:
    return ''
  size = f'The frozen base takes {plan.base_gib:.3g} GiB per chip'
  copying = plan.programs.get('prepare_base')
  refused = copying is not None and copying.error is not None
  if not plan.sampling_base_gib and not refused:
    return f'{size} and is there once: student, teacher and sampler read the same arrays.'
  fsdp = plan.mesh[FSDP]
  reason = f'mesh.{FSDP}={fsdp} divides it and the sampler gathers it' if fsdp > 1 else 'in another layout or dtype'
  more = 'which do not fit' if refused else f'another {plan.sampling_base_gib:.3g} GiB, made once per run'
  return f'{size}, once for student and teacher; the sampler has arrays of its own ({reason}), {more}.'


def cartridge(plan: Plan) -> str:
  """Return sentences about the memory of slots and document; '' without a cartridge."""
  if not plan.slots:
    return ''
  trained = plan.slots - plan.frozen_slots
  sentences = [
    f'The cartridge has {counted(plan.slots, "slot")}: {trained:,} trained, which take {_number(plan.slots_gib)} GiB '
    f'per chip in float32 and {_number(plan.moments_gib)} GiB for the state of the optimizer, and '
    f'{plan.frozen_slots:,} frozen, counted with the base.'
  ]
  if plan.assumptions.document:
    tokens = counted(plan.assumptions.document, 'token')
    read = f"the document's {tokens}" if plan.chunks is None else f'{counted(plan.chunks, "chunk")} of up to {tokens}'
    sentences.append(
      f'Keys and values of {read} take {_number(plan.document_gib)} GiB per chip, once, in addition to the base.'
    )
  if plan.reading_parts:
    when = 'It is read once per run' if plan.chunks is None else 'A chunk is read when a batch asks about it'
    sentences.append(
      f'{when}, in {counted(plan.reading_parts, "part")}, which takes {_number(plan.reading_seconds)} s.'
    )
  return ' '.join(sentences)


def times(programs: dict[str, Estimate]) -> str:
  """Return a table of the seconds per execution, by source."""
  sources = [name for name in _SOURCES if any(e.seconds_by_source.get(name) for e in programs.values())]
  rows = []
  for label, estimate in programs.items():
    if estimate.error is None:
      cells = [_number(estimate.seconds_by_source.get(name, 0.0)) for name in sources]
      gb = sum(estimate.collective_gb.values())
      rows.append(
        [label, *cells, _number(estimate.seconds), _number(estimate.matmul_tflop), _number(gb)]
        + [_number(estimate.overlapped_collectives)]
      )
  head = ['s an execution', *(_SOURCES[name] for name in sources), 'total']
  return markdown([*head, 'matmul TFLOP', 'sent GB', 'async s, hidden'], rows)


def collectives(programs: dict[str, Estimate], least: float = 0.01) -> str:
  """Return a table of the GB that a chip sends per execution, by kind and mesh axes."""
  rows = [
    [label, name, _number(size)]
    for label, estimate in programs.items()
    for name, size in sorted(estimate.collective_gb.items(), key=lambda item: -item[1])
    if size >= least
  ]
  return markdown(['program', 'collective, axes', 'GB a chip sends [compiler]'], rows) if rows else ''


def text(plan: Plan) -> str:
  """Return the complete report of a plan."""
  a = plan.assumptions
  mesh = ' × '.join(f'{name}={size}' for name, size in plan.mesh.items())
  frozen = plan.trained < plan.parameters
  beside = ('slots' if plan.slots else 'adapter') if frozen else ''
  trained = f', of which {_count(plan.trained)} are trained and the others frozen,' if frozen else ''
  listed = {label: each for label, each in plan.programs.items() if '#' not in label and '@' not in label}
  parts = [
    f'{_count(plan.parameters)} parameters ({plan.model}){trained} on {plan.topology}: {plan.chips} chips, mesh '
    f'{mesh}; {plan.compiler}.',
    memory(listed, plan.hbm_limit_gib, beside),
    base(plan),
    cartridge(plan),
  ]
  for label, estimate in plan.programs.items():
    if estimate.error is not None:
      parts.append(f'{label}: {estimate.error}')
    if not estimate.fits and estimate.buffers:
      parts.append(
        f'Largest buffers of {label}:\n'
        + '\n'.join(f'  {b["gib"]:.2f} GiB {b["shape"]} {b["op_name"]}' for b in estimate.buffers[:5])
      )
  parts.append(times(listed))
  parts.append(collectives(listed))
  for label, estimate in listed.items():
    others = ', '.join(
      f'{name} {_number(took)} s'
      for name, took in sorted(estimate.kernel_seconds.items(), key=lambda item: -item[1])
      if took >= 0.01 * estimate.seconds
    )
    if others:
      parts.append(f'{label}, without an estimate of the compiler: {others}.')
    if estimate.hottest and label.endswith(('decode', 'update')):
      hottest = [f'{_number(hot["seconds"])} s in {hot["times"]:.0f}: {hot["op_name"]}' for hot in estimate.hottest[:8]]
      parts.append(f'{label}, most cycles [compiler]:\n\n```text\n' + '\n'.join(hottest) + '\n```')
    large = [copy for copy in estimate.copies if copy['gib'] >= 0.25]
    if large and label.endswith(('decode', 'update')):
      copied = ', '.join(f'{copy["gib"]:.2f} GiB {copy["shape"]} × {copy["times"]:.0f}' for copy in large)
      parts.append(f'{label} copies in HBM: {copied}.')
    if estimate.unbounded:
      parts.append(
        f'{label}: {len(estimate.unbounded)} loops have no bound in the program and count once: '
        f'{", ".join(estimate.unbounded[:3])}.'
      )
  total = plan.step_seconds
  rows = [
    [phase, _number(seconds), f'{100 * seconds / total:.0f} %' if total > 0 and math.isfinite(seconds) else '?']
    + [_number(plan.likely_phases[phase])]
    for phase, seconds in plan.phases.items()
  ]
  rows.append(['step', _number(total), '', _number(sum(plan.likely_phases.values()))])
  parts.append(markdown(['phase', 's per step', 'share', 'likely s [assumption]'], rows))
  parts += [_sampling(plan), _lengths(plan), _micro_batches(plan)]
  parts.append(
    f'{_number(plan.tokens_per_second)} completion tokens/s ({_number(plan.tokens_per_second_per_chip)} per chip), MFU '
    f'of live tokens {_number(100 * plan.update_mfu)} % in the update and {_number(100 * plan.step_mfu)} % in the '
    f'step; live are {_number(100 * plan.fill["rows"])} % of the rows and {_number(100 * plan.fill["tokens"])} % of '
    f'the tokens of the update, {_number(100 * plan.fill["sampler"])} % of the rows and steps of the sampler; 100 '
    f'steps: {_number(plan.device_hours_per_100_steps, 4)} chip-hours, ${_number(plan.cost_per_100_steps, 4)} at '
    f'${a.price:g} per chip-hour [arithmetic]. Bottleneck: {plan.bottleneck}.'
  )
  parts += [f'WARNING: {warning}' for warning in plan.warnings]
  if not plan.fits:
    names = ', '.join(label for label, estimate in plan.programs.items() if not estimate.fits)
    parts.append(f'DOES NOT FIT: {names}. --search tries and ranks settings that may.')
  return '\n\n'.join(part for part in parts if part)


def _sampling(plan: Plan) -> str:
  """Return decode steps by stage of the cache, and what was simulated; '' if nothing was."""
  if not plan.decoding:
    return ''
  s = plan.sampling
  rows = [
    [each['phase'], str(each['rows'] // plan.mesh[FSDP]), *map(_number, (each['live_rows'], each['steps']))]
    + [_number(1e3 * each['seconds'] / each['steps']), _number(each['seconds'])]
    for each in plan.decoding
  ]
  head = ['decode steps of', 'rows per shard', 'live rows of all', 'steps per step', 'ms', 's']
  told = (
    f'Sampling as simulated over {s["steps"]} steps: {_number(s["decode_steps"])} ± {_number(s["error"], 2)} decode '
    f'steps per step (standard error), evaluations included.'
  )
  if s['staleness_max']:
    told += (
      f' Samples are {s["staleness_mean"]:.2g} updates old when they are learned from (95 %: {s["staleness_p95"]:g}, '
      f'most: {s["staleness_max"]}); {_number(s["recomputed"])} tokens per step are recomputed.'
    )
  return f'{told}\n\n{markdown(head, rows)}'


def _lengths(plan: Plan) -> str:
  """Return a sentence on the assumed lengths."""
  a = plan.assumptions
  source = f'as measured in {a.measured}' if a.measured else 'from the settings plan.…, where None the limits'
  held_out = (
    f'{a.evaluation_questions} held-out questions' if a.evaluation_questions else 'no evaluation (trainer.test_freq=0)'
  )
  return (
    f'Assumed ({source}): completions of {a.mean_completion:g} tokens on average and at most {a.longest_completion:g}, '
    f'prompts of {a.mean_prompt:g}, teacher prompts of {a.mean_reprompt:g}, {100 * a.trained_fraction:.3g} % of the '
    f'samples with a signal, {held_out}, host work of grading and data not counted.'
  )


def _micro_batches(plan: Plan) -> str:
  """Return which programs a step's micro-batches run, and whether they were planned."""
  names = {estimate.name for estimate in plan.programs.values()}
  ran = ', '.join(
    f'{_number(count)} × {name}' + ('' if name in names else ' (taken as the largest)')
    for name, count in plan.micro_batches.items()
    if name.partition('/')[0] in plan.phases
  )
  return f'Micro-batches per step: {ran}.' if ran else ''


def search(results: Sequence[Candidate]) -> str:
  """Return a table of candidate settings, best first."""
  if not results:
    return 'Nothing to try: no other mesh, micro-batch, remat or number of rows is possible here.'
  rows = [
    [
      str(place + 1),
      ' '.join(f'--config.{name}={value}' for name, value in result.settings.items()),
      'yes' if result.fits else 'NO',
      _number(result.hbm_gib),
      _number(result.update_seconds),
      _number(result.sampling_seconds),
      _number(result.seconds),
    ]
    for place, result in enumerate(results)
  ]
  head = ['rank', 'settings', 'fits', 'most GiB', 'update s', 'sampling s', 'both s per step']
  return markdown(head, rows)
