"""Graders in processes of their own: what is sent, what stays, and what is left of those that hang or do worse."""

from __future__ import annotations

import concurrent.futures
import logging
import os
import pathlib
import signal
import subprocess
import sys
import threading
import time

import numpy as np
import pytest

from benchmarks import hanging_graders
from sdpo_jax.config import EnvironmentsConfig, config_files
from sdpo_jax.environments import grader_process
from sdpo_jax.environments.grading import MAX_HANGING, Graders
from sdpo_jax.errors import UserError
from sdpo_jax.types import Example, Outcome
from tests import tiers, tiny

WAIT_S = 60.0

MODULE = """
import functools
import logging
import multiprocessing.connection
import os
import re
import signal
import sys
import time

from sdpo_jax.environments import registry
from sdpo_jax.errors import UserError
from sdpo_jax.types import Outcome

CALLS = [0]


class Odd:
  def __reduce__(self):
    raise ValueError('odd')

  def __repr__(self):
    return 'ODD'


def do(text, lists):
  if text == 'exit beside a fork' and not os.fork():
    time.sleep(1000)
  if text.startswith('exit'):
    os._exit(3)
  if text == 'signal':
    os.kill(os.getpid(), signal.SIGSEGV)
  if text == 'hang':
    time.sleep(1000)
  if text == 'expression':
    re.match('(a+)+$', 'a' * 60 + 'b')
  if text == 'fork':
    os.fork()
  if text == 'descendant' and not os.fork():
    time.sleep(1000)
  if text == 'close':
    sys.stdout.close()
    os.close(1)
  if text == 'close all':
    os.closerange(3, 4096)
  if text == 'print':
    print('said by a grader')
  if text == 'write':
    for descriptor in range(3, 4096):  # Its number is the one in the trainer.
      try:
        os.write(descriptor, bytes([127, 255, 255, 255]) + b'x' * 100)
      except OSError:
        pass
  if text == 'ignore':
    for number in {*range(1, 32)} - {signal.SIGKILL, signal.SIGSTOP}:
      signal.signal(number, signal.SIG_IGN)
    time.sleep(1000)
  if text.startswith('log'):
    logging.getLogger('mine').info('said %s', text, extra={'_absl_log_fatal': True})
    logging.getLogger('mine').debug('not wanted')
  if text == 'log and hang':
    time.sleep(1000)
  if text == 'log of a fork' and not os.fork():
    logging.warning('said by a fork')
    os._exit(0)
  if text == 'input':
    input()
  if text == 'leave':
    sys.exit(5)
  if text == 'user error':
    raise UserError('Mend it.')
  if text == 'raise':
    raise KeyError('not there')
  if text == 'memory':
    bytearray(2**50)
  if text == 'clear':
    for values in lists:
      values.clear()
  if text == 'odd':
    return Outcome(Odd(), Odd(), {'odd': Odd()})
  if text == 'odd metrics':
    return Outcome(1.0, 'Good.', {Odd(): Odd(), 'number': 3, 'nan': float('nan'), 'list': [1]})
  if text == 'not applicable':
    return Outcome.not_applicable('Not mine.')
  return Outcome(len(text) / 7, 'a\\ud800', {'calls': CALLS[0], 'pid': os.getpid()})


@registry.register('doing')
def grade(examples, completions, *, truncated):
  CALLS[0] += 1
  return [do(text, (examples, completions, truncated)) for text in list(completions)]


class Adding:
  def __init__(self, start):
    self.total = start
    self.batches = 0

  def __call__(self, examples, completions, *, truncated):
    self.total += len(completions)
    return [Outcome(float(self.total), None, {'pid': os.getpid(), 'batches': self.batches}) for _ in completions]

  def end_batch(self):
    self.batches += 1
    if self.batches == 3:
      raise UserError('Enough.')


@registry.register_factory('adding')
def make(settings):
  return Adding(settings.score_range[1])


async def awaited(completions, **columns):
  return [{'score': 1.0, 'pid': os.getpid()} for _ in completions]


class Holding(Adding):
  def close(self):
    pass


registry.register('holding')(Holding(0.0))
adding = Adding(0.0)
adding.reader = multiprocessing.connection.Connection(os.open(os.devnull, os.O_RDONLY))
registry.register('indirectly')(adding)
limited = Adding(0.0)
limited.limits_itself = True
registry.register('limited')(limited)
def seen(first, examples, completions, *, truncated):
  rows = {name: getattr(value, 'tolist', lambda: value)() for name, value in examples[0].columns.items()}
  return [Outcome(1.0, None, {'first': first, 'rows': repr(rows), 'pid': os.getpid()})]


registry.register('seen')(functools.partial(seen, 'first'))
registry.register('nested')(lambda *asked, **more: Adding(0.0)(*asked, **more))
"""


