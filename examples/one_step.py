"""One step of SDPO from beginning to end, as `launch.train` takes it: sample, grade, teach, update.

  python examples/one_step.py [--config=configs/quickstart.py] [--workdir=DIR]

The last line is the digest of the state after the step, which is `state_digest` of step 1 in the metrics.jsonl of

  python -m launch.train --config=configs/quickstart.py --workdir=DIR

on the same devices. What this page leaves out is around the step, not in it: checkpoints, evaluation, alarms, metrics.
Sections and equations are those of the paper, arXiv 2601.20802.
"""

import argparse
import dataclasses
import tempfile

import jax
import numpy as np

import sdpo_jax
from sdpo_jax.data.grouping import first_of_same
from sdpo_jax.data.prompts import prompt_tokens
from sdpo_jax.distributed.mesh import put_rows
from sdpo_jax.environments.grading import Graders
from sdpo_jax.environments.outcomes import check_graded, scores_of
from sdpo_jax.errors import UserError
from sdpo_jax.learning import batching
from sdpo_jax.learning.update import place_state
from sdpo_jax.teacher.context import build_teacher_context
from sdpo_jax.teacher.order import balanced_order
from sdpo_jax.training.checkpoint.digests import leaf_digests, state_digest
from sdpo_jax.training.graded import GradedRollouts
from sdpo_jax.training.opening import make_session
from sdpo_jax.training.questions import training_questions
from sdpo_jax.training.specs import batch_spec, chat_format, prompt_spec, teacher_spec, update_spec
from sdpo_jax.training.step import build_batch, sampling_seed

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument('--config', default='configs/quickstart.py')
parser.add_argument('--workdir', help='a directory that is not written to but named in the settings; a temporary one')
flags = parser.parse_args()

# A run's settings become a session: the model, its sampler, its teacher, and the compiled update.
config = sdpo_jax.load_config(flags.config).validate()
workdir = flags.workdir or tempfile.mkdtemp()
session, parameters = make_session(config, workdir, teaches=True)
spec = session.spec
beside = {
  'a teacher that is not re-prompted': not spec.reprompts,
  'a teacher behind an endpoint': spec.external_support,
  'actor.kl_loss_coef': bool(spec.references),
  'actor.self_distillation.feedback_model': config.actor.self_distillation.feedback_model,
  'algorithm.min_sdpo_examples': config.algorithm.min_sdpo_examples,
  'rollout.steps_off': config.rollout.steps_off,
}
if used := [name for name, is_used in beside.items() if is_used]:
  raise UserError(f'This page shows SDPO without {used[0]}: name a config that does without it, too.')

# What is trained, the optimizer's moments, the teacher (an EMA of the student, section 3.3) and the random key.
state = place_state(update_spec(config), parameters, session.mesh, session.policy.parameter_table())

with Graders(config.environments) as graders:
  # x: the questions of this generation batch.
  questions = training_questions(config, session.tokenizer)
  graders.prepare(questions.environments)
  examples = next(questions)

  # y ~ π_θ(· | x): n completions of each question.
  prompts = [prompt_tokens(session.tokenizer, example, prompt_spec(config)) for example in examples]
  sampler, base, trainable = session.writer(state.trainable)
  rollouts = sampler.sample(
    base,
    trainable,
    prompts,
    n=config.rollout.n,
    **config.rollout.method(),
    max_tokens=config.data.max_response_length,
    seed=sampling_seed(state),
    step=1,
  )
  if config.data.group_duplicates:  # The same question asked twice is one group.
    rollouts = dataclasses.replace(rollouts, group=first_of_same(examples)[rollouts.group])

  # r and f: a score and feedback for every completion.
  asked = [examples[number] for number in np.repeat(np.arange(len(examples)), config.rollout.n)]
  cut = [reason == 'length' for reason in rollouts.finish_reason]
  outcomes = graders.grade(asked, rollouts.text, truncated=cut)
  check_graded(outcomes, config.environments.max_ungraded_fraction)
order = np.arange(len(rollouts))
if config.trainer.batch_order == 'balanced':  # Parts of about the same number of tokens.
  lengths = rollouts.completion_mask.sum(1) + rollouts.prompt_mask.sum(1)
  order = balanced_order(lengths, config.trainer.balance_partitions)
  rollouts, outcomes = rollouts.take(order), [outcomes[sample] for sample in order]

print(f'score {scores_of(outcomes).mean():.3f} of {len(outcomes)} completions')

# c: what the teacher reads before the same completion y, the question with a successful attempt of the group or with
# the feedback on y (section 3.2, table 2). Completions with neither teach nothing.
context = build_teacher_context(
  [examples[group].messages for group in rollouts.group],
  rollouts.group,
  rollouts.text,
  outcomes,
  config.actor.self_distillation,
  session.tokenizer,
  seed=sampling_seed(state),
  step=1,
  sample_ids=order,
  chat=chat_format(config),
)
print(f'the teacher has more to read than the question for {context.mask.mean():.0%} of them')

# All that the loss reads of a token: masks, weights and denominators are in its coefficients.
graded = GradedRollouts(examples, prompts, rollouts, outcomes, sample_ids=order, graders_busy_s=0.0)
batch = build_batch(session, state, graded, context, {})

# θ: gradients of the divergence from the teacher, token by token (equation 1; top K and a tail bucket, appendix),
# summed over micro-batches, one optimizer step for every mini-batch.
update, sizes = session.update, batch_spec(config)
share = batching.shares_prompts(sizes, *session.teacher.readers(session.policy, teacher_spec(config)))
taken, losses = 0, []
for _ in range(config.actor.ppo_epochs):
  for samples in batching.mini_batches(sizes):
    grads, loss = update.zero(state.trainable), 0.0
    for micro in batching.micro_batches(batch, samples, sizes, session.mesh.size, share):
      arrays = put_rows(session.mesh, micro.batch)
      grads, result = update.accumulate(session.base, state, grads, arrays, session.teacher.base)
      loss += float(result.loss)
    state, report = update.apply(state, grads)
    taken += int(report['taken'])
    losses.append(loss)
print(f'loss {np.mean(losses):.4f}, norm of the gradient {float(report["grad_norm"]):.3f}')

# φ ← (1 − τ)·φ + τ·θ: the teacher moves once for every generation batch.
state = update.advance_teacher(state, np.int32(taken))

print(state_digest(leaf_digests(jax.block_until_ready(state))))
