"""The teacher of an adapter: from its settings, or those of a request, to the engine's name for it."""

from __future__ import annotations

from collections.abc import Mapping
import dataclasses
from typing import Any

from sdpo_jax.config import LearningConfig
from sdpo_jax.errors import short_repr
from sdpo_jax.serving.errors import InvalidRequest
from sdpo_jax.serving.records import TEACHING_MODEL, TEACHING_VERSION, AdapterRecord, engine_name

# The fields that each kind may have beside its name.
KINDS = {
  'live': (),
  'ema': ('rate',),
  'lagged': ('every', 'version'),
  'frozen': (),
  'base': (),
  'model': ('name',),
  'endpoint': (),
}


@dataclasses.dataclass(frozen=True)
class FeedbackTeacher:
  """The model that reads the feedback."""

  name: str  # The value of `serving.engine.Feedback.teacher`, or 'endpoint', which is asked before learning.
  version: int | None  # The adapter's version that must exist; None: none.
  average_rate: float  # The update rate of the average of the factors, used with every teacher.

  @property
  def said(self) -> str:
    """The teacher's name in responses: as in requests, or a version by its name."""
    return 'ema' if self.name == 'average' else self.name


def settings_of(said: Any) -> Any:
  """Return teacher settings as a mapping if only the kind is given; anything else is returned unchanged."""
  return {'kind': said} if isinstance(said, str) else said


def check(settings: Mapping[str, Any]) -> None:
  """Raise InvalidRequest for invalid settings of a teacher."""
  kind = settings.get('kind')
  if not isinstance(kind, str) or kind not in KINDS:
    raise InvalidRequest(
      f"The teacher's kind must be one of {', '.join(KINDS)}, not {short_repr(kind)}.", field='teacher.kind'
    )
  for field in settings:
    if field != 'kind' and field not in KINDS[kind]:
      raise InvalidRequest(
        f'A teacher of the kind {kind!r} has no {short_repr(field)}; it takes: '
        f'{", ".join(KINDS[kind]) or "nothing else"}.',
        field='teacher',
      )
  rate = settings.get('rate')
  if rate is not None and not (_is_number(rate) and 0 <= rate <= 1):
    raise InvalidRequest(f"The teacher's rate must be between 0 and 1, not {short_repr(rate)}.", field='teacher.rate')
  for field, least in (('every', 1), ('version', 0)):
    value = settings.get(field)
    if value is not None and not (_is_number(value) and isinstance(value, int) and value >= least):
      raise InvalidRequest(
        f"The teacher's {field} must be a whole number of {least} or more, not {short_repr(value)}.",
        field=f'teacher.{field}',
      )
  if settings.get('every') is not None and settings.get('version') is not None:
    raise InvalidRequest("A lagged teacher has either 'every' or 'version', not both.", field='teacher')
  if kind == 'model' and not isinstance(settings.get('name'), str):
    raise InvalidRequest("A teacher of the kind 'model' needs its name.", field='teacher.name')


def choose(adapter: AdapterRecord, asked: Mapping[str, Any] | None, defaults: LearningConfig) -> FeedbackTeacher:
  """Return the teacher of an adapter at its newest version.

  Args:
    adapter: an adapter whose settings may hold `teacher`.
    asked: settings of a request that take precedence; None: there are none.
    defaults: settings for an adapter without any.

  Raises:
    InvalidRequest: there is no such teacher.
  """
  own = adapter.settings.get('teacher') or {'kind': defaults.teacher}
  settings = own if asked is None else asked
  check(settings)
  rate = own.get('rate', settings.get('rate'))
  rate = defaults.average_rate if rate is None else float(rate)
  kind = settings['kind']
  if kind == 'model':
    return FeedbackTeacher(TEACHING_MODEL + settings['name'], None, rate)
  if kind in ('lagged', 'frozen'):
    number = 0 if kind == 'frozen' else settings.get('version')
    if number is None:
      number = max(0, adapter.head - (settings.get('every') or defaults.lag))
    if number > adapter.head:
      raise InvalidRequest(
        f'Version {short_repr(number)} cannot teach: the adapter is at version {adapter.head}.', field='teacher.version'
      )
    return FeedbackTeacher(TEACHING_VERSION + engine_name(adapter.id, number), number, rate)
  return FeedbackTeacher('average' if kind == 'ema' else kind, None, rate)


def _is_number(value: Any) -> bool:
  return isinstance(value, (int, float)) and not isinstance(value, bool)
