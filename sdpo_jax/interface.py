"""The public Python interface: the commands as functions, for scripts and notebooks.

Everything here is also available from the package itself, e.g. `sdpo_jax.train`. See docs/python.md.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Mapping
import contextlib
import copy
import dataclasses
import hashlib
import json
import os
from typing import Any, Literal

from etils import epath

from sdpo_jax.config import Config, SamplingConfig
from sdpo_jax.config import config_files as config_files
from sdpo_jax.config.overrides import assign
from sdpo_jax.data.prompts import named_chat_tokens
from sdpo_jax.distributed import accelerators
from sdpo_jax.environments import registry
from sdpo_jax.errors import UserError, short_repr
from sdpo_jax.evaluation.evaluate import Evaluation
from sdpo_jax.files import jsonable, make_directory, write_atomically
from sdpo_jax.inference import runs
from sdpo_jax.inference.generate import GenerationOptions, TextGenerator, open_generator
from sdpo_jax.rollout.stops import to_text
from sdpo_jax.training import loop
from sdpo_jax.training.directory.lines import read_metrics as read_metrics
from sdpo_jax.training.directory.workdir import ROWS
from sdpo_jax.training.loop import Result, run_to_end
from sdpo_jax.training.specs import chat_format
from sdpo_jax.types import Messages

Row = Mapping[str, Any]  # As docs/data.md describes them: 'prompt', and what the grader reads.


def load_config(file: str, changes: Mapping[str, Any] | None = None) -> Config:
  """Return the settings of a config file; they may be changed freely and are checked when they are used.

  Args:
    file: 'configs/quickstart.py', of the working directory or else of this installation; or FILE.py:name=value,…
    changes: setting → value, {'optimizer.lr': 1e-4}. Strings are parsed as on the command line.

  Raises:
    UserError: there is no such file, or no such setting.
  """
  config = config_files.read(file)
  for name, value in (changes or {}).items():
    assign(config, name, value)
  return config


@dataclasses.dataclass(frozen=True)
class Step:
  """A finished step: its metrics, and the model after it, which can be sampled until the next step begins."""

  number: int  # From 1.
  metrics: Mapping[str, float]  # Its line of metrics.jsonl.
  _stepped: loop.Stepped

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
      UserError: the prompt is too long.
    """
    session, state = self._stepped.session, self._stepped.state
    data = session.config.data
    chat = chat_format(session.config)
    [tokens] = named_chat_tokens(session.tokenizer, [_messages(prompt)], ['The prompt'], data.max_prompt_length, chat)
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


def train(
  config: Config,
  workdir: epath.PathLike,
  *,
  rows: Iterable[Row] | None = None,
  held_out: Iterable[Row] | None = None,
  grader: Callable[..., Any] | None = None,
  on_step: Callable[[Step], None] | None = None,
  restart: bool = False,
  announce: Callable[[str], None] = lambda text: None,
) -> Result:
  """Train or resume a run, as `python -m launch.train` does; arguments and errors as in `steps`.

  `on_step` is called after every step. If it raises, the run ends and its last complete state is saved.
  """
  made = steps(config, workdir, rows=rows, held_out=held_out, grader=grader, restart=restart, announce=announce)
  return run_to_end(made, on_step)


def steps(
  config: Config,
  workdir: epath.PathLike,
  *,
  rows: Iterable[Row] | None = None,
  held_out: Iterable[Row] | None = None,
  grader: Callable[..., Any] | None = None,
  restart: bool = False,
  announce: Callable[[str], None] = lambda text: None,
) -> Generator[Step, None, Result]:
  """Train or resume a run and yield after every step; a run that is stopped early can be resumed later.

  The commands, with which this shares caches and checks, can resume, evaluate and export the same run. Rows are written
  into the run's directory, and the run's settings refer to them there.

  Args:
    config: settings; they are copied.
    workdir: local or gs:// directory of the run.
    rows: questions to train on, instead of data.train_files.
    held_out: questions to evaluate on, instead of data.val_files; None: no evaluations if `rows` are given.
    grader: grades the rows that name no grader: a grader (`registry.Grader`) or a reward function in TRL's form. Pass
      it again to resume the run.
    restart: begin at step 0 if the checkpoints of the run are gone.
    announce: receives messages for the user, e.g. `print`.

  Raises:
    UserError: an error that the caller can fix, in one sentence.
  """
  accelerators.prepare()
  config = copy.deepcopy(config)
  if rows is not None:
    config.data.train_files = (_written(rows, workdir, 'train'),)
    config.data.val_files, config.data.val_max_samples = (), None
    if held_out is None:
      config.trainer.test_freq = 0
  if held_out is not None:
    config.data.val_files = (_written(held_out, workdir, 'held_out'),)
  with _graded_by(config, grader):
    made = loop.steps_of(config, workdir, restart=restart, announce=announce)
    with contextlib.closing(made):
      while True:
        try:
          stepped = next(made)
        except StopIteration as end:
          return end.value
        yield Step(stepped.step, stepped.metrics, stepped)
        del stepped


