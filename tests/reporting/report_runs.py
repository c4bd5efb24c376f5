"""Directories of runs as training leaves them, made in no time, for tests of what reads them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
import dataclasses
import json
import pathlib
from typing import Any

from sdpo_jax.config import Config

# What models and users may write that a page must show and never obey.
HOSTILE = (
  '</script><script>window.hacked = 1</script>',
  '<img src=x onerror="window.hacked = 2">',
  '<!-- --><script>window.hacked = 3',
  'a\u202eb\u2066c\u0000d\u0007e\ufeff',
  'lone \ud800 half',
  '${title} {{data}} &lt;b&gt; \\u003cscript>',
  'x' * 20_000,
  '',
)


def config(**changes: Any) -> Config:
  """Return settings; keys are dotted with two underscores."""
  made = Config(name='made')
  made.trainer.total_training_steps = 4
  for name, value in changes.items():
    *sections, leaf = name.split('__')
    target = made
    for section in sections:
      target = getattr(target, section)
    setattr(target, leaf, value)
  return made


def metrics(step: int, score: float = 0.5, **more: float) -> dict[str, Any]:
  """Return a line of metrics.jsonl."""
  found = {
    'step': step,
    'fencing_epoch': 1,
    'rollout/score_mean': score,
    'train/loss': 1 / (1 + step),
    'time/sample_s': 1.0,
    'time/train_s': 0.5,
    'throughput/tokens_per_s': 100.0,
    'self_distillation/reprompt_sample_fraction': 0.9,
    'state_digest': f'{step:016x}',
  }
  return found | {name.replace('__', '/'): value for name, value in more.items()}


def rollout(step: int, group: int = 0, completion: str = 'ab', **changes: Any) -> dict[str, Any]:
  """Return a line of rollouts/<step>.jsonl; its tokens are letters, and of a long completion all of it."""
  tokens = list(completion) if len(completion) < 1000 else [completion]
  said = {'ids': [[1, 2]] * len(tokens), 'log_probs': [[-0.1, -2.5]] * len(tokens), 'own': [-0.1] * len(tokens)}
  found = {
    'step': step,
    'id': f'q{group}',
    'group': group,
    'prompt': [{'role': 'user', 'content': f'Question {group}'}],
    'completion': completion,
    'finish_reason': 'stop',
    'score': float(group % 2),
    'ungraded': None,
    'feedback': f'Feedback on {completion[:20]}',
    'teacher_prompt': [{'role': 'user', 'content': f'Question {group}\nFeedback'}],
    'divergence': [0.25] * len(tokens),
    'tokens': tokens,
    'top_tokens': {'student': said, 'teacher': {**said, 'own': [-0.3] * len(tokens)}, 'texts': {'1': 'a', '2': '</b>'}},
  }
  return found | changes


def write(
  folder: pathlib.Path,
  lines: Iterable[Mapping[str, Any]] = (),
  rollouts: Mapping[int, Sequence[Mapping[str, Any]]] | None = None,
  settings: Config | None = None,
) -> pathlib.Path:
  """Write a run, and return its directory."""
  folder.mkdir(parents=True, exist_ok=True)
  (folder / 'config.json').write_text(json.dumps(dataclasses.asdict(settings or config())))
  (folder / 'metrics.jsonl').write_text(''.join(json.dumps(line) + '\n' for line in lines))
  for step, each in (rollouts or {}).items():
    (folder / 'rollouts').mkdir(exist_ok=True)
    (folder / 'rollouts' / f'{step}.jsonl').write_text(''.join(json.dumps(line) + '\n' for line in each))
  return folder
