"""Models of strangers: no file of theirs takes more than a little time and memory, and each is named."""

from concurrent import futures as pool
import json
import os
import resource
import shutil
import subprocess
import sys

import numpy as np
import pytest
from safetensors.numpy import save_file

from sdpo_jax.config import ModelConfig
from sdpo_jax.errors import UserError
from sdpo_jax.models import first_reading, huggingface, tokenizer
from tests import model_reading, tiny

GIB = 2**30
PATIENCE = 60.0  # Seconds of CPU time: a few are taken on a quiet machine, and without a limit all that there is.


@pytest.fixture(autouse=True)
def limited(monkeypatch):
  """Read models as commands do."""
  monkeypatch.setattr(first_reading, 'ask', model_reading.in_a_process)


@pytest.fixture(scope='module')
def honest(tmp_path_factory):
  folder = tiny.make_model(tmp_path_factory.mktemp('honest') / 'model')
  (folder / 'SHA256SUMS').unlink()  # Of which a stranger has none.
  return folder


def edit(name, **changes):
  """Return a function that changes entries of a JSON file of a directory."""

  def change(root):
    values = json.loads((root / name).read_text()) if (root / name).exists() else {}
    (root / name).write_text(json.dumps(values | changes))

  return change


def text(name, content):
  return lambda root: (root / name).write_text(content)


def sparse(name, size):
  """Return a function that makes a file of zeros that takes no space on the disk."""

  def make(root):
    with (root / name).open('wb') as file:
      file.truncate(size)

  return make


def template(code):
  return text('chat_template.jinja', code)


def of_tokenizer(**changes):
  def change(root):
    values = json.loads((root / 'tokenizer.json').read_text())
    for path, value in changes.items():
      part, *rest = path.split('__')
      if rest:
        values[part][rest[0]] = value
      else:
        values[part] = value
    (root / 'tokenizer.json').write_text(json.dumps(values))

  return change


def doubling(pattern):
  """Return a normaliser that replaces a text by two, thirty times."""
  content = pattern.get('String', 'é')
  steps = [{'type': 'Replace', 'pattern': pattern, 'content': content * 2} for _ in range(30)]
  return of_tokenizer(normalizer={'type': 'Sequence', 'normalizers': steps})


def split(expression, count):
  """Return a pre-tokenizer that splits texts by an expression several times."""
  step = {'type': 'Split', 'pattern': {'Regex': expression}, 'behavior': 'Isolated', 'invert': False}
  return {'type': 'Sequence', 'pretokenizers': [step] * count}


def header(content, length=None):
  """Return a function that makes a safetensors file of a header alone."""

  def make(root):
    data = content if isinstance(content, bytes) else json.dumps(content).encode()
    number = len(data) if length is None else length
    (root / 'model.safetensors').write_bytes(number.to_bytes(8, 'little') + data)

  return make


def tensors(change):
  """Return a function that writes the weights of a directory again, changed."""

  def make(root):
    with huggingface.open_model(root) as stored:
      values = {name: tensor.values((0, tensor.size)).reshape(tensor.shape) for name, tensor in stored.items()}
    change(values)
    save_file(values, root / 'model.safetensors')

  return make


def pieces(*some):
  """Return a function that leaves a directory a SentencePiece model with these pieces alone."""

  def make(root):
    from sentencepiece import sentencepiece_model_pb2 as proto

    model = proto.ModelProto()
    for piece, kind in (('<unk>', 2), ('<s>', 3), ('</s>', 3), *((piece, 1) for piece in some)):
      model.pieces.add(piece=piece, score=0.0, type=kind)
    (root / 'tokenizer.json').unlink()
    (root / 'tokenizer.model').write_bytes(model.SerializeToString())

  return make


def adapter(**changes):
  def make(root):
    (root / 'adapter').mkdir()
    values = {'peft_type': 'LORA', 'r': 1, 'target_modules': ['q_proj']} | changes
    (root / 'adapter' / 'adapter_config.json').write_text(json.dumps(values))
    name = 'base_model.model.model.layers.0.self_attn.q_proj.lora_{}.weight'
    shapes = {name.format('A'): (1, 32), name.format('B'): (32, 1)}
    save_file(
      {each: np.zeros(shape, 'f') for each, shape in shapes.items()}, root / 'adapter' / 'adapter_model.safetensors'
    )

  return make


