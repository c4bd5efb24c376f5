"""The session: model, tokenizer, samplers and programs, which runs, evaluations and exports share."""

from __future__ import annotations

from collections.abc import Sequence
import dataclasses
from typing import Any

from etils import epath
import jax
import numpy as np

from sdpo_jax.config import Config
from sdpo_jax.learning.update import UpdateFunctions
from sdpo_jax.models.policy import Policy
from sdpo_jax.objective.objective_spec import ObjectiveSpec
from sdpo_jax.rollout.sampler import Sampler
from sdpo_jax.teacher.endpoint import Endpoint
from sdpo_jax.teacher.feedback_endpoint import FeedbackEndpoint
from sdpo_jax.teacher.signal import Teacher
from sdpo_jax.training import mixtures
from sdpo_jax.training.chunk_bank import ChunkBank
from sdpo_jax.types import Example, Tree


@dataclasses.dataclass
class Session:
  """Everything that a run holds apart from its state."""

  config: Config
  workdir: epath.Path
  tokenizer: Any
  policy: Policy
  base: Tree
  mesh: jax.sharding.Mesh
  sampler: Sampler
  spec: ObjectiveSpec
  teacher: Teacher | None  # None: the objective reads no teacher on the devices.
  update: UpdateFunctions
  flops_per_token: float  # FLOPs of one forward pass.
  update_flops_per_token: float  # FLOPs of a forward and a backward pass.
  teacher_flops_per_token: float  # FLOPs of a forward pass of the policy that reads the teacher's prompts.
  endpoint: Endpoint | None = None  # A teacher behind an endpoint.
  # Trainable parameters of the `reference_policies` that the objective needs, by name.
  references: dict[str, Tree] = dataclasses.field(default_factory=dict)
  teachers_sampler: Sampler | None = None  # None: the teacher samples nothing.
  feedback_sampler: Sampler | None = None  # For the student's own feedback; None: it writes none.
  feedback_endpoint: FeedbackEndpoint | None = None  # A server that writes feedback.
  chunks: ChunkBank | None = None  # What the teacher reads; None: it reads the same before every prompt.

  def writer(self, trainable: Tree) -> tuple[Sampler, Tree, Tree]:
    """Return the sampler, base and trainable tree for training completions (`rollout.sampled_by`).

    Args:
      trainable: trainable parameters of the student.
    """
    if self.config.rollout.sampled_by == 'student':
      return self.sampler, self.base, trainable
    return self.teacher_writer

  def members(self, examples: Sequence[Example]) -> np.ndarray | None:
    """Return the place [G] of each question's chunk in the teacher's base, where it now is; None without chunks."""
    return None if self.chunks is None else self.chunks.members(examples)

  def mixtures(self, examples: Sequence[Example], step: int) -> np.ndarray | None:
    """Return the distractors [G, K] beside the student's cartridge, in the generation batch of a step, or None."""
    about = np.zeros(len(examples), np.int32) if self.chunks is None else self.chunks.documents(examples)
    return mixtures.mixtures(self.config, step, about)

  def writers_members(self, examples: Sequence[Example], step: int) -> np.ndarray | None:
    """Return the members of the rows of questions in the sampler of `writer`, of which they are read here."""
    of_teacher = self.members(examples)
    return self.mixtures(examples, step) if self.config.rollout.sampled_by == 'student' else of_teacher

  @property
  def teacher_writer(self) -> tuple[Sampler, Tree, Tree]:
    """The sampler, base and trainable tree for completions of the teacher."""
    return self.teachers_sampler, self.teacher.whole_base(self.base), {}
