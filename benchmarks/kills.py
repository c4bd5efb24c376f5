"""Runs that are killed or told to stop at random moments and resumed, compared bit for bit with undisturbed runs.

  python -m benchmarks.kills                                   # 25 kills and 10 stops of each variant, most of an hour
  python -m benchmarks.kills --variants=lora,http_grader --kills=2 --terms=1 --seed=1

A run is started, gets SIGKILL or SIGTERM at a random moment, and is started again, until it has finished; then the next
run begins, until there were enough signals. Half of the moments lie between a process's first step and its last, the
others anywhere in its life; every fifth run has an empty folder of compiled programs, and its first process gets the
signal while it compiles, most likely. After every third SIGTERM, on average, comes a second one within half a second.

Prints one line of JSON per variant: signals by phase, exit codes after SIGTERM, and differences. Exit code 1 if a run
differs from the undisturbed one in a bit of its state, a number or text of metrics.jsonl other than a time, a rollout
or an evaluation; if it could not be resumed; or if it does not end within two minutes of SIGTERM.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import gc
import hashlib
import http.server
import json
import math
import os
import pathlib
import random
import runpy
import signal
import sys
import tempfile
import time
import traceback

# Modules of a run, imported before the fork.
from sdpo_jax import command  # noqa: F401
from sdpo_jax.environments import digits  # noqa: F401
from sdpo_jax.files import read_text
from sdpo_jax.training.directory.published_checkpoints import MANIFEST
from sdpo_jax.training.resuming import UNFINISHED

TINY = {
  'data.val_max_samples': 8,
  'rollout.max_batch_rows': 16,
  'trainer.save_freq': 1,
  'trainer.test_freq': 3,
  'trainer.rollout_save_freq': 1,
  'trainer.max_ckpt_to_keep': 1,
}
BATCH = {
  'data.train_batch_size': 4,
  'rollout.n': 4,
  'actor.ppo_mini_batch_size': 4,
  'actor.ppo_micro_batch_size': 16,
}
SD = 'actor.self_distillation.'
FEEDBACK = {
  f'{SD}feedback_max_prompt_len': 64,
  f'{SD}feedback_prompt_template': '{prompt} {attempt} {output}',
  f'{SD}environment_feedback_only_without_solution': False,
}
# Variant → config, and settings; {server} is the address of a server that answers the same to the same question.
VARIANTS = {
  'full': ('quickstart', BATCH),
  'lora': ('quickstart_lora', BATCH),
  'cartridge': (
    'cartridge_quickstart',
    {'data.train_batch_size': 16, 'actor.ppo_mini_batch_size': 16, 'actor.ppo_micro_batch_size': 16},
  ),
  'steps_off_1': ('quickstart', BATCH | {'rollout.steps_off': 1}),
  'carries': ('quickstart', BATCH | {'rollout.max_staleness': 2, 'rollout.max_batch_rows': 8}),
  'carries_kept': (
    'quickstart',
    BATCH | {'rollout.max_staleness': 3, 'rollout.max_batch_rows': 8, 'rollout.carried_cache': 'kept'},
  ),
  'steps_off_2': ('quickstart_lora', BATCH | {'rollout.steps_off': 2}),
  'ppo_epochs': ('quickstart', BATCH | {'actor.ppo_epochs': 2, 'actor.ppo_mini_batch_size': 2}),
  'self_feedback': ('quickstart', BATCH | FEEDBACK | {f'{SD}feedback_model': 'self', f'{SD}feedback_max_tokens': 8}),
  'endpoint_feedback': (
    'quickstart',
    BATCH
    | FEEDBACK
    | {
      f'{SD}feedback_model': 'endpoint',
      f'{SD}feedback_endpoint.url': '{server}/v1',
      f'{SD}feedback_endpoint.model': 'critic',
    },
  ),
  'waiting_examples': ('quickstart', BATCH | {'algorithm.min_sdpo_examples': 14, f'{SD}teach_successes': False}),
  'http_grader': (
    'quickstart',
    BATCH
    | {
      'data.train_files': '{rows}',
      'data.val_files': '{rows}',
      'data.environment': 'http',
      'environments.http.url': '{server}/grade',
    },
  ),
}
MOST_S = 120.0  # Seconds within which a process ends after SIGTERM.


class Handler(http.server.BaseHTTPRequestHandler):
  """A grader and a critic, whose answers are functions of what they are asked."""

  protocol_version = 'HTTP/1.1'

  def do_POST(self) -> None:
    asked = json.loads(self.rfile.read(int(self.headers['Content-Length'])))
    if self.path == '/grade':
      odd = sum(asked['completion'].encode()) % 2
      answer: object = {'score': float(odd), 'feedback': None if odd else 'The sum must be odd.'}
    else:
      number = int(hashlib.sha256(json.dumps(asked['messages']).encode()).hexdigest()[:4], 16)
      answer = {'choices': [{'message': {'content': f'Write {number:05d}.'}, 'finish_reason': 'stop'}]}
    body = json.dumps(answer).encode()
    self.send_response(200)
    self.send_header('Content-Type', 'application/json')
    self.send_header('Content-Length', str(len(body)))
    self.end_headers()
    self.wfile.write(body)

  def log_message(self, *_: object) -> None:
    pass


def serve() -> tuple[int, str]:
  """Start the server in a fork; return its process id and address."""
  server = http.server.ThreadingHTTPServer(('127.0.0.1', 0), Handler)
  server.daemon_threads = True
  child = os.fork()
  if child == 0:
    try:
      server.serve_forever()
    finally:
      os._exit(1)
  server.server_close()
  return child, f'http://127.0.0.1:{server.server_address[1]}'


def write_rows(path: pathlib.Path) -> None:
  """Write questions without a grader of their own."""
  rng = random.Random(0)
  questions = [f'Reverse the digits: {rng.randrange(10**5):05d}' for _ in range(64)]
  path.write_text(''.join(json.dumps({'prompt': question}) + '\n' for question in questions))


@dataclasses.dataclass(frozen=True)
class Variant:
  """The command of a variant, without --workdir."""

  config: str
  settings: dict[str, object]
  steps: int

  def flags(self, workdir: pathlib.Path) -> list[str]:
    settings = TINY | self.settings | {'trainer.total_training_steps': self.steps}
    flags = [f'--config.{name}={value}' for name, value in settings.items()]
    return ['launch/train.py', f'--config=configs/{self.config}.py', f'--workdir={workdir}', *flags]


def start(variant: Variant, workdir: pathlib.Path, programs: pathlib.Path) -> int:
  """Start or resume a run in a fork of this process, which has not started JAX; return the process id."""
  child = os.fork()
  if child == 0:
    code: object = 1
    try:
      log = os.open(log_of(workdir), os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
      os.dup2(log, 1)
      os.dup2(log, 2)
      os.environ['JAX_COMPILATION_CACHE_DIR'] = str(programs)
      import jax  # Read the variable before; nothing of JAX has started.

      jax.config.update('jax_compilation_cache_dir', str(programs))
      sys.argv = variant.flags(workdir)
      runpy.run_module('launch.train', run_name='__main__', alter_sys=True)
    except SystemExit as end:
      code = end.code or 0
    except BaseException:
      traceback.print_exc()
    finally:
      sys.stdout.flush()
      sys.stderr.flush()
      os._exit(code if isinstance(code, int) else 1)
  return child


def log_of(workdir: pathlib.Path) -> pathlib.Path:
  """Return the log file of a run's last process."""
  return workdir.with_suffix('.log')


