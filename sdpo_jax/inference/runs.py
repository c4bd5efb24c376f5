"""Using a run or a model directory: open, evaluate, export."""

from __future__ import annotations

from collections.abc import Callable
import dataclasses
import json
import logging
from typing import Literal

from etils import epath
import jax

from models import exporting, huggingface
from models import tokenizer as tokenizers
from models.parameters import merge
from sdpo_jax.config import Config, ModelConfig, flatten, from_dict, is_listed
from sdpo_jax.data import pipeline
from sdpo_jax.environments import registry
from sdpo_jax.environments.grading import Graders
from sdpo_jax.errors import UserError
from sdpo_jax.evaluation.evaluate import Evaluation, evaluate
from sdpo_jax.files import check_output, jsonable, write_output
from sdpo_jax.training.checkpoint.checkpoints import Checkpoints, only
from sdpo_jax.training.directory import fingerprint
from sdpo_jax.training.directory.workdir import saved_settings
from sdpo_jax.training.session import Session, check_turn_end, make_session
from sdpo_jax.training.update import abstract_state
from sdpo_jax.types import Tree

_logger = logging.getLogger('sdpo_jax.runs')


def run_config(workdir: epath.PathLike) -> Config:
  """Return the settings of a run.

  Raises:
    UserError: no run there, or its settings cannot be read.
  """
  path = epath.Path(workdir) / 'config.json'
  if not path.exists():
    raise UserError(f'--workdir={workdir} is not a run: there is no {path.name} in it.')
  return from_dict(saved_settings(workdir))


def open_run(
  workdir: epath.PathLike,
  weights: Literal['student', 'teacher'] = 'student',
  config: Config | None = None,
  step: int | None = None,
  dtype: Literal['float32', 'bfloat16'] | None = None,
  chat_template: str | None = None,
) -> tuple[Session, Tree, int]:
  """Return a run's session, the parameters of one of its checkpoints, and its step; the run may be going on.

  Of the checkpoint nothing else is read: no optimizer state, and of student and teacher the one that is asked for.

  Args:
    workdir: of the run.
    weights: whose.
    config: settings of the session, but for the model, which is the run's; None: the run's.
    step: of the checkpoint; None: the newest readable one.
    dtype: in which the session computes; None: the run's.
    chat_template: file with that of the session; None: the run's.

  Raises:
    UserError: no run or checkpoint there, or a teacher without weights of its own is asked for.
  """
  trained = run_config(workdir)
  model = _changed(trained.model, dtype, chat_template)
  config = dataclasses.replace(config or trained, model=model)
  session, parameters = make_session(config, workdir)
  checkpoints = epath.Path(workdir) / 'checkpoints'
  if not checkpoints.is_dir() or not any(checkpoints.iterdir()):
    raise UserError(f'{workdir} has no checkpoint yet: let the run save one (trainer.save_freq).')
  like = abstract_state(trained, parameters, session.mesh, session.policy.parameter_table())
  if weights == 'teacher' and not jax.tree.leaves(like.teacher):
    raise UserError('--weights=teacher: the teacher of this run has no weights of its own; export --weights=student.')
  del parameters  # There may be no room for both these and those of the checkpoint.
  field = 'teacher' if weights == 'teacher' else 'trainable'
  like = only(field, like)
  reader = Checkpoints(workdir, read_only=True)
  try:
    if step is not None:
      if step not in reader.steps():
        raise UserError(f'--step={step}: {workdir} has checkpoints of the steps {reader.steps()}; name one of them.')
      state = reader.restore_step(step, like)
    else:
      restored = reader.restore(like)
      if restored is None:
        raise UserError(f'{workdir} has no checkpoint yet: let the run save one (trainer.save_freq).')
      step, state, _ = restored
  finally:
    reader.close()
  _name_changes(workdir, session, step)
  return session, getattr(state, field), step


def _changed(model: ModelConfig, dtype: str | None, chat_template: str | None) -> ModelConfig:
  """The settings of a model with what is not None in place of theirs."""
  return dataclasses.replace(
    model, dtype=dtype or model.dtype, chat_template=model.chat_template if chat_template is None else chat_template
  )


def _name_changes(workdir: epath.PathLike, session: Session, step: int) -> None:
  """Say that tokenizer or config.json are not those with which a checkpoint was trained."""
  try:
    changes = fingerprint.model_changes(workdir, session.config.model.path, session.tokenizer, step)
  except UserError as error:
    changes = [str(error)]
  if changes:
    _logger.warning(
      '%s is not what the checkpoint of step %d was trained with: %s.',
      session.config.model.path,
      step,
      '; '.join(changes),
    )


