"""What of a conversation is left out when it is longer than a prompt can be.

First the outputs of tools, the oldest first, then answers with their calls and outputs, then messages of the person.
What was denied, edited or learned stays while that leaves room enough; otherwise the oldest of it goes, too, so that a
session does not end: what it has taught is in the adapter. Afterwards the conversation goes on from the shorter prompt,
so that later prompts begin with it until it is full again.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Container, Sequence
import dataclasses

from sdpo_jax.environments.workspace.tools import shortened
from sdpo_jax.serving.sessions import teaching
from sdpo_jax.serving.sessions.conversation import Dialogue, StudentPrompt
from sdpo_jax.serving.sessions.session_records import SessionTurn
from sdpo_jax.tables import counted
from sdpo_jax.teacher.context import longest_that_fits
from sdpo_jax.types import Messages

LEAST_LEFT = 0.25  # The share of a prompt that must be left for new outputs; otherwise older parts are left out first.
KEPT = 0.5  # The share of a prompt that an older conversation may have once parts of it were left out.
_SHORT = 200  # Characters of an output that is not worth leaving out.


@dataclasses.dataclass(frozen=True)
class Exchange:
  """An answer of the conversation, with the messages around it."""

  asked: Messages  # The messages before the answer, after `behind` of the exchange before.
  answer: Sequence[int]
  behind: Messages  # The results of its calls, or why it was denied; results of the last one are new messages.
  stays: bool  # Whether its answer is left out only if nothing else makes room.
  told: bool  # Whether `behind` says why it was denied, and stays as well.


def exchanges_of(turns: Sequence[SessionTurn], without: Container[int] = ()) -> list[Exchange]:
  """Return the answers in the conversation of a session, of which the last one is never left out.

  Args:
    turns: all turns.
    without: numbers of denied turns that are not in the conversation now.
  """
  found: list[Exchange] = []
  asked: Messages = []
  for turn in turns:
    asked += [dict(message) for message in turn.messages]
    if not (turn.joins or (turn.told is not None and turn.n not in without)):
      continue
    own = next((at for at, message in enumerate(asked) if message['role'] != 'tool'), len(asked))
    if found:  # Results that were sent as messages belong to the answer before.
      found[-1] = dataclasses.replace(found[-1], behind=[*found[-1].behind, *asked[:own]])
      asked = asked[own:]
    stays = turn.status in ('denied', 'edited') or turn.learned is not None
    found.append(Exchange(asked, turn.answer_tokens, teaching.behind(turn), stays, turn.told is not None))
    asked = []
  if found:
    found[-1] = dataclasses.replace(found[-1], behind=found[-1].behind if found[-1].told else [], stays=True)
  return found


def fitted(dialogue: Dialogue, exchanges: Sequence[Exchange], new: Messages, most: int) -> StudentPrompt:
  """Return a prompt of at most `most` tokens if the last answer and the new messages allow it, otherwise a longer one.

  Args:
    dialogue: the dialogue of the session.
    exchanges: all answers in the conversation.
    new: the messages after them that the model is to answer; outputs of tools among them lose their middle if needed.
    most: the most tokens.
  """
  pieces = _Pieces(dialogue, exchanges)
  # In this order; each entry leaves out one part more.
  order = [('output', at) for at, each in enumerate(exchanges) if not each.told and any(map(_is_long, each.behind))]
  order += [('answer', at) for at, each in enumerate(exchanges) if not each.stays]
  order += [('asked', at) for at, each in enumerate(exchanges) if at and each.asked]
  usual = len(order)
  order += [('answer', at) for at, each in enumerate(exchanges[:-1]) if each.stays]
  bare = cut(new, 0)

  def share(count: int) -> float:
    return len(pieces.prompt(order[:count], bare).tokens) / most

  end = usual if share(usual) <= 1 - LEAST_LEFT else len(order)
  fewest = bisect.bisect_left(range(end), True, key=lambda count: share(count) <= KEPT)
  return with_outputs(lambda messages: pieces.prompt(order[:fewest], messages), new, most)


def with_outputs(prompt_of: Callable[[Messages], StudentPrompt], new: Messages, most: int) -> StudentPrompt:
  """Return the prompt that ends with `new`, whose outputs of tools keep as many characters as fit."""
  prompt = prompt_of(new)
  longest = max((len(message['content']) for message in new if message['role'] == 'tool'), default=0)
  if len(prompt.tokens) <= most or not longest:
    return prompt
  found, _ = longest_that_fits(
    lambda length: ((made := prompt_of(cut(new, length))), made.tokens), longest, most, prompt.tokens
  )
  return found


class _Pieces:
  """Prompts of which most parts are the same: each is rendered once."""

  def __init__(self, dialogue: Dialogue, exchanges: Sequence[Exchange]):
    self._dialogue, self._exchanges = dialogue, exchanges
    self._known: dict[tuple, StudentPrompt] = {}

  def prompt(self, left_out: Sequence[tuple[str, int]], new: Messages) -> StudentPrompt:
    """Return the prompt without the parts that are left out."""
    out = set(left_out)
    body: list[int] = []
    answer: Sequence[int] | None = None
    waiting: Messages = []
    gone, place = 0, 0  # How many answers in a row are left out, and where to say so.
    for at, each in enumerate(self._exchanges):
      waiting += [] if ('asked', at) in out else each.asked
      if ('answer', at) in out:
        gone, place = gone + 1, len(waiting)
        continue
      body += self._behind(answer, _with_note(waiting, gone, place)).tokens
      answer, gone = each.answer, 0
      waiting = [_stub(message) for message in each.behind] if ('output', at) in out else list(each.behind)
    last = self._behind(answer, _with_note([*waiting, *new], gone, place))
    return StudentPrompt([*body, *last.body], last.header)

  def _behind(self, answer: Sequence[int] | None, messages: Messages) -> StudentPrompt:
    key = answer and tuple(answer), tuple(tuple(message.items()) for message in messages)
    if key not in self._known:
      made = self._dialogue.begin(messages) if answer is None else self._dialogue.after((), answer, messages)
      self._known[key] = made
    return self._known[key]


def _with_note(messages: Messages, gone: int, place: int) -> Messages:
  """Return messages with a note about answers that are left out at a place, and messages of the person as one."""
  if not gone:
    return messages
  found: Messages = []
  note = {'role': 'user', 'content': f'({counted(gone, "answer")} left out here.)'}
  for message in [*messages[:place], note, *messages[place:]]:
    if found and found[-1]['role'] == message['role'] == 'user':
      found[-1] = {'role': 'user', 'content': f'{found[-1]["content"]}\n\n{message["content"]}'}
    else:
      found.append(dict(message))
  return found


def _is_long(message: dict[str, str]) -> bool:
  return message['role'] == 'tool' and len(message['content']) > _SHORT


def _stub(message: dict[str, str]) -> dict[str, str]:
  if not _is_long(message):
    return message
  return {**message, 'content': f'({len(message["content"])} characters of output are left out here.)'}


def cut(messages: Messages, limit: int) -> Messages:
  """Return messages in which outputs of tools have at most `limit` characters of their beginning and end."""
  return [
    {**message, 'content': shortened(message['content'], limit)[0]} if message['role'] == 'tool' else message
    for message in messages
  ]
