"""Generation batches sampled before the step whose update learns from them (`rollout.steps_off`)."""

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
from sdpo_jax.rollout.buckets import padded
from sdpo_jax.training.graded import GradedRollouts
from sdpo_jax.training.specs import prompt_spec
from sdpo_jax.types import Example, Outcome, Rollouts

WAITING = 'waiting'  # Key in a checkpoint's host state: the batches sampled ahead.
# Arrays [N, T] of rollouts that a checkpoint holds, and their dtypes.
_PER_TOKEN = {
  'completion_tokens': '<i4',
  'sampling_log_probs': '<f4',
  'model_log_probs': '<f4',
  'entropy': '<f4',
}


@dataclasses.dataclass(frozen=True)
class SampledBatch:
  """A sampled and graded generation batch."""

  step: int  # The step whose update learns from it.
  at: int  # The step in which it was sampled, before the update.
  position: Mapping[str, Any]  # State of the question iterator before its questions.
  graded: GradedRollouts
  groups: tuple[int, ...] | None = None  # Numbers of its questions in the run; None: those of one batch of questions.

  def to_json(self) -> str:
    """Return the batch as text for `from_json`, without its questions; all numbers are stored exactly."""
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
    if self.groups is not None:
      saved |= {'groups': self.groups, 'drawn_by': graded.drawn_by}
    return encoded(saved)

  @classmethod
  def from_json(
    cls, text: str, position: Mapping[str, Any], examples: list[Example], prompts: list[list[int]]
  ) -> SampledBatch | None:
    """Return the batch that `to_json` encoded; None if the questions differ.

    Args:
      text: result of `to_json`.
      position: state of the question iterator before its questions.
      examples: the questions at that position.
      prompts: their prompt tokens.
    """
    saved = decoded(text)
    if saved['asked'] != _digest(examples, prompts):
      return None
    group, width, room = np.asarray(saved['group'], np.int32), *saved['shape']
    lengths = np.asarray(saved['lengths'])
    mask = np.arange(room) < lengths[:, None]
    prompt_tokens, prompt_mask = padded([prompts[question] for question in group], width)

    def per_token(name: str, dtype: str) -> np.ndarray:
      values = np.zeros(mask.shape, np.dtype(dtype).newbyteorder('='))
      values[mask] = np.frombuffer(base64.b64decode(saved[name]), dtype)
      return values

    rollouts = Rollouts(
      group=group,
      prompt_tokens=prompt_tokens,
      prompt_mask=prompt_mask,
      completion_mask=mask,
      **{name: per_token(name, dtype) for name, dtype in _PER_TOKEN.items()},
      finish_reason=saved['finish_reason'],
      text=saved['text'],
    )
    outcomes = [Outcome(**outcome) for outcome in saved['outcomes']]
    graded = GradedRollouts(examples, prompts, rollouts, outcomes, np.asarray(saved['sample_ids']), graders_busy_s=0.0)
    if 'groups' not in saved:
      return cls(saved['step'], saved['at'], position, graded)
    graded.drawn_by = [tuple((step, count) for step, count in each) for each in saved['drawn_by']]
    return cls(saved['step'], saved['at'], position, graded, tuple(saved['groups']))


def encoded(values: Mapping[str, Any]) -> str:
  """Return JSON values as text for `decoded`."""
  return base64.b64encode(zlib.compress(json.dumps(values).encode(), level=1)).decode()


def decoded(text: str) -> dict[str, Any]:
  """Return the JSON values that `encoded` encoded."""
  return json.loads(zlib.decompress(base64.b64decode(text)))


def _text(values: np.ndarray, dtype: str) -> str:
  return base64.b64encode(np.ascontiguousarray(values, dtype).tobytes()).decode()


def _plain(value: Any) -> Any:
  """Return a grader's values as JSON values; values of other types are left out."""
  if isinstance(value, Mapping):
    plain = {str(name): _plain(each) for name, each in value.items()}
    return {name: each for name, each in plain.items() if each is not None or value[name] is None}
  value = value.item() if isinstance(value, np.generic) else value
  return value if isinstance(value, (str, int, float, bool)) else None


