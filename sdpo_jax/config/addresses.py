"""Addresses of servers in settings, which are saved and shown: what is secret in them stands in the environment."""

from __future__ import annotations

import re
from urllib.parse import parse_qsl, urlsplit

from sdpo_jax.errors import UserError

VARIABLE = re.compile(r'\$\{([A-Za-z_][A-Za-z0-9_]*)\}')  # ${NAME} in an address.
# Parts of the names of parameters that hold keys.
_SECRET = re.compile(r'key|token|secret|passw|pwd|auth|cred|sig|session|access|jwt|bearer|sas', re.IGNORECASE)


def check_address(url: str, setting: str, authorization: str) -> None:
  """Raise UserError, which quotes nothing of the address, if it spells a key out.

  Args:
    url: the address as the setting has it; may hold ${NAME}.
    setting: its name.
    authorization: name of the setting for a key that is sent in a header.
  """
  try:
    parts = urlsplit(VARIABLE.sub('', url.strip()))
    user = '@' in urlsplit(url.strip()).netloc
  except ValueError:  # No address at all; the grader says so.
    return
  if user:
    raise UserError(
      f'{setting} holds a user or a password: settings are saved and shown, so put what is sent as the Authorization '
      f'header into an environment variable and name that in {authorization}.'
    )
  named = [name for name, value in parse_qsl(parts.query) if value and _SECRET.search(name)]
  if named:
    raise UserError(
      f'{setting} spells out the value of the parameter {named[0]!r}: settings are saved and shown, so put it into an '
      f'environment variable and write ${{NAME}} in its place.'
    )
