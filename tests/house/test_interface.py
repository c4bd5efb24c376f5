"""The Python interface: rows and graders from memory, steps by hand, the same runs as those of the commands."""

import copy
import dataclasses
import json
import os

import jax
import numpy as np
import pytest

import sdpo_jax
from sdpo_jax import interface
from sdpo_jax.config import Config
from sdpo_jax.configs import quickstart
from sdpo_jax.environments import registry
from tests import exported_cards, hub_server, tiny
from tests.user_graders import odd, right

ROWS = [{'prompt': f'Q{number}', 'answer': number % 2} for number in range(6)]


@pytest.fixture(scope='module')
def config(tmp_path_factory) -> Config:
  text = tiny.CONFIG[tiny.CONFIG.index('def get_config') :]
  namespace = {'Config': Config}
  exec(text.replace('{model!r}', repr(str(tiny.make_model(tmp_path_factory.mktemp('model'))))), namespace)
  made = namespace['get_config']()
  made.trainer.save_freq = 0
  return made


@pytest.fixture(scope='module')
def whole(config, tmp_path_factory):
  """Return a run of three steps that nobody stops, what it ended with, and what was seen of it."""
  workdir, seen, steps = tmp_path_factory.mktemp('whole'), [], []

  def look(step):
    steps.append(step)
    seen.append((step.number, dict(step.metrics), step.sample('Q1', n=2, max_tokens=3, seed=step.number)))

  result = sdpo_jax.train(config, workdir, rows=ROWS, held_out=ROWS[:2], grader=odd, on_step=look)
  assert 'score_mean' in repr(steps)
  with pytest.raises(sdpo_jax.UserError, match='^Step 1 can be sampled only until the next one begins'):
    steps[0].sample('Q1')
  return workdir, result, seen


def learned(workdir):
  """Return the metrics of a run that do not depend on when and by which process they were measured."""
  elsewhere = ('time/', 'throughput/', 'programs/', 'fencing_epoch', 'line_digest')
  return [
    {name: value for name, value in line.items() if not name.startswith(elsewhere)}
    for line in sdpo_jax.read_metrics(workdir)
  ]


def test_rows_and_a_grader_from_memory_are_learned_and_evaluated(whole):
  workdir, result, seen = whole
  assert result.step == 3 and not result.preempted
  assert {name.split('/')[1] for name in result.evaluations[3]} == {'held_out'}
  lines = sdpo_jax.read_metrics(workdir)
  assert [(line['step'], line.get('train/loss')) for line in lines[1:]] == [
    (number, metrics['train/loss']) for number, metrics, _ in seen
  ]
  assert all(len(texts) == 2 for _, _, texts in seen)


def test_what_was_handed_over_is_left_as_it_was(config, whole):
  assert config.data.train_files == ('generator:parity',) and config.data.environment is None
  assert 'odd' not in registry.names()


def test_steps_taken_by_hand_and_stopped_go_on_to_the_same_end(config, whole, tmp_path):
  taken = []
  for step in sdpo_jax.steps(config, tmp_path / 'run', rows=ROWS, held_out=ROWS[:2], grader=odd):
    taken.append(step.number)
    if step.number == 2:
      break
  del step
  result = sdpo_jax.train(
    config, tmp_path / 'run', rows=ROWS, held_out=ROWS[:2], grader=odd, on_step=lambda step: taken.append(step.number)
  )
  assert taken == [1, 2, 3] and result.step == 3
  assert learned(tmp_path / 'run') == learned(whole[0])


def test_what_on_step_raises_ends_the_run_and_loses_no_step(config, tmp_path):
  def refuse(step):
    raise RuntimeError(f'enough at {step.number}')

  with pytest.raises(RuntimeError, match='enough at 1'):
    sdpo_jax.train(config, tmp_path, rows=ROWS, grader=odd, on_step=refuse)
  seen = []
  sdpo_jax.train(config, tmp_path, rows=ROWS, grader=odd, on_step=lambda step: seen.append(step.number))
  assert seen == [2, 3]


