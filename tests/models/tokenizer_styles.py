"""Small tokenizers in the styles of the families, with their splitting, delimiters of turns and templates."""

# ruff: noqa: E501 (templates as they are published)

from __future__ import annotations

import dataclasses
import io
import json
import pathlib

import sentencepiece
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors

SENTENCES = ['The answer is 4.', 'What is two plus two?', 'A user asks, the assistant answers.', 'Zwölf Ünïcödé x'] * 20


@dataclasses.dataclass(frozen=True)
class Style:
  """The tokenizer of a family, with its template and settings."""

  model_type: str
  template: str
  turn_end: str  # With which the template ends an answer.
  stops: tuple[str, ...]  # eos_token_id of generation_config.json.
  special: tuple[str, ...]  # Added tokens that are special.
  added: tuple[str, ...] = ()  # Others.
  settings: dict = dataclasses.field(default_factory=dict)  # tokenizer_config.json.
  pieces: dict | None = None  # Of a SentencePiece model, how it is trained; None: byte-level BPE.
  writes_bos: bool = True
  takes_system: bool = True


_CHATML = (
  "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
  "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}"
)
_INST = (
  "{{ bos_token }}{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ "
  "raise_exception('Roles must alternate: user, assistant, user, …') }}{% endif %}{% if m.role == 'user' %}{{ '[INST] "
  "' + m.content + ' [/INST]' }}{% else %}{{ ' ' + m.content + eos_token }}{% endif %}{% endfor %}"
)
_PIECES = {
  'model_type': 'bpe',
  'vocab_size': 380,
  'byte_fallback': True,
  'normalization_rule_name': 'identity',
  'remove_extra_whitespaces': False,
  'minloglevel': 2,
}
_GEMMA = {
  'pad_id': 0,
  'eos_id': 1,
  'bos_id': 2,
  'unk_id': 3,
  'pad_piece': '<pad>',
  'eos_piece': '<eos>',
  'bos_piece': '<bos>',
}

