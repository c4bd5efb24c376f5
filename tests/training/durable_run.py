"""A run whose file operations are recorded, with marks that say what it has promised (test_durability.py).

python -m tests.training.durable_run LIVES train FLAGS…
  the command launch.train
python -m tests.training.durable_run LIVES stores WORKDIR LAST
  the files of a run without its model, up to step LAST; beside it, a run whose checkpoints are gone begins again

LIVES is a list in JSON: for each process that does this, one after another, the operation at which it gets a signal
(`file_operations.signal_at`), or null. The exit codes are printed as a list.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import runpy
import sys

from etils import epath
import jax
import jax.numpy as jnp
import numpy as np

from sdpo_jax.config import Config
from sdpo_jax.files import make_directory, write_atomically
from sdpo_jax.training import resuming
from sdpo_jax.training.checkpoint.checkpoints import Checkpoints
from sdpo_jax.training.directory import lost_checkpoints
from sdpo_jax.training.directory.ownership import sole_user
from sdpo_jax.training.directory.workdir import check_workdir, write_settings
from sdpo_jax.training.metrics import MetricsWriter
from sdpo_jax.types import TrainState
from tests import file_operations

KEEP = 1
RESTARTED = 'restarted'  # The directory, beside the other one, of the run that begins again.
# What is left of it.
LEFT = {
  'rollouts/4.jsonl': 'rollouts',
  'eval/4.json': 'evaluation',
  'metrics.jsonl': '{"step": 4}\n',
  'fingerprint.json': '{"format": 1, "starts": []}\n',
  'config.json': '{}\n',
}


def digest(state: TrainState) -> str:
  """Return a digest of every bit of a state."""
  whole = hashlib.sha256()
  for path, leaf in sorted(jax.tree_util.tree_leaves_with_path(state), key=lambda pair: jax.tree_util.keystr(pair[0])):
    if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
      leaf = jax.random.key_data(leaf)
    whole.update(f'{jax.tree_util.keystr(path)} {leaf.dtype} {leaf.shape}\n'.encode() + np.asarray(leaf).tobytes())
  return whole.hexdigest()


def mark_checkpoints() -> None:
  """From now on the log says 'saving STEP DIGEST' before a checkpoint is written, 'saved STEP' once it is promised."""
  save, wait = Checkpoints.save, Checkpoints.wait
  begun: list[int] = []

  def promise() -> None:
    for step in begun:
      file_operations.mark(f'saved {step}')
    begun.clear()

  def marked_save(self: Checkpoints, step: int, state: TrainState, *rest) -> None:
    file_operations.mark(f'saving {step} {digest(state)}')
    save(self, step, state, *rest)
    promise()  # The one before: it is awaited first.
    begun.append(step)

  def marked_wait(self: Checkpoints) -> None:
    wait(self)
    promise()

  Checkpoints.save, Checkpoints.wait = marked_save, marked_wait


def state_of(step: int) -> TrainState:
  """Return a small state that is another one at every step."""
  noise = np.random.default_rng(step).normal(size=(3, 5)).astype(np.float32)
  return TrainState(
    step=jnp.int32(step),
    optimizer_step=jnp.int32(step),
    trainable={'w': jnp.asarray(noise)},
    opt_state=(),
    teacher={'w': jnp.asarray(noise / 2)},
    rng=jax.random.key(7),
  )


def config() -> Config:
  """Return the settings of a run of `stores`."""
  settings = Config(name='stores')
  settings.trainer.tensorboard = False
  settings.trainer.max_ckpt_to_keep = KEEP
  return settings


def begin(
  settings: Config, workdir: epath.Path, like: TrainState, stack: contextlib.ExitStack
) -> tuple[Checkpoints, MetricsWriter, resuming.Resumed | None, int]:
  """Start or resume a run as the loop does, as far as files go.

  Returns:
    Its checkpoints, its writer, what it goes on from, and the last step that was finished by then, with its line.
  """
  check_workdir(settings, workdir)
  ownership = stack.enter_context(sole_user(workdir, lambda text: None))
  lost_checkpoints.settle(workdir, ownership, restart=False, say=lambda text: None)
  opened = resuming.opened(settings, workdir, ownership, like, lambda text: None)
  checkpoints, resumed = stack.enter_context(opened)
  write_settings(settings, workdir)
  written = 0 if resumed is None else resuming.written_before(resumed.step, resumed.unfinished)
  writer = MetricsWriter(workdir, settings, resume_step=written, ownership=ownership)
  stack.callback(writer.close)
  return checkpoints, writer, resumed, written


def stores(workdir: epath.Path, last: int) -> None:
  """Write what the loop writes, in its order: files of the step, its line, the sync of lines, the checkpoint."""
  with contextlib.ExitStack() as stack:
    checkpoints, writer, resumed, _ = begin(config(), workdir, state_of(0), stack)
    first = 0 if resumed is None else resumed.step
    for step in range(first + 1, last + 1):
      make_directory(workdir / 'rollouts')
      write_atomically(workdir / 'rollouts' / f'{step}.jsonl', f'{{"step": {step}}}\n')
      writer.write(step, {'train/loss': step / 8})
      writer.sync()
      checkpoints.save(step, state_of(step), {'position': step}, {})
    checkpoints.wait()


def restarts(workdir: epath.Path) -> None:
  """Leave a run without its checkpoints, then begin it again."""
  with sole_user(workdir) as ownership:
    ownership.resumed(0)
    ownership.published(4)
  for name, text in LEFT.items():
    make_directory((workdir / name).parent)
    write_atomically(workdir / name, text)
  file_operations.mark(f'{RESTARTED} left')
  with sole_user(workdir) as ownership:
    lost_checkpoints.settle(workdir, ownership, restart=True, say=lambda text: None)
  file_operations.mark(f'{RESTARTED} again')


def live(fatal: str | None, command: str, *arguments: str) -> None:
  """Be one process of the run."""
  if fatal is not None:
    file_operations.signal_at(fatal)
  mark_checkpoints()
  if command == 'train':
    sys.argv[1:] = arguments
    runpy.run_module('launch.train', run_name='__main__', alter_sys=True)
  else:
    workdir, last = arguments
    stores(epath.Path(workdir), int(last))
    if fatal is None:
      restarts(epath.Path(workdir).parent / RESTARTED)


if __name__ == '__main__':
  codes = []
  for end in json.loads(sys.argv[1]):
    child = os.fork()  # With the imports done. JAX has started no thread by now.
    if child == 0:
      live(end, *sys.argv[2:])
      sys.exit(0)
    codes.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
  print(json.dumps(codes))
