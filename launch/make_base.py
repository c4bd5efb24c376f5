"""Makes a tiny base model for the quickstarts, or a document.

  python -m launch.make_base --config=configs/quickstart.py --output=/tmp/base
  python -m launch.make_base --config=configs/session_quickstart.py --output=/tmp/base
  python -m launch.make_base --task=facts --config=configs/facts.py --output=/tmp/base
  python -m launch.make_base --task=document --seed=1 --config=configs/facts.py --output=/tmp/document.txt

The model is trained from scratch, in a few CPU-minutes for the quickstart. The same seed gives the same model with the
same versions on the same machine, and an equally good one elsewhere.
"""

import pathlib

from absl import flags

from sdpo_jax import command
from sdpo_jax.errors import UserError
from sdpo_jax.files import check_output, write_output

OUTPUT = flags.DEFINE_string(
  'output',
  None,
  'New directory for the model, model.path of the config if unset; or text file for the document.',
)
TASK = flags.DEFINE_enum(
  'task',
  None,
  ['digits', 'facts', 'session', 'document'],
  'digits: the model of the quickstart, which misreads its instructions; facts: one that answers questions about a '
  'document in its context; session: one that proposes tool calls and reads corrections; document: no model, but a '
  'text file with such a document, to train a cartridge on. Unset: as model.path of the config is named, or digits.',
)
STEPS = flags.DEFINE_integer(
  'steps', None, 'Optimizer steps; as many as for the shipped model if unset.', lower_bound=1
)
SEED = flags.DEFINE_integer(
  'seed', 0, 'Seed of the initial weights and the training data, or of the document.', lower_bound=0
)
command.define_config()

_TASK_OF = {'facts_model': 'facts', 'session_model': 'session'}  # By the folder of the shipped model.


def main() -> None:
  """Make the model or the document, and print its path."""
  from sdpo_jax.quickstart import document_base, make_base, session_base

  config = command.load_config(trains=False)
  task = TASK.value or _TASK_OF.get(pathlib.PurePath(config.model.path).name, 'digits')
  if task == 'document':
    write_document(OUTPUT.value, SEED.value)
    return
  output = OUTPUT.value or config.model.path
  changes = {'seed': SEED.value} | ({} if STEPS.value is None else {'steps': STEPS.value})

  if task == 'facts':
    document_base.make_document_base(output, document_base.DocumentRecipe(**changes), command.announce)
  elif task == 'session':
    session_base.make_session_base(config, output, session_base.SessionRecipe(**changes), command.announce)
  else:
    make_base.make_base(config, output, make_base.DigitRecipe(**changes), command.announce)
  print(output)


def write_document(output: str | None, seed: int) -> None:
  """Write a random document to a new text file.

  Raises:
    UserError: no file is named, or it exists or cannot be written.
  """
  if output is None:
    raise UserError('--task=document needs --output: the text file to write.')
  import numpy as np

  from sdpo_jax.environments import facts

  check_output(output, overwrite=False)
  # Without a line break at the end, which would be one more token.
  write_output(output, facts.write(facts.draw(np.random.default_rng(seed))))
  print(output)


if __name__ == '__main__':
  command.run(main)
