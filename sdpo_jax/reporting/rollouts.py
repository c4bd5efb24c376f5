"""Rollouts in a page: an index of all, and their texts in compressed pieces that the page unpacks on demand.

Nothing in `rollouts/` is trusted: the texts are from models and users, and files may be truncated or from other tools.
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Iterator, Mapping, Sequence
import dataclasses
import functools
import itertools
import json
import re
from typing import Any
import zlib

from etils import epath

from sdpo_jax.config.privacy import public_text
from sdpo_jax.data.rows import is_message
from sdpo_jax.errors import UserError
from sdpo_jax.files import json_object, jsonable, read_bytes
from sdpo_jax.reporting.run_files import finite
from sdpo_jax.training.directory.sealed import result_fault

FOLDER = 'rollouts'
PIECE = 1 << 20  # Approximate bytes of JSON per piece.
EXCERPT, SAID = 300, 80  # Characters of a question and of a completion in the index.
CREDIT = 10.0  # Limit of the log-prob difference between student and teacher, in nats.
NUMBERS = ('group', 'score', 'divergence', 'advantages')  # Fields of a rollout that are only numbers.
_FILE = re.compile(r'(\d{1,12})\.jsonl')


# Columns of the list of rollouts. `question` is an index into the questions; `length` is in tokens;
# `divergence` is the mean over them; `taught` is 1 if a teacher read a separate prompt; `said` is the beginning of the
# completion; `cut` is 1 if it ended at the token limit; `piece` is the piece that holds it, at index `place`.
COLUMNS = ('run', 'step', 'question', 'score', 'length', 'divergence', 'taught', 'said', 'cut', 'piece', 'place')


@dataclasses.dataclass(frozen=True)
class StepFile:
  """The rollouts of one file, checked and packed."""

  step: int
  entries: tuple[dict[str, Any], ...]  # The index's fields of each rollout.
  pieces: tuple[str, ...]  # Compressed JSON arrays in base 64.
  places: tuple[tuple[int, int], ...]  # (piece, place) of each entry.
  unreadable: int  # Lines that are not rollouts, except a truncated last one.
  fault: str | None  # How the file differs from what was written; None: it does not.

  def first(self, count: int, size: int) -> StepFile:
    """Return the file with at most `count` of its rollouts, in pieces of at most `size` bytes together."""
    ends = itertools.accumulate(map(len, self.pieces))
    whole = sum(end <= size for end in ends)
    places = [place for place in self.places[:count] if place[0] < whole]
    pieces = self.pieces[: places[-1][0] + 1] if places else ()
    return dataclasses.replace(self, entries=self.entries[: len(places)], places=tuple(places), pieces=pieces)


@dataclasses.dataclass
class RolloutPages:
  """The rollouts of all runs in a page."""

  index: dict[str, list[Any]]  # Each of `COLUMNS` with an entry per rollout; `questions`: `id` and beginning of `text`.
  pieces: list[str]
  remarks: list[str]  # Sentences about what is left out.
  full: dict[str, float]  # Name of a colouring → the value that gets the full colour.

  def __len__(self) -> int:
    return len(self.index['step'])


class RolloutFiles:
  """Reader of a run's rollouts, with or without their texts, that caches unchanged files."""

  def __init__(self, workdir: epath.PathLike, *, texts: bool = True):
    self.workdir, self.texts = epath.Path(workdir), texts
    self._known: dict[epath.Path, tuple[Any, Any]] = {}

  def steps(self, last: int | None) -> list[int]:
    """Return the steps with rollouts, up to the step `last`; None: all steps."""
    folder = self.workdir / FOLDER
    if not folder.is_dir():
      return []
    found = [int(match[1]) for path in folder.iterdir() if (match := _FILE.fullmatch(path.name))]
    return sorted(step for step in set(found) if last is None or step <= last)

  def read(self, step: int) -> StepFile:
    """Read the rollouts of a step.

    Raises:
      UserError: the file cannot be read.
    """
    path = self.workdir / FOLDER / f'{step}.jsonl'
    return self._read(path, lambda content: pack(step, content, self.texts))

  def altered(self) -> list[str]:
    """Return a sentence for each evaluation that is not as it was written; errors as in `read`."""
    paths = sorted((self.workdir / 'eval').glob('*.json'))
    faults = {path: self._read(path, functools.partial(result_fault, path.name))[0] for path in paths}
    return [f'eval/{path.name}: {fault}.' for path, fault in faults.items() if fault]

  def _read(self, path: epath.Path, act: Callable[[bytes], Any]) -> Any:
    """Return the result of `act` for the content of a file; a known one if the file is unchanged."""
    stat = path.stat()
    version = (stat.length, stat.mtime)
    if path not in self._known or self._known[path][0] != version:
      self._known[path] = version, act(read_bytes(path, 'make it readable, or remove it'))
    return self._known[path][1]


