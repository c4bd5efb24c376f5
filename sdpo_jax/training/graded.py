"""A generation batch that is drawn and graded, and of which of its completions anything is learned."""

from __future__ import annotations

import dataclasses

import numpy as np

from sdpo_jax.environments.outcomes import graded_of
from sdpo_jax.objective.spec import ObjectiveSpec
from sdpo_jax.rollout.results import SamplingStats
from sdpo_jax.types import Example, Outcome, Rollouts


@dataclasses.dataclass
class GradedRollouts:
  """A graded generation batch, in batch order."""

  examples: list[Example]  # G.
  prompts: list[list[int]]  # G.
  rollouts: Rollouts  # N.
  outcomes: list[Outcome]  # N.
  sample_ids: np.ndarray  # [N] number of each sample as drawn, before any reordering.
  graders_busy_s: float  # Seconds in which this process's graders were at work, while it sampled or afterwards.
  sampling: SamplingStats = dataclasses.field(default_factory=SamplingStats)  # What sampling took.
  advantages: np.ndarray | None = None  # [N] where groups are not whole; None: they are those of the outcomes.
  present: np.ndarray | None = None  # [N] bool, completions that are there; None: all. The others have no tokens.


def learned_from(spec: ObjectiveSpec, graded: GradedRollouts) -> np.ndarray:
  """Return of which completions anything is learned, [N] bool.

  A teacher that does not read what the graders said teaches what they could not grade, too.
  """
  every = spec.needs_teacher and not spec.reprompts
  return np.ones(len(graded.rollouts), bool) if every else graded_of(graded.outcomes)
