"""Replay: an adapter learns from examples of another one, which may have another base model.

If tokenizer and chat template are the same, the sampled tokens are learned. Otherwise the texts and calls are rendered
again with the template of this service, with calls in its form.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
import json
import time
from typing import Any

from sdpo_jax.errors import UserError
from sdpo_jax.serving import feedback
from sdpo_jax.serving.account import Account
from sdpo_jax.serving.errors import InvalidRequest, NotHolder
from sdpo_jax.serving.feedback_request import FeedbackRequest, Item
from sdpo_jax.serving.sessions import teaching, waiting_examples
from sdpo_jax.serving.sessions.conversation import Dialogue, StudentPrompt, fingerprint, template_of
from sdpo_jax.serving.sessions.examples import TrainingExample
from sdpo_jax.serving.sessions.session_records import LearnedTurns, TeacherTexts
from sdpo_jax.serving.store.store import IdempotentRequest, StoredResponse
from sdpo_jax.serving.tool_calls import Form, ToolCall, form_of, write_calls
from sdpo_jax.types import Messages


def replay(
  account: Account, adapter: str, examples: Sequence[TrainingExample], request: IdempotentRequest | None = None
) -> list[LearnedTurns]:
  """Learn from examples, and return the result of each step.

  Examples that were learned in the same version are learned together, in the order of the versions; those that were
  never learned come last, and undone ones are left out. All are checked before the first step.

  Args:
    account: the account of the owner.
    adapter: the id of the adapter that learns.
    examples: the examples, of any adapter.
    request: the idempotency record; a repeated request continues after the steps that are done.

  Raises:
    InvalidRequest: an example cannot be rendered for this model; the message has its number.
    ServiceError, UserError: as `feedback.learn`; earlier steps stay learned.
  """
  examples = [example for example in examples if example.state != 'undone']
  items = [items_of(account, example, number) for number, example in enumerate(examples)]
  most = account.service.settings.limits.max_items // max(map(len, items), default=1)
  steps = []
  for group in _groups(examples):
    for start in range(0, len(group), most):
      account.call.check()
      part = group[start : start + most]
      last = examples[part[-1]]
      numbers = sorted({examples[number].turn for number in part})
      source = {'replayed': {'session': last.session, 'turns': numbers}}
      made = [(examples[number].turn, item) for number in part for item in items[number]]
      asked = waiting_examples.request_of(account, [item for _, item in made], last, source)
      steps.append((asked, [turn for turn, _ in made]))
  return [_step(account, adapter, *step, request, index) for index, step in enumerate(steps)]


def _step(
  account: Account,
  adapter: str,
  asked: FeedbackRequest,
  turns: Sequence[int],
  request: IdempotentRequest | None,
  index: int,
) -> LearnedTurns:
  """Learn one step of a replay, or return its stored result."""
  store = account.service.store
  part = None if request is None else store.part(request, index)
  if isinstance(part, StoredResponse):
    if part.response is not None:
      return LearnedTurns(**json.loads(part.response))
    made = account.version(adapter, part.version)
    numbers, warnings = tuple(sorted(set(turns))), made.details['warnings']
    return LearnedTurns(made.parent, made.number, True, None, numbers, warnings=warnings)
  try:
    began = time.monotonic()
    done = feedback.learn(account, adapter, None, asked, idempotency=part)
    learned = waiting_examples.said_of(account, done, asked.items, turns, began)
  except BaseException as error:
    if part is not None:
      store.abandon(part)  # A replica to which the request is forwarded goes on here.
    elif index and isinstance(error, NotHolder):  # There, the steps before this one were learned again.
      raise NotHolder(
        '',
        after=f', after {index} steps of the replay were learned, whose turns its versions name: send the other '
        'examples, with an Idempotency-Key',
      ) from error
    raise
  if part is not None:
    store.finish(part, 200, json.dumps(learned.to_json()).encode())
  return learned


def _groups(examples: Sequence[TrainingExample]) -> list[list[int]]:
  """Return groups of indices of examples that were learned together, in the order of learning; rehearsals first."""
  groups: dict[tuple[str, int], list[int]] = {}
  never = 2**62
  first = {session: number for number, session in reversed(list(enumerate(each.session for each in examples)))}
  for number, example in enumerate(examples):
    for version in example.versions or [never]:
      groups.setdefault((example.session, version), []).append(number)
  order = sorted(groups, key=lambda key: (key[1], first[key[0]]))
  return [sorted(groups[key], key=lambda number: examples[number].kind != 'rehearsal') for key in order]


def items_of(account: Account, example: TrainingExample, number: int) -> list[Item]:
  """Convert an example to feedback items for the model of this service."""
  service = account.service
  shown = {name: getattr(example, name) for name in ('feedback', 'environment', 'demonstration')}
  with account.tokenizing():
    if example.tokenizer == fingerprint(service.tokenizer):
      tokens = {name: list(getattr(example, name)) for name in ('prompt_tokens', 'tokens', 'teacher_prompt')}
      item = Item(**tokens, log_probs=example.log_probs, **shown)
      return [item] if example.edited_tokens is None else waiting_examples.directly(item, example.edited_tokens)
    try:
      return _rewritten(account, example, shown)
    except (InvalidRequest, UserError) as error:
      raise InvalidRequest(f'examples[{number}]: {error}', field=f'examples[{number}]') from error


def _rewritten(account: Account, example: TrainingExample, shown: Mapping[str, str | None]) -> list[Item]:
  """Render an example with the template and tokenizer of this service; it has no log-probs then."""
  service = account.service
  form = form_of(template_of(service.tokenizer, example.tools)) if example.tools else None
  dialogue = Dialogue(service.tokenizer, service.chat, tools=example.tools, stop_token_ids=service.stop_token_ids)
  dialogue.check(form)
  asked = _asked(dialogue, example, form)
  if len(asked.tokens) > service.max_prompt:
    raise InvalidRequest(
      f'its conversation has {len(asked.tokens)} tokens here, more than the limit of {service.max_prompt} '
      '(serve.prompt_buckets).'
    )
  text = _written(example.text, example.said, example.calls, example, form)
  tokens = dialogue.answer(text, example.ended)
  if not 0 < len(tokens) <= service.max_completion:
    raise InvalidRequest(
      f'its proposal has {len(tokens)} tokens here, and must have 1 to {service.max_completion} '
      '(serve.response_buckets).'
    )
  demonstration = example.demonstration
  if example.demonstrated and form is not None:
    demonstration = write_calls(_calls(example.demonstrated), form, example.tools)
  said = TeacherTexts(demonstration, example.feedback, example.environment)
  attempt = tokens if example.show_attempt else None
  prompt = teaching.teacher_prompt(dialogue, asked, said, service.reprompting.config, attempt)
  item = Item(
    prompt_tokens=asked.tokens, tokens=tokens, teacher_prompt=prompt, **{**shown, 'demonstration': demonstration}
  )
  if example.edited_tokens is None or form is None:
    return [item]
  edited = dialogue.edited(text, _calls(example.demonstrated), form)
  return waiting_examples.directly(item, edited) if len(edited) <= service.max_completion else [item]


def _asked(dialogue: Dialogue, example: TrainingExample, form: Form | None) -> StudentPrompt:
  """Return the prompt of an example, with earlier answers rendered for this model."""
  asked: StudentPrompt | None = None
  pending: Messages = []
  answer: list[int] | None = None
  for message in [*example.messages, None]:
    if message is not None and 'calls' not in message:
      pending.append({'role': message['role'], 'content': message['content']})
      continue
    if asked is None:
      asked = dialogue.begin(pending)
    else:
      asked = dialogue.after(asked.tokens, answer, pending)
    if message is not None:
      text = _written(message['content'], message['said'], message['calls'], example, form)
      pending, answer = [], dialogue.answer(text, True)
  return asked


def _written(
  text: str, said: str, calls: Sequence[Mapping[str, Any]], example: TrainingExample, form: Form | None
) -> str:
  """Return the text of an answer of an example with its calls converted to `form`."""
  if example.tool_form == form or form is None or not calls:
    return text
  return write_calls(_calls(calls), form, example.tools, said)


def _calls(calls: Sequence[Mapping[str, Any]]) -> tuple[ToolCall, ...]:
  return tuple(ToolCall(call['name'], call['arguments']) for call in calls)
