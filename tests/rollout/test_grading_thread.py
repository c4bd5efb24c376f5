"""Grading beside sampling gives what grading afterwards gives; what goes wrong in the thread is heard outside of it."""

import json
import subprocess
import sys
import threading
import types

import jax
import numpy as np
import pytest

from sdpo_jax.config import Config, EnvironmentsConfig, ModelConfig
from sdpo_jax.environments.grading import Graders
from sdpo_jax.errors import UserError
from sdpo_jax.models import huggingface
from sdpo_jax.models import tokenizer as tokenizers
from sdpo_jax.rollout.grading_thread import GradingThread, StoppedError
from sdpo_jax.rollout.results import SamplingStats
from sdpo_jax.rollout.sampler import Sampler
from sdpo_jax.training import step
from sdpo_jax.types import Outcome
from tests import tiny
from tests.generation_batches import NO_MEMBERS
from tests.resumed_runs import places
from tests.rollout.graded_groups import G, N, completion, questions

WAIT_S = 60.0  # Far beyond what anything here takes: a wait that ends so is a failure.


class Recorder:
  """A grader that keeps the texts of each call, and waits in it until `go` is set."""

  def __init__(self):
    self.calls, self.called, self.go = [], threading.Event(), threading.Event()
    self.error = None  # To raise.

  def __call__(self, examples, completions, *, truncated):
    self.calls.append(completions)
    self.called.set()
    assert self.go.wait(WAIT_S)
    if self.error is not None:
      raise self.error
    parts = zip(examples, completions, truncated, strict=True)
    return [Outcome(float(cut), f'{example.id}: {text}') for example, text, cut in parts]

  def close(self):
    """As one whose processes end."""
    self.error = RuntimeError('closed')
    self.go.set()


@pytest.fixture
def recorder(registering):
  return registering.register('recorder')(Recorder())


def grading_of(*environments: str) -> GradingThread:
  return GradingThread(Graders(EnvironmentsConfig()), questions(*environments or ['recorder'] * G), N)


def thread() -> threading.Thread | None:
  return next((one for one in threading.enumerate() if one.name == 'grading'), None)


def until_it_ends() -> None:
  running = thread()
  if running is not None:
    running.join(WAIT_S)
  assert thread() is None


def test_outcomes_are_those_of_grading_afterwards_in_whatever_order_completions_finish(registering, recorder):
  @registering.register('other')
  def other(examples, texts, *, truncated):
    return [Outcome(-1.0, text) for text in texts]

  recorder.go.set()
  environments = ('recorder', 'other', 'recorder')
  everything = [completion(sample, stopped=sample % 3 > 0) for sample in range(G * N)]
  expected = Graders(EnvironmentsConfig()).grade(
    [example for example in questions(*environments) for _ in range(N)],
    [done.text for done in everything],
    truncated=[not done.stopped for done in everything],
  )
  for order in (range(G * N), reversed(range(G * N)), np.random.default_rng(0).permutation(G * N)):
    with grading_of(*environments) as grading:
      for sample in order:
        grading.add(everything[sample])
      assert grading.outcomes() == expected
    assert thread() is None


def test_what_finishes_during_a_call_is_graded_in_the_next_one(recorder):
  with grading_of() as grading:
    grading.add(completion(5))
    assert recorder.called.wait(WAIT_S)
    rest = [sample for sample in range(G * N) if sample != 5]
    for sample in rest:
      grading.add(completion(sample))
    recorder.go.set()
    assert [one.feedback for one in grading.outcomes()] == [f'q{i // N}: answer {i}' for i in range(G * N)]
  assert recorder.calls == [['answer 5'], [f'answer {sample}' for sample in rest]]
  assert grading.busy_s > 0.0


