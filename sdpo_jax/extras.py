"""Packages that some commands need beyond what training does."""

from __future__ import annotations

import importlib.util

from sdpo_jax.errors import UserError

# Extra of the package → what needs it, and the packages.
EXTRAS = {
  'serve': ('The service', ('starlette', 'uvicorn', 'pydantic', 'obstore', 'prometheus_client')),
  'session': ('The terminal program', ('prompt_toolkit', 'rich', 'httpx')),
}


def check(extra: str) -> None:
  """Return if all packages of an extra are installed.

  Raises:
    UserError: naming those that are not, and how to install them.
  """
  what, packages = EXTRAS[extra]
  missing = [name for name in packages if importlib.util.find_spec(name) is None]
  if missing:
    raise UserError(
      f'{what} needs {", ".join(missing)}, not installed here: pip install -r requirements-{extra}.txt, or the extra '
      f'sdpo_jax[{extra}].'
    )
