"""Commands as a user types them: wrong input ends with one sentence and code 2, before any compile; right input
works.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import types

from etils import epath
import numpy as np
import pytest
import tensorstore

from sdpo_jax import command
from sdpo_jax.configs import quickstart
from sdpo_jax.errors import UserError
from sdpo_jax.inference import probe
from sdpo_jax.planner import search
from sdpo_jax.reporting import report
from sdpo_jax.training import closing_text, loop
from sdpo_jax.training.directory import workdir as workdirs
from sdpo_jax.types import Example
from tests import tiny
from tests.local_server import Answer, Server

# Before a config: no larger file can be written, as on a full disk.
FULL_DISK = """
import resource
resource.setrlimit(resource.RLIMIT_FSIZE, (100 * 1024, 100 * 1024))
"""


@pytest.fixture(scope='module')
def folder(tmp_path_factory):
  return tmp_path_factory.mktemp('commands')


@pytest.fixture(scope='module')
def config(folder):
  return tiny.make_experiment(folder)


@pytest.fixture(scope='module')
def run(request, folder, config):
  """Return a finished run; what the commands say that it prints; with the slow tests, a run on a full disk."""
  (folder / 'full.py').write_text(FULL_DISK + config.read_text())
  from_run, from_model = f'--workdir={folder}/run', f'--model={folder}/hf'
  flags = ['total_training_steps=2', 'sample_table_freq=2', 'sample_table_rows=3', 'record_top_tokens=3']
  flags = [f'--config.trainer.{flag}' for flag in flags]
  export = 'export', [from_run, f'--output={folder}/hf']

  def sample(source):
    return 'sample', [source, '--prompt=Q1', '--temperature=0', '--max_tokens=4']

  def evaluate(source, name):
    return 'evaluate', [f'--config={config}', source, f'--output={folder}/{name}.json']

  commands = {
    'train': ('train', [f'--config={config}', '--config.alarms.max_rollbacks=5', *flags, from_run]),
    'report': ('report', [from_run]),
    'check': ('check', [f'--config={config}']),
    'export': export,
    'sample the run': sample(from_run),
    'sample the model': sample(from_model),
    'evaluate the run': evaluate(from_run, 'run'),
    'evaluate the model': evaluate(from_model, 'model'),
    'export again': export,
    'check what learns nothing': ('check', [f'--config={config}', '--config.optimizer.lr=0']),
    'compare': ('compare', [f'{folder}/run', '--metric=eval/*/mean@2', f'--output={folder}/c.json']),
  }
  if request.config.getoption('slow'):
    commands['full disk'] = 'train', [f'--config={folder}/full.py', *flags, f'--workdir={folder}/full']
  done = dict(zip(commands, tiny.launch_many(list(commands.values()), quick=True), strict=True))
  assert done['train'].returncode == 0, done['train'].stderr
  return done


def wrong_inputs(folder, config) -> dict[str, tuple[list[str], str]]:
  """name → (command, what its sentence must hold)."""
  tiny.make_model(folder / 'no_template')
  tiny.make_tokenizer(folder / 'no_template', chat_template=None)
  model = tiny.make_model(folder / 'phi3')
  saved = json.loads((model / 'config.json').read_text())
  (model / 'config.json').write_text(json.dumps(saved | {'model_type': 'phi3', 'architectures': ['Phi3ForCausalLM']}))
  row = {
    'prompt': 'What?',
    'dataset': 'parity',
    'kind': 'parity',
    'answer': '1',
    'system': None,
    'environment': 'parity',
  }
  (folder / 'bad.jsonl').write_text(json.dumps(row) + '\n{"prompt": 3}\n')
  (folder / 'not.jsonl').write_text(json.dumps(row) + '\n' + json.dumps(row) + '\n{"prompt": \n')
  (folder / 'long.jsonl').write_text(json.dumps(row) + '\n' + json.dumps(row | {'prompt': 'x' * 40}) + '\n')
  (folder / 'foreign.jsonl').write_text(json.dumps(row | {'environment': 'juggling'}) + '\n')
  (folder / 'broken.py').write_text('def get_config(:\n')
  (folder / 'empty.py').write_text('')
  (folder / 'columns.csv').write_text('a,b\n1,2\n')

  def train(*rest):
    return ['train', f'--config={config}', f'--workdir={folder}/never', *rest]

  return {
    'no config': (['train'], '--config=… is required (--help'),
    'config without its flag': (['train', 'mine.py'], "--config=… is required; 'mine.py' belongs to no flag (--help"),
    'similar config': (['train', '--config=configs/quikstart.py'], "did you mean 'configs/quickstart.py'?"),
    'no such config': (['train', '--config=nowhere.py'], 'nowhere.py: there is no such file'),
    'config with an error': (['train', f'--config={folder}/broken.py'], 'is not valid Python'),
    'config without get_config': (['train', f'--config={folder}/empty.py'], 'has no function get_config()'),
    'unknown flag': (train('--wrkdir=x'), "Unknown command line flag 'wrkdir'"),
    'none of the values': (['export', '--weights=studnt'], "<student|teacher>; did you mean 'student'? (--help lists"),
    'not a flag': (train('quickly'), "'quickly' is not a flag"),
    'unknown setting': (train('--config.actor.alpha=1'), "no setting 'actor.alpha'"),
    'wrong type': (train('--config.optimizer.lr=fast'), "optimizer.lr='fast' is not float"),
    'out of range': (train('--config.actor.self_distillation.alpha=1.5'), 'alpha must lie in [0, 1], not 1.5'),
    'missing model': (train(f'--config.model.path={folder}/nothing'), f'{folder}/nothing'),
    'unknown architecture': (train(f'--config.model.path={folder}/phi3'), "model_type 'phi3' is not supported"),
    'no chat template': (train(f'--config.model.path={folder}/no_template'), 'chat template'),
    'missing rows': (train(f'--config.data.train_files={folder}/none.json'), 'none.json'),
    'malformed row': (train(f'--config.data.train_files={folder}/bad.jsonl'), 'bad.jsonl, line 2'),
    'not JSON': (train(f'--config.data.train_files={folder}/not.jsonl'), 'not.jsonl, line 3'),
    'long prompt': (train(f'--config.data.train_files={folder}/long.jsonl'), 'data.max_prompt_length'),
    'unknown environment': (train(f'--config.data.train_files={folder}/foreign.jsonl'), 'juggling'),
    'unknown generator': (train('--config.data.train_files=generator:nothing'), "'nothing'"),
    'sample without a model': (['sample', '--prompt=x'], 'Name one of --workdir'),
    'sample nothing': (['sample', f'--model={model}'], 'Name one of --prompt='),
    'sample twice': (['sample', f'--model={model}', '--prompt=x', '--chat'], 'Name one of --prompt='),
    'sample no words': (['sample', f'--model={model}', '--prompt= '], '--prompt is empty'),
    'sample to a file and to stdout': (
      ['sample', f'--model={model}', '--prompt=x', f'--output={folder}/x.jsonl'],
      '--output and --overwrite go with --prompts=FILE',
    ),
    'sample many turns': (['sample', f'--model={model}', '--chat', '--n=2'], '--n=2'),
    'sample missing prompts': (['sample', f'--model={model}', f'--prompts={folder}/none.txt'], 'none.txt'),
    'sample a malformed row': (['sample', f'--model={model}', f'--prompts={folder}/bad.jsonl'], 'bad.jsonl, line 2'),
    'sample over a file': (
      ['sample', f'--model={model}', f'--prompts={folder}/long.jsonl', f'--output={folder}/bad.jsonl'],
      'bad.jsonl already exists: name another file, or add --overwrite',
    ),
    'sample of nothing': (['sample', '--prompt=x', f'--workdir={folder}/nothing'], 'is not a run'),
    'report of nothing': (['report', f'--workdir={folder}/nothing'], 'is not a run: there is no such directory'),
    'compare nothing': (['compare'], 'Name the directories of the runs to compare'),
    'compare what is no run': (['compare', '--metric=x', f'{folder}/nothing', 'b'], 'nothing is not a run'),
    'init over a folder': (['init', '--data=x.csv', '--model=y', f'--output={folder}'], 'name one that does not exist'),
    'init without rows': (['init', f'--data={folder}/none.csv', '--model=y'], '--data: there is no file'),
    'init of unknown columns': (
      ['init', f'--data={folder}/columns.csv', '--model=y', '--answer_column=b'],
      "there are 'a', 'b': name the right columns in --prompt_column",
    ),
    'report of a run twice': (['report', '--workdir=a', '--compare', 'b', 'a'], 'a is named twice'),
    'export of nothing': (['export', f'--workdir={folder}/nothing', f'--output={folder}/out'], 'is not a run'),
    'check a missing model': (['check', f'--config={config}', f'--config.model.path={folder}/nothing'], 'nothing'),
    'synthesize about nothing': (
      ['synthesize', f'--config={config}', f'--output={folder}/x.jsonl'],
      '--document is not given and model.cartridge.document of the config is empty',
    ),
    'synthesize by words': (
      ['synthesize', f'--config={config}', f'--output={folder}/x.jsonl', '--document=x.txt', '--seed_weights=1,two'],
      "--seed_weights holds 'two', which is not a number",
    ),
    'synthesize by an unnamed endpoint': (
      ['synthesize', f'--config={config}', f'--output={folder}/x.jsonl', '--document=x.txt', '--endpoint_model=m'],
      'Without an address in --endpoint_url, --endpoint_model has no effect: leave it out',
    ),
    'synthesize by an endpoint in parts': (
      [
        *('synthesize', f'--config={config}', f'--output={folder}/x.jsonl', '--document=x.txt', '--max_batch_rows=2'),
        *('--endpoint_url=http://127.0.0.1:9/v1', '--endpoint_model=m'),
      ],
      'With --endpoint_url, which one process asks, --max_batch_rows has no effect: leave it out',
    ),
    'synthesize without a key': (
      [
        *('synthesize', f'--config={config}', f'--output={folder}/x.jsonl', '--document=x.txt'),
        *('--endpoint_url=http://127.0.0.1:9/v1', '--endpoint_model=m', '--endpoint_api_key_env=NO_SUCH_KEY'),
      ],
      '--endpoint_api_key_env=NO_SUCH_KEY: there is no such environment variable; export it',
    ),
    'evaluate both': (
      ['evaluate', f'--config={config}', '--workdir=a', '--model=b', f'--output={folder}/x.json'],
      'Name one of --workdir',
    ),
  }


NAMES = sorted(path.stem for path in (tiny.REPOSITORY / 'launch').glob('*.py') if path.stem != '__init__')


@pytest.fixture(scope='module')
def quick_ends(config, tmp_path_factory):
  """Return commands that compile nothing: (where, wrong inputs, how these ended, what was asked for help)."""
  folder = tmp_path_factory.mktemp('quick')
  cases = wrong_inputs(folder, config)
  commands = [(name, arguments) for (name, *arguments), _ in cases.values()]
  commands += [(name, ['--help']) for name in NAMES] + [('train', ['-h']), ('train', ['--help_settings'])]
  commands += [('train', ['--help_settings=trainer']), ('train', ['--help_settings=nothing-like-it'])]
  (folder / 'document.txt').write_text('Fact: the house is red.\n' * 9)

  def write(body):
    texts = [f'What is {body["seed"]}-{number}?' for number in range(body['n'])]
    return Answer({'choices': [{'message': {'content': text}, 'finish_reason': 'stop'} for text in texts]})

  with Server(write) as server:
    flags = [f'--config={config}', f'--document={folder}/document.txt', '--count=4', '--per_window=2']
    flags += [f'--output={folder}/pool.jsonl', f'--endpoint_url={server.url}/v1', '--endpoint_model=author']
    commands.append(('synthesize', [*flags, '--config.data.max_prompt_length=128']))
    *done, written = tiny.launch_many(commands, cache=folder / 'no_cache')
  assert written.returncode == 0 and '4 messages were drawn.' in written.stderr, written.stderr
  return folder, cases, dict(zip(cases, done[: len(cases)], strict=True)), done[len(cases) :]


def test_an_endpoint_writes_prompts(quick_ends):
  """What it is asked: tests/inference/test_endpoint_writer.py."""
  rows = [json.loads(line) for line in (quick_ends[0] / 'pool.jsonl').read_text().splitlines()]
  assert len(rows) == 4 and all(re.fullmatch(r'What is \d+-[01]\?', row['prompt'][0]['content']) for row in rows)


def test_wrong_input_ends_with_one_sentence_and_code_2(quick_ends):
  folder, cases, ended, _ = quick_ends
  for name, (_, sentence) in cases.items():
    done = ended[name]
    lines = [line for line in done.stderr.splitlines() if line.strip()]
    assert done.returncode == 2, (name, done.returncode, done.stderr)
    assert sentence in done.stderr, (name, done.stderr)
    assert len(lines) == 1, (name, done.stderr)
    assert done.stdout == '', name
  assert not (folder / 'never' / 'checkpoints').exists()
  assert not (folder / 'no_cache').exists(), 'a program was compiled'


def test_training_ends_with_a_table_and_the_next_commands(folder, run):
  run = run['train']
  assert f'the run is in {folder}/run' in run.stdout
  assert 'parity/mean@2' in run.stdout
  for name in ('evaluate', 'sample', 'export'):
    assert f'python -m launch.{name}' in run.stdout
  assert 'step 1/2' in run.stderr and 'tokens/s' in run.stderr
  assert 'WARNING: alarms.max_rollbacks=5 has no effect with alarms.rules=[]' in run.stderr
  tables = [line for line in run.stderr.splitlines() if line.startswith('──')]
  assert tables == [f'── step 2, sample {number} of 3 ──' for number in (1, 2, 3)]


def test_the_printed_commands_work(folder, run):
  _, reported, looked, *done, again, odd = (done for name, done in run.items() if name not in ('full disk', 'compare'))
  assert [command.returncode for command in done] == [0] * 5, [command.stderr for command in done]
  assert done[1].stdout == done[2].stdout != ''
  assert looked.returncode == 0 and looked.stderr == '' and '⟦<|im_end|>⟧' in looked.stdout, looked.stdout
  assert odd.returncode == 1 and 'optimizer.lr=0: nothing is learned' in odd.stdout
  metrics = json.loads((folder / 'run.json').read_text())
  assert metrics == json.loads((folder / 'model.json').read_text())
  assert {'mean@2', 'best@2', 'maj@2'} <= set(metrics['parity'])
  lines = (folder / 'run' / 'metrics.jsonl').read_text().splitlines()
  assert metrics['parity']['mean@2'] == json.loads(lines[-1])['eval/parity/mean@2']
  samples = [json.loads(line) for line in (folder / 'run.samples.jsonl').read_text().splitlines()]
  assert len(samples) == 4 and {'prompt', 'completion', 'score', 'feedback'} <= set(samples[0])
  assert again.returncode == 2 and 'is not empty' in again.stderr
  page = (folder / 'run' / 'report.html').read_text()
  assert (
    reported.returncode == 0 and 'step 2; 16 rollouts; 0.' in reported.stderr and page.startswith('<!doctype html>')
  )


def test_runs_are_compared_by_their_names_as_words(folder, run):
  done, found = run['compare'], json.loads((folder / 'c.json').read_text())
  assert (done.returncode, done.stderr) == (0, '') and set(found['metrics']) == {
    'eval/parity/mean@2',
    'eval/parity/acc/mean@2',
  }
  assert list(found['arms']['arm 1']['runs'].values()) == [f'{folder}/run'] and f'{folder}/run' in done.stdout


def test_rollouts_have_their_tokens_and_what_else_was_likely(folder, run):
  lines = [json.loads(line) for line in (folder / 'run' / 'rollouts' / '2.jsonl').read_text().splitlines()]
  for line in lines:
    taught, top = line['teacher_prompt'] is not None, line['top_tokens']
    assert len(line['tokens']) == len(top['student']['own']) > 0
    assert (top['teacher'] is not None) == taught
    for side in (top['student'], top['teacher']) if taught else (top['student'],):
      assert {len(ids) for ids in side['ids']} == {3} and {str(id) for ids in side['ids'] for id in ids} <= top[
        'texts'
      ].keys()
    if taught:
      assert len(line['divergence']) == len(line['tokens'])
  assert any(line['teacher_prompt'] for line in lines)
  metrics = [json.loads(line) for line in (folder / 'run' / 'metrics.jsonl').read_text().splitlines()]
  assert [line.get('programs/compiled') for line in metrics] == [0] * len(metrics)


@pytest.mark.slow
def test_a_run_on_a_full_disk_says_so_in_a_sentence(folder, run):
  done = run['full disk']
  assert done.returncode == 2, done.stderr
  assert 'Traceback' not in done.stderr and 'never awaited' not in done.stderr
  start, end = 'A checkpoint could not be written to ', ' start the same command again; it resumes from step '
  [step] = re.findall(rf'{start}.*{end}(\d+)\.', done.stderr)
  # How much of the run fits is the storage library's business.
  saved = [int(path.name) for path in (folder / 'full' / 'checkpoints').iterdir() if path.name.isdigit()]
  assert int(step) == max(saved, default=0)


def test_writes_that_end_after_a_failed_one_are_silent(monkeypatch):
  """As Orbax does it: one write fails, the event loop is closed, and TensorStore calls back into it from its
  threads.
  """
  reported, pending = [], []
  monkeypatch.setattr(sys, 'unraisablehook', reported.append)

  async def write(store):
    pending.append(store.write(np.ones((1000, 1000), np.float32)))
    await pending[-1]

  async def fail_beside(store):
    for _ in range(4):
      asyncio.ensure_future(write(store))
    await asyncio.sleep(0)
    raise OSError('full')

  def break_off():
    specification = {'driver': 'zarr', 'kvstore': {'driver': 'memory'}}
    store = tensorstore.open(specification, create=True, dtype=tensorstore.float32, shape=[1000, 1000]).result()
    loop = asyncio.new_event_loop()
    with pytest.raises(OSError, match='full'):
      loop.run_until_complete(fail_beside(store))
    loop.close()
    while pending:
      pending.pop().result()

  for _ in range(50):  # A write may end before the loop is closed.
    break_off()
    if reported:
      break
  assert {str(unraisable.exc_value) for unraisable in reported} == {'Event loop is closed'}
  reported.clear()
  monkeypatch.setattr(sys, 'unraisablehook', command.without_late_writers(reported.append))
  break_off()
  assert reported == []
  sys.unraisablehook(types.SimpleNamespace(exc_value=RuntimeError('another'), object=None))
  assert len(reported) == 1


def test_a_folder_where_nothing_was_trained_takes_other_settings(folder):
  workdir = folder / 'fresh'
  workdir.mkdir()
  (workdir / 'config.json').write_text('{"optimizer": {"lr": 7.0}}')
  workdirs.check_workdir(quickstart.get_config(), workdir)
  (workdir / 'metrics.jsonl').write_text('{"step": 0}\n')
  with pytest.raises(UserError, match='optimizer.lr was 7.0'):
    workdirs.check_workdir(quickstart.get_config(), workdir)


def test_ungraded_samples_are_named_beside_the_numbers_of_the_others():
  def lines(*fractions):
    found = {
      step: {'eval/x/mean@2': 1.0, 'eval/x/questions': 4.0, 'eval/x/ungraded_fraction': fraction}
      for step, fraction in enumerate(fractions)
    }
    return [
      line.split()
      for line in closing_text.summary(loop.Result(epath.Path('a'), 1, False, found, 'q'), 'c.py').splitlines()
    ]

  assert ['x/mean@2', '100.0%', '100.0%'] in lines(0.0, 0.375)
  assert ['x/ungraded_fraction', '0.0%', '37.5%'] in lines(0.0, 0.375)
  assert not [line for line in lines(0.0, 0.0) if line[:1] == ['x/ungraded_fraction']]


def test_the_divergences_that_evaluations_measured_are_shown_at_the_end():
  found = {
    0: {'eval/x/mean@2': 0.0, 'eval/x/kl_on_student': 3.5},
    4: {'eval/x/mean@2': 1.0, 'eval/x/kl_on_student': 0.01234, 'eval/x/kl_on_teacher': 0.5},
  }
  text = closing_text.summary(loop.Result(epath.Path('a'), 4, False, found, 'q'), 'c.py')
  assert ['x/kl_on_student', '3.5000', '0.0123'] in [line.split() for line in text.splitlines()]
  assert ['x/kl_on_teacher', '–', '0.5000'] in [line.split() for line in text.splitlines()]


@pytest.mark.parametrize('trained', ['model', 'adapter', 'cartridge'])
def test_the_last_command_names_what_it_exports(trained):
  result = loop.Result(epath.Path('runs/a'), 2, False, {}, 'Q')
  last = closing_text.summary(result, 'c.py', trained=trained).splitlines()[-1]
  assert last == f'  python -m launch.export --workdir=runs/a --output=a_{trained}'


def test_next_commands_write_to_what_does_not_exist_yet(tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  for name in ('a_model', 'a/evaluation.json'):
    (tmp_path / name).mkdir(parents=True)
  text = closing_text.summary(loop.Result(epath.Path('a'), 7, False, {7: {'eval/x/mean@2': 0.0}}, 'Q'), 'c.py')
  assert '--output=a/evaluation_7.json\n' in text and text.endswith('--output=a_model_7')


def test_the_question_to_try_is_the_first_short_one_of_a_line():
  asked = [Example('', [{'role': 'user', 'content': text}], 'none', None, 'x') for text in ('a\nb', '$x$ = ?')]
  assert loop.short_prompt(asked) == '$x$ = ?' and loop.short_prompt(asked[:1]) == '…'


def test_next_commands_are_quoted_and_repeat_the_settings():
  result = loop.Result(epath.Path('a b'), 3, False, {0: {'eval/x/mean@2': 0.0}, 3: {'eval/x/mean@2': 1.0}}, "it's")
  text = closing_text.summary(result, 'c.py', [('optimizer.lr', '1')])
  evaluate, report, sample, _ = [shlex.split(line) for line in text.splitlines() if line.startswith('  python')]
  assert evaluate[2:] == [
    'launch.evaluate',
    '--config=c.py',
    '--config.optimizer.lr=1',
    '--workdir=a b',
    '--output=a b/evaluation.json',
  ]
  assert report[2:] == ['launch.report', '--workdir=a b']
  assert sample[3:] == ['--workdir=a b', "--prompt=it's", '--temperature=0']
  stopped = loop.Result(epath.Path('x'), 0, True, {}, '')
  assert 'starts again' in closing_text.summary(stopped, 'c.py')


def test_settings_of_which_only_the_beginning_is_read_end_quietly(monkeypatch):
  reading, writing = os.pipe()
  os.close(reading)
  with os.fdopen(writing, 'w') as unread:
    monkeypatch.setattr('sys.stdout', unread)
    with pytest.raises(SystemExit) as ended:
      command.parse(['launch.train', '--help_settings'])
  assert ended.value.code == 141


def test_no_sentence_controls_the_terminal(capsys):
  with pytest.raises(SystemExit) as ended:
    command.parse(['launch.train', '--fl\x1b[2Jag=1'])
  said = capsys.readouterr().err
  assert ended.value.code == 2 and 'fl\\x1b[2Jag' in said and said.count('\n') == 1 and '\x1b' not in said


def test_the_list_of_commands_of_which_only_the_beginning_is_read_ends_quietly():
  program = 'import sys; from sdpo_jax.launch import main; sys.argv = ["sdpo"]; main()'
  reading, writing = os.pipe()
  os.close(reading)
  listed = subprocess.run([sys.executable, '-uc', program], stdout=writing, stderr=subprocess.PIPE, check=False)
  os.close(writing)
  assert (listed.returncode, listed.stderr) == (-signal.SIGPIPE, b'')


@pytest.mark.parametrize(
  ('error', 'code', 'said'), [('', 141, ''), ("raise BrokenPipeError('of a socket')", 1, 'of a s')]
)
def test_a_command_whose_reader_is_gone_ends_quietly_and_no_other_broken_pipe_does(error, code, said):
  program = f'from sdpo_jax import command\ndef main():\n  print(1)\n  {error}\ncommand.run(main)'
  reading, writing = os.pipe()
  if not error:
    os.close(reading)
  ended = subprocess.run(
    [sys.executable, '-c', program], stdout=writing, stderr=subprocess.PIPE, text=True, check=False
  )
  assert ended.returncode == code and said in ended.stderr and bool(ended.stderr) == bool(error)
  for descriptor in (writing, *([reading] if error else [])):
    os.close(descriptor)


def test_a_warning_is_a_sentence_without_process_and_line():
  names = ('sdpo_jax.x', 'a_grader', '', 'absl', 'jax.x', 'orbax.x')  # The last three are silent.
  said = f'for name in {names}: logging.getLogger(name).warning("%s is odd.", name or "root")'
  program = f'import logging\nfrom sdpo_jax import command\ndef main():\n  {said}\ncommand.run(main)'
  done = subprocess.run([sys.executable, '-c', program], capture_output=True, text=True, check=True)
  assert done.stderr.splitlines() == [f'WARNING: {name} is odd.' for name in ('sdpo_jax.x', 'a_grader', 'root')]


def test_help_is_for_newcomers(quick_ends):
  *helped, short, settings, section, unknown = quick_ends[-1]
  for name, done in zip(NAMES, helped, strict=True):
    assert f'python -m launch.{name}' in done.stdout
    assert done.returncode == 0 and done.stderr == '', name
    assert '--workdir' in done.stdout or name not in ('train', 'evaluate', 'export', 'sample')
  helped = dict(zip(NAMES, helped, strict=True))
  # What is not imported for it: see below.
  assert f'varies: {", ".join(search.SEARCHED)};' in ' '.join(helped['plan'].stdout.split())
  assert f'default {report.REPORT} in --workdir' in ' '.join(helped['report'].stdout.split())
  assert f"(default: '{probe.QUESTIONS}')" in helped['probe'].stdout
  assert (short.returncode, short.stdout) == (0, helped['train'].stdout)
  assert '--config' in helped['train'].stdout
  assert '--compare' in helped['report'].stdout and '--adapter' in helped['evaluate'].stdout
  assert '--config.actor.self_distillation.teacher_update_rate=0.05' in settings.stdout
  assert {line.split('.')[1] for line in section.stdout.splitlines() if line.startswith('--')} == {'trainer'}
  assert (unknown.returncode, unknown.stdout) == (2, '') and "no setting 'nothing-like-it'" in unknown.stderr


SLOW_HELP = ('prepare_data', 'synthesize')  # Their flags have what the rooms below declare.
_IMPORTS = """
import importlib, os, sys
from sdpo_jax import command
for name in sys.argv[1:]:
  child = os.fork()  # Flags of one name are declared once in a process.
  if child == 0:
    importlib.import_module(f'launch.{name}')
    os._exit('jax' in sys.modules)
  assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0, name
"""


def test_help_does_not_wait_for_jax():
  """It takes a third of a second instead of two and a half."""
  names = [name for name in NAMES if name not in SLOW_HELP]
  done = subprocess.run(
    [sys.executable, '-c', _IMPORTS, *names], cwd=tiny.REPOSITORY, capture_output=True, text=True, check=False
  )
  assert done.returncode == 0 and len(names) > 10, done.stderr