def _digest(examples: Sequence[Example], prompts: Sequence[Sequence[int]]) -> str:
  return f'{pipeline.digest(examples)} {zlib.crc32(json.dumps(prompts).encode()):08x}'


class Ahead:
  """A queue of the generation batches that were sampled but not learned from yet."""

  parked: Any = None  # Arrays of samples under way, which a checkpoint holds, too.

  def __init__(self, config: Config, iterator: pipeline.TrainIterator, tokenizer: Tokenizer):
    """Make an empty queue.

    Args:
      config: settings.
      iterator: iterator over the questions.
      tokenizer: tokenizer for their prompts.
    """
    self._config, self._iterator, self._tokenizer = config, iterator, tokenizer
    self._waiting: collections.deque[SampledBatch] = collections.deque()

  def missing(self, step: int) -> range:
    """Return the steps whose batches must be sampled before the update of `step`.

    At the start these are the first `rollout.steps_off` + 1, then one in each step, and none at the end of the run: as
    many batches are sampled as there are updates.
    """
    last = min(step + self._config.rollout.steps_off, self._config.trainer.total_training_steps)
    return range(self._waiting[-1].step + 1 if self._waiting else step, last + 1)

  def ask(self) -> tuple[Mapping[str, Any], list[Example]]:
    """Return the iterator's position and the next questions."""
    position = self._iterator.get_state()
    return position, next(self._iterator)

  def seek(self, position: Mapping[str, Any], *, other_rows: bool) -> None:
    """Continue with the questions at a saved position; arguments and errors as in `TrainIterator.set_state`."""
    self._iterator.set_state(position, other_rows=other_rows)

  def read(self, text: str) -> SampledBatch | None:
    """Return the batch that `SampledBatch.to_json` encoded, if it answers the next questions; else None."""
    position, examples = self.ask()
    prompts = [prompt_tokens(self._tokenizer, example, prompt_spec(self._config)) for example in examples]
    return SampledBatch.from_json(text, position, examples, prompts)

  def add(self, drawn: SampledBatch) -> None:
    """Append a batch to the queue; batches must come in the order of their steps."""
    self._waiting.append(drawn)

  def close(self) -> None:
    """End what works on batches that wait; here nothing does."""

  def take(self, step: int) -> SampledBatch:
    """Remove and return the batch of `step`."""
    drawn = self._waiting.popleft()
    if drawn.step != step:
      raise RuntimeError(f'The next batch in the queue is that of step {drawn.step}, not of step {step}.')
    return drawn

  def ask_again(self) -> None:
    """Drop all batches and rewind the iterator, so that their questions are sampled again."""
    if self._waiting:
      self._iterator.set_state(dict(self._waiting[0].position))
      self._waiting.clear()

  def saved(self) -> tuple[Mapping[str, Any], tuple[Any, ...]]:
    """Return the iterator's position before the first waiting batch (or the next one), and the waiting batches.

    Each of these has a method `to_json`, whose results `restore` reads.
    """
    return (self._waiting[0].position if self._waiting else self._iterator.get_state()), tuple(self._waiting)

  def restore(self, host: Mapping[str, Any], *, other_rows: bool) -> str | None:
    """Restore the waiting batches from a checkpoint.

    Args:
      host: host state in the checkpoint.
      other_rows: whether the questions may have changed since the checkpoint was saved.

    Returns:
      A sentence for the user if batches are dropped because they answer other questions; else None.
    """
    self._waiting.clear()
    self.seek(host['iterator'], other_rows=other_rows)
    for text in host.get(WAITING, ()):
      drawn = self.read(text)
      if drawn is None:
        self.seek(host['iterator'], other_rows=other_rows)
        self._waiting.clear()
        return 'The questions of the completions sampled ahead have changed; the completions are sampled again.'
      self.add(drawn)
    return None
