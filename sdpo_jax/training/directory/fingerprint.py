"""The fingerprint of a run: digests of its inputs other than settings, compared with earlier starts (see `starts`).

A resume is compared with the start that trained its checkpoint: the last one that resumed from an earlier step. Starts
of which no checkpoint is left do not matter.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
import dataclasses
import datetime
import functools
import importlib.metadata
import os
import pathlib
import platform
from typing import TYPE_CHECKING, Any

from etils import epath
import jax

import sdpo_jax
from sdpo_jax.config import Config, ModelConfig, rewards
from sdpo_jax.config.overrides import ROUNDING, Differences
from sdpo_jax.data import pipeline, sources
from sdpo_jax.distributed.collectives import gathered
from sdpo_jax.environments import grader_code, registry
from sdpo_jax.environments.grading import Graders
from sdpo_jax.errors import UserError
import sdpo_jax.models
from sdpo_jax.models import huggingface, identity
from sdpo_jax.models.adapters import named_cartridges
from sdpo_jax.models.adapters.kv_prefix import KVPrefix
from sdpo_jax.training.directory import starts
from sdpo_jax.training.directory.epochs import FENCING_EPOCH
from sdpo_jax.training.directory.published_checkpoints import newest
from sdpo_jax.training.directory.starts import Parts
from sdpo_jax.training.directory.workdir import changed_settings
from sdpo_jax.training.documents import Texts, read_texts
from sdpo_jax.training.specs import objective_spec
from sdpo_jax.types import Example

if TYPE_CHECKING:
  from sdpo_jax.training.directory.ownership import Ownership

# Parts that change what is learned; see trainer.accept_changes.
LEARNED = ('tokenizer', 'model', 'adapter', 'document', 'teacher', 'data', 'graders')
TOKENS = 'tokens'  # Entry of the part 'document'.
MATRICES, SLOTS = ARRAYS = 'matrices', 'slots'  # Entries of the part 'adapter' that describe a checkpoint's arrays.
LOADED = ('weights', 'factors')  # Parts that a run reads when it begins; later values are in its checkpoints.
# Part → the entry of trainer.accept_changes that accepts it, if it has another name.
ENTRIES = dict.fromkeys(('weights', 'adapter', 'factors', 'teacher'), 'model')
ENTRIES |= {'document': 'data'}
# Parts whose changes are only announced → what a change means.
NAMED = {
  'weights': 'model.path holds other weights than at the start (the run continues with those of its checkpoint)',
  'factors': 'model.lora.path holds other factors than at the start (the run continues with those of its checkpoint)',
  'evaluation': 'Evaluations before and after this start cannot be compared',
  'software': ROUNDING,
  'devices': ROUNDING,
}
PACKAGES = (
  'jax',
  'jaxlib',
  'libtpu',
  'flax',
  'optax',
  'orbax-checkpoint',
  'grain',
  'numpy',
  'transformers',
  'tokenizers',
  'jinja2',
  'safetensors',
  'math-verify',
  'latex2sympy2_extended',
  'sympy',
)
# Environment variables that change how the compiler or JAX rounds.
VARIABLES = ('XLA_FLAGS', 'LIBTPU_INIT_ARGS', 'JAX_DEFAULT_MATMUL_PRECISION', 'JAX_ENABLE_X64')
SHOWN = 6  # Maximum number of changes that a sentence lists.


@dataclasses.dataclass(frozen=True)
class Continuation:
  """A start that may continue a run, with its differences from earlier starts."""

  parts: Parts
  step: int  # The step of the checkpoint; 0: there is none.
  settings: Differences  # Differences from the settings of the start before.
  lines: Sequence[str] = ()  # Sentences for the user.
  changes: Sequence[str] = ()  # Phrases about the changes since the start that it was compared with.
  accepted: Sequence[str] = ()  # Parts of `LEARNED` that differ and are accepted.


def take(
  config: Config,
  tokenizer: Any,
  iterator: pipeline.TrainIterator,
  held_out: Sequence[Example],
  graders: Graders,
  texts: Texts | None = None,
  *,
  weights: bool = True,
) -> Parts:
  """Return the fingerprint of this start: by part and name, digests, versions or counts.

  Args:
    config: settings.
    tokenizer: tokenizer of the model.
    iterator: iterator over the training data.
    held_out: questions of evaluations.
    graders: graders, including all that the questions need.
    texts: texts of a cartridge, if there is one; None: they are read as needed.
    weights: whether to digest weights; if false, the model directory may have none.

  Raises:
    UserError: the processes of the run do not have the same tokenizer, model, data or graders.
  """
  if texts is None:
    teaches = objective_spec(config).reads_teacher
    texts = read_texts(config, tokenizer, teaches=teaches) if config.model.cartridge.used else Texts(None, None)
  devices = jax.devices()
  training = rewards.names(iterator.environments)
  asked = rewards.names({example.environment for example in held_out}) - training
  by_source: dict[str, list[Example]] = {}
  for example in held_out:
    by_source.setdefault(example.data_source, []).append(example)
  generators = [source for source in config.data.train_files if sources.is_generator(source)]
  parts = {
    'tokenizer': identity.of_tokenizer(config.model.path, tokenizer),
    'model': identity.of_architecture(config.model.path),
    'adapter': adapter_layout(config) | _digest_of(texts.initial, 'text of the slots'),
    'document': _digest_of(texts.document, TOKENS),
    'teacher': _teacher(config, weights=weights),
    'data': iterator.digests | {f'code of {source}': _generator_code(source) for source in generators},
    'graders': {name: grader_code.digest(graders.get(name)) for name in training},
    'evaluation': {f'questions of {source}': pipeline.digest(found) for source, found in by_source.items()}
    | {f'grader {name}': grader_code.digest(graders.get(name)) for name in asked},
    'software': software(),
    'devices': {
      'platform': devices[0].platform,
      'kind': devices[0].device_kind,
      'count': str(len(devices)),
      'processes': str(jax.process_count()),
    },
  }
  if weights:
    parts['weights'] = identity.of_weights(config.model.path)
    parts['factors'] = starting_values(config.model)
  _check_alike(gathered(parts, 'the comparison of tokenizers, data and graders'))
  return parts


def _digest_of(tokens: Sequence[int] | None, name: str) -> dict[str, str]:
  return {} if tokens is None else {name: identity.digest(list(tokens))}


def _teacher(config: Config, *, weights: bool) -> dict[str, str]:
  """Return digests of the separate teacher model's config.json and weights; empty if there is no such teacher."""
  path = config.actor.self_distillation.teacher_model
  if not path:
    return {}
  return identity.of_architecture(path) | (identity.of_weights(path) if weights else {})


