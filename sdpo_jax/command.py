"""Shared code of all commands: `--config` with overrides, cluster flags, and error messages of one sentence."""

from __future__ import annotations

from collections.abc import Callable, Sequence
import dataclasses
import importlib.util
import logging
import os
import pathlib
import re
import select
import signal
import sys
import traceback
from typing import Any, TypeVar
import warnings

from absl import app, flags
from absl import logging as absl_logging

from sdpo_jax.command_lines import as_typed
from sdpo_jax.config import Config, LoraConfig
from sdpo_jax.config import config_files as config_files
from sdpo_jax.config.fields import did_you_mean
from sdpo_jax.config.help import settings_help
from sdpo_jax.config.schema import BESIDE_SLOTS
from sdpo_jax.distributed import cluster
from sdpo_jax.errors import UserError, first_line, printable
from sdpo_jax.files import is_failing, is_full

EXIT_BAD_INPUT = cluster.EXIT_BAD_INPUT
EXIT_INTERRUPTED = 130  # 128 + SIGINT.
EXIT_NOT_READ = 141  # 128 + SIGPIPE, as a shell reports for a command in front of `| head`.
_OVERRIDE = re.compile(r'--?config\.([A-Za-z0-9_.]+)(?:=(.*))?', re.DOTALL)
_HELP_SETTINGS = re.compile(r'--?help_?settings(?:=(.*))?', re.DOTALL)
_overrides: list[tuple[str, str]] = []
_lists: set[str] = set()  # Flags of `define_list`.
_words: list[str] = []  # The flag of `define_words`.
Options = TypeVar('Options')


flags.DEFINE_string(
  'help_settings',
  None,
  'Print the settings of a config with default, type, allowed values and meaning, and end: --help_settings all of '
  'them, --help_settings=trainer those of a section, --help_settings=teacher those that mention a word.',
)


def define_config() -> None:
  """Define the required flag `--config`."""
  flags.DEFINE_string(
    'config',
    None,
    'Python file with get_config(); FILE.py:name=value,name=value hands it arguments. Change one setting of it with '
    '--config.section.name=value.',
  )
  flags.mark_flag_as_required('config')


def define_adapter(what: str) -> None:
  """Define `--adapter`, with which `load_config` replaces the config's adapter; its help ends with `what`."""
  flags.DEFINE_string(
    'adapter', None, f'LoRA adapter, as PEFT or launch.export writes it: a directory or a name on the hub. {what}'
  )


def define_cartridge(what: str) -> None:
  """Define `--cartridge`, with which `load_config` replaces the config's cartridge; its help ends with `what`."""
  flags.DEFINE_string(
    'cartridge', None, f'Cartridge: a directory, local or gs://…, a published .pt file, or a name on the hub. {what}'
  )


def define_positions() -> None:
  """Define `--positions`, of the slots of several cartridges."""
  flags.DEFINE_enum(
    'positions',
    'overlap',
    ['overlap', 'sequential'],
    'With --cartridge=A,B: the slots of each keep their positions, or come after those of the one before.',
  )


def define_list(name: str, meaning: str) -> flags.FlagHolder[list[str]]:
  """Define a flag with several values, `--name=A --name=B` or `--name A B`, as a shell expands `--name runs/*`."""
  _lists.add(name)
  return flags.DEFINE_multi_string(name, [], meaning)


def define_words(name: str, meaning: str) -> flags.FlagHolder[list[str]]:
  """Define a list whose values are the words that belong to no flag, `sdpo compare A B`, or follow `--name`."""
  _words.append(name)
  flags.FLAGS.set_gnu_getopt(True)  # Flags may follow words.
  return define_list(name, meaning)


