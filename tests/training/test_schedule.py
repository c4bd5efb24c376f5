"""The benchmark path as a schedule of a run: hybrid objectives, feedback that a model writes, examples that gather."""

from __future__ import annotations

import dataclasses
import itertools
import json
import types
from typing import get_args

import chex
import jax
import numpy as np
import pytest

from sdpo_jax.config import Config, MeshConfig
from sdpo_jax.configs import livecodebench_schedule, paper
from sdpo_jax.data.prompts import ChatFormat
from sdpo_jax.distributed import accelerators
from sdpo_jax.distributed.stopping import NEVER
from sdpo_jax.environments.outcomes import graded_of
from sdpo_jax.errors import UserError
from sdpo_jax.learning import batching
from sdpo_jax.models.forward import forward
from sdpo_jax.teacher import written_feedback
from sdpo_jax.teacher.context import build_teacher_context, same_context
from sdpo_jax.training import ahead, around_step, feedback_writing, gathering, loop, saving, skipped, step_records
from sdpo_jax.training import step as one_step
from sdpo_jax.training.graded import GradedRollouts
from sdpo_jax.training.opening import load_tokenizer
from sdpo_jax.training.session import Session
from sdpo_jax.training.specs import batch_spec, declared_buckets, objective_spec
from sdpo_jax.training.step import build_teacher_prompts
from sdpo_jax.types import Example, Outcome, Rollouts
from tests import tiers, tiny
from tests.generation_batches import make_config, make_samples, per_token
from tests.local_server import Answer, Server, dead_address
from tests.training.compared_runs import changed
from tests.updates import make_model, run, settings

HYBRID = {
  'algorithm__mode': 'hybrid',
  'actor__ppo_mini_batch_size': 2,  # Two optimizer steps, so that both ratios are others than 1.
  'optimizer__grad_clip': 1e9,
}


def samples_of(config: Config) -> batching.GenerationBatch:
  """Eight samples: some taught, most with an advantage, one ungraded, one that a teacher reads and nobody graded."""
  samples = make_samples(config)
  spec = objective_spec(config)
  return dataclasses.replace(
    samples,
    teacher_prompts=samples.teacher_prompts if spec.reads_teacher else None,
    graded=np.array([1, 1, 1, 0, 1, 1, 1, 1], bool),
    scored=np.array([1, 1, 0, 0, 1, 1, 1, 1], bool),
    advantages=per_token([1, -1, 0, 0, 0, 0, 2, -0.5]),
    old_log_probs=samples.rollouts.model_log_probs - 4 if spec.needs_old_log_probs else None,
  )


def without_policy_gradient() -> list[Config]:
  """Return settings of SDPO, and of a hybrid run that is the same."""
  pure = settings(**{**HYBRID, 'algorithm__mode': 'pure_sdpo'})
  return [pure, settings(**HYBRID, algorithm__policy_gradient_coef=0.0)]


def test_without_a_policy_gradient_hybrid_has_the_terms_and_weights_of_sdpo():
  pure, hybrid = without_policy_gradient()
  assert objective_spec(pure) == objective_spec(hybrid)
  one, other = (
    batching.coefficients(samples_of(config), np.arange(4), batch_spec(config)) for config in (pure, hybrid)
  )
  chex.assert_trees_all_equal(one, other)
  assert one.keys() == {'distill_coef'} and one['distill_coef'].any()


@pytest.mark.slow
def test_without_a_policy_gradient_hybrid_is_sdpo_bit_for_bit():
  one, other = (run(config, samples_of(config)) for config in without_policy_gradient())
  chex.assert_trees_all_equal(one.state, other.state)
  assert one.losses == other.losses and one.losses[0] > 0


@pytest.mark.slow
def test_without_a_divergence_hybrid_is_grpo():
  grpo = settings(**{**HYBRID, 'algorithm__mode': 'pure_sdpo'}, actor__policy_loss__loss_mode='vanilla')
  hybrid = settings(**HYBRID, algorithm__sdpo_coef=0.0)
  assert objective_spec(hybrid).coefficients == ('policy_coef',)
  one, other = (run(config, samples_of(config)) for config in (grpo, hybrid))
  chex.assert_trees_all_close(one.state.trainable, other.state.trainable, rtol=1e-6)
  assert one.losses == pytest.approx(other.losses, rel=1e-6)


