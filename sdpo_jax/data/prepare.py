"""Conversion of the public sources of the paper's data sets to train.json and test.json."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
import dataclasses
import json
import urllib.parse

from etils import epath

from sdpo_jax.data import hub_datasets, rows, sources
from sdpo_jax.data.converters import gpqa, livecodebench, longhealth, mathematics, mtob, qasper, sciknoweval, tooluse
from sdpo_jax.data.converters.raw import ConversionOptions, Parts, Splits
from sdpo_jax.errors import UserError
from sdpo_jax.files import make_directory, write_output

SUFFIXES = ('.json', '.jsonl', '.parquet')
_NOT_STATED = 'not verified: see the data set card before you redistribute it'


@dataclasses.dataclass(frozen=True)
class Source:
  """A public source of a data set, and its conversion."""

  parts: Mapping[str, str | None]  # Name of each part → its public address, hf:…; None: it has none.
  convert: Callable[[Parts, ConversionOptions], Splits]
  licence: str
  # Number of rows per split in the paper's files.
  sizes: Callable[[ConversionOptions], Mapping[str, int]] = lambda options: {}
  where: str = ''  # Sentence that says where to get parts without an address.
  read: Callable[[str, str], Sequence[rows.RawRow]] = sources.read_rows  # Rows of a part, from its address and setting.
  texts: Callable[[Parts, ConversionOptions], Mapping[str, str]] = lambda parts, options: {}  # More files: name → text.


_SCIKNOWEVAL_SIZES = {'biology': (450, 50), 'chemistry': (1890, 210), 'material': (841, 94), 'physics': (720, 80)}


def _livecodebench_sizes(options: ConversionOptions) -> Mapping[str, int]:
  window = (options.since, options.until)
  return {'train': 131, 'test': 131} if window == (ConversionOptions.since, ConversionOptions.until) else {}


def _mathematics(name: str, size: int, problem: str, answer: str, final: Callable[[str], str] = str.strip) -> Source:
  return Source(
    parts={'test': f'hf:math-ai/{name}?split=test'},
    convert=mathematics.converter(name, problem, answer, final),
    licence=_NOT_STATED,
    sizes=lambda options: {'test': size},
  )


SOURCES: dict[str, Source] = {
  'sciknoweval': Source(
    parts={'test': 'hf:hicai-zju/SciKnowEval?split=test'},
    convert=sciknoweval.convert,
    licence='MIT, as its data set card says',
    sizes=lambda options: dict(zip(('train', 'test'), _SCIKNOWEVAL_SIZES[options.domain], strict=True)),
  ),
  'tooluse': Source(
    parts={tooluse.TRAIN: None, tooluse.TEST: None},
    convert=tooluse.convert,
    licence='none is stated by ToolAlpaca: ask its authors before you redistribute it',
    sizes=lambda options: {'test': 68},
    where='the README of https://github.com/tangqiaoyu/ToolAlpaca says where they are',
  ),
  'livecodebench': Source(
    parts={'test': 'hf:livecodebench/code_generation_lite?split=test&revision=refs/pr/6'},
    convert=livecodebench.convert,
    licence="'cc', as its data set card says, without a version; the problems belong to the contests' sites",
    sizes=_livecodebench_sizes,
  ),
  'gsm8k': Source(
    parts={split: f'hf:openai/gsm8k?config=main&split={split}' for split in ('train', 'test')},
    convert=mathematics.converter('gsm8k', 'question', 'answer', mathematics.after_hashes),
    licence=_NOT_STATED,
    sizes=lambda options: {'train': 7473, 'test': 1319},
  ),
  'math500': _mathematics('math500', 500, 'problem', 'answer'),
  'aime24': _mathematics('aime24', 30, 'problem', 'solution', mathematics.boxed),
  'aime25': _mathematics('aime25', 30, 'problem', 'answer'),
  'amc23': _mathematics('amc23', 40, 'question', 'answer'),
  'gpqa': Source(
    parts={'train': 'hf:Idavidrein/gpqa?config=gpqa_diamond&split=train'},
    convert=gpqa.convert,
    licence='CC BY 4.0, as its data set card says; its authors restrict access and ask not to publish examples',
    sizes=lambda options: {'test': 198},
  ),
  'longhealth': Source(
    parts={longhealth.PART: None},
    convert=longhealth.convert,
    licence='not verified: see https://github.com/kbressem/LongHealth before you redistribute it',
    sizes=lambda options: {'test': 20 * len(options.patients)},
    where='it is in the folder data of https://github.com/kbressem/LongHealth',
    read=longhealth.read,
    texts=longhealth.texts,
  ),
  'mtob': Source(
    parts=dict.fromkeys(mtob.PARTS.values()),
    convert=mtob.convert,
    licence='not verified; it is published encrypted, so that models are not trained on it: keep it so',
    sizes=lambda options: {'test': 50},
    where='it is splits in the archive of https://github.com/lukemelas/mtob',
    texts=mtob.texts,
  ),
  'qasper': Source(
    parts={qasper.PART: 'hf:allenai/qasper?split=train'},
    convert=qasper.convert,
    licence='CC BY 4.0, as its data set card says; not verified for rewritten questions',
    read=qasper.read,
    texts=qasper.texts,
  ),
}


def prepare(
  name: str, options: ConversionOptions, output: epath.PathLike, given: str | None, announce: Callable[[str], None]
) -> None:
  """Write `output`/train.json and test.json (if the source has both) as JSON lines of raw rows, and its texts.

  Each file is written atomically, and only after every row has been checked to load.

  Args:
    name: key of `SOURCES`.
    options: options of the conversion.
    output: folder, created if needed; local or gs://….
    given: location of the source instead of its public address: a file, a folder that holds its parts by name, or
      hf:OWNER/NAME?….
    announce: receives a sentence per file, and one about the licence.

  Raises:
    UserError: no such source or file, or a row that is not in the source's schema.
  """
  if name not in SOURCES:
    raise UserError(f'--source={name} must be one of {", ".join(SOURCES)}.')
  source = SOURCES[name]
  parts = {part: source.read(address(source, part, given), '--input') for part in source.parts}
  splits = source.convert(parts, options)
  files = {split: _lines(made, split) for split, made in splits.items()}
  texts = source.texts(parts, options)
  folder = epath.Path(output)
  try:
    make_directory(folder)
  except OSError as error:
    raise UserError(f'--output={output} cannot be created as a folder: {error}.') from error
  sizes = source.sizes(options)
  for split, lines in files.items():
    write_output(folder / f'{split}.json', lines)
    count, wanted = len(splits[split]), sizes.get(split)
    differs = f'; the file of the paper has {wanted}: the source is incomplete or has changed'
    announce(f'{folder / split}.json: {count:,} rows{differs if wanted not in (None, count) else ""}.')
  for name, text in texts.items():
    write_output(folder / name, text)
    announce(f'{folder / name}: {len(text.split()):,} words.')
  announce(f'Licence of the data: {source.licence}.')


def address(source: Source, part: str, given: str | None) -> str:
  """Return the location of a source's part: its public address, or the given one.

  Raises:
    UserError: the part has no public address, or the given folder does not hold it.
  """
  public = source.parts[part]
  if given is None:
    if public is None:
      names = ' and '.join(f'{name}.json' for name in source.parts)
      raise UserError(f'--input must name the folder that holds {names}: {source.where}.')
    return public
  if hub_datasets.is_hub(given):
    name, options = hub_datasets.parse(given)
    split = hub_datasets.parse(public)[1]['split'] if public else part
    return f'{hub_datasets.PREFIX}{name}?{urllib.parse.urlencode({"split": split} | options, safe="/[]:")}'
  if not epath.Path(given).is_dir():
    if len(source.parts) > 1:
      raise UserError(f'--input={given} must be the folder of {" and ".join(source.parts)} ({", ".join(SUFFIXES)}).')
    return given
  found = [file for suffix in SUFFIXES if (file := epath.Path(given) / f'{part}{suffix}').exists()]
  if len(found) != 1:
    raise UserError(
      f'--input={given} must hold one file {part} ({", ".join(SUFFIXES)}), not {len(found)}; a folder in '
      f'the layout of a hub data set is named hf:{given}.'
    )
  return str(found[0])


def _lines(made: list[rows.RawRow], split: str) -> str:
  for row in made:
    rows.example(row, split)  # Raise here for a row that training would refuse, naming its place in the source.
  return ''.join(json.dumps(row.value, ensure_ascii=False) + '\n' for row in made)
