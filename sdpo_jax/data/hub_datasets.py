"""Hugging Face hub data sets: which files belong to a split, according to the data set card or the file names."""

from __future__ import annotations

import bisect
import collections
from collections.abc import Iterable, Iterator, Mapping, Sequence
import fnmatch
import functools
import glob
import pathlib
import re
import time
import urllib.parse

from sdpo_jax.errors import UserError, first_line, printable
from sdpo_jax.models import hub, plain_yaml

PREFIX = 'hf:'
READABLE = ('.parquet', '.jsonl', '.json', '.csv')
# Branch on which the hub keeps a parquet conversion of public data sets, CONFIG/SPLIT/0000.parquet.
CONVERTED = 'refs/convert/parquet'
_OPTIONS = ('split', 'config', 'revision')
_CARD = 'README.md'
LARGEST_CARD = 2**20  # Characters of settings in a card; a config takes 100 or 200.
LISTED = 2000  # Characters of names in a message.
LONGEST_PATTERN, MATCHING_S = 4096, 3.0  # Characters of a pattern in it, and CPU time for all of them.
# Split → the words in names of files and folders that stand for it, according to the hub's documentation.
_WORDS = {
  'train': ('train', 'training'),
  'validation': ('validation', 'valid', 'dev', 'val'),
  'test': ('test', 'testing', 'eval', 'evaluation'),
}
_TRUE = ('true', 'True', 'TRUE', 'yes', 'Yes', 'YES', 'on', 'On', 'ON')  # As YAML of a card is read by the hub.
_SHARD = re.compile(r'(.+)-\d{5}-of-\d{5}')
_SLICE = re.compile(r'([^\[\]]+)(?:\[(-?\d+%?)?:(-?\d+%?)?\])?')

Splits = dict[str, list[str]]  # Split → names of its files, in the order of their rows.
Slice = tuple[str | None, str | None]  # Rows of a split, as numbers or percentages: ('10%', None).


def is_hub(source: str) -> bool:
  """Return whether a source names a hub data set instead of a file."""
  return source.startswith(PREFIX)


def parse(source: str) -> tuple[str, dict[str, str]]:
  """Return name and options of `hf:OWNER/NAME?split=…&config=…&revision=…`.

  Raises:
    UserError: the source is not of this form.
  """
  name, _, query = source.removeprefix(PREFIX).partition('?')
  try:
    options = dict(urllib.parse.parse_qsl(query, strict_parsing=True)) if query else {}
  except ValueError as error:
    raise UserError(f'{source!r} is not hf:OWNER/NAME?split=…&config=…&revision=…: {error}.') from error
  unknown = [key for key in options if key not in _OPTIONS]
  if not name or unknown:
    wrong = f'there is no option {unknown[0]!r}' if unknown else 'the name is missing'
    raise UserError(f'{source!r} is not hf:OWNER/NAME?split=…&config=…&revision=…: {wrong}.')
  return name, options


def files(source: str, setting: str) -> list[tuple[list[pathlib.Path], Slice]]:
  """Return the files of each split that a source names, and which rows of the split it asks for.

  Args:
    source: `hf:OWNER/NAME?split=…&config=…&revision=…`; NAME may also be a local folder. `split` is that of
      `datasets.load_dataset` (train, test[:100], train[90%:], train+test) and may be left out if there is only one.
    setting: name of the setting that holds the source, for messages.

  Raises:
    UserError: the source is malformed, the data set, config or split does not exist, it has no readable files, or there
      is no network.
  """
  name, options = parse(source)
  where, revision = f'{setting}: {source!r}', options.get('revision')
  folder = pathlib.Path(name)
  local = folder.is_dir()

  def named(revision: str | None) -> list[str]:
    return hub.names_below(folder) if local else hub.names(name, folder, setting, revision)

  if not local:
    folder = hub.fetch(name, [_CARD], setting, hub.DATA_SET, revision)
  configs, default = _configs(folder, named(revision), where)
  if not any(configs.values()) and revision is None and not local:
    revision = CONVERTED
    folder = hub.fetch(name, [_CARD], setting, hub.DATA_SET, revision)
    configs, default = _converted(named(revision)), None
  splits = _of_config(configs, options.get('config', default), where)
  parts = list(_parts(options.get('split'), list(splits), where))
  if not local:
    wanted = [glob.escape(file) for split, _ in parts for file in splits[split]]
    folder = hub.fetch(name, wanted, setting, hub.DATA_SET, revision)
  return [([folder / file for file in splits[split]], rows) for split, rows in parts]


