"""The teacher's signal on completions, computed by a policy that reads the teacher's context."""

from __future__ import annotations

import dataclasses

import jax

from sdpo_jax.errors import UserError
from sdpo_jax.models import parameters
from sdpo_jax.models.forward import forward
from sdpo_jax.models.policy import Policy
from sdpo_jax.objective import log_probs
from sdpo_jax.objective.loss import ObjectiveConfig
from sdpo_jax.objective.sharded import Layout
from sdpo_jax.teacher.averaging import TeacherSpec, signal_parameters
from sdpo_jax.types import Batch, TeacherSignal, TokenRows, TrainState, Tree


@dataclasses.dataclass(frozen=True)
class Teacher:
  """An in-mesh teacher: a policy and its frozen parameters.

  Parameters that are updated are in `TrainState.teacher`, as `teacher_regularization` says; a teacher that is never
  updated has all of its parameters in its base (`teacher_regularization='base'`). Examples:

  - the student's own model: `Teacher(policy)`;
  - that model without its trainable part, such as a LoRA adapter: `Teacher(policy_of_the_base)` with `'base'`;
  - another, larger model with the same vocabulary: `Teacher(its_policy, its_parameters)` with `'base'`;
  - the same model with a fixed context of its own, such as a document: a policy that puts it before the tokens, with
    the document's keys and values in its base: `Teacher(policy_with_slots, slots, beside_student=True)`.

  `make_session` builds the one that the settings name. An external teacher is not a `Teacher`: its signal is part
  of the `Batch`.
  """

  policy: Policy
  base: Tree | None = None  # None: the student's own base, which is shared, not copied.
  # Whether `base` holds only additions, such as slots, to the model that student and teacher share; the shared arrays
  # are taken from the student's base.
  beside_student: bool = False

  def whole_base(self, student: Tree) -> Tree:
    """Return all frozen parameters that the policy reads; no array is copied.

    Args:
      student: frozen parameters of the student.
    """
    if self.base is None:
      return student
    if not self.beside_student:
      return self.base
    # The student's base may hold slots of its own, under the same names as the teacher's.
    model = parameters.select(self.policy.base_policy().parameter_table(), student)
    return parameters.merge(model, self.base)

  def readers(self, student: Policy, spec: TeacherSpec) -> tuple[Policy, ...]:
    """Return the policies that read the teacher's prompts; in the trust region the student reads them too."""
    return (self.policy, student) if spec.regularization == 'trust-region' else (self.policy,)


def self_teacher(policy: Policy, spec: TeacherSpec) -> Teacher:
  """Return the teacher of a model that teaches itself; with `'base'`, the model without its adapter.

  Args:
    policy: the student's policy.
    spec: which parameters the teacher has.
  """
  return Teacher(policy.base_policy() if spec.regularization == 'base' else policy)


def check_base(spec: TeacherSpec, base: Tree) -> None:
  """Check that a model has frozen parameters if its base is the teacher.

  Raises:
    UserError: `teacher_regularization` is 'base', and the model is trained whole.
  """
  if spec.regularization == 'base' and not jax.tree.leaves(base):
    raise UserError(
      "actor.self_distillation.teacher_regularization='base' needs a model with frozen parameters, and here all are "
      "trained: set it to 'frozen' for a teacher with the initial parameters, or train an adapter with "
      'model.lora.rank.'
    )


def teacher_signal(
  teacher: Teacher,
  student: Policy,
  student_base: Tree,
  state: TrainState,
  rows: TokenRows,
  spec: TeacherSpec,
) -> TeacherSignal:
  """Return the teacher's signal on completion tokens, from its own context; no gradient flows through it.

  Args:
    teacher: policy and base of the teacher.
    student: the student's policy, which also reads the rows in the trust region.
    student_base: the student's frozen parameters.
    state: state whose teacher and trainable trees are read.
    rows: the teacher's prompts with the completions.
    spec: which parameters the teacher has.
  """
  own, mixed = signal_parameters(state.teacher, state.trainable, spec)
  hidden, unembedding = forward(teacher.policy, teacher.whole_base(student_base), own, rows)
  signal = TeacherSignal(hidden=hidden, unembedding=unembedding)
  if mixed is not None:
    mix_hidden, mix_unembedding = forward(student, student_base, mixed, rows)
    signal = signal.replace(mix_hidden=mix_hidden, mix_unembedding=mix_unembedding, mix_rate=spec.update_rate)
  return jax.lax.stop_gradient(signal)


def on_own_top_k(
  signal: TeacherSignal, batch: Batch, config: ObjectiveConfig, vocab_size: int, layout: Layout | None
) -> TeacherSignal:
  """Return a teacher's signal on its own top K tokens [B, T, K], as an external teacher would give it.

  Args:
    signal: hidden states and unembedding of the teacher.
    batch: targets and mask.
    config: K, temperature and how the top K are found.
    vocab_size: V, the tokens of the student's vocabulary.
    layout: how rows and vocabulary are divided; None: one device.
  """
  said = log_probs.scores(
    signal.hidden,
    signal.unembedding,
    batch.targets,
    config.distillation_topk,
    temperature=config.temperature,
    chunk_size=min(config.chunk_size, log_probs.CHUNK),
    mask=batch.mask,
    topk_method=config.topk_method,
    vocab_size=vocab_size,
    layout=layout,
  )
  return TeacherSignal(token_ids=said.top_ids, log_probs=said.top_log_probs)
