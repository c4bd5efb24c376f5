"""Small faults in the product, each of which the default tests of its room must find.

  python -m benchmarks.mutants                              # all of them, about twenty minutes on two cores
  python -m benchmarks.mutants config terminal              # those of two rooms
  python -m benchmarks.mutants --output=docs/performance/mutants.json

Every fault is put into a copy of the repository, alone, and the tests that it names run there; before, they must pass
without it. Prints one line of JSON for each fault, with the first test that fails, and one for all. Exit code 1 if a
fault is not found.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).parent.parent
LIMIT_S = 600  # Seconds that the tests of a fault may take; a fault that makes them hang is found, too.
FAILED = re.compile(r'^(?:FAILED|ERROR) (.+?)(?: - .*)?$', re.MULTILINE)


@dataclasses.dataclass(frozen=True)
class Mutant:
  """A fault: a text of a file, replaced by another."""

  file: str
  fault: str  # What goes wrong, in a few words.
  old: str  # Occurs once in the file.
  new: str
  tests: str  # A file of tests, or one test of a file that takes long.

  @property
  def room(self) -> str:
    """Return the room of the file, as the folders of tests/ name it."""
    first, second, *_ = pathlib.PurePath(self.file).parts
    return second if first == 'sdpo_jax' else first

  def mutated(self, text: str) -> str:
    """Return the file's text with the fault.

    Raises:
      ValueError: the text to replace does not occur exactly once.
    """
    if text.count(self.old) != 1:
      raise ValueError(f'{self.file} holds {self.old!r} {text.count(self.old)} times, not once.')
    return text.replace(self.old, self.new)


def _in(file: str, tests: str, *faults: tuple[str, str, str]) -> tuple[Mutant, ...]:
  return tuple(Mutant(file, fault, old, new, tests) for fault, old, new in faults)


MUTANTS = (
  *_in(
    'sdpo_jax/distributed/stopping.py',
    'tests/distributed/test_stopping.py',
    ('processes leave one point late', 'self._passed >= self._at', 'self._passed > self._at'),
  ),
  *_in(
    'sdpo_jax/distributed/mesh.py',
    'tests/distributed/test_mesh.py',
    ('an axis need only be longer than the mesh', 'size % mesh.shape[RULES[axis]]:', 'size < mesh.shape[RULES[axis]]:'),
    ('widths are split along the wrong axis', "'embed': FSDP,", "'embed': TENSOR,"),
    ('parts of a gathered stack are in another order', '(first, *others)', '(*others, first)'),
    ('too small a group samples', 'if weights / size <=', 'if weights / 2 / size <='),
  ),
  *_in(
    'sdpo_jax/distributed/collectives.py',
    'tests/distributed/test_collectives.py',
    ('the last part is not sent', '-(-int(sizes.max()) // PART)', 'max(1, int(sizes.max()) // PART)'),
  ),
  *_in(
    'sdpo_jax/distributed/accelerators.py',
    'tests/distributed/test_accelerators.py',
    ('a TPU needs a device file and a PCI chip', 'TPU_FILES)) or any', 'TPU_FILES)) and any'),
  ),
  *_in(
    'sdpo_jax/config/ranges.py',
    'tests/config/test_schema.py',
    ('an open bound is taken', 'value > self.above', 'value >= self.above'),
    ('a special value is refused', 'return value in self.also or (', 'return ('),
  ),
  *_in(
    'sdpo_jax/config/overrides.py',
    'tests/config/test_schema.py',
    ('a key in an address is quoted', "netloc=parts.netloc.rpartition('@')[2]", 'netloc=parts.netloc'),
    ('an old run gets a new default', "'data.split_special_tokens': False", "'data.split_special_tokens': True"),
  ),
  *_in(
    'sdpo_jax/config/fields.py',
    'tests/config/test_schema.py',
    ('what a section may change is refused', ' or name.startswith(entry', ' and name.startswith(entry'),
  ),
  *_in(
    'sdpo_jax/config/overrides.py',
    'tests/learning/test_optimizer.py',
    ('a longer run may change how its rate decays', 'not decays or settings', 'True or settings'),
  ),
  *_in(
    'sdpo_jax/config/checks.py',
    'tests/training/test_documents.py',
    (
      'a cartridge may have no slots to train',
      'cartridge.num_frozen_tokens < tokens',
      'cartridge.num_frozen_tokens <= tokens',
    ),
  ),
  *_in(
    'sdpo_jax/config/checks.py',
    'tests/data/test_pipeline.py',
    ('a weight is not the decimal that is written', 'fractions.Fraction(str(weight))', 'fractions.Fraction(weight)'),
  ),
  *_in(
    'sdpo_jax/evaluation/evaluate.py',
    'tests/evaluation/test_evaluate.py',
    ('best@k is worst@k', '.max(1).mean()', '.min(1).mean()'),
    ('samples are drawn without replacement', 'replace=True', 'replace=k > n'),
    ('the rarest answer wins', 'votes.argmax(1)', 'votes.argmin(1)'),
    ('ungraded samples count', 'if outcomes[row].graded] for', 'if True] for'),
  ),
  *_in(
    'sdpo_jax/evaluation/alarms.py',
    'tests/evaluation/test_alarms.py',
    ('the best value is the worst', 'best = max if self.below else min', 'best = min if self.below else max'),
    (
      'the evaluation before step 1 raises alarms',
      'rule.metric.fullmatch(name) or step == 0:',
      'rule.metric.fullmatch(name):',
    ),
    ('a rollback forgets its own step', 'bisect.bisect_right(', 'bisect.bisect_left('),
  ),
  *_in(
    'sdpo_jax/reporting/rollouts.py',
    'tests/reporting/test_report.py',
    ('a line under way counts as broken', 'whole or number < len(lines)', '1'),
    ('a rollout is looked for in the pieces of the first file', "'piece': first + piece", "'piece': piece"),
    ('steps are not spread over the run', 'middle = (low + high) // 2', 'middle = high - 1'),
    ('the strongest colour is an outlier', 'int(0.8 * (', 'int(1.0 * ('),
    ('unfinished steps are shown', 'last is None or step <= last', 'True'),
  ),
  *_in(
    'sdpo_jax/reporting/groups.py',
    'tests/reporting/test_report.py',
    ('seeds are curves of their own', 'is_listed(name, (SEED, *RESUMABLE))', 'is_listed(name, RESUMABLE)'),
  ),
  *_in(
    'sdpo_jax/reporting/run_files.py',
    'tests/reporting/test_report.py',
    ('alarms are drawn as metrics', 'in alarms.NO_METRICS or name.startswith(alarms.PREFIX)', 'in alarms.NO_METRICS'),
  ),
  *_in(
    'sdpo_jax/quickstart/make_base.py',
    'tests/quickstart/test_make_base.py',
    ('the base is right too seldom', 'draw < recipe.noise + recipe.right', 'draw < recipe.right'),
  ),
  *_in(
    'sdpo_jax/quickstart/small_tokenizer.py',
    'tests/quickstart/test_make_base.py',
    ('digits merge', r"r'\p{N}|\p{L}+", r"r'\p{N}+|\p{L}+"),
    ('a turn ends with another token', "'eos_token': end,", "'eos_token': END_OF_TEXT,"),
  ),
  *_in(
    'sdpo_jax/quickstart/induction.py',
    'tests/quickstart/test_document_base.py',
    ('the first layer looks one token ahead', '-near * np.sin(angles)', 'near * np.sin(angles)'),
  ),
  *_in(
    'sdpo_jax/quickstart/copying.py',
    'tests/quickstart/test_session_base.py',
    ('heads of one group copy', 'head * (config.heads // config.kv_heads)', 'head'),
  ),
  *_in(
    'sdpo_jax/quickstart/tool_tasks.py',
    'tests/quickstart/test_session_base.py',
    ('the favourite is proposed too seldom', 'FAVOURITE = 0.8', 'FAVOURITE = 0.7'),
  ),
  *_in(
    'sdpo_jax/inference/probe.py',
    'tests/inference/test_probe.py',
    ('an error is not corrected for few questions', ' * len(sums) / (len(sums) - 1))', ')'),
  ),
  *_in(
    'sdpo_jax/inference/probe_report.py',
    'tests/inference/test_probe.py',
    (
      'feedback is shown with the demonstration',
      "{'include_demonstration': False,",
      "{'include_demonstration': True,",
    ),
  ),
  *_in(
    'sdpo_jax/inference/answer_files.py',
    'tests/inference/test_sample.py',
    ('records wait for the end', 'while due in waiting:', 'if due in waiting:'),
  ),
  *_in(
    'sdpo_jax/inference/prompt_pools.py',
    'tests/inference/test_synthesis.py',
    ('the pool of another command is removed unasked', 'if changed and overwrite:', 'if changed:'),
  ),
  *_in(
    'sdpo_jax/inference/verify.py',
    'tests/inference/test_verify.py',
    (
      'a run is said to go on from its oldest checkpoint',
      '    step = max(self.whole, default=0)',
      '    step = min(self.whole, default=0)',
    ),
    ('a resume that is refused is not said', 'if self._refused:', 'if self._refused and not self.whole:'),
  ),
  *_in(
    'sdpo_jax/preflight/grader_trials.py',
    'tests/preflight/test_check.py',
    ('the form that is graded worst is tried', 'best = max(pairs', 'best = min(pairs'),
  ),
  *_in(
    'sdpo_jax/preflight/memory.py',
    'tests/preflight/test_check.py',
    ('copies are not divided over a group', 'shards = mesh.shape[TENSOR] if TENSOR in', 'shards = 1 if TENSOR in'),
  ),
  *_in(
    'sdpo_jax/preflight/prompt_lengths.py',
    'tests/preflight/test_check.py',
    (
      'a length at an edge is in the wrong bin',
      '(tokens > low) & (tokens <= high)',
      '(tokens >= low) & (tokens < high)',
    ),
  ),
  *_in(
    'sdpo_jax/preflight/doubtful_settings.py',
    'tests/preflight/test_check.py',
    (
      'a warm-up as long as the run looks right',
      'if steps <= optimizer.lr_warmup_steps:',
      'if steps < optimizer.lr_warmup_steps:',
    ),
    ('rows and devices are divided the wrong way', 'elif micro % devices:', 'elif devices % micro:'),
  ),
  *_in(
    'sdpo_jax/terminal/policies.py',
    'tests/terminal/test_parts.py',
    ('a link leads out of what is allowed', "(all if self.verb == 'allow' else any)(whole", 'any(whole'),
    ('a command may expand variables', '()`$\\n', '()`\\n'),
    ('a star goes into folders', "'*': '[^/]*'", "'*': '.*'"),
  ),
  *_in(
    'sdpo_jax/terminal/changes.py',
    'tests/terminal/test_parts.py',
    ('an empty range begins a line too late', 'start + 1 if count else start', 'start + 1'),
  ),
  *_in(
    'sdpo_jax/terminal/history.py',
    'tests/terminal/test_parts.py',
    ('half a line stays', 'os.ftruncate(self._file, whole)', 'os.ftruncate(self._file, len(content))'),
  ),
  *_in(
    'sdpo_jax/terminal/escaping.py',
    'tests/terminal/test_parts.py',
    ('spaces at the end of a line are not seen', "escaped(' ') * (len(text)", "' ' * (len(text)"),
  ),
  *_in(
    'launch/tpu_slice.sh',
    'tests/launch/test_tpu_slice.py',
    ('a run that lost a worker stays ended', '70 | 75 | 143)', '70 | 143)'),
    ('an alarm is another exit code', 'code > 3 ? 1 : code', 'code > 2 ? 1 : code'),
    ('a run cannot save when it is stopped', 'kill -s TERM -- -$group', 'kill -s KILL -- -$group'),
    (
      'a start sees the exit code of the run before',
      'rm -f ~/sdpo_run/exit_code ~/sdpo_run/group;',
      'rm -f ~/sdpo_run/group;',
    ),
  ),
  *_in(
    'launch/sample.py',
    'tests/launch/test_commands.py::test_wrong_input_ends_with_one_sentence_and_code_2',
    ('nothing to answer is no error', '.count(True) != 1:', '.count(True) > 1:'),
    ('a chat takes several answers', 'if CHAT.value and N.value > 1:', 'if CHAT.value and N.value > 9:'),
  ),
  *_in(
    'launch/check.py',
    'tests/launch/test_commands.py::test_the_printed_commands_work',
    ('a check that finds something succeeds', 'return ODD if report.odd else 0', 'return 0'),
  ),
  *_in(
    'sdpo_jax/serving/engine.py',
    'tests/serving/test_engine.py',
    (
      'the average is of the version before',
      'averaging.average(average, value, np.float32(feedback.average_rate))',
      'average',
    ),
    ('the live teacher is another adapter', "'live': (feedback.version, _FACTORS)", "'live': (BASE, _FACTORS)"),
  ),
  *_in(
    'sdpo_jax/serving/worker.py',
    'tests/serving/test_worker.py',
    (
      'one more may wait than is allowed',
      'not self._places.take(job.payer.id)',
      'self._places.taken > self._places.limit',
    ),
  ),
  *_in(
    'sdpo_jax/serving/feedback.py',
    'tests/serving/test_feedback.py',
    ('a dry run makes a version', 'if accepted and commits and arrays:', 'if accepted:'),
  ),
  *_in(
    'sdpo_jax/serving/account.py',
    'tests/serving/test_feedback.py',
    ('what failed is paid for', 'self.call.spend(kind, -amount)', 'self.call.spend(kind, 0)'),
  ),
  *_in(
    'sdpo_jax/serving/store/store.py',
    'tests/serving/store/test_store.py',
    (
      'adapters of others are found',
      'known.deleted or known.head.adapter.owner != owner:',
      'known.deleted:',
    ),
    ('samples never expire', 'sample is None or expires <= self.clock()', 'sample is None'),
  ),
  *_in(
    'sdpo_jax/serving/web/admission.py',
    'tests/serving/web/test_gate.py',
    (
      'a host that ends like ours is ours',
      'found.hostname in self._hosts',
      'any((found.hostname or "").endswith(host) for host in self._hosts)',
    ),
  ),
  *_in(
    'sdpo_jax/serving/allowances.py',
    'tests/serving/test_allowances.py',
    ('a large request is never let in', 'self._level < min(tokens, self._burst):', 'self._level < tokens:'),
  ),
  *_in(
    'sdpo_jax/serving/guards.py',
    'tests/serving/test_guards.py',
    ('a value at its limit is rejected', 'sign * value <= sign * limit', 'sign * value < sign * limit'),
    ('the divergence is the reverse one', 'np.exp(p) * (p - q)', 'np.exp(q) * (q - p)'),
    ('a loss is compared with too few', 'len(recent) < LEAST_RECENT:', 'len(recent) < LEAST_RECENT - 1:'),
  ),
  *_in(
    'sdpo_jax/serving/sample_requests.py',
    'tests/serving/test_prompts.py',
    ('a seed below 0 reaches the sampler', 'seed=seed % 2**32', 'seed=seed'),
  ),
  *_in(
    'sdpo_jax/serving/tool_calls.py',
    'tests/serving/test_tool_calls.py',
    (
      'a call with further keys is run',
      "if further := found.keys() - {'name', key, 'id', 'type'}:",
      'if further := set():',
    ),
  ),
  *_in(
    'sdpo_jax/training/step.py',
    'tests/training/test_step.py',
    ('outcomes stay while completions move', '[graded.outcomes[sample] for sample in order]', 'graded.outcomes'),
    ('a question that stands twice is two', 'if config.data.group_duplicates:', 'if False:'),
  ),
  *_in(
    'sdpo_jax/training/checkpoint/checkpoints.py',
    'tests/training/checkpoint/test_checkpoints.py',
    ('the worst checkpoint is kept', 'return max(ranked)[1]', 'return min(ranked)[1]'),
  ),
  *_in(
    'sdpo_jax/training/skipped.py',
    'tests/training/test_skipped.py',
    ('one skipped step is all of them', "line['train/skipped_steps'] < steps", "not line['train/skipped_steps']"),
    ('skipped batches need not follow each other', '    return Skipped()\n  if why', '    return skipped\n  if why'),
    ('steps without grades are lessons', "(why != UNGRADED or line['train/grad_norm'])", 'True'),
    ('none waits', " and line.get('gathering/rows', 1)", ''),
    ('a teacher needs grades', "(why != UNGRADED or line['train/grad_norm'])", 'why != UNGRADED'),
    (
      'a short run goes on for nothing',
      'min(trainer.max_skipped_steps, trainer.total_training_steps)',
      'trainer.max_skipped_steps',
    ),
    ('batches before a rollback count', 'ROLLBACK) is None', 'ROLLBACK) is not ...'),
    ('the cause is not told', 'return NOT_FINITE\n', 'return EMPTY\n'),
    ('batches that are alike end a run', 'skipped.why != EMPTY and skipped.count >=', 'skipped.count >='),
    (
      'graded batches do not show that graders work',
      'return skipped if skipped.why != UNGRADED',
      'return skipped if True',
    ),
  ),
  *_in(
    'sdpo_jax/planner/lengths.py',
    'tests/planner/test_plan.py::test_blocks_of_the_cache_follow_every_row_and_step',
    ('a block that is not full is not fetched', 'np.ceil((prompt', 'np.floor((prompt'),
  ),
  *_in(
    'sdpo_jax/planner/lengths.py',
    'tests/planner/test_plan.py::test_lengths_have_the_mean_and_the_limit_that_were_given',
    ('lengths exceed the limit', 'np.minimum(scale * shape, longest)', 'scale * shape'),
  ),
  *_in(
    'sdpo_jax/planner/lengths.py',
    'tests/planner/test_plan.py::test_lengths_come_from_a_runs_metrics',
    ('the first steps of a run count', 'in lines[-_STEPS:]:', 'in lines[:_STEPS]:'),
  ),
  *_in(
    'sdpo_jax/planner/traffic.py',
    'tests/planner/test_traffic.py',
    ('parts of a block are read', 'max(math.ceil(filled / self.block), 1) * self.block', 'max(filled, self.block)'),
  ),
  *_in(
    'sdpo_jax/data/pipeline.py',
    'tests/data/test_pipeline.py',
    ('the turns of a round are bunched', '(turn + 0.5) / np', 'turn / np'),
  ),
  *_in(
    'sdpo_jax/data/grouping.py',
    'tests/data/test_grouping.py',
    (
      'questions with other answers are the same',
      ', example.environment, example.ground_truth]',
      ', example.environment]',
    ),
  ),
  *_in(
    'sdpo_jax/data/ground_truth.py',
    'tests/data/test_rows.py',
    ('a test may lack its output', 'len(inputs) != len(outputs)', 'len(inputs) < len(outputs)'),
    ('a test may have no time', '0 < limit <= _LONGEST', '0 <= limit <= _LONGEST'),
  ),
  *_in(
    'sdpo_jax/environments/grading.py',
    'tests/environments/test_rewards.py',
    ('a sum is rounded at every term', 'return math.fsum(terms)', 'return sum(terms)'),
    (
      'a failed grader is left out of the sum',
      'outcomes[name].graded and outcomes[name].applicable:',
      'outcomes[name].wanted:',
    ),
  ),
  *_in(
    'sdpo_jax/objective/divergences.py',
    'tests/objective/test_loss.py',
    (
      'the mixture has the other weights',
      'difference + jnp.log(alpha) - jnp.log1p(-alpha)',
      'difference + jnp.log1p(-alpha) - jnp.log(alpha)',
    ),
  ),
  *_in(
    'sdpo_jax/objective/terms.py',
    'tests/objective/test_loss.py',
    (
      'the ratio has a lower bound',
      'jnp.minimum(unclipped, scalars.is_clip)',
      'jnp.maximum(unclipped, scalars.is_clip)',
    ),
    ('entropy is punished', "loss -= sums['entropy_bonus']", "loss += sums['entropy_bonus']"),
    ('weights of the sampler are not bounded', 'scalars.rollout_is_threshold)', 'jnp.inf)'),
  ),
  *_in(
    'sdpo_jax/objective/policy_gradient.py',
    'tests/objective/test_golden.py',
    ('the dual clip holds for every advantage', 'jnp.where(advantages < 0, jnp.minimum', 'jnp.where(True, jnp.minimum'),
  ),
  *_in(
    'sdpo_jax/teacher/averaging.py',
    'tests/teacher/test_averaging.py',
    (
      'the average moves by the rest',
      'teacher * (1 - rate) + parameter * rate',
      'teacher * rate + parameter * (1 - rate)',
    ),
  ),
  *_in(
    'sdpo_jax/teacher/order.py',
    'tests/teacher/test_order.py',
    ('a partition ends with its longest', 'ranked[1::2][::-1]\n  return', 'ranked[1::2]\n  return'),
  ),
  *_in(
    'sdpo_jax/teacher/context.py',
    'tests/teacher/test_context.py',
    ('a success may only show itself', 'if candidate != row]', 'if candidate == row]'),
    ('a score at the threshold is a failure', '>= np.float32(threshold)', '> np.float32(threshold)'),
    ('the end of a long text is lost', 'text[len(text) - length // 2 :]', 'text[len(text) - length // 4 :]'),
  ),
  *_in(
    'sdpo_jax/learning/losses.py',
    'tests/objective/test_jsd_pg.py',
    ('alpha of jsd_pg is not mirrored', "'alpha': 1.0 - loss.alpha", "'alpha': loss.alpha"),
    ('advantages of jsd_pg are clipped from below', "'clip_ratio_c': math.inf", "'clip_ratio_c': 1.5"),
  ),
  *_in(
    'sdpo_jax/learning/requests.py',
    'tests/learning/test_learner.py',
    ('rows of padding count', 'shown = mask & live[:, None]', 'shown = mask'),
  ),
  *_in(
    'sdpo_jax/learning/learner.py',
    'tests/learning/test_learner.py',
    ('a request steps once more than it wants', 'if number < task.update.steps}', 'if number <= task.update.steps}'),
    ('later steps keep the first support', 'micro.batch if number == 0 else', 'micro.batch if number >= 0 else'),
  ),
  *_in(
    'sdpo_jax/learning/signals.py',
    'tests/learning/test_learner.py',
    (
      'the ratio forgets who drew the completion',
      'jnp.where(inputs.has_old[:, None], old, own',
      'jnp.where(False, old, own',
    ),
    (
      'given scores are not read',
      'jnp.where(rows, inputs.given_own, theirs',
      'jnp.where(False, inputs.given_own, theirs',
    ),
  ),
  *_in(
    'sdpo_jax/learning/training_pool.py',
    'tests/learning/test_training_pool.py',
    ('weights do not decay', 'add_decayed_weights(settings.weight_decay)', 'add_decayed_weights(0.0)'),
  ),
  *_in(
    'sdpo_jax/learning/training_pool.py',
    'tests/learning/test_learner.py',
    (
      'a step into infinity is taken',
      'active & jnp.stack([fits(leaf) for leaf in jax.tree.leaves(moved)]).all()',
      'active',
    ),
  ),
  *_in(
    'sdpo_jax/learning/batching.py',
    'tests/learning/test_batching.py',
    ('samples without an advantage are read', 'moves &= batch.advantages[samples] != 0', 'moves &= True'),
  ),
  *_in(
    'sdpo_jax/learning/batching.py',
    'tests/training/test_ungraded.py',
    ('what could not be graded is learned', 'mask[samples] & graded[:, None])', 'mask[samples])'),
  ),
  *_in(
    'sdpo_jax/learning/update.py',
    'tests/training/test_step.py',
    ('a teacher follows a step not taken', 'jnp.where(applied > 0, new, old)', 'jnp.where(applied >= 0, new, old)'),
  ),
  *_in(
    'sdpo_jax/learning/optimizer.py',
    'tests/learning/test_optimizer.py',
    ('small gradients are scaled up', 'jnp.minimum(1.0, max_norm / (norm + CLIP_EPS))', 'max_norm / (norm + CLIP_EPS)'),
  ),
  *_in(
    'sdpo_jax/learning/packing.py',
    'tests/learning/test_batching.py',
    (
      'a token is predicted from itself',
      'np.concatenate([[last], np.arange(place, place + count - 1)])',
      'np.arange(place, place + count)',
    ),
  ),
  *_in(
    'sdpo_jax/rollout/buckets.py',
    'tests/learning/test_batching.py',
    ('a text does not fit a bucket of its length', 'if bucket >= length)', 'if bucket > length)'),
  ),
  *_in(
    'sdpo_jax/rollout/sampling.py',
    'tests/rollout/test_sampling.py',
    ('every sample of a step gets the same numbers', ', step), sample_id)', ', step), step)'),
    ('the log-prob is not of the distribution drawn from', 'shifted_at / temperature -', 'shifted_at -'),
    ('entropy has the wrong sign', 'jnp.log(model_total) - moment', 'jnp.log(model_total) + moment'),
  ),
  *_in(
    'sdpo_jax/rollout/stops.py',
    'tests/rollout/test_engine.py',
    ('a stop string over two chunks is missed', 'tokens[max(0, checked - self._reach) :]', 'tokens[checked:]'),
  ),
  *_in(
    'models/adapters/lora.py',
    'tests/models/adapters/test_lora.py',
    ('rsLoRA scales like LoRA', 'math.sqrt(rank) if use_rslora else rank', 'rank'),
    ('factors stand in layers that have none', 'if i in layers else 0.0', 'if True else 0.0'),
  ),
  *_in(
    'models/adapters/merging.py',
    'tests/models/adapters/test_peft.py',
    ('factors are merged without their scale', 'np.float32(scale) * (b', '(b'),
  ),
  *_in(
    'models/rope.py',
    'tests/models/test_rope.py',
    ('stretched positions are shrunk', 'plain / np.float32(rope.factor)', 'plain * np.float32(rope.factor)'),
    ('fast pairs of YaRN are slowed', 'kept = 1 - slowed', 'kept = slowed'),
  ),
  *_in(
    'sdpo_jax/environments/digits.py',
    'tests/environments/test_digits.py',
    ('the last digit of an odd number is lost', 'else digits[i] for i in', 'else 0 for i in'),
  ),
  *_in(
    'sdpo_jax/environments/digits.py',
    'tests/environments/test_registry.py',
    ('more than a fifth of the lists are held out', '% HELD_OUT == 0', '% HELD_OUT <= 1'),
  ),
  *_in(
    'sdpo_jax/environments/thinking.py',
    'tests/teacher/test_context.py',
    ('what a model was cut off thinking is shown', 'rest.partition(_OPEN)[0] if unfinished', 'rest if unfinished'),
  ),
  *_in(
    'sdpo_jax/data/pipeline.py',
    'tests/data/test_pipeline.py',
    (
      'every process reads the same rows',
      'slice(process_index * share, (process_index + 1) * share)',
      'slice(0, share)',
    ),
  ),
  *_in(
    'sdpo_jax/planner/lengths.py',
    'tests/planner/test_plan.py::test_lengths_have_the_mean_and_the_limit_that_were_given',
    ('every length is the median', '(i + 0.5) / count', '0.5'),
  ),
  *_in(
    'sdpo_jax/training/gathering.py',
    'tests/training/test_schedule.py',
    ('an update waits for one example too many', 'self.examples < self._least and', 'self.examples <= self._least and'),
  ),
)


def copy_to(folder: pathlib.Path) -> None:
  """Copy the files that git knows or would take, with changes that are not committed, into a repository of its own."""
  listed = subprocess.run(
    ['git', 'ls-files', '-z', '--cached', '--others', '--exclude-standard'], cwd=ROOT, capture_output=True, check=True
  )
  for name in map(os.fsdecode, filter(None, listed.stdout.split(b'\0'))):
    if (ROOT / name).is_file():
      (folder / name).parent.mkdir(parents=True, exist_ok=True)
      shutil.copy2(ROOT / name, folder / name)
  for arguments in (['init', '-q'], ['add', '-A']):  # Tests ask git for the files.
    subprocess.run(['git', *arguments], cwd=folder, check=True)


def first_failure(code: int, said: str) -> str | None:
  """Return the first test that failed, given pytest's exit code and what it printed; None if all passed.

  Raises:
    RuntimeError: the tests could not be run.
  """
  if code == 0:
    return None
  found = FAILED.search(said)
  if code not in (1, 2) or found is None:
    raise RuntimeError(f'pytest ended with exit code {code}:\n{said[-2000:]}')
  return found[1]


def run_tests(folder: pathlib.Path, tests: str) -> str | None:
  """Run tests in a copy of the repository; return what failed first, None if nothing did; raise as `first_failure`."""
  command = [sys.executable, '-m', 'pytest', '-x', '-q', '-n', '0', '--tb=no', '-rfE', tests]
  # Two versions of a file that are written in one second and have one size would share their bytecode.
  environment = {**os.environ, 'PYTHONDONTWRITEBYTECODE': '1'}
  try:
    done = subprocess.run(
      command, cwd=folder, env=environment, capture_output=True, text=True, check=False, timeout=LIMIT_S
    )
  except subprocess.TimeoutExpired:
    return f'no end within {LIMIT_S} s'
  return first_failure(done.returncode, done.stdout + done.stderr)


def main() -> int:
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument('rooms', nargs='*', help='rooms whose faults are tried; all without')
  parser.add_argument('--output', type=pathlib.Path, help='file for the results, e.g. docs/performance/mutants.json')
  flags = parser.parse_args()
  if unknown := sorted(set(flags.rooms) - {mutant.room for mutant in MUTANTS}):
    parser.error(f'there are no faults of {", ".join(unknown)}')
  chosen = [mutant for mutant in MUTANTS if not flags.rooms or mutant.room in flags.rooms]
  results: dict[str, list[dict[str, str | None]]] = {}
  with tempfile.TemporaryDirectory() as name:
    folder = pathlib.Path(name)
    copy_to(folder)
    without = functools.cache(functools.partial(run_tests, folder))
    for mutant in chosen:
      if failed := without(mutant.tests):
        raise RuntimeError(f'{mutant.tests} fails without a fault: {failed}')
      path = folder / mutant.file
      text = path.read_text(encoding='utf-8')
      path.write_text(mutant.mutated(text), encoding='utf-8')
      found = run_tests(folder, mutant.tests)
      path.write_text(text, encoding='utf-8')
      result = {'file': mutant.file, 'fault': mutant.fault, 'found_by': found}
      results.setdefault(mutant.room, []).append(result)
      print(json.dumps({'room': mutant.room, **result}), flush=True)
  missed = sum(result['found_by'] is None for of_room in results.values() for result in of_room)
  total = {'mutants': len(chosen), 'found': len(chosen) - missed}
  print(json.dumps(total))
  if flags.output:
    flags.output.write_text(json.dumps({'total': total, 'rooms': dict(sorted(results.items()))}, indent=1) + '\n')
  return 1 if missed else 0


if __name__ == '__main__':
  sys.exit(main())
