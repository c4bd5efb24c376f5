"""A self-contained HTML page about runs: it includes style, script and data, and makes no requests.

Data are compressed and base64-encoded, so that no text of a model or user can act as markup. The page's
Content-Security-Policy allows only its own style and script, by their digests.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
import hashlib
import html
import importlib.resources
import json
import string
from typing import Any

from sdpo_jax import invisible
from sdpo_jax.config.privacy import public_text
from sdpo_jax.files import jsonable
from sdpo_jax.reporting.groups import differences, group_runs, labels
from sdpo_jax.reporting.rollouts import RolloutPages, packed
from sdpo_jax.reporting.run_files import RunFiles

MARK = '<!doctype html><!-- A report of launch.report. -->'  # Every page begins with it.
SCRIPTS = ('data.js', 'text.js', 'charts.js', 'overview.js', 'tokens.js', 'rollouts.js', 'main.js')
SUCCESS = 'actor.self_distillation.success_reward_threshold'
# Fields of `RunFiles` that the page's script reads unchanged.
_SHOWN = ('name', 'series', 'resumed', 'alarms', 'rollbacks', 'stopped', 'last', 'total', 'over')


def summary(
  runs: Sequence[RunFiles], rollouts: RolloutPages, *, written: str, reload_s: float | None = None
) -> dict[str, Any]:
  """Return the data of a page, including the index of the rollouts, as JSON values that may be published.

  Args:
    runs: the run that the page is about, and those that it is compared with.
    rollouts: the runs' rollouts.
    written: time when the page was made, as text.
    reload_s: seconds after which the page checks for a newer version; None: it never does.
  """
  groups = group_runs(runs)
  remarks = [*(f'{run.name}: {text}' for run in runs for text in (*run.remarks, *run.lost)), *rollouts.remarks]
  for run in runs:
    remarks = [text.replace(f'{run.workdir}/', '') for text in remarks]
  return jsonable(
    {
      'written': written,
      'reload_s': reload_s,
      'runs': [_of_run(run) for run in runs],
      'groups': [{'label': label, 'runs': group} for label, group in zip(labels(runs, groups), groups, strict=True)],
      'differences': differences(runs, groups),
      'rollouts': rollouts.index,
      'full': rollouts.full,
      'remarks': [public_text(text) for text in remarks],
    }
  )


def _of_run(run: RunFiles) -> dict[str, Any]:
  threshold = run.settings.get(SUCCESS)
  return {
    **{name: getattr(run, name) for name in _SHOWN},
    'settings': run.shown,
    'threshold': threshold if isinstance(threshold, int | float) and not isinstance(threshold, bool) else 1.0,
  }


def render(title: str, known: Mapping[str, Any], pieces: Sequence[str]) -> str:
  """Return the page's HTML.

  Args:
    title: the window's title.
    known: data from `summary`.
    pieces: the rollouts' texts, packed.
  """
  style = _web('report.css')
  script = "'use strict';\n" + invisible.SCRIPT + '\n'.join(_web(name) for name in SCRIPTS)
  text = packed(json.dumps(known, allow_nan=False, separators=(',', ':')))
  data = [f'<script type="text/plain" id="summary">{text}</script>']
  data += [f'<script type="text/plain" id="piece{number}">{piece}</script>' for number, piece in enumerate(pieces)]
  policy = (
    f"default-src 'none'; style-src {_digest(style)}; script-src {_digest(script)}; base-uri 'none'; form-action 'none'"
  )
  return MARK + string.Template(_web('report.html')).substitute(
    title=html.escape(title), policy=policy, style=style, script=script, data='\n'.join(data)
  )


def _web(name: str) -> str:
  return (importlib.resources.files('sdpo_jax.reporting') / 'web' / name).read_text(encoding='utf-8')


def _digest(text: str) -> str:
  return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
