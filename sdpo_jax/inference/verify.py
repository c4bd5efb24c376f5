"""Bit-exact verification of a run's files, without changing them, and what would be lost if the run stopped now."""

from __future__ import annotations

from collections.abc import Callable, Iterator
import dataclasses
import json
import re

from etils import epath

from sdpo_jax.config import Config
from sdpo_jax.errors import UserError, first_line
from sdpo_jax.files import read_bytes
from sdpo_jax.inference.runs import run_config
from sdpo_jax.models import checksums, huggingface, model_files
from sdpo_jax.tables import counted, named_steps, spans
from sdpo_jax.training.boards import saved_id
from sdpo_jax.training.checkpoint import manifest
from sdpo_jax.training.checkpoint.checkpoints import NO_MANIFEST, none_whole
from sdpo_jax.training.checkpoint.stored_arrays import stored_digest
from sdpo_jax.training.checkpoint.unreadable import is_out_of_reach
from sdpo_jax.training.directory import lines, lock_owner, sealed, starts
from sdpo_jax.training.directory.epochs import EPOCHS, DamagedEpochsError, Epochs, of_starts, parse
from sdpo_jax.training.directory.lines import METRICS, RESULTS, STATE_DIGEST, MetricsLines
from sdpo_jax.training.directory.locks import LOCK
from sdpo_jax.training.directory.lost_checkpoints import check_not_lost
from sdpo_jax.training.directory.published_checkpoints import DAMAGED, is_step, newest
from sdpo_jax.training.directory.starts import FINGERPRINT
from sdpo_jax.training.directory.workdir import BEFORE_RESTART, WANDB_ID, changed_settings, layout_faults, located
from sdpo_jax.training.resuming import compared

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
    self._named = newest(workdir)  # The step from which a resume wants to go on.
    self._config: Config | None = None
    self._epochs = Epochs()
    self._lines = MetricsLines(workdir / METRICS, [], [], [], [], {})
    self._size = 0  # Bytes of metrics.jsonl before it was read; if they are others later, the run is going on.
    self._written = 0  # The last step that must have a line, by the newest whole checkpoint.
    self._steps: set[int] = set()  # Those with a line or, without any line, with a file.
    self._failures: dict[int, str] = {}  # Step of a damaged checkpoint → what is wrong.
    self.whole: dict[int, str] = {}  # Step of an intact checkpoint → the digest of the last line that it names.
    self._refused: dict[str, None] = {}  # Files and checkpoints because of which a resume is refused.

  def findings(self) -> Iterator[Finding]:
    """Yield the findings about all files and checkpoints of the run, in the order of the report."""
    for name, sentence in layout_faults(self._workdir):
      yield self._refuse(name, sentence)
    for name, findings in (
      (LOCK, self._lock()),
      ('config.json', self._settings()),
      (EPOCHS, self._record()),
      (FINGERPRINT, self._starts()),
      (METRICS, self._read_lines()),
      (WANDB_ID, self._page()),
    ):
      try:
        yield from findings if name not in self._refused else ()
      except UserError as error:
        needed = {FINGERPRINT: self._named > 0, WANDB_ID: self._config and self._config.trainer.wandb_project}
        goes_on = isinstance(error, DamagedEpochsError) or not needed.get(name, True)
        yield Finding(DAMAGE, name, str(error)) if goes_on else self._refuse(name, str(error))
    yield from self._checkpoints()
    if METRICS not in self._refused:
      yield from self._metrics()
    for folder in RESULTS:
      yield from self._results(folder) if folder not in self._refused else ()
    yield from self._leftovers()

  def _refuse(self, what: str, text: str) -> Finding:
    """Return a finding of damage for which a resume is refused."""
    self._refused[what] = None
    return Finding(DAMAGE, what, text)

  def summary(self, damaged: int) -> str:
    """Return a sentence on whether the run can resume, and what would be lost if it stopped now."""
    found, when = f'{damaged} damaged' if damaged else 'nothing damaged', 'if it stopped now'
    if self._refused:
      found += f'; a resume is refused because of {", ".join(self._refused)}, for which a way out is named above'
      when = 'after that'
    step = max(self.whole, default=0)
    later = {other for other in self._steps if other > step}
    if not self.whole:
      lost = f'{named_steps(later)} would be lost' if later else 'no step has ended yet'
      return f'{self._workdir}: {found}; there is no whole checkpoint to resume from: {lost}.'
    if not later:
      return f'{self._workdir}: {found}; {when}, nothing would be lost: step {step} has a whole checkpoint.'
    return (
      f'{self._workdir}: {found}; {when}, {named_steps(later)} since the last whole checkpoint (step {step}) would be '
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

  def _settings(self) -> Iterator[Finding]:
    if (self._workdir / 'config.json').exists():
      self._config = run_config(self._workdir)
      yield Finding(WHOLE, 'config.json', f'the settings of {self._config.name}')
    else:
      for meaning, changes in changed_settings(self._workdir, Config()).named.items():
        yield Finding(DAMAGE, 'config.json', f'{meaning}: {", ".join(changes)}.')

  def _record(self) -> Iterator[Finding]:
    path = self._workdir / EPOCHS
    if path.exists():
      self._epochs = of_starts(self._workdir)  # Used unless the file can be read.
      self._epochs = parse(read_bytes(path, 'make it readable'), path)
      published = self._epochs.published
      what = f'the checkpoint of step {published} was published last' if published else 'no checkpoint was published'
      yield Finding(WHOLE, EPOCHS, f'fencing epoch {self._epochs.newest}; {what}')

  def _starts(self) -> Iterator[Finding]:
    found = starts.read(self._workdir)
    for sentence in starts.unrecorded(self._workdir, found, self._named):
      yield Finding(NOTE, FINGERPRINT, sentence)
    if found:
      yield Finding(WHOLE, FINGERPRINT, counted(len(found), 'start'))

  def _page(self) -> Iterator[Finding]:
    if (self._workdir / WANDB_ID).exists():
      yield Finding(WHOLE, WANDB_ID, f'the page {saved_id(self._workdir / WANDB_ID)}')

  def _read_lines(self) -> Iterator[Finding]:
    self._size = self._bytes()
    self._lines = lines.read_lines(self._workdir, epochs=self._epochs)
    self._steps = {line['step'] for line in self._lines.kept}
    lines.history(self._workdir, self._named, self._epochs)
    yield from ()

  def _bytes(self) -> int:
    path = self._workdir / METRICS
    return path.stat().length if path.exists() else 0

  def _metrics(self) -> Iterator[Finding]:
    found, step = self._lines, max(self.whole, default=0)
    last, digests = found.kept[-1]['step'] if found.kept else 0, {line.get(sealed.LINE_DIGEST) for line in found.kept}
    going_on = self._bytes() != self._size
    upto = last if going_on else max(last, self._written)
    damage, notes = found.faults(upto), found.remarks(upto)
    if found.respelled:
      damage.append(f'line {spans(found.respelled)} was written anew, with the same values; a resume goes on')
    if not damage and not going_on and self.whole.get(step) and self.whole[step] not in digests:
      damage.append(f'lacks the line after which checkpoints/{step} was written; a resume goes on')
    if found.unwritten:
      notes.append(f'line {spans(found.unwritten)} is cut off; a resume drops it')
    yield from (Finding(DAMAGE, METRICS, text) for text in damage)
    yield from (Finding(NOTE, METRICS, text) for text in notes if text not in damage)
    if found.kept and not damage:
      known = sum(STATE_DIGEST in line for line in found.kept)
      text = f'{counted(len(found.kept), "line")}, {known} with a {STATE_DIGEST}, up to step {last}'
      yield Finding(WHOLE, METRICS, text)

  def _checkpoints(self) -> Iterator[Finding]:
    folder = self._workdir / 'checkpoints'
    entries = list(folder.iterdir()) if folder.is_dir() else []
    if not entries:
      yield Finding(NOTE, 'checkpoints', 'there is none')
    for path in sorted((path for path in entries if is_step(path.name)), key=lambda path: int(path.name)):
      found = self._checkpoint(path)
      if found.state != WHOLE and path not in [*folder.iterdir()]:  # A broken link is there.
        found = Finding(NOTE, found.what, 'was removed by the run while it was read')
        self._failures.pop(int(path.name), None)
      yield found
    for path in sorted(path for path in entries if not is_step(path.name)):
      yield Finding(NOTE, f'checkpoints/{path.name}', 'is being written or removed, or was when the run was killed')
    if folder.name in self._refused:  # It is not a folder, or a link.
      return
    try:
      if sentence := check_not_lost(self._workdir, lambda text: None):  # Damaged epochs have been reported.
        yield Finding(DAMAGE, 'checkpoints', sentence)
      if self._failures and not self.whole:
        raise none_whole(folder, self._failures)
    except UserError as error:
      yield self._refuse('checkpoints', str(error))

  def _checkpoint(self, path: epath.Path) -> Finding:
    what = f'checkpoints/{path.name}'
    try:
      expected = manifest.read_manifest(path)
      successor = self._epochs.fenced(expected.fencing_epoch, expected.step)
      if successor is not None:
        text = f'a process that had lost the run to another one ({successor}) wrote it'
        self._failures[expected.step] = text
        return Finding(NOTE, what, f'{text}; a resume drops it')
      manifest.check_files(path, expected)
      for name in expected.leaves:
        manifest.check_leaves({name: self._leaf(path, name)}, expected)
      host = json.loads((path / 'host' / 'metadata').read_bytes())
    except Exception as error:  # TensorStore raises many types.
      lost = isinstance(error, FileNotFoundError)
      if not lost and is_out_of_reach(error):
        return self._refuse(what, f'cannot be read for now, but may be whole: {first_line(error)}')
      self._failures[int(path.name)] = NO_MANIFEST if lost else first_line(error)
      return Finding(DAMAGE, what, f'{self._failures[int(path.name)]}: a resume does not go on from it')
    digest, step = expected.state_digest, expected.step
    try:
      self._written, recorded = compared(step, host, digest, self._lines)
    except UserError as error:
      return self._refuse(what, str(error))
    self.whole[step] = expected.line_digest
    # A resume tries no older one.
    self._refused = {name: None for name in self._refused if not name.startswith('checkpoints/')}
    held = f'{counted(len(expected.leaves), "array")}, {counted(len(expected.files), "other file")}'
    agrees = f', as in {METRICS}' if recorded else ''
    return Finding(WHOLE, what, f'{held}, state {digest[:16]}{agrees}')

  def _leaf(self, path: epath.Path, name: str) -> str:
    try:
      return stored_digest(path, name)
    except Exception as error:
      if is_out_of_reach(error):
        raise
      raise manifest.DamagedError(f'the array {name} cannot be read ({first_line(error)})') from error

  def _results(self, name: str) -> Iterator[Finding]:
    folder, counts = self._workdir / name, {True: 0, False: 0}  # Sealed or not → files as they were written.
    for sentence in (lost := self._lines.lost_results(name)):
      yield Finding(DAMAGE, name, sentence)
    for path in sorted(folder.iterdir()) if folder.is_dir() else ():
      what, named = f'{name}/{path.name}', _RESULTS.fullmatch(path.name)
      if named is None:
        yield Finding(NOTE, what, 'is not a file of the run')
        continue
      if not self._lines.kept:  # Otherwise they tell, whatever files were put there.
        self._steps.add(int(named[1]))
      try:
        wrong, verified = sealed.result_fault(path.name, path.read_bytes())
      except OSError as error:
        wrong, verified = f'cannot be read ({first_line(error)})', True
      if wrong is None:
        counts[verified] += 1
      else:
        yield Finding(DAMAGE, what, f'{wrong}; a resume goes on')
    if counts[False]:
      yield Finding(NOTE, name, f'{counted(counts[False], "file")} of an earlier version cannot be verified')
    if not lost and any(counts.values()):
      yield Finding(WHOLE, name, counted(sum(counts.values()), 'file'))

  def _leftovers(self) -> Iterator[Finding]:
    for name, text in ((DAMAGED, 'set aside as damaged'), (BEFORE_RESTART, 'moved away by --restart')):
      folder = self._workdir / name
      held = sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []
      if held:
        yield Finding(NOTE, name, f'{", ".join(held)}: {text}; may be removed')
    for path in sorted(self._workdir.iterdir()):
      if path.name.endswith('.partial'):
        yield Finding(NOTE, path.name, 'is being written, or was when the run was killed; the next start removes it')
