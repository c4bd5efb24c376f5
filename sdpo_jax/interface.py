"""The public Python interface: the commands as functions, for scripts and notebooks.

Everything here is also available from the package itself, e.g. `sdpo_jax.train`. See docs/python.md.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
import contextlib
import copy
import dataclasses
import functools
import hashlib
import inspect
import json
import os
from typing import Any, Literal, TypeVar

from etils import epath

from sdpo_jax.config import Config, config_files, rewards
from sdpo_jax.config.fields import check_types, matches, type_name, types_of
from sdpo_jax.config.overrides import assign
from sdpo_jax.config.ranges import check_ranges
from sdpo_jax.config.schema import ValKwargs
from sdpo_jax.data.prompts import named_chat_tokens
from sdpo_jax.distributed import accelerators
from sdpo_jax.environments import registry
from sdpo_jax.errors import UserError, short_repr
from sdpo_jax.evaluation.evaluate import Evaluation
from sdpo_jax.files import jsonable, make_directory, write_atomically
from sdpo_jax.inference import runs
from sdpo_jax.inference.generate import GenerationOptions, TextGenerator, as_messages, open_generator
from sdpo_jax.rollout.stops import to_text
from sdpo_jax.training import loop
from sdpo_jax.training.directory import lines
from sdpo_jax.training.directory.locks import unwritable
from sdpo_jax.training.directory.workdir import ROWS, located, no_run
from sdpo_jax.training.evaluations import evaluated
from sdpo_jax.training.loop import Result, run_to_end
from sdpo_jax.training.specs import chat_format
from sdpo_jax.types import Messages

Row = Mapping[str, Any]  # As docs/data.md describes them: 'prompt', and what the grader reads.


Location = str | os.PathLike[str]  # Of a file or directory.
# A grader (`registry.Grader`), a reward function in TRL's form, or the name of a built-in grader; with a weight.
GraderLike = Callable[..., Any] | str
WeightedGrader = tuple[GraderLike, float]
_FILES = {'rows': 'data.train_files', 'held_out': 'data.val_files'}  # Argument → the setting for files of rows.
Checked = TypeVar('Checked', bound=Callable[..., Any])


def _typed(function: Checked) -> Checked:
  """Let a function raise a UserError for an argument that is not of its annotated type, before it does anything."""
  signature = inspect.signature(function)

  @functools.wraps(function)
  def checked(*arguments: Any, **named: Any) -> Any:
    hints = types_of(function)
    try:
      bound = signature.bind(*arguments, **named)
    except TypeError as error:  # Which does not say of what function.
      raise TypeError(f'{function.__name__}: {error}') from None
    for name, value in bound.arguments.items():
      # `_graded_by` takes a grader apart, and `sample` and `generate` a prompt.
      if name in hints.keys() - {'grader', 'prompt'} and not matches(value, hints[name]):
        way = f'; a file goes into {_FILES[name]}' if name in _FILES else ''
        raise UserError(f'{function.__name__}: {name}={short_repr(value)} is not {type_name(hints[name])}{way}.')
    return function(*arguments, **named)

  return checked  # type: ignore[return-value]  # It has the signature of the function.


@_typed
def load_config(file: Location, changes: Mapping[str, Any] | None = None) -> Config:
  """Return the settings of a config file; they may be changed freely and are checked when they are used.

  Args:
    file: 'configs/quickstart.py', of the working directory or else of this installation; or FILE.py:name=value,…
    changes: setting → value, {'optimizer.lr': 1e-4}. Strings are parsed as on the command line.

  Raises:
    UserError: there is no such file, or no such setting.
  """
  return _changed(config_files.read(os.fspath(file)), changes)


def _own(config: Config | Location) -> Config:
  """Return settings that may be changed: a copy, or those of a file."""
  if not isinstance(config, Config):
    return load_config(config)
  check_types(config)  # Not all that is no setting can be copied.
  return copy.deepcopy(config)


def _changed(config: Config, changes: Mapping[str, Any] | None) -> Config:
  for name, value in (changes or {}).items():
    if not isinstance(name, str):
      raise UserError(f'changes has {short_repr(name)} for a setting: name it by a text.')
    assign(config, name, value)
  return config


@dataclasses.dataclass(frozen=True)
class Step:
  """A finished step: its metrics, and the model after it, which can be sampled until the next step begins."""

  number: int  # From 1.
  metrics: Mapping[str, float]  # Its line of metrics.jsonl.
  _stepped: loop.Stepped = dataclasses.field(repr=False)

  @_typed
  def sample(
    self, prompt: str | Messages, *, n: int = 1, max_tokens: int | None = None, temperature: float = 1.0, seed: int = 0
  ) -> list[str]:
    """Return n completions of the current model, sampled with the run's sampler.

    Args:
      prompt: what the user says, or a conversation.
      n: number of completions.
      max_tokens: limit of each completion; None: data.max_response_length, which it must not exceed.
      temperature: 0 is greedy.
      seed: seed of the sampling noise.

    Raises:
      UserError: the prompt is too long, or the next step has begun.
    """
    session, state = self._stepped.session, self._stepped.state
    if state.step.is_deleted():
      raise UserError(f'Step {self.number} can be sampled only until the next one begins.')
    data = session.config.data
    chat = chat_format(session.config)
    [tokens] = named_chat_tokens(session.tokenizer, [as_messages(prompt)], ['The prompt'], data.max_prompt_length, chat)
    if tokens is None or len(tokens) > data.max_prompt_length:
      raise UserError(f'The prompt is longer than data.max_prompt_length={data.max_prompt_length} tokens: shorten it.')
    limit = data.max_response_length if max_tokens is None else max_tokens
    if not 1 <= limit <= data.max_response_length:
      raise UserError(f'max_tokens must be between 1 and data.max_response_length={data.max_response_length}.')
    drawn = session.sampler.stream(
      session.base, state.trainable, [tokens], n=n, max_tokens=limit, temperature=temperature, seed=seed, step=0
    )
    completions = sorted(drawn, key=lambda done: done.sample)
    return [to_text(session.tokenizer, done.tokens.tolist()) for done in completions]


class Callback:
  """Base class of what looks on at a run; override what you need. What a method raises ends the run, which is saved."""

  def on_step(self, step: Step) -> None:
    """Look at a finished step."""

  def on_evaluation(self, step: Step, metrics: Mapping[str, float]) -> None:
    """Look at a finished step that was evaluated, and the metrics of that, `eval/<task>/…`."""

  def on_end(self, result: Result) -> None:
    """Look at a run that has ended and is saved."""


@_typed
def train(
  config: Config | Location | None = None,
  workdir: Location | None = None,
  *,
  model: Location | None = None,
  changes: Mapping[str, Any] | None = None,
  rows: Iterable[Row] | None = None,
  held_out: Iterable[Row] | None = None,
  grader: GraderLike | WeightedGrader | Sequence[GraderLike | WeightedGrader] | None = None,
  on_step: Callable[[Step], None] | None = None,
  callbacks: Sequence[Callback] = (),
  restart: bool = False,
  announce: Callable[[str], None] = lambda text: None,
) -> Result:
  """Train or resume a run, as `python -m launch.train` does; arguments and errors as in `steps`.

  `on_step`, and the methods of `callbacks`, are called after every step. If one raises, the run ends and its last
  complete state is saved.
  """
  if wrong := [callback for callback in callbacks if not isinstance(callback, Callback)]:
    raise UserError(f'callbacks has {short_repr(wrong[0])}, which is no sdpo_jax.Callback: pass a function as on_step.')
  with contextlib.suppress(ValueError):  # Some functions written in C have no signature.
    try:
      inspect.signature(on_step or print).bind(None)
    except TypeError as error:
      raise UserError(f'on_step cannot be called with a step ({error}): let it take one argument.') from error
  made = steps(
    config,
    workdir,
    model=model,
    changes=changes,
    rows=rows,
    held_out=held_out,
    grader=grader,
    restart=restart,
    announce=announce,
  )

  def follow(step: Step) -> None:
    if on_step is not None:
      on_step(step)
    metrics = evaluated(step.metrics)
    for callback in callbacks:
      callback.on_step(step)
      if metrics:
        callback.on_evaluation(step, metrics)

  result = run_to_end(made, follow)
  for callback in callbacks:
    callback.on_end(result)
  return result


@_typed
def steps(
  config: Config | Location | None = None,
  workdir: Location | None = None,
  *,
  model: Location | None = None,
  changes: Mapping[str, Any] | None = None,
  rows: Iterable[Row] | None = None,
  held_out: Iterable[Row] | None = None,
  grader: GraderLike | WeightedGrader | Sequence[GraderLike | WeightedGrader] | None = None,
  restart: bool = False,
  announce: Callable[[str], None] = lambda text: None,
) -> Generator[Step, None, Result]:
  """Train or resume a run and yield after every step; a run that is stopped early can be resumed later.

  The commands, with which this shares caches and checks, can resume, evaluate and export the same run. Rows are written
  into the run's directory, and the run's settings refer to them there.

  Args:
    config: settings, which are copied, or a config file; None: the defaults, for which `model` is needed.
    workdir: local or gs:// directory of the run; None: runs/<name of the config>, as for the command.
    model: the model to train instead of the config's: a directory or a name on the hub.
    changes: setting → value, as in `load_config`, made in the copy.
    rows: questions to train on, instead of data.train_files.
    held_out: questions to evaluate on, instead of data.val_files; None: no evaluations if `rows` are given.
    grader: grades the rows that name no grader: a grader (`registry.Grader`), a reward function in TRL's form or the
      name of a built-in grader, or several of them, each alone or as a pair with its weight; their weighted scores are
      added. Pass functions again to resume the run.
    restart: begin at step 0 if the checkpoints of the run are gone.
    announce: receives messages for the user, e.g. `print`.

  Raises:
    UserError: an error that the caller can fix, in one sentence.
  """
  if config is None:
    if model is None:
      raise UserError('Name a config, or the model to train with the default settings: train(model=…, rows=…, …).')
    config = Config(name=os.path.basename(os.path.normpath(model)))
  own = _own(config)
  if model is not None:
    own.model.path = os.fspath(model)
  _changed(own, changes)
  folder = f'runs/{own.name}' if workdir is None else workdir

  def run() -> Generator[Step, None, Result]:
    accelerators.prepare()
    if rows is not None:
      own.data.train_files = (_written(rows, folder, 'train'),)
      own.data.val_files, own.data.val_max_samples = (), None
      if held_out is None:
        own.trainer.test_freq = 0
    if held_out is not None:
      own.data.val_files = (_written(held_out, folder, 'held_out'),)
    with _graded_by(own, grader):
      made = loop.steps_of(own, folder, restart=restart, announce=announce)
      with contextlib.closing(made):
        while True:
          try:
            stepped = next(made)
          except StopIteration as end:
            result: Result = end.value
            return result
          yield Step(stepped.step, stepped.metrics, stepped)
          del stepped

  return run()  # What is wrong with the arguments has been said by now, before the first step is asked for.


@_typed
def evaluate(
  config: Config | Location,
  *,
  workdir: Location | None = None,
  model: Location | None = None,
  step: int | None = None,
  adapter: Location | None = None,
  cartridge: Location | None = None,
  positions: Literal['overlap', 'sequential'] = 'overlap',
  grader: GraderLike | WeightedGrader | Sequence[GraderLike | WeightedGrader] | None = None,
  announce: Callable[[str], None] = lambda text: None,
) -> Evaluation:
  """Return metrics and all samples of a run or a model on data.val_files, as `python -m launch.evaluate` does.

  Args:
    config: settings, which are copied, or a config file.
    workdir: directory of a run.
    model: a Hugging Face directory or a name on the hub, instead of a run.
    step: which checkpoint of the run; None: the newest.
    adapter: a LoRA adapter for the model: a directory or a name on the hub.
    cartridge: a cartridge for the model: a directory, a .pt file or a name on the hub; several are divided by commas.
    positions: as in `model.cartridge.positions`.
    grader: as in `steps`.
    announce: receives a message if the numbers cannot be compared with the run's own evaluations.

  Raises:
    UserError: as in `steps`.
  """
  accelerators.prepare()
  config = _own(config)
  with _graded_by(config, grader):
    config.validate()
    source = _source(step, positions, workdir=workdir, model=model, adapter=adapter, cartridge=cartridge)
    return runs.evaluate_source(config, source, announce)


@_typed
def generator(
  workdir: Location | None = None,
  *,
  model: Location | None = None,
  step: int | None = None,
  adapter: Location | None = None,
  cartridge: Location | None = None,
  positions: Literal['overlap', 'sequential'] = 'overlap',
  n: int = 1,
  max_tokens: int = 256,
  max_prompt_length: int | None = None,
  temperature: float = 0.6,
  top_p: float = 0.95,
  top_k: int = -1,
  min_p: float = 0.0,
  seed: int = 0,
  dtype: Literal['float32', 'bfloat16'] | None = None,
) -> TextGenerator:
  """Return a generator that answers prompts with a run or a model, as `python -m launch.sample` does: `.generate('…')`.

  Args:
    workdir: directory of a run.
    model: a Hugging Face directory or a name on the hub, instead of a run.
    step: which checkpoint of the run; None: the newest.
    adapter: a LoRA adapter for the model: a directory or a name on the hub.
    cartridge: a cartridge for the model: a directory, a .pt file or a name on the hub; several are divided by commas.
    positions: as in `model.cartridge.positions`.
    n: completions per prompt.
    max_tokens: limit of each completion.
    max_prompt_length: limit of a prompt with the chat template, in tokens; None: that of the run, or 2,048.
    temperature: 0 is greedy.
    top_p: keep the smallest set of tokens with this probability.
    top_k: keep the k most likely tokens; −1 keeps all.
    min_p: drop tokens less likely than this part of the most likely one.
    seed: seed of the sampling noise.
    dtype: the dtype of the computation; None: the run's own, or float32 for a model.

  Raises:
    UserError: there is no such run or model.
  """
  accelerators.prepare()
  sampling = ValKwargs(n=n, temperature=temperature, top_p=top_p, top_k=top_k, min_p=min_p)
  check_ranges(sampling)
  limits = ('max_tokens', max_tokens, 1), ('max_prompt_length', max_prompt_length, 1), ('seed', seed, 0)
  for name, value, least in limits:
    if value is not None and value < least:
      raise UserError(f'{name} must be at least {least}, not {value}.')
  options = GenerationOptions(sampling, max_tokens, seed, max_prompt_length, dtype=dtype)
  return open_generator(
    _source(step, positions, workdir=workdir, model=model, adapter=adapter, cartridge=cartridge), options
  )


@_typed
def export(
  workdir: Location,
  output: Location,
  *,
  weights: Literal['student', 'teacher'] = 'student',
  format: runs.Format | None = None,
  dtype: Literal['float32', 'bfloat16', 'float16'] = 'float32',
  step: int | None = None,
  push: str | None = None,
  private: bool = False,
) -> int:
  """Export what a run has trained for other programs, as `python -m launch.export` does; return the step exported.

  Args:
    workdir: directory of the run.
    output: directory to create.
    weights: whether to export the student's or the teacher's.
    format: see `runs.export`; None: the first format that suits the run.
    dtype: the dtype of the stored tensors.
    step: which checkpoint; None: the newest.
    push: OWNER/NAME of a model on the Hugging Face hub to which the directory is uploaded, too.
    private: whether to make that model private.

  Raises:
    UserError: as in `runs.export`.
  """
  accelerators.prepare()
  return runs.export(os.fspath(workdir), os.fspath(output), weights, dtype, step, format, push, private)


@_typed
def read_metrics(workdir: Location) -> list[dict[str, Any]]:
  """Return the lines of a run's metrics.jsonl, without those of a process from which another had taken the run.

  Raises:
    UserError: there is no run, or a line cannot be read.
  """
  if not any((epath.Path(workdir) / name).exists() for name in ('config.json', lines.METRICS)):
    raise no_run(epath.Path(workdir))
  return lines.read_metrics(workdir)


def _source(
  step: int | None, positions: Literal['overlap', 'sequential'], **places: Location | None
) -> runs.RunOrModel:
  if (places['workdir'] is None) == (places['model'] is None):
    raise UserError('Name either workdir, a run, or model, a directory or a name on the hub.')
  named = {name: os.fspath(place) for name, place in places.items() if place is not None}
  return runs.RunOrModel(step=step, positions=positions, **named)


def _written(rows: Iterable[Row], workdir: epath.PathLike, name: str) -> str:
  """Write rows into a run's directory and return the path, which is the same for the same rows."""
  written = []
  for number, row in enumerate(rows):
    if not isinstance(row, Mapping):
      raise UserError(f'Row {number} is {short_repr(row)}: rows are mappings with a prompt, see docs/data.md.')
    written.append(json.dumps(jsonable(row), allow_nan=False) + '\n')  # In ASCII: texts may hold lone surrogates.
  if not written:
    raise UserError('There are no rows: hand over at least one.')
  text = ''.join(written)
  folder = located(workdir) / ROWS / hashlib.sha256(text.encode()).hexdigest()[:16]
  path = folder / f'{name}.jsonl'  # Evaluations report the questions under this name.
  if not path.exists():
    try:
      make_directory(folder)
      write_atomically(path, text)
    except (OSError, ValueError) as error:  # ValueError: no name of a file.
      raise unwritable(epath.Path(workdir), error) from error
  return str(path)


