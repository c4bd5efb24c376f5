"""One HTML page from what is known of runs: style, script and data are in it, and nothing is asked of any server.

Data are compressed and in base 64, so that nothing that a model or a user wrote can be markup. The policy of the page
(Content-Security-Policy) allows its own style and script by their digests, and nothing else.
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
from sdpo_jax.files import jsonable
from sdpo_jax.reporting.groups import differences, group_runs, labels
from sdpo_jax.reporting.rollouts import Rollouts, packed
from sdpo_jax.reporting.run_files import RunFiles

MARK = '<!doctype html><!-- A report of launch.report. -->'  # Begins every page.
SCRIPTS = ('data.js', 'text.js', 'charts.js', 'overview.js', 'tokens.js', 'rollouts.js', 'main.js')
SUCCESS = 'actor.self_distillation.success_reward_threshold'


def summary(
  runs: Sequence[RunFiles], rollouts: Rollouts, *, written: str, reload_s: float | None = None
) -> dict[str, Any]:
  """Return what a page shows of runs, and the index of their rollouts, as values for JSON.

  Args:
    runs: the first one is the one that the page is about.
    rollouts: their rollouts.
    written: when the page was made, for people.
    reload_s: seconds after which the page looks whether there is a newer one; None: there will be none.
  """
  groups = group_runs(runs)
  return jsonable(
    {
      'written': written,
      'reload_s': reload_s,
      'runs': [_of_run(run) for run in runs],
      'groups': [{'label': label, 'runs': group} for label, group in zip(labels(runs, groups), groups, strict=True)],
      'differences': differences(runs, groups),
      'rollouts': vars(rollouts.index),
      'full': rollouts.full,
      'remarks': [*(f'{run.name}: {text}' for run in runs for text in run.remarks), *rollouts.remarks],
    }
  )


def _of_run(run: RunFiles) -> dict[str, Any]:
  threshold = run.settings.get(SUCCESS)
  return {
    'name': run.name,
    'workdir': str(run.workdir),
    'settings': run.settings,
    'series': run.series,
    'resumed': run.resumed,
    'alarms': run.alarms,
    'rollbacks': run.rollbacks,
    'stopped': run.stopped,
    'last': run.last,
    'total': run.total,
    'over': run.over,
    'threshold': threshold if isinstance(threshold, int | float) and not isinstance(threshold, bool) else 1.0,
  }


def render(title: str, known: Mapping[str, Any], pieces: Sequence[str]) -> str:
  """Return the page.

  Args:
    title: title of its window.
    known: from `summary`.
    pieces: texts of the rollouts, packed.
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