def log_softmax(policy, parameters, prompts, rollouts) -> np.ndarray:
  """Log-probs of every token at every place of completions, float64: [N, T, V]."""
  rows = batching.token_rows(prompts, rollouts.completion_tokens, rollouts.completion_mask, 17)
  hidden, unembedding = forward(policy, {}, parameters, rows)
  scores = np.asarray(hidden, np.float64) @ np.asarray(unembedding, np.float64)[: policy.vocab_size].T
  return scores - np.logaddexp.reduce(scores, axis=-1, keepdims=True)


def kl(p: np.ndarray, q: np.ndarray) -> np.ndarray:
  return (np.exp(p) * (p - q)).sum(-1)


def test_the_sum_of_both_terms_is_that_of_numpy():
  """The first optimizer step, of samples 0 to 3: Jensen–Shannon over the top 8 with a tail, dual-clip PPO."""
  weights = {'algorithm__sdpo_coef': 0.7, 'algorithm__policy_gradient_coef': 0.3}
  config = settings(**HYBRID, **weights)
  samples = samples_of(config)
  rollouts, taught = samples.rollouts, samples.distill_mask.any(1)
  policy, parameters = make_model()
  student = log_softmax(policy, parameters, samples.prompts, rollouts)
  teacher = log_softmax(policy, parameters, samples.teacher_prompts, rollouts)
  top = np.argsort(-student, axis=-1)[..., :8]

  def bucketed(log_probs):
    support = np.take_along_axis(log_probs, top, -1)
    return np.concatenate([support, np.log1p(-np.exp(support).sum(-1, keepdims=True))], -1)

  s, t = bucketed(student), bucketed(teacher)
  mixed = np.logaddexp(s, t) - np.log(2)
  divergence = 0.5 * kl(s, mixed) + 0.5 * kl(t, mixed)
  token = np.take_along_axis(student, rollouts.completion_tokens[..., None], -1)[..., 0]
  ratio = np.exp(token - samples.old_log_probs)
  a, clip = samples.advantages.astype(np.float64), config.actor.policy_loss
  ppo = np.maximum(-a * ratio, -a * np.clip(ratio, 1 - clip.clip_ratio_low, 1 + clip.clip_ratio_high))
  ppo = np.where(a < 0, np.minimum(ppo, -a * clip.clip_ratio_c), ppo)
  first = np.arange(8) < 4
  mask = rollouts.completion_mask & samples.graded[:, None] & first[:, None]

  def mean(values, rows):
    chosen = mask & rows[:, None]
    return values[chosen].sum() / chosen.sum()

  wanted = 0.7 * mean(np.minimum(ratio, 2) * divergence, taught) + 0.3 * mean(ppo, samples.scored)
  outcome = run(config, samples)
  assert outcome.losses[0] == pytest.approx(wanted, rel=1e-4)
  assert np.abs(ratio[mask] - 1).max() > 0.5 and (a[:4] != 0).any()


@pytest.mark.parametrize(
  ('changes', 'sentence'),
  [
    ({'algorithm__sdpo_coef': 2.0}, 'algorithm.sdpo_coef=2.0 has no effect'),
    ({'algorithm__mode': 'hybrid', 'actor__policy_loss__loss_mode': 'vanilla'}, "loss_mode='vanilla'"),
    ({**HYBRID, 'algorithm__sdpo_coef': 0.0, 'algorithm__policy_gradient_coef': 0.0}, 'nothing is minimised'),
    ({**HYBRID, 'algorithm__policy_gradient_coef': -1.0}, 'must be at least 0'),
    ({'actor__self_distillation__feedback_max_tokens': 8}, 'nobody writes feedback'),
    ({'actor__self_distillation__feedback_model': 'endpoint'}, 'feedback_endpoint.url is empty'),
    (
      {'actor__self_distillation__feedback_endpoint__model': 'm'},
      "model='m' has no effect with .*feedback_model=''",
    ),
    (
      {'actor__self_distillation__feedback_model': 'self', 'actor__policy_loss__loss_mode': 'vanilla'},
      'has no teacher',
    ),
    ({'algorithm__min_sdpo_examples': 9}, 'is more than the 8 completions that an update holds'),
    ({'algorithm__min_sdpo_examples': 1, 'actor__policy_loss__loss_mode': 'vanilla'}, 'which has no teacher'),
    ({'algorithm__min_sdpo_examples': 1, 'trainer__batch_order': 'balanced'}, 'the order of one generation batch'),
  ],
)
def test_settings_that_contradict_each_other_are_refused(changes, sentence):
  with pytest.raises(UserError, match=sentence):
    settings(**changes)