def await_end(process: int, seconds: float) -> int | None:
  """Return the exit code of a process (-N: signal N); None if it runs for longer than `seconds`."""
  deadline = time.monotonic() + seconds
  while True:
    ended, status = os.waitpid(process, os.WNOHANG)
    if ended:
      return os.waitstatus_to_exitcode(status)
    if time.monotonic() >= deadline:
      return None
    time.sleep(0.002)


def await_step(process: int, workdir: pathlib.Path, before: int) -> int | None:
  """Wait until a process has written a line more than `before`; return its exit code if it ends before."""
  code = None
  while code is None and written(workdir) <= before:
    code = await_end(process, 0.005)
  return code


def written(workdir: pathlib.Path) -> int:
  """Return the number of lines of metrics.jsonl."""
  path = workdir / 'metrics.jsonl'
  return path.read_bytes().count(b'\n') if path.exists() else 0


def left(workdir: pathlib.Path, last: int) -> dict[str, object]:
  """Return a finished run's results, without what differs between any two runs: times, and who wrote it."""

  def kept(name: str) -> bool:
    return name not in ('fencing_epoch', 'line_digest') and not name.startswith(('time/', 'throughput/', 'programs/'))

  lines = [json.loads(line) for line in read_text(workdir / 'metrics.jsonl', '').splitlines()]
  checkpoint = workdir / 'checkpoints' / str(last)
  manifest, host = (json.loads((checkpoint / name).read_text()) for name in (MANIFEST, 'host/metadata'))
  files = [path for folder in ('rollouts', 'eval') for path in sorted((workdir / folder).iterdir())]
  return {
    'lines': [{name: value for name, value in line.items() if kept(name)} for line in lines],
    'state': manifest['leaves'],
    'host': {name: value for name, value in host.items() if name != UNFINISHED},  # A line that was written later.
    **{f'{path.parent.name}/{path.name}': path.read_text() for path in files},
  }