def example(name, i=0, **columns):
  return Example(f'q{i}', [{'role': 'user', 'content': 'Q'}], name, None, 'x', columns=columns)


def graded(graders, name, *texts, **columns):
  examples = [example(name, i, **columns) for i in range(len(texts))]
  return graders.grade(examples, texts, truncated=[False] * len(texts))


@pytest.fixture(scope='module')
def module(tmp_path_factory):
  path = tmp_path_factory.mktemp('graders') / 'doing_graders.py'
  path.write_text(MODULE)
  return str(path)


@pytest.fixture
def graders(module):
  with Graders(EnvironmentsConfig(modules=(module,), grader_timeout_s=0.5)) as made:
    here('CALLS')[0] = 0  # As an import makes it.
    yield made


def pids(graders, name='doing', **columns):
  return {outcome.metrics['pid'] for outcome in graded(graders, name, 'a', 'b', **columns)}


def here(name):
  """Return what a grader does in this process."""
  return getattr(sys.modules['environment_doing_graders'], name)


# ———— What is the same ————


def test_outcomes_and_errors_are_those_of_the_same_grader_in_this_process(graders, registering):
  registering.register('local')(lambda *asked, **more: here('grade')(*asked, **more))
  texts = ['a', 'odd', 'odd metrics', 'not applicable', 'raise', 'leave', 'memory', 'clear', 'five!']
  sent, local = graded(graders, 'doing', *texts), graded(graders, 'local', *texts)
  assert [outcome.score for outcome in sent] == [1 / 7, None, 1.0, None, None, None, None, 5 / 7, 5 / 7]
  for ours, theirs in zip(sent, local, strict=True):
    assert ours.metrics.get('pid') != os.getpid() and theirs.metrics.get('pid') in (None, os.getpid())
    told = {name: str(value) for name, value in ours.metrics.items() if name not in ('pid', 'calls')}
    assert told == {name: str(value) for name, value in theirs.metrics.items() if name not in ('pid', 'calls')}
    assert (ours.feedback, ours.applicable) == (theirs.feedback, theirs.applicable)
    assert (ours.reason or '').replace("'doing'", "'local'") == (theirs.reason or '')
  assert "raised KeyError('not there') in doing_graders.py, line " in sent[4].reason
  with pytest.raises(UserError, match='^Mend it.$'):
    graded(graders, 'doing', 'user error')


def test_arguments_arrive_as_they_are(graders):
  rows = {'text': 'ß', 'array': np.arange(3), 'nested': [{'a': (1, None)}]}
  [outcome] = graded(graders, 'seen', 'x', **rows)
  assert outcome.metrics['pid'] != os.getpid() and outcome.metrics['first'] == 'first'
  assert outcome.metrics['rows'] == repr({**rows, 'array': [0, 1, 2]})


# ———— What is sent, and what stays ————