# ———— Feedback that a model writes ————


@pytest.fixture(scope='module')
def tiny_settings(tmp_path_factory) -> Config:
  """Return a run whose completions fail about every other time; the grader says why."""
  made: dict = {}
  exec(tiny.make_experiment(tmp_path_factory.mktemp('schedule')).read_text(), made)
  config = made['get_config']()
  config.optimizer.lr, config.optimizer.lr_warmup_steps = 0.02, 0
  config.trainer.total_training_steps, config.trainer.test_freq = 3, 0
  config.trainer.val_before_train = False
  config.mesh = MeshConfig(1, 1)
  return config.validate()


@pytest.fixture(autouse=True)
def one_device(monkeypatch):
  monkeypatch.setattr(accelerators, 'devices', lambda: jax.devices()[:1])


def lines(workdir) -> list[dict]:
  """Return what a run has measured, without what depends on the clock or on how often it was started."""
  found = [json.loads(line) for line in (workdir / 'metrics.jsonl').read_text().splitlines()]
  clock = 'time/', 'throughput/', 'programs/', 'fencing_epoch', 'line_digest'
  return [{name: value for name, value in line.items() if not name.startswith(clock)} for line in found]


def rollouts(workdir, step: int) -> list[dict]:
  return [json.loads(line) for line in (workdir / 'rollouts' / f'{step}.jsonl').read_text().splitlines()]


SD = 'actor__self_distillation__'


def answer(text: str) -> Answer:
  return Answer({'choices': [{'message': {'role': 'assistant', 'content': text}, 'finish_reason': 'stop'}]})


def endpoint(config: Config, url: str, **changes) -> Config:
  return changed(
    config,
    **{
      SD + 'feedback_model': 'endpoint',
      SD + 'feedback_endpoint__url': url + '/v1',
      SD + 'feedback_endpoint__model': 'critic',
      SD + 'feedback_endpoint__retries': 0,
      SD + 'environment_feedback_only_without_solution': False,
      'trainer__total_training_steps': 1,
      **changes,
    },
  )


@pytest.mark.slow
def test_a_server_writes_feedback_in_a_run_and_what_it_fails_at_keeps_the_graders(tiny_settings, tmp_path):
  asked = []

  def respond(body):
    asked.append(body)
    return Answer(status=500) if len(asked) == 1 else answer('<think>hm</think> Add one.')

  with Server(respond) as server:
    loop.train(
      endpoint(
        tiny_settings, server.url, **{SD + 'feedback_keeps_output': False, SD + 'feedback_endpoint__concurrency': 1}
      ),
      tmp_path / 'run',
    )
  [line] = lines(tmp_path / 'run')
  samples = rollouts(tmp_path / 'run', 1)
  failures = [sample for sample in samples if sample['score'] == 0]
  assert (line['feedback/asked'], line['feedback/failed']) == (len(failures), 1) and len(failures) > 1
  assert {path for path in server.paths} == {'/v1/chat/completions'}
  assert all(body['model'] == 'critic' and body['temperature'] == 0 and body['max_tokens'] == 512 for body in asked)
  assert all('The sum of the bytes must be odd.' in body['messages'][0]['content'] for body in asked)
  teachers = [sample['teacher_prompt'][-1]['content'] for sample in failures]
  assert [('Add one.' in said, 'must be odd' in said) for said in teachers] == [
    (sample.get('written_feedback') == 'Add one.', 'unwritten' in sample) for sample in failures
  ]
  assert 'status 500' in next(sample['unwritten'] for sample in failures if 'unwritten' in sample)


def outcomes_of(*scores) -> list[Outcome]:
  return [Outcome.ungraded('x') if score is None else Outcome(score, 'no' if score < 0.5 else '') for score in scores]


def graded_by_hand(config: Config, *scores) -> tuple[types.SimpleNamespace, GradedRollouts]:
  """Return a run's session without a model, and completions with these scores, of one question."""
  count = len(scores)
  found = Rollouts.of_completions(np.zeros(count, np.int32), np.ones((count, 1), np.int32), np.ones((count, 1), bool))
  found.text = [f'try {row}' for row in range(count)]
  example = Example('q', [{'role': 'user', 'content': 'Q'}], 'e', None, 's')
  graded = GradedRollouts([example], [[1]], found, outcomes_of(*scores), np.arange(count), 0.0)
  spec = objective_spec(config)
  return types.SimpleNamespace(config=config, tokenizer=load_tokenizer(config), spec=spec), graded


