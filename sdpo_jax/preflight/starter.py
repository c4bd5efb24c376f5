"""Starter folders made from a data set and a model: a config, a grader to adapt, and split rows, all checked."""

from __future__ import annotations

from collections.abc import Callable, Sequence
import importlib.resources
import json
import os
import pathlib
import string
from typing import Any

from sdpo_jax.command_lines import command_line
from sdpo_jax.config import Config, config_files
from sdpo_jax.data import layouts, rows, sources
from sdpo_jax.data.converters import sciknoweval
from sdpo_jax.data.rows import RawRow
from sdpo_jax.errors import UserError, printable
from sdpo_jax.files import as_json, check_output, is_local
from sdpo_jax.models import exporting, huggingface, model_files
from sdpo_jax.preflight import check, prompt_lengths
from sdpo_jax.tables import counted
from sdpo_jax.training.opening import load_tokenizer

BATCH = 32  # Maximum number of questions in a batch.
HELD_OUT = 256  # Maximum number of questions in an evaluation.
RESPONSE = 1024  # Tokens of an answer, unless the model or the longest right answer requires another limit.
Columns = tuple[str | None, str | None]  # Of question and answer, as for `layouts.recognise`.


def start(data: str, model: str, output: str | None, columns: Columns, say: Callable[[str], None]) -> None:
  """Write a starter folder and check a run of it; the arguments are those of `write`.

  Raises:
    UserError: as in `write`, or a run of the folder could not start.
  """
  folder = write(data, model, output, columns, say)
  config, path = f'--config={folder / "config.py"}', str(folder / 'config.py')
  try:
    report = check.check(config_files.read(path).validate())
  except UserError as error:
    again = command_line('check', config)
    raise UserError(f'{folder}/ is written, but its run would not start (check with {again}): {error}') from error
  say(f'{report.text()}\n\nNext:\n  {command_line("train", config)}')


def write(data: str, model: str, output: str | None, columns: Columns, say: Callable[[str], None]) -> pathlib.Path:
  """Write a folder with config.py, grader.py, README.md, train.jsonl and held_out.jsonl, and return its path.

  Args:
    data: a source of rows, see `sources.read_rows`.
    model: Hugging Face model, a directory or a name on the hub.
    output: path of the new folder; None: in the working directory, named after the data.
    columns: names of the columns of question and answer; None: recognise them.
    say: called with messages for the user.

  Raises:
    UserError: the folder exists or cannot be made, or the data or the model cannot be used.
  """
  folder = pathlib.Path(output or sources.stem(data))
  if not is_local(output or '') or os.path.lexists(folder):
    raise UserError(f'--output={output or folder} is not the name of a new local folder: name one that does not exist.')
  if not str(folder).isprintable() or {'"', '\\'} & {*str(folder)}:
    shown = printable(str(folder))
    raise UserError(f'--output={shown}: name a folder without quotation marks, backslashes and unprintable letters.')
  check_output(folder)
  layout = layouts.recognise(sources.read_rows(data, '--data'), *columns)
  train, held_out = split(layout.rows)
  function = 'exact_match' if layout.answered else 'short_answer'
  config, workdir = f'--config={folder / "config.py"}', f'--workdir=runs/{folder.name}'
  beside = not os.path.isabs(model) and os.path.isdir(model)
  words: dict[str, Any] = {
    **{name: command_line(name, config) for name in ('check', 'probe', 'train')},
    'report': command_line('report', workdir),
    'evaluate': command_line('evaluate', config, workdir, f'--output={folder.name}.evaluation.json'),
    'data': printable(data).replace('\\', '/').replace('"', "'"),
    'said': layout.said.replace('\\', '').replace('"', "'"),
    'name': folder.name,
    'quoted_name': repr(folder.name),
    'model': f'beside(__file__, {os.path.relpath(model, folder)!r})' if beside else repr(model),
    'function': function,
    'grader': repr(layout.environment or function),
    'of_grader': 'built in' if layout.environment else 'of grader.py',
    **_sizes(model, layout.environment or function, train, held_out),
  }
  templates = {'config.py': 'config', 'grader.py': f'grader_{function}', 'README.md': 'readme'}
  texts = importlib.resources.files('sdpo_jax.preflight') / 'starter_files'
  files = {
    name: string.Template((texts / f'{of}.txt').read_text(encoding='utf-8')).substitute(words).encode()
    for name, of in templates.items()
  }
  for name, part in (('train.jsonl', train), ('held_out.jsonl', held_out)):
    files[name] = b''.join(as_json(row.value) + b'\n' for row in part)
  with exporting.new_directory(folder, sum(map(len, files.values()))) as partial:
    for name, content in files.items():
      (partial / name).write_bytes(content)
  say(f'{printable(data)}: {layout.said}; {counted(len(train), "row")} to train on, {len(held_out):,} held out.')
  say(f'{folder}/ has {", ".join(files)}.\n')
  return folder


def split(made: Sequence[RawRow]) -> tuple[list[RawRow], list[RawRow]]:
  """Return rows to train on and held-out rows, with a tenth of the questions but at least one.

  Raises:
    UserError: all rows have the same question.
  """
  asked = [json.dumps([row.value.get('messages'), row.value.get('prompt')], default=str) for row in made]
  questions = list(dict.fromkeys(asked))
  if len(questions) < 2:
    raise UserError('--data holds a single question: at least two are needed, one to train on and one to hold out.')
  chosen = {questions[place] for place in sciknoweval.split(len(questions))[1]}
  kept = [(row, question in chosen) for row, question in zip(made, asked, strict=True)]
  return [row for row, held in kept if not held], [row for row, held in kept if held]


def _sizes(model: str, environment: str, train: Sequence[RawRow], held_out: Sequence[RawRow]) -> dict[str, Any]:
  """Return values for the config template that follow from the rows, the tokenizer and the model."""
  root = model_files.resolve(model, weights=False, setting='--model')
  config = Config()
  config.model.path = str(root)
  tokenizer, described = load_tokenizer(config), model_files.read_json(root, 'config.json')
  examples = [rows.example(row, 'train', default_environment=environment) for row in (*train, *held_out)]
  lengths = [len(tokens) for tokens in prompt_lengths.student_tokens(tokenizer, examples, config)]
  answers = tokenizer([str(row.value.get('answer', '')) for row in train], add_special_tokens=False)['input_ids']
  positions = huggingface.positions(described) or 2**20
  prompt = min(_rounded(max(lengths)), positions // 2)
  response = min(max(RESPONSE, _rounded(2 * max(map(len, answers)))), positions // 4)
  sd, batch = config.actor.self_distillation, min(BATCH, len(train))
  templates = len(tokenizer.encode(sd.reprompt_template + sd.solution_template + sd.feedback_template))
  return {
    'dtype': repr('float32' if 'float32' in (described.get('dtype'), described.get('torch_dtype')) else 'bfloat16'),
    'evaluated': min(HELD_OUT, len(held_out)),
    'batch': batch,
    'longest': max(lengths),
    'filters': max(lengths) > prompt,
    'prompt': prompt,
    'response': response,
    'reprompt': min(_rounded(prompt + response + templates), positions - response),
    'epochs': f'{100 * batch / len(train):.3g}',
  }


def _rounded(tokens: int) -> int:
  """Return `tokens` rounded up to a multiple of 16, or of 128 if there are more than 256."""
  step = 16 if tokens <= 256 else 128
  return -(-tokens // step) * step