LOOPS = '{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}'
TENSOR = {'dtype': 'F32', 'shape': [2], 'data_offsets': [0, 8]}
# What a stranger may publish: the file that the sentence must name, and how it is made of an honest model. Those of
# SLOW take all the time that they get.
FILES = {
  'one string of the template': ('chat_template.jinja', template("{{ 'x' * 10000000000 }}")),
  'ten gigabytes of output': (
    'chat_template.jinja',
    template("{% for a in range(10000) %}{{ 'x' * 1000000 }}{% endfor %}"),
  ),
  'a padded number': ('chat_template.jinja', template("{{ '%9999999999d' % 1 }}")),
  'a text that doubles': (
    'chat_template.jinja',
    template(
      '{% set ns = namespace(x="x") %}{% for a in range(99) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}{{ ns.x }}'
    ),
  ),
  'a template of a terabyte': ('chat_template.jinja', sparse('chat_template.jinja', 2**40)),
  'output only for tools': ('chat_template.jinja', template("{% if tools %}{{ 'x' * 10000000000 }}{% endif %}")),
  'output only for long conversations': (
    'chat_template.jinja',
    template("{% if messages|length > 60 %}{{ 'x' * 10000000000 }}{% endif %}"),
  ),
  'output only for a word': (
    'chat_template.jinja',
    template("{% if 'open sesame' in messages[0].content %}{{ 'x' * 10000000000 }}{% endif %}"),
  ),
  'a template among settings': (
    'tokenizer_config.json',
    edit('tokenizer_config.json', chat_template="{{ 'x' * 10000000000 }}"),
  ),
  'one of two templates': (
    'tokenizer_config.json',
    edit('tokenizer_config.json', chat_template={'default': '{{ 1 }}', 'tool_use': "{{ 'x' * 10000000000 }}"}),
  ),
  'one of a list of templates': (
    'tokenizer_config.json',
    edit(
      'tokenizer_config.json',
      chat_template=[{'name': 'x', 'template': '{% for'}, {'name': 'default', 'template': "{{ 'x' * 10000000000 }}"}],
    ),
  ),
  'settings of a terabyte': ('tokenizer_config.json', sparse('tokenizer_config.json', 2**40)),
  'nested settings': ('tokenizer_config.json', text('tokenizer_config.json', '[' * 10**6)),
  'settings that are a list': ('tokenizer_config.json', text('tokenizer_config.json', '[]')),
  'special tokens without end': (
    'tokenizer_config.json',
    edit('tokenizer_config.json', extra_special_tokens=[f'<{n}>' for n in range(2**14 + 1)]),
  ),
  'a pipe': ('special_tokens_map.json', lambda root: os.mkfifo(root / 'special_tokens_map.json')),
  'nested special tokens': ('special_tokens_map.json', text('special_tokens_map.json', '{"a":' * 10**6)),
  'added tokens of a terabyte': ('added_tokens.json', sparse('added_tokens.json', 2**40)),
  'more added tokens than any model has': (
    'tokenizer.json',
    lambda root: of_tokenizer(added_tokens=[{'id': n, 'content': f'<{n}>', 'special': True} for n in range(2**17 + 1)])(
      root
    ),
  ),
  'a normaliser that waits for a letter': ('tokenizer.json', doubling({'String': 'ž'})),
  'a normaliser that waits for an expression': ('tokenizer.json', doubling({'Regex': '[é]'})),
  'an expression that ends the library': ('tokenizer.json', of_tokenizer(pre_tokenizer=split('(a+)+$', 1))),
  'a billion tokens of padding': (
    'tokenizer.json',
    of_tokenizer(
      padding={
        'strategy': {'Fixed': 10**9},
        'direction': 'Right',
        'pad_to_multiple_of': None,
        'pad_id': 0,
        'pad_type_id': 0,
        'pad_token': '!',
      }
    ),
  ),
  'a tokenizer of a terabyte': ('tokenizer.json', sparse('tokenizer.json', 2**40)),
  'a nested tokenizer': ('tokenizer.json', text('tokenizer.json', '{"model":' * 10**6)),
  'a billion layers': ('config.json', edit('config.json', num_hidden_layers=10**9)),
  'a number of 4,000 digits of layers': ('config.json', edit('config.json', num_hidden_layers=10**4000)),
  'a number of 5,000 digits': ('config.json', text('config.json', f'{{"num_hidden_layers": 1{"0" * 5000}}}')),
  'a billion labels': ('config.json', edit('config.json', num_labels=10**9)),
  'a wide model': ('config.json', edit('config.json', hidden_size=2**40, head_dim=8)),
  'a huge vocabulary': ('config.json', edit('config.json', vocab_size=2**60)),
  'a nested config': ('config.json', text('config.json', '{"a":' * 10**6)),
  'a config of a terabyte': ('config.json', sparse('config.json', 2**40)),
  'a nested generation config': ('generation_config.json', text('generation_config.json', '{"a":' * 10**6)),
  'a generation config of many ids': (
    'generation_config.json',
    text('generation_config.json', '{"eos_token_id": [' + '1,' * 2**23 + '1]}'),
  ),
  'a header of an exabyte': ('model.safetensors', header(b'{}', 2**60)),
  'a header of many lists': ('model.safetensors', header(b'{"a":[' + b'[],' * 2**23 + b'[]]}')),
  'overlapping tensors': ('model.safetensors', header({'a': TENSOR, 'b': TENSOR})),
  'a tensor beyond the end': ('model.safetensors', header({'a': TENSOR | {'data_offsets': [0, 2**62]}})),
  'a tensor of a million axes': ('model.safetensors', header({'a': TENSOR | {'shape': [2**62] * 10**6}})),
  'a tensor of another shape': (
    'model.safetensors',
    tensors(lambda values: values.update({'model.norm.weight': np.zeros(33, 'f')})),
  ),
  'a missing tensor': ('config.json', tensors(lambda values: values.pop('model.norm.weight'))),
  'an index of a terabyte': ('model.safetensors.index.json', sparse('model.safetensors.index.json', 2**40)),
  'an index that leads outside': (
    'model.safetensors.index.json',
    edit('model.safetensors.index.json', weight_map={'a': '../../etc/x.safetensors'}),
  ),
  'a SentencePiece model of a terabyte': (
    'tokenizer.model',
    lambda root: [pieces('a')(root), sparse('tokenizer.model', 2**40)(root)],
  ),
  'an adapter of a billion ranks': ('adapter_model.safetensors', adapter(r=10**9, layers_to_transform=[0])),
  'blocks in blocks': ('chat_template.jinja', template('{% for a in [1] %}' * 50 + 'x' + '{% endfor %}' * 50)),
  'a model type of a megabyte': ('config.json', edit('config.json', model_type='x' * 10**6)),
  'sums of a terabyte': ('SHA256SUMS', sparse('SHA256SUMS', 2**40)),
}
SLOW = {
  'a number of a gigabyte': ('chat_template.jinja', template('{{ 10 ** (10 ** 10) }}')),
  'a normaliser that doubles': ('tokenizer.json', doubling({'String': 'a'})),
  'a vocabulary of a million': (
    'tokenizer.json',
    lambda root: of_tokenizer(model__vocab={str(n): n for n in range(2**20 + 1)})(root),
  ),
  'layers without tensors': ('config.json', edit('config.json', num_hidden_layers=60_000)),
  'a long SentencePiece': ('tokenizer.model', pieces(*('a' * 4000 + chr(97 + n) for n in range(60)))),
  'loops of a template': ('chat_template.jinja', template(LOOPS)),
  'loops only without thinking': (
    'chat_template.jinja',
    template('{% if enable_thinking is defined and not enable_thinking %}' + LOOPS + '{% endif %}'),
  ),
  'loops with a token': ('chat_template.jinja', template('{% if eos_token %}' + LOOPS + '{% endif %}')),
  'loops with a token of the model': (
    'chat_template.jinja',
    lambda root: [
      edit('tokenizer_config.json', pad_token='<p>')(root),
      template('{% if pad_token is defined and pad_token == "<p>" %}' + LOOPS + '{% endif %}')(root),
    ],
  ),
  'loops with documents': ('chat_template.jinja', template('{% if documents is defined %}' + LOOPS + '{% endif %}')),
  'loops with what commands try': (
    'chat_template.jinja',
    template("{% if 'q' ~ 'zx' in messages[0].content %}" + LOOPS + '{% endif %}'),
  ),
  'macros that call themselves twice': (
    'chat_template.jinja',
    template('{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}'),
  ),
  'loops of another template': (
    'additional_chat_templates/tool_use.jinja',
    lambda root: [
      (root / 'additional_chat_templates').mkdir(),
      text('additional_chat_templates/tool_use.jinja', LOOPS)(root),
    ],
  ),
  'an expression that backtracks': (
    'adapter_config.json',
    adapter(target_modules='(([a-z_.0-9])+)+!'),
  ),
  'thousands of expressions': ('tokenizer.json', of_tokenizer(pre_tokenizer=split('a', 2000))),
}