def pack(step: int, content: bytes, texts: bool = True) -> StepFile:
  """Parse the content of a rollout file and pack its rollouts; without `texts`, only their numbers."""
  lines = content.split(b'\n')
  whole, entries, rows, unreadable = content.endswith(b'\n'), [], [], 0
  for number, line in enumerate(lines, 1):
    if not line.strip():
      continue
    rollout = _parsed(line)
    if rollout is None:
      unreadable += whole or number < len(lines)
      continue
    entries.append(_entry(rollout))
    if not texts:
      rewards = {name: finite(value) for name, value in rollout.get('rewards', {}).items()}
      rollout = {name: rollout[name] for name in NUMBERS if name in rollout} | ({'rewards': rewards} if rewards else {})
      entries[-1]['said'] = ''
    rows.append(json.dumps(rollout, allow_nan=False, separators=(',', ':')))
  pieces, places = [], []
  for piece in _pieces(rows):
    places += [(len(pieces), place) for place in range(len(piece))]
    pieces.append(packed('[' + ','.join(piece) + ']'))
  fault, _ = result_fault(f'{step}.jsonl', content)
  return StepFile(step, tuple(entries), tuple(pieces), tuple(places), unreadable, fault)


def packed(text: str) -> str:
  """Compress an ASCII text (zlib) and encode it in base 64."""
  return base64.b64encode(zlib.compress(text.encode('ascii'), 6)).decode('ascii')


def collect(sources: Sequence[tuple[RolloutFiles, int | None]], most: int, size: int) -> RolloutPages:
  """Collect the rollouts of runs for a page.

  Args:
    sources: each run's files and its last finished step.
    most: maximum number of rollouts. If there are more, each run gets an equal share, from steps spread over the run.
    size: maximum bytes of all pieces, shared in the same way.
  """
  found, sizes = RolloutPages({name: [] for name in (*COLUMNS, 'questions')}, [], [], {}), 0
  questions: dict[tuple[int, str, str], int] = {}
  largest: dict[str, list[float]] = {}
  for run, (files, last) in enumerate(sources):
    steps, read, room, unreadable = files.steps(last), [], most // len(sources), 0
    share, whole = size * (run + 1) // len(sources), True  # `whole`: the step that was read first is complete.
    try:
      found.remarks += [f'{files.workdir.name}: {sentence}' for sentence in files.altered()]
    except (UserError, OSError) as error:
      found.remarks.append(f'{files.workdir.name}: {error}')
    for step in _spread(steps):  # The first and the last step, then midpoints.
      if room <= 0:
        break
      try:
        file = files.read(step)
        if not read:
          held, file = len(file.entries), file.first(room, share - sizes)
          whole = len(file.entries) == held
      except (UserError, OSError) as error:
        found.remarks.append(f'{files.workdir.name}: {error}')
        continue
      taken = sum(map(len, file.pieces))
      if len(file.entries) > room or sizes + taken > share:
        break
      room, sizes = room - len(file.entries), sizes + taken
      unreadable += file.unreadable
      if file.fault:
        found.remarks.append(f'{files.workdir.name}: {FOLDER}/{file.step}.jsonl: {file.fault}.')
      read.append(file)
    for file in sorted(read, key=lambda each: each.step):
      _add(found, questions, run, file, texts=files.texts)
      for entry in file.entries:
        for name, value in entry['largest'].items():
          largest.setdefault(name, []).append(value)
    if len(read) < len(steps) or not whole:
      part = '' if whole else ', the last one only in part,'
      found.remarks.append(
        f'{files.workdir.name}: rollouts of {len(read)} of {len(steps)} steps{part} are in this page (--max_rollouts, '
        '--max_mb).'
      )
    if unreadable:
      found.remarks.append(f'{files.workdir.name}: {unreadable} lines of {FOLDER}/ are not rollouts and are left out.')
  # The 80th percentile limits the effect of outliers.
  found.full = {name: sorted(values)[int(0.8 * (len(values) - 1))] or 1.0 for name, values in largest.items()}
  return found


def _add(
  found: RolloutPages, questions: dict[tuple[int, str, str], int], run: int, file: StepFile, *, texts: bool
) -> None:
  index, first = found.index, len(found.pieces)
  found.pieces += file.pieces
  for entry, (piece, place) in zip(file.entries, file.places, strict=True):
    key = run, entry['id'], entry['question']
    if key not in questions:
      questions[key] = len(index['questions'])
      name, text = (entry['id'], entry['question']) if texts else ('', f'question {len(index["questions"]) + 1}')
      index['questions'].append({'id': name, 'text': text})
    row = entry | {'run': run, 'step': file.step, 'question': questions[key], 'piece': first + piece, 'place': place}
    for name in COLUMNS:
      index[name].append(row[name])


def _spread(steps: Sequence[int]) -> Iterator[int]:
  """Yield distinct steps so that the first ones are spread over all of them: the last, the first, then midpoints."""
  yield from dict.fromkeys([*steps[-1:], *steps[:1]])
  spans = [(0, len(steps) - 1)]
  for low, high in spans:  # The list grows during the loop.
    middle = (low + high) // 2
    if middle > low:
      yield steps[middle]
      spans += [(low, middle), (middle, high)]


