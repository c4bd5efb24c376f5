"""Bit-exact verification of a run's files, without changing them, and what would be lost if the run stopped now."""

from __future__ import annotations

import collections
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
import dataclasses
import json
import re
from typing import Any

from etils import epath

from sdpo_jax.errors import UserError, first_line, short_repr
from sdpo_jax.evaluation import alarms
from sdpo_jax.files import read_bytes
from sdpo_jax.inference.runs import run_config
from sdpo_jax.models import checksums, huggingface, model_files
from sdpo_jax.tables import counted
from sdpo_jax.training.boards import saved_id
from sdpo_jax.training.checkpoint import manifest
from sdpo_jax.training.checkpoint.checkpoints import NO_MANIFEST
from sdpo_jax.training.checkpoint.stored_arrays import stored_digest
from sdpo_jax.training.checkpoint.unreadable import is_out_of_reach
from sdpo_jax.training.directory import lock_owner, sealed, starts
from sdpo_jax.training.directory.epochs import EPOCHS, FENCING_EPOCH, Epochs, of_starts, parse, read_epochs
from sdpo_jax.training.directory.lines import METRICS, STATE_DIGEST, expected_results, spans
from sdpo_jax.training.directory.locks import LOCK
from sdpo_jax.training.directory.published_checkpoints import DAMAGED, is_step
from sdpo_jax.training.directory.starts import FINGERPRINT
from sdpo_jax.training.directory.workdir import BEFORE_RESTART, WANDB_ID, located

WHOLE, NOTE, DAMAGE = 'ok', 'note', 'damaged'
ALL_WHOLE, SOME_DAMAGED, NOTHING_LEFT = 0, 1, 2  # Exit codes.
_RESULTS = re.compile(r'(\d+)(\.samples)?\.jsonl?')  # Files in `rollouts/` and `eval/`.


@dataclasses.dataclass(frozen=True)
class Finding:
  """A finding about one file or checkpoint of a run."""

  state: str  # WHOLE, NOTE or DAMAGE.
  what: str  # A path in the run's directory.
  text: str

  def __str__(self) -> str:
    return f'{self.state:<8} {self.what}: {self.text}'


def verify(workdir: str | None, model: str | None, say: Callable[[str], None]) -> int:
  """Check a run or a model directory; return the exit code of `verify_run`.

  Raises:
    UserError: neither or both are named, the directory is not one, or a file of the model is damaged.
  """
  if (workdir is None) == (model is None):
    raise UserError('Name one of --workdir=DIR (a run) and --model=HF_DIR (a model directory).')
  if workdir is not None:
    return verify_run(workdir, say)
  root = model_files.resolve(model)
  compared = huggingface.check_files(root)
  say(
    f'{root}: {compared} files are as they were written.'
    if compared
    else f'{root}: nothing to compare with: it has no {checksums.SUMS} and is not in the cache of the Hugging Face hub.'
  )
  return ALL_WHOLE if compared else NOTHING_LEFT


def verify_run(workdir: epath.PathLike, say: Callable[[str], None]) -> int:
  """Check everything in a run's directory, and report each item in a line, then a summary; the run may be training.

  Args:
    workdir: local or gs://.
    say: called with the lines.

  Returns:
    ALL_WHOLE; SOME_DAMAGED if an intact checkpoint remains; NOTHING_LEFT if there is nothing to resume from.

  Raises:
    UserError: there is no run.
  """
  workdir = located(workdir)
  if not any((workdir / name).exists() for name in ('checkpoints', METRICS)):
    run_config(workdir)  # Raises if it has no settings of a run either.
  audit = _Audit(workdir)
  damaged = 0
  for finding in audit.findings():
    damaged += finding.state == DAMAGE
    say(str(finding))
  say(audit.summary(damaged))
  if not audit.whole:
    return NOTHING_LEFT
  return SOME_DAMAGED if damaged else ALL_WHOLE