def test_what_is_awaited_is_graded_first_and_a_batch_ends_after_as_many(recorder):
  ended = []
  recorder.end_batch = lambda: ended.append(sum(map(len, recorder.calls)))
  with grading_of() as grading:
    grading.add(completion(11))
    assert recorder.called.wait(WAIT_S)
    for sample in (10, 9, 8, 3, 2, 1, 0):
      grading.add(completion(sample))
    threading.Timer(0.1, recorder.go.set).start()
    assert [one.feedback for one in grading.outcomes(range(4))] == [f'q0: answer {i}' for i in range(4)]
    assert recorder.calls[:2] == [['answer 11'], ['answer 3', 'answer 2', 'answer 1', 'answer 0']] and ended == [5]
    assert len(grading.outcomes(range(8, 12))) == 4
    assert recorder.calls[2:] == [['answer 10', 'answer 9', 'answer 8']] and ended == [5]  # Three say too little.
    for sample in range(4, 8):
      grading.add(completion(sample))
    assert len(grading.outcomes(range(4, 8))) == 4
  assert ended == [5, 12]


def test_who_is_told_to_stop_does_not_wait_for_a_grader(recorder):
  told = threading.Event()
  graders = Graders(EnvironmentsConfig())
  with GradingThread(graders, questions(*['recorder'] * G), N, types.SimpleNamespace(asked=told.is_set)) as grading:
    for sample in range(G * N):
      grading.add(completion(sample))
    assert recorder.called.wait(WAIT_S)
    threading.Timer(0.1, told.set).start()
    with pytest.raises(StoppedError):
      grading.outcomes()
  recorder.go.set()
  until_it_ends()

  def told_as_graders_end():
    until_it_ends()
    return True

  stop = types.SimpleNamespace(asked=told_as_graders_end)
  with GradingThread(graders, questions(*['recorder'] * G), N, stop) as grading:
    for sample in range(G * N):
      grading.add(completion(sample))
    assert len(grading.outcomes()) == G * N  # What is done by then is not thrown away.


def test_a_batch_is_graded_while_it_is_sampled(tmp_path, recorder):
  """Sampling here cannot end before a grader has been called."""
  tokenizer = tokenizers.load(tiny.make_model(tmp_path))
  policy, parameters = huggingface.load(tmp_path, ModelConfig(dtype='float32', remat='none'))
  sampler = Sampler(policy, tokenizer, max_batch_rows=4, response_buckets=(8,), decode_chunk=4)
  finished = []

  def sample(*arguments, on_finished, **settings):
    def hear(done):
      finished.append(done.sample)
      if len(finished) == G * N:
        assert recorder.called.wait(WAIT_S)
        recorder.go.set()
      on_finished(done)

    return sampler.sample(*arguments, on_finished=hear, **settings)

  config = Config()
  config.rollout.n, config.data.max_response_length = N, 8
  asked = types.SimpleNamespace(sample=sample, stats=SamplingStats())
  session = types.SimpleNamespace(
    config=config,
    tokenizer=tokenizer,
    writer=lambda trainable: (asked, {}, trainable),
    **NO_MEMBERS,
  )
  state = types.SimpleNamespace(trainable=parameters, rng=jax.random.key(0))
  with Graders(config.environments) as graders:
    graded = step.rollout_and_grade(session, graders, state, questions(*['recorder'] * G), 0, step.Timer())
  rollouts = graded.rollouts
  pairs = list(zip(rollouts.group, rollouts.text, strict=True))
  assert [outcome.feedback for outcome in graded.outcomes] == [f'q{group}: {text}' for group, text in pairs]
  assert [bool(outcome.score) for outcome in graded.outcomes] == [end == 'length' for end in rollouts.finish_reason]


def test_a_grader_that_ends_the_run_ends_it_at_the_next_completion(recorder):
  recorder.error = UserError('Mend the server.')
  recorder.go.set()
  with pytest.raises(UserError, match='Mend the server'), grading_of() as grading:
    grading.add(completion(0))
    until_it_ends()
    grading.add(completion(1))
    pytest.fail('Sampling went on.')


@pytest.mark.parametrize('error', [UserError('Mend the server.'), MemoryError()])
def test_nothing_that_ends_the_thread_is_lost(monkeypatch, recorder, error):
  recorder.error = error
  if not isinstance(error, UserError):  # As if grading itself had a fault, whatever the graders do.
    monkeypatch.setattr(Graders, 'grade_part', lambda *_, truncated: recorder([], [], truncated=[]))
  with pytest.raises(type(error)) as raised, grading_of() as grading:
    grading.add(completion(0))
    assert recorder.called.wait(WAIT_S)
    for sample in range(1, G * N):
      grading.add(completion(sample))
    recorder.go.set()
    grading.outcomes()
  assert raised.value is error and thread() is None


