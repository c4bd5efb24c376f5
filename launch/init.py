"""Makes a config, a grader and rows from your data and a model, and checks them.

  python -m launch.init --data=my.csv --model=configs/quickstart_model
  python -m launch.train --config=my/config.py

The rows may be questions with answers, multiple choice, or rows as docs/data.md describes them, in a file (.csv,
.json, .jsonl, .parquet, or .txt with a prompt per line), or hf:OWNER/NAME?split=… or hf:FOLDER. Columns are recognised
by their usual names. Prints what launch.check says of the result and the next command. No file that exists is touched.

Exit codes: 0 the folder is there, and a run of it would start; 2 bad input, or what was written needs mending, named in
a sentence.
"""

from absl import flags

from sdpo_jax import command

DATA = flags.DEFINE_string('data', None, 'File of rows, local or gs://, or hf:OWNER/NAME?split=….', required=True)
MODEL = flags.DEFINE_string(
  'model', None, 'Hugging Face model: a directory, local or gs://…, or a name on the hub.', required=True
)
OUTPUT = flags.DEFINE_string('output', None, 'Folder to make; it must not exist. Named after the data if unset.')
PROMPT_COLUMN = flags.DEFINE_string('prompt_column', None, 'Column with the question, where it is not recognised.')
ANSWER_COLUMN = flags.DEFINE_string(
  'answer_column', None, 'Column with the right answer, where it is not recognised; --answer_column= if there is none.'
)


def main() -> None:
  """Write the folder, check it, and print the command that trains."""
  from sdpo_jax.preflight import starter  # Takes seconds, which --help need not wait for.

  starter.start(DATA.value, MODEL.value, OUTPUT.value, (PROMPT_COLUMN.value, ANSWER_COLUMN.value), print)


if __name__ == '__main__':
  command.run(main)
