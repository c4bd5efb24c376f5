"""Answers prompts with a run or a model: one, a file, or a chat.

  python -m launch.sample --workdir=runs/quickstart --prompt="…" --temperature=0
  python -m launch.sample --workdir=runs/quickstart --prompts=questions.jsonl --n=4 --output=answers.jsonl
  python -m launch.sample --model=HF_DIR --chat
  python -m launch.sample --model=HF_DIR --adapter=DIR --prompt="…"
  python -m launch.sample --model=HF_DIR --cartridge=DIR --prompt="…"

--prompt: only the completion goes to stdout; if there are several, a line `--- completion 1 of 4 ---` precedes each.

--prompts: a .txt file has one prompt per line; other files have rows (JSON lines, a JSON array, CSV, parquet) with
`prompt`, a text or a list of messages, or `messages`; rows for training also work. The result is one JSON object per
completion, in the order of the prompts: row (line number), id (if the row has `id` or `idx`), sample (0 … n − 1),
prompt, completion, finish_reason (stop or length), tokens, log_prob (sum over the tokens, at temperature 1). During
sampling, --output holds completions in the order in which they finish, so that an interruption loses none. Without
--output, the objects go to stdout, each as soon as all before it are finished.

--chat: streams an answer to every line of input, and remembers the conversation. /reset forgets it; Ctrl-C ends an
answer; /exit, /quit or Ctrl-D ends the chat; /help lists these. Only answers go to stdout.

The same prompt, settings and seed give the same completions: --prompt gives those of the first row of --prompts and,
for --n=1, the first answer of --chat.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from typing import TYPE_CHECKING

from absl import flags

from sdpo_jax import command
from sdpo_jax.config import SamplingConfig
from sdpo_jax.errors import UserError

if TYPE_CHECKING:  # Imported where they are used, so that --help does not wait for them.
  from sdpo_jax.inference import generate

flags.DEFINE_string('workdir', None, 'Directory of a run; its newest checkpoint answers.')
flags.DEFINE_integer('step', None, 'Step of the checkpoint that answers instead.', lower_bound=1)
flags.DEFINE_string(
  'model', None, 'Hugging Face model instead of a run: a directory, local or gs://…, or a name on the hub.'
)
command.define_adapter('It goes with the --model that it was trained on.')
command.define_cartridge('It goes with the --model that it was trained for.')
command.define_positions()
PROMPT = flags.DEFINE_string('prompt', None, 'What the user says.')
PROMPTS = flags.DEFINE_string(
  'prompts', None, 'File of prompts instead: .txt, or rows as .jsonl, .json, .csv or .parquet.'
)
CHAT = flags.DEFINE_bool('chat', False, 'Hold a conversation instead: every line of input is answered.')
OUTPUT = flags.DEFINE_string('output', None, 'With --prompts: JSON lines file to write; stdout without it.')
OVERWRITE = flags.DEFINE_bool('overwrite', False, 'Replace an --output that already exists.')
N = flags.DEFINE_integer('n', 1, 'Completions per prompt.', lower_bound=1)
flags.DEFINE_string(
  'chat_template', None, "Jinja file with a chat template; that of the run, or of the model's tokenizer, if unset."
)
SYSTEM = flags.DEFINE_string('system', None, 'System message of conversations that have none.')
flags.DEFINE_integer('max_tokens', 256, 'Maximum number of tokens of an answer.', lower_bound=1)
flags.DEFINE_integer(
  'max_prompt_length',
  None,
  "Maximum tokens of a prompt or conversation, with the chat template; the run's own limit, or 2048 for a model.",
  lower_bound=1,
)
flags.DEFINE_integer(
  'max_batch_rows', None, "Completions sampled at once; the run's own setting, or 256 for a model.", lower_bound=1
)
flags.DEFINE_float('temperature', 0.6, 'Sampling temperature; 0 is greedy.', lower_bound=0.0)
flags.DEFINE_float('top_p', 0.95, 'Keep the smallest set of tokens with this probability.', 0.0, 1.0)
flags.DEFINE_integer('top_k', -1, 'Keep the k most likely tokens; 0 or -1 keeps all.', lower_bound=-1)
flags.DEFINE_float('min_p', 0.0, 'Drop tokens less likely than this fraction of the most likely one.', 0.0, 1.0)
flags.DEFINE_integer('seed', 0, 'Seed of the sampling noise.', lower_bound=0)
flags.DEFINE_enum('dtype', None, ['float32', 'bfloat16'], "Compute dtype; the run's own, or float32 for a model.")
INTERRUPTED = 130  # Exit code after Ctrl-C, 128 + SIGINT.


def check_flags() -> None:
  """Raise UserError for flags that contradict each other."""
  if [PROMPT.value is not None, PROMPTS.value is not None, CHAT.value].count(True) != 1:
    raise UserError('Name one of --prompt="…", --prompts=FILE and --chat.')
  if PROMPT.value is not None and not PROMPT.value.strip():
    raise UserError('--prompt is empty: say something.')
  if PROMPTS.value is None and (OUTPUT.value is not None or OVERWRITE.value):
    raise UserError('--output and --overwrite go with --prompts=FILE; otherwise answers go to stdout.')
  if CHAT.value and N.value > 1:
    raise UserError(f'--n={N.value}: a --chat has one answer per turn; leave --n out.')


def write_answer(generator: generate.TextGenerator) -> None:
  """Write the completions of --prompt to stdout."""
  from sdpo_jax.inference.generate import with_system

  texts = generator.generate(with_system([{'role': 'user', 'content': PROMPT.value}], SYSTEM.value))
  for number, text in enumerate(texts, start=1):
    if len(texts) > 1:
      sys.stdout.write(f'--- completion {number} of {len(texts)} ---\n')
    sys.stdout.write(text + '\n')


def write_answers(generator: generate.TextGenerator, questions: list[generate.Question]) -> None:
  """Write the completions of --prompts to --output, or to stdout."""
  from sdpo_jax.inference import answer_files
  from sdpo_jax.inference.generate import generate_all

  records = generate_all(generator, questions, command.announce)
  if OUTPUT.value is None:
    answer_files.write_in_order(sys.stdout, records)
  else:
    answer_files.write_to_file(OUTPUT.value, records)


def hold_chat(generator: generate.TextGenerator) -> None:
  """Answer lines of input until the user ends the chat."""
  from sdpo_jax.inference import chat

  read = input
  if sys.stdin.isatty() and sys.stdout.isatty():
    with contextlib.suppress(ImportError):  # With readline, lines can be edited.
      import readline  # noqa: F401
    read = functools.partial(input, '> ')
  chat.converse(chat.Chat(generator, SYSTEM.value, command.announce), read, sys.stdout, command.announce)


def main() -> int | None:
  """Answer --prompt, --prompts or a --chat; return `INTERRUPTED` after Ctrl-C."""
  from sdpo_jax.inference import answer_files, generate
  from sdpo_jax.inference.runs import RunOrModel

  check_flags()
  questions = None if PROMPTS.value is None else generate.read_questions(PROMPTS.value, SYSTEM.value)
  if OUTPUT.value is not None:
    answer_files.check_answer_file(OUTPUT.value, OVERWRITE.value)
  options = command.from_flags(generate.GenerationOptions, sampling=command.from_flags(SamplingConfig))
  try:
    generator = generate.open_generator(command.from_flags(RunOrModel), options)
    if questions is not None:
      write_answers(generator, questions)
    elif CHAT.value:
      hold_chat(generator)
    else:
      write_answer(generator)
  except KeyboardInterrupt:
    kept = f' What was finished is in {OUTPUT.value}.' if OUTPUT.value is not None else ''
    command.announce(f'Interrupted.{kept}')
    return INTERRUPTED


if __name__ == '__main__':
  command.run(main)