def test_a_run_is_evaluated_and_asked(config, whole):
  workdir, result, _ = whole
  asked = copy.deepcopy(config)
  asked.data.val_files = tuple(json.loads((workdir / 'config.json').read_text())['data']['val_files'])
  evaluation = sdpo_jax.evaluate(asked, workdir=str(workdir), grader=odd)
  assert evaluation.flat()['eval/held_out/mean@2'] == result.evaluations[3]['eval/held_out/mean@2']
  generator = sdpo_jax.generator(str(workdir), temperature=0, max_tokens=4, n=2)
  first, second = generator.generate('Q1')
  assert first == second == generator.generate([{'role': 'user', 'content': 'Q1'}])[0]


def test_a_run_is_exported_and_pushed_with_what_it_was_evaluated_at(config, whole, tmp_path, monkeypatch):
  workdir, result, _ = whole
  with hub_server.reached(tmp_path, monkeypatch) as served:
    assert sdpo_jax.export(str(workdir), str(tmp_path / 'out'), push='me/tuned', private=True) == 3
  files = {path.name: path.read_bytes() for path in (tmp_path / 'out').iterdir()}
  assert served.models['me/tuned'] == hub_server.Model(True, files) and 'model.safetensors' in files
  card = exported_cards.read(tmp_path / 'out', config.model.path, workdir, 'Q1')
  found = {f'eval/{each.dataset_name}/{each.metric_type}': each.metric_value for each in card.data.eval_results}
  assert found.items() <= result.evaluations[3].items() and 'eval/held_out/mean@2' in found
  for step in (0, 3):  # The standard error over the questions is that of the samples that the run has kept.
    samples = json.loads((workdir / 'eval' / f'{step}.json').read_text())['samples']
    means = [np.mean([each['score'] for each in samples if each['id'] == name]) for name in {s['id'] for s in samples}]
    error = np.std(means, ddof=1) / len(means) ** 0.5
    assert f' {result.evaluations[step]["eval/held_out/mean@2"]:.4g} ± {error:.2g} |' in card.text
  assert '`held_out.jsonl`' in card.text and 'jax `' in card.text and '3 of 3 steps of SDPO' in card.text


def test_a_config_is_loaded_and_changed():
  assert os.environ['TRANSFORMERS_NO_ADVISORY_WARNINGS'] == '1'  # From importing the package.
  config = sdpo_jax.load_config('configs/quickstart.py', {'optimizer.lr': '2e-4', 'trainer.test_freq': 7})
  assert (config.optimizer.lr, config.trainer.test_freq) == (2e-4, 7)
  config.optimizer.lr, config.trainer.test_freq = (lambda plain: (plain.optimizer.lr, plain.trainer.test_freq))(
    quickstart.get_config()
  )
  assert config == quickstart.get_config()


@pytest.mark.parametrize(
  ('changes', 'said'), [({'optimizer.rate': 1}, r'optimizer\.rate'), ({'optimiser.lr': 1e-3}, r'optimiser\.lr')]
)
def test_settings_that_are_none_are_refused(changes, said):
  with pytest.raises(sdpo_jax.UserError, match=said):
    sdpo_jax.load_config('configs/quickstart.py', changes)


def test_a_misspelt_attribute_is_refused_before_anything_is_compiled(config, tmp_path):
  wrong = copy.deepcopy(config)
  wrong.optimizer.learning_rate = 1.0
  with pytest.raises(sdpo_jax.UserError, match=r'optimizer\.learning_rate'):
    sdpo_jax.train(wrong, tmp_path, rows=ROWS, grader=odd)


@pytest.mark.parametrize(
  ('rows', 'said'),
  [([], 'at least one'), (['Q'], "Row 0 is 'Q'"), ([{'answer': '1'}] * 2, 'prompt')],
)
def test_rows_that_are_none_are_refused(config, tmp_path, rows, said):
  with pytest.raises(sdpo_jax.UserError, match=said):
    sdpo_jax.train(config, tmp_path, rows=rows, grader=odd)


def test_a_grader_with_the_name_of_another_is_refused(config, tmp_path):
  def math(completions, **_):
    return [1.0] * len(completions)

  with pytest.raises(sdpo_jax.UserError, match="cannot be called 'math'"):
    sdpo_jax.train(config, tmp_path, rows=ROWS, grader=math)


