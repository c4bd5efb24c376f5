"""The owner of a run directory: a description of a process by which another one can tell whether it still runs."""

from __future__ import annotations

import dataclasses
import datetime
import hashlib
import json
import os
import pathlib
import secrets
import socket

from sdpo_jax.training.directory import sealed

# The results of `state`.
GONE, RUNNING, STOPPED, ELSEWHERE = 'gone', 'running', 'stopped', 'elsewhere'


@dataclasses.dataclass(frozen=True)
class Owner:
  """The process that writes to a run directory."""

  host: str
  pid: int
  started: int | None  # Clock ticks from boot to the process's start, which tells reuses of a pid apart.
  machine: str  # Digest of the machine's id, since two machines may have one name; empty if unknown.
  boot: str  # Id of the machine's current boot; empty if unknown.
  namespace: str  # PID namespace of the process, for example that of a container.
  since: str  # The time in UTC at which it took the directory.
  token: str  # Random text, new for each start.
  fencing_epoch: int
  beat: int = 0  # Incremented as long as the process lives.
  released: bool = False  # Whether it has ended and released the lock.

  def __str__(self) -> str:
    return f'host {self.host}, process {self.pid}, since {self.since}'

  def to_json(self) -> str:
    """Return the text of the lock."""
    return sealed.seal(dataclasses.asdict(self))


def this_process(fencing_epoch: int) -> Owner:
  """Return a description of this process as the owner from now on."""
  return Owner(
    host=socket.gethostname(),
    pid=os.getpid(),
    started=_started(os.getpid()),
    machine=machine_digest(),
    boot=_boot(),
    namespace=_namespace(),
    since=datetime.datetime.now(datetime.UTC).strftime('%Y-%m-%d %H:%M:%S UTC'),
    token=secrets.token_hex(8),
    fencing_epoch=fencing_epoch,
  )


def parse(content: bytes | None) -> Owner | None:
  """Return the owner that a lock names; None if the lock is new, damaged, or was not written by this program."""
  try:
    fields = json.loads(content or b'')
    if sealed.SEAL in fields:  # An earlier version wrote none. The lock is padded.
      fields = sealed.unseal(content.rstrip(b' '))
      del fields[sealed.SEAL]
    owner = Owner(**fields)
  except (ValueError, TypeError, RecursionError):
    return None
  texts = ('host', 'machine', 'boot', 'namespace', 'since', 'token')
  wanted = {'pid': int, 'fencing_epoch': int, **dict.fromkeys(texts, str)}
  right = all(type(fields[name]) is kind for name, kind in wanted.items())
  return owner if right and type(owner.beat) is int and type(owner.released) is bool else None


def state(owner: Owner) -> str:
  """Return `GONE`, `RUNNING` or `STOPPED` for a process of this machine, `ELSEWHERE` for one not visible from here."""
  if owner.released:
    return GONE
  if owner.boot != _boot():
    restarted = owner.boot and owner.machine and (owner.host, owner.machine) == (socket.gethostname(), machine_digest())
    return GONE if restarted else ELSEWHERE
  if owner.namespace != _namespace() or (not owner.boot and owner.host != socket.gethostname()):
    return ELSEWHERE
  fields = _fields(owner.pid)
  if fields is None:
    return RUNNING if not owner.boot and _exists(owner.pid) else GONE
  if int(fields[19]) != owner.started or fields[0] in 'ZXx':
    return GONE
  return STOPPED if fields[0] in 'Tt' else RUNNING


def same_kernel(owner: Owner) -> bool:
  """Return whether a process runs, or ran, under the same kernel as this one, so that file locks apply to both."""
  return bool(owner.boot) and owner.boot == _boot()


def _text(path: str) -> str:
  """Return the text of a system file; empty if it does not exist: not on Linux, in a container, of an ended process."""
  try:
    return pathlib.Path(path).read_text(errors='replace').strip()
  except OSError:
    return ''


def machine_digest() -> str:
  """Return 16 hex digits that identify this machine; empty if it has no id."""
  text = _text('/etc/machine-id')
  return hashlib.sha256(text.encode()).hexdigest()[:16] if text else ''  # The id itself is confidential.


def _boot() -> str:
  return _text('/proc/sys/kernel/random/boot_id')


def _namespace() -> str:
  try:
    return os.readlink('/proc/self/ns/pid')
  except OSError:
    return ''


def _fields(pid: int) -> list[str] | None:
  """Return the fields of /proc/PID/stat after the name, the state first; None if there is no such process."""
  text = _text(f'/proc/{pid}/stat')
  return text.rpartition(')')[2].split() if text else None  # A name may hold spaces and brackets.


def _started(pid: int) -> int | None:
  fields = _fields(pid)
  return None if fields is None else int(fields[19])


def _exists(pid: int) -> bool:
  try:
    os.kill(pid, 0)
  except ProcessLookupError:
    return False
  except PermissionError:
    pass  # A process of another user.
  return True