class _Audit:
  """One pass over a run's directory that compares later items with earlier ones."""

  def __init__(self, workdir: epath.Path):
    self._workdir = workdir
    self._epochs = Epochs()
    self._digests: dict[int, str] = {}  # Step → state digest in metrics.jsonl, without lines of rollbacks.
    self._reached = 0  # The last step with a line or a file.
    self._lines: set[int] = set()  # Steps with a line in metrics.jsonl.
    self._bytes: int | None = None  # Size of metrics.jsonl when it was read; None: it does not exist.
    self._expected: set[str] = set()  # Files in `rollouts/` and `eval/` that lines name.
    self._line_digests: set[str] = set()
    self.whole: dict[int, str] = {}  # Step of an intact checkpoint → the digest of the last line that it names.

  def findings(self) -> Iterator[Finding]:
    """Yield the findings about all files and checkpoints of the run, in the order of the report."""
    for name, findings in (
      (LOCK, self._lock()),
      ('config.json', self._read('config.json', lambda: f'the settings of {run_config(self._workdir).name}', True)),
      (EPOCHS, self._read(EPOCHS, self._record)),
      (FINGERPRINT, self._read(FINGERPRINT, lambda: counted(len(starts.read(self._workdir)), 'start'))),
      (METRICS, self._metrics()),
      (WANDB_ID, self._read(WANDB_ID, lambda: f'the page {saved_id(self._workdir / WANDB_ID)}')),
    ):
      try:
        yield from findings
      except UserError as error:  # The file cannot be read.
        yield Finding(DAMAGE, name, str(error))
    yield from self._checkpoints()
    yield from self._lost()
    for folder in ('rollouts', 'eval'):
      yield from self._results(folder)
    yield from self._leftovers()

  def summary(self, damaged: int) -> str:
    """Return a sentence on what would be lost if the run stopped now."""
    found = f'{damaged} damaged' if damaged else 'nothing damaged'
    if not self.whole:
      lost = f'{_steps(range(1, self._reached + 1))} would be lost' if self._reached else 'no step has ended yet'
      return f'{self._workdir}: {found}; there is no whole checkpoint to resume from: {lost}.'
    newest = max(self.whole)
    if self._reached <= newest:
      return (
        f'{self._workdir}: {found}; if it stopped now, nothing would be lost: step {newest} has a whole checkpoint.'
      )
    steps = _steps(range(newest + 1, self._reached + 1))
    return (
      f'{self._workdir}: {found}; if it stopped now, {steps} since the last whole checkpoint (step {newest}) would be '
      'lost and computed again.'
    )

  def _lock(self) -> Iterator[Finding]:
    path = self._workdir / LOCK
    if not path.exists():
      return
    content = read_bytes(path, 'make it readable, or remove it')
    found = lock_owner.parse(content)
    if found is None and content:
      yield Finding(DAMAGE, LOCK, 'is not as it was written; the next start replaces it')
    elif found is None:
      yield Finding(NOTE, LOCK, 'names no process')
    elif not found.released:
      says = {
        lock_owner.RUNNING: 'is training here now, so the files below may change while they are read',
        lock_owner.STOPPED: 'trains here and is stopped',
        lock_owner.GONE: 'trained here last and was killed',
        lock_owner.ELSEWHERE: 'trains here, or trained here last: it cannot be seen from this machine',
      }
      yield Finding(NOTE, LOCK, f'{found} {says[lock_owner.state(found)]}')

  def _read(self, name: str, act: Callable[[], str], needed: bool = False) -> Iterator[Finding]:
    """Yield the finding about a file of the run: `act` reads it, and returns what it holds."""
    if (self._workdir / name).exists():
      yield Finding(WHOLE, name, act())
    elif needed:
      yield Finding(DAMAGE, name, 'is missing')

  def _record(self) -> str:
    path = self._workdir / EPOCHS
    self._epochs = of_starts(self._workdir)  # Used unless the file can be read.
    self._epochs = parse(read_bytes(path, 'make it readable'), path)
    published = self._epochs.published
    return f'fencing epoch {self._epochs.newest}; ' + (
      f'the checkpoint of step {published} was published last' if published else 'no checkpoint was published'
    )

  def _metrics(self) -> Iterator[Finding]:
    path = self._workdir / METRICS
    if not path.exists():
      state = DAMAGE if self._epochs.published > 1 else NOTE
      yield Finding(state, METRICS, 'is missing: the numbers of all steps are lost, unless no step has ended')
      return
    steps: list[int] = []
    foreign: list[int] = []
    before, states = '', {state: [] for state in sealed.STATES}
    content = read_bytes(path, 'make it readable')
    self._bytes = len(content)
    texts = content.split(b'\n')
    cut = texts.pop()  # The text after the last newline.
    for number, text in enumerate(texts, 1):
      line, (state, digest) = _line(text), sealed.check_line(text, before)
      if line is None:
        yield Finding(
          DAMAGE, METRICS, f'line {number} is not an object with a step: {short_repr(text.decode(errors="replace"))}'
        )
      elif self._epochs.fenced(line.get(FENCING_EPOCH, 0), line['step']) is not None:
        foreign.append(line['step'])
        if state == sealed.ALTERED:
          states[state].append(number)
      else:
        before = digest
        states[state].append(number)
        self._line_digests.add(digest)
        self._expected |= expected_results([line])
        steps.append(line['step'])
        if isinstance(line.get(STATE_DIGEST), str) and line.get(alarms.ROLLBACK) is None:
          self._digests[line['step']] = line[STATE_DIGEST]
    self._reached = max(steps, default=0)
    if cut:
      yield Finding(NOTE, METRICS, 'its last line is cut off; a resume drops it')
    if foreign:
      yield Finding(
        NOTE, METRICS, f'a process that had lost the run wrote the lines of {_steps(foreign)}; readers drop them'
      )
    if wrong := _unlike(states):
      yield Finding(DAMAGE, METRICS, wrong)
    if unsealed := states[sealed.UNSEALED]:
      yield Finding(NOTE, METRICS, f'{counted(len(unsealed), "line")} of an earlier version cannot be verified')
    twice = {step for step, count in collections.Counter(steps).items() if count > 1}
    if twice:
      yield Finding(DAMAGE, METRICS, f'has several lines of {_steps(twice)}')
    self._lines = set(steps)
    yield Finding(
      WHOLE,
      METRICS,
      f'{counted(len(steps), "line")}, {len(self._digests)} with a {STATE_DIGEST}, up to step {self._reached}',
    )

  def _checkpoints(self) -> Iterator[Finding]:
    folder = self._workdir / 'checkpoints'
    if not folder.is_dir():
      yield Finding(NOTE, 'checkpoints', 'there is none')
      return
    entries = list(folder.iterdir())
    for path in sorted((path for path in entries if is_step(path.name)), key=lambda path: int(path.name)):
      found = self._checkpoint(path)
      if found.state == WHOLE:
        self._reached = max(self._reached, int(path.name))
      elif not path.exists():
        found = Finding(NOTE, found.what, 'was removed by the run while it was read')
      yield found
    for path in sorted(path for path in entries if not is_step(path.name)):
      yield Finding(NOTE, f'checkpoints/{path.name}', 'is being written or removed, or was when the run was killed')

  def _lost(self) -> Iterator[Finding]:
    """Yield findings about missing files that other files of the run mention."""
    path, newest, last = self._workdir / METRICS, max(self.whole, default=0), max(self._lines, default=0)
    if self._bytes is not None:
      going_on = not path.exists() or path.stat().length != self._bytes  # Lines may have been added since.
      # The line of a checkpoint's own step may not be written yet.
      missing = set(range(1, (last if going_on else max(last, newest - 1)) + 1)) - self._lines
      if missing:
        yield Finding(DAMAGE, METRICS, f'has no line of {_steps(missing)}: the numbers are lost')
      last_line = self.whole.get(newest)
      if last_line and last_line not in self._line_digests and not going_on:
        yield Finding(DAMAGE, METRICS, f'lacks the line after which checkpoints/{newest} was written')
    published = self._epochs.published
    there = (self._workdir / 'checkpoints' / str(published)).exists()  # If so, its fault has been reported.
    if published > newest and not there and read_epochs(self._workdir).published == published:
      yield Finding(DAMAGE, 'checkpoints', f'that of step {published} was published, but is missing')

  def _checkpoint(self, path: epath.Path) -> Finding:
    what = f'checkpoints/{path.name}'
    try:
      expected = manifest.read_manifest(path)
      successor = self._epochs.fenced(expected.fencing_epoch, expected.step)
      if successor is not None:
        return Finding(
          NOTE, what, f'a process that had lost the run to another one ({successor}) wrote it; a resume drops it'
        )
      manifest.check_files(path, expected)
      for name in expected.leaves:
        manifest.check_leaves({name: self._leaf(path, name)}, expected)
    except FileNotFoundError:
      return Finding(DAMAGE, what, f'{NO_MANIFEST}: it cannot be verified, and the run does not resume from it')
    except Exception as error:  # TensorStore raises many types.
      if is_out_of_reach(error):
        return Finding(
          DAMAGE, what, f'cannot be read for now, which does not mean that it is damaged: {first_line(error)}'
        )
      return Finding(DAMAGE, what, first_line(error))
    digest = expected.state_digest
    recorded = self._digests.get(expected.step)
    if recorded not in (None, digest):
      return Finding(
        DAMAGE, what, f'it holds the state {digest}, but {METRICS} names {recorded}: they are from different runs'
      )
    self.whole[expected.step] = expected.line_digest
    agrees = f', as in {METRICS}' if recorded else ''
    return Finding(
      WHOLE,
      what,
      f'{counted(len(expected.leaves), "array")}, {counted(len(expected.files), "other file")}, state '
      f'{digest[:16]}{agrees}',
    )

  def _leaf(self, path: epath.Path, name: str) -> str:
    try:
      return stored_digest(path, name)
    except Exception as error:
      if is_out_of_reach(error):
        raise
      raise manifest.DamagedError(f'the array {name} cannot be read ({first_line(error)})') from error

  def _results(self, name: str) -> Iterator[Finding]:
    folder = self._workdir / name
    there = {path.name for path in folder.iterdir()} if folder.is_dir() else set()
    for missing in sorted(self._expected - {f'{name}/{file}' for file in there}):
      if missing.startswith(f'{name}/'):
        yield Finding(DAMAGE, missing, f'is missing, though {METRICS} names it')
    if not folder.is_dir():
      return
    whole = unsealed = 0
    for path in sorted(folder.iterdir()):
      named = _RESULTS.fullmatch(path.name)
      if named is None:
        yield Finding(NOTE, f'{name}/{path.name}', 'is not a file of the run')
        continue
      self._reached = max(self._reached, int(named[1]))
      wrong, verified = _wrong(path, named[1])
      if wrong is None:
        whole, unsealed = whole + 1, unsealed + (not verified)
      else:
        yield Finding(DAMAGE, f'{name}/{path.name}', wrong)
    if unsealed:
      yield Finding(NOTE, name, f'{counted(unsealed, "file")} of an earlier version cannot be verified')
    yield Finding(WHOLE, name, counted(whole, 'file'))

  def _leftovers(self) -> Iterator[Finding]:
    for name, text in ((DAMAGED, 'set aside as damaged'), (BEFORE_RESTART, 'moved away by --restart')):
      folder = self._workdir / name
      held = sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []
      if held:
        yield Finding(NOTE, name, f'{", ".join(held)}: {text}; may be removed')
    for path in sorted(self._workdir.iterdir()):
      if path.name.endswith('.partial'):
        yield Finding(NOTE, path.name, 'is being written, or was when the run was killed; the next start removes it')


