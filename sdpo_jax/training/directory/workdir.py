"""The layout of a run directory, the settings stored in it, and checks whether a run may use it."""

from __future__ import annotations

from collections.abc import Iterator
import json
import os
from typing import Any

from etils import epath
import jax

from sdpo_jax.config import Config
from sdpo_jax.config.fields import did_you_mean
from sdpo_jax.config.overrides import Differences, differences
from sdpo_jax.errors import UserError
from sdpo_jax.files import is_local, make_directory, remove_partials, sync_ancestors, sync_directory, write_atomically
from sdpo_jax.models.remote_files import readable
from sdpo_jax.training.directory import sealed
from sdpo_jax.training.directory.epochs import EPOCHS
from sdpo_jax.training.directory.lines import METRICS, history
from sdpo_jax.training.directory.locks import unwritable
from sdpo_jax.training.directory.published_checkpoints import CHECKPOINTS, DAMAGED, newest
from sdpo_jax.training.directory.starts import FINGERPRINT

WANDB_ID = 'wandb_id'  # File with the id of the run's page on Weights & Biases.
FILES = ('config.json', METRICS, EPOCHS, FINGERPRINT, WANDB_ID)
BEFORE_RESTART = 'before_restart'  # Folder of the results that --restart has moved away.
ROWS = 'rows'  # Folder of questions that the caller passed in memory.
_OF_A_BEGINNING = (CHECKPOINTS, DAMAGED, 'eval', 'profile', 'rollouts', 'stalls', 'tensorboard')
FOLDERS = (*_OF_A_BEGINNING, BEFORE_RESTART, ROWS)
# What --restart moves away; settings are last, since without them the other files are not a run.
RESULTS = (*_OF_A_BEGINNING, METRICS, WANDB_ID, FINGERPRINT, 'config.json')
# File in a directory → what else than a run the directory is, and which flag takes it.
_OTHERS = {
  'adapter_config.json': 'it is a LoRA adapter, passed as --adapter with its --model',
  'cartridge.json': 'it is a cartridge, passed as --cartridge with its --model',
  'config.json': 'its config.json is not that of a run; a model is passed as --model',
}
UNREADABLE = 'make it readable or choose another'


def saved_settings(workdir: epath.PathLike) -> dict[str, Any]:
  """Return the contents of a run's `config.json`.

  Raises:
    UserError: it cannot be read or does not hold an object.
  """
  way_out = 'restore it, or remove it, after which a resume does not compare its settings with earlier ones'
  return sealed.read_sealed(epath.Path(workdir) / 'config.json', way_out)


def changed_settings(workdir: epath.PathLike, config: Config) -> Differences:
  """Return how settings differ from those of the start before; if `config.json` is missing, only that it is.

  Raises:
    UserError: the file cannot be read, or is missing and so are checkpoints, so that this may be any run.
  """
  workdir = epath.Path(workdir)
  if (workdir / 'config.json').exists():
    return differences(saved_settings(workdir), config)
  if not newest(workdir):
    raise UserError(
      f'{workdir} holds a run without config.json and without checkpoints: add --restart to begin again at step 0, '
      f'which moves what is there to {workdir / BEFORE_RESTART}, restore them, or choose another --workdir.'
    )
  return Differences([], [], {'Settings are not compared with those of earlier starts': ['config.json is missing']}, [])


def located(workdir: epath.PathLike) -> epath.Path:
  """Return the path of a run's directory, after checking that its file system or store can be reached.

  Raises:
    UserError: the kind of store is unknown or its package is not installed, or it cannot be read.
  """
  with readable(f'--workdir={workdir}', UNREADABLE):
    try:
      path = epath.Path(workdir)
      path.exists()
    except KeyError as error:  # etils does not know the scheme.
      raise UserError(
        f'--workdir={workdir} is in an unknown kind of store: name a local directory, or gs://….'
      ) from error
  return path


def no_run(workdir: epath.Path) -> UserError:
  """Return the error for a path that is not a run, which says what it is instead and what to name."""
  there = {path.name for path in workdir.iterdir()} if workdir.is_dir() else set()
  whole = _run_around(workdir)
  other = next((other for name, other in _OTHERS.items() if name in there), None)
  if not workdir.exists():
    what = f'there is no such directory{did_you_mean(workdir.name, (run.name for run in _runs_in(workdir.parent)))}'
  elif whole is not None:
    what = f'it is part of the run {whole}; name that.'
  elif not there:
    what = f'it is {"an empty directory" if workdir.is_dir() else "a file"}; name the --workdir of launch.train.'
  elif other is not None:
    what = f'{other}.'
  elif runs := _runs_in(workdir):
    what = f'it holds runs; name one of them, such as {runs[0]}.'
  else:
    lost = 'restore it, or resume the run' if CHECKPOINTS in there else 'name the --workdir of launch.train'
    what = f'there is no config.json in it; {lost}.'
  return UserError(f'{workdir} is not a run: {what}')


