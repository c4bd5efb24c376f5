"""Running tools in the workspace, such that Ctrl-C stops only a running command."""

from __future__ import annotations

from collections.abc import Mapping
import pathlib
import queue
import threading
from typing import Any

from sdpo_jax.environments.workspace.shell import Cancellation
from sdpo_jax.environments.workspace.tools import ToolAnswer, Toolbox


class Workbench:
  """The tools of one workspace; call from the main thread only."""

  def __init__(self, toolbox: Toolbox, workspace: pathlib.Path):
    self.toolbox, self.workspace = toolbox, workspace
    self._interrupted = False

  def run(self, name: str, arguments: Mapping[str, Any]) -> ToolAnswer:
    """Run a tool, and return its answer; Ctrl-C stops a command, and the answer says so.

    The tool runs in another thread, since an exception in the middle of it could leave its work incomplete.
    """
    done: queue.SimpleQueue[ToolAnswer | BaseException] = queue.SimpleQueue()
    with Cancellation() as cancelled:

      def work() -> None:
        try:
          done.put(self.toolbox.call(name, arguments, cancelled=cancelled))
        except BaseException as error:
          done.put(error)

      thread = threading.Thread(target=work, name='tool')
      thread.start()
      try:
        while True:
          try:
            thread.join()
            break
          except KeyboardInterrupt:
            self._interrupted = True
            cancelled.set()
      finally:
        thread.join()
    found = done.get()
    if isinstance(found, BaseException):
      raise found
    return found

  def interrupted(self) -> bool:
    """Return whether Ctrl-C has stopped a command since the last call of this method."""
    before, self._interrupted = self._interrupted, False
    return before