def define_cluster() -> None:
  """Define the flags that join several processes to one run."""
  flags.DEFINE_string('coordinator_address', None, 'host:port of process 0 of a run of several processes.')
  flags.DEFINE_integer('num_processes', None, 'Number of processes of the run.', lower_bound=1)
  flags.DEFINE_integer('process_id', None, 'Index of this process, from 0.', lower_bound=0)
  timeouts = cluster.Timeouts()
  flags.DEFINE_float('join_timeout_s', timeouts.join, 'Seconds within which all processes must start.', 1.0)
  flags.DEFINE_float(
    'heartbeat_timeout_s', timeouts.heartbeat, 'Seconds without a heartbeat after which a process counts as lost.', 0.1
  )
  flags.DEFINE_float(
    'straggler_timeout_s', timeouts.barrier, 'Seconds that processes wait at a barrier for the last one.', 0.1
  )


def join_cluster() -> None:
  """Join the run's other processes, as the flags say or, on a Cloud TPU slice of several hosts, automatically.

  Raises:
    UserError: only some of the three flags are given, or they contradict each other or those of another process, or
      JAX has no device of the requested platform.
    cluster.ProcessLost: not all processes started in time.
  """
  import jax

  from sdpo_jax.distributed import accelerators

  values = flags.FLAGS
  given = [values.coordinator_address, values.num_processes, values.process_id]
  timeouts = cluster.Timeouts(values.join_timeout_s, values.heartbeat_timeout_s, values.straggler_timeout_s)
  if all(value is not None for value in given):
    if values.process_id >= values.num_processes:
      raise UserError(f'--process_id={values.process_id} must be below --num_processes={values.num_processes}.')
    cluster.join(cluster.ProcessPlace(*given), timeouts)
  elif any(value is not None for value in given):
    raise UserError('--coordinator_address, --num_processes and --process_id go together: give all three or none.')
  elif importlib.util.find_spec('libtpu') is not None and os.environ.get('JAX_PLATFORMS', 'tpu').startswith('tpu'):
    place = cluster.slice_place(timeouts.join)
    if place is not None:
      cluster.join(place, timeouts)
  accelerators.devices()  # Raises now, before the data is read, if there are none.
  if cluster.joined() and jax.default_backend() == 'cpu':
    # Programs from the cache mix up the order of their collectives over gloo, which aborts (jaxlib 0.10.2).
    jax.config.update('jax_enable_compilation_cache', False)


def load_config(*, trains: bool = True) -> Config:
  """Return the validated configuration that the command line names, with its overrides.

  Args:
    trains: whether the command needs the data of a run. Then modules of the working directory can be imported, after
      those of installed packages.

  Raises:
    UserError: no such file, no get_config() in it, arguments that it does not take, or a setting that is unknown or
      wrong.
  """
  if trains:
    config_files.make_importable(pathlib.Path.cwd())
  config = config_files.read(flags.FLAGS.config, overrides())
  for flag, own in (('adapter', 'rank, alpha and matrices of the adapter'), ('cartridge', 'the slots of a cartridge')):
    if flag in flags.FLAGS and getattr(flags.FLAGS, flag) is not None:  # Commands that start from one have the flag.
      _start_from(config, flag, getattr(flags.FLAGS, flag), own)
  return config.validate(trains=trains)


def _start_from(config: Config, flag: str, path: str, own: str) -> None:
  """Replace a config's adapter or cartridge settings by a given adapter or cartridge.

  Args:
    config: settings, changed in place.
    flag: 'adapter' or 'cartridge'.
    path: value of the flag.
    own: what the adapter or cartridge determines and the config cannot set, for the error message.
  """
  if not path:
    where = (
      'a directory or an adapter on the hub' if flag == 'adapter' else 'a directory, a .pt file or a name on the hub'
    )
    raise UserError(f'--{flag} is empty: name {where}, or leave it out.')
  section = {'adapter': 'model.lora.', 'cartridge': 'model.cartridge.'}[flag]
  for name, text in overrides():
    if name.startswith(section) and name.removeprefix(section) not in BESIDE_SLOTS:
      raise UserError(f'--config.{name}={text} has no effect with --{flag}={path}, which determines {own}: omit one.')
  if flag == 'adapter':
    config.model.lora = LoraConfig(path=path)
  else:
    config.model.cartridge = config.model.cartridge.starting_from(path)


