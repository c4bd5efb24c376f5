"""Headless Chromium, driven through its DevTools protocol over a pipe; needs no other package."""

from __future__ import annotations

import base64
from collections.abc import Iterator
import contextlib
import json
import os
import pathlib
import shutil
import subprocess
import tempfile
from typing import Any

PATIENCE_MS = 120_000  # Time-out of every answer.
NAMES = ('chromium', 'chromium-browser', 'google-chrome')


def installed() -> str | None:
  """Return the path of the browser; None if there is none."""
  return next((found for name in NAMES if (found := shutil.which(name))), None)


class Page:
  """A page of a browser, with one command at a time."""

  def __init__(self, to_browser: int, from_browser: int):
    self._to, self._from = to_browser, from_browser
    self._read, self._sent = b'', 0
    self._session: str | None = None
    self.events: list[dict[str, Any]] = []
    target = self.call('Target.createTarget', url='about:blank')['targetId']
    self._session = self.call('Target.attachToTarget', targetId=target, flatten=True)['sessionId']
    for domain in ('Page', 'Runtime', 'Network', 'Log', 'Performance'):
      self.call(f'{domain}.enable')

  def call(self, method: str, **parameters: Any) -> dict[str, Any]:
    """Send a command and return its result; events that arrive before it are stored."""
    self._sent += 1
    message = {'id': self._sent, 'method': method, 'params': parameters}
    if self._session is not None:
      message['sessionId'] = self._session
    os.write(self._to, json.dumps(message).encode() + b'\0')
    while True:
      answer = self._next()
      if answer.get('id') == self._sent:
        assert 'error' not in answer, (method, answer['error'])
        return answer['result']

  def _next(self) -> dict[str, Any]:
    while b'\0' not in self._read:
      more = os.read(self._from, 1 << 20)
      assert more, 'the browser has ended'
      self._read += more
    message, _, self._read = self._read.partition(b'\0')
    answer = json.loads(message)
    if 'method' in answer:
      self.events.append(answer)
    return answer

  def open(self, address: str) -> None:
    """Load a page and wait until it reports that it is ready (`data-ready` of its root)."""
    self.call('Page.navigate', url=address)
    self.until("document.documentElement.dataset.ready || document.querySelector('#failed:not([hidden])')")

  def evaluate(self, expression: str) -> Any:
    """Evaluate an expression and return its value, awaiting a promise."""
    found = self.call('Runtime.evaluate', expression=expression, awaitPromise=True, returnByValue=True)
    assert 'exceptionDetails' not in found, found['exceptionDetails']
    return found['result'].get('value')

  def until(self, condition: str) -> None:
    """Wait until a condition holds; it is checked after every frame."""
    held = f"""new Promise((resolve) => {{
      const end = performance.now() + {PATIENCE_MS};
      const look = () => {{ let held = false; try {{ held = {condition}; }} catch (error) {{}}
        held || performance.now() > end ? resolve(!!held) : setTimeout(look, 20); }};
      look();
    }})"""
    while True:
      try:
        assert self.evaluate(held), f'never so: {condition}'
        return
      except AssertionError as error:
        # Leaving a page discards its context.
        if 'navigated' not in str(error) and 'destroyed' not in str(error) and 'Cannot find context' not in str(error):
          raise

  def key(self, key: str) -> None:
    """Press a key."""
    text = {'text': key} if len(key) == 1 else {}
    self.call('Input.dispatchKeyEvent', type='keyDown', key=key, **text)
    self.call('Input.dispatchKeyEvent', type='keyUp', key=key)

  def size(self, width: int, height: int) -> None:
    """Set the size of the window."""
    self.call('Emulation.setDeviceMetricsOverride', width=width, height=height, deviceScaleFactor=1, mobile=False)

  def dark(self, wanted: bool) -> None:
    """Set the preferred colour scheme of the system."""
    value = 'dark' if wanted else 'light'
    self.call('Emulation.setEmulatedMedia', features=[{'name': 'prefers-color-scheme', 'value': value}])

  def screenshot(self, path: pathlib.Path) -> None:
    """Save a screenshot of the window as PNG."""
    path.write_bytes(base64.b64decode(self.call('Page.captureScreenshot', format='png')['data']))

  def busy_s(self) -> float:
    """Return the CPU-seconds that the page's process has taken so far."""
    measured = {each['name']: each['value'] for each in self.call('Performance.getMetrics')['metrics']}
    return measured['ProcessTime']

  def requested(self) -> list[str]:
    """Return the addresses of all requests, except data URLs."""
    asked = [each['params']['request']['url'] for each in self.events if each['method'] == 'Network.requestWillBeSent']
    return [address for address in asked if not address.startswith(('data:', 'about:'))]

  def complaints(self) -> list[str]:
    """Return script errors and violations of the page's security policy."""
    thrown = [
      str(each['params']['exceptionDetails']) for each in self.events if each['method'] == 'Runtime.exceptionThrown'
    ]
    logged = [each['params']['entry'] for each in self.events if each['method'] == 'Log.entryAdded']
    return thrown + [entry['text'] for entry in logged if entry['level'] == 'error']


@contextlib.contextmanager
def opened(program: str) -> Iterator[Page]:
  """Provide a page of a new browser, which ends with the block."""
  heard, says = os.pipe()
  hears, said = os.pipe()
  with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
    arguments = [
      program,
      '--headless=new',
      '--no-sandbox',  # The browser's sandbox needs privileges that containers lack.
      '--disable-gpu',
      '--disable-dev-shm-usage',
      '--hide-scrollbars',
      '--no-first-run',
      '--remote-debugging-pipe',
      f'--user-data-dir={profile}',
    ]
    script = f'exec "$@" 3<&{heard} 4>&{said}'
    process = subprocess.Popen(
      ['bash', '-c', script, 'bash', *arguments],
      pass_fds=(heard, said),
      stdout=subprocess.DEVNULL,
      stderr=subprocess.DEVNULL,
    )
    os.close(heard)
    os.close(said)
    try:
      yield Page(says, hears)
    finally:
      os.close(says)  # The browser ends when its command pipe closes.
      try:
        process.wait(30)
      except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
      os.close(hears)