def adapter_layout(config: Config) -> dict[str, str]:
  """Return digests of an adapter's layout, but not of its values; empty if all parameters are trained.

  For LoRA, these are the matrices with factors, the ranks and the scales; for a cartridge, the slots.
  """
  adapter = huggingface.read_policy(config.model.path, config.model).adapter
  if adapter is None:
    return {}
  if isinstance(adapter, KVPrefix):
    # The fields that determine the trained slots, by which runs of all releases are compared.
    fields = ('slots', 'frozen', 'within_windows', 'parts', 'filling')
    return {SLOTS: identity.digest({name: getattr(adapter, name) for name in fields})}
  return {
    MATRICES: identity.digest([[target.name, target.rank] for target in adapter.targets]),
    'scales': identity.digest([target.scales for target in adapter.targets]),
  }


def starting_values(model: ModelConfig) -> dict[str, str]:
  """Return digests of the adapter or cartridge from which a run starts; empty if there is none."""
  if model.lora.path:
    return identity.of_adapter(model.lora.path)
  slots = model.cartridge
  found = {'values': named_cartridges.describe(slots.path).sha256} if slots.path else {}
  return found | {
    f'distractor {at}': named_cartridges.describe(path).sha256 for at, path in enumerate(slots.distractors)
  }


def _generator_code(source: str) -> str:
  return grader_code.digest(registry.get_generator(sources.generator_name(source)))


def _check_alike(everybody: Sequence[Parts]) -> None:
  """Raise UserError if two processes would learn from different inputs."""
  first = everybody[0]
  names = [*LEARNED, *(name for name in LOADED if name in first)]
  for number, other in enumerate(everybody[1:], 1):
    found = _changes(names, first, other, f'is {{}} on process 0 and {{}} on process {number}')
    if found:
      raise UserError(
        f'The processes of this run do not have the same files: {_listed(found)}. Copy those of one host to all.'
      )


@functools.cache
def software() -> dict[str, str]:
  """Return the versions of packages, Python and this project (with a digest of its files), and compiler flags."""
  versions = {
    'python': platform.python_version(),
    'sdpo_jax': f'{sdpo_jax.__version__} ({identity.digest(own_files())})',
  }
  for package in PACKAGES:
    try:
      versions[package] = importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
      continue
  return versions | {name: os.environ[name] for name in VARIABLES if os.environ.get(name)}


