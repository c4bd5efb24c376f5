"""Small files that are replaced by compare-and-swap: only if no other process has replaced them meanwhile.

In Google Cloud Storage a write may name the generation that it replaces (`ifGenerationMatch`), and is refused if the
object has another generation by then. TensorStore, which also writes the checkpoints there, does this with the same
credentials. Elsewhere the content is compared before it is replaced, which is safe only under a lock.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from etils import epath

from sdpo_jax.errors import UserError, first_line
from sdpo_jax.files import check_file, write_atomically

_REFUSED = (ValueError, OSError, RuntimeError)  # Raised by TensorStore for errors of the server or the network.
# Retries of a failed or unanswered request, after 0.5, 1, 2 … seconds; some minutes in total.
RETRIES = {'max_retries': 10, 'initial_delay': '500ms', 'max_delay': '32s'}


@dataclasses.dataclass(frozen=True)
class Seen:
  """The content of a file when it was last read or written."""

  content: bytes | None  # None: the file did not exist.
  generation: Any = None


class Files:
  """Guarded files in any directory that etils opens; on a disk, they are replaced atomically."""

  exclusive = False  # Whether only one of two processes that replace the same content can succeed.

  def __init__(self, workdir: epath.Path):
    self._workdir = workdir

  def read(self, name: str) -> Seen:
    """Return the content of a file.

    Raises:
      UserError: it cannot be read.
    """
    path = self._workdir / name
    check_file(path, 'move it away')
    try:
      return Seen(path.read_bytes())
    except FileNotFoundError:
      return Seen(None)
    except OSError as error:
      raise UserError(f'{path} cannot be read ({first_line(error)}): see that its file system works.') from error

  def replace(self, name: str, content: bytes, seen: Seen) -> Seen | None:
    """Replace the content `seen`; return None, and leave the file as it is, if it has other content by now.

    Raises:
      OSError: it cannot be written.
    """
    if self.read(name).content != seen.content:
      return None
    write_atomically(self._workdir / name, content.decode())
    return Seen(content)


class Objects:
  """Guarded files in a directory of Google Cloud Storage."""

  exclusive = True

  def __init__(self, workdir: epath.Path):
    import tensorstore  # A dependency of Orbax; slow to import.

    self._workdir = workdir
    bucket, _, folder = str(workdir).removeprefix('gs://').rstrip('/').partition('/')
    context = {'gcs_request_retries': RETRIES}
    specification = {'driver': 'gcs', 'bucket': bucket, 'path': f'{folder}/' if folder else '', 'context': context}
    try:
      self._store = tensorstore.KvStore.open(specification).result()
    except _REFUSED as error:
      raise self._unreachable(error) from error

  def read(self, name: str) -> Seen:
    """Return the content of an object; errors as in `Files.read`."""
    try:
      found = self._store.read(name).result()
    except _REFUSED as error:
      raise self._unreachable(error) from error
    return Seen(found.value if found.state == 'value' else None, found.stamp.generation)

  def replace(self, name: str, content: bytes, seen: Seen) -> Seen | None:
    """Replace an object as in `Files.replace`; raise UserError if it cannot be written."""
    try:
      generation = self._store.write(name, content, if_equal=seen.generation).result().generation
    except _REFUSED as error:
      raise self._unreachable(error) from error
    if generation:
      return Seen(content, generation)
    # The first attempt may have succeeded and its response been lost: then the object has the new content.
    now = self.read(name)
    return now if now.content == content else None

  def _unreachable(self, error: Exception) -> UserError:
    return UserError(
      f'{self._workdir} cannot be reached or may not be written ({first_line(error)}): check the network and the '
      'credentials, then start the same command again.'
    )


# The guarded files of one directory.
Records = Files | Objects


def open_records(workdir: epath.Path) -> Records:
  """Return the guarded files of a run directory."""
  return Objects(workdir) if str(workdir).startswith('gs://') else Files(workdir)
