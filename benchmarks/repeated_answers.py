"""Trains a cartridge on a fixed set of the teacher's answers, as published recipes do: sampled once, read in epochs.

  python -m benchmarks.repeated_answers --answers=4 --config=configs/cartridge_quickstart.py \\
      --config.rollout.sampled_by=teacher

The run is that of `python -m launch.train` with the same flags, but its step t repeats the sampling noise of step t mod
`--answers`. As the teacher does not change, every prompt then has that many different answers in the whole run, if each
step asks all prompts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
import dataclasses
from typing import Any

from absl import flags
import numpy as np

from sdpo_jax import command
from sdpo_jax.launch import train
from sdpo_jax.rollout.results import Completion, SamplingStats
from sdpo_jax.rollout.sampler import Sampler
from sdpo_jax.training.session import Session
from sdpo_jax.types import Rollouts, Tree

ANSWERS = flags.DEFINE_integer('answers', 1, 'Answers per prompt in the whole run.', lower_bound=1)


class RepeatingSampler:
  """A sampler whose completions of a prompt depend on the step only through its remainder by `answers`."""

  def __init__(self, sampler: Sampler, answers: int):
    """Repeat the completions that `sampler` draws in the steps 0 to `answers` − 1."""
    self._sampler = sampler
    self._answers = answers

  @property
  def stats(self) -> SamplingStats:
    """Counts of the last request."""
    return self._sampler.stats

  def sample(
    self,
    base: Tree,
    trainable: Tree,
    prompts: Sequence[Sequence[int]],
    *,
    n: int,
    step: int,
    on_finished: Callable[[Completion], None],
    members: Sequence[Any] | None = None,
    **options: Any,
  ) -> Rollouts:
    """Sample like `Sampler.sample`, independently of the order of the prompts, which are shuffled anew each epoch."""
    order = sorted(range(len(prompts)), key=lambda at: list(prompts[at]))
    samples = (np.array(order)[:, None] * n + np.arange(n)).reshape(-1)  # The caller's numbers, in the sampled order.

    def finished(done: Completion) -> None:
      on_finished(dataclasses.replace(done, sample=int(samples[done.sample])))

    sampled = self._sampler.sample(
      base,
      trainable,
      [prompts[at] for at in order],
      n=n,
      step=step % self._answers,
      members=None if members is None else [members[at] for at in order],
      on_finished=finished,
      **options,
    )
    rollouts = sampled.take(np.argsort(samples))
    return dataclasses.replace(rollouts, group=np.repeat(np.arange(len(prompts), dtype=np.int32), n))


def repeat(answers: int) -> Callable[[Session, Tree], tuple[RepeatingSampler, Tree, Tree]]:
  """Return `Session.writer` with a sampler that repeats its completions."""
  writer = Session.writer

  def repeating(session: Session, trainable: Tree) -> tuple[RepeatingSampler, Tree, Tree]:
    sampler, base, tree = writer(session, trainable)
    return RepeatingSampler(sampler, answers), base, tree

  return repeating


def main() -> int:
  """Train as `launch.train` does, with repeated answers."""
  Session.writer = repeat(ANSWERS.value)
  return train.main()


if __name__ == '__main__':
  command.run(main)