def test_a_process_keeps_its_state_until_it_is_ended(graders):
  first = graded(graders, 'doing', 'a', 'b')
  second = graded(graders, 'doing', 'a', 'b')
  assert [outcome.metrics['calls'] for outcome in (*first, *second)] == [1, 1, 2, 2]
  assert pids(graders) == {first[0].metrics['pid']}
  assert graded(graders, 'doing', 'hang')[0].score is None
  [third] = graded(graders, 'doing', 'a')
  assert third.metrics['calls'] == 1 and third.metrics['pid'] != first[0].metrics['pid']


def test_objects_are_sent_with_their_state(graders):
  scores = [outcome.score for outcome in graded(graders, 'adding', 'a')]
  assert scores == [None]  # 1001 is beyond the range: it began with its end, from the settings.
  assert graders.get('adding').total == 1000.0


def test_the_end_of_a_batch_is_heard_where_the_grader_is(module):
  with Graders(EnvironmentsConfig(modules=(module,), score_range=(0.0, 5.0))) as graders:
    graders.get('adding').total = 0.0
    for batch in range(2):
      [outcome] = graded(graders, 'adding', 'a')
      assert (outcome.score, outcome.metrics['batches']) == (batch + 1, batch)
    with pytest.raises(UserError, match='Enough'):
      graded(graders, 'adding', 'a')


CHANGED = """
import os
from sdpo_jax.environments import registry
from sdpo_jax.types import Outcome

class Holder:
  right = 0.0

HELD, LIMIT = None, 0.0
DEEP = deep = [0.0]
for number in range(20):
  DEEP = {number: DEEP}
DEEP['itself'] = DEEP


def grade(examples, completions, *, truncated):
  held = HELD.right if HELD else 0.0
  score = held + getattr(grade, 'right', 0.0) + Holder.right + LIMIT + deep[0]
  return [Outcome(score, metrics={'pid': os.getpid()}) for _ in completions]


@registry.register_factory('changed')
def make(settings):
  global HELD, LIMIT
  if WHAT == 'object':
    HELD = Holder()
    HELD.right = 1.0
  if WHAT == 'attribute':
    grade.right = 1.0
  if WHAT == 'class':
    Holder.right = 1.0
  if WHAT == 'number':
    LIMIT = 1.0
  if WHAT == 'deep':
    deep[0] = 1.0
  return grade
"""


ASKING = """
import os
from sdpo_jax.environments import registry
from sdpo_jax.types import Outcome


@registry.register('asking')
def grade(examples, completions, *, truncated):
  try:
    outcomes = registry.get(examples[0].ground_truth)(examples, completions, truncated=truncated)
  except Exception as error:
    return [Outcome(0.0, str(error)) for _ in completions]
  return [Outcome(outcome.score, None, {'pid': os.getpid()}) for outcome in outcomes]
"""


@pytest.mark.parametrize(
  ('other', 'stays'),
  tiers.cases(
    {'mcq': False, 'asking_itself': False, 'doing': True, 'none such': False}.items(),
    default=(('mcq', False), ('doing', True)),
    slow=(('asking_itself', False), ('none such', False)),
  ),
)
def test_a_grader_that_uses_one_of_another_module_stays(other, stays, graders, module, tmp_path, caplog, registering):
  graders.prepare(['doing'])  # Registered for other tests, too.
  path = tmp_path / 'asking_graders.py'
  path.write_text(f'{ASKING}\n\nregistry.register("asking_itself")(lambda *asked, **more: [Outcome(1.0)])\n')
  with Graders(EnvironmentsConfig(modules=(module, str(path)))) as graders:
    question = Example('q', [], 'asking', other, 'x')
    [outcome] = graders.grade([question], ['abc'], truncated=[False])
  expected = {'mcq': 0.0, 'asking_itself': 1.0, 'doing': 3 / 7, 'none such': 0.0}[other]
  assert outcome.score == expected
  assert ('pid' not in outcome.metrics) == ('There is no' in (outcome.feedback or '')) == (other == 'none such')
  assert other == 'none such' or (outcome.metrics['pid'] == os.getpid()) == stays
  assert ("it uses the grader 'doing', of another module" in caplog.text) == stays