def write(config: Config, *scores) -> tuple[GradedRollouts, list[str]]:
  """Return what a server has written about completions, and what their teachers read."""
  session, graded = graded_by_hand(config, *scores)
  with feedback_writing.opened(config) as session.feedback_endpoint:
    feedback_writing.write(session, graded, None, 0, 2, NEVER)
  context = build_teacher_prompts(session, graded, 0, 2)
  return graded, [messages[-1]['content'] for messages in context.messages]


def test_what_a_server_writes_stands_behind_the_graders_and_its_faults_cost_single_rows(tiny_settings):
  faults = iter([Answer(status=500)])

  def respond(body):
    return next(faults, answer('<think>hm</think> Add one.'))

  with Server(respond) as server:
    config = endpoint(tiny_settings, server.url, **{SD + 'feedback_endpoint__concurrency': 1})
    graded, read = write(config, 0.0, 0.0, None, 1.0, 0.0)
  assert [outcome.written for outcome in graded.outcomes] == [None, 'Add one.', None, None, 'Add one.']
  assert [outcome.unwritten is not None for outcome in graded.outcomes] == [True, False, False, False, False]
  assert 'status 500' in graded.outcomes[0].unwritten
  assert [('no' in said, 'no\n\nAdd one.' in said) for said in read] == [
    (True, False),
    (True, True),
    (False, False),
    (False, False),
    (True, True),
  ]
  assert [outcome.feedback for outcome in graded.outcomes] == ['no', 'no', None, '', 'no']
  assert server.paths == ['/v1/chat/completions'] * 3 and server.most_at_once == 1
  body = server.bodies[1]
  assert (body['model'], body['temperature'], body['max_tokens']) == ('critic', 0.0, 512)
  assert all(part in body['messages'][0]['content'] for part in ('Question:\nQ', 'Attempt:\ntry 1', 'said:\nno'))
  metrics = step_records.feedback_metrics(graded)
  assert (metrics['feedback/asked'], metrics['feedback/failed'], metrics['feedback/characters_mean']) == (3, 1, 8)


def test_a_server_that_writes_nothing_ends_the_run_with_a_sentence(tiny_settings):
  config = endpoint(tiny_settings, dead_address())
  with pytest.raises(
    UserError, match='No feedback was written on any of 2 failures: the connection failed.*endpoint.url'
  ):
    write(config, 0.0, 0.0, 1.0)
  graded, _ = write(config, 0.0, 1.0)  # Of a single one the question may be at fault.
  assert 'the connection failed' in graded.outcomes[0].unwritten


def test_only_graded_failures_whose_teacher_reads_it_get_feedback(tiny_settings):
  """Of a group with a success that can be shown nobody else is asked, where feedback comes only without solution."""
  outcomes = outcomes_of(0.0, 1.0, None, 0.2, 0.0, 1.0)
  group, texts = [0, 0, 0, 1, 2, 2], ['a', 'b', 'c', 'd', 'e', '<think>only']
  sd = tiny_settings.actor.self_distillation
  assert written_feedback.rows_to_write(group, texts, outcomes, sd) == [3, 4]
  both = dataclasses.replace(sd, environment_feedback_only_without_solution=False)
  assert written_feedback.rows_to_write(group, texts, outcomes, both) == [0, 3, 4]


def test_a_writers_prompt_is_shortened_to_its_limit(tiny_settings):
  tokenizer = load_tokenizer(tiny_settings)
  sd = dataclasses.replace(
    tiny_settings.actor.self_distillation,
    feedback_max_prompt_len=80,
    feedback_prompt_template='{prompt}|{attempt}|{output}',
  )
  question = [{'role': 'user', 'content': 'Why?'}]
  asked = written_feedback.ask(7, question, 'a' * 5000 + 'z', 'E' * 300, sd, tokenizer, ChatFormat())
  text = asked.messages[0]['content']
  assert asked.row == 7 and 70 < len(asked.tokens) <= 80
  assert text.startswith('Why?|aaa') and 'z|EEE' in text and text.endswith('...')
  with pytest.raises(written_feedback.UnwrittenError, match='feedback_max_prompt_len=20'):
    written_feedback.ask(
      7, question, 'a', None, dataclasses.replace(sd, feedback_max_prompt_len=20), tokenizer, ChatFormat()
    )
  assert '(nothing)' in written_feedback.ask(7, question, 'a', ' ', sd, tokenizer, ChatFormat()).messages[0]['content']


