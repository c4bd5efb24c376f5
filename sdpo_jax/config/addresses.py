"""Addresses of servers: whether others reach them, and that no secret is in a setting, which is saved and shown."""

from __future__ import annotations

import ipaddress
import re
from urllib.parse import parse_qsl, urlsplit

from sdpo_jax.errors import UserError

VARIABLE = re.compile(r'\$\{([A-Za-z_][A-Za-z0-9_]*)\}')  # ${NAME} in an address.
# What the names of URL parameters that hold secrets contain.
_SECRET = re.compile(r'key|token|secret|passw|pwd|auth|cred|sig|session|access|jwt|bearer|sas', re.IGNORECASE)


def is_loopback(host: str) -> bool:
  """Return whether a host can be reached from this machine only."""
  if host == 'localhost':
    return True
  try:
    return ipaddress.ip_address(host).is_loopback
  except ValueError:
    return False


def check_address(url: str, setting: str, authorization: str) -> None:
  """Raise UserError, without quoting the address, if it contains a key in plain text.

  Args:
    url: the address in the setting; may contain ${NAME}.
    setting: name of the setting.
    authorization: name of the setting for a key that is sent in a header.
  """
  try:
    parts = urlsplit(VARIABLE.sub('', url.strip()))
    user = '@' in urlsplit(url.strip()).netloc
  except ValueError:  # Not an address; the grader reports that.
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
