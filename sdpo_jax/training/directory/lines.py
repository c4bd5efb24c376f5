"""Reading of `metrics.jsonl` for viewers and for a resumed run."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
import json
import logging
from typing import Any

from etils import epath

from sdpo_jax.errors import UserError, short_repr
from sdpo_jax.files import read_text
from sdpo_jax.tables import counted
from sdpo_jax.training.directory import sealed
from sdpo_jax.training.directory.epochs import FENCING_EPOCH, of_the_run, read_epochs

METRICS = 'metrics.jsonl'
UNWRITTEN = '\0' * 512  # Content of a block that had not reached the disk when the machine failed.
STATE_DIGEST = 'state_digest'  # Key of the digest of the state at the end of a step, the same as in a checkpoint.
UNGRADED_REASON = 'ungraded_reason'  # Key of the most frequent reason why completions are ungraded, if all are.
RECORDED = 'rollout/recorded'  # Metric: the number of completions in the step's file in `rollouts/`.
_logger = logging.getLogger('sdpo_jax.metrics')


def read_metrics(workdir: epath.PathLike) -> list[dict[str, Any]]:
  """Return the valid lines of `metrics.jsonl`, without digests; a last line that was cut off by a crash is left out.

  Lines that a process wrote after another one had taken over the run are left out; a warning names their steps.

  Raises:
    UserError: it is not a file, cannot be read, or holds a line that is not an object with a step.
  """
  for remark in remarks(workdir):
    _logger.warning('%s', remark)
  lines, *_ = _read(workdir, None)
  return [{name: value for name, value in line.items() if name != sealed.LINE_DIGEST} for line in lines]


def remarks(workdir: epath.PathLike, last: int | None = None) -> list[str]:
  """Return sentences about lines that are left out, or are not as they were written.

  Args:
    workdir: directory of the run.
    last: last step whose lines count, for a resume, which is also told how many lines have no digest; None: all.

  Raises:
    UserError: as in `read_metrics`.
  """
  path, sentences = epath.Path(workdir) / METRICS, []
  _, foreign, states = _read(workdir, last)
  if foreign:
    lines = f'a line of step {foreign[0]} was' if len(foreign) == 1 else f'lines of steps {spans(foreign)} were'
    sentences.append(f'{path}: {lines} written by a process that had lost the run to another one, and left out.')
  if altered := states[sealed.ALTERED]:
    sentences.append(f'{path}: not as written: line {spans(altered)}; the numbers there may be wrong.')
  if misplaced := states[sealed.MISPLACED]:
    sentences.append(f'{path}: lines were removed, moved or altered before line {spans(misplaced)}.')
  if states[sealed.UNSEALED] and last is not None:
    lines = counted(len(states[sealed.UNSEALED]), 'line')
    sentences.append(f'{path}: {lines} without {sealed.LINE_DIGEST}, of an earlier version, cannot be verified.')
  return sentences


def _read(workdir: epath.PathLike, last: int | None) -> tuple[list[dict[str, Any]], list[int], dict[str, list[int]]]:
  """Return the valid lines, the steps of those that a process without the run wrote, and what is wrong with lines.

  The last are the numbers of lines by their state (`sealed.check_line`), up to the last one that counts. A process
  without the run wrote its lines after others than those that are there, but an altered line counts whoever wrote it.
  """
  lines = raw_lines(workdir)
  wanted = [at for at, line in enumerate(lines) if last is None or line['step'] <= last]
  kept, foreign = of_the_run([lines[at] for at in wanted], read_epochs(workdir))
  ours, before = {id(line) for line in kept}, ''
  states: dict[str, list[int]] = {state: [] for state in sealed.STATES}
  for number, line in enumerate(lines[: wanted[-1] + 1 if wanted else 0], 1):
    state, digest = sealed.check_line(json.dumps(line).encode(), before)
    if id(line) in ours or state == sealed.ALTERED:
      states[state].append(number)
      before = digest
  return kept, foreign, states


def expected_results(lines: Iterable[Mapping[str, Any]]) -> set[str]:
  """Return the files in `rollouts/` and `eval/` that steps with these lines have written, such as 'eval/20.json'."""
  named = [(line['step'], name) for line in lines for name in line]
  rollouts = {f'rollouts/{step}.jsonl' for step, name in named if name == RECORDED}
  return rollouts | {f'eval/{step}.json' for step, name in named if name.startswith('eval/')}


def spans(steps: Iterable[int]) -> str:
  """Return step numbers as text with ranges, such as '3, 5–8'."""
  groups: list[list[int]] = []
  for step in sorted(set(steps)):
    if groups and step == groups[-1][1] + 1:
      groups[-1][1] = step
    else:
      groups.append([step, step])
  return ', '.join(str(first) if first == last else f'{first}–{last}' for first, last in groups)


def raw_lines(workdir: epath.PathLike) -> list[dict[str, Any]]:
  """Return all lines of `metrics.jsonl`, whichever process wrote them; errors as in `read_metrics`.

  Lines in a block that had not reached the disk when the machine failed are left out; no checkpoint is later than such
  a line.
  """
  path = epath.Path(workdir) / METRICS
  if not path.exists():
    return []
  way_out = 'repair or remove it'
  lines = read_text(path, way_out).splitlines()
  parsed: list[dict[str, Any]] = []
  for number, line in enumerate(lines, 1):
    try:
      value = json.loads(line)
    except (ValueError, RecursionError) as error:
      if number == len(lines):
        break
      if UNWRITTEN in line:
        continue
      raise UserError(f'{path}, line {number} is not JSON: the file was changed by hand; {way_out}.') from error
    step = value.get('step') if isinstance(value, dict) else None
    if not isinstance(step, int) or isinstance(step, bool):
      raise UserError(
        f'{path}, line {number} is not an object with a whole number as its step, but {short_repr(value)}: the file '
        f'was changed by hand; {way_out}.'
      )
    epoch = value.get(FENCING_EPOCH, 0)
    if not isinstance(epoch, int):
      raise UserError(
        f'{path}, line {number} has {short_repr(epoch)} as its {FENCING_EPOCH}, which is a whole number: the file was '
        f'changed by hand; {way_out}.'
      )
    parsed.append(value)
  return parsed


def history(workdir: epath.PathLike, step: int) -> list[dict[str, Any]]:
  """Return the valid lines of `metrics.jsonl` up to `step`; none for step 0, at which a run begins.

  Raises:
    UserError: as in `read_metrics`, or a line is not as it was written.
  """
  if not step:
    return []
  lines, _, states = _read(workdir, step)
  if altered := states[sealed.ALTERED]:
    raise UserError(
      f'{epath.Path(workdir) / METRICS}, line {spans(altered)} is not as it was written: restore the file, or '
      'remove what is named, after which the run goes on without those numbers.'
    )
  return lines


def check_digest(workdir: epath.PathLike, step: int, digest: str) -> bool:
  """Return whether a step's line has the digest of the restored state; False if it has no digest.

  Raises:
    UserError: the line has another digest.
  """
  recorded = [line[STATE_DIGEST] for line in history(workdir, step) if line['step'] == step and STATE_DIGEST in line]
  if recorded and recorded[-1] != digest:
    raise UserError(
      f'{epath.Path(workdir) / METRICS} and the checkpoint of step {step} are not of the same run: the line of that '
      f'step names the state {short_repr(recorded[-1])}, and the checkpoint holds {digest}. Restore the one that was '
      'changed, choose another --workdir, or remove that line from metrics.jsonl if the checkpoint is the right one.'
    )
  return bool(recorded)
