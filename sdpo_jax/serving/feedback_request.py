"""Requests to learn from feedback: completions, the feedback on them, and how to learn from which teacher."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
import dataclasses
import math
from typing import Any, Literal

import numpy as np

from sdpo_jax.config import LearningConfig, ServeConfig
from sdpo_jax.config.fields import is_number
from sdpo_jax.errors import UserError, short_repr
from sdpo_jax.learning.losses import Sdpo
from sdpo_jax.learning.requests import AdamW, UpdateOptions
from sdpo_jax.objective.jsd_pg import JsdPg
from sdpo_jax.serving.errors import InvalidRequest
from sdpo_jax.serving.records import TEACHING_MODEL, TEACHING_VERSION, AdapterRecord, engine_name
from sdpo_jax.types import Messages

NUMBERS = ('log_probs_before', 'log_probs_after', 'teacher_log_probs', 'advantages', 'divergence', 'entropy')
DETAILS = ('token_ids', 'tokens', *NUMBERS, 'top')  # The per-token lists that a response can have for a completion.
_LARGEST = float(np.finfo(np.float32).max)
MOST_TOP = 20  # The most tokens of the teacher that a response lists per position.
# The kinds of teachers, each with the settings that it accepts.
TEACHERS = {
  'live': (),
  'ema': ('rate',),
  'lagged': ('every', 'version'),
  'frozen': (),
  'base': (),
  'model': ('name',),
  'endpoint': (),
}
_DIVERGENCES = {'forward_kl': 0.0, 'reverse_kl': 1.0, 'jsd': 0.5}
_SDPO = tuple(field.name for field in dataclasses.fields(Sdpo))
_JSD_PG = tuple(field.name for field in dataclasses.fields(JsdPg))
_OPTIMIZER = tuple(field.name for field in dataclasses.fields(AdamW))


@dataclasses.dataclass(frozen=True)
class Item:
  """A completion with the feedback on it.

  The completion is given either by the `sample_id` of a sample, or by its tokens and the prompt.
  """

  sample_id: str | None = None
  prompt_tokens: Sequence[int] | None = None
  tokens: Sequence[int] | None = None
  # [T] log-probs of the tokens when they were sampled; None: the version that learns has sampled them.
  log_probs: Sequence[float] | np.ndarray | None = None
  messages: Messages | None = None  # The conversation behind the prompt; None: it was a text or tokens.
  feedback: str | None = None  # What is wrong with the completion, in words.
  environment: str | None = None  # The output of a tool, a test or a grader.
  correction: str | None = None  # The right answer in its place.
  demonstration: str | None = None  # Another right answer.
  reward: float | None = None  # A score, learned by the policy gradient; None: none.
  # The teacher's prompt, if the caller has rendered it; None: it is rendered from the fields above.
  teacher_prompt: Sequence[int] | None = None
  # How the tokens are learned: from the teacher; or without one, as wanted by cross-entropy, as unwanted by the policy
  # gradient with the advantage −1.
  learned: Literal['from teacher', 'as wanted', 'as unwanted'] = 'from teacher'
  # The tokens of the answer that a person has rejected, and of the one that they want instead, whose log-probs are
  # measured before and after; None: there is none.
  rejected: Sequence[int] | None = None
  wanted: Sequence[int] | None = None


@dataclasses.dataclass(frozen=True)
class FeedbackRequest:
  """What one feedback transaction learns, and what its response contains."""

  items: Sequence[Item]
  update: UpdateOptions = UpdateOptions()
  teacher: Mapping[str, Any] | None = None  # Teacher settings, as `choose_teacher` reads them; None: the adapter's.
  mode: Literal['commit', 'dry_run'] = 'commit'
  guards: Mapping[str, Any] | None = None  # Limits for this request, as `guards.Guards.of` reads them.
  detail: Sequence[str] = DETAILS  # The per-token lists to include in the response.
  top: int = 5  # How many of the teacher's tokens to list at every position.
  # The origin of the completions, as JSON, stored in the details of the new version; None: nothing is stored.
  source: Mapping[str, Any] | None = None


def make_request(
  items: Sequence[Item], update: Mapping[str, Any], serve: ServeConfig, *, measured: bool = False, **more: Any
) -> FeedbackRequest:
  """Make a validated request, with the service's defaults for everything that the client left out.

  Args:
    items: the completions with their feedback.
    update: how to learn, as JSON, see `learning_of`.
    serve: the settings of the service.
    measured: see `UpdateOptions`.
    **more: further fields of `FeedbackRequest`.

  Raises:
    InvalidRequest: a field is invalid; the error names it.
  """
  limits = serve.limits
  if not 1 <= len(items) <= limits.max_items:
    raise InvalidRequest(
      f'A feedback must have 1 to {limits.max_items} completions (serve.limits.max_items), not {len(items)}.',
      field='items',
    )
  for number, item in enumerate(items):
    check_item(item, number)
  rewarded = any(item.reward is not None for item in items)
  options = learning_of(update, serve.learning, serve.topk, rewarded=rewarded)
  if not 1 <= options.steps <= limits.max_steps:
    raise InvalidRequest(
      f'steps must be between 1 and {limits.max_steps}, not {short_repr(options.steps)}.', field='steps'
    )
  if rewarded and not (isinstance(options.loss, Sdpo) and options.loss.policy_weight > 0):
    raise InvalidRequest(
      "A reward requires the policy gradient of loss='sdpo': leave policy_weight out, or set it above 0.",
      field='reward',
    )
  request = FeedbackRequest(items, dataclasses.replace(options, measured=measured), **more)
  if request.mode not in ('commit', 'dry_run'):
    raise InvalidRequest(f"mode must be 'commit' or 'dry_run', not {short_repr(request.mode)}.", field='mode')
  unknown = [name for name in request.detail if name not in DETAILS]
  if unknown:
    raise InvalidRequest(f'detail must be among {", ".join(DETAILS)}, not {short_repr(unknown[0])}.', field='detail')
  if not 0 <= request.top <= MOST_TOP:
    raise InvalidRequest(f'top must be between 0 and {MOST_TOP}, not {request.top}.', field='top')
  return request


def check_item(item: Item, number: int) -> None:
  """Raise InvalidRequest for an invalid item; the message has its number."""
  where = f'items[{number}]'
  given = item.prompt_tokens is not None, item.tokens is not None
  if any(given) == (item.sample_id is not None) or any(given) != all(given):
    raise InvalidRequest(f'{where} must have either a sample_id, or prompt_tokens and tokens.', field=where)
  if item.sample_id is not None and (item.log_probs is not None or item.messages is not None):
    raise InvalidRequest(
      f'{where} has a sample_id, so the service knows its log_probs and messages: leave them out.', field=where
    )
  if item.log_probs is not None:
    values = np.asarray(item.log_probs, np.float32)
    if values.shape != (len(item.tokens),) or not np.isfinite(values).all() or (values > 0).any():
      raise InvalidRequest(
        f'{where}: log_probs must be one number for each of the {len(item.tokens)} tokens, at most 0.', field=where
      )
  if item.reward is not None and not math.isfinite(item.reward):
    raise InvalidRequest(f'{where}: reward must be a number, not {item.reward}.', field=where)


def learning_of(
  update: Mapping[str, Any], defaults: LearningConfig, topk: int, *, rewarded: bool = False
) -> UpdateOptions:
  """Return the loss, the optimizer and the number of steps that a client requests.

  Args:
    update: JSON with `loss` ('sdpo' or 'jsd_pg'), fields of `Sdpo` or `JsdPg`, fields of `AdamW`, and `steps`. For
      SDPO, `divergence` names the ends and the middle of `alpha`: 'forward_kl' is KL(teacher‖student). None means the
      default, but for `is_clip` no importance ratio, and for `max_grad_norm` no clipping.
    defaults: the values of absent fields.
    topk: the K that the engine is compiled for.
    rewarded: whether an item has a reward, which turns the policy gradient on unless the client turns it off.

  Raises:
    InvalidRequest: a field does not exist, or its value is invalid.
  """
  name = update.get('loss') or defaults.loss
  if name not in ('sdpo', 'jsd_pg'):
    raise InvalidRequest(f"loss must be 'sdpo' or 'jsd_pg', not {short_repr(name)}.", field='loss')
  known = {'loss', 'steps', *_OPTIMIZER, *(('divergence', *_SDPO) if name == 'sdpo' else _JSD_PG)}
  for field in update:
    if field not in known:
      raise InvalidRequest(
        f'{short_repr(field)} cannot be set with loss={name!r}, only {", ".join(sorted(known))}.',
        field=str(field),
      )
  absent = {'is_clip': None, 'max_grad_norm': math.inf}
  said = {
    field: absent[field] if value is None else value
    for field, value in update.items()
    if value is not None or field in absent
  }
  optimizer = {
    'learning_rate': defaults.learning_rate,
    'beta1': defaults.betas[0],
    'beta2': defaults.betas[1],
    'weight_decay': defaults.weight_decay,
    'max_grad_norm': defaults.max_grad_norm,
  } | {field: said[field] for field in _OPTIMIZER if field in said}
  if name == 'sdpo':
    loss = {'alpha': defaults.alpha, 'topk': defaults.topk or topk, 'is_clip': defaults.is_clip}
    loss |= {'policy_weight': 1.0} if rewarded else {}
    loss |= {field: said[field] for field in _SDPO if field in said}
    if 'divergence' in said:
      loss['alpha'] = _alpha(said['divergence'], said.get('alpha'))
    if _number('topk', loss['topk']) > topk:
      raise InvalidRequest(
        f'topk={short_repr(loss["topk"])} is more than the {topk} that the engine is compiled for.', field='topk'
      )
  else:
    loss = {'alpha': defaults.jsd_alpha, 'clip_eps': defaults.clip_eps, 'jsd_weight': defaults.jsd_weight}
    loss |= {field: said[field] for field in _JSD_PG if field in said}
  for field, value in {**optimizer, **loss}.items():
    if field not in ('form', 'support', 'tail') and value is not None and _LARGEST < _number(field, value) < math.inf:
      raise InvalidRequest(f'{field}={short_repr(value)} is too large for float32.', field=field)
  steps = said.get('steps', defaults.steps)
  if isinstance(steps, bool) or not isinstance(steps, int):
    raise InvalidRequest(f'steps must be a whole number, not {short_repr(steps)}.', field='steps')
  try:
    return UpdateOptions((Sdpo if name == 'sdpo' else JsdPg)(**loss), AdamW(**optimizer), steps)
  except UserError as error:
    raise InvalidRequest(str(error)) from error


def _alpha(name: Any, alpha: Any) -> float:
  """Return the alpha of `Sdpo` for the name of a divergence; with 'jsd', the client may choose alpha."""
  if not isinstance(name, str) or name not in _DIVERGENCES:
    raise InvalidRequest(
      f'divergence must be one of {", ".join(_DIVERGENCES)}, not {short_repr(name)}.', field='divergence'
    )
  alpha = _DIVERGENCES[name] if alpha is None else alpha
  fits = 0 < _number('alpha', alpha) < 1 if name == 'jsd' else alpha == _DIVERGENCES[name]
  if not fits:
    raise InvalidRequest(
      f'divergence={name!r} and alpha={alpha} contradict each other: send only one of them.', field='alpha'
    )
  return alpha


def _number(field: str, value: Any) -> float:
  if isinstance(value, bool) or not isinstance(value, (int, float)) or value != value:  # NaN.
    raise InvalidRequest(f'{field} must be a number, not {short_repr(value)}.', field=field)
  return value


@dataclasses.dataclass(frozen=True)
class FeedbackTeacher:
  """The teacher, which reads the feedback: the model whose distributions are distilled."""

  name: str  # The value of `engine.Feedback.teacher`, or 'endpoint', which scores before the engine learns.
  version: int | None  # The number of an earlier version of the adapter that teaches; None: another teacher.
  # The rate of the moving average of the factors. None: neither the adapter's teacher nor this one is an average.
  average_rate: float | None


def teacher_settings(said: Any) -> Any:
  """Return teacher settings with a kind given as a str converted to a mapping; other values are unchanged."""
  return {'kind': said} if isinstance(said, str) else said


def check_teacher(settings: Mapping[str, Any]) -> None:
  """Raise InvalidRequest for invalid settings of a teacher; the error names the field."""
  kind = settings.get('kind')
  if not isinstance(kind, str) or kind not in TEACHERS:
    raise InvalidRequest(
      f"The teacher's kind must be one of {', '.join(TEACHERS)}, not {short_repr(kind)}.", field='teacher.kind'
    )
  for field in settings:
    if field != 'kind' and field not in TEACHERS[kind]:
      raise InvalidRequest(
        f'A teacher of the kind {kind!r} has no setting {short_repr(field)}; its settings: '
        f'{", ".join(TEACHERS[kind]) or "none"}.',
        field='teacher',
      )
  rate = settings.get('rate')
  if rate is not None and not (is_number(rate) and 0 <= rate <= 1):
    raise InvalidRequest(f"The teacher's rate must be between 0 and 1, not {short_repr(rate)}.", field='teacher.rate')
  for field, least in (('every', 1), ('version', 0)):
    value = settings.get(field)
    if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < least):
      raise InvalidRequest(
        f"The teacher's {field} must be a whole number of {least} or more, not {short_repr(value)}.",
        field=f'teacher.{field}',
      )
  if settings.get('every') is not None and settings.get('version') is not None:
    raise InvalidRequest("A lagged teacher takes either 'every' or 'version': leave one out.", field='teacher')
  if kind == 'model' and not isinstance(settings.get('name'), str):
    raise InvalidRequest("A teacher of the kind 'model' needs the name of a model.", field='teacher.name')


def choose_teacher(
  adapter: AdapterRecord, asked: Mapping[str, Any] | None, defaults: LearningConfig, kept_from: int = 1
) -> FeedbackTeacher:
  """Return the teacher of an adapter at its newest version.

  Args:
    adapter: the adapter, whose settings may have a `teacher`.
    asked: the teacher settings of the request, which take precedence; None: there are none.
    defaults: the settings for an adapter without its own.
    kept_from: the first version after 0 that is kept; a lagged teacher is no older.

  Raises:
    InvalidRequest: the settings are invalid, or the version does not exist yet.
  """
  own = adapter.settings.get('teacher') or {'kind': defaults.teacher}
  if asked is not None:
    check_teacher(asked)
  settings = own if asked is None else asked
  rate = own.get('rate', settings.get('rate'))
  rate = defaults.average_rate if rate is None else float(rate)
  kind = settings['kind']
  if 'ema' not in (kind, own['kind']):
    rate = None
  if kind == 'model':
    return FeedbackTeacher(TEACHING_MODEL + settings['name'], None, rate)
  if kind in ('lagged', 'frozen'):
    number = 0 if kind == 'frozen' else settings.get('version')
    if number is None:
      number = max(0, adapter.head - (settings.get('every') or defaults.lag))
      number = max(number, kept_from) if number else 0
    if number > adapter.head:
      raise InvalidRequest(
        f'Version {short_repr(number)} cannot teach: the newest version is {adapter.head}.', field='teacher.version'
      )
    return FeedbackTeacher(TEACHING_VERSION + engine_name(adapter.id, number), number, rate)
  return FeedbackTeacher('average' if kind == 'ema' else kind, None, rate)
