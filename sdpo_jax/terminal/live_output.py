"""The newest output of a running command and its time, at a terminal on which lines can be replaced."""

from __future__ import annotations

import codecs
from collections.abc import Callable, Iterator
import contextlib
import time
from typing import TextIO

from rich.console import Console
from rich.live import Live
from rich.text import Text

from sdpo_jax.terminal.escaping import visible
from sdpo_jax.terminal.screen import MARGIN

_NEWEST = 10  # Lines of output that are shown, and 1,000 times as many characters that are kept.
_QUIET_S = 0.3  # Seconds during which nothing is shown, since most commands end within them.
_REFRESH_S = 0.1


@contextlib.contextmanager
def live_output(out: TextIO) -> Iterator[Callable[[bytes], None]]:
  """Provide a function that takes output, and shows it with the time until the block ends; then all is erased.

  Call it without output, too, so that the time goes on.
  """
  console = Console(file=out, force_terminal=True)
  live = Live(console=console, auto_refresh=False, transient=True, redirect_stdout=False, redirect_stderr=False)
  decoder, began, refreshed, newest = codecs.getincrementaldecoder('utf-8')('replace'), time.monotonic(), 0.0, ''

  def show(chunk: bytes) -> None:
    nonlocal newest, refreshed
    newest = '\n'.join((newest + decoder.decode(chunk)).split('\n')[-_NEWEST - 1 :])[-_NEWEST * 1000 :]
    now = time.monotonic()
    if now - began < _QUIET_S or now - refreshed < _REFRESH_S:
      return
    refreshed = now
    # Progress bars return to the start of their line.
    lines = [line.rstrip('\r').rpartition('\r')[2].expandtabs() for line in newest.split('\n') if line][-_NEWEST:]
    shown = [f'{MARGIN}{visible(line, keep="")}' for line in lines]
    shown.append(f'Running for {now - began:.0f} s; Ctrl-C ends it.')
    live.start()
    live.update(Text('\n'.join(shown), 'dim', no_wrap=True, overflow='ellipsis'), refresh=True)

  try:
    yield show
  finally:
    live.stop()
