"""A sampled and graded generation batch, and which of its completions are learned from."""

from __future__ import annotations

import dataclasses

import numpy as np

from sdpo_jax.environments.outcomes import graded_of
from sdpo_jax.objective.objective_spec import ObjectiveSpec
from sdpo_jax.rollout.results import SamplingStats
from sdpo_jax.types import Example, Outcome, Rollouts


@dataclasses.dataclass
class GradedRollouts:
  """A graded generation batch, in batch order."""

  examples: list[Example]  # Of the G questions.
  prompts: list[list[int]]  # Token ids of the G prompts.
  rollouts: Rollouts  # N completions.
  outcomes: list[Outcome]  # Of the N completions.
  sample_ids: np.ndarray  # [N], the index of each sample in the order of sampling, before any reordering.
  graders_busy_s: float  # Seconds during which graders of this process were working.
  sampling: SamplingStats = dataclasses.field(default_factory=SamplingStats)
  advantages: np.ndarray | None = None  # [N], given if groups are incomplete; None: computed from the outcomes.
  # [N], the steps after which the weights drew each completion and how many tokens, in order; None: all in one step.
  drawn_by: list[tuple[tuple[int, int], ...]] | None = None
  present: np.ndarray | None = None  # [N] bool, completions that exist; None: all. The others have no tokens.


def learned_from(spec: ObjectiveSpec, graded: GradedRollouts) -> np.ndarray:
  """Return which completions are learned from, [N] bool.

  Ungraded completions are among them if the teacher does not read the graders' feedback.
  """
  every = spec.needs_teacher and not spec.reprompts
  return np.ones(len(graded.rollouts), bool) if every else graded_of(graded.outcomes)
