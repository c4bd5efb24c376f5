"""Whether what cannot be read is damaged, or only out of reach: a disk that fails, a store that is busy, no
permission.
"""

from __future__ import annotations

from collections.abc import Iterator
import errno
import re

# What was written has changed or is gone, whatever is tried again: a part is missing, or another kind of thing.
_DAMAGE = {errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.EINVAL, errno.EEXIST, errno.ENOTEMPTY, errno.ENAMETOOLONG}
# The beginnings of the messages of TensorStore and of XLA about what may well be whole.
_STATUS = re.compile(
  'PERMISSION_DENIED|UNAVAILABLE|DEADLINE_EXCEEDED|RESOURCE_EXHAUSTED|UNAUTHENTICATED|ABORTED|CANCELLED|INTERNAL'
)
_CODE = re.compile(r"os_error_code='(\d+)'")  # In TensorStore's messages.
_HTTP = {401, 403, 407, 408, 429}  # And those from 500 on.


def is_out_of_reach(error: BaseException) -> bool:
  """Return whether an error, or what caused it, says that something could not be read, and not that it is damaged."""
  return any(_says_so(link) for link in _links(error))


def _says_so(error: BaseException) -> bool:
  if isinstance(error, MemoryError | ImportError | TimeoutError):
    return True
  if isinstance(error, FileNotFoundError | NotADirectoryError | IsADirectoryError):
    return False
  if isinstance(error, OSError):  # Those of the clients of object stores have no number.
    return error.errno not in _DAMAGE
  status = getattr(error, 'code', None)  # Of the clients of object stores.
  if isinstance(status, int) and not isinstance(status, bool):
    return status in _HTTP or status >= 500
  text = str(error)
  code = _CODE.search(text)
  if code is not None:
    return int(code.group(1)) not in _DAMAGE
  return _STATUS.match(text) is not None


def _links(error: BaseException) -> Iterator[BaseException]:
  """Yield an error, those in it if it is a group, and what caused them."""
  seen: set[int] = set()
  waiting: list[BaseException | None] = [error]
  while waiting:
    link = waiting.pop()
    if link is None or id(link) in seen:
      continue
    seen.add(id(link))
    yield link
    waiting += [link.__cause__, link.__context__, *(link.exceptions if isinstance(link, BaseExceptionGroup) else ())]
