"""Running tools in the workspace, such that Ctrl-C stops only a running command."""

from __future__ import annotations

from collections.abc import Callable, Mapping
import contextlib
import pathlib
import signal
from typing import Any, TextIO

from sdpo_jax.environments.workspace.shell import Cancellation
from sdpo_jax.environments.workspace.tools import ToolAnswer, Toolbox
from sdpo_jax.terminal.live_output import live_output


class Workbench:
  """The tools of one workspace; call from the main thread only."""

  def __init__(self, toolbox: Toolbox, workspace: pathlib.Path, out: TextIO | None = None):
    """Make a workbench; `out` is a terminal that shows commands while they run, if there is one."""
    self.toolbox, self.workspace, self._out = toolbox, workspace, out
    self._interrupted = False

  def run(self, name: str, arguments: Mapping[str, Any], begin: Callable[[], None]) -> ToolAnswer:
    """Run a tool, and return its answer; Ctrl-C stops a command, and the answer says so.

    Meanwhile Ctrl-C raises no exception, which could leave the work of a tool incomplete.

    Args:
      name: the name of the tool.
      arguments: the checked arguments.
      begin: called first, when Ctrl-C no longer raises an exception.
    """
    quiet = contextlib.nullcontext(lambda chunk: None)
    with Cancellation() as cancelled, quiet if self._out is None else live_output(self._out) as shown:

      def stop(*_: object) -> None:
        self._interrupted = True
        cancelled.set()

      before = signal.signal(signal.SIGINT, stop)
      try:
        begin()
        return self.toolbox.call(name, arguments, cancelled=cancelled, shown=shown)
      finally:
        signal.signal(signal.SIGINT, before)

  def interrupted(self) -> bool:
    """Return whether Ctrl-C has stopped a command since the last call of this method."""
    before, self._interrupted = self._interrupted, False
    return before
