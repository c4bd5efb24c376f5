"""Pages of lists, by where the page before ends: `after` and `limit` in the address, as at OpenAI."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from sdpo_jax.serving.errors import InvalidRequest
from sdpo_jax.serving.records import place_of
from sdpo_jax.serving.web.endpoints import Incoming, whole

MOST_LISTED = 1000  # The largest page of a list, and the default.
PAGED: Mapping[str, str] = {
  'after': 'The `next` of the page before, or the id of an entry; by default the list begins.',
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


def paged(asked: Incoming) -> tuple[int, int]:
  """Return the number after which a page of numbered entries begins, and the most entries that it has."""
  after = asked.number('after')
  return -1 if after is None else after, limit_of(asked.query)


def page(name: str, rows: Sequence[Any], limit: int, ids: Sequence[Any], places: Sequence[Any] = ()) -> dict[str, Any]:
  """Return a page of a list as JSON.

  Args:
    name: the name of the list.
    rows: its entries, one more than the page has if there are more.
    limit: the most entries of the page.
    ids: the ids of the rows.
    places: what `after` takes to go on after each row even if that is deleted meanwhile; empty: the ids.
  """
  after, ids = (places or ids)[limit - 1] if len(rows) > limit else None, ids[:limit] or [None]
  return {name: rows[:limit], 'first_id': ids[0], 'last_id': ids[-1], 'next': after, 'has_more': after is not None}


def dated_page(name: str, rows: Sequence[Any], limit: int, said: Callable[[Any], Any]) -> dict[str, Any]:
  """Return a page of entries in the order of their creation, see `page`; `said` returns an entry as JSON."""
  return page(name, [said(each) for each in rows], limit, [each.id for each in rows], [place_of(each) for each in rows])