def taken(rows: Sequence, part: Slice) -> Sequence:
  """Return the rows of a slice of a split; percentages are rounded to whole rows."""
  start, stop = (
    bound if bound is None else round(int(bound[:-1]) * len(rows) / 100) if bound.endswith('%') else int(bound)
    for bound in part
  )
  return rows[start:stop]


def _configs(folder: pathlib.Path, names: Sequence[str], where: str) -> tuple[dict[str, Splits], str | None]:
  """Return the configs of a data set and the name of its default one, from its card or, without one, its files."""
  card = folder / _CARD
  text = ''
  if card.is_file():
    with card.open(encoding='utf-8', errors='replace') as file:
      text = file.read(LARGEST_CARD)
  front = re.match(r'---[^\S\n]*\n(.*?)\n---', text, re.DOTALL)
  deadline = time.thread_time() + MATCHING_S
  try:
    if front is None and text.startswith('---') and len(text) == LARGEST_CARD:
      raise ValueError(f'its settings do not end within {LARGEST_CARD} characters')
    said = plain_yaml.read(front[1]) if front else None
    declared = {config['config_name']: config for config in (said or {}).get('configs') or ()}
    found = {name: _declared(config, names, deadline) for name, config in declared.items()}
    if None in (*found, *(split for splits in found.values() for split in splits)):
      raise ValueError('the name of a config or split is null')
  except (AttributeError, KeyError, TypeError, ValueError) as error:
    raise UserError(f'{where}: the configs in its {_CARD} cannot be read: {first_line(error)}.') from error
  if not found:
    return {'default': _by_names(_readable(names))}, 'default'
  marked = [name for name, config in declared.items() if config.get('default') in _TRUE or name == 'default']
  return found, next(iter(marked or (found if len(found) == 1 else ())), None)


def _declared(config: Mapping, names: Sequence[str], deadline: float) -> Splits:
  """Return the files of a config in a card; its `data_files` are patterns, a list of {split, path}, or a mapping."""
  folder = (config.get('data_dir') or '').strip('/')
  given = config.get('data_files')
  if given is None:
    return _by_names(_readable(_matching(f'{glob.escape(folder)}/**'.removeprefix('/'), names, deadline)))
  if not isinstance(given, Mapping):
    unnamed = all(isinstance(one, str) for one in given)  # A pattern, or a list of patterns.
    given = {'train': given} if unnamed else {one['split']: one['path'] for one in given}
  found = {}
  for split, paths in given.items():
    paths = [paths] if isinstance(paths, str) else paths
    wanted = [(folder + '/' + path).removeprefix('/').removeprefix('./') for path in paths]
    found[split] = _readable({name for pattern in wanted for name in _matching(pattern, names, deadline)})
  return {split: held for split, held in found.items() if held}


def _matching(pattern: str, names: Sequence[str], deadline: float) -> Iterator[str]:
  """Yield those of the names, which are sorted, that a glob matches; raises ValueError if it takes too long."""
  prefix = re.match(r'[^*?[]*', pattern)[0]
  for name in names[bisect.bisect_left(names, prefix) : bisect.bisect_left(names, f'{prefix}\U0010ffff')]:
    if len(pattern) > LONGEST_PATTERN or time.thread_time() > deadline:
      raise ValueError(f'a pattern is longer than {LONGEST_PATTERN}, or they take more than {MATCHING_S:g} s')
    if _expression(pattern).match(name.replace('/', '\n') + '\0'):
      yield name