def own_files() -> dict[str, str]:
  """Return the digest of every file of this project that a run imports, by its path in an installation."""
  files = {}
  for name, package in (('sdpo_jax', sdpo_jax), ('sdpo_jax/models', sdpo_jax.models)):  # Apart in a checkout.
    folder = pathlib.Path(package.__file__).resolve().parent
    files |= {f'{name}/{path.relative_to(folder).as_posix()}': path for path in folder.rglob('*.py')}
  beside = 'sdpo_jax/launch/', 'sdpo_jax/configs/'
  return {name: identity.digest(files[name].read_bytes()) for name in sorted(files) if not name.startswith(beside)}


def compare(
  workdir: epath.PathLike, config: Config, parts: Parts, step: int | None = None, settings: Differences | None = None
) -> Continuation:
  """Compare a start with the run so far, and return how the run may continue; nothing is written.

  Args:
    workdir: directory of the run.
    config: settings of this start.
    parts: parts of this start, from `take`.
    step: step of the checkpoint from which it resumes; 0: none, so everything may be new; None: the newest.
    settings: differences from the settings of the start before; None: computed from `config.json`, which still holds
      those settings.

  Raises:
    UserError: an input that changes what is learned differs, and `trainer.accept_changes` does not name it.
  """
  step = newest(workdir) if step is None else step
  if step == 0:
    return Continuation(parts, step, Differences([], [], {}, []))
  settings = changed_settings(workdir, config) if settings is None else settings
  earlier = starts.read(workdir)
  unknown = starts.unrecorded(workdir, earlier, step)
  before = {name: part for name, part in (starts.trained_by(earlier, step) or {}).items() if name in parts}
  if 'adapter' in before and any(before['adapter'].get(name) != parts['adapter'].get(name) for name in ARRAYS):
    raise UserError(
      f'{workdir} was trained with another adapter ({_listed(_changes(["adapter"], before, parts))}), so that its '
      'checkpoints hold factors of other matrices or ranks, or other slots: use the adapter settings that it had, or '
      'choose another --workdir.'
    )
  learned = _learned(config)
  differing = [name for name in learned if name in before and before[name] != parts[name]]
  refused = [name for name in differing if ENTRIES.get(name, name) not in config.trainer.accept_changes]
  if refused:
    missing = dict.fromkeys(ENTRIES.get(name, name) for name in refused)
    raise UserError(
      f'{workdir} was trained with other inputs than there are now: {_listed(_changes(refused, before, parts))}. '
      'Restore them, choose another --workdir, or insist with --config.trainer.accept_changes='
      f'{",".join([*config.trainer.accept_changes, *missing])}.'
    )
  accepted = [*settings.accepted, *_changes(differing, before, parts)]
  named = {meaning: list(changes) for meaning, changes in settings.named.items()}
  for name, meaning in NAMED.items():
    if name in learned:
      continue
    # A start without evaluations has no results that could differ.
    if before.get(name) and (name != 'evaluation' or parts[name]):
      named.setdefault(meaning, []).extend(_changes([name], before, parts))
  lines = [f'{meaning}: {_listed(changes)}.' for meaning, changes in named.items() if changes]
  said = [f'Accepted, as trainer.accept_changes says: {_listed(accepted)}.'] if accepted else []
  changes = [*accepted, *(change for changes in named.values() for change in changes)]
  return Continuation(parts, step, settings, [*unknown, *said, *lines], changes, differing)


def _learned(config: Config) -> tuple[str, ...]:
  """Return the parts that change what a run learns.

  They include weights and factors if the loss has reference policies or the run starts from a cartridge, the weights if
  the base is frozen, since no checkpoint holds it, and what evaluations ask if samples that carry over share their
  slots.
  """
  slots, learned = config.model.cartridge, LEARNED  # Some of the slots of `path` may be frozen.
  if config.rollout.max_staleness:
    learned += ('evaluation',)
  if objective_spec(config).references or slots.path or slots.distractors:
    return (*learned, *LOADED)
  return (*learned, 'weights') if config.model.frozen else learned