def evaluate(
  config: Config,
  *,
  workdir: str | None = None,
  model: str | None = None,
  step: int | None = None,
  adapter: str | None = None,
  cartridge: str | None = None,
  grader: Callable[..., Any] | None = None,
  announce: Callable[[str], None] = lambda text: None,
) -> Evaluation:
  """Return metrics and all samples of a run or a model on data.val_files, as `python -m launch.evaluate` does.

  Args:
    config: settings; they are copied.
    workdir: directory of a run.
    model: a Hugging Face directory or a name on the hub, instead of a run.
    step: which checkpoint of the run; None: the newest.
    adapter: a LoRA adapter for the model: a directory or a name on the hub.
    cartridge: a cartridge for the model: a directory, a .pt file or a name on the hub.
    grader: as in `steps`.
    announce: receives a message if the numbers cannot be compared with the run's own evaluations.

  Raises:
    UserError: as in `steps`.
  """
  accelerators.prepare()
  config = copy.deepcopy(config)
  with _graded_by(config, grader):
    config.validate()
    return runs.evaluate_source(config, runs.RunOrModel(workdir, model, step, adapter, cartridge), announce)


def generator(
  workdir: str | None = None,
  *,
  model: str | None = None,
  step: int | None = None,
  adapter: str | None = None,
  cartridge: str | None = None,
  n: int = 1,
  max_tokens: int = 256,
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
    cartridge: a cartridge for the model: a directory, a .pt file or a name on the hub.
    n: completions per prompt.
    max_tokens: limit of each completion.
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
  sampling = SamplingConfig(n=n, temperature=temperature, top_p=top_p, top_k=top_k, min_p=min_p)
  options = GenerationOptions(sampling=sampling, max_tokens=max_tokens, seed=seed, dtype=dtype)
  return open_generator(runs.RunOrModel(workdir, model, step, adapter, cartridge), options)


def export(
  workdir: str,
  output: str,
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
  return runs.export(workdir, output, weights, dtype, step, format, push, private)


def _messages(prompt: str | Messages) -> Messages:
  return [{'role': 'user', 'content': prompt}] if isinstance(prompt, str) else prompt


def _written(rows: Iterable[Row], workdir: epath.PathLike, name: str) -> str:
  """Write rows into a run's directory and return the path, which is the same for the same rows."""
  lines = []
  for number, row in enumerate(rows):
    if not isinstance(row, Mapping):
      raise UserError(f'Row {number} is {short_repr(row)}: rows are mappings with a prompt, see docs/data.md.')
    lines.append(json.dumps(jsonable(row), allow_nan=False) + '\n')  # In ASCII: texts may hold lone surrogates.
  if not lines:
    raise UserError('There are no rows: hand over at least one.')
  text = ''.join(lines)
  folder = epath.Path(workdir) / ROWS / hashlib.sha256(text.encode()).hexdigest()[:16]
  path = folder / f'{name}.jsonl'  # Evaluations report the questions under this name.
  if not path.exists():
    make_directory(folder)
    write_atomically(path, text)
  return os.fspath(path)


@contextlib.contextmanager
def _graded_by(config: Config, grader: Callable[..., Any] | None) -> Generator[None]:
  """Register a grader for the rows that name none, while the block runs."""
  if grader is None:
    yield
    return
  name = getattr(grader, '__name__', type(grader).__name__).strip('<>')
  with contextlib.ExitStack() as registering:
    try:
      registering.enter_context(registry.registered(name, grader))
    except ValueError as error:
      raise UserError(
        f'The grader cannot be called {name!r} ({str(error).rstrip(".")}): rename the function.'
      ) from error
    config.data.environment = name
    yield


__all__ = (
  'Step',
  'evaluate',
  'export',
  'generator',
  'load_config',
  'read_metrics',
  'steps',
  'train',
)
