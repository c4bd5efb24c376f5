"""What a run, an evaluation and an export have in common: model, tokenizer, sampler and programs."""

from __future__ import annotations

import dataclasses
from typing import Any

from etils import epath
import jax

from models.policy import Policy
from sdpo_jax.config import Config
from sdpo_jax.objective.spec import ObjectiveSpec
from sdpo_jax.rollout.engine import Sampler
from sdpo_jax.teacher.endpoint import Endpoint
from sdpo_jax.teacher.feedback_endpoint import FeedbackEndpoint
from sdpo_jax.teacher.signal import Teacher
from sdpo_jax.training.update import Update
from sdpo_jax.types import Tree


@dataclasses.dataclass
class Session:
  """Everything a run holds beside its state."""

  config: Config
  workdir: epath.Path
  tokenizer: Any
  policy: Policy
  base: Tree
  mesh: jax.sharding.Mesh
  sampler: Sampler
  spec: ObjectiveSpec
  teacher: Teacher | None  # None: the objective needs none on the devices.
  update: Update
  flops_per_token: float  # of one forward pass.
  update_flops_per_token: float  # of a forward and a backward pass.
  teacher_flops_per_token: float  # the same of the policy that reads the teacher's prompts.
  endpoint: Endpoint | None = None  # A teacher that a server answers for.
  initial: Tree | None = (
    None  # Trainable parameters as the run began, `initial_policy`; None: the objective needs none.
  )
  teachers_sampler: Sampler | None = None  # None: the teacher writes nothing.
  feedback_sampler: Sampler | None = None  # With which the student writes feedback; None: it writes none.
  feedback_endpoint: FeedbackEndpoint | None = None  # A server that writes feedback.

  def writer(self, trainable: Tree) -> tuple[Sampler, Tree, Tree]:
    """Return who writes the completions that are learned from: a sampler, and the base and trainable tree that it
    reads.

    Args:
      trainable: of the student.
    """
    if self.config.rollout.sampled_by == 'student':
      return self.sampler, self.base, trainable
    return self.teacher_writer

  @property
  def teacher_writer(self) -> tuple[Sampler, Tree, Tree]:
    """The teacher as one who writes, as in `writer`."""
    return self.teachers_sampler, self.teacher.whole_base(self.base), {}