@pytest.mark.parametrize('what', ['object', 'attribute', 'class', 'number', 'deep'])
def test_a_grader_whose_module_is_not_what_an_import_makes_it_stays(what, tmp_path, caplog, registering):
  (tmp_path / f'{what}_graders.py').write_text(f'WHAT = {what!r}{CHANGED}')
  with Graders(EnvironmentsConfig(modules=(str(tmp_path / f'{what}_graders.py'),))) as graders:
    [outcome] = graded(graders, 'changed', 'a')
  assert (outcome.score, outcome.metrics['pid']) == (1.0, os.getpid())
  assert 'is not what an import makes it' in caplog.text


def test_coroutines_run_there_too(graders):
  assert os.getpid() not in pids(graders, 'awaited', prompt='Q')


@pytest.mark.parametrize('name', ['nested', 'holding', 'indirectly', 'limited'])
def test_what_cannot_be_sent_or_has_its_own_resources_stays(graders, name):
  assert pids(graders, name) == {os.getpid()}


def test_a_question_that_cannot_be_sent_is_graded_here(graders):
  assert os.getpid() not in pids(graders)
  assert pids(graders, lock=threading.Lock()) == {os.getpid()}


def test_graders_of_config_files_are_sent(tmp_path, registering):
  path = tmp_path / 'of_a_config.py'
  path.write_text(
    tiny.CONFIG.replace('{model!r}', "'model'").replace("'acc': score", "'acc': score, 'pid': os.getpid()")
  )
  path.write_text(f'import os\n{path.read_text()}')
  config = config_files.read(str(path))
  with Graders(config.environments) as graders:
    assert os.getpid() not in pids(graders, 'parity')


SCRIPT = """
import os, sys
from sdpo_jax.config import EnvironmentsConfig
from sdpo_jax.environments import registry
from sdpo_jax.environments.grading import Graders
from sdpo_jax.types import Example, Outcome

@registry.register('mine')
def grade(examples, completions, *, truncated):
  return [Outcome(float(os.getpid() == PID)) for _ in completions]

PID = os.getpid()
with Graders(EnvironmentsConfig(modules=(sys.argv[1],), grader_timeout_s=60.0)) as graders:
  def ask(name, text):
    return graders.grade([Example('q', [], name, None, 'x')], [text], truncated=[False])[0]
  assert ask('mine', 'a').score == 1.0
  print(int(ask('doing', 'print').metrics['pid']), flush=True)
  ask('doing', 'descendant')
  for text in sys.argv[2:]:
    ask('doing', text)
"""


def script(module, *texts):
  command = [sys.executable, '-c', SCRIPT, module, *texts]
  return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=tiny.REPOSITORY, env=tiny.environment())


def until(condition):
  deadline = time.monotonic() + WAIT_S
  while not condition():
    assert time.monotonic() < deadline
    time.sleep(0.01)


def in_group(group):
  """Return the processes of a group that have not ended."""
  found = []
  for path in pathlib.Path('/proc').glob('[0-9]*/stat'):
    try:
      fields = path.read_text().rpartition(')')[2].split()
    except OSError:
      continue
    found += [path.parent.name] * (int(fields[2]) == group and fields[0] != 'Z')
  return found


def test_what_a_program_defines_itself_stays_and_nothing_outlives_a_run(module):
  program = script(module)
  said, _ = program.communicate(timeout=WAIT_S)
  assert program.returncode == 0 and said.splitlines()[0] == 'said by a grader'
  assert not in_group(int(said.split()[-1]))


@pytest.mark.parametrize('text', tiers.cases(('expression', 'ignore'), default=('expression',), slow=('ignore',)))
def test_a_killed_trainer_leaves_no_process_whatever_code_it_is_in(module, text):
  program = script(module, text)
  assert program.stdout.readline() == 'said by a grader\n'
  group = int(program.stdout.readline())
  until(lambda: len(in_group(group)) == 2)
  time.sleep(0.1)
  program.send_signal(signal.SIGKILL)
  program.wait()
  until(lambda: not in_group(group))