def test_successes_that_are_not_taught_are_demonstrations_only(tiny_settings):
  sd = tiny_settings.actor.self_distillation
  questions = [[{'role': 'user', 'content': 'Q'}]] * 4
  outcomes = outcomes_of(1.0, 1.0, 0.0, 0.0)

  def context(config):
    tokenizer = load_tokenizer(tiny_settings)
    return build_teacher_context(questions, [0] * 4, list('abcd'), outcomes, config, tokenizer, seed=0, step=1)

  assert context(sd).mask.tolist() == [1, 1, 1, 1]
  alone = context(dataclasses.replace(sd, teach_successes=False))
  assert alone.mask.tolist() == [0, 0, 1, 1] and set(alone.solutions[2:]) <= {'a', 'b'}


# ———— Examples that gather ————


def gathers(config: Config, least: int = 7, **changes) -> Config:
  """Update of up to 8 failures, for which two or three generation batches are needed; the model criticises them."""
  names = {
    'algorithm__min_sdpo_examples': least,
    SD + 'teach_successes': False,
    SD + 'teacher_update_rate': 0.5,
    SD + 'feedback_model': 'self',
    SD + 'feedback_max_tokens': 8,
    SD + 'feedback_temperature': 1.0,
    SD + 'feedback_prompt_template': 'Q:{prompt} A:{attempt} E:{output}',
    SD + 'environment_feedback_only_without_solution': False,
    'trainer__total_training_steps': 6,
  }
  return changed(config, **{**names, **changes})


@dataclasses.dataclass
class Whole:
  """An uninterrupted run."""

  lines: list[dict]
  samples: list[list[dict]]  # Of every step's rollouts.
  lessons: list[tuple]  # (step, graded, context) of every update.
  trees: dict[int, tuple]  # Step → (trainable, teacher) after it.
  session: Session


def run_whole(config: Config, folder) -> Whole:
  said: list[str] = []
  lessons, trees, sessions, build = [], {}, [], one_step.build_batch

  def noted(session, state, graded, context, *rest):
    lessons.append((int(state.step) + 1, graded, context))
    return build(session, state, graded, context, *rest)

  def after(stepped):
    sessions.append(stepped.session)
    trees[stepped.step] = jax.device_get((stepped.state.trainable, stepped.state.teacher))

  with pytest.MonkeyPatch.context() as patched:
    patched.setattr(one_step, 'build_batch', noted)
    loop.train(config, folder, announce=said.append, on_step=after)
  assert '  updates    when 7 examples have gathered' in said
  assert '  feedback   on failures, written by the model itself' in said
  steps = range(1, config.trainer.total_training_steps + 1)
  measured = [json.loads(line) for line in (folder / 'metrics.jsonl').read_text().splitlines()]
  assert [line['programs/compiled'] for line in measured] == [0] * len(steps)
  return Whole(lines(folder), [rollouts(folder, step) for step in steps], lessons, trees, sessions[0])


@pytest.fixture(scope='module')
def whole(tiny_settings, tmp_path_factory) -> Whole:
  with pytest.MonkeyPatch.context() as patched:
    patched.setattr(accelerators, 'devices', lambda: jax.devices()[:1])
    return run_whole(gathers(tiny_settings), tmp_path_factory.mktemp('gathering') / 'run')


def test_examples_gather_until_there_are_enough_and_each_is_learned_from_once(whole):
  """By a queue of what the files say the teacher read, in the order in which it was drawn."""
  queue, updates = [], 0
  learned = {step: (graded, context) for step, graded, context in whole.lessons}
  for step, (line, samples) in enumerate(zip(whole.lines, whole.samples, strict=True), 1):
    taught = [row for row, sample in enumerate(samples) if sample['teacher_prompt'] is not None]
    assert all(samples[row]['score'] == 0 for row in taught)
    queue += [(step, row) for row in taught]
    due, now = len(queue) >= 7, []
    if due:
      now, queue = queue[:8], queue[8:]
      graded, context = learned.pop(step)
      there = np.flatnonzero(graded.present)
      assert there.tolist() == list(range(len(now))) and context.mask.tolist() == [1] * len(now) + [0] * (8 - len(now))
      texts = [whole.samples[of - 1][row]['completion'] for of, row in now]
      assert [graded.rollouts.text[place] for place in there] == texts
      updates += 1
    assert line['train/optimizer_steps'] == due and ('train/loss' in line) == due
    assert (line['gathering/trained'], line['gathering/rows']) == (len(now), len(queue))
    assert line['gathering/examples'] == len(queue)
    if now:
      assert line['gathering/waited_mean'] == pytest.approx(np.mean([step - of for of, _ in now]))
    waiting = [row for row, sample in enumerate(samples) if sample.get('waiting')]
    assert waiting == [row for of, row in queue if of == step]
    measured = [row for row, sample in enumerate(samples) if sample['divergence'] is not None]
    assert measured == [row for of, row in now if of == step]
  assert learned == {} and 1 < updates < 6


