"""Optional packages, which some commands need but training does not."""

from __future__ import annotations

import importlib.util
from typing import Any

from sdpo_jax.errors import UserError

# Name of the extra → (what needs it, its packages).
EXTRAS = {
  'serve': ('The service', ('starlette', 'uvicorn', 'pydantic', 'obstore', 'prometheus_client')),
  'chrf': ("The grader 'chrf'", ('sacrebleu',)),
  'figures': ('A figure', ('matplotlib',)),
  'tpu': ('Planning without a TPU', ('libtpu',)),
  'session': ('The terminal program', ('prompt_toolkit', 'mcp')),
}


def check(extra: str) -> None:
  """Check that all packages of an extra are installed.

  Raises:
    UserError: some are not; the message names them and says how to install them.
  """
  what, packages = EXTRAS[extra]
  missing = [name for name in packages if importlib.util.find_spec(name) is None]
  if missing:
    raise UserError(
      f'{what} needs {", ".join(missing)}, not installed here: pip install -r requirements-{extra}.txt in a checkout, '
      f"pip install 'sdpo_jax[{extra}]' elsewhere."
    )


def pyplot() -> Any:
  """Return `matplotlib.pyplot`, set to draw into files; errors as in `check`."""
  check('figures')
  import matplotlib

  matplotlib.use('Agg')
  import matplotlib.pyplot

  return matplotlib.pyplot
