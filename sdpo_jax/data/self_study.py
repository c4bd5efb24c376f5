"""Self-study: a model writes the training prompts of a cartridge itself (arXiv 2506.06266).

The model reads a passage of the document, and a request to write the message of a user who works with it. Requests have
a few seed types, so that the prompts ask about the passage in different ways.
"""

from __future__ import annotations

from collections.abc import Sequence
import hashlib

import numpy as np

from sdpo_jax.data.prompts import ChatFormat, Tokenizer
from sdpo_jax.errors import UserError
from sdpo_jax.models.chat_template import PROBE, TEMPLATE_ERRORS
from sdpo_jax.types import Messages

# Maximum number of tokens that a passage has more by itself than in the document, where its words may split otherwise.
SPARE = 64
FORMATS = ('JSON', 'YAML', 'TOML', 'INI', 'XML', 'plain text')
_FORMAT = '{format}'
# End of every request: the message is answered without the passage, and used exactly as it is written.
_ALONE = (
  'Whoever answers knows the whole document but does not see this passage, so name the people, things, dates or '
  'sections that you mean. Reply with the message alone.'
)
# Seed type → its requests, one of which is drawn.
REQUESTS: dict[str, tuple[str, ...]] = {
  'structuring': (
    f'Write a message that asks an assistant to set out one part of this passage as {_FORMAT}. Say which part, and '
    'that names, dates and numbers must be exact.',
    f'Write a message that asks for the facts of one section of this passage in {_FORMAT}. Name the section, list the '
    'fields that you want, and ask for the exact values.',
  ),
  'summarization': (
    'Write a message that asks an assistant to summarize one part of this passage. Make clear which part, and how long '
    'the summary should be.',
    'Write a message that asks what matters most in one section of this passage. Name the section and what the summary '
    'is for.',
  ),
  'question': (
    'Write a question for a quiz on the details of this passage. It must have one right answer, which stands in the '
    'passage.',
    'Write a question about a fact in this passage that a careful reader would remember and a hasty one would not.',
    'Write a question that can be answered only by putting together two statements of this passage.',
  ),
  'use_case': (
    'Think of somebody who works with this passage, and of a task of theirs. Write the message in which they ask an '
    'assistant for help with that task.',
    'Write a message of somebody who has to decide something on the basis of this passage, and asks an assistant what '
    'it says about that.',
  ),
  'creative': (
    'Write a message that asks an assistant for something imaginative about the content of this passage, such as a '
    'letter, a dialogue or a comparison.',
    'Write an unusual request that only somebody who knows this passage well could fulfil.',
  ),
  'generic': ('Write a message that begins a conversation about this passage.',),
}
DEFAULT_TYPES = ('structuring', 'summarization', 'question', 'use_case', 'creative')
_INFORMATION = 'This conversation is about the following passage of a document.\n\n<info>\n{passage}\n</info>'


def draw_request(draw: np.random.Generator, types: Sequence[str], weights: Sequence[float]) -> tuple[str, str]:
  """Return a random seed type and a random request of that type.

  Args:
    draw: source of randomness.
    types: keys of REQUESTS.
    weights: relative frequency of each type.
  """
  shares = np.asarray(weights, np.float64)
  kind = types[int(draw.choice(len(types), p=shares / shares.sum()))]
  requests = REQUESTS[kind]
  request = requests[int(draw.integers(len(requests)))]
  return kind, spelled(request, FORMATS[int(draw.integers(len(FORMATS)))])


def longest_requests(types: Sequence[str]) -> list[str]:
  """Return all requests of some seed types, with the longest format name in those that have a format."""
  return [spelled(request, max(FORMATS, key=len)) for kind in types for request in REQUESTS[kind]]


def spelled(request: str, form: str) -> str:
  """Return the full text of a request of REQUESTS, with `form` in the place that it has for a format."""
  return f'{request.replace(_FORMAT, form)} {_ALONE}'


def conversation(passage: str, request: str, *, system: bool) -> Messages:
  """Return the messages that ask for a prompt about a passage.

  Args:
    passage: passage of the document.
    request: request from `draw_request`.
    system: whether the passage is a system message; otherwise it begins the user's message.
  """
  information = _INFORMATION.format(passage=passage)
  if system:
    return [{'role': 'system', 'content': information}, {'role': 'user', 'content': request}]
  return [{'role': 'user', 'content': f'{information}\n\n{request}'}]


def writes_system(tokenizer: Tokenizer, chat: ChatFormat) -> bool:
  """Return whether the chat template writes a system message followed by the user's message."""
  texts = PROBE, PROBE[::-1]
  messages = [{'role': role, 'content': text} for role, text in zip(('system', 'user'), texts, strict=True)]
  try:
    written = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True, **chat.variables)
  except TEMPLATE_ERRORS:
    return False
  return all(text in written for text in texts)


class Document:
  """A text with the positions of its tokens, from which passages are cut."""

  def __init__(self, text: str, tokenizer: Tokenizer):
    """Tokenise a text without control tokens.

    Raises:
      UserError: the tokenizer does not give token positions.
    """
    if not tokenizer.is_fast:
      raise UserError(
        f'The tokenizer {type(tokenizer).__name__} does not give the positions of tokens in a text, so passages cannot '
        'be cut out: save it as tokenizer.json.'
      )
    encoded = tokenizer(text, add_special_tokens=False, split_special_tokens=True, return_offsets_mapping=True)
    self._text, self._places = text, np.asarray(encoded['offset_mapping'], '<i8').reshape(-1, 2)  # [N, 2].
    # Equal for documents whose windows are of the same text.
    self.digest = hashlib.sha256(text.encode() + self._places.tobytes()).hexdigest()[:16]

  def __len__(self) -> int:
    """Return the number of tokens."""
    return len(self._places)

  def draw_window(self, draw: np.random.Generator, least: int, most: int) -> tuple[int, int]:
    """Return the first token and the end of a random window, uniform in length (`least` to `most`) and position.

    If the document is shorter, the window is limited to it.
    """
    length = min(int(draw.integers(min(least, len(self)), min(most, len(self)), endpoint=True)), len(self))
    start = int(draw.integers(0, len(self) - length, endpoint=True))
    return start, start + length

  def spaced_window(self, index: int, count: int, length: int) -> tuple[int, int]:
    """Return a window of `length` tokens; of `count` of them, the first begins and the last ends the document."""
    length = min(length, len(self))
    start = index * (len(self) - length) // max(count - 1, 1)
    return start, start + length

  def passage(self, window: tuple[int, int]) -> str:
    """Return the text of a window; a character made up of several tokens is included whole."""
    first, end = window
    return self._text[self._places[first, 0] : self._places[end - 1, 1]]
