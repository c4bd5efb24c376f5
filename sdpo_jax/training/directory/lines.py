"""Reading of `metrics.jsonl` for viewers and for a resumed run."""

from __future__ import annotations

import collections
import dataclasses
import json
import logging
from typing import Any

from etils import epath

from sdpo_jax.errors import UserError, short_repr
from sdpo_jax.files import read_text
from sdpo_jax.tables import counted, named_steps, spans
from sdpo_jax.training.directory import sealed
from sdpo_jax.training.directory.epochs import FENCING_EPOCH, Epochs, of_the_run, read_epochs

METRICS = 'metrics.jsonl'
UNWRITTEN = '\0' * 512  # Content of a block that had not reached the disk when the machine failed.
STATE_DIGEST = 'state_digest'  # Key of the digest of the state at the end of a step, the same as in a checkpoint.
UNGRADED_REASON = 'ungraded_reason'  # Key of the most frequent reason why completions are ungraded, if all are.
MOST_NAMED = 1_000_000  # Missing steps that are named, lest a step out of all proportion fill the memory.
RECORDED = 'rollout/recorded'  # Metric: the number of completions in the step's file in `rollouts/`.
# Folder → part of the names of metrics that a step has if it wrote a file there, and the suffix of that file.
RESULTS = {'rollouts': (RECORDED, '.jsonl'), 'eval': ('eval/', '.json')}
_logger = logging.getLogger('sdpo_jax.metrics')


@dataclasses.dataclass(frozen=True)
class MetricsLines:
  """The lines of a run in its `metrics.jsonl`, and which lines of the file are not as they were written."""

  path: epath.Path
  kept: list[dict[str, Any]]  # The lines of the run.
  foreign: list[int]  # Steps of lines that a process without the run wrote.
  unwritten: list[int]  # Numbers of lines that are cut off, or had not reached the disk.
  respelled: list[int]  # Numbers of lines with the same values in another spelling, such as without spaces.
  numbers: dict[str, list[int]]  # Numbers of lines by their state (`sealed.check_line`).

  def altered(self) -> str:
    """Return a sentence about altered lines, which no resume believes; '' without any."""
    altered = spans(self.numbers[sealed.ALTERED])
    return altered and (
      f'{self.path}, line {altered} is not as it was written, so that numbers there may be wrong. A resume from '
      'an earlier checkpoint drops it; for any other, restore the file, or remove what is named, and go on without it.'
    )

  def faults(self, step: int | None = None) -> list[str]:
    """Return sentences about lines that are lost, repeated, moved or altered.

    Args:
      step: the last step that must have a line; None: that of the last line.
    """
    steps = [line['step'] for line in self.kept]
    upto = max(steps, default=0) if step is None else step
    lost = set(range(1, 1 + min(upto, len(steps) + MOST_NAMED))) - set(steps)
    repeated = [step for step, count in collections.Counter(steps).items() if count > 1]
    missing = 'has no line of' if self.path.exists() else 'is missing, and with it the lines of'
    misplaced = self.numbers[sealed.MISPLACED]
    sentences = [
      lost and f'{self.path} {missing} {named_steps(lost)}, whose numbers are lost and unknown to alarms.',
      repeated and not misplaced and f'{self.path} has several lines of {named_steps(repeated)}.',
      misplaced and f'{self.path}: lines were removed, moved or altered before line {spans(misplaced)}.',
      self.altered(),
    ]
    return [sentence for sentence in sentences if sentence]

  def remarks(self, step: int | None = None) -> list[str]:
    """Return `faults`, and sentences about lines that are left out or, for a resume at `step`, have no digest."""
    sentences = self.faults(step)
    if self.foreign:
      lines = f'{counted(len(self.foreign), "line")} ({named_steps(self.foreign)})'
      sentences.append(f'{self.path}: {lines} of a process that had lost the run to another one are not read.')
    if step is not None and (unsealed := self.numbers[sealed.UNSEALED]):
      lines = counted(len(unsealed), 'line')
      sentences.append(f'{self.path}: {lines} without {sealed.LINE_DIGEST}, of an earlier version, cannot be verified.')
    return sentences

  def lost_results(self, *folders: str) -> list[str]:
    """Return a sentence for each of the folders (all of `RESULTS` if none is named) that has lost files."""
    sentences = []
    for folder in folders or RESULTS:
      metric, suffix = RESULTS[folder]
      path, named = self.path.parent / folder, {line['step'] for line in self.kept for name in line if metric in name}
      there = {file.name for file in path.iterdir()} if path.is_dir() else ()
      if lost := [step for step in named if f'{step}{suffix}' not in there]:
        sentences.append(f'{path} has no file of {named_steps(lost)} any more, though {METRICS} names one.')
    return sentences