def _run_around(workdir: epath.Path) -> epath.Path | None:
  """Return the run of which a path such as RUN/metrics.jsonl or RUN/checkpoints/20 is a part."""
  return next((path for path in [*workdir.parents][:2] if _is_run(path)), None)


def _is_run(path: epath.Path) -> bool:
  return (path / 'config.json').exists() and any((path / name).exists() for name in (METRICS, CHECKPOINTS))


def _runs_in(folder: epath.Path) -> list[epath.Path]:
  """Return the runs in a local folder; none for an object store, which may take long to list."""
  return [path for path in sorted(folder.iterdir()) if _is_run(path)] if is_local(folder) and folder.is_dir() else []


def check_workdir(config: Config, workdir: epath.PathLike, *, restart: bool = False) -> epath.Path:
  """Return the run's directory if it is new, holds nothing trained, or holds the same run; nothing is written.

  With `restart`, it may also hold another run without checkpoints, which will be moved away.

  Raises:
    UserError: it is inside a run, or holds another run (the message names the settings that differ), its contents
      cannot be read, or a file and a folder of the run have each other's names.
  """
  workdir = located(workdir)
  with readable(f'--workdir={workdir}', UNREADABLE):
    if workdir.exists() and not workdir.is_dir():
      raise UserError(f'--workdir={workdir} is a file: name a directory.')
    for _, sentence in layout_faults(workdir):
      raise UserError(sentence)
    begun = (workdir / METRICS).exists()
    trained = bool(newest(workdir))
    whole = None if trained else _run_around(workdir)
  if whole is not None and workdir.relative_to(whole).parts[0] in FOLDERS:
    raise UserError(f'--workdir={workdir} is part of the run {whole}: name that, or a directory outside it.')
  if not trained and (restart or not begun):
    return workdir
  found = changed_settings(workdir, config)
  if found.refused:
    named = ','.join([*config.trainer.accept_changes, *found.ways_out])
    insist = f', or insist with --config.trainer.accept_changes={named}' if found.ways_out else ''
    raise UserError(
      f'{workdir} holds a run with other settings: {"; ".join(found.refused)}. '
      f'Use the settings of that run, or another --workdir{insist}.'
    )
  history(workdir, newest(workdir))  # Raises for damaged lines before anything is compiled.
  return workdir


def layout_faults(workdir: epath.Path) -> Iterator[tuple[str, str]]:
  """Yield the name of each file or folder of a run that has the wrong kind, with a sentence on it and the way out."""
  exists = os.path.lexists if is_local(workdir) else epath.Path.exists  # A broken link is there, too.
  for name in sorted(name for name in (*FILES, *FOLDERS) if exists(workdir / name)):
    if is_local(workdir) and os.path.islink(workdir / name):
      yield (
        name,
        f'{workdir / name} is a link, which a run does not write through: replace it with its target, or make the '
        'whole --workdir a link.',
      )
      continue
    is_file = not is_local(workdir) or os.path.isfile(workdir / name)  # Opening a pipe may block.
    found = 'folder' if (workdir / name).is_dir() else 'file' if is_file else 'pipe or a device'
    wanted = 'folder' if name in FOLDERS else 'file'
    if found != wanted:
      way_out = 'move it away or choose another --workdir'
      yield name, f'{workdir / name} is a {found} where the run needs a {wanted}: {way_out}.'


def open_workdir(workdir: epath.Path) -> None:
  """Create the run's directory, remove partly written files of a killed process, and sync its folders.

  Raises:
    UserError: it cannot be created.
  """
  if jax.process_index() != 0:
    return
  try:
    make_directory(workdir)
    sync_ancestors(workdir)
    for folder in (workdir, *(workdir / name for name in FOLDERS)):
      if is_local(folder) and folder.exists():
        remove_partials(folder)
        sync_directory(folder)
  except OSError as error:
    raise unwritable(workdir, error) from error


def write_settings(config: Config, workdir: epath.Path) -> None:
  """Write `config.json`; to be called when the run is sure to continue, since a refused start must keep the old one.

  Raises:
    UserError: it cannot be written.
  """
  if jax.process_index() != 0:
    return
  path, text = workdir / 'config.json', sealed.seal(json.loads(config.to_json()))
  try:
    if not path.exists() or path.read_bytes() != text.encode():
      write_atomically(path, text)
  except OSError as error:
    raise unwritable(workdir, error) from error