STYLES = {
  'qwen': Style(
    'qwen3',
    _CHATML
    + "{% if enable_thinking is defined and not enable_thinking %}{{ '<think>\n\n</think>\n\n' }}{% endif %}{% endif %}",
    '<|im_end|>',
    ('<|im_end|>', '<|endoftext|>'),
    ('<|endoftext|>', '<|im_start|>', '<|im_end|>'),
    ('<think>', '</think>', '<tool_call>', '</tool_call>'),
    {'tokenizer_class': 'Qwen2Tokenizer', 'eos_token': '<|im_end|>', 'pad_token': '<|endoftext|>'},
    writes_bos=False,
  ),
  'olmo': Style(
    'olmo3',
    "{% if messages[0].role != 'system' %}{{ '<|im_start|>system\nBe helpful.<|im_end|>\n' }}{% endif %}"
    + _CHATML
    + '{% endif %}',
    '<|im_end|>',
    ('<|im_end|>', '<|endoftext|>'),
    ('<|endoftext|>', '<|im_start|>', '<|im_end|>', '<|pad|>'),
    settings={
      'tokenizer_class': 'GPT2Tokenizer',
      'bos_token': '<|endoftext|>',
      'eos_token': '<|endoftext|>',
      'unk_token': '<|endoftext|>',
      'pad_token': '<|pad|>',
    },
    writes_bos=False,
  ),
  'llama': Style(
    'llama',
    "{{ bos_token }}{% for m in messages %}{{ '<|start_header_id|>' + m.role + '<|end_header_id|>\n\n' + m.content | "
    "trim + '<|eot_id|>' }}{% endfor %}{% if add_generation_prompt %}{{ "
    "'<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}",
    '<|eot_id|>',
    ('<|end_of_text|>', '<|eom_id|>', '<|eot_id|>'),
    ('<|begin_of_text|>', '<|end_of_text|>', '<|start_header_id|>', '<|end_header_id|>', '<|eom_id|>', '<|eot_id|>'),
    settings={
      'tokenizer_class': 'PreTrainedTokenizerFast',
      'bos_token': '<|begin_of_text|>',
      'eos_token': '<|eot_id|>',
    },
  ),
  'mistral': Style(  # Of SentencePiece, with a directory that has nothing else.
    'mistral',
    _INST,
    '</s>',
    ('</s>',),
    ('<s>', '</s>', '<unk>', '[INST]', '[/INST]'),
    settings={'tokenizer_class': 'LlamaTokenizer', 'add_bos_token': True},
    pieces=_PIECES | {'unk_id': 0, 'bos_id': 1, 'eos_id': 2, 'pad_id': -1, 'control_symbols': ['[INST]', '[/INST]']},
    takes_system=False,
  ),
  'tekken': Style(
    'mistral',
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'system' %}{{ '[SYSTEM_PROMPT]' + m.content + "
    "'[/SYSTEM_PROMPT]' }}{% elif m.role == 'user' %}{{ '[INST]' + m.content + '[/INST]' }}{% else %}"
    '{{ m.content + eos_token }}{% endif %}{% endfor %}',
    '</s>',
    ('</s>',),
    ('<unk>', '<s>', '</s>', '[INST]', '[/INST]', '[SYSTEM_PROMPT]', '[/SYSTEM_PROMPT]'),
    settings={
      'tokenizer_class': 'PreTrainedTokenizerFast',
      'bos_token': '<s>',
      'eos_token': '</s>',
      'unk_token': '<unk>',
    },
  ),
  'gemma': Style(  # Of SentencePiece; the delimiters of turns are symbols that a user has defined, not control tokens.
    'gemma3_text',
    "{{ bos_token }}{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    "{% for m in messages %}{{ '<start_of_turn>' + ('model' if m.role == 'assistant' else m.role) + '\n' + "
    "m.content | trim + '<end_of_turn>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}",
    '<end_of_turn>',
    ('<eos>', '<end_of_turn>'),
    ('<pad>', '<eos>', '<bos>', '<unk>', '<mask>'),
    ('<start_of_turn>', '<end_of_turn>', '▁▁', '▁▁▁▁', '<table>', '</table>'),
    settings={'tokenizer_class': 'GemmaTokenizer', 'add_bos_token': True},
    pieces=_PIECES
    | _GEMMA
    | {
      'add_dummy_prefix': False,
      'user_defined_symbols': ['<mask>', '<start_of_turn>', '<end_of_turn>', '▁▁', '▁▁▁▁', '<table>', '</table>'],
    },
    takes_system=False,
  ),
}


def make(style: str, folder: pathlib.Path) -> pathlib.Path:
  """Write all files of a model directory that concern the tokenizer, and return the directory."""
  made = STYLES[style]
  folder.mkdir(exist_ok=True)
  if made.pieces is None:
    ids = write_byte_level(folder, made)
  else:
    ids = write_pieces(folder, **made.pieces)
  write(folder, 'config.json', {'model_type': made.model_type})
  write(folder, 'generation_config.json', {'eos_token_id': [ids[token] for token in made.stops]})
  write(folder, 'tokenizer_config.json', made.settings | {'chat_template': made.template})
  return folder


def write(folder: pathlib.Path, name: str, values: dict) -> None:
  """Write a JSON file."""
  (folder / name).write_text(json.dumps(values))


def write_pieces(folder: pathlib.Path, **options) -> dict[str, int]:
  """Train a SentencePiece model, write it as tokenizer.model, and return its pieces with their ids."""
  model = io.BytesIO()
  sentencepiece.SentencePieceTrainer.train(sentence_iterator=iter(SENTENCES), model_writer=model, **options)
  (folder / 'tokenizer.model').write_bytes(model.getvalue())
  pieces = sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())
  return {pieces.id_to_piece(number): number for number in range(pieces.get_piece_size())}


def write_byte_level(folder: pathlib.Path, made: Style) -> dict[str, int]:
  """Write a tokenizer.json, whose post-processor adds the begin-of-sequence token if there is one; return its ids."""
  alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
  merges = [('t', 'h'), ('th', 'e'), ('Ġ', 'the'), ('Ġ', 'a')]
  names = [*alphabet, *(''.join(pair) for pair in merges)]
  core = Tokenizer(models.BPE(vocab={name: number for number, name in enumerate(names)}, merges=merges))
  core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
  core.decoder = decoders.ByteLevel()
  core.add_special_tokens(list(made.special))
  core.add_tokens(list(made.added))
  if made.writes_bos:
    bos = made.settings['bos_token']
    core.post_processor = processors.TemplateProcessing(
      single=f'{bos} $A', special_tokens=[(bos, core.token_to_id(bos))]
    )
  core.save(str(folder / 'tokenizer.json'))
  return core.get_vocab()
