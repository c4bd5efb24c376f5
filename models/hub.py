"""Whether the Hugging Face hub can be reached, asked once: its libraries try for half a minute, line by line."""

from __future__ import annotations

import functools
import sys
import time

from sdpo_jax.errors import first_line

ATTEMPTS = 2
TIMEOUT_S = 10.0  # Of an attempt.
PAUSE_S = 1.0  # Between two.


@functools.cache
def unreachable() -> str | None:
  """Return why the hub cannot be reached, or None if it answers, or the user said not to ask (HF_HUB_OFFLINE).

  If it cannot, its libraries are told to work offline, from what they have downloaded before.
  """
  from huggingface_hub import constants

  if constants.is_offline_mode():
    return None
  reason = _knock(constants.ENDPOINT)
  if reason is None:
    return None
  constants.HF_HUB_OFFLINE = True
  if 'datasets' in sys.modules:  # It copies the constant when it is imported.
    sys.modules['datasets'].config.HF_HUB_OFFLINE = True
  return f'{constants.ENDPOINT} cannot be reached from here ({reason})'


def _knock(address: str) -> str | None:
  """Return why a server does not answer; None if it does, whatever it answers."""
  import httpx2
  from huggingface_hub import get_session

  reason = None
  for attempt in range(ATTEMPTS):
    if attempt:
      time.sleep(PAUSE_S)
    try:
      get_session().head(address, timeout=TIMEOUT_S)
      return None
    except (httpx2.HTTPError, OSError) as error:
      reason = first_line(error)
  return reason
