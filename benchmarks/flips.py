"""Runs with one flipped bit, or a damaged checkpoint, that are verified and resumed: no damage may be silent.

  python -m benchmarks.flips                     # 1,000 bits in the files of three runs, some ten minutes on two cores
  python -m benchmarks.flips --flips=50 --seed=1 --of=lora
  python -m benchmarks.flips --matrix            # every file of a checkpoint, some minutes

A run of all parameters, of LoRA and of a cartridge is copied while it trains, as if the machine had failed then. Each
flip is in another copy: a file is drawn, then one of its bits; `launch.verify` checks the copy, and the run is resumed
to its end. A flip is `noticed` if verify or the resume says something that it does not say of the whole copy, `refused`
if the resume ends with a sentence, and `unreferenced` if nothing is said and the resumed run equals the undisturbed one
in every bit. It is `silent` if a resume says nothing and differs, whatever verify says, and a `traceback` if anything
ends with another error than a sentence.

`--matrix` does so for every file of the newest checkpoint and each of `CHANGES`, without training: `restored` from that
checkpoint bit for bit, `older` (from the one before, which is said), or `refused`.

Prints one line of JSON for each run, with the outcomes by file; exit code 1 if one is silent or a traceback.
"""

from __future__ import annotations

import argparse
import collections
from collections.abc import Callable, Iterator
import contextlib
import io
import json
import logging
import pathlib
import random
import re
import shutil
import sys
import tempfile
import time
import traceback

from etils import epath

import sdpo_jax
from sdpo_jax.errors import UserError
from sdpo_jax.inference import verify
from sdpo_jax.learning.update import abstract_state
from sdpo_jax.training import resuming
from sdpo_jax.training.checkpoint.digests import leaf_digests, state_digest
from sdpo_jax.training.checkpoint.manifest import read_manifest
from sdpo_jax.training.directory import lost_checkpoints
from sdpo_jax.training.directory.epochs import read_epochs
from sdpo_jax.training.directory.ownership import sole_user
from sdpo_jax.training.directory.published_checkpoints import CHECKPOINTS, MANIFEST, newest, published_steps
from sdpo_jax.training.opening import make_session
from sdpo_jax.training.specs import update_spec
from sdpo_jax.types import TrainState

TINY = {
  'data.train_batch_size': 4,
  'data.val_max_samples': 4,
  'rollout.n': 2,
  'actor.ppo_mini_batch_size': 4,
  'actor.ppo_micro_batch_size': 8,
  'trainer.save_freq': 2,
  'trainer.test_freq': 2,
  'trainer.rollout_save_freq': 1,
  'trainer.max_ckpt_to_keep': 2,
  'trainer.total_training_steps': 6,
}
FAILS_AT = 5  # The step after which the run is copied; the checkpoint before is that of step 4.
RUNS = {
  'full': ('configs/quickstart.py', {}),
  'lora': ('configs/quickstart.py', {'model.lora.rank': 4}),
  'cartridge': ('configs/cartridge_quickstart.py', {'rollout.n': 1}),
}
SILENT, TRACEBACK = 'silent', 'traceback'  # Outcomes that fail.
TRACE = 'Traceback (most recent call last)'
VARYING = ('time/', 'throughput/', 'programs/', 'fencing_epoch', 'line_digest')


def config_of(name: str) -> sdpo_jax.Config:
  """Return the settings of one of `RUNS`, which has six steps."""
  file, changes = RUNS[name]
  return sdpo_jax.load_config(file, TINY | changes)


def copied(config: sdpo_jax.Config, folder: pathlib.Path) -> pathlib.Path:
  """Train, and return a copy of the run's directory as it was after step `FAILS_AT`."""
  workdir, copy = folder / 'run', folder / 'copy'

  def copy_now(step: sdpo_jax.Step) -> None:
    if step.number == FAILS_AT:
      while read_epochs(workdir).published < FAILS_AT - 1:
        time.sleep(0.01)  # Another thread publishes the checkpoint.
      shutil.copytree(workdir, copy)

  sdpo_jax.train(config, workdir, on_step=copy_now)
  return copy


@contextlib.contextmanager
def heard() -> Iterator[list[str]]:
  """Provide the list of all warnings logged, and tracebacks printed, while the context lasts."""
  said: list[str] = []
  handler, printed = logging.Handler(logging.WARNING), io.StringIO()
  handler.emit = lambda record: said.append(handler.format(record))  # With its traceback, if it has one.
  others, logging.getLogger().handlers = logging.getLogger().handlers, [handler]
  try:
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(printed):
      yield said
  finally:
    said += [printed.getvalue()] if TRACE in printed.getvalue() else []
    logging.getLogger().handlers = others


