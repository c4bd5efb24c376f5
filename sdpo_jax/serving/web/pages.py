"""Pages of lists, by the id of the last entry of the page before: `after` and `limit` in the address, as at OpenAI."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from sdpo_jax.serving.errors import InvalidRequest
from sdpo_jax.serving.web.endpoints import whole

MOST_LISTED = 1000  # The largest page of a list, and the default.
PAGED: Mapping[str, str] = {
  'after': 'The last_id of the page before; by default the list begins.',
  'limit': f'The most entries of the page, by default {MOST_LISTED}, which is also the maximum.',
}


def limit_of(query: Mapping[str, str]) -> int:
  """Return the most entries of a page that a query asks for.

  Raises:
    InvalidRequest: it is no number from 1 to `MOST_LISTED`.
  """
  limit = whole(query.get('limit', str(MOST_LISTED)), 'limit')
  if not 1 <= limit <= MOST_LISTED:
    raise InvalidRequest(f'limit must be a number from 1 to {MOST_LISTED}.', field='limit')
  return limit


def page(name: str, rows: Sequence[Any], limit: int, ids: Sequence[Any]) -> dict[str, Any]:
  """Return a page of a list as JSON, from one row more than the page has if there are more, and the ids of the rows."""
  ids = ids[:limit] or [None]
  return {name: rows[:limit], 'first_id': ids[0], 'last_id': ids[-1], 'has_more': len(rows) > limit}
