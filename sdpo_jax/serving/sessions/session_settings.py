"""The settings of a session."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
import dataclasses
from typing import Any

from sdpo_jax.config import ServeConfig
from sdpo_jax.errors import short_repr
from sdpo_jax.serving import teachers
from sdpo_jax.serving.errors import InvalidRequest
from sdpo_jax.serving.feedback_request import learning_of
from sdpo_jax.serving.guards import Guards
from sdpo_jax.serving.sample_requests import SampleOptions
from sdpo_jax.serving.sessions import json_fields

MOST_TOOLS = 128
LONGEST_TITLE = 200  # Characters.
_SAMPLING = ('max_tokens', 'temperature', 'top_p', 'top_k', 'min_p', 'stop')


@dataclasses.dataclass(frozen=True)
class SessionSettings:
  """How a session draws proposals, and how it learns from decisions."""

  system: str | None = None  # The system message; None: none, or what the chat template writes by itself.
  tools: Sequence[Mapping[str, Any]] = ()  # JSON schemas, as chat templates take them.
  title: str = ''
  min_sdpo_examples: int = 1  # How many examples are learned together; fewer wait.
  teacher: Mapping[str, Any] | None = None  # As `teachers.choose` reads it; None: the adapter's.
  update: Mapping[str, Any] = dataclasses.field(default_factory=dict)  # As `feedback_request.learning_of` reads it.
  guards: Mapping[str, Any] | None = None  # Limits of the session, as `guards.Guards.of` reads them.
  sampling: Mapping[str, Any] = dataclasses.field(default_factory=dict)  # Its keys are among `_SAMPLING`.
  learn_from_results: bool = False  # Whether to learn from failed tools, too.
  # How many of the newest approved proposals to learn beside a correction, as their own demonstrations.
  rehearse: int = 0
  # Whether the teacher also reads the denied proposal. The paper measures that it then teaches worse (Table 6).
  show_attempt: bool = False

  @classmethod
  def from_json(cls, values: Any) -> SessionSettings:
    """Return the settings of a request, each of which may be absent; `check` compares them with the service's limits.

    Raises:
      InvalidRequest: a field is invalid; the error names it.
    """
    names = [field.name for field in dataclasses.fields(cls)]
    said = {name: value for name, value in json_fields.known(values, names, 'A session').items() if value is not None}
    read = {
      'system': json_fields.text,
      'tools': lambda value, field: tuple(json_fields.listed(value, field, MOST_TOOLS, _tool)),
      'title': lambda value, field: json_fields.text(value, field, longest=LONGEST_TITLE),
      'min_sdpo_examples': lambda value, field: json_fields.whole(value, field, 1, 2**31 - 1),
      'teacher': lambda value, field: json_fields.mapping(teachers.settings_of(value), field),
      'update': json_fields.mapping,
      'guards': json_fields.mapping,
      'sampling': _sampling,
      'learn_from_results': json_fields.flag,
      'rehearse': lambda value, field: json_fields.whole(value, field, 0, 2**31 - 1),
      'show_attempt': json_fields.flag,
    }
    return cls(**{name: read[name](value, name) for name, value in said.items()})

  def to_json(self) -> dict[str, Any]:
    """Return the settings in the form that `from_json` reads."""
    return json_fields.jsonable(dataclasses.asdict(self), 'settings')

  def check(self, serve: ServeConfig, *, max_completion: int, vocab_size: int) -> None:
    """Raise InvalidRequest for settings that the service does not support.

    Args:
      serve: settings of the service.
      max_completion: the most tokens of a completion.
      vocab_size: number of tokens in the model's vocabulary.
    """
    if self.teacher is not None:
      teachers.check(self.teacher)
    Guards.of(serve.guards, self.guards)
    steps = learning_of(self.update, serve.learning, serve.topk).steps
    if not 1 <= steps <= serve.limits.max_steps:
      raise InvalidRequest(
        f'steps must be between 1 and {serve.limits.max_steps}, not {short_repr(steps)}.', field='update.steps'
      )
    together = self.min_sdpo_examples + self.rehearse
    if together > serve.limits.max_items:
      raise InvalidRequest(
        f'min_sdpo_examples={self.min_sdpo_examples} and rehearse={self.rehearse} are {together} completions to be '
        f'learned together, and {serve.limits.max_items} are at most (serve.limits.max_items): lower one of them.',
        field='min_sdpo_examples',
      )
    self.options(None).checked(max_completion=max_completion, vocab_size=vocab_size)

  def options(self, seed: int | None, stop_token_ids: Sequence[int] = ()) -> SampleOptions:
    """Return the sampling options of proposals.

    Args:
      seed: seed of one proposal; None: a random one.
      stop_token_ids: tokens that end a proposal, beside the model's own.
    """
    return SampleOptions(**self.sampling, seed=seed, stop_token_ids=tuple(stop_token_ids))


def _tool(value: Any, field: str) -> dict[str, Any]:
  """Return the JSON schema of a tool: {"type": "function", "function": {"name": …, "parameters": …}}."""
  tool = json_fields.mapping(value, field)
  function = tool.get('function', tool)
  if not isinstance(function, Mapping) or not isinstance(function.get('name'), str) or not function['name']:
    raise InvalidRequest(
      f'{field} must be {{"type": "function", "function": {{"name": …, "description": …, "parameters": …}}}}.',
      field=field,
    )
  return tool


def _sampling(value: Any, field: str) -> dict[str, Any]:
  said = json_fields.mapping(value, field)
  for name in said:
    if name not in _SAMPLING:
      raise InvalidRequest(
        f'sampling has no {short_repr(name)}; there are {", ".join(_SAMPLING)}.', field=f'sampling.{name}'
      )
  stop = said.get('stop')
  if isinstance(stop, str):
    said['stop'] = [stop]
  elif stop is not None and not isinstance(stop, list):
    raise InvalidRequest(f'sampling.stop must be a list of texts, not {short_repr(stop)}.', field='sampling.stop')
  return {name: each for name, each in said.items() if each is not None}