def phase(workdir: pathlib.Path, before: int) -> str:
  """Return the phase in which a process got its signal, judging by its files."""
  folder = workdir / 'checkpoints'
  names = [path.name for path in folder.iterdir()] if folder.is_dir() else []
  if any('.unfinished' in name for name in names):
    return 'while a checkpoint is written'
  if any('.deleted' in name for name in names):
    return 'while a checkpoint is removed'
  return 'between steps' if written(workdir) > before else 'before its first step'


@dataclasses.dataclass
class Campaign:
  """The signals to the runs of one variant, and what came of them."""

  variant: Variant
  folder: pathlib.Path
  rng: random.Random
  left: list[signal.Signals]  # Those to come, in random order.
  programs: pathlib.Path = dataclasses.field(init=False)
  cold: float = dataclasses.field(init=False)  # Seconds until the first line of a process that compiles,
  life: float = dataclasses.field(init=False)  # of the whole life of one that does not,
  stepping: float = dataclasses.field(init=False)  # and of its life after its first line.
  runs: int = 0
  moments: collections.Counter = dataclasses.field(default_factory=collections.Counter)
  codes: collections.Counter = dataclasses.field(default_factory=collections.Counter)
  wrong: list[str] = dataclasses.field(default_factory=list)

  def undisturbed(self) -> dict[str, object]:
    """Run to the end twice, the second time with compiled programs; take the times and return what is left."""
    self.programs = self.folder / 'programs'
    for name in ('cold', 'warm'):
      workdir, began = self.folder / name, time.monotonic()
      process = start(self.variant, workdir, self.programs)
      code, first = await_step(process, workdir, 0), time.monotonic()
      code = await_end(process, math.inf) if code is None else code
      if code != 0:
        raise SystemExit(f'The undisturbed run ended with exit code {code}: {log_of(workdir).read_text()}')
      if name == 'cold':
        self.cold = first - began
    self.life, self.stepping = time.monotonic() - began, time.monotonic() - first
    return left(workdir, self.variant.steps)

  def one_run(self, expected: dict[str, object]) -> None:
    """Run to the end with as many signals as its processes get, and compare it with what is expected."""
    workdir, compiles = self.folder / f'run_{self.runs}', self.rng.random() < 0.2
    programs = self.folder / f'programs_{self.runs}' if compiles else self.programs
    self.runs += 1
    code, disturbed = self.one_life(workdir, programs, self.cold if compiles else None)
    while disturbed:
      code, disturbed = self.one_life(workdir, programs, None)
    if code != 0:
      self.wrong.append(f'run {self.runs} ended with exit code {code}: {log_of(workdir).read_text()[-2000:]}')
      return
    found = left(workdir, self.variant.steps)
    for key in expected | found:
      if expected.get(key) != found.get(key):
        self.wrong.append(f'run {self.runs}: {key}: {found.get(key)} instead of {expected.get(key)}'[:2000])

  def one_life(self, workdir: pathlib.Path, programs: pathlib.Path, compiling: float | None) -> tuple[int, bool]:
    """Start a process, and send it a signal if there are signals to come.

    Args:
      workdir: the run.
      programs: folder of compiled programs.
      compiling: seconds until the first step of a process that compiles; None: the signal comes anywhere.

    Returns:
      The exit code, and whether the process ended by the signal.
    """
    before, code = written(workdir), None
    process = start(self.variant, workdir, programs)
    if not self.left:
      return await_end(process, math.inf) or 0, False
    if compiling is not None:
      delay = self.rng.uniform(0, compiling)
    elif self.rng.random() < 0.5:
      code = await_step(process, workdir, before)
      delay = self.rng.uniform(0, self.stepping * max(self.variant.steps - before, 1) / self.variant.steps)
    else:
      delay = self.rng.uniform(0, self.life)
    code = await_end(process, delay) if code is None else code
    if code is not None:
      return code, False
    number, at = self.left[-1], phase(workdir, before)
    at = at if compiling is None else at.replace('before its first step', 'while it compiles')
    os.kill(process, number)
    if number == signal.SIGTERM and self.rng.random() < 1 / 3:
      code, at = await_end(process, self.rng.uniform(0, 0.5)), f'{at}, twice'
      if code is None:
        os.kill(process, number)
    code = await_end(process, MOST_S) if code is None else code
    name = signal.Signals(number).name
    if code is None:
      self.wrong.append(f'run {self.runs} still went on {MOST_S:.0f} s after {name}')
      os.kill(process, signal.SIGKILL)
      code = await_end(process, math.inf)
    if code == 0:  # It was about to end.
      return 0, False
    self.left.pop()
    self.moments[f'{name} {at}'] += 1
    if number == signal.SIGTERM:
      self.codes[code] += 1
    if code not in (-signal.SIGKILL, -signal.SIGTERM, 130, 143):
      self.wrong.append(f'exit code {code} after {name}: {log_of(workdir).read_text()[-2000:]}')
    return code, True