def test_the_thread_ends_after_the_call_that_it_is_in_when_sampling_raises(recorder):
  with pytest.raises(ZeroDivisionError), grading_of() as grading:
    grading.add(completion(0))
    assert recorder.called.wait(WAIT_S)
    grading.add(completion(1))
    raise ZeroDivisionError
  assert thread().daemon  # Whatever the grader does, the process can end.
  recorder.go.set()
  until_it_ends()
  assert recorder.calls == [['answer 0']]


@pytest.mark.parametrize('count', [1, 2])
def test_a_grader_that_is_closed_at_its_work_is_neither_asked_again_nor_made_again(recorder, caplog, count):
  with pytest.raises(ZeroDivisionError), Graders(EnvironmentsConfig()) as graders:
    with GradingThread(graders, questions('recorder'), N) as grading:
      for sample in range(count):
        grading.add(completion(sample))
      assert recorder.called.wait(WAIT_S)
      raise ZeroDivisionError
  until_it_ends()
  assert len(recorder.calls) == 1 and not caplog.records
  with pytest.raises(RuntimeError, match='closed'):
    graders.get('recorder')


def test_a_grader_is_made_where_sampling_is_and_not_in_the_thread(registering):
  threads = []

  def grade(examples, texts, *, truncated):
    return [Outcome(0.0) for _ in texts]

  registering.register_factory('made')(lambda settings: threads.append(threading.current_thread()) or grade)
  with grading_of('made') as grading:
    for sample in range(N):
      grading.add(completion(sample))
    grading.outcomes()
  assert threads == [threading.current_thread()]
  with pytest.raises(UserError, match="no environment 'unheard_of'"):
    grading_of('unheard_of')


# One of two processes: both see the same completions finish. The second batch has one that process 1 cannot grade.
PROGRAM = """
import dataclasses
import json
import jax
from sdpo_jax import command
from sdpo_jax.config import EnvironmentsConfig
from sdpo_jax.environments import registry
from sdpo_jax.environments.grading import Graders
from sdpo_jax.errors import UserError
from sdpo_jax.rollout.grading_thread import GradingThread, StoppedError
from sdpo_jax.rollout.results import SamplingStats
from sdpo_jax.types import Outcome
from tests.rollout.graded_groups import G, N, completion, questions

command.define_cluster()


@registry.register('mine')
def grade(examples, completions, *, truncated):
  if 'answer bad' in completions:
    raise UserError(f'Process {jax.process_index()} cannot.')
  return [Outcome(float(jax.process_index()), text) for text in completions]


def batch(graders, order, bad=None):
  with GradingThread(graders, questions(*['mine'] * G), N) as grading:
    for sample in order:
      done = completion(sample)
      grading.add(dataclasses.replace(done, text='answer bad') if sample == bad else done)
    return [(outcome.score, outcome.feedback) for outcome in grading.outcomes()]


def main():
  command.join_cluster()
  with Graders(EnvironmentsConfig()) as graders:
    print(json.dumps(batch(graders, reversed(range(G * N)))))
    batch(graders, range(G * N), bad=5)


command.run(main)
"""


def test_two_processes_share_the_work_and_hear_of_each_others_trouble(tmp_path):
  processes = [
    subprocess.Popen(
      [sys.executable, '-c', PROGRAM, *place],
      stdout=subprocess.PIPE,
      stderr=subprocess.PIPE,
      text=True,
      cwd=tiny.REPOSITORY,
      env=tiny.environment(quick=True),
    )
    for place in places(2)
  ]
  try:
    ends = [process.communicate(timeout=120) for process in processes]
  finally:
    for process in processes:
      process.kill()
  for process, (out, err) in zip(processes, ends, strict=True):
    assert process.returncode == 2 and 'Process 1 cannot.' in err, err
    assert json.loads(out.splitlines()[-1]) == [[i % 2, f'answer {i}'] for i in range(G * N)]
