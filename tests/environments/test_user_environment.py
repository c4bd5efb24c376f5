"""A user's own environment: the documentation's own code is trained with, and what can be wrong with one is said."""

import http.server
import json
import threading

import pytest

from sdpo_jax.config import EnvironmentsConfig, HttpGraderConfig
from sdpo_jax.environments import registry
from sdpo_jax.environments.grading import Graders
from sdpo_jax.errors import UserError
from sdpo_jax.types import Example
from tests import tiny
from tests.environments.documented_code import block


def example(environment, ground_truth=None, i=0):
  return Example(f'q{i}', [{'role': 'user', 'content': 'Q'}], environment, ground_truth, 'test')


@pytest.fixture
def write(tmp_path):
  def write_module(code, name='mine.py'):
    (tmp_path / name).write_text(code)
    return str(tmp_path / name)

  return write_module


@pytest.mark.slow
def test_the_documented_environment_trains(tmp_path):
  code = block('my_environment.py')
  assert len(code.splitlines()) < 20
  config = tiny.make_experiment(tmp_path)
  (tmp_path / 'my_environment.py').write_text(code)
  rows = [
    {'prompt': f'Write about {what} in {words} words.', 'answer': f'{words}'}
    for what, words in (('rain', 5), ('snow', 7))
  ]
  (tmp_path / 'rows.jsonl').write_text('\n'.join(map(json.dumps, rows)))
  done = tiny.launch(
    'train',
    f'--config={config}',
    f'--config.environments.modules={tmp_path}/my_environment.py',
    f'--config.data.train_files={tmp_path}/rows.jsonl',
    '--config.data.environment=word_count',
    '--config.data.max_prompt_length=64',
    '--config.data.prompt_buckets=64',
    '--config.trainer.total_training_steps=1',
    '--config.trainer.test_freq=0',
    f'--workdir={tmp_path}/run',
    quick=True,
  )
  assert done.returncode == 0, done.stderr
  samples = [json.loads(line) for line in (tmp_path / 'run' / 'rollouts' / '1.jsonl').read_text().splitlines()]
  assert len(samples) == 8
  wanted = {'Write about rain in 5 words.': 5, 'Write about snow in 7 words.': 7}
  for sample in samples:
    text = json.dumps(sample['prompt'])
    (expected,) = [number for prompt, number in wanted.items() if prompt in text]
    words = len(sample['completion'].split())
    assert sample['score'] == float(words == expected)
    assert sample['feedback'] == (None if words == expected else f'The answer has {words} words instead of {expected}.')


def test_the_documented_server_grades(write):
  namespace = {'__name__': 'my_server'}
  exec(compile(block('my_server.py'), 'my_server.py', 'exec'), namespace)
  handler = type('Quiet', (namespace['Handler'],), {'log_message': lambda *_: None})
  with http.server.ThreadingHTTPServer(('127.0.0.1', 0), handler) as server:
    threading.Thread(target=server.serve_forever, kwargs={'poll_interval': 0.01}, daemon=True).start()
    settings = HttpGraderConfig(url=f'http://127.0.0.1:{server.server_address[1]}/')
    with Graders(EnvironmentsConfig(http=settings)) as graders:
      right, wrong = graders.grade([example('http', '4')] * 2, [' 4\n', 'four'], truncated=[False] * 2)
    server.shutdown()
  assert (right.score, right.feedback) == (1.0, None)
  assert (wrong.score, wrong.feedback) == (0.0, 'Give the number alone.')


@pytest.mark.parametrize(
  'name, code, sentence',
  [
    ('missing.py', None, r'environments.modules: there is no file .*missing.py'),
    ('text.txt', 'x = 1', r'environments.modules: .*text.txt. is not a Python file'),
    ('syntax.py', 'def grade(:\n', r'environments.modules: .*syntax.py. cannot be run: SyntaxError'),
    ('raises.py', 'import not_installed_anywhere', r'raises.py. cannot be run: ModuleNotFoundError: No module named'),
    (
      'taken.py',
      "from sdpo_jax.environments import registry\nregistry.register('digits')(None)\n",
      r"taken.py. cannot be run: ValueError: The grader 'digits' is already registered",
    ),
  ],
)
def test_modules_that_cannot_be_loaded(tmp_path, name, code, sentence):
  if code is not None:
    (tmp_path / name).write_text(code)
  with pytest.raises(UserError, match=sentence):
    Graders(EnvironmentsConfig(modules=(str(tmp_path / name),)))


def test_a_module_is_run_once_however_often_it_is_named(write):
  path = write("from sdpo_jax.environments import registry\nregistry.register('once')(lambda *_, **__: [])\n")
  for _ in range(2):
    Graders(EnvironmentsConfig(modules=(path, path)))
  assert 'once' in registry.names()


GRADERS = """
from sdpo_jax.environments import registry
from sdpo_jax.types import Outcome


@registry.register('too_few')
def too_few(examples, completions, *, truncated):
  return [Outcome(1.0)]


@registry.register('numbers')
def numbers(examples, completions, *, truncated):
  return [1.0 for _ in completions]


@registry.register('nothing')
def nothing(examples, completions, *, truncated):
  pass


@registry.register('brittle')
def brittle(examples, completions, *, truncated):
  return [Outcome(1 / len(text)) for text in completions]


class Counter:
  def __init__(self):
    self.closed = 0

  def __call__(self, examples, completions, *, truncated):
    return [Outcome(0.0, 'No.') for _ in completions]

  def close(self):
    self.closed += 1


@registry.register_factory('counter')
def make(settings):
  return Counter()
"""


@pytest.fixture(scope='module')
def graders(tmp_path_factory):
  path = tmp_path_factory.mktemp('graders') / 'graders.py'
  path.write_text(GRADERS)
  with Graders(EnvironmentsConfig(modules=(str(path),))) as made:
    yield made


@pytest.mark.parametrize(
  'name, sentence',
  [
    ('too_few', "The grader 'too_few' returned 1 outcomes for 2 completions"),
    ('numbers', r"The grader 'numbers' must return a list with one sdpo_jax.types.Outcome .* not \[1.0, 1.0\]"),
    ('nothing', r"The grader 'nothing' must return a list with one sdpo_jax.types.Outcome .* not None"),
    ('unheard_of', "no environment 'unheard_of': choose from"),
  ],
)
def test_graders_that_return_nonsense_are_named(graders, name, sentence):
  with pytest.raises(UserError, match=sentence):
    graders.grade([example(name)] * 2, ['a', 'b'], truncated=[False] * 2)


def test_a_grader_that_raises_costs_that_completion_alone(graders, caplog):
  outcomes = graders.grade([example('brittle', i=i) for i in range(3)], ['a', '', 'ab'], truncated=[False] * 3)
  assert [outcome.score for outcome in outcomes] == [1.0, None, 0.5]
  assert 'ZeroDivisionError' in outcomes[1].reason and outcomes[0].reason is None
  (record,) = caplog.records
  assert "'brittle' could not grade 1 of 3" in record.getMessage() and 'ZeroDivisionError' in record.getMessage()


def test_a_made_grader_is_made_once_and_closed(graders):
  with Graders(EnvironmentsConfig()) as own:
    own.grade([example('counter')], ['a'], truncated=[False])
    made = own.get('counter')
    own.grade([example('counter')], ['b'], truncated=[False])
    assert own.get('counter') is made and made.closed == 0
  assert made.closed == 1