def model_changes(workdir: epath.PathLike, path: str, tokenizer: Any, step: int) -> list[str]:
  """Return a phrase for each difference between a model directory and the one with which a checkpoint was trained.

  Args:
    workdir: directory of the run; without a `fingerprint.json` nothing is known.
    path: path of the model directory.
    tokenizer: tokenizer of that directory.
    step: step of the checkpoint.

  Raises:
    UserError: as in `starts.read`.
  """
  before = starts.trained_by(starts.read(workdir), step)
  if before is None:
    return []
  now = {'tokenizer': identity.of_tokenizer(path, tokenizer), 'model': identity.of_architecture(path)}
  return _changes([name for name in now if name in before], before, now)


def base_changes(workdir: epath.PathLike, path: str, step: int) -> list[str]:
  """Return a phrase for each difference between a model's weights and those under a checkpoint's adapter.

  Args:
    workdir: directory of the run; without a `fingerprint.json` nothing is known.
    path: path of the model directory.
    step: step of the checkpoint.

  Raises:
    UserError: as in `starts.read`, or the model cannot be read.
  """
  before = starts.trained_by(starts.read(workdir), step) or {}
  return _changes(['weights'], before, {'weights': identity.of_weights(path)}) if 'weights' in before else []


def trained_document(workdir: epath.PathLike, step: int) -> str | None:
  """Return the digest of the document with which a checkpoint was trained; None if unknown, or there was none.

  Args:
    workdir: directory of the run.
    step: step of the checkpoint.

  Returns:
    `identity.digest` of the document's tokens, or None.

  Raises:
    UserError: as in `starts.read`.
  """
  return (starts.trained_by(starts.read(workdir), step) or {}).get('document', {}).get(TOKENS)


def adapter_changes(workdir: epath.PathLike, config: Config, step: int) -> list[str]:
  """Return a phrase for each difference between an adapter's layout and that of a checkpoint.

  If the run started from an adapter, matrices and scales are read from there again.

  Args:
    workdir: directory of the run; without a `fingerprint.json` nothing is known.
    config: settings with the run's model.
    step: step of the checkpoint.

  Raises:
    UserError: as in `starts.read`, or model or adapter cannot be read.
  """
  before, now = starts.trained_by(starts.read(workdir), step) or {}, adapter_layout(config)
  known = {name: digest for name, digest in before.get('adapter', now).items() if name in now}
  return _changes(['adapter'], {'adapter': known}, {'adapter': now})


def start(
  workdir: epath.Path, config: Config, found: Continuation, step: int, ownership: Ownership | None, lost: Sequence[str]
) -> Continuation:
  """Add this start to `fingerprint.json`, and return `found`; it is compared again if another step is resumed.

  Args:
    workdir: directory of the run.
    config: settings of this start.
    found: result of `compare`.
    step: step from which the run actually resumes. At step 0 earlier starts are forgotten, since nothing is left of
      what they trained.
    ownership: ownership of the run; None on processes that do not write.
    lost: sentences about what the run has lost. Those that no earlier start has recorded become lines.

  Raises:
    UserError: as in `compare`, or another process has taken over the run.
  """
  if step != found.step:
    found = compare(workdir, config, found.parts, step, found.settings)
  if ownership is None:
    return found
  before = list(starts.read(workdir)) if step else []
  known = {phrase for start in before for phrase in start.get('lost', ())}
  said = {sentence.removeprefix(f'{workdir}/'): sentence for sentence in lost}
  new = [phrase for phrase in said if phrase not in known]
  found = dataclasses.replace(found, lines=[*found.lines, *(said[phrase] for phrase in new)])
  entry = {
    'step': step,
    FENCING_EPOCH: ownership.epoch,
    'time': datetime.datetime.now(datetime.UTC).isoformat(timespec='seconds'),
    'changes': list(found.changes),
    'accepted': list(found.accepted),
  }
  entry |= {'lost': new} if new else {}
  entry |= {'parts': found.parts} if starts.parts_of(before) != found.parts else {}
  ownership.check()
  starts.write(workdir, [*before, entry])
  return found


def _changes(names: Iterable[str], old: Parts, new: Parts, phrase: str = 'was {} and is now {}') -> list[str]:
  """Return a phrase for every entry of the named parts that differs."""
  return [
    f'{name}/{key} ' + phrase.format(old[name].get(key, 'not there'), new[name].get(key, 'not there'))
    for name in names
    for key in sorted(old[name].keys() | new[name].keys())
    if old[name].get(key) != new[name].get(key)
  ]


def _listed(changes: Sequence[str]) -> str:
  more = f'; and {len(changes) - SHOWN} more' if len(changes) > SHOWN else ''
  return '; '.join(changes[:SHOWN]) + more
