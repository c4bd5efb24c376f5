"""The model card (README.md) of an export: what was trained, how, and its evaluation results.

The card begins with the metadata that the Hugging Face hub reads. It never names a folder of this machine, and no text
from a run, such as the name of a task, can act as YAML, Markdown or HTML.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
import dataclasses
import json
import logging
import math
import re
import shlex
import statistics
from typing import Any

from etils import epath

import sdpo_jax
from sdpo_jax.config import Config
from sdpo_jax.config.fields import flatten, is_listed
from sdpo_jax.config.locations import is_hub_name
from sdpo_jax.config.privacy import public_place, public_settings
from sdpo_jax.data.hub_datasets import PREFIX
from sdpo_jax.errors import UserError, printable
from sdpo_jax.reporting.run_files import finite
from sdpo_jax.training.directory import fingerprint, starts
from sdpo_jax.training.directory.lines import read_metrics
from sdpo_jax.training.directory.sealed import read_sealed

FILE = 'README.md'
# --format → (library that loads it, relation to the base model, description).
FORMATS = {
  'model': ('transformers', 'finetune', 'all weights'),
  'merged': ('transformers', 'finetune', 'all weights, with a LoRA adapter added to them'),
  'peft': ('peft', 'adapter', 'a LoRA adapter'),
}
CARTRIDGE = 'sdpo_jax', 'adapter', 'a cartridge, key-value slots in the place of a document'
TAGS = ('self-distillation', 'reinforcement-learning', 'text-generation', 'jax', 'sdpo_jax')
_METRIC = re.compile(r'(mean|best|worst|maj|acc/mean)@\d+|questions')
_NOT_LEARNED = ('name', 'serve', 'plan')
_logger = logging.getLogger('sdpo_jax.export')

Scores = Mapping[tuple[str, str], float]  # Task and metric → value.


@dataclasses.dataclass(frozen=True)
class Exported:
  """The export that a card describes."""

  workdir: epath.PathLike
  step: int
  weights: str  # 'student' or 'teacher'.
  form: str  # The value of --format.
  dtype: str
  name: str  # The name to load it by: OWNER/NAME on the hub, or the name of its directory.


def text_of(made: Exported, config: Config) -> str:
  """Return the Markdown text of an export's card; files of the run that cannot be read are left out with a warning."""
  methods = ['SDPO', 'GRPO'] if config.algorithm.mode == 'hybrid' else ['SDPO']
  methods = ['GRPO'] if config.actor.policy_loss.loss_mode == 'vanilla' else methods
  lines = [line for line in _readable(read_metrics, made.workdir) or () if line['step'] <= made.step]
  evaluated = {line['step']: scores for line in lines if (scores := _scores(line))}
  steps = {step: evaluated[step] for step in sorted(evaluated) if step in (min(evaluated), max(evaluated))}
  parts = starts.trained_by(_readable(starts.read, made.workdir) or (), made.step) or {}
  software = parts.get('software', {})
  library, _, what = FORMATS.get(made.form, CARTRIDGE)
  return _rendered(
    'model_card.md',
    config,
    metadata=_metadata(made, config, methods, steps),
    **{'made': made, 'methods': methods, 'library': library, 'what': what, 'steps': steps, 'name': made.name},
    has_tokenizer=True,
    errors={step: _standard_errors(made.workdir, step) for step in steps},
    settings=_settings(config),
    devices=parts.get('devices'),
    software={name: software[name] for name in ('sdpo_jax', 'python', *fingerprint.PACKAGES) if name in software},
  )


def text_of_adapter(name: str, number: int, shape: str, config: Config) -> str:
  """Return the Markdown text of the card of a service's adapter.

  Args:
    name: name of the adapter.
    number: its exported version.
    shape: rank and matrices, in words.
    config: settings of the service.
  """
  library, _, what = FORMATS['peft']
  values = {'name': name, 'number': number, 'shape': shape, 'library': library, 'what': what}
  return _rendered('adapter_card.md', config, metadata=_yaml('peft', config, ['SDPO']), has_tokenizer=False, **values)