def test_the_model_writes_feedback_on_failures_that_its_teacher_reads(whole):
  for line, samples in zip(whole.lines, whole.samples, strict=True):
    failures = [sample for sample in samples if sample['score'] == 0]
    assert line['feedback/asked'] == len(failures)
    assert line['feedback/failed'] == sum('unwritten' in sample for sample in samples) <= len(failures)
    for sample in samples:
      asked = {'written_feedback', 'unwritten'} & sample.keys()
      assert len(asked) == (sample['score'] == 0)
      if 'written_feedback' in asked:
        said = sample['teacher_prompt'][-1]['content']
        assert f'{sample["feedback"]}\n\n{sample["written_feedback"]}' in said
  assert sum('written_feedback' in sample for samples in whole.samples for sample in samples) > 10


def test_what_a_model_writes_depends_on_the_sample_alone(whole):
  """Not on which others have failed."""
  session, trainable = whole.session, whole.trees[1][0]
  prompts = [session.tokenizer.encode(text) for text in ('abc', 'de', 'fgh')]

  def written(numbers):
    found = session.feedback_sampler.stream(
      session.base, trainable, [prompts[n % 3] for n in numbers], numbers=numbers, n=1, seed=5, step=2, max_tokens=8
    )
    return {each.sample: each.tokens.tolist() for each in found}

  together = written([3, 4, 5, 6])
  assert together.keys() == {3, 4, 5, 6} and together[3] != together[6]
  assert written([6, 4]) == {6: together[6], 4: together[4]}


def test_a_batch_without_an_update_moves_neither_student_nor_teacher(whole):
  for step, line in enumerate(whole.lines[1:], 2):
    (student, teacher), (before, teacher_before) = whole.trees[step], whole.trees[step - 1]
    if line['train/optimizer_steps'] == 0:
      chex.assert_trees_all_equal((student, teacher), (before, teacher_before))
    else:
      expected = jax.tree.map(lambda t, p: 0.5 * t + 0.5 * p, teacher_before, student)
      chex.assert_trees_all_close(teacher, expected, atol=1e-7)
      assert max(jax.tree.leaves(jax.tree.map(lambda a, b: np.abs(a - b).max(), student, before))) > 1e-3


class Killed(BaseException):
  """Ends a run as if from outside."""


@pytest.mark.parametrize(
  ('where', 'number', 'save_freq'),
  tiers.cases(
    itertools.product(('rollout_and_grade', 'build_teacher_prompts', 'run_update', 'pass_over'), (1, 2, 3), (1, 2)),
    slow=(
      ('rollout_and_grade', 3, 2),
      ('build_teacher_prompts', 2, 1),
      ('run_update', 1, 2),
      ('run_update', 2, 1),
      ('pass_over', 2, 2),
    ),
  ),
)
def test_a_run_that_was_killed_goes_on_as_if_it_were_not(
  tiny_settings, whole, tmp_path, monkeypatch, where, number, save_freq
):
  config = gathers(tiny_settings, trainer__save_freq=save_freq)
  module = around_step if where == 'rollout_and_grade' else one_step
  calls, function = [], getattr(module, where)

  def dying(*arguments):
    calls.append(1)
    if len(calls) < number:
      return function(*arguments)
    if where in ('run_update', 'pass_over'):
      function(*arguments)
    raise Killed

  with monkeypatch.context() as patched:
    patched.setattr(module, where, dying)
    patched.setattr(saving.Saving, 'rescue', lambda self, error: None)
    with pytest.raises(Killed):
      loop.train(config, tmp_path / 'run')
  loop.train(config, tmp_path / 'run')
  assert lines(tmp_path / 'run') == whole.lines