def open_source(
  workdir: str | None,
  model: str | None,
  config: Config | None,
  step: int | None = None,
  dtype: Literal['float32', 'bfloat16'] | None = None,
  chat_template: str | None = None,
) -> tuple[Session, Tree]:
  """A session and parameters of either a run (its newest checkpoint, or that of `step`) or a Hugging Face directory.

  With `dtype` the session computes in that, and with `chat_template` it has the template in this file; otherwise all is as
  in the run, or for a directory as in `config`.

  Raises:
    UserError: neither or both are named, or a step of a model directory.
  """
  if (workdir is None) == (model is None):
    raise UserError('Name one of --workdir=DIR (a run) and --model=HF_DIR (a model directory).')
  if workdir is not None:
    session, parameters, _ = open_run(workdir, config=config, step=step, dtype=dtype, chat_template=chat_template)
    return session, parameters
  if step is not None:
    raise UserError('--step is about the checkpoints of a run: name it with --workdir, or leave --step out.')
  config = config or Config()
  settings = _changed(dataclasses.replace(config.model, path=model), dtype, chat_template)
  return make_session(dataclasses.replace(config, model=settings), workdir='.')


# Settings that change what an evaluation measures.
MEASURING = (
  'val_kwargs',
  'data.val_files',
  'data.val_max_samples',
  'data.environment',
  'data.max_prompt_length',
  'data.max_response_length',
  'data.filter_overlong_prompts',
  'data.enable_thinking',
  'data.apply_chat_template_kwargs',
  'data.split_special_tokens',
  'rollout.stop',
  'rollout.stop_token_ids',
  'environments.profile',
  'environments.modules',
  'environments.judge.model',
  'environments.judge.template',
  'alarms.epistemic_words',
)


def measured_otherwise(trained: Config, config: Config) -> list[str]:
  """Phrases naming the settings in which an evaluation with `config` differs from those of the run itself."""
  ours, now = flatten(trained), flatten(config)
  return [
    f'{name} is {ours[name]!r} there and {now[name]!r} here'
    for name in sorted(now)
    if is_listed(name, MEASURING) and ours[name] != now[name]
  ]


def evaluate_to_file(
  config: Config,
  *,
  workdir: str | None,
  model: str | None,
  output: str,
  step: int | None = None,
  overwrite: bool = False,
  announce: Callable[[str], None] = lambda text: None,
) -> Evaluation:
  """Evaluates a run or a model on `config.data.val_files`; writes the metrics to `output`, the samples beside it.

  What is asked and how it is sampled and graded is the config's; weights and model settings are the run's.

  Args:
    config: settings.
    workdir: of a run.
    model: Hugging Face directory, instead.
    output: JSON file.
    step: of the run's checkpoint; None: the newest.
    overwrite: whether files that are there already may be replaced.
    announce: receives a sentence where the numbers cannot be compared with the run's own evaluations.

  Raises:
    UserError: neither or both of workdir and model, no held-out rows, or an output that cannot be written.
  """
  if not config.data.val_files:
    raise UserError('data.val_files of the config is empty: there is nothing to evaluate on.')
  target = epath.Path(output)
  samples = target.with_suffix('.samples.jsonl')
  for path in (target, samples):
    check_output(path, overwrite=overwrite)
  with Graders(config.environments) as graders:
    session, parameters = open_source(workdir, model, config, step)
    check_turn_end(session.config, session.tokenizer)
    different = measured_otherwise(run_config(workdir), config) if workdir is not None else []
    if different:
      announce(f'Not measured as the run evaluates itself in {workdir}/eval: {"; ".join(different)}.')
    examples = pipeline.evaluation_examples(session.config, session.tokenizer, registry)
    graders.prepare({example.environment for example in examples})
    evaluation = evaluate(
      session.sampler, session.base, parameters, examples, session.config, session.tokenizer, graders, seed=config.seed
    )
  if jax.process_index() != 0:
    return evaluation
  write_output(target, json.dumps(jsonable(evaluation.metrics), indent=2, allow_nan=False) + '\n')
  write_output(samples, ''.join(json.dumps(sample, allow_nan=False) + '\n' for sample in evaluation.samples))
  return evaluation


def export(
  workdir: str,
  output: str,
  weights: Literal['student', 'teacher'],
  dtype: Literal['float32', 'bfloat16', 'float16'] = 'float32',
  step: int | None = None,
) -> int:
  """Writes a run's checkpoint (of `step`, or the newest) as a Hugging Face model directory; returns its step.

  In a run of several processes all call this, and process 0 writes.

  Raises:
    UserError: no run or checkpoint, `output` holds something already or cannot be written, or the weights hold values
      that the dtype cannot.
  """
  if jax.process_index() == 0:
    exporting.check_target(output)  # Before gigabytes are read.
  session, parameters, step = open_run(workdir, weights, step=step)
  model = session.config.model
  huggingface.save(
    output,
    session.policy,
    merge(session.base, parameters),
    source=model.path,
    dtype=dtype,
    texts=tokenizers.exported(model.path, session.tokenizer, model.chat_template),
  )
  return step
