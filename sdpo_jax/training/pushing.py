"""Sends the slots of a run to a service while they are trained, so that they can be tried there.

Each time, the newest cartridge becomes the next version of one in the service. A thread sends it; if a newer one comes
before that is done, those between are left out. A service that does not answer costs a warning, never the run.
"""

from __future__ import annotations

import io
import logging
import pathlib
import tempfile
import threading
import urllib.parse
import zipfile

import httpx2

from sdpo_jax.config import Config
from sdpo_jax.environments.json_server import read_address, read_secret
from sdpo_jax.errors import UserError, first_line, short_repr
from sdpo_jax.models.adapters import cartridge_files
from sdpo_jax.models.adapters.cartridge import Cartridge
from sdpo_jax.models.adapters.cartridge_files import Origin

ADAPTERS = '/v1/continual/adapters'
_SECONDS = 60.0  # Time limit of a request.
_logger = logging.getLogger('sdpo_jax.training')


class Pushing:
  """The newest cartridge of a run on its way to a service. `send` and `close` are called from one thread."""

  def __init__(self, config: Config, origin: Origin):
    """Prepare requests without sending any; `origin` is the model of the cartridge.

    Raises:
      UserError: the address is not one, or a variable with a key is unset.
    """
    trainer = config.trainer
    address, _ = read_address(trainer.push_url, 'trainer.push_url', 'http://localhost:8420')
    key = read_secret(trainer.push_key_env, 'trainer.push_key_env', required=True)
    headers = {'Authorization': f'Bearer {key}'} if key else {}
    self._client = httpx2.Client(base_url=address.rstrip('/'), headers=headers, timeout=_SECONDS)
    self._name = urllib.parse.quote(trainer.push_name or config.name, safe='')
    self._origin, self._run = origin, config.name
    self._id: str | None = None  # Of the cartridge in the service; None: not known yet.
    self._lock = threading.Lock()
    self._newest: tuple[Cartridge, int] | None = None  # What is to be sent next, with its step.
    self._thread: threading.Thread | None = None
    self._fails = False

  def send(self, cartridge: Cartridge, step: int) -> None:
    """Send the cartridge of a step soon, and none that still waits."""
    with self._lock:
      self._newest = cartridge, step
      if self._thread is None:
        self._thread = threading.Thread(target=self._work, name='pushing', daemon=True)
        self._thread.start()

  def close(self) -> None:
    """Wait for what is on its way."""
    thread = self._thread
    if thread is not None:
      thread.join(2 * _SECONDS)
    if thread is None or not thread.is_alive():
      self._client.close()
    if self._fails:
      _logger.warning('The last slots could not be sent to %s: export the run, and upload them.', self._client.base_url)

  def _work(self) -> None:
    while True:
      with self._lock:
        newest, self._newest = self._newest, None
        if newest is None:
          self._thread = None
          return
      try:
        self._post(*newest)
        if self._fails:
          _logger.info('The slots of step %d were sent to %s again.', newest[1], self._client.base_url)
        self._fails = False
      except (httpx2.HTTPError, OSError, ValueError, KeyError, TypeError, UserError) as error:
        if not self._fails:  # Once, until it works again.
          _logger.warning(
            'The slots of step %d could not be sent to %s (%s); the run goes on, and later ones are tried.',
            newest[1],
            self._client.base_url,
            first_line(error),
          )
        self._fails = True

  def _post(self, cartridge: Cartridge, step: int) -> None:
    """Make the next version, or the cartridge if there is none of that name."""
    if self._id is None:
      found = self._client.get(f'/v1/models/{self._name}')
      self._id = found.json()['adapter'] if found.is_success else None
    into = f'{ADAPTERS}/{self._id}/versions' if self._id else f'{ADAPTERS}/import?name={self._name}'
    said = self._client.post(into, content=self._zip(cartridge, step), headers={'Content-Type': 'application/zip'})
    if said.status_code == httpx2.codes.NOT_FOUND:  # It was deleted.
      self._id = None
    if not said.is_success:
      raise ValueError(f'status {said.status_code}: {short_repr(said.text, 250)}')
    self._id = self._id or said.json()['id']

  def _zip(self, cartridge: Cartridge, step: int) -> bytes:
    content = io.BytesIO()
    with tempfile.TemporaryDirectory(prefix='cartridge-') as folder, zipfile.ZipFile(content, 'w') as archive:
      made = pathlib.Path(folder, 'made')
      cartridge_files.write(made, cartridge, self._origin, about={'run': self._run, 'step': str(step)})
      for name in (cartridge_files.MANIFEST, cartridge_files.TENSORS):
        archive.write(made / name, name)
    return content.getvalue()
