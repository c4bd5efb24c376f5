"""LongHealth (Adams et al. 2024): questions about long records of fictional patients; the records are one document.

The wording of the prompt is this project's, and options are shown without letters.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
import difflib

from sdpo_jax.data.converters import raw
from sdpo_jax.data.converters.raw import ConversionOptions, Parts, Splits, described, field, make_row
from sdpo_jax.data.rows import RawRow
from sdpo_jax.errors import UserError, short_repr
from sdpo_jax.files import read_json_object

NAME, PART = 'longhealth', 'benchmark_v5'
CHOICES = tuple(f'answer_{letter}' for letter in 'abcde')
ALIKE = 0.9  # The minimum similarity, from 0 to 1, of the right answer and one of the choices.
PROMPT = """\
This is a question about the patient with the ID {patient} (name: {name}, birthday: {birthday}, diagnosis: {diagnosis}).

<question>
{question}
</question>

<options>
{choices}
</options>

Think step by step first, then answer with one of the options, exactly as it is written above. Keep to this format:

<thinking>
Your thoughts.
</thinking>

<answer>
The option that is right.
</answer>"""


def read(source: str, setting: str) -> Sequence[RawRow]:
  """Return a row for each patient of the published file, a JSON object of patients by their ids.

  Raises:
    UserError: the file cannot be read, or is not such an object.
  """
  return raw.by_id(source, read_json_object(source, f'name the published {PART}.json in {setting}'))


def convert(parts: Parts, options: ConversionOptions) -> Splits:
  """Return the questions about the chosen patients, all held out: training uses the document.

  Raises:
    UserError: a patient does not exist, or is not in the source's schema.
  """
  asked = ((patient, question) for patient in _chosen(parts, options) for question in raw.listed(patient, 'questions'))
  return {'test': [_row(patient, question) for patient, question in asked]}


def texts(parts: Parts, options: ConversionOptions) -> Mapping[str, str]:
  """Return the records of the chosen patients as the text of one file; errors as in `convert`."""
  return {raw.DOCUMENT: ''.join(_records(patient) for patient in _chosen(parts, options))}


def _chosen(parts: Parts, options: ConversionOptions) -> list[RawRow]:
  return raw.chosen(parts[PART], options.patients, 'patients')


def _row(patient: RawRow, question: RawRow) -> RawRow:
  choices = [field(question, name).strip() for name in CHOICES]
  right = field(question, 'correct').strip()
  if '' in choices or not any(_alike(right, choice) for choice in choices):
    raise UserError(
      f"{question.origin}: 'correct' is {short_repr(right)}, but must be one of the five choices, which are "
      f'{short_repr(choices, 200)}.'
    )
  asked = field(question, 'question').strip()
  prompt = PROMPT.format(
    patient=field(patient, 'id'),
    name=field(patient, 'name'),
    birthday=field(patient, 'birthday'),
    diagnosis=field(patient, 'diagnosis'),
    question=asked,
    choices='\n'.join(choices),
  )
  return make_row(
    question,
    f'{field(patient, "id")}_{question.number}',
    kind='mcq',
    dataset=NAME,
    prompt=prompt,
    description=described(asked, 'mcq'),
    answer=right,
    environment=NAME,
    choices=choices,
  )


def _alike(one: str, other: str) -> bool:
  return difflib.SequenceMatcher(None, one.lower(), other.lower()).ratio() >= ALIKE


def _records(patient: RawRow) -> str:
  """Return a patient's identity and all notes, each with its name, as text."""
  notes = field(patient, 'texts', kind=Mapping)
  if not notes:
    raise UserError(f"{patient.origin}: 'texts' is empty: is this the right source?")
  name = field(patient, 'id')
  lines = [f'{title}: {field(patient, title.lower())}\n' for title in ('ID', 'Name', 'Birthday', 'Diagnosis')]
  held = (f'\n<{note}>\n{field(patient, "texts", note).strip()}\n</{note}>\n' for note in notes)
  return f'<{name}>\n{"".join(lines)}{"".join(held)}</{name}>\n\n'
