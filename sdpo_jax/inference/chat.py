"""A conversation with a run or a model in a terminal; answers appear as they are drawn."""

from __future__ import annotations

from collections.abc import Callable, Iterator
import contextlib
import dataclasses
import os
import signal
from typing import Any, Literal, TextIO

from sdpo_jax.errors import UserError
from sdpo_jax.inference.generate import TextGenerator, with_system
from sdpo_jax.rollout.buckets import bucket_lengths, smallest_bucket
from sdpo_jax.rollout.results import Completion
from sdpo_jax.rollout.stops import to_text
from sdpo_jax.training.opening import make_sampler

DECODE_CHUNK = 8  # Tokens between checks for interrupts and new text.
# Padded lengths of conversations. Padding a short one to 256 costs less than compiling programs for shorter lengths.
PROMPT_BUCKETS = tuple(2**i for i in range(8, 24))
LEAVING = ('/exit', '/quit')
_HELP = '/reset forgets the conversation; Ctrl-C ends an answer; /exit, /quit or Ctrl-D ends the chat.'


class Chat:
  """A conversation: its messages and the generator of answers."""

  def __init__(self, generator: TextGenerator, system: str | None, announce: Callable[[str], None]):
    """Start an empty conversation.

    Args:
      generator: generates the answers.
      system: content of a system message; None: no system message.
      announce: called with sentences about waiting times.
    """
    self._start = with_system([], system)
    self.messages = self._start
    self._generator, self._announce = generator, announce
    session = generator.session
    data = dataclasses.replace(session.config.data, prompt_buckets=PROMPT_BUCKETS)
    rollout = dataclasses.replace(session.config.rollout, decode_chunk=DECODE_CHUNK)
    config = dataclasses.replace(session.config, data=data, rollout=rollout)
    # Resizing the cache would make an answer wait for the compiler.
    self._sampler = make_sampler(config, session.policy, session.tokenizer, session.mesh, resized=False)
    self._lengths = bucket_lengths(PROMPT_BUCKETS, data.max_prompt_length)
    self._compiled: set[int | None] = set()
    self._turns = 0

  def answer(self, text: str, write: Callable[[str], None]) -> Literal['stop', 'length', 'interrupted']:
    """Answer a message and remember both; Ctrl-C ends the answer and keeps its beginning.

    Args:
      text: the user's message.
      write: receives the answer piece by piece.

    Returns:
      The reason why the answer ended.

    Raises:
      UserError: with this message the conversation is too long; the message is not remembered.
    """
    asked = [*self.messages, {'role': 'user', 'content': text}]
    tokens = self._generator.prompt_tokens(asked, 'The conversation', '/reset forgets what has been said')
    if (length := smallest_bucket(self._lengths, len(tokens))) not in self._compiled:
      self._compiled.add(length)
      self._announce(f'Preparing for conversations of up to {length} tokens; the first time, this takes a while …')
    said, ended = '', 'interrupted'
    with _noting_interrupts() as interrupted:
      for look in self._looks(tokens):
        done = isinstance(look, Completion)
        now = look.text if done else self._settled(look.tokens.tolist())
        # With byte-level characters, half a character hides the characters before it from the decoder.
        if done or now.startswith(said):
          write(now[len(os.path.commonprefix([said, now])) :])
          said = now
        if done:
          ended = 'stop' if look.stopped else 'length'
        elif interrupted():
          break
    self._turns += 1
    self.messages = [*asked, {'role': 'assistant', 'content': said}]
    return ended

  def forget(self) -> None:
    """Forget all messages but the system message."""
    self.messages = self._start

  def _looks(self, tokens: list[int]) -> Iterator[Any]:
    session, options = self._generator.session, self._generator.sampling_options(step=self._turns)
    return self._sampler.stream(session.base, self._generator.parameters, [tokens], drafts=True, **options)

  def _settled(self, tokens: list[int]) -> str:
    """Return the text that later tokens cannot change: an incomplete last character decodes to replacements."""
    return to_text(self._generator.session.tokenizer, tokens).rstrip('\N{REPLACEMENT CHARACTER}')


@contextlib.contextmanager
def _noting_interrupts() -> Iterator[Callable[[], bool]]:
  """Provide a function that returns whether Ctrl-C was pressed; only a second press raises KeyboardInterrupt."""
  pressed = []

  def note(number: int, frame: Any) -> None:
    if pressed:
      raise KeyboardInterrupt
    pressed.append(number)

  before = signal.signal(signal.SIGINT, note)
  try:
    yield lambda: bool(pressed)
  finally:
    signal.signal(signal.SIGINT, before)


def converse(chat: Chat, read: Callable[[], str], out: TextIO, announce: Callable[[str], None]) -> None:
  """Answer lines until the end of input, /exit or /quit; /reset forgets the conversation, and /help lists commands.

  Args:
    chat: a conversation.
    read: returns the next line; raises EOFError at the end.
    out: receives only the answers, each as it is drawn and followed by a newline.
    announce: called with all other messages.
  """

  def write(piece: str) -> None:
    out.write(piece)
    out.flush()

  while True:
    try:
      line = read().strip()
    except EOFError:
      return
    except KeyboardInterrupt:
      announce(f'\n{_HELP}')
      continue
    if line in LEAVING:
      return
    if line == '/reset':
      chat.forget()
      announce('Forgotten.')
    elif line == '/help':
      announce(_HELP)
    elif line:
      try:
        ended = chat.answer(line, write)
      except UserError as error:
        announce(str(error))
        continue
      write('\n')
      if ended == 'length':
        announce('(Cut off at --max_tokens.)')
