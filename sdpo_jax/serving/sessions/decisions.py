"""The effect of a decision on its turn, and the example to learn from it."""

from __future__ import annotations

import dataclasses

from sdpo_jax.serving.errors import InvalidRequest
from sdpo_jax.serving.sessions import teaching, waiting_examples
from sdpo_jax.serving.sessions.conversation import Dialogue
from sdpo_jax.serving.sessions.ledger import SessionState
from sdpo_jax.serving.sessions.session_records import DECIDED, Decision, SessionTurn, edited
from sdpo_jax.serving.store.session_tables import ExampleRow
from sdpo_jax.serving.tenant import Tenant
from sdpo_jax.serving.tool_calls import read_calls


def decided(
  tenant: Tenant, held: SessionState, dialogue: Dialogue, turn: SessionTurn, decision: Decision
) -> tuple[SessionTurn, ExampleRow | None]:
  """Return a turn with its decision, and the example to learn; None: there is none."""
  session, kept = held.session, None
  found = dataclasses.replace(turn, decision=decision, status=DECIDED[decision.kind])
  if decision.kind != 'deny' and turn.calls and turn.fault is not None:
    raise InvalidRequest(
      f'Turn {turn.n} also has a call that cannot be read ({turn.fault}): deny it, so that nothing is done by half.',
      field='decision',
    )
  if decision.kind == 'approve':
    return found, None
  if decision.kind == 'deny':
    return found, example_of(tenant, held, dialogue, found, 'denial', teaching.of_denial(turn, decision.correction))
  if decision.call >= len(turn.calls):
    raise InvalidRequest(
      f'Turn {turn.n} has {len(turn.calls)} calls, and none of the number {decision.call}.', field='call'
    )
  calls = edited(turn.calls, decision)
  with tenant.service.tokenizing:
    kept = dialogue.edited(turn.text, calls, session.tool_form)
    plain = tenant.service.tokenizer.decode(kept, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    if tuple(read_calls(dialogue.text_of(kept, (), plain), session.tool_form).calls) != calls:
      raise InvalidRequest(
        'These arguments cannot be written in the form of calls that the model knows.', field='arguments'
      )
  found = dataclasses.replace(found, kept_tokens=kept)
  return found, example_of(tenant, held, dialogue, found, 'edit', teaching.of_edit(found, session.tool_form))


def example_of(
  tenant: Tenant, held: SessionState, dialogue: Dialogue, turn: SessionTurn, kind: str, said: teaching.TeacherTexts
) -> ExampleRow | None:
  """Return the example to learn from a turn; None: there is nothing to show to the teacher."""
  if not said:
    return None
  session, service = held.session, tenant.service
  attempt = turn.tokens if session.settings.show_attempt else None
  with service.tokenizing:
    asked = dialogue.split(turn.prompt_tokens)
    config, title = service.reprompting.config, session.settings.title
    prompt = teaching.teacher_prompt(dialogue, asked, said, config, attempt, title=title)
  head = tenant.adapter(session.adapter).head
  return waiting_examples.example_row(session, turn, kind, said, prompt, head)
