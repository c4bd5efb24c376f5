"""The command `launch.plan`: plan a run for a slice, report, and search for better settings."""

from __future__ import annotations

from collections.abc import Callable, Sequence
import dataclasses
import json

from sdpo_jax.config import Config
from sdpo_jax.files import check_output, jsonable, write_output
from sdpo_jax.models import huggingface
from sdpo_jax.planner import document, model, plan_text
from sdpo_jax.planner import plan as planning
from sdpo_jax.planner.search import SEARCHED, check, search
from sdpo_jax.planner.topology import compile_only, describe

__all__ = ['SEARCHED', 'compile_only', 'plan']


def plan(
  config: Config,
  topology: str,
  *,
  output: str | None = None,
  model_config: str | None = None,
  everything: bool = False,
  search_over: Sequence[str] = (),
  price: float | None = None,
  lengths_of: str | None = None,
  keep: str | None = None,
  announce: Callable[[str], None],
  show: Callable[[str], None],
) -> planning.Plan:
  """Plan a run for a slice, show the report and write the numbers.

  Args:
    config: settings.
    topology: name of the slice.
    output: JSON file for the numbers; None: none.
    model_config: a config.json to use instead of that of model.path.
    everything: compile every bucket.
    search_over: settings to vary; empty: no search.
    price: US dollars per chip-hour; None: the list price.
    lengths_of: directory or metrics.jsonl of a run with the lengths to assume; None: the settings `plan`.
    keep: folder of cached compiler results; None: no cache.
    announce: called with each line of progress.
    show: called with the report.

  Raises:
    UserError: libtpu is missing, the slice is unknown, the mesh does not fit it, the model has no config.json, or the
      output cannot be written.
  """
  if output is not None:
    check_output(output)
  check(search_over)
  slice_ = describe(topology)
  sizes, source = model.sizes(config, model_config)
  policy = huggingface.describe(sizes, config.model)
  announce(f'The model: {source}.')
  read = document.tokens(config, huggingface.positions(sizes))
  assumptions = planning.Assumptions.of(config, slice_.chip, price=price, run=lengths_of, document=read)
  made = planning.make(
    config, policy, slice_, assumptions, source=source, everything=everything, keep=keep, announce=announce
  )
  show(plan_text.text(made))
  numbers = made.to_json()
  if search_over:
    found = search(config, policy, slice_, assumptions, search_over, announce, keep)
    show('\n' + plan_text.search(found))
    numbers['search'] = jsonable([dataclasses.asdict(result) for result in found])
  if output is not None:
    write_output(output, json.dumps(numbers, indent=2) + '\n')
  return made