def campaign(name: str, flags: argparse.Namespace, folder: pathlib.Path, server: str) -> bool:
  """Send all signals to runs of a variant, and print what came of them; return whether nothing went wrong."""
  config, settings = VARIANTS[name]
  rows = folder / 'rows.jsonl'
  folder.mkdir()
  write_rows(rows)
  settings = {
    key: str(value).replace('{server}', server).replace('{rows}', str(rows)) for key, value in settings.items()
  }
  rng = random.Random(f'{flags.seed} {name}')
  signals = [signal.SIGKILL] * flags.kills + [signal.SIGTERM] * flags.terms
  rng.shuffle(signals)
  began, run = time.monotonic(), Campaign(Variant(config, settings, flags.steps), folder, rng, signals)
  expected = run.undisturbed()
  while run.left:
    run.one_run(expected)
    wrong = run.wrong or 'no differences'
    print(f'{name}: {run.runs} runs, {len(run.left)} signals to come, {wrong}', file=sys.stderr, flush=True)
  numbers = {'kills': flags.kills, 'stops': flags.terms, 'runs': run.runs, 'seconds': round(time.monotonic() - began)}
  codes = {str(code): count for code, count in sorted(run.codes.items())}
  found = {'moments': dict(sorted(run.moments.items())), 'codes_after_sigterm': codes, 'differences': run.wrong}
  print(json.dumps({'variant': name, **numbers, **found}), flush=True)
  return not run.wrong


def main() -> int:
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument('--variants', default=','.join(VARIANTS), help='which, comma-separated')
  parser.add_argument('--kills', type=int, default=25, help='how many SIGKILLs of each variant')
  parser.add_argument('--terms', type=int, default=10, help='how many SIGTERMs of each variant')
  parser.add_argument('--seed', type=int, default=0, help='of the moments')
  parser.add_argument('--steps', type=int, default=8, help='of a run, each with a checkpoint')
  flags = parser.parse_args()
  names = flags.variants.split(',')
  if unknown := set(names) - VARIANTS.keys():
    parser.error(f'--variants: {", ".join(sorted(unknown))}: these are {", ".join(VARIANTS)}')
  os.environ['JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS'] = '0'
  server, url = serve()
  gc.collect()
  gc.freeze()
  try:
    with tempfile.TemporaryDirectory() as scratch:
      right = [campaign(name, flags, pathlib.Path(scratch) / name, url) for name in names]
  finally:
    os.kill(server, signal.SIGKILL)
  return 0 if all(right) else 1


if __name__ == '__main__':
  sys.exit(main())