def read(root):
  """Read all of a model as commands do."""
  found = tokenizer.load(root)
  tokenizer.stop_token_ids(root, found)
  config = ModelConfig()
  if (root / 'adapter').exists():
    config.lora.path = str(root / 'adapter')
  return huggingface.load(root, config)


def cpu_s():
  return sum(sum(resource.getrusage(who)[:2]) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))


def check(root, name, make):
  """Check that reading a model ends within limits in a sentence that names a file."""
  make(root)
  begun = cpu_s()
  with pytest.raises(UserError) as ended:
    read(root)
  message = str(ended.value)
  assert cpu_s() - begun < PATIENCE
  assert f'{root}' in message and name in message and len(message) < 600 and message.endswith('.'), message


# A file of each kind, for every run of the tests.
SAMPLE = """
  one string of the template, output only for a word, a template among settings, settings of a terabyte, a pipe,
  special tokens without end, an expression that ends the library, a billion tokens of padding, a billion layers,
  a wide model, overlapping tensors, a missing tensor, an adapter of a billion ranks
"""
SAMPLE = {' '.join(name.split()) for name in SAMPLE.split(',')}


@pytest.mark.parametrize(
  'name', [pytest.param(name, marks=() if name in SAMPLE else pytest.mark.slow) for name in FILES]
)
def test_files_of_strangers_are_refused_by_name(name, honest, tmp_path, monkeypatch):
  monkeypatch.setattr(first_reading, 'MEMORY', GIB // 4)
  check(shutil.copytree(honest, tmp_path / 'model'), *FILES[name])


@pytest.mark.slow
@pytest.mark.parametrize('name', SLOW)
def test_what_takes_long_is_refused_by_name(name, honest, tmp_path, monkeypatch):
  monkeypatch.setattr(first_reading, 'CPU_S', 1)
  check(shutil.copytree(honest, tmp_path / 'model'), *SLOW[name])


# What a command and its children took: seconds of CPU time, and kilobytes.
USED = """used = resource.getrusage(resource.RUSAGE_CHILDREN)
print(code, used.ru_utime + used.ru_stime, used.ru_maxrss)
"""


@pytest.mark.slow
def test_a_command_ends_in_time_and_memory(honest, tmp_path):
  root = shutil.copytree(honest, tmp_path / 'model')
  file, make = SLOW['loops of a template']
  make(root)
  command = tiny.command('sample', f'--model={root}', '--prompt=x')
  with open(tmp_path / 'said', 'w') as said:
    # A small process starts it: what this one takes would count as the command's.
    starter = f'import resource, subprocess; code = subprocess.call({command!r})\n{USED}'
    ran = subprocess.run(
      [sys.executable, '-c', starter],
      stdout=subprocess.PIPE,
      stderr=said,
      cwd=tiny.REPOSITORY,
      env=tiny.environment(),
      check=True,
    )
  code, seconds, kilobytes = map(float, ran.stdout.split()[-3:])
  *_, message = (tmp_path / 'said').read_text().splitlines()
  assert code == 2 and str(root / file) in message
  assert 1 < seconds < PATIENCE and 10_000 < kilobytes < 2 * GIB // 1024


def test_at_least_31_files_are_tried():
  assert FILES.keys() > SAMPLE
  assert len({make for _, make in [*FILES.values(), *SLOW.values()]}) >= 31


def test_another_template_may_be_named_but_not_a_worse_one(honest, tmp_path, monkeypatch):
  monkeypatch.setattr(first_reading, 'MEMORY', GIB // 4)
  root = shutil.copytree(honest, tmp_path / 'model')
  template("{{ 'x' * 10000000000 }}")(root)
  (tmp_path / 'good.jinja').write_text(tiny.CHAT_TEMPLATE)
  found = tokenizer.load(root, chat_template=tmp_path / 'good.jinja')
  assert found.chat_template == tiny.CHAT_TEMPLATE
  with pytest.raises(UserError, match=r'model\.chat_template=.*/model/chat_template\.jinja takes more than 256 MiB'):
    tokenizer.load(honest, chat_template=root / 'chat_template.jinja')


def test_a_directory_is_read_once_until_it_changes(honest, tmp_path, monkeypatch):
  started, run = [], subprocess.run
  monkeypatch.setattr(subprocess, 'run', lambda command, **options: started.append(command) or run(command, **options))
  root = shutil.copytree(honest, tmp_path / 'model')
  for _ in range(2):
    read(root)
  assert len(started) == 1
  template(tiny.CHAT_TEMPLATE + '\n')(root)
  with pool.ThreadPoolExecutor(1) as threads:  # As servers load models.
    threads.submit(read, root).result()
  assert len(started) == 2


def test_the_process_imports_few_modules_and_what_ends_it_otherwise_is_no_fault_of_a_file(
  honest, tmp_path, monkeypatch
):
  run = subprocess.run

  def watched(command, **options):
    done = run([command[0], '-X', 'importtime', *command[1:]], **options)
    (tmp_path / 'imported').write_bytes(done.stderr)
    return done

  monkeypatch.setattr(subprocess, 'run', watched)
  first_reading.check(shutil.copytree(honest, tmp_path / 'model'))
  imported = {
    line.rpartition('|')[2].strip().partition('.')[0] for line in (tmp_path / 'imported').read_text().splitlines()
  }
  assert {'jinja2', 'tokenizers'} <= imported and not {'jax', 'transformers', 'numpy', 'sdpo_jax', 'torch'} & imported
  monkeypatch.setattr(subprocess, 'run', lambda command, **options: run(['kill', '-KILL', '0'], **options))
  with pytest.raises(RuntimeError, match=r'failed \(-9\)'):
    first_reading.check(shutil.copytree(honest, tmp_path / 'again'))
