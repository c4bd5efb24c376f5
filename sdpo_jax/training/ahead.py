"""Generation batches that are drawn before their turn to be learned from (`rollout.steps_off`)."""

from __future__ import annotations

import base64
import collections
from collections.abc import Mapping, Sequence
import dataclasses
import json
from typing import Any
import zlib

import numpy as np

from sdpo_jax.config import Config
from sdpo_jax.data import pipeline
from sdpo_jax.data.prompts import Tokenizer, prompt_tokens
from sdpo_jax.training.graded import GradedRollouts
from sdpo_jax.types import Example, Outcome, Rollouts

WAITING = 'waiting'  # In the host's state of a checkpoint: the batches that are drawn.
# Arrays [N, T] of rollouts that a checkpoint holds, and how.
_PER_TOKEN = {
  'completion_tokens': '<i4',
  'sampling_log_probs': '<f4',
  'model_log_probs': '<f4',
  'entropy': '<f4',
}


@dataclasses.dataclass(frozen=True)
class Drawn:
  """A generation batch that is drawn and graded."""

  step: int  # Whose update learns from it.
  at: int  # The step before whose update it was drawn.
  position: Mapping[str, Any]  # Of the questions, before its own.
  graded: GradedRollouts

  def to_json(self) -> str:
    """Return what `from_json` needs beside the questions, in one text; numbers are kept to the last bit."""
    graded, rollouts = self.graded, self.graded.rollouts
    mask = rollouts.completion_mask
    saved = {
      'step': self.step,
      'at': self.at,
      'asked': _digest(graded.examples, graded.prompts),
      'shape': [rollouts.prompt_tokens.shape[1], mask.shape[1]],
      'group': rollouts.group.tolist(),
      'sample_ids': graded.sample_ids.tolist(),
      'lengths': mask.sum(1).tolist(),
      **{name: _text(getattr(rollouts, name)[mask], dtype) for name, dtype in _PER_TOKEN.items()},
      'finish_reason': rollouts.finish_reason,
      'text': rollouts.text,
      'outcomes': [_plain(dataclasses.asdict(outcome)) for outcome in graded.outcomes],
    }
    return base64.b64encode(zlib.compress(json.dumps(saved).encode(), level=1)).decode()

  @classmethod
  def from_json(
    cls, text: str, position: Mapping[str, Any], examples: list[Example], prompts: list[list[int]]
  ) -> Drawn | None:
    """Return the batch that `to_json` was made of; None if it answers other questions.

    Args:
      text: of `to_json`.
      position: of the questions, before its own.
      examples: the questions that stand there.
      prompts: their tokens.
    """
    saved = json.loads(zlib.decompress(base64.b64decode(text)))
    if saved['asked'] != _digest(examples, prompts):
      return None
    group, width, room = np.asarray(saved['group'], np.int32), *saved['shape']
    lengths = np.asarray(saved['lengths'])
    mask = np.arange(room) < lengths[:, None]
    prompt_tokens = np.zeros((len(group), width), np.int32)
    for row, question in enumerate(group):
      prompt_tokens[row, : len(prompts[question])] = prompts[question]
    of_prompts = np.asarray([len(prompts[question]) for question in group])

    def per_token(name: str, dtype: str) -> np.ndarray:
      values = np.zeros(mask.shape, np.dtype(dtype).newbyteorder('='))
      values[mask] = np.frombuffer(base64.b64decode(saved[name]), dtype)
      return values

    rollouts = Rollouts(
      group=group,
      prompt_tokens=prompt_tokens,
      prompt_mask=np.arange(width) < of_prompts[:, None],
      completion_mask=mask,
      **{name: per_token(name, dtype) for name, dtype in _PER_TOKEN.items()},
      finish_reason=saved['finish_reason'],
      text=saved['text'],
    )
    outcomes = [Outcome(**outcome) for outcome in saved['outcomes']]
    graded = GradedRollouts(examples, prompts, rollouts, outcomes, np.asarray(saved['sample_ids']), graders_busy_s=0.0)
    return cls(saved['step'], saved['at'], position, graded)


