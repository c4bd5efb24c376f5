"""Makes train.json and test.json of the paper's data sets.

  python -m launch.prepare_data --source=sciknoweval --domain=chemistry --output=datasets/sciknoweval/chemistry
  python -m launch.prepare_data --source=livecodebench --output=datasets/lcb_v6
  python -m launch.prepare_data --source=tooluse --input=ToolAlpaca/data --output=datasets/tooluse
  python -m launch.prepare_data --source=longhealth --input=benchmark_v5.json --output=datasets/longhealth
  python -m launch.prepare_data --source=mtob --input=mtob/splits --output=datasets/mtob \\
      --documents=mtob/resources/grammar_book.txt,mtob/resources/wordlist.json
  python -m launch.prepare_data --source=qasper --output=datasets/qasper \\
      --rewritten='hf:sabrieyuboglu/qasper-rewrite-gpt-4.1?split=question'

The public sources need a network; --input names a copy instead. docs/data.md describes the result of each source.
"""

import datetime

from absl import flags

from sdpo_jax import command
from sdpo_jax.data import prepare
from sdpo_jax.data.converters import mtob, raw, sciknoweval
from sdpo_jax.errors import UserError

SOURCE = flags.DEFINE_enum('source', None, list(prepare.SOURCES), 'Which data set.', required=True)
OUTPUT = flags.DEFINE_string('output', None, 'Folder to write train.json and test.json into.', required=True)
INPUT = flags.DEFINE_string('input', None, 'File, folder or hf:OWNER/NAME to read instead of the public source.')
DOMAIN = flags.DEFINE_enum('domain', None, sciknoweval.DOMAINS, 'sciknoweval: which of its domains.')
SEED = flags.DEFINE_integer('seed', raw.ConversionOptions.seed, 'gpqa: of the order of the choices.', lower_bound=0)
SINCE = flags.DEFINE_string('since', str(raw.ConversionOptions.since), 'livecodebench: first day of contests.')
PATIENTS = flags.DEFINE_list('patients', list(raw.ConversionOptions.patients), 'longhealth: whose questions.')
DIRECTION = flags.DEFINE_enum('direction', 'ke', list(mtob.PARTS), 'mtob: ke is into English, ek into Kalamang.')
DOCUMENTS = flags.DEFINE_list('documents', [], 'mtob: files to make the document of: a book, a word list, sentences.')
PAPERS = flags.DEFINE_list('papers', list(raw.ConversionOptions.papers), 'qasper: ids of the papers.')
REWRITTEN = flags.DEFINE_string('rewritten', '', 'qasper: file or hf:OWNER/NAME of rewritten questions and answers.')
UNTIL = flags.DEFINE_string('until', str(raw.ConversionOptions.until), 'livecodebench: the day after the last.')


def main() -> None:
  """Convert the source, and write train.json and test.json into --output."""
  if SOURCE.value == 'sciknoweval' and DOMAIN.value is None:
    raise UserError(f'--source=sciknoweval needs --domain: one of {", ".join(sciknoweval.DOMAINS)}.')
  days = day('since', SINCE.value), day('until', UNTIL.value)
  more = DIRECTION.value, tuple(DOCUMENTS.value), tuple(PAPERS.value), REWRITTEN.value
  options = raw.ConversionOptions(DOMAIN.value or '', SEED.value, *days, tuple(PATIENTS.value), *more)
  prepare.prepare(SOURCE.value, options, OUTPUT.value, INPUT.value, announce=print)


def day(name: str, text: str) -> datetime.date:
  """Parse the day of a flag, written YYYY-MM-DD.

  Raises:
    UserError: it is none.
  """
  try:
    return datetime.date.fromisoformat(text)
  except ValueError as error:
    raise UserError(f'--{name}={text} is not a day such as 2025-02-01.') from error


if __name__ == '__main__':
  command.run(main)
