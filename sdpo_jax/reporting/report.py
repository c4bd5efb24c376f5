"""Writing a report of runs, once or whenever the files of a run change."""

from __future__ import annotations

from collections.abc import Callable, Sequence
import datetime
import time

from etils import epath

from sdpo_jax.errors import UserError
from sdpo_jax.files import check_output, read_bytes, write_output
from sdpo_jax.reporting import page
from sdpo_jax.reporting.rollouts import RolloutFiles, RolloutPages, collect
from sdpo_jax.reporting.run_files import RunFiles, read_run
from sdpo_jax.tables import counted
from sdpo_jax.training.directory.workdir import located

REPORT = 'report.html'  # Default file, in the run's directory.
MAX_MB = 25.0  # Default size limit, which most mail servers and code hosts accept.
RELOAD_S = 10.0  # Minimum seconds after which a page that is being updated checks for a newer one.


class Reporter:
  """Makes report pages of runs; on later calls only files that have changed are read."""

  def __init__(
    self, workdirs: Sequence[epath.PathLike], max_rollouts: int, max_mb: float = MAX_MB, *, texts: bool = True
  ):
    self._workdirs, self._texts = [located(workdir) for workdir in workdirs], texts
    self._files = [RolloutFiles(workdir, texts=texts) for workdir in self._workdirs]
    self._max_rollouts, self._max_bytes = max_rollouts, int(max_mb * 1e6)

  def page(self, reload_s: float | None = None) -> tuple[str, list[RunFiles], int, list[str]]:
    """Return the page, the runs it is about, its number of rollouts, and the remarks on it.

    Args:
      reload_s: seconds after which the page reloads itself unless all runs are complete; None: it never does.

    Raises:
      UserError: a directory holds no run, or one of its files cannot be read.
    """
    runs = [read_run(workdir, texts=self._texts) for workdir in self._workdirs]
    sources = [(files, run.last) for files, run in zip(self._files, runs, strict=True)]
    over = all(run.over for run in runs)
    written = datetime.datetime.now(datetime.UTC).strftime('%Y-%m-%d %H:%M:%S UTC')
    title = ' · '.join(run.name for run in runs[:3]) + (' …' if len(runs) > 3 else '')

    def made(most: int, room: int) -> tuple[str, RolloutPages, list[str]]:
      rollouts = collect(sources, most, room)
      if not self._texts:
        rollouts.remarks.append('Prompts, completions, feedback and templates are left out of this page (--no_texts).')
      known = page.summary(runs, rollouts, written=written, reload_s=None if over else reload_s)
      return page.render(title, known, rollouts.pieces), rollouts, known['remarks']

    text, rollouts, remarks = made(0, 0)
    bare = len(text.encode())
    room = left = self._max_bytes - bare
    while room > 0:
      text, rollouts, remarks = made(self._max_rollouts, room)
      taken = len(text.encode()) - bare
      if taken <= left:
        break
      room = sum(map(len, rollouts.pieces)) * left // taken  # The difference is the index.
    return text, runs, len(rollouts), remarks


def write_report(
  workdir: str,
  compare: Sequence[str],
  output: str | None,
  *,
  max_rollouts: int,
  max_mb: float = MAX_MB,
  texts: bool = True,
  say: Callable[[str], None],
  follow_s: float | None = None,
  wait: Callable[[float], None] = time.sleep,
) -> None:
  """Write the report of a run, compared with others.

  Args:
    workdir: directory of the run.
    compare: directories of other runs.
    output: file for the page; None: `REPORT` in `workdir`.
    max_rollouts: maximum number of rollouts in the page.
    max_mb: maximum size of the page in megabytes; rollouts get what curves and settings leave.
    texts: whether the page includes prompts, completions, feedback and templates.
    say: called with a line for every page that is written, and at first with the remarks on it.
    follow_s: seconds between checks of the runs, until all are complete; None: write one page.
    wait: sleeps for a number of seconds.

  Raises:
    UserError: a directory holds no run, one of its files cannot be read, or the page cannot be written.
  """
  workdirs = [workdir, *compare]
  for place, each in enumerate(workdirs):
    if not each:
      raise UserError('A value of --workdir or --compare is empty: name directories of runs.')
    if each in workdirs[:place]:
      raise UserError(f'{each} is named twice: name each run once.')
  target = str(located(workdir) / REPORT) if output is None else output
  reload_s = None if follow_s is None else max(follow_s, RELOAD_S)
  reporter = Reporter(workdirs, max_rollouts, max_mb, texts=texts)
  text, runs, count, remarks = reporter.page(reload_s)  # Fails before writing if there is no run.
  _check_target(target)
  write_output(target, text)
  for sentence in (_sentence(target, text, runs, count), *remarks):
    say(sentence)
  if follow_s is None:
    return
  seen = [_state(run) for run in runs]
  try:
    while not all(run.over for run in runs):
      wait(follow_s)
      text, runs, count, _ = reporter.page(reload_s)
      if (now := [_state(run) for run in runs]) != seen:
        write_output(target, text)
        say(_sentence(target, text, runs, count))
        seen = now
  except KeyboardInterrupt:
    # The last page does not wait for another one.
    write_output(target, reporter.page()[0])
    say(f'{target}: no longer updated.')


def _state(run: RunFiles) -> tuple[object, ...]:
  """Return values that change with every finished step."""
  return run.last, run.over, len(run.remarks), len(run.resumed)


def _check_target(target: str) -> None:
  """Raise UserError if the page cannot be written or would replace another kind of file."""
  check_output(target)
  path = epath.Path(target)
  if path.is_file() and (content := read_bytes(path, 'name another --output')):
    if not content.startswith(page.MARK.encode()):
      raise UserError(f'--output={target} exists and is not a report: name another file, or remove it.')


def _sentence(target: str, text: str, runs: Sequence[RunFiles], count: int) -> str:
  steps = ', '.join(
    f'{run.name} {"no step" if run.last is None else f"step {run.last}"}{"" if run.over else ", in progress"}'
    for run in runs
  )
  return f'{target}: {steps}; {counted(count, "rollout")}; {len(text.encode()) / 1e6:.1f} MB.'