def parse(arguments: Sequence[str]) -> list[str]:
  """Parse a command line with absl, after taking the `--config.…` overrides out; return the remaining arguments."""
  rest, waiting = [], list(arguments)
  while waiting:
    argument = waiting.pop(0)
    match = _OVERRIDE.fullmatch(argument)
    if match is None:
      rest += _each_named(argument, waiting)
      continue
    value = match.group(2)
    if value is None:
      if not waiting:
        raise SystemExit(_complain(f'{argument} has no value: write {argument}=VALUE.'))
      value = waiting.pop(0)
    _overrides.append((match.group(1), value))
  if _overrides and 'config' not in flags.FLAGS:
    raise SystemExit(_complain(f'--config.{_overrides[0][0]}: this command has no --config (--help lists its flags).'))
  try:
    for argument in rest:
      if match := _HELP_SETTINGS.fullmatch(argument):
        print(as_typed(settings_help(Config(), match.group(1) or '')), flush=True)
        raise SystemExit(0)
    left = flags.FLAGS(['--help' if argument == '-h' else argument for argument in rest])
  except UserError as error:
    raise SystemExit(_complain(str(error))) from error
  except SystemExit as error:  # After --help and similar flags, for which absl exits with 1.
    raise SystemExit(0) from error
  except BrokenPipeError as error:
    raise SystemExit(_not_read()) from error
  except flags.Error as error:
    sentence = ' '.join(str(error).split())
    missing = re.search(r'Flag --(\w+) must have a value', sentence)
    if missing:
      alone = f'; {rest[1]!r} belongs to no flag' if rest[1:] and not rest[1].startswith('-') else ''
      sentence = f'--{missing.group(1)}=… is required{alone}'
    if fixed := re.search(r'=(\S*): value should be one of <(.*)>', sentence):
      sentence += did_you_mean(fixed[1], fixed[2].split('|')).rstrip('.')
    raise SystemExit(_complain(f'{sentence} (--help lists the flags).')) from error
  if _words:
    flags.FLAGS[_words[0]].value = [*flags.FLAGS[_words[0]].value, *left[1:]]
    left = left[:1]
  if len(left) > 1:
    raise SystemExit(
      _complain(f'{" ".join(left[1:])!r} is not a flag; flags are written --name=value (--help lists them).')
    )
  return left


def _each_named(argument: str, waiting: list[str]) -> list[str]:
  """Return [argument]; for a `define_list` flag, --name=VALUE for each value that follows, taken from `waiting`."""
  name = argument.lstrip('-')
  if not argument.startswith('-') or name not in _lists:
    return [argument]
  values = []
  while waiting and not waiting[0].startswith('-'):
    values.append(f'--{name}={waiting.pop(0)}')
  return values or [argument]


def overrides() -> list[tuple[str, str]]:
  """Return (setting, text) of every --config.setting=text on the command line."""
  return list(_overrides)


def from_flags(kind: type[Options], **others: Any) -> Options:
  """Return a dataclass whose fields have the values of the flags of the same names, except for the `others`."""
  names = {field.name for field in dataclasses.fields(kind)} - others.keys()
  return kind(**{name: flags.FLAGS[name].value for name in names}, **others)


def announce(text: str) -> None:
  """Print a message for the user to stderr and flush; stdout is for the command's output."""
  print(text, file=sys.stderr, flush=True)


def _complain(sentence: str) -> int:
  print(printable(as_typed(sentence), None, keep='\n'), file=sys.stderr)  # It may quote any file.
  return EXIT_BAD_INPUT


def _reader_is_gone() -> bool:
  poll = select.poll()
  poll.register(sys.stdout.fileno(), 0)  # Errors are reported in any case.
  return any(events & select.POLLERR for _, events in poll.poll(0))


def _not_read() -> int:
  """Discard further output, since its reader, such as `head`, is gone; return the exit code for that case."""
  nowhere = os.open(os.devnull, os.O_WRONLY)
  os.dup2(nowhere, sys.stdout.fileno())  # Or Python would complain at its end.
  os.close(nowhere)
  return EXIT_NOT_READ