def _is_grader(value: Any) -> bool:
  return callable(value) or isinstance(value, str)


@contextlib.contextmanager
def _graded_by(config: Config, grader: Any) -> Generator[None]:
  """Register the graders of the rows that name none, while the block runs."""
  if grader is None:
    yield
    return
  pair = isinstance(grader, tuple) and len(grader) == 2 and not _is_grader(grader[1])
  found: dict[str, Any] = {}
  texts = []
  for entry in grader if isinstance(grader, list | tuple) and not pair else [grader]:
    function, *weight = entry if isinstance(entry, tuple) and len(entry) == 2 else [entry]
    if not _is_grader(function):
      raise UserError(
        f'grader has {short_repr(entry)}: each is a function, the name of a grader, or a pair of one and its weight.'
      )
    name = function if isinstance(function, str) else getattr(function, '__name__', type(function).__name__).strip('<>')
    try:
      texts.append(str(rewards.Reward(name, *(rewards.weight_of(name, value) for value in weight))))
      rewards.parse(','.join(texts))
    except rewards.UnreadableRewards as error:
      raise UserError(f'grader {error}.') from error
    found[name] = function
  if not found:
    raise UserError('grader is empty: leave it out, or name a grader.')
  with contextlib.ExitStack() as registering:
    for name, function in found.items():
      if isinstance(function, str):
        registry.require(name)
        continue
      try:
        registering.enter_context(registry.registered(name, function))
      except ValueError as error:
        raise UserError(
          f'The grader cannot be called {name!r} ({str(error).rstrip(".")}): rename the function.'
        ) from error
    config.data.environment = ','.join(texts)
    yield
