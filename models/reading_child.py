"""The program that reads the files of a model first: started by first_reading.py, it limits its own time and memory.

It writes lines of JSON: ['reading', file] before each, ['refused', file, why] about one that takes too much, at the end
['done']; other faults are left to those who need a file. It imports neither jax nor transformers: that takes 0.1 s.
"""

from __future__ import annotations

import contextlib
import datetime
import gc
import json
import os
import pathlib
import re
import resource
import signal
import sys
from typing import Any

LARGEST_VOCABULARY = 2**20  # Tokens of a vocabulary; of the supported families, Gemma 3 has most, 2^18.
LARGEST_ADDED = 2**17  # Added tokens, which transformers handles one by one; speech models have 2^16.
LARGEST_LISTED = 2**14  # Special tokens in a list, each of which it compares with all others.
LARGEST_COUNT = 2**16  # Layers, labels, … in a config.json, from which transformers and families make lists.
LARGEST_PROMPT = 2**24  # Characters that a template may write for a probe of 100 kB.
_COUNTED = re.compile('layer|label|head|expert|depth|stage|block')
SMALL = """
  config.json generation_config.json tokenizer_config.json special_tokens_map.json added_tokens.json adapter_config.json
  base_fingerprint.json model.safetensors.index.json chat_template.jinja SHA256SUMS
""".split()
LARGE = ('merges.txt', 'vocab.json', 'tokenizer.json', 'tokenizer.model')  # The largest, of Gemma 3, has 33 MB.
TEMPLATES = 'additional_chat_templates'  # Folder with a template per file.
RENDERED = ', when its template is applied,'  # Said of a file that can be read.
_TEXTS = (
  'The answer is 42: naïve — “quoted”… ＡＢ ① ﬁ 中文字符 العربية 😀\n\n\tx ** 2  # \\frac{1}{2}',
  *(f'{text * 10_000}!' for text in ('a', ' ', '1', 'ab 1\n')),
)
_MODULES = ('model.layers.10.self_attn.q_proj', 'base_model.model.model.layers.0.mlp.down_proj')
_PROBES = ('qzx', 'xzq')  # Of chat_template.py, there and back.
_PARAMETERS = {'type': 'object', 'properties': {'x': {'type': 'number', 'description': 'A number.'}}}
_TOOLS = [{'type': 'function', 'function': {'name': 'add', 'description': 'Add.', 'parameters': _PARAMETERS}}]


class _TooLargeError(Exception):
  """A file asks for more than is read; the message says what."""


def say(*line: str) -> None:
  """Write a line of the answer."""
  print(json.dumps(line), flush=True)


def read(root: pathlib.Path, template: str | None = None) -> None:
  """Read all files of a directory, chat templates last, since some runs replace them; or a template alone."""
  if template is not None:
    with _reported(''):
      return _read_template(template, {})
  templates: dict[str, Any] = {}
  tokens: dict[str, Any] = {}
  for name in [*SMALL, *LARGE, *(f'{TEMPLATES}/{file.name}' for file in sorted((root / TEMPLATES).glob('*.jinja')))]:
    with _reported(name):
      values = _read_file(root / name)
      if name.endswith('.jinja'):
        templates[name] = values
      elif name in ('tokenizer_config.json', 'special_tokens_map.json') and isinstance(values, dict):
        templates[name] = values.get('chat_template')
        tokens |= {key: token for key, token in values.items() if key.endswith('_token') and token}
  for name, given in templates.items():  # A text, a list of {name, template}, or a dict.
    for each in given if isinstance(given, list) else given.values() if isinstance(given, dict) else [given]:
      with _reported(name + RENDERED):
        _read_template(each['template'] if isinstance(each, dict) else each, tokens)


@contextlib.contextmanager
def _reported(name: str):
  say('reading', name)
  try:
    yield
  except _TooLargeError as error:
    say('refused', name, str(error))
  except MemoryError:
    say('refused', name, f'takes more than {resource.getrlimit(resource.RLIMIT_AS)[0] >> 20} MiB of memory')
  except BaseException as error:
    # Libraries raise all kinds for files that are merely wrong, which is for those who need them to report; not panics.
    if not isinstance(error, Exception):
      say('refused', name, f'makes its reader fail ({type(error).__name__})')