def remarks(said: list[str], workdir: pathlib.Path) -> set[str]:
  """Return what was said, without what differs between any two runs: the folder, durations, and random names."""
  return {re.sub(r'\d+\.\d+ s\b|[0-9a-f]{16}\.partial', '…', text.replace(str(workdir), 'RUN')) for text in said}


def results(workdir: pathlib.Path) -> dict[str, object]:
  """Return the results of a run's last steps that do not differ between any two runs."""
  lines = [json.loads(line) for line in (workdir / 'metrics.jsonl').read_text().splitlines()]
  last = newest(workdir)
  manifest = json.loads((workdir / CHECKPOINTS / str(last) / MANIFEST).read_text())
  files = [workdir / 'rollouts' / f'{step}.jsonl' for step in range(FAILS_AT, last + 1)]
  return {
    'lines': [{name: value for name, value in line.items() if not name.startswith(VARYING)} for line in lines],
    'state': manifest['leaves'],
    'host': manifest['files']['host/metadata'],
    **{path.name: path.read_bytes() for path in [*files, workdir / 'eval' / f'{last}.json']},
  }


class Trials:
  """The trials with copies of a run's directory: what is said of the whole one, and what it ends with."""

  def __init__(self, config: sdpo_jax.Config, folder: pathlib.Path):
    self._config, self._folder = config, folder
    self.whole = copied(config, folder)
    self.verified, self.resumed, self.expected = self._run(self.copy())

  def copy(self) -> pathlib.Path:
    """Return a new copy of the run's directory; there is one at a time."""
    copy = self._folder / 'trial'
    shutil.rmtree(copy, ignore_errors=True)
    return pathlib.Path(shutil.copytree(self.whole, copy))

  def _run(self, workdir: pathlib.Path) -> tuple[set[str], set[str], dict[str, object]]:
    """Verify and resume a copy; return what each says, and the results."""
    with heard() as said:
      verify.verify(str(workdir), None, said.append)
      found = {text for text in remarks(said, workdir) if not text.startswith((verify.WHOLE, 'RUN: '))}
    with heard() as said:
      sdpo_jax.train(self._config, workdir, announce=said.append)
    return found, remarks(said, workdir), results(workdir)

  def flip(self, path: str, bit: int) -> str:
    """Return the outcome of a flipped bit in a file of the run."""
    copy = self.copy()
    flip_bit(copy / path, bit)
    try:
      verified, resumed, found = self._run(copy)
    except UserError:
      return 'refused'
    except Exception:
      traceback.print_exc()
      return TRACEBACK
    if TRACE in ''.join(resumed | verified):
      print(f'{path}, bit {bit}:', *(resumed | verified), sep='\n', file=sys.stderr)
      return TRACEBACK
    if not resumed - self.resumed and found != self.expected:
      print(f'{path}, bit {bit}: not said by a resume that differs', file=sys.stderr)
      return SILENT
    return 'noticed' if resumed - self.resumed or verified - self.verified else 'unreferenced'