def read_metrics(workdir: epath.PathLike) -> list[dict[str, Any]]:
  """Return the valid lines of `metrics.jsonl`, without digests; a last line that was cut off by a crash is left out.

  Lines that a process wrote after another one had taken over the run are left out; a warning names their steps.

  Raises:
    UserError: it is not a file, cannot be read, or holds a line that is not an object with a step.
  """
  found = read_lines(workdir)
  for remark in found.remarks():
    _logger.warning('%s', remark)
  return [{name: value for name, value in line.items() if name != sealed.LINE_DIGEST} for line in found.kept]


def read_lines(workdir: epath.PathLike, last: int | None = None, epochs: Epochs | None = None) -> MetricsLines:
  """Return the lines of `metrics.jsonl` up to the step `last` (None: all), and what is wrong with them.

  A process without the run wrote its lines after others than those that are there, but an altered line counts whoever
  wrote it. A line after missing steps is not misplaced: the steps are named.

  Args:
    workdir: directory of the run.
    last: the last step whose line counts.
    epochs: starts of the run; None: they are read, with a warning if they are damaged.

  Raises:
    UserError: as in `read_metrics`.
  """
  path = epath.Path(workdir) / METRICS
  entries = _parsed(path)
  parsed = [entry for entry in entries if entry[2] is not None]
  wanted = [at for at, (_, _, line) in enumerate(parsed) if last is None or line['step'] <= last]
  kept, foreign = of_the_run([parsed[at][2] for at in wanted], read_epochs(workdir) if epochs is None else epochs)
  ours, steps, before, step = {id(line) for line in kept}, {line['step'] for line in kept}, '', 0
  states = {state: [] for state in sealed.STATES}
  found = MetricsLines(path, kept, foreign, [number for number, _, line in entries if line is None], [], states)
  for number, text, line in parsed[: wanted[-1] + 1 if wanted else 0]:
    written = json.dumps(line)
    state, digest = sealed.check_line(written.encode(), before)
    if id(line) in ours or state == sealed.ALTERED:
      if state != sealed.MISPLACED or step + 1 in steps:
        found.numbers[state].append(number)
      if text != written and state != sealed.ALTERED:
        found.respelled.append(number)
      before, step = digest, line['step']
  return found


def raw_lines(workdir: epath.PathLike) -> list[dict[str, Any]]:
  """Return all lines of `metrics.jsonl`, whichever process wrote them; errors as in `read_metrics`.

  Lines in a block that had not reached the disk when the machine failed are left out; no checkpoint is later than such
  a line.
  """
  return [line for _, _, line in _parsed(epath.Path(workdir) / METRICS) if line is not None]


def _parsed(path: epath.Path) -> list[tuple[int, str, dict[str, Any] | None]]:
  """Return the number, the text and the value of each line; None for one that `raw_lines` leaves out."""
  if not path.exists():
    return []
  way_out = 'repair or remove it'
  lines = read_text(path, way_out).splitlines()
  parsed: list[tuple[int, str, dict[str, Any] | None]] = []
  for number, line in enumerate(lines, 1):
    try:
      value = json.loads(line)
    except (ValueError, RecursionError) as error:
      if number == len(lines) or UNWRITTEN in line:
        parsed.append((number, line, None))
        continue
      raise UserError(f'{path}, line {number} is not JSON: the file was changed by hand; {way_out}.') from error
    found = value if isinstance(value, dict) else {}
    if type(found.get('step')) is not int or type(found.get(FENCING_EPOCH, 0)) is not int:
      raise UserError(
        f'{path}, line {number} is not an object with a whole number as its step, and as its {FENCING_EPOCH} if it has '
        f'one, but {short_repr(value)}: the file was changed by hand; {way_out}.'
      )
    parsed.append((number, line, value))
  return parsed


def history(workdir: epath.PathLike, step: int, epochs: Epochs | None = None) -> MetricsLines:
  """Return the lines of `metrics.jsonl` up to `step`, as `read_lines` does; none for step 0, at which a run begins.

  Raises:
    UserError: as in `read_metrics`, or a line is not as it was written.
  """
  found = read_lines(workdir, step, epochs)
  if not step:
    return dataclasses.replace(found, kept=[])
  if sentence := found.altered():
    raise UserError(sentence)
  return found