def _text(values: np.ndarray, dtype: str) -> str:
  return base64.b64encode(np.ascontiguousarray(values, dtype).tobytes()).decode()


def _plain(value: Any) -> Any:
  """Return what a grader said as values that JSON holds; what no metric is made of is left out."""
  if isinstance(value, Mapping):
    plain = {str(name): _plain(each) for name, each in value.items()}
    return {name: each for name, each in plain.items() if each is not None or value[name] is None}
  value = value.item() if isinstance(value, np.generic) else value
  return value if isinstance(value, (str, int, float, bool)) else None


def _digest(examples: Sequence[Example], prompts: Sequence[Sequence[int]]) -> str:
  return f'{pipeline.digest(examples)} {zlib.crc32(json.dumps(prompts).encode()):08x}'


class Ahead:
  """The generation batches that are drawn and not yet learned from, in order."""

  def __init__(self, config: Config, iterator: pipeline.TrainIterator, tokenizer: Tokenizer):
    """Hold none yet.

    Args:
      config: settings.
      iterator: from which questions are taken.
      tokenizer: for their prompts.
    """
    self._config, self._iterator, self._tokenizer = config, iterator, tokenizer
    self._waiting: collections.deque[Drawn] = collections.deque()

  def missing(self, step: int) -> range:
    """Return the steps whose batches are to be drawn before the update of `step`.

    At the start these are the first `rollout.steps_off` + 1, then one in each step, and at the end of the run none: as
    many batches are drawn as there are updates.
    """
    last = min(step + self._config.rollout.steps_off, self._config.trainer.total_training_steps)
    return range(self._waiting[-1].step + 1 if self._waiting else step, last + 1)

  def ask(self) -> tuple[Mapping[str, Any], list[Example]]:
    """Return the position of the next questions, and the questions."""
    position = self._iterator.get_state()
    return position, next(self._iterator)

  def add(self, drawn: Drawn) -> None:
    """Keep a batch until its turn; batches come in order."""
    self._waiting.append(drawn)

  def take(self, step: int) -> Drawn:
    """Return the batch whose turn it is in `step`."""
    drawn = self._waiting.popleft()
    if drawn.step != step:
      raise RuntimeError(f'The batch of step {drawn.step} waits where that of step {step} is due.')
    return drawn

  def ask_again(self) -> None:
    """Forget what is drawn: its questions are asked again, of another model."""
    if self._waiting:
      self._iterator.set_state(dict(self._waiting[0].position))
      self._waiting.clear()

  def saved(self) -> tuple[Mapping[str, Any], tuple[Drawn, ...]]:
    """Return the position of the questions of the first batch that waits, or of the next one, and the batches."""
    return (self._waiting[0].position if self._waiting else self._iterator.get_state()), tuple(self._waiting)

  def restore(self, host: Mapping[str, Any], *, other_rows: bool) -> str | None:
    """Go on from what a checkpoint holds.

    Args:
      host: the host's state in it.
      other_rows: whether there may be other questions than when it was saved.

    Returns:
      A sentence for the user where what was drawn is of no use, as it answers other questions.
    """
    self._waiting.clear()
    self._iterator.set_state(host['iterator'], other_rows=other_rows)
    for text in host.get(WAITING, ()):
      position, examples = self.ask()
      prompts = [prompt_tokens(self._tokenizer, example, self._config) for example in examples]
      drawn = Drawn.from_json(text, position, examples, prompts)
      if drawn is None:
        self._iterator.set_state(host['iterator'], other_rows=other_rows)
        self._waiting.clear()
        return 'The completions that were drawn ahead answer other questions than there are now; they are drawn anew.'
      self.add(drawn)
    return None