def flip_bit(path: pathlib.Path, bit: int) -> None:
  """Flip a bit of a file."""
  content = bytearray(path.read_bytes())
  content[bit // 8] ^= 1 << bit % 8
  path.write_bytes(content)


def files_of(folder: pathlib.Path) -> list[str]:
  """Return the relative names of all files below a folder that are not empty."""
  paths = (path for path in folder.rglob('*') if path.is_file() and path.stat().st_size)
  return sorted(path.relative_to(folder).as_posix() for path in paths)


def kind_of(path: str) -> str:
  """Return the file or folder of the run to which a file belongs."""
  return path.split('/')[0]


def flips(trials: Trials, count: int, rng: random.Random) -> dict[str, collections.Counter[str]]:
  """Return the outcomes of random flips by file or folder of the run."""
  outcomes: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
  names = files_of(trials.whole)
  for _ in range(count):
    path = rng.choice(names)
    outcomes[kind_of(path)][trials.flip(path, rng.randrange(8 * (trials.whole / path).stat().st_size))] += 1
  return outcomes


CHANGES: dict[str, Callable[[pathlib.Path], object]] = {
  'delete': pathlib.Path.unlink,
  'empty': lambda path: path.write_bytes(b''),
  'half': lambda path: path.write_bytes(path.read_bytes()[: path.stat().st_size // 2]),
  'zeros': lambda path: path.write_bytes(bytes(path.stat().st_size)),
}
BITS = 20  # Flipped bits of each file.


class Restores:
  """Restores of a checkpoint from copies of a run's directory, as a resume does, but without sampling and training."""

  def __init__(self, config: sdpo_jax.Config, whole: pathlib.Path, like: TrainState, folder: pathlib.Path):
    self._config, self._like, self._trial = config, like, epath.Path(folder / 'trial')
    self.whole, self.newest = whole, newest(whole)
    steps = published_steps(self.whole)
    self.digests = {
      step: read_manifest(epath.Path(self.whole) / CHECKPOINTS / str(step)).state_digest for step in steps
    }

  def outcome(self, path: str, change: Callable[[pathlib.Path], object]) -> str:
    """Return the outcome of a change to a file of the run."""
    shutil.rmtree(self._trial, ignore_errors=True)
    shutil.copytree(self.whole, self._trial)
    change(pathlib.Path(self._trial) / path)
    said: list[str] = []
    try:
      with heard() as logged, sole_user(self._trial, said.append) as ownership:
        lost_checkpoints.settle(self._trial, ownership, restart=False, say=said.append)
        with resuming.opened(self._config, self._trial, ownership, self._like, said.append) as (_, resumed):
          found = state_digest(leaf_digests(resumed.state))
    except UserError:
      return 'refused'
    except Exception:
      traceback.print_exc()
      return TRACEBACK
    if TRACE in ''.join(logged):
      print(path, *logged, sep='\n', file=sys.stderr)
      return TRACEBACK
    if found != self.digests[resumed.step]:
      return SILENT
    if resumed.step == self.newest:
      return 'restored'
    return 'older' if any('cannot be read' in text for text in said) else SILENT


def restores_of(config: sdpo_jax.Config, folder: pathlib.Path) -> Restores:
  """Return the restores of a run that is trained in a folder."""
  whole = copied(config, folder)
  session, parameters = make_session(config, whole)
  table = session.policy.parameter_table()
  return Restores(config, whole, abstract_state(update_spec(config), parameters, session.mesh, table), folder)


def matrix(restores: Restores, rng: random.Random, bits: int = BITS) -> dict[str, collections.Counter[str]]:
  """Return the outcomes by change, for every file of the newest checkpoint."""
  outcomes: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
  folder = f'{CHECKPOINTS}/{restores.newest}'
  for name in files_of(restores.whole / folder):
    path = f'{folder}/{name}'
    for change, act in CHANGES.items():
      outcomes[change][restores.outcome(path, act)] += 1
    size = 8 * (restores.whole / path).stat().st_size
    for bit in rng.sample(range(size), min(size, bits)):
      outcomes['flip'][restores.outcome(path, lambda path, bit=bit: flip_bit(path, bit))] += 1
  return outcomes


def main() -> int:
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument('--flips', type=int, default=1000, help='how many, in all runs together')
  parser.add_argument('--seed', type=int, default=0, help='of the flips')
  parser.add_argument('--of', nargs='+', choices=list(RUNS), default=list(RUNS), help='what is trained')
  parser.add_argument('--matrix', action='store_true', help='damage the files of a checkpoint instead')
  flags = parser.parse_args()
  failed = 0
  for number, name in enumerate(flags.of):
    rng, began, used = random.Random(f'{flags.seed} {name}'), time.monotonic(), time.process_time()
    share = flags.flips * (number + 1) // len(flags.of) - flags.flips * number // len(flags.of)
    with tempfile.TemporaryDirectory() as scratch:
      folder = pathlib.Path(scratch)
      found = (
        matrix(restores_of(config_of(name), folder), rng)
        if flags.matrix
        else flips(Trials(config_of(name), folder), share, rng)
      )
    total = sum(found.values(), collections.Counter())
    failed += total[SILENT] + total[TRACEBACK]
    files = {kind: dict(sorted(counts.items())) for kind, counts in sorted(found.items())}
    seconds = {'seconds': round(time.monotonic() - began), 'cpu_seconds': round(time.process_time() - used)}
    print(json.dumps({'run': name, **total, **seconds, 'files': files}), flush=True)
  return 1 if failed else 0


if __name__ == '__main__':
  sys.exit(main())
