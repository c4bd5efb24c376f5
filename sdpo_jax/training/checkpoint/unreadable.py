"""Distinguishes damaged data from data out of reach: on a failing disk, in a busy store, or without permission."""

from __future__ import annotations

import errno
import functools
import logging
import re
import sys

from sdpo_jax.distributed.cluster import chain

# Errors that further attempts would repeat: a part is missing, or is a file instead of a folder, or the like.
_DAMAGE = {errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.EINVAL, errno.EEXIST, errno.ENOTEMPTY, errno.ENAMETOOLONG}
# The beginnings of messages of TensorStore and XLA about data that may be intact.
_STATUS = re.compile(
  'PERMISSION_DENIED|UNAVAILABLE|DEADLINE_EXCEEDED|RESOURCE_EXHAUSTED|UNAUTHENTICATED|ABORTED|CANCELLED|INTERNAL'
)
_CODE = re.compile(r"os_error_code='(\d+)'")  # In TensorStore's messages.
# Orbax's reading of an array, and what it raises.
_READ = re.compile(r'coro=<async_deserialize\(|(coro=<|object )_read_array_index|error while reading array index')
_HTTP = {401, 403, 407, 408, 429}  # And all codes from 500 on.


def is_out_of_reach(error: BaseException) -> bool:
  """Return whether an error, or one of its causes, says that data could not be read, not that they are damaged."""
  return any(_says_so(link) for link in chain(error))


def _says_so(error: BaseException) -> bool:
  if isinstance(error, MemoryError | ImportError | TimeoutError):
    return True
  if isinstance(error, FileNotFoundError | NotADirectoryError | IsADirectoryError):
    return False
  if isinstance(error, OSError):  # Errors of object store clients have no number.
    return error.errno not in _DAMAGE
  status = getattr(error, 'code', None)  # Set by object store clients.
  if isinstance(status, int) and not isinstance(status, bool):
    return status in _HTTP or status >= 500
  text = str(error)
  code = _CODE.search(text)
  if code is not None:
    return int(code.group(1)) not in _DAMAGE
  return _STATUS.match(text) is not None


@functools.cache
def ignore_given_up_reads() -> None:
  """Leave tracebacks out that say no more than that reads of a checkpoint were given up.

  If an array cannot be read, Orbax raises its error and closes its event loop. Of the other arrays, Python then prints
  errors that nobody awaits, or TensorStore's threads that they cannot notify the loop.
  """
  hook = sys.unraisablehook

  def print_others(unraisable: sys.UnraisableHookArgs) -> None:
    if str(unraisable.exc_value) != 'Event loop is closed' and not _READ.search(repr(unraisable.object)):
      hook(unraisable)

  sys.unraisablehook = print_others
  logging.getLogger('asyncio').addFilter(lambda record: not _READ.search(record.getMessage()))
