"""What all commands share: reading `--config` with its overrides, and ending with one sentence on bad input."""

from __future__ import annotations

from collections.abc import Callable, Sequence
import errno
import importlib.util
import inspect
import logging
import os
import pathlib
import re
import sys
from typing import Any

os.environ.setdefault('TRANSFORMERS_NO_ADVISORY_WARNINGS', '1')  # It would advise to install PyTorch.

from absl import app, flags
from absl import logging as absl_logging
import jax

from sdpo_jax.config import Config, describe, override
from sdpo_jax.errors import UserError

EXIT_BAD_INPUT = 2
_OVERRIDE = re.compile(r'--?config\.([A-Za-z0-9_.]+)(?:=(.*))?', re.DOTALL)
_overrides: list[tuple[str, str]] = []


flags.DEFINE_bool('help_settings', False, 'Print every setting of a config with its default and meaning, and end.')


def define_config() -> None:
  """Defines `--config`, which the command then needs."""
  flags.DEFINE_string(
    'config',
    None,
    'Python file with get_config(); FILE.py:name=value,name=value hands it arguments. Change one setting of it with '
    '--config.section.name=value.',
  )
  flags.mark_flag_as_required('config')


def define_cluster() -> None:
  """Defines the flags that join several processes to one run."""
  flags.DEFINE_string('coordinator_address', None, 'host:port of process 0 of a run of several processes.')
  flags.DEFINE_integer('num_processes', None, 'How many processes the run has.', lower_bound=1)
  flags.DEFINE_integer('process_id', None, 'Which of them this one is.', lower_bound=0)


def join_cluster() -> None:
  """Joins the run's other processes: as the flags say, or on a Cloud TPU slice of several hosts by itself.

  Raises:
    UserError: only some of the three flags are given.
  """
  values = [flags.FLAGS.coordinator_address, flags.FLAGS.num_processes, flags.FLAGS.process_id]
  if all(value is not None for value in values):
    jax.distributed.initialize(*values)
  elif any(value is not None for value in values):
    raise UserError('--coordinator_address, --num_processes and --process_id go together: give all three or none.')
  elif importlib.util.find_spec('libtpu') is not None and os.environ.get('JAX_PLATFORMS', 'tpu').startswith('tpu'):
    try:
      jax.distributed.initialize()  # Finds the slice's other hosts by itself.
    except (RuntimeError, ValueError) as error:
      print(f'No TPU slice found ({str(error).splitlines()[0]}); running as one process.', file=sys.stderr)


def load_config() -> Config:
  """The configuration named on the command line, with its overrides, validated.

  Raises:
    UserError: no such file, no get_config() in it, arguments that it does not take, or a setting that is unknown or
      wrong.
  """
  path, arguments = _file_and_arguments(flags.FLAGS.config)
  if not path.is_file():
    raise UserError(f'--config={path}: there is no such file; the ones that come along are in configs/.')
  spec = importlib.util.spec_from_file_location(f'config_{path.stem}', path)
  if spec is None or spec.loader is None:
    raise UserError(f'--config={path} is not a Python file.')
  module = importlib.util.module_from_spec(spec)
  try:
    spec.loader.exec_module(module)
  except SyntaxError as error:
    raise UserError(f'--config={path} is not valid Python: {error}.') from error
  if not hasattr(module, 'get_config'):
    raise UserError(f'--config={path} has no function get_config(); see configs/quickstart.py for an example.')
  try:
    inspect.signature(module.get_config).bind(**arguments)
  except TypeError as error:
    raise UserError(
      f'--config={flags.FLAGS.config}: {error}; it takes {", ".join(inspect.signature(module.get_config).parameters) or "no arguments"}.'
    ) from error
  config = module.get_config(**arguments)
  if not isinstance(config, Config):
    raise UserError(f'get_config() of {path} returns {type(config).__name__}, not sdpo_jax.config.Config.')
  for name, text in _overrides:
    override(config, name, text)
  return config.validate()