@pytest.mark.slow
def test_a_killed_run_with_everything_at_once_goes_on(tiny_settings, tmp_path, monkeypatch):
  """Hybrid, own feedback, several optimizer steps, weights for stale tokens, batches that are drawn ahead."""
  config = gathers(
    tiny_settings,
    12,
    algorithm__mode='hybrid',
    algorithm__rollout_correction__rollout_is='token',
    rollout__steps_off=1,
    data__train_batch_size=4,
    actor__ppo_mini_batch_size=2,
    trainer__save_freq=2,
  )
  loop.train(config, tmp_path / 'whole')
  calls, update = [], one_step.run_update

  def dying(*arguments):
    calls.append(1)
    if len(calls) == 3:
      raise Killed
    return update(*arguments)

  with monkeypatch.context() as patched:
    patched.setattr(one_step, 'run_update', dying)
    patched.setattr(saving.Saving, 'rescue', lambda self, error: None)
    with pytest.raises(Killed):
      loop.train(config, tmp_path / 'run')
  loop.train(config, tmp_path / 'run')
  assert lines(tmp_path / 'run') == lines(tmp_path / 'whole')
  assert {line['train/optimizer_steps'] for line in lines(tmp_path / 'run')} > {2}


def batch_of(config: Config, step: int, seed: int, advantages) -> gathering.Waiting:
  """Return a generation batch of eight, of which nothing waits yet."""
  samples = make_samples(config, seed)
  count, mask = len(samples), samples.rollouts.completion_mask
  rollouts = dataclasses.replace(
    samples.rollouts,
    group=samples.rollouts.group.astype(np.int32),
    prompt_tokens=np.full((count, 3 + seed), seed, np.int32),
    prompt_mask=np.ones((count, 3 + seed), bool),
    completion_tokens=np.where(mask, samples.rollouts.completion_tokens, 0).astype(np.int32),
    text=[f'{step}/{row}' for row in range(count)],
  )
  examples = [Example(f'{step}-{g}', [{'role': 'user', 'content': str(g)}], 'e', None, 's') for g in range(4)]
  graded = GradedRollouts(examples, samples.prompts[::2], rollouts, [Outcome(0.0)] * count, np.arange(count), 0.0)
  context = same_context([example.messages for example in examples for _ in range(2)], samples.teacher_prompts)
  context.mask = samples.distill_mask[:, 0]
  return gathering.Waiting(ahead.SampledBatch(step, step, {'at': step}, graded), context, advantages, ())


