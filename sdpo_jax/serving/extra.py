"""What the service needs beyond what training does."""

from __future__ import annotations

import importlib.util

from sdpo_jax.errors import UserError

PACKAGES = ('starlette', 'uvicorn', 'pydantic', 'obstore', 'prometheus_client')


def check_extra() -> None:
  """Return if all packages are installed.

  Raises:
    UserError: naming those that are not, and how to install them.
  """
  missing = [name for name in PACKAGES if importlib.util.find_spec(name) is None]
  if missing:
    raise UserError(
      f'The service needs {", ".join(missing)}, not installed here: pip install -r requirements-serve.txt, or the '
      'extra sdpo_jax[serve].'
    )