def run(main: Callable[[], int | None]) -> None:
  """Run a command: `main` returns the exit code (None is 0); a UserError prints its sentence and exits with 2.

  In a run of several processes, one that fails ends all others; if one is lost, the others exit with cluster.EXIT_LOST.
  """

  def wrapped(_: Any) -> int:
    from sdpo_jax.distributed import accelerators  # Late, as in `main`, so that `--help` does not wait for JAX.

    _quiet()
    accelerators.prepare()
    try:
      code = main() or 0
      sys.stdout.flush()
      cluster.finish()
      return code
    except cluster.ProcessLost as error:
      print(error, file=sys.stderr)
      return cluster.EXIT_LOST
    except KeyboardInterrupt:
      cluster.fail(EXIT_INTERRUPTED, 'Interrupted.')
      print('\nInterrupted.', file=sys.stderr)
      return EXIT_INTERRUPTED
    except Exception as error:
      if isinstance(error, BrokenPipeError) and _reader_is_gone():
        cluster.fail(EXIT_NOT_READ, 'Nothing reads the output any more.')
        return _not_read()
      cluster.await_verdict(error)
      sentence = sentence_of(error)
      if sentence is None:
        if cluster.joined():
          traceback.print_exc()
          cluster.fail(cluster.EXIT_ERROR, f'{type(error).__name__}: {first_line(error)} (its log has the traceback).')
        raise
      cluster.fail(EXIT_BAD_INPUT, sentence)
      return _complain(sentence)
    finally:
      signal.signal(signal.SIGINT, signal.SIG_DFL)  # From here Ctrl-C ends the process without a traceback.

  for module in {__name__, main.__module__} - {'__main__'}:  # --help shows the flags of both.
    for flag in flags.FLAGS.flags_by_module_dict().get(module, ()):
      flags.FLAGS.register_key_flag_for_module(sys.argv[0], flag)
  for flag in flags.FLAGS:
    flags.FLAGS[flag].help = as_typed(flags.FLAGS[flag].help or '')
  sys.modules['__main__'].__doc__ = as_typed(sys.modules[main.__module__].__doc__ or '')
  app.run(wrapped, flags_parser=parse)


def sentence_of(error: Exception) -> str | None:
  """Return the message of an error that the user can fix; None for other errors."""
  if isinstance(error, UserError):
    return str(error)
  if is_full(error):
    return f'Writing failed ({error}): make room, then start the same command again.'
  if is_failing(error):
    return f'A file system failed ({error}): see that it works, then start the same command again.'
  return None


class _Plain(logging.Formatter):
  """Escapes what would control a terminal: warnings quote rows, and graders log what they like."""

  def format(self, record: logging.LogRecord) -> str:
    return printable(super().format(record), None, keep='\n')


def _quiet() -> None:
  """Silence the progress messages of libraries, but not their errors, nor warnings of this project and of graders."""
  absl_logging.set_verbosity(absl_logging.WARNING)  # Of the root logger, as which graders may log.
  absl_logging.get_absl_handler().setFormatter(_Plain('%(levelname)s: %(message)s'))
  for name in ('absl', 'orbax', 'asyncio'):  # Orbax reports through absl what we report as a sentence.
    logging.getLogger(name).setLevel(logging.CRITICAL)
  for name in ('jax', 'transformers', 'huggingface_hub'):
    logging.getLogger(name).setLevel(logging.ERROR)
  logging.getLogger('sdpo_jax').setLevel(logging.WARNING)
  # Raised for writes that had not begun when another write failed; see `without_late_writers`.
  warnings.filterwarnings('ignore', "coroutine 'async_serialize", RuntimeWarning)
  sys.unraisablehook = without_late_writers(sys.unraisablehook)


def without_late_writers(hook: Callable[[Any], None]) -> Callable[[Any], None]:
  """Return an unraisablehook that ignores what TensorStore's threads report after a checkpoint write has failed.

  Orbax closes its event loop when the first array cannot be written. Writes that are still under way end later and each
  calls back into the closed loop; the user is shown the error of the first one.
  """

  def filtered(unraisable: Any) -> None:
    error = unraisable.exc_value
    if not (isinstance(error, RuntimeError) and str(error) == 'Event loop is closed' and unraisable.object is None):
      hook(unraisable)

  return filtered