def _file_and_arguments(text: str) -> tuple[pathlib.Path, dict[str, str]]:
  """'FILE.py:name=value,…' as the file and the arguments of its get_config()."""
  path, marked, rest = text.partition('.py:')
  if not marked:
    return pathlib.Path(text), {}
  pairs = [part.partition('=') for part in rest.split(',') if part]
  wrong = [name for name, equals, _ in pairs if not equals]
  if wrong:
    raise UserError(f'--config={text}: {wrong[0]!r} is not name=value.')
  return pathlib.Path(f'{path}.py'), {name: value for name, _, value in pairs}


def _parse(arguments: Sequence[str]) -> list[str]:
  """absl's parser, after taking the overrides out."""
  rest, waiting = [], list(arguments)
  while waiting:
    argument = waiting.pop(0)
    match = _OVERRIDE.fullmatch(argument)
    if match is None:
      rest.append(argument)
      continue
    value = match.group(2)
    if value is None:
      if not waiting:
        raise SystemExit(_complain(f'{argument} has no value: write {argument}=VALUE.'))
      value = waiting.pop(0)
    _overrides.append((match.group(1), value))
  if _overrides and 'config' not in flags.FLAGS:
    raise SystemExit(_complain(f'--config.{_overrides[0][0]}: this command has no --config (--help lists its flags).'))
  if '--help_settings' in rest or '--helpsettings' in rest:
    print(settings_help())
    raise SystemExit(0)
  try:
    left = flags.FLAGS(rest)
  except flags.Error as error:
    sentence = ' '.join(str(error).split())
    missing = re.search(r'Flag --(\w+) must have a value', sentence)
    if missing:
      sentence = f'--{missing.group(1)}=… is required'
    raise SystemExit(_complain(f'{sentence} (--help lists the flags).')) from error
  if len(left) > 1:
    raise SystemExit(
      _complain(f'{" ".join(left[1:])!r} is not a flag; flags are written --name=value (--help lists them).')
    )
  return left


def overrides() -> list[tuple[str, str]]:
  """(setting, text) of every --config.setting=text on the command line."""
  return list(_overrides)


def settings_help() -> str:
  """All settings with defaults and documentation."""
  return '\n'.join(f'--config.{name}={value!r}\n      {doc}' for name, value, doc in describe(Config()))


def _complain(sentence: str) -> int:
  print(sentence, file=sys.stderr)
  return EXIT_BAD_INPUT


def run(main: Callable[[], int | None]) -> None:
  """Runs a command: `main` returns the exit code (None is 0); a UserError ends it with its sentence and code 2."""

  def wrapped(_: Any) -> int:
    _quiet()
    _compilation_cache()
    try:
      return main() or 0
    except UserError as error:
      return _complain(str(error))
    except OSError as error:
      if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        raise
      return _complain(f'Writing failed ({error}): make room and start the same command again; it resumes.')

  for name in (
    'config',
    'help_settings',
    'coordinator_address',
    'num_processes',
    'process_id',
  ):  # Shown by --help beside the command's own.
    if name in flags.FLAGS:
      flags.FLAGS.register_key_flag_for_module(sys.argv[0], flags.FLAGS[name])
  app.run(wrapped, flags_parser=_parse)


def _quiet() -> None:
  """Libraries' progress chatter stays out of the way of ours; their errors do not."""
  absl_logging.set_verbosity(absl_logging.FATAL)  # Orbax reports through absl what we report as a sentence.
  for name in ('orbax', 'asyncio'):
    logging.getLogger(name).setLevel(logging.CRITICAL)
  for name in ('jax._src.compilation_cache', 'transformers', 'jax._src.compiler'):
    logging.getLogger(name).setLevel(logging.ERROR)
  logging.getLogger('sdpo_jax').setLevel(logging.WARNING)


def _compilation_cache() -> None:
  """A second start compiles nothing: programs are kept in JAX_COMPILATION_CACHE_DIR or ~/.cache/sdpo_jax."""
  if 'JAX_COMPILATION_CACHE_DIR' not in os.environ:
    jax.config.update('jax_compilation_cache_dir', str(pathlib.Path.home() / '.cache' / 'sdpo_jax' / 'programs'))
  jax.config.update('jax_persistent_cache_min_compile_time_secs', 0.3)
