"""The commands."""

import importlib.util
import pathlib
import sys


def _check_packages() -> None:
  """Exit with one sentence if another package of the same name would be imported instead of this project's."""
  root = pathlib.Path(__file__).resolve().parent.parent
  for name in ('sdpo_jax', 'models', 'configs'):
    spec = importlib.util.find_spec(name)
    found = None if spec is None or spec.origin is None else pathlib.Path(spec.origin).resolve()
    if found is None or root / name not in found.parents:
      what = (
        'is not installed' if found is None else f'is found in {found.parent if found.stem == "__init__" else found}'
      )
      sys.exit(
        f'The package {name!r} of sdpo_jax {what}, where {root / name} is needed: rename yours, start the command in '
        'another directory, or install sdpo_jax again.'
      )


_check_packages()
