"""A cache of compiled programs in a folder, so that the next start of the same engine compiles nothing.

Compiled programs are read with pickle and then run, so whoever can write to the folder can run code here. Therefore the
folder must belong to the user of the process and be writable to nobody else, and a file is only read if its digest is
in the index beside it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
import contextlib
import hashlib
import importlib.metadata
import json
import logging
import os
import pathlib
import pickle
import platform
import stat
import sys
import time
from typing import Any

import jax
from jax.experimental import serialize_executable

from sdpo_jax.errors import UserError, first_line
from sdpo_jax.files import is_local, remove_partials, write_atomically
from sdpo_jax.models import identity
from sdpo_jax.serving.store.blobs import make_private
from sdpo_jax.training.directory.fingerprint import own_files

PACKAGES = 'jax', 'jaxlib', 'libtpu', 'flax', 'optax', 'numpy'
VARIABLES = 'XLA_FLAGS', 'LIBTPU_INIT_ARGS'
INDEX, PROGRAM = '.index.json', '.program'  # Suffixes of file names.
HOUR = 3600.0  # Seconds after which a file in no index is assumed to be left by a killed process.
KEPT = 4  # The most indices, each of other settings or versions; beyond them, the least recently used is removed.

_logger = logging.getLogger('sdpo_jax.serving')


def surroundings(devices: Sequence[jax.Device]) -> dict[str, Any]:
  """Return everything that a compiled program depends on besides its function and arguments, as JSON."""
  versions = {}
  for package in PACKAGES:
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
      versions[package] = importlib.metadata.version(package)
  return {
    'versions': {'python': sys.version, 'pickle': pickle.HIGHEST_PROTOCOL} | versions,
    'sources': identity.digest(own_files()),
    'variables': {name: os.environ.get(name) for name in VARIABLES},
    # The settings of JAX, except those of its cache, which do not change programs.
    'settings': {name: repr(value) for name, value in sorted(jax.config.values.items()) if 'cache' not in name},
    'devices': [[device.id, device.platform, device.device_kind] for device in devices],
    'platform': devices[0].client.platform_version,
    'processor': _processor() if devices[0].platform == 'cpu' else platform.machine(),
    'process': [jax.process_index(), jax.process_count()],
  }


def _processor() -> str:
  """Return an identifier of the CPU model and its instructions, since a program may use some that other CPUs lack."""
  with contextlib.suppress(OSError):
    lines = pathlib.Path('/proc/cpuinfo').read_text().splitlines()
    said = sorted({line for line in lines if line.startswith(('flags', 'Features', 'model name'))})
    return hashlib.sha256('\n'.join(said).encode()).hexdigest()
  return f'{platform.machine()} {platform.processor()}'


class ProgramFolder:
  """The compiled programs of one engine, in a folder that other engines may share.

  Files are named by the digest of their content, so that several processes can write at once. A file that is damaged or
  in no index is ignored, and its program is compiled again.
  """

  def __init__(self, folder: pathlib.Path, key: Mapping[str, Any], devices: Sequence[jax.Device]):
    """Open a folder, which is made if missing.

    Args:
      folder: a folder on a local file system.
      key: everything that all programs depend on: `surroundings`, and settings that change a function.
      devices: the devices that run the programs.

    Raises:
      UserError: the folder cannot be made, or other users can write to it.
    """
    if not is_local(str(folder)):
      raise UserError(f'{folder} cannot cache compiled programs, since others may write there: name a local folder.')
    self._folder, self._devices = folder, list(devices)
    try:
      make_private(folder)
      self._descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as error:
      raise UserError(
        f'{folder} cannot cache compiled programs ({first_line(error)}): name a folder of your own, not a link to one.'
      ) from error
    fault = _fault(os.fstat(self._descriptor))
    if fault:
      os.close(self._descriptor)
      raise UserError(
        f'{folder} {fault}, so others could run code here by putting a program there: name a folder of your own with '
        'mode 0700.'
      )
    self._name = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:32] + INDEX
    self._digests = self._parsed(self._name)
    self._new = False

  def close(self) -> None:
    """Close the folder."""
    os.close(self._descriptor)

  def get(self, name: str, in_tree: Any) -> jax.stages.Compiled | None:
    """Return a program, ready to run; None: it is not cached, or the file is damaged.

    Args:
      name: the name of the program, with the shapes of its arguments.
      in_tree: the tree structure of its arguments.
    """
    digest = self._digests.get(name)
    if digest is None:
      return None
    content = self._read(digest + PROGRAM)
    if content is None or hashlib.sha256(content).hexdigest() != digest:
      _logger.warning('%s is damaged: the program is compiled again.', self._folder / (digest + PROGRAM))
      return None
    try:
      executable, out_tree = pickle.loads(content)
      return serialize_executable.deserialize_and_load(
        executable,
        in_tree,
        jax.tree.structure(out_tree),
        backend=self._devices[0].client,
        execution_devices=self._devices,
      )
    # JAX and its runtime raise many types of errors for a program that they reject.
    except Exception as error:
      _logger.warning('%s cannot be loaded (%s), and is compiled again.', name, first_line(error))
      return None

  def put(self, name: str, compiled: jax.stages.Compiled) -> None:
    """Store a program; a failure is logged, and the next start compiles the program again."""
    try:
      executable, _, out_tree = serialize_executable.serialize(compiled)
      # JAX restores the tree structure from a tree of numbers.
      content = pickle.dumps((executable, jax.tree.unflatten(out_tree, list(range(out_tree.num_leaves)))))
      digest = hashlib.sha256(content).hexdigest()
      write_atomically(self._folder / (digest + PROGRAM), content, mode=0o600)
    except (OSError, ValueError, NotImplementedError, pickle.PicklingError, jax.errors.JaxRuntimeError) as error:
      _logger.warning('%s cannot be cached in %s (%s).', name, self._folder, first_line(error))
      return
    self._digests[name] = digest
    self._new = True

  def save(self) -> None:
    """Write the index with new programs, and remove the oldest indices and the files that only these name."""
    try:
      if self._new:
        write_atomically(self._folder / self._name, json.dumps(self._digests, indent=1), mode=0o600)
        self._new = False
      elif self._digests:
        os.utime(self._name, dir_fd=self._descriptor)
      self._prune()
    except OSError as error:
      _logger.warning('Compiled programs cannot be cached in %s (%s).', self._folder, first_line(error))

  def _prune(self) -> None:
    remove_partials(self._folder, HOUR)
    names = os.listdir(self._descriptor)
    indices = sorted((name for name in names if name.endswith(INDEX)), key=self._written)
    if len(indices) <= KEPT:
      return
    for name in indices[:-KEPT]:
      os.unlink(name, dir_fd=self._descriptor)
    held = {digest for name in indices[-KEPT:] for digest in self._parsed(name).values()}
    for name in names:
      if name.endswith(PROGRAM) and name.removesuffix(PROGRAM) not in held:
        with contextlib.suppress(FileNotFoundError):
          # Another process may be about to add a younger file to its index.
          if self._written(name) < time.time() - HOUR:
            os.unlink(name, dir_fd=self._descriptor)

  def _written(self, name: str) -> float:
    return os.stat(name, dir_fd=self._descriptor).st_mtime

  def _parsed(self, name: str) -> dict[str, str]:
    """Return the digests in an index, by the names of programs; empty if it is missing or damaged."""
    content = self._read(name)
    if content is None:
      return {}
    try:
      found = json.loads(content)
    except (ValueError, RecursionError):
      found = None
    if not isinstance(found, dict) or not all(isinstance(value, str) for value in found.values()):
      _logger.warning('%s is damaged: its programs are compiled again.', self._folder / name)
      return {}
    return found

  def _read(self, name: str) -> bytes | None:
    """Return the content of a file that only this user can write to; None: there is no such file."""
    try:
      descriptor = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=self._descriptor)
    except FileNotFoundError:
      return None
    except OSError as error:
      _logger.warning('%s cannot be read (%s).', self._folder / name, first_line(error))
      return None
    with open(descriptor, 'rb') as file:
      status = os.fstat(descriptor)
      fault = 'is no file' if not stat.S_ISREG(status.st_mode) else _fault(status)
      if fault:
        _logger.warning('%s %s, and is ignored.', self._folder / name, fault)
        return None
      return file.read()


def _fault(status: os.stat_result) -> str | None:
  """Return why a file or folder cannot be trusted; None: only this user can write to it."""
  if status.st_uid != os.geteuid():
    return f'belongs to the user {status.st_uid}, not to the user of this process ({os.geteuid()})'
  if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
    return f'can be written to by others (mode {stat.S_IMODE(status.st_mode):04o})'
  return None
