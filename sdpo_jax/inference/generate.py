"""Answers of a run or a model: to one prompt, to a file of prompts, in a conversation."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
import contextlib
import dataclasses
import json
import pathlib
import signal
import time
from typing import Any, Literal, TextIO

from sdpo_jax.config import Config, SamplingConfig
from sdpo_jax.data.prompts import named_chat_tokens
from sdpo_jax.data.rows import Row, conversation
from sdpo_jax.data.sources import read_prompts
from sdpo_jax.environments.remote import plain
from sdpo_jax.errors import UserError
from sdpo_jax.files import is_local, write_atomically
from sdpo_jax.inference.runs import open_source, run_config
from sdpo_jax.rollout.buckets import bucket_lengths, smallest_bucket
from sdpo_jax.rollout.engine import Completion, SamplingOptions
from sdpo_jax.rollout.stops import to_text
from sdpo_jax.training.session import Session, make_sampler
from sdpo_jax.types import Messages, Tree

# Of a chat: tokens between two looks, and the lengths to which conversations are padded. To pad a short one to 256
# costs less than the programs of shorter lengths.
CHAT_CHUNK = 8
CHAT_BUCKETS = tuple(2**i for i in range(8, 24))
PROGRESS_SECONDS = 5.0


@dataclasses.dataclass(frozen=True)
class Manner:
  """How a speaker answers; None leaves it to the settings of the run, or to the defaults for a model."""

  sampling: SamplingConfig
  max_tokens: int
  seed: int = 0
  max_prompt_length: int | None = None
  max_batch_rows: int | None = None
  dtype: Literal['float32', 'bfloat16'] | None = None  # Of the computation; None for a model: float32.


@dataclasses.dataclass(frozen=True)
class Speaker:
  """A run or a model that answers."""

  session: Session
  parameters: Tree
  manner: Manner

  def prompt(self, messages: Messages, name: str, way_out: str = 'shorten it') -> list[int]:
    """Token ids of a conversation.

    Args:
      messages: to be answered.
      name: how the user knows them.
      way_out: beside a higher limit, if they are too long.

    Raises:
      UserError: they are too long, or the chat template refuses them.
    """
    data = self.session.config.data
    [tokens] = named_chat_tokens(self.session.tokenizer, [messages], [name], data.enable_thinking)
    if len(tokens) > data.max_prompt_length:
      raise UserError(
        f'{name} has {len(tokens)} tokens with the chat template, the limit is {data.max_prompt_length}: {way_out}, or '
        'start with a larger --max_prompt_length.'
      )
    return tokens

  def options(self, step: int = 0) -> SamplingOptions:
    """What to ask of a sampler."""
    manner = self.manner
    return SamplingOptions(
      n=manner.sampling.n, seed=manner.seed, step=step, max_tokens=manner.max_tokens, **manner.sampling.method()
    )


def open_speaker(workdir: str | None, model: str | None, step: int | None, manner: Manner) -> Speaker:
  """A run (its newest checkpoint, or that of `step`) or a Hugging Face directory that answers in that manner.

  Raises:
    UserError: as `open_source`.
  """
  config = Config() if workdir is None else run_config(workdir)
  if workdir is None:
    config.model.dtype = 'float32'
  data = dataclasses.replace(
    config.data,
    max_prompt_length=manner.max_prompt_length or config.data.max_prompt_length,
    max_response_length=manner.max_tokens,
    prompt_buckets=(),
    response_buckets=(),
  )
  rollout = dataclasses.replace(config.rollout, max_batch_rows=manner.max_batch_rows or config.rollout.max_batch_rows)
  config = dataclasses.replace(config, data=data, rollout=rollout)
  return Speaker(*open_source(workdir, model, config, step, manner.dtype), manner)


def with_system(messages: Messages, system: str | None) -> Messages:
  """The conversation, behind a system message of this content unless that is None or it has one."""
  if system is None or any(message['role'] == 'system' for message in messages):
    return messages
  return [{'role': 'system', 'content': system}, *messages]


def answers(speaker: Speaker, messages: Messages) -> list[str]:
  """The n completions of what --prompt asks.

  Raises:
    UserError: it is too long.
  """
  tokens = speaker.prompt(messages, '--prompt')
  session = speaker.session
  return session.sampler.sample(session.base, speaker.parameters, [tokens], **speaker.options()).text


@dataclasses.dataclass(frozen=True)
class Question:
  """A row of a file of prompts."""

  row: Row
  messages: Messages


def read_questions(source: str, system: str | None) -> list[Question]:
  """The rows of --prompts, each `with_system`.

  Raises:
    UserError: no such file, or a row that asks nothing: file and line are named.
  """
  return [Question(row, with_system(conversation(row), system)) for row in read_prompts(source, '--prompts')]


def answer_all(
  speaker: Speaker, questions: Sequence[Question], announce: Callable[[str], None]
) -> Iterator[tuple[int, dict[str, Any]]]:
  """(number, record) of each of the n answers to each question, as they are finished.

  Args:
    speaker: who answers.
    questions: at least one.
    announce: told about the progress, every few seconds.

  Returns:
    Numbers are question · n + answer. A record has `row` (line or row number in the file), `id` (the row's `id` or
    `idx`, where it has one), `sample` (of 0 … n − 1), `prompt` (messages), `completion`, `finish_reason` ('stop' or
    'length'), `tokens` and `log_prob` (sum over the tokens, at temperature 1 and without truncation).

  Raises:
    UserError: a row is too long, or the chat template refuses it; before anything is sampled.
  """
  prompts = [speaker.prompt(question.messages, question.row.origin) for question in questions]
  options = speaker.options()
  n = options['n']
  records = speaker.session.sampler.stream(speaker.session.base, speaker.parameters, prompts, **options)
  return _counted((_record(questions, n, done) for done in records), len(prompts) * n, announce)


def _record(questions: Sequence[Question], n: int, done: Completion) -> tuple[int, dict[str, Any]]:
  question = questions[done.sample // n]
  named = [question.row.value[name] for name in ('id', 'idx') if name in question.row.value]
  return done.sample, {
    'row': question.row.number,
    **({'id': plain(named[0])} if named else {}),  # Of a parquet file it may be anything.
    'sample': done.sample % n,
    'prompt': question.messages,
    'completion': done.text,
    'finish_reason': 'stop' if done.stopped else 'length',
    'tokens': len(done.tokens),
    'log_prob': float(done.model_log_probs.sum()),
  }


def _counted(
  numbered: Iterable[tuple[int, dict[str, Any]]], total: int, announce: Callable[[str], None]
) -> Iterator[tuple[int, dict[str, Any]]]:
  start = said = time.monotonic()
  tokens = 0
  announce(f'Sampling {total} completions …')
  for count, (number, record) in enumerate(numbered, start=1):
    yield number, record
    tokens += record['tokens']
    now = time.monotonic()
    if now - said >= PROGRESS_SECONDS or count == total:
      said = now
      announce(f'{count} of {total} completions, {tokens / (now - start):,.0f} tokens/s')


def check_output(path: str, overwrite: bool) -> None:
  """Makes sure that answers can be written to --output, without touching it.

  Raises:
    UserError: they cannot, or it is there already and may not be overwritten.
  """
  target = pathlib.Path(path)
  if not is_local(path):
    raise UserError(f'--output={path} is not on a file system, where answers are kept as they come: name a local file.')
  if target.is_dir():
    raise UserError(f'--output={path} is a directory: name a file.')
  if target.exists() and not overwrite:
    raise UserError(f'--output={path} is there already: name another file, or add --overwrite.')
  try:
    target.parent.mkdir(parents=True, exist_ok=True)
  except OSError as error:
    raise UserError(f'--output={path} cannot be written ({error}): name another file.') from error


def write_to_file(path: str, numbered: Iterable[tuple[int, dict[str, Any]]]) -> None:
  """Writes every record when it comes, and puts the file in the order of the numbers when all are there.

  Raises:
    UserError: the file cannot be written; what has been written stays.
  """
  lines = {}
  try:
    with open(path, 'w', encoding='utf-8') as file:
      for number, record in numbered:
        lines[number] = _line(record)
        file.write(lines[number])
        file.flush()
    write_atomically(path, ''.join(lines[number] for number in sorted(lines)))
  except OSError as error:
    raise UserError(
      f'--output={path} cannot be written ({error}): {len(lines)} completions have been drawn, those before the fault '
      'are in it; make room, or name another file.'
    ) from error


def write_in_order(stream: TextIO, numbered: Iterable[tuple[int, dict[str, Any]]]) -> None:
  """Writes a record once all before it are there; at an interruption, all that have come."""
  waiting: dict[int, str] = {}
  due = 0
  try:
    for number, record in numbered:
      waiting[number] = _line(record)
      while due in waiting:
        stream.write(waiting.pop(due))
        due += 1
      stream.flush()
  finally:
    stream.writelines(waiting[number] for number in sorted(waiting))
    stream.flush()


def _line(record: dict[str, Any]) -> str:
  return json.dumps(record, allow_nan=False) + '\n'


class Chat:
  """A conversation: what has been said, and who answers."""

  def __init__(self, speaker: Speaker, system: str | None, announce: Callable[[str], None]):
    """A conversation in which nothing has been said.

    Args:
      speaker: who answers.
      system: content of a system message; None: there is none.
      announce: told what a user may wait for.
    """
    self._start = with_system([], system)
    self.messages = self._start
    self._speaker, self._announce = speaker, announce
    session = speaker.session
    data = dataclasses.replace(session.config.data, prompt_buckets=CHAT_BUCKETS)
    rollout = dataclasses.replace(session.config.rollout, decode_chunk=CHAT_CHUNK)
    config = dataclasses.replace(session.config, data=data, rollout=rollout)
    # A cache that is resized would make an answer wait for the compiler in its middle.
    self._sampler = make_sampler(config, session.policy, session.tokenizer, session.mesh, resized=False)
    self._lengths = bucket_lengths(CHAT_BUCKETS, data.max_prompt_length)
    self._compiled: set[int | None] = set()
    self._turns = 0

  def answer(self, text: str, write: Callable[[str], None]) -> Literal['stop', 'length', 'interrupted']:
    """Answers what the user says, and remembers both; Ctrl-C ends the answer, and what has been said of it remains.

    Args:
      text: what the user says.
      write: receives the answer piece by piece.

    Returns:
      Why it ended.

    Raises:
      UserError: the conversation is too long with this text, which is not remembered.
    """
    asked = [*self.messages, {'role': 'user', 'content': text}]
    tokens = self._speaker.prompt(asked, 'The conversation', '/reset forgets what has been said')
    if (length := smallest_bucket(self._lengths, len(tokens))) not in self._compiled:
      self._compiled.add(length)
      self._announce(f'Preparing for conversations of up to {length} tokens; the first time, this takes a while …')
    said, ended = '', 'interrupted'
    with _noting_interrupts() as interrupted:
      for look in self._looks(tokens):
        done = isinstance(look, Completion)
        now = look.text if done else self._settled(look.tokens.tolist())
        write(now[len(said) :])
        said = now
        if done:
          ended = 'stop' if look.stopped else 'length'
        elif interrupted():
          break
    self._turns += 1
    self.messages = [*asked, {'role': 'assistant', 'content': said}]
    return ended

  def forget(self) -> None:
    """Forgets what has been said, but for the system message."""
    self.messages = self._start

  def _looks(self, tokens: list[int]) -> Iterator[Any]:
    session, options = self._speaker.session, self._speaker.options(step=self._turns)
    return self._sampler.stream_drafts(session.base, self._speaker.parameters, [tokens], **options)

  def _settled(self, tokens: list[int]) -> str:
    """The text that no later token changes: a last character that lacks some of its bytes is a replacement."""
    return to_text(self._speaker.session.tokenizer, tokens).removesuffix('\N{REPLACEMENT CHARACTER}')


@contextlib.contextmanager
def _noting_interrupts() -> Iterator[Callable[[], bool]]:
  """Yields what tells whether Ctrl-C was pressed, which raises KeyboardInterrupt the second time only."""
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
  """Answers line after line: /reset forgets the conversation, /exit or the end of input ends it.

  Args:
    chat: a conversation.
    read: the next line; raises EOFError at the end.
    out: receives the answers alone, each as it is drawn and with a line break behind it.
    announce: told everything else.
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
      announce('\n/exit ends, and so does Ctrl-D.')
      continue
    if line == '/exit':
      return
    if line == '/reset':
      chat.forget()
      announce('Forgotten.')
    elif line:
      try:
        ended = chat.answer(line, write)
      except UserError as error:
        announce(str(error))
        continue
      write('\n')
      if ended == 'length':
        announce('(Cut off at --max_tokens.)')
