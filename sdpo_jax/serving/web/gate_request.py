"""The state of a request on its way through the gate."""

from __future__ import annotations

import collections
from collections.abc import Mapping, Sequence
import dataclasses

from sdpo_jax.serving.errors import InvalidRequest


@dataclasses.dataclass
class GateRequest:
  """A request on its way through the gate."""

  id: str
  method: str
  path: str
  headers: Mapping[str, Sequence[str]]
  route: str = '(none)'  # The pattern of its path.
  adapter: str | None = None  # The adapter named in its path.
  key: str | None = None  # The id of the key, never the key.
  body: bytes = b''
  quiet: bool = False  # Whether only unexpected responses are logged, since it is a frequent health check.
  secret: bool = False  # Whether its response is never logged, even if bodies are.
  tokens: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)

  def header(self, name: str) -> str | None:
    """Return the value of a header that may be sent once; None: it was not sent.

    Raises:
      InvalidRequest: it was sent several times.
    """
    values = self.headers.get(name, ())
    if len(values) > 1:
      raise InvalidRequest(f'The header {name} was sent {len(values)} times: send it once.')
    return values[0] if values else None
