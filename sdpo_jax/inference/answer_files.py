"""Output of generated answers: to a file, each as it arrives, or to a stream in the order of the prompts."""

from __future__ import annotations

from collections.abc import Iterable
import json
from typing import Any, TextIO

from sdpo_jax import files
from sdpo_jax.errors import UserError


def check_answer_file(path: str, overwrite: bool) -> None:
  """Check that answers can be written to --output, without touching it.

  Raises:
    UserError: as `files.check_output`, or the path is not on a file system.
  """
  if not files.is_local(path):
    raise UserError(f'--output={path} must be a local file, since answers are written to it as they arrive.')
  files.check_output(path, overwrite=overwrite)


def write_to_file(path: str, numbered: Iterable[tuple[int, dict[str, Any]]]) -> None:
  """Write every record when it arrives, and finally sort the file by number.

  Raises:
    UserError: the file cannot be written; records already written stay.
  """
  lines = {}
  try:
    with open(path, 'w', encoding='utf-8') as file:
      for number, record in numbered:
        lines[number] = _line(record)
        file.write(lines[number])
        file.flush()
    files.write_output(path, ''.join(lines[number] for number in sorted(lines)))
  except OSError as error:
    raise UserError(
      f'--output={path} cannot be written ({error}): it holds the completions drawn until then, at most {len(lines)}; '
      'make room, or name another file.'
    ) from error


def write_in_order(stream: TextIO, numbered: Iterable[tuple[int, dict[str, Any]]]) -> None:
  """Write each record after all earlier ones; on an interrupt, write all that have arrived."""
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