def _pieces(rows: Sequence[str]) -> Iterator[list[str]]:
  piece, size = [], 0
  for row in rows:
    if piece and size + len(row) > PIECE:
      yield piece
      piece, size = [], 0
    piece.append(row)
    size += len(row)
  if piece:
    yield piece


# ---------------------------------------------------------------------------------------------------------------------
# One rollout
# ---------------------------------------------------------------------------------------------------------------------


def _parsed(line: bytes) -> dict[str, Any] | None:
  """Return the fields of a rollout that a page shows, each of its type or None; None if the line is not a rollout."""
  value = json_object(line)
  if value is None or not isinstance(value.get('completion'), str):
    return None
  tokens = _list(value.get('tokens'), str)
  found = {
    'id': _text(value.get('id')),
    'group': value['group'] if type(value.get('group')) is int else None,
    'prompt': _messages(value.get('prompt')),
    'completion': value['completion'],
    'finish_reason': _text(value.get('finish_reason')),
    'score': finite(value.get('score')),
    'ungraded': public_text(_text(value.get('ungraded')) or '') or None,  # May name a server.
    'rewards': jsonable(value['rewards']) if isinstance(value.get('rewards'), dict) else None,
    'feedback': _text(value.get('feedback')),
    'teacher_prompt': _messages(value.get('teacher_prompt')),
    'divergence': _numbers(value.get('divergence')),
    'tokens': tokens,
    'advantages': _numbers(value.get('advantages')),
    'top_tokens': _top_tokens(value.get('top_tokens'), tokens),
  }
  return {name: each for name, each in found.items() if each is not None}


def _entry(rollout: Mapping[str, Any]) -> dict[str, Any]:
  """Return the index's fields of a rollout."""
  prompt, divergence = rollout.get('prompt') or [], rollout.get('divergence')
  known = [value for value in divergence or [] if value is not None]
  lengths = [len(rollout[name]) for name in ('tokens', 'divergence') if name in rollout]
  return {
    'id': rollout.get('id', ''),
    'question': prompt[-1]['content'][:EXCERPT] if prompt else '',
    'score': rollout.get('score'),
    'length': lengths[0] if lengths else None,
    'divergence': round(sum(known) / len(known), 5) if known else None,
    'taught': int('teacher_prompt' in rollout),
    'said': ' '.join(rollout['completion'][: 2 * SAID].split())[:SAID],
    'cut': int(rollout.get('finish_reason') == 'length'),
    'largest': _largest(rollout),
  }


def _largest(rollout: Mapping[str, Any]) -> dict[str, float]:
  """Return the largest absolute value of each colouring (divergence, advantage, credit) in a rollout."""
  top = rollout.get('top_tokens', {})
  said = [top[side]['own'] if top.get(side) else [] for side in ('student', 'teacher')]
  credit = [right - left for left, right in zip(*said, strict=False) if left is not None and right is not None]
  shown = {'divergence': rollout.get('divergence'), 'advantage': rollout.get('advantages'), 'credit': credit}
  sizes = {name: [abs(value) for value in values or () if value is not None] for name, values in shown.items()}
  return {name: min(max(each), CREDIT if name == 'credit' else max(each)) for name, each in sizes.items() if each}


def _text(value: Any) -> str | None:
  return value if isinstance(value, str) else None


def _list(value: Any, kind: type) -> list[Any] | None:
  return value if isinstance(value, list) and all(isinstance(item, kind) for item in value) else None


def _numbers(value: Any) -> list[float | None] | None:
  return [finite(item) for item in value] if isinstance(value, list) else None


def _messages(value: Any) -> list[dict[str, str]] | None:
  if isinstance(value, str):
    return [{'role': '', 'content': value}]
  if not isinstance(value, list) or not value:
    return None
  if not all(map(is_message, value)):
    return None
  return [{'role': each['role'], 'content': each['content']} for each in value]


def _top_tokens(value: Any, tokens: list[str] | None) -> dict[str, Any] | None:
  """Return the top tokens if every token has them: texts by id, and each side's values."""
  if not isinstance(value, dict) or tokens is None or not isinstance(value.get('texts'), dict):
    return None
  texts = {str(token): text for token, text in value['texts'].items() if isinstance(text, str)}
  found = {name: _side(value.get(name), len(tokens)) for name in ('student', 'teacher')}
  return None if found == {'student': None, 'teacher': None} else found | {'texts': texts}


def _side(value: Any, length: int) -> dict[str, Any] | None:
  if not isinstance(value, dict) or not all(
    isinstance(value.get(name), list) and len(value[name]) == length for name in ('ids', 'log_probs', 'own')
  ):
    return None
  ids = [_list(position, int) or [] for position in value['ids']]
  log_probs = [_numbers(position) or [] for position in value['log_probs']]
  if any(len(left) != len(right) for left, right in zip(ids, log_probs, strict=True)):
    return None
  return {'ids': ids, 'log_probs': log_probs, 'own': _numbers(value['own'])}
