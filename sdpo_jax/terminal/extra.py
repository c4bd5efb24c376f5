"""What the terminal program needs beyond what training does."""

from __future__ import annotations

import importlib.util

from sdpo_jax.errors import UserError

PACKAGES = ('prompt_toolkit', 'rich', 'httpx')


def check_extra() -> None:
  """Return if all packages are installed.

  Raises:
    UserError: naming those that are not, and how to install them.
  """
  missing = [name for name in PACKAGES if importlib.util.find_spec(name) is None]
  if missing:
    raise UserError(
      f'The terminal program needs {", ".join(missing)}, not installed here: pip install -r requirements-session.txt, '
      'or the extra sdpo_jax[session].'
    )