def _read_file(path: pathlib.Path) -> Any:
  """Return the contents of a file, read as those who need it will; None if there is none."""
  if not os.path.exists(path):
    return None
  largest = 2**27 if path.name in LARGE else 2**24
  if not os.path.isfile(path):
    raise _TooLargeError('is no regular file')  # A pipe or a device, which may never end.
  if os.path.getsize(path) > largest:
    raise _TooLargeError(f'has {os.path.getsize(path)} bytes, and at most {largest} are read')
  if path.name == 'tokenizer.model':
    return _read_sentencepiece(path)
  values = path.read_text(encoding='utf-8')
  values = json.loads(values) if path.suffix == '.json' else values
  if path.name == 'config.json':
    _check_counts(values)
  elif path.name == 'adapter_config.json':
    _match_patterns(values)
  elif path.name == 'tokenizer.json':
    _read_tokenizer(path, values)
  elif path.name in ('vocab.json', 'added_tokens.json'):
    _check_length('it', values, LARGEST_VOCABULARY if path.name in LARGE else LARGEST_ADDED)
  elif path.name in ('tokenizer_config.json', 'special_tokens_map.json'):
    for key, value in values.items():
      if isinstance(value, dict | list):
        _check_length(repr(key[:60]), value, LARGEST_LISTED if isinstance(value, list) else LARGEST_ADDED)
  return values


def _check_length(what: str, values: Any, largest: int) -> None:
  if len(values) > largest:
    raise _TooLargeError(f'has {len(values)} tokens in {what}, and at most {largest} are read')


def _check_counts(values: Any) -> None:
  for key, value in values.items():
    if isinstance(value, dict):
      _check_counts(value)
    elif isinstance(value, int | float) and _COUNTED.search(key) and value > LARGEST_COUNT:
      raise _TooLargeError(f'says {key[:60]!r} is {str(value)[:20]}, and at most {LARGEST_COUNT} are possible')


def _match_patterns(values: dict[str, Any]) -> None:
  """Match the regular expressions of an adapter, which may take for ever, with names of modules."""
  patterns = [values.get(key) for key in ('target_modules', 'exclude_modules', 'layers_pattern')]
  patterns += [key for name in ('rank_pattern', 'alpha_pattern') for key in values.get(name) or ()]
  for pattern in patterns:
    with contextlib.suppress(re.error, TypeError):  # Of which some are lists of names.
      for module in _MODULES:
        re.match(pattern, module), re.fullmatch(rf'(.*\.)?({pattern})', module)


def _read_tokenizer(path: pathlib.Path, described: dict[str, Any]) -> None:
  import tokenizers

  model = described['model']
  _check_length('its vocabulary', model['vocab'], LARGEST_VOCABULARY)
  _check_length('added_tokens', described['added_tokens'], LARGEST_ADDED)
  try:
    # A vocabulary and its merges take time linear in their size, as JSON does, unless it is a list (unigrams).
    model['vocab'] = {text: number for text, number in model['vocab'].items() if number < 1000}
    model['vocab'].setdefault(model.get('unk_token') or '', 0)
    model.update({'merges': []} if 'merges' in model else {})
    tokenizer = tokenizers.Tokenizer.from_str(json.dumps(described))
  except Exception:  # As the library raises.
    tokenizer = tokenizers.Tokenizer.from_file(str(path))
  patterns = re.findall(r'"(?:String|Regex)":\s*("(?:[^"\\]|\\.)*")', json.dumps(described['normalizer']))
  for text in [*_TEXTS, *map(json.loads, patterns)]:  # A normaliser may lie in wait for what its patterns name.
    tokenizer.decode(tokenizer.encode(text).ids)


