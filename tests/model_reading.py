"""Reading of models in the test's own process: to start one for each of a thousand small models takes minutes."""

import contextlib
import io
import json
import pathlib

from sdpo_jax.models import first_reading, reading_child

in_a_process = first_reading.ask


def in_this_process(root: pathlib.Path, template: str | None = None) -> dict[str, str]:
  """Return what `first_reading.ask` does, without its limits."""
  with contextlib.redirect_stdout(io.StringIO()) as said:
    reading_child.read(root, template)
  lines = map(json.loads, said.getvalue().splitlines())
  return {line[1]: line[2] for line in lines if line[0] == 'refused'}