def test_gathered_rows_keep_what_belongs_to_them_and_are_dealt_out_evenly():
  """Eleven rows of two batches, of which eight fit, over two steps of four: advantages stay those of whole groups."""
  config = make_config(ppo_mini_batch_size=2)
  config.algorithm.mode, config.algorithm.min_sdpo_examples = 'hybrid', 8
  advantages = [np.array([0, 0.5, 0, 0, 0, 0, 0, 0]), np.array([0, 0, 0, 0, 0, 0, -2.0, 2.0])]
  both = [batch_of(config, step, step, of) for step, of in zip((3, 5), advantages, strict=True)]
  waits = gathering.Gathering(config)
  waits.add(both[0].drawn, both[0].context, both[0].advantages)
  assert (waits.rows, waits.examples, waits.take()) == (5, 4, None)
  waits.add(both[1].drawn, both[1].context, both[1].advantages)
  order = [(3, 0), (3, 1), (3, 2), (3, 3), (3, 5), (5, 0), (5, 2), (5, 3), (5, 5), (5, 6), (5, 7)]
  assert waits.examples == 8 and waits.rows == len(order)
  lesson = waits.take()
  assert waits.rows_of(5) == (5, 6, 7) and waits.rows_of(3) == () and (waits.rows, waits.examples) == (3, 1)
  places = [0, 4, 1, 5, 2, 6, 3, 7]  # One after the other to the two steps.
  graded = lesson.graded
  assert [graded.rollouts.text[place] for place in places] == [f'{step}/{row}' for step, row in order[:8]]
  for place, (step, row) in zip(places, order, strict=False):
    source = both[step == 5]
    rollouts, width = source.drawn.graded.rollouts, 3 + step
    np.testing.assert_array_equal(graded.rollouts.completion_tokens[place], rollouts.completion_tokens[row])
    np.testing.assert_array_equal(graded.rollouts.sampling_log_probs[place], rollouts.sampling_log_probs[row])
    assert graded.rollouts.prompt_mask[place].tolist() == [True] * width + [False] * (8 - width)
    assert graded.examples[graded.rollouts.group[place]].id == f'{step}-{row // 2}'
    assert graded.prompts[graded.rollouts.group[place]] == source.drawn.graded.prompts[row // 2]
    assert lesson.context.prompt_tokens[place] == source.context.prompt_tokens[row]
    assert lesson.context.mask[place] == source.context.mask[row]
    assert graded.advantages[place] == source.advantages[row]
    assert (lesson.steps[place], lesson.rows[place], graded.sample_ids[place]) == (step, row, row)
  values = lesson.of_batch(5, {'x': np.arange(16.0).reshape(8, 2)}, 8)['x']
  assert values[[0, 2, 3], 0].tolist() == [12, 6, 14] and np.isnan(values).all(1).sum() == 5
  # Steps for which nothing is left are not taken.
  few = gathering.lesson_of([dataclasses.replace(both[0], rows=(0, 2, 5))], 8, 4)
  assert few.graded.present.tolist() == [True] * 3 + [False] * 5
  assert [rows.tolist() for rows in batching.mini_batches(batch_spec(config), few.graded.present)] == [[0, 1, 2, 3]]
  assert graded_of(few.graded.outcomes).tolist() == [True] * 3 + [False] * 5


def test_a_full_update_waits_for_no_further_examples():
  """In hybrid runs rows with an advantage alone may fill it before enough of them have a signal."""
  config = make_config()
  config.algorithm.mode, config.algorithm.min_sdpo_examples = 'hybrid', 8
  waits = gathering.Gathering(config)
  for step in (1, 2):
    batch = batch_of(config, step, 0, np.array([0, 1.0, 0, 0, -1.0, 0, 0, 0]))
    batch.context.mask[2:] = 0
    waits.add(batch.drawn, batch.context, batch.advantages)
    assert waits.take() is None
  batch = batch_of(config, 3, 0, np.ones(8))
  batch.context.mask[:] = 0
  waits.add(batch.drawn, batch.context, batch.advantages)
  assert waits.examples == 2 and waits.take().graded.present.all() and waits.rows == 6


def test_what_waits_is_saved_again_at_the_position_of_the_rows_as_they_are():
  """Otherwise a run that went on with other rows once could not be resumed a second time."""
  config = make_config()
  batch = dataclasses.replace(batch_of(config, 3, 0, np.ones(8)), rows=(1, 2))
  sought = []
  again = types.SimpleNamespace(
    seek=lambda position, other_rows: sought.append((position, other_rows)),
    read=lambda text: dataclasses.replace(batch.drawn, position={'at': 'today'}),
  )
  waits, host = gathering.Gathering(config), {gathering.GATHERED: gathering.to_json([batch])}
  prepared = batch.context, batch.advantages
  assert waits.restore(host, again, lambda drawn: prepared, other_rows=True) is None
  assert sought == [({'at': 3}, True)] and waits.rows_of(3) == (1, 2)
  assert [each.drawn.position for each in waits.saved()] == [{'at': 'today'}]


def test_batches_without_an_update_say_nothing_of_gradients_that_are_not_finite():
  bad, good, none = ({'train/optimizer_steps': s, 'train/skipped_steps': k} for s, k in ((2, 2), (2, 1), (0, 0)))
  for batches, expected in (
    ([good, bad, none, none, bad, none], skipped.Skipped(2, skipped.NOT_FINITE, 2)),
    ([bad, none, good, none], skipped.Skipped()),
  ):
    assert skipped.in_a_row({'step': step} | line for step, line in enumerate(batches, 1)) == expected


@pytest.mark.parametrize('weights', ['full', 'adapter'])
def test_the_schedule_of_a_benchmark(weights):
  names = set()
  for task, mode in itertools.product(get_args(paper.Task), ('pure_sdpo', 'hybrid')):
    config = livecodebench_schedule.get_config(mode=mode, task=task, weights=weights).validate()
    names.add(config.name)
    assert (config.model.lora.rank is None) == (weights == 'full')
    assert objective_spec(config).needs_advantages == (mode == 'hybrid')
    assert [len(samples) for samples in batching.mini_batches(batch_spec(config))] == [64]
    written = feedback_writing.sampler_settings(config)
    assert declared_buckets(written).prompt == (1024, 4096) and declared_buckets(written).response == (512,)
  assert len(names) == 12
  endpoint = livecodebench_schedule.get_config(feedback='endpoint', weights=weights)
  endpoint.actor.self_distillation.feedback_endpoint.url = 'http://localhost:8000/v1'
  with pytest.raises(UserError, match='feedback_endpoint.model is empty'):
    endpoint.validate()
  with pytest.raises(UserError, match="mode='both' is none of"):
    livecodebench_schedule.get_config(mode='both')