@functools.lru_cache(maxsize=16)
def _expression(pattern: str) -> re.Pattern:
  """Return an expression for names that end in a zero and have line ends, which a dot does not match, for slashes.

  After `*`, and after `**`, which stands for any number of folders, only the first match of what follows up to the next
  is tried (`?>`). That is enough, and takes at most time quadratic in the length of a name.
  """
  given = (pattern + '/*' * pattern.endswith('**') + '\0').replace('/', '\n')
  blocks = map(fnmatch.translate, re.split(r'(?<![^\n])\*\*\n', given))  # Without `(?s:`, a dot matches no line end.
  first, *rest = (block.removeprefix('(?s:').removesuffix(r')\Z') for block in blocks)
  return re.compile(first + ''.join(rf'(?>(?:.+\n)*?{block})' for block in rest))


def _readable(names: Iterable[str]) -> list[str]:
  """Return the names with the most frequent of the readable suffixes."""
  held = [name for name in names if pathlib.PurePosixPath(name).suffix in READABLE]
  counts = collections.Counter(pathlib.PurePosixPath(name).suffix for name in held)
  chosen = max(counts, key=lambda suffix: (counts[suffix], -READABLE.index(suffix)), default='')
  return sorted(name for name in held if name.endswith(chosen))


def _by_names(names: Sequence[str]) -> Splits:
  """Return splits by the names of files, otherwise by those of folders, otherwise one split train with all files."""
  paths = [pathlib.PurePosixPath(name) for name in names]
  shards = {str(path): match[1] for path in paths if (match := _SHARD.fullmatch(path.stem))}
  in_names = {str(path): split for path in paths if (split := _split_in(path.stem))}
  in_folders = {str(path): split for path in paths if (split := _split_in(str(path.parent)))}
  found: Splits = {}
  for name, split in (shards or in_names or in_folders or dict.fromkeys(names, 'train')).items():
    found.setdefault(split, []).append(name)
  return {split: found[split] for split in (*_WORDS, *found) if split in found}


def _split_in(text: str) -> str | None:
  words = re.split(r'[^a-z0-9]+', text.lower())
  return next((split for split, known in _WORDS.items() if any(word in words for word in known)), None)


def _converted(names: Sequence[str]) -> dict[str, Splits]:
  """Return the configs on the branch of converted files."""
  found: dict[str, Splits] = {}
  for name in sorted(names):
    config, split, *rest = name.split('/')
    if rest and name.endswith('.parquet'):  # Only a part of large sets is converted, in the folder partial-SPLIT.
      found.setdefault(config, {}).setdefault(split, []).append(name)
  return found


def _of_config(configs: Mapping[str, Splits], config: str | None, where: str) -> Splits:
  configs = {name: splits for name, splits in configs.items() if splits}
  if not configs:
    raise UserError(f'{where} has no files of rows that can be read here ({", ".join(READABLE)}).')
  if config is None and len(configs) == 1:
    return next(iter(configs.values()))
  if config not in configs:
    what = 'has several configs: add config= with' if config is None else f'has no config {config!r}: choose from'
    raise UserError(f'{where} {what} {printable(", ".join(configs), LISTED)}.')
  return configs[config]


def _parts(wanted: str | None, splits: Sequence[str], where: str) -> Iterator[tuple[str, Slice]]:
  """Yield the split and the slice of each part of a `split` option such as train[:10%]+test."""
  if wanted is None:
    if len(splits) > 1:
      raise UserError(f'{where} does not name a split: add split= with one of {printable(", ".join(splits), LISTED)}.')
    wanted = splits[0]
  for part in wanted.split('+'):
    match = _SLICE.fullmatch(part.strip())
    if match is None:
      raise UserError(f'{where}: {part!r} is not a split NAME or NAME[start:stop], in rows or, with a %, in percent.')
    if match[1] not in splits:
      raise UserError(f'{where} has no split {match[1]!r}: choose from {printable(", ".join(splits), LISTED)}.')
    yield match[1], (match[2], match[3])