def _read_sentencepiece(path: pathlib.Path) -> None:
  import sentencepiece

  pieces = sentencepiece.SentencePieceProcessor(model_file=str(path))
  count = pieces.get_piece_size()
  _check_length('its vocabulary', range(count), LARGEST_VOCABULARY)
  # All ways to split each piece in two are tried, which takes time quadratic in its length.
  if sum(len(pieces.id_to_piece(number)) ** 2 for number in range(count)) > 2**29:
    raise _TooLargeError('has pieces of too many characters')
  for text in _TEXTS:
    pieces.decode(pieces.encode(text))


def _read_template(text: str | None, tokens: dict[str, Any]) -> None:
  """Render a chat template for conversations of all shapes, in the environment that transformers renders it in.

  Messages also spell the template's own texts, since a template may lie in wait for one; and those with which commands
  try a template (chat_template.py), which must not be the first to see it hang.
  """
  if not text:
    return
  import jinja2
  import jinja2.ext
  import jinja2.sandbox

  def refuse(message):
    raise jinja2.TemplateError(message)

  environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
    trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols]
  )
  environment.filters['tojson'] = lambda value, **options: json.dumps(value, **{'ensure_ascii': False} | options)
  environment.globals |= {'raise_exception': refuse, 'strftime_now': datetime.datetime.now().strftime}
  text = re.sub(r'{%-?\s*(end)?generation\s*-?%}', '', text)  # Blocks that transformers adds, for masks.
  constants = environment.parse(text).find_all(jinja2.nodes.Const)
  spelled = [node.value for node in constants if isinstance(node.value, str)]
  template = environment.from_string(text)
  options = {'add_generation_prompt': True, 'tools': None, 'documents': None, 'bos_token': '<s>', 'eos_token': '</s>'}
  options |= {name: token.get('content') if isinstance(token, dict) else token for name, token in tokens.items()}
  for messages in _conversations(spelled):
    for more in ({}, {'tools': _TOOLS}, {'enable_thinking': False, 'add_generation_prompt': False}):
      length = 0
      try:
        length = sum(map(len, template.generate(messages=messages, **options | more)))
      except Exception as error:  # Templates refuse what they were not made for, in any way.
        if isinstance(error, MemoryError):
          raise
      if length > LARGEST_PROMPT:
        raise _TooLargeError(f'writes more than {LARGEST_PROMPT} characters for a conversation of 100 kB')


def _conversations(spelled: list[str]) -> list[list[dict[str, Any]]]:
  def turns(*contents: str) -> list[dict[str, Any]]:
    return [{'role': ('user', 'assistant')[place % 2], 'content': text} for place, text in enumerate(contents)]

  system = {'role': 'system', 'content': 'Be brief.'}
  calls = [{'type': 'function', 'function': {'name': 'add', 'arguments': {'x': 1}}}]
  used = {'role': 'assistant', 'content': '', 'tool_calls': calls}, {'role': 'tool', 'name': 'add', 'content': '1'}
  return [
    turns('x'),
    *(turns(probe) for probe in _PROBES),
    *([system | {'content': probe}, *turns(probe[::-1])] for probe in _PROBES),
    [{'role': 'assistant', 'content': 'x'}],
    [system, *turns('x')],
    [*turns('x', '<think>\ny\n</think>\n\nz')],
    [system, *turns('x'), *used, *turns('x')],
    turns(*('word ' * 300 for _ in range(65))),
    turns('word ' * 20_000),
    turns(' '.join(spelled)),
    turns(*spelled[:512], *['x'] * (1 - len(spelled[:512]) % 2)),
  ]


if __name__ == '__main__':
  signal.signal(signal.SIGXCPU, signal.SIG_DFL)  # The owner may ignore it, and children inherit that.
  gc.disable()  # Nothing here makes cycles, and collections take most of the time of parsing.
  asked = json.load(sys.stdin)
  sys.path[:] = asked['path']
  for name, most in asked['limits'].items():
    hard = resource.getrlimit(getattr(resource, name))[1]
    resource.setrlimit(getattr(resource, name), (min(most, hard % 2**64), hard))  # Without a limit, `hard` may be −1.
  say('started')
  read(pathlib.Path(asked['root']), asked['template'])
  say('done')
  os._exit(0)  # Freeing memory takes as long as reading did.