# ———— What goes wrong ————


LATE = 'gave no answer within 0.5 s (environments.grader_timeout_s)'
MISDEEDS = {
  'exit': 'ended its process (exit code 3)',
  'signal': 'ended its process (Segmentation fault)',
  'expression': LATE,
  'ignore': LATE,
  'write': 'sent what cannot be read (bad message length)',
  'close all': 'ended its process',
  'fork': None,
  'close': None,
}


@pytest.mark.parametrize(
  'text', tiers.cases(MISDEEDS, default=('exit', 'fork'), slow=MISDEEDS.keys() - {'exit', 'fork'})
)
def test_whatever_a_grader_does_to_its_process_costs_that_completion(graders, text):
  sentence = MISDEEDS[text]
  first, second = graded(graders, 'doing', 'a', 'b')
  [outcome] = graded(graders, 'doing', text)
  assert (outcome.reason is None) if sentence is None else outcome.reason.startswith(f"the grader 'doing' {sentence}")
  for _ in range(2):  # No late or second answer is taken for one of these.
    a, bc = graded(graders, 'doing', 'a', 'bc')
    assert (first.score, second.score, a.score, bc.score) == (1 / 7, 1 / 7, 1 / 7, 2 / 7)


def test_a_process_that_is_killed_while_idle_costs_nothing_and_is_named_once(graders, caplog):
  for _ in range(2):
    [pid] = pids(graders)
    os.kill(pid, signal.SIGKILL)
    until(lambda pid=pid: not in_group(pid))
    [outcome] = graded(graders, 'doing', 'abc')
    assert outcome.score == 3 / 7 and outcome.metrics['pid'] not in (pid, os.getpid())
  assert caplog.text.count("The process of the grader 'doing' ended (Killed)") == 1


def test_a_grader_that_always_ends_its_process_is_given_up_after_two_in_a_row(graders, caplog):
  outcomes = graded(graders, 'doing', 'exit', 'b', 'exit', 'exit', 'exit', 'c')
  assert [outcome.score for outcome in outcomes] == [None, 1 / 7, *[None] * 4]
  ended = "the grader 'doing' ended its process (exit code 3)"
  assert [outcome.reason for outcome in outcomes[3:]] == [ended, *[f'{ended} for 2 others, and was abandoned'] * 2]
  assert caplog.text.count("The process of the grader 'doing' ended") == 1


def test_threads_that_share_graders_wait_for_each_other_when_a_call_hangs(graders):
  texts = ('hang', 'a', 'hang', 'bc')
  graded(graders, 'doing', 'a')
  with concurrent.futures.ThreadPoolExecutor(len(texts)) as pool:
    found = [outcome for [outcome] in pool.map(lambda text: graded(graders, 'doing', text), texts)]
  assert [outcome.score for outcome in found] == [None, 1 / 7, None, 2 / 7]
  assert all(outcome.reason.endswith(LATE) for outcome in (found[0], found[2]))


def test_an_answer_that_was_not_read_is_not_that_to_the_next_call(module, monkeypatch, caplog):
  caplog.set_level(logging.INFO, 'sdpo_jax')
  with Graders(EnvironmentsConfig(modules=(module,), grader_timeout_s=10.0)) as graders:
    here('CALLS')[0] = 0
    graded(graders, 'doing', 'a')
    with monkeypatch.context() as context:
      context.setattr(grader_process, 'LOGGER', None)
      [outcome] = graded(graders, 'doing', 'log')
    after = graded(graders, 'doing', 'a', 'bc')
  assert "sent what cannot be read ('NoneType' object has no attribute 'makeRecord')" in outcome.reason
  assert [outcome.score for outcome in after] == [1 / 7, 2 / 7]