def unasked(texts):
  return [1.0] * len(texts)


@pytest.mark.parametrize(
  ('call', 'said'),
  [
    (lambda config, path: sdpo_jax.load_config(3), 'load_config: file=3 is not str or PathLike'),
    (lambda config, path: sdpo_jax.load_config('c.py', ['seed']), r"changes=\['seed'\] is not Mapping or None"),
    (lambda config, path: sdpo_jax.train(), 'Name a config, or the model to train'),
    (lambda config, path: sdpo_jax.train(3), 'train: config=3 is not Config or str or PathLike or None'),
    (lambda config, path: sdpo_jax.steps(config, 3), 'steps: workdir=3 is not str'),
    (
      lambda config, path: sdpo_jax.train(config, path, rows='Q'),
      'Iterable or None; a file goes into data.train_files',
    ),
    (lambda config, path: sdpo_jax.train(config, path, rows=ROWS, grader=3), 'grader has 3: each is a function'),
    (lambda config, path: sdpo_jax.train(config, path, rows=ROWS, grader=[]), 'grader is empty'),
    (
      lambda config, path: sdpo_jax.train(config, path, rows=ROWS, grader=[odd, odd]),
      "the grader 'odd' once, not twice",
    ),
    (lambda config, path: sdpo_jax.train(config, path, rows=ROWS, grader=[(odd, 'x')]), "'odd' a finite number .*'x'"),
    (lambda config, path: sdpo_jax.train(config, path, rows=ROWS, grader=['none', 'od']), "no environment 'od'"),
    (lambda config, path: sdpo_jax.train(config, path, rows=ROWS, grader=int), "grader 'int' cannot be called"),
    (
      lambda config, path: sdpo_jax.train(config, path, rows=ROWS, grader=[odd, unasked]),
      r"'unasked' cannot be called as graders are: define it as unasked\(completions, \*\*_\)",
    ),
    (lambda config, path: sdpo_jax.train(config, path, on_step=3), 'on_step=3 is not Callable or None'),
    (lambda config, path: sdpo_jax.train(config, path, callbacks=[print]), 'is no sdpo_jax.Callback'),
    (lambda config, path: sdpo_jax.train(config, path, on_step=lambda: None), 'on_step cannot be called with a step'),
    (lambda config, path: sdpo_jax.train(config, path, restart='yes'), "restart='yes' is not bool"),
    (lambda config, path: sdpo_jax.evaluate(config, model=config.model.path, step='1'), "step='1' is not int or None"),
    (lambda config, path: sdpo_jax.evaluate(config), 'Name either workdir, a run, or model'),
    (lambda config, path: sdpo_jax.generator(model=config.model.path, n=0), 'n must be positive, not 0'),
    (
      lambda config, path: sdpo_jax.generator(model=config.model.path, temperature='hot'),
      "temperature='hot' is not float",
    ),
    (lambda config, path: sdpo_jax.generator(model=config.model.path, max_tokens=0), 'max_tokens must be at least 1'),
    (
      lambda config, path: sdpo_jax.export(path, path / 'out', weights='both'),
      "weights='both' is not 'student' or 'teacher'",
    ),
    (
      lambda config, path: sdpo_jax.export(path, path / 'out', weights=np.zeros(2)),
      r"weights=array\(\[0., 0.\]\) is not 'student' or",
    ),
    (lambda config, path: sdpo_jax.read_metrics(path), 'is not a run: '),
    (lambda config, path: sdpo_jax.load_config('c' * 300), 'there is no such file'),
    (lambda config, path: sdpo_jax.generator(model='m' * 300), 'model directory m+ does not exist'),
    (
      lambda config, path: sdpo_jax.train(dataclasses.replace(config, seed=(i for i in ())), path),
      'seed=<generator object .* is not int',
    ),
    (
      lambda config, path: sdpo_jax.load_config('configs/quickstart.py', {'seed': np.zeros((2, 2))}).validate(),
      '^seed=[^\n]* is not int.$',
    ),
    (lambda config, path: sdpo_jax.train(config, '/dev/null/x', rows=ROWS), 'cannot be written .*: choose another'),
  ],
)
def test_arguments_of_other_types_are_refused_before_anything_is_made(config, tmp_path, call, said):
  with pytest.raises(sdpo_jax.UserError, match=said):
    call(config, tmp_path)
  assert not list(tmp_path.rglob('checkpoints'))


