"""Using a run or a model directory: evaluate, export, sample."""

from __future__ import annotations

import dataclasses
import json
import pathlib
from typing import Any, Literal

from etils import epath
import jax

from models import huggingface
from sdpo_jax.config import Config, ValKwargs, from_dict
from sdpo_jax.data import pipeline
from sdpo_jax.data.prompts import chat_tokens
from sdpo_jax.environments import registry
from sdpo_jax.errors import UserError
from sdpo_jax.training.checkpoints import Checkpoints
from sdpo_jax.training.evaluation import Evaluation, evaluate
from sdpo_jax.training.session import Session, make_session
from sdpo_jax.training.step import abstract_state
from sdpo_jax.types import Tree


def run_config(workdir: epath.PathLike) -> Config:
  """The settings of a run.

  Raises:
    UserError: no run there.
  """
  path = epath.Path(workdir) / 'config.json'
  if not path.exists():
    raise UserError(f'--workdir={workdir} is not a run: there is no {path.name} in it.')
  return from_dict(json.loads(path.read_text()))


def open_run(workdir: epath.PathLike, weights: Literal['student', 'teacher'] = 'student') -> tuple[Session, Tree, int]:
  """A run's session, its parameters and the step of its newest readable checkpoint.

  Raises:
    UserError: no run or checkpoint there, or a teacher without weights of its own is asked for.
  """
  config = run_config(workdir)
  session, parameters = make_session(config, workdir)
  checkpoints = Checkpoints(workdir, keep=config.trainer.max_ckpt_to_keep, best_metric=config.trainer.best_metric)
  restored = checkpoints.restore(abstract_state(config, parameters, session.mesh))
  checkpoints.close()
  if restored is None:
    raise UserError(f'{workdir} has no checkpoint yet: let the run save one (trainer.save_freq).')
  step, state, _ = restored
  if weights == 'teacher' and not jax.tree.leaves(state.teacher):
    raise UserError('--weights=teacher: the teacher of this run has no weights of its own; export --weights=student.')
  return session, state.teacher if weights == 'teacher' else state.trainable, step


def open_model(path: str, config: Config) -> tuple[Session, Tree]:
  """A session over a Hugging Face model directory with the given settings."""
  config = dataclasses.replace(config, model=dataclasses.replace(config.model, path=path))
  return make_session(config, workdir='.')


def evaluate_to_file(config: Config, *, workdir: str | None, model: str | None, output: str) -> Evaluation:
  """Evaluates a run or a model on `config.data.val_files`; writes the metrics to `output`, the samples beside it.

  Raises:
    UserError: neither or both of workdir and model, or no held-out rows.
  """
  if (workdir is None) == (model is None):
    raise UserError('Name one of --workdir=DIR (a run) and --model=HF_DIR (a model directory).')
  if not config.data.val_files:
    raise UserError('data.val_files of the config is empty: there is nothing to evaluate on.')
  if workdir is not None:
    session, parameters, _ = open_run(workdir)
    session = dataclasses.replace(session, config=dataclasses.replace(config, model=session.config.model))
  else:
    session, parameters = open_model(model, config)
  examples = pipeline.evaluation_examples(session.config, session.tokenizer, registry)
  evaluation = evaluate(
    session.sampler, session.base, parameters, examples, session.config, session.tokenizer, seed=config.seed
  )
  target = pathlib.Path(output)
  target.parent.mkdir(parents=True, exist_ok=True)
  target.write_text(json.dumps(evaluation.metrics, indent=2) + '\n')
  samples = target.with_suffix('.samples.jsonl')
  samples.write_text(''.join(json.dumps(sample) + '\n' for sample in evaluation.samples))
  return evaluation


def export(workdir: str, output: str, weights: Literal['student', 'teacher'], dtype: str = 'float32') -> int:
  """Writes a run's newest checkpoint as a Hugging Face model directory; returns its step.

  Raises:
    UserError: no run or checkpoint, or `output` holds something already.
  """
  target = pathlib.Path(output)
  if target.exists() and any(target.iterdir()):
    raise UserError(f'--output={output} is not empty: name a new directory, nothing is overwritten.')
  session, parameters, step = open_run(workdir, weights)
  huggingface.save(output, session.policy, parameters, source=session.config.model.path, dtype=dtype)
  return step


def sample_text(
  *, workdir: str | None, model: str | None, prompt: str, sampling: ValKwargs, max_tokens: int, seed: int
) -> str:
  """One completion of a single user turn.

  Raises:
    UserError: neither or both of workdir and model.
  """
  if (workdir is None) == (model is None):
    raise UserError('Name one of --workdir=DIR (a run) and --model=HF_DIR (a model directory).')
  limits: dict[str, Any] = {'max_response_length': max_tokens, 'response_buckets': ()}
  if workdir is not None:
    session, parameters, _ = open_run(workdir)
    config = session.config
  else:
    config = Config()
    config.model.path = model
    config.model.dtype = 'float32'
  config = dataclasses.replace(
    config, val_kwargs=sampling, data=dataclasses.replace(config.data, **limits, prompt_buckets=())
  )
  if workdir is not None:
    session, _ = make_session(config, workdir)
  else:
    session, parameters = open_model(model, config)
  messages = [{'role': 'user', 'content': prompt}]
  [tokens] = chat_tokens(session.tokenizer, [messages], config.data.enable_thinking)
  if len(tokens) > config.data.max_prompt_length:
    raise UserError(f'--prompt has {len(tokens)} tokens, the limit is {config.data.max_prompt_length}: shorten it.')
  rollouts = session.sampler.sample(
    session.base,
    parameters,
    [tokens],
    n=1,
    temperature=sampling.temperature,
    top_p=sampling.top_p,
    top_k=sampling.top_k,
    min_p=sampling.min_p,
    max_tokens=max_tokens,
    seed=seed,
    step=0,
  )
  return rollouts.text[0]
