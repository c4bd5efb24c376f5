"""The terms of a run's loss, and what the rest of the program must provide for them."""

from __future__ import annotations

import dataclasses

from sdpo_jax.types import COEFFICIENTS

# Fixed policies that a term may compare the student to: it reads log-probs under them, `Batch.<name>_log_probs`.
REFERENCES = ('initial',)


@dataclasses.dataclass(frozen=True)
class ObjectiveSpec:
  """The terms of the loss, and what the trainer has to prepare for them.

  Nothing else in the program asks which loss a run minimises: a new objective is a new combination of these fields.
  """

  distillation: bool  # Σ distill_coef · ratio · divergence: needs a teacher.
  policy_gradient: bool  # Σ policy_coef · PPO loss: needs advantages.
  entropy_bonus: bool = False  # − Σ entropy_coef · entropy.
  kl_penalty: bool = False  # Σ kl_coef · estimate of the KL divergence from the initial policy.
  on_policy: bool = True  # One optimizer step per generation batch: the ratio to the old policy is 1 by construction.
  rollout_weights: bool = False  # Tokens are weighted by the trainer's probability over the sampler's.
  reprompts: bool = False  # The teacher reads demonstrations and feedback, and only teaches where there are some.
  external_support: int | None = None  # K, tokens per position that an external teacher names; None: it is in the mesh.
  samples_divergence: bool = False  # The divergence is that of the sampled token alone.
  normalised_weights: bool = False  # Rollout weights are divided by their mean over the generation batch.

  @property
  def needs_teacher(self) -> bool:
    """Whether the update reads a teacher's signal."""
    return self.distillation

  @property
  def reads_teacher(self) -> bool:
    """Whether the update runs a teacher in the mesh, which reads prompts of its own."""
    return self.needs_teacher and self.external_support is None

  @property
  def needs_advantages(self) -> bool:
    """Whether the update reads advantages."""
    return self.policy_gradient

  @property
  def trains_all(self) -> bool:
    """Whether a term applies to all graded samples, also to those without a teacher or an advantage."""
    return self.entropy_bonus or self.kl_penalty

  @property
  def references(self) -> tuple[str, ...]:
    """The policies of `REFERENCES` under which the trainer computes log-probs of the completions."""
    return ('initial',) if self.kl_penalty else ()

  @property
  def needs_old_log_probs(self) -> bool:
    """Whether the update reads log-probs of the policy before it; on-policy they are the current ones, detached."""
    return not self.on_policy

  @property
  def weighs_in_update(self) -> bool:
    """Whether the update computes the rollout weights itself, from the log-probs that it has on-policy."""
    return self.rollout_weights and self.on_policy and not self.normalised_weights

  @property
  def computes_log_probs(self) -> bool:
    """Whether the trainer computes log-probs of all completions before the update."""
    return self.needs_old_log_probs or (self.rollout_weights and not self.weighs_in_update)

  @property
  def coefficients(self) -> tuple[str, ...]:
    """Names of the `COEFFICIENTS` that a batch has."""
    present = (self.distillation, self.policy_gradient, self.entropy_bonus, self.kl_penalty)
    return tuple(name for name, there in zip(COEFFICIENTS, present, strict=True) if there)