def test_arguments_that_are_none_are_refused_as_the_functions():
  with pytest.raises(TypeError, match="train: got an unexpected keyword argument 'lr'"):
    sdpo_jax.train(lr=1)


def test_several_graders_count_by_their_weights_and_callbacks_look_on(config, tmp_path):
  seen = []

  class Look(sdpo_jax.Callback):
    def on_step(self, step):
      seen.append(step.number)

    def on_evaluation(self, step, metrics):
      seen.append((step.number, sorted({name.split('/')[1] for name in metrics})))

    def on_end(self, result):
      seen.append(result.step)

  changes = {'trainer.total_training_steps': 2, 'trainer.val_before_train': False}
  graders = [odd, (right, 0.5)]
  sdpo_jax.train(config, tmp_path, changes=changes, rows=ROWS, held_out=ROWS[:2], grader=graders, callbacks=[Look()])
  assert seen == [1, 2, (2, ['held_out']), 2]
  line = sdpo_jax.read_metrics(tmp_path)[-1]
  assert line['rollout/score_mean'] == pytest.approx(line['rollout/reward/odd'] + 0.5)
  assert config.trainer.total_training_steps == 3 and not {'odd', 'right'} & set(registry.names())


def test_a_config_file_that_registers_graders_is_loaded_again(tmp_path):
  path = tiny.make_experiment(tmp_path)
  path.write_text(path.read_text().replace("'parity'", "'parity again'"))
  first, second = sdpo_jax.load_config(path), sdpo_jax.load_config(str(path))
  assert first == second and 'parity again' in registry.names()
  with pytest.raises(ValueError, match='already registered'):
    registry.register('parity again')(right)


def test_prompts_are_texts_lists_of_them_or_messages(whole):
  generator = sdpo_jax.generator(whole[0], temperature=0, max_tokens=3, n=2)
  each = [generator.generate(prompt) for prompt in ('Q1', 'Q2')]
  assert generator.generate(['Q1', 'Q2']) == generator.generate(('Q1', 'Q2')) == each and len(each[0]) == 2
  for wrong in (3, None, [], ['Q', 3], [{'role': 'user'}], {'role': 'user', 'content': 'Q'}):
    with pytest.raises(sdpo_jax.UserError, match='must be a text or a list of messages'):
      generator.generate(wrong)
  with pytest.raises(sdpo_jax.UserError, match=r'Prompt 2 has .* the limit is 32'):
    generator.generate(['Q1', 'Q' * 300])


def test_the_package_shows_what_it_offers():
  assert set(sdpo_jax.__all__) <= set(dir(sdpo_jax))
  assert all(getattr(sdpo_jax, name) is getattr(interface, name) for name in sdpo_jax.__all__)
  with pytest.raises(AttributeError, match='no attribute'):
    sdpo_jax.fit  # noqa: B018


def test_the_state_that_a_step_shows_is_on_the_devices(config, tmp_path):
  for step in sdpo_jax.steps(config, tmp_path, rows=ROWS, grader=odd):
    state = step._stepped.state  # noqa: SLF001 (What is not on the devices is sampled with all the same.)
    assert all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(state.trainable))
    with pytest.raises(sdpo_jax.UserError, match='max_prompt_length'):
      step.sample('long ' * 100)
    with pytest.raises(sdpo_jax.UserError, match='max_tokens'):
      step.sample('Q', max_tokens=100)
    break


def test_runs_with_the_same_grader_may_end_in_any_order(config, tmp_path):
  one, other = (sdpo_jax.steps(config, tmp_path / name, rows=ROWS, grader=odd) for name in 'ab')
  next(one), next(other)
  one.close()
  other.close()