def test_a_process_that_dies_while_it_starts_is_started_again(graders, monkeypatch):
  with monkeypatch.context() as context:
    context.setattr(grader_process, 'CHILD', pathlib.Path(__file__).with_name('missing.py'))
    [outcome] = graded(graders, 'doing', 'a')
  assert outcome.reason == "the grader 'doing' ended its process (exit code 2)"
  [outcome] = graded(graders, 'doing', 'exit beside a fork')
  assert outcome.reason == "the grader 'doing' ended its process (exit code 3)"


def test_what_a_grader_logs_reaches_the_handlers_of_the_run(module, caplog, capfd):
  caplog.set_level(logging.INFO, 'sdpo_jax')
  with Graders(EnvironmentsConfig(modules=(module,), grader_timeout_s=2.0)) as graders:
    here('CALLS')[0] = 0
    graded(graders, 'doing', 'log', 'log of a fork')
    graded(graders, 'doing', 'log and hang')
    [outcome] = graded(graders, 'doing', 'input')
  said = [(record.name, record.levelname, record.getMessage()) for record in caplog.records if record.name == 'mine']
  assert said == [('mine', 'INFO', f'said {text}') for text in ('log', 'log of a fork', 'log and hang')]
  assert {record.filename for record in caplog.records if record.name == 'mine'} == {'doing_graders.py'}
  assert not any(hasattr(record, '_absl_log_fatal') for record in caplog.records)  # With it, absl aborts the process.
  assert "raised EOFError('EOF when reading a line')" in outcome.reason
  assert 'said by a fork' in capfd.readouterr().err and 'said by a fork' not in caplog.text


def test_eight_threads_that_hang_end_the_run(registering):
  go = threading.Event()

  @registering.register('closure')
  def grade(examples, completions, *, truncated):
    if completions[0] == 'hang':
      go.wait(WAIT_S)
    return [Outcome(1.0) for _ in completions]

  with Graders(EnvironmentsConfig(grader_timeout_s=0.02)) as graders:
    for _ in range(MAX_HANGING - 1):
      assert graded(graders, 'closure', 'hang')[0].score is None
    assert graded(graders, 'closure', 'a')[0].score == 1.0
    with pytest.raises(UserError, match="8 calls of graders hang .* of 'closure', which cannot be sent .* mend it, or"):
      graded(graders, 'closure', 'hang')
    go.set()
    until(lambda: not any(thread.name == 'grader-closure' for thread in threading.enumerate()))
    assert graded(graders, 'closure', 'a')[0].score == 1.0  # Those that have returned are forgotten.


def test_a_grader_that_changes_its_arguments_changes_nothing_else(registering):
  @registering.register('changing')
  def change(examples, completions, *, truncated):
    scores = [Outcome(1.0) for _ in completions]
    examples[0].messages[0]['content'] = 'changed'
    examples[0].columns['list'].append(3)
    examples[0].columns['array'][0] = 7
    for values in (examples[0].messages, examples, completions, truncated):
      values.clear()
    return scores

  @registering.register('reading')
  def read(examples, completions, *, truncated):
    seen = [(one.messages[0]['content'], one.columns['list'], one.columns['array'].tolist()) for one in examples]
    return [Outcome(float(one == ('Q', [1, 2], [0, 1]))) for one in seen]

  examples = [example('changing,reading', list=[1, 2], array=np.arange(2))] * 2
  completions, truncated = ['a', 'b'], [False, True]
  with Graders(EnvironmentsConfig()) as graders:
    outcomes = graders.grade(examples, completions, truncated=truncated)
  assert [outcome.score for outcome in outcomes] == [2.0, 2.0]
  assert (completions, truncated, examples[0].messages[0]['content']) == (['a', 'b'], [False, True], 'Q')


def test_hanging_graders_leave_nothing_behind():
  """Nor do the regular expressions and long texts among them hold this interpreter."""
  found = hanging_graders.measure(batches=15, hangs=0.2, seed=0)
  assert found['hung'] == len(hanging_graders.HANGS)
  assert {name: found[name] for name, bound in hanging_graders.BOUNDS.items() if found[name] > bound} == {}