def _rendered(template: str, config: Config, **values: Any) -> str:
  import jinja2

  loader = jinja2.PackageLoader('sdpo_jax.reporting', 'web')
  markdown = jinja2.Environment(
    loader=loader, trim_blocks=True, undefined=jinja2.StrictUndefined, keep_trailing_newline=True
  )
  markdown.filters |= {'code': _code, 'python': repr, 'shell': shlex.quote}
  markdown.filters['place'] = lambda source: _code(public_place(source, hub=False))
  base, on_hub = printable(public_place(config.model.path)), is_hub_name(config.model.path)
  values |= {'base': base, 'on_hub': on_hub, 'loaded': base if on_hub else f'…/{base}', 'config': config}
  values |= {'name': printable(values['name']), 'version': sdpo_jax.__version__}
  return markdown.get_template(template).render(values)


def _metadata(made: Exported, config: Config, methods: list[str], steps: Mapping[int, Scores]) -> str:
  """Return the metadata of a card as YAML."""
  from huggingface_hub import EvalResult

  sets = [file.removeprefix(PREFIX).partition('?')[0] for file in config.data.train_files if file.startswith(PREFIX)]
  results = [
    EvalResult('text-generation', printable(task), printable(task), metric, value)
    for (task, metric), value in (steps[max(steps)] if steps and made.weights == 'student' else {}).items()
    if metric != 'questions'
  ]
  return _yaml(
    made.form,
    config,
    methods,
    datasets=[*dict.fromkeys(filter(is_hub_name, sets))] or None,
    model_name=printable(config.name) if results else None,
    eval_results=results or None,
  )


def _yaml(form: str, config: Config, methods: list[str], **more: Any) -> str:
  from huggingface_hub import ModelCardData

  library, relation, _ = FORMATS.get(form, CARTRIDGE)
  base = config.model.path if is_hub_name(config.model.path) else None
  tags = [*map(str.lower, methods), *TAGS]
  data = ModelCardData(library_name=library, base_model=base, base_model_relation=base and relation, tags=tags, **more)
  return data.to_yaml()


def _readable(read: Callable[..., Any], *arguments: Any) -> Any:
  """Return what a function returns; None, with a warning, if it raises a UserError."""
  try:
    return read(*arguments)
  except UserError as error:
    _logger.warning('The model card leaves out what cannot be read: %s', error)
    return None


def _code(text: Any) -> str:
  """Return a text as a Markdown code span that is also valid in a table."""
  text = re.sub(r'\\*\|', r'\\|', printable(str(text))) or '–'  # In tables \\ would undo the \ of |.
  mark = '`' * (1 + max(map(len, re.findall('`+', text)), default=0))
  return f'{mark} {text} {mark}' if len(mark) > 1 else f'{mark}{text}{mark}'


def _scores(line: Mapping[str, Any]) -> Scores:
  """Return the headline metrics of the evaluation in a line of metrics.jsonl."""
  tasks = [name.removesuffix('questions') for name in line if re.fullmatch('(?s)eval/.+/questions', name)]
  found = {(task[5:-1], name.removeprefix(task)): finite(line[name]) for task in tasks for name in line}
  return {name: value for name, value in found.items() if value is not None and _METRIC.fullmatch(name[1])}


def _standard_errors(workdir: epath.PathLike, step: int) -> dict[str, float]:
  """Return the standard error over questions of each task's mean score; empty if the run has not kept the samples."""
  path = epath.Path(workdir) / 'eval' / f'{step}.json'
  found = (_readable(read_sealed, path, 'restore it') if path.exists() else None) or {}
  scores: dict[str, dict[str, list[float]]] = {}
  for sample in found['samples'] if isinstance(found.get('samples'), list) else ():
    if isinstance(sample, dict) and (score := finite(sample.get('score'))) is not None:
      scores.setdefault(str(sample.get('data_source')), {}).setdefault(str(sample.get('id')), []).append(score)
  means = {task: [statistics.fmean(each) for each in questions.values()] for task, questions in scores.items()}
  return {task: statistics.stdev(each) / math.sqrt(len(each)) for task, each in means.items() if len(each) > 1}


def _settings(config: Config) -> dict[str, str]:
  """Return the settings that differ from the defaults, by name, each as JSON on one line."""
  defaults, settings = flatten(Config()), public_settings(flatten(config))
  changed = [name for name in settings if settings[name] != defaults[name] and not is_listed(name, _NOT_LEARNED)]
  return {name: printable(json.dumps(settings[name], ensure_ascii=False), 300) for name in changed}
