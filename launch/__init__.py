"""The commands: `python -m launch.NAME` in a checkout, `sdpo NAME` once installed."""

import os
import sys


def _is_here(folder: str) -> bool:
  try:
    return os.path.samestat(os.stat(folder or '.'), os.stat('.'))
  except OSError:
    return False


# A command must not run an `absl.py` that lies where it is started, such as in the workspace of an agent. So that comes
# before other imports; `command.load_config` lets graders and the like be imported from there, after what is installed.
if sys.argv[0] == '-m' or os.path.basename(sys.argv[0]) == 'sdpo':
  if not _is_here(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))):  # In a checkout, its folder is needed.
    sys.path[:] = [folder for folder in sys.path if not _is_here(folder)]

# ruff: isort: split
# ruff: noqa: E402

import ast
import importlib
import pathlib
import signal


def main() -> None:
  """Run the console script `sdpo NAME …`, that is, the module NAME beside this file."""
  files = {path.stem: path for path in sorted(pathlib.Path(__file__).parent.glob('[a-z]*.py'))}
  script, name, *arguments = [*sys.argv, '--help'][: max(2, len(sys.argv))]
  if name == 'help' and arguments:
    name, arguments = arguments[0], ['--help']
  if name in ('--help', '-h', 'help'):
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # Into `| head`, the list ends quietly.
    print('sdpo NAME [flags], where NAME is one of these; sdpo NAME --help lists its flags.\n')
    for name, path in files.items():
      print(f'  {name:<14}{(ast.get_docstring(ast.parse(path.read_text())) or "").splitlines()[0]}')
  elif name == '--version':
    print(importlib.import_module('sdpo_jax').__version__)
  elif name in files:
    sys.argv = [f'{script} {name}', *arguments]
    importlib.import_module('sdpo_jax.command').run(importlib.import_module(f'sdpo_jax.launch.{name}').main)
  else:
    near = importlib.import_module('sdpo_jax.config.fields').did_you_mean(name, files)
    print(f'{name!r} is no command{near} sdpo --help lists them.', file=sys.stderr)
    sys.exit(2)