def _steps(steps: Collection[int]) -> str:
  """Format step numbers for people: 'step 3', 'steps 3, 5–8'."""
  return f'{"step" if len(set(steps)) == 1 else "steps"} {spans(steps)}'


def _line(text: bytes) -> dict[str, Any] | None:
  try:
    line = json.loads(text)
  except (ValueError, RecursionError):
    return None
  if not isinstance(line, dict) or not isinstance(line.get(FENCING_EPOCH, 0), int):
    return None
  step = line.get('step')
  return line if isinstance(step, int) and not isinstance(step, bool) else None


def _unlike(states: Mapping[str, Sequence[int]]) -> str | None:
  """Return what is wrong with lines, whose numbers are given by the results of `sealed.check_line`; or None."""
  if altered := states[sealed.ALTERED]:
    return f'not as written: line {spans(altered)}'
  if misplaced := states[sealed.MISPLACED]:
    return f'lines were removed, moved or altered before line {spans(misplaced)}'
  return None


def _wrong(path: epath.Path, step: str) -> tuple[str | None, bool]:
  """Return what is wrong with a file of JSON or JSON lines, None if nothing is; and whether it has a seal."""
  try:
    content = path.read_bytes()
  except OSError as error:
    return f'cannot be read ({first_line(error)})', True
  if path.suffix == '.jsonl' and not content.endswith(b'\n'):  # Every step has samples.
    return 'its end is missing', True
  parts = content.split(b'\n')[:-1] if path.suffix == '.jsonl' else [content]
  for number, part in enumerate(parts, 1):
    try:
      json.loads(part)
    except (ValueError, RecursionError) as error:
      where = f'line {number} ' if len(parts) > 1 else ''
      return f'{where}is not JSON ({first_line(error)})', True
  if path.suffix == '.json':
    try:
      sealed.read_sealed(path, 'a resume does not need it')
    except UserError as error:
      return str(error), True
    return None, sealed.is_sealed(content)
  before, states = sealed.beginning(step, len(parts)), {state: [] for state in sealed.STATES}
  for number, part in enumerate(parts, 1):
    state, before = sealed.check_line(part, before)
    states[state].append(number)
  return _unlike(states), not states[sealed.UNSEALED]
