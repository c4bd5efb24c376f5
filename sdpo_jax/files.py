"""Writing small files so that a kill never leaves half of one."""

from __future__ import annotations

from etils import epath


def is_local(path: epath.PathLike) -> bool:
  """Whether `path` is on a file system, and not in an object store such as gs://."""
  return '://' not in str(path)


def write_atomically(path: epath.PathLike, text: str) -> None:
  """Writes `text` to `path`: whoever reads it sees the old file or the new one (an object store promises that)."""
  path = epath.Path(path)
  if not is_local(path):
    path.write_text(text)
    return
  partial = path.parent / (path.name + '.partial')
  partial.write_text(text)
  partial.replace(path)
