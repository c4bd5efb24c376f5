"""Opening, evaluating and exporting a run or a model directory."""

from __future__ import annotations

from collections.abc import Callable, Mapping
import dataclasses
import json
import logging
import os
from typing import Any, Literal

from etils import epath
import jax

from sdpo_jax.config import CartridgeConfig, Config, LoraConfig, ModelConfig
from sdpo_jax.config.fields import flatten, is_listed
from sdpo_jax.config.locations import paths
from sdpo_jax.config.overrides import from_dict
from sdpo_jax.config.privacy import public_place
from sdpo_jax.config.schema import BESIDE_SLOTS
from sdpo_jax.environments.grading import Graders
from sdpo_jax.errors import UserError
from sdpo_jax.evaluation.evaluate import Evaluation
from sdpo_jax.files import check_output, jsonable, write_output
from sdpo_jax.learning.update import abstract_state
from sdpo_jax.models import exporting, hub, huggingface, identity, model_files
from sdpo_jax.models import tokenizer as tokenizers
from sdpo_jax.models.adapters import cartridge_files, named_cartridges, peft_files, published_cartridges
from sdpo_jax.models.adapters.composition import Positions
from sdpo_jax.models.parameters import merge, trainable
from sdpo_jax.reporting import model_card
from sdpo_jax.reporting.model_card import Exported
from sdpo_jax.training import cartridges
from sdpo_jax.training.checkpoint.checkpoints import Checkpoints, only
from sdpo_jax.training.directory import fingerprint
from sdpo_jax.training.directory.published_checkpoints import newest
from sdpo_jax.training.directory.workdir import located, no_run, saved_settings
from sdpo_jax.training.documents import read_document
from sdpo_jax.training.evaluations import evaluate_session
from sdpo_jax.training.opening import check_adapter, check_turn_end, load_tokenizer, make_session, model_mesh
from sdpo_jax.training.questions import held_out_questions
from sdpo_jax.training.run_programs import abstract_table
from sdpo_jax.training.session import Session
from sdpo_jax.training.specs import update_spec
from sdpo_jax.types import TrainState, Tree

_logger = logging.getLogger('sdpo_jax.runs')
DIGEST = 'document_digest'  # Key in an exported cartridge's metadata: `fingerprint.trained_document`.


def run_config(workdir: epath.PathLike) -> Config:
  """Return the settings of a run.

  Raises:
    UserError: there is no run, or its settings cannot be read.
  """
  workdir = located(workdir)
  settings = saved_settings(workdir) if (workdir / 'config.json').exists() else {}
  if settings.keys().isdisjoint(vars(Config())):
    raise no_run(workdir)
  return from_dict(settings)


def open_run(
  workdir: epath.PathLike,
  weights: Literal['student', 'teacher'] = 'student',
  config: Config | None = None,
  step: int | None = None,
  dtype: Literal['float32', 'bfloat16'] | None = None,
  chat_template: str | None = None,
  teaches: bool = False,
) -> tuple[Session, Tree, int]:
  """Return a run's session, the parameters of one of its checkpoints, and its step; the run may still be training.

  Reads nothing else of the checkpoint: no optimizer state, and only the requested one of student and teacher.

  Args:
    workdir: the run's directory.
    weights: student's or teacher's.
    config: settings of the session, except the model, which is the run's; None: the run's settings.
    step: the checkpoint's step; None: the newest readable one.
    dtype: compute dtype of the session; None: the run's.
    chat_template: file with the session's chat template; None: the run's.
    teaches: whether the session includes the teacher of a cartridge, which reads the document of `config`, if there is
      one.

  Raises:
    UserError: there is no run or checkpoint, or the requested teacher has no weights of its own.
  """
  trained = run_config(workdir)
  model = _changed(trained.model, dtype, chat_template)
  model = _without_distractors(model)
  if teaches and config is not None and config.model.cartridge.document and model.cartridge.used:
    read = {name: getattr(config.model.cartridge, name) for name in BESIDE_SLOTS if name != 'distractors'}
    model = dataclasses.replace(model, cartridge=dataclasses.replace(model.cartridge, **read))
  config = dataclasses.replace(config or trained, model=model)
  session, parameters = make_session(config, workdir, teaches=teaches, refit=True)
  like = abstract_state(update_spec(trained), parameters, session.mesh, session.policy.parameter_table())
  del parameters  # There may be no room for both these and the checkpoint's.
  parameters, step = _restored(workdir, weights, like, step, session.config)
  _check_model(workdir, session.config, session.tokenizer, step)
  return session, parameters, step


def _restored(
  workdir: epath.PathLike, weights: Literal['student', 'teacher'], like: TrainState, step: int | None, config: Config
) -> tuple[Tree, int]:
  """Return a checkpoint's trainable parameters and its step; arguments and errors as `open_run`.

  Args:
    workdir: the run's directory.
    weights: student's or teacher's.
    like: abstract training state.
    step: the checkpoint's step; None: the newest readable one.
    config: settings with the run's model.

  Raises:
    UserError: also if the adapter's settings differ from the checkpoint's.
  """
  checkpoints = epath.Path(workdir) / 'checkpoints'
  if not checkpoints.is_dir() or not any(checkpoints.iterdir()):
    raise UserError(f'{workdir} has no checkpoint yet: let the run save one (trainer.save_freq).')
  if weights == 'teacher' and not jax.tree.leaves(like.teacher):
    raise UserError('--weights=teacher: the teacher of this run has no weights of its own; export --weights=student.')
  field = 'teacher' if weights == 'teacher' else 'trainable'
  like = only(field, like)
  expected = newest(workdir) if step is None else step
  _check_adapter(workdir, config, expected)  # Before checkpoints with other factors would be called unreadable.
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
  if step != expected:
    _check_adapter(workdir, config, step)
  return getattr(state, field), step


def _check_adapter(workdir: epath.PathLike, config: Config, step: int) -> None:
  """Raise UserError if the adapter of `config` has other matrices, ranks or scales than the checkpoint's."""
  model = config.model
  changes = fingerprint.adapter_changes(workdir, config, step) if model.frozen else []
  if changes:
    source = model.cartridge.path or model.lora.path or epath.Path(workdir) / 'config.json'
    raise UserError(
      f'{source} describes another {"cartridge" if model.cartridge.used else "adapter"} than that of step {step} of '
      f'{workdir} ({"; ".join(changes)}), so the checkpoint does not fit it: restore it.'
    )


def _without_distractors(model: ModelConfig) -> ModelConfig:
  """Return a model's settings without the cartridges that only training reads, and that may be gone."""
  return dataclasses.replace(model, cartridge=dataclasses.replace(model.cartridge, distractors=()))


def _changed(model: ModelConfig, dtype: str | None, chat_template: str | None) -> ModelConfig:
  """Return a model's settings with the given values, unless None, in place of its own."""
  return dataclasses.replace(
    model, dtype=dtype or model.dtype, chat_template=model.chat_template if chat_template is None else chat_template
  )


def _check_model(workdir: epath.PathLike, config: Config, tokenizer: Any, step: int) -> None:
  """Log a warning if tokenizer or config.json differ from those with which a checkpoint was trained.

  Raises:
    UserError: the checkpoint holds an adapter, and the base's weights differ.
  """
  path, base = config.model.path, []
  try:
    changes = fingerprint.model_changes(workdir, path, tokenizer, step)
    base = fingerprint.base_changes(workdir, path, step) if config.model.frozen else []
  except UserError as error:
    changes = [str(error)]
  if changes:
    _logger.warning('%s is not what the checkpoint of step %d was trained with: %s.', path, step, '; '.join(changes))
  if base:
    kind = 'cartridge' if config.model.cartridge.used else 'adapter'
    raise UserError(
      f'{path} holds other weights than those with which the {kind} of step {step} of {workdir} was trained '
      f'({"; ".join(base)}), so the {kind} does not fit them: restore them.'
    )


@dataclasses.dataclass(frozen=True)
class RunOrModel:
  """A run, or a Hugging Face model, which may be combined with an adapter or a cartridge from another directory."""

  workdir: str | None = None
  model: str | None = None
  step: int | None = None  # Of the run's checkpoint; None: the newest readable one.
  adapter: str | None = None
  cartridge: str | None = None  # Or several, composed.
  positions: Positions = 'overlap'  # Of the slots of several.

  def check(self) -> None:
    """Raise UserError unless either a run or a model is named, and only fields that apply to it are set."""
    adapter, cartridge = self.adapter, self.cartridge
    if (self.workdir is None) == (self.model is None):
      raise UserError('Name one of --workdir=DIR (a run) and --model=HF_DIR (a model directory).')
    if adapter is not None and cartridge is not None:
      raise UserError(f'--adapter={adapter} and --cartridge={cartridge}: a model has one of them; leave the other out.')
    if self.positions != 'overlap' and len(paths(cartridge or '')) == 1:
      raise UserError(f'--positions={self.positions} is about several cartridges: name them as --cartridge=A,B.')
    for flag, given, kinds in (('adapter', adapter, 'directory'), ('cartridge', cartridge, 'directory, a .pt file')):
      if given == '':
        raise UserError(f'--{flag} is empty: name a {kinds} or a name on the hub, or leave it out.')
      if self.workdir is not None and given is not None:
        raise UserError(
          f'--{flag}={given} goes with --model=HF_DIR: a run has its own, which --workdir uses; leave one of them out.'
        )
    if self.workdir is None and self.step is not None:
      raise UserError('--step is about the checkpoints of a run: name it with --workdir, or leave --step out.')


def open_source(
  source: RunOrModel,
  config: Config | None,
  dtype: Literal['float32', 'bfloat16'] | None = None,
  chat_template: str | None = None,
  teaches: bool = False,
) -> tuple[Session, Tree]:
  """Open a run or a Hugging Face directory; return a session and parameters.

  `dtype` sets the session's compute dtype and `chat_template` a file with its template; by default they are the run's,
  or those of `config` for a directory. A session that `teaches` includes the teacher of a cartridge, which reads the
  document of `config`.

  Raises:
    UserError: as `RunOrModel.check`, or what is named cannot be opened.
  """
  source.check()
  model, adapter, cartridge = source.model, source.adapter, source.cartridge
  if source.workdir is not None:
    session, parameters, _ = open_run(
      source.workdir, config=config, step=source.step, dtype=dtype, chat_template=chat_template, teaches=teaches
    )
    return session, parameters
  config = config or Config()
  lora, slots = config.model.lora, config.model.cartridge
  for flag, section, path in (('adapter', 'lora', lora.path), ('cartridge', 'cartridge', slots.path)):
    if path and adapter is None and cartridge is None:
      raise UserError(
        f'--model={model} and model.{section}.path={path} of the config: name that as --{flag}, or leave it out '
        f'with --config.model.{section}.path= to use the model without it.'
      )
  model_files.resolve(model, weights=False, setting='--model')  # Names the flag if there is no such model.
  if adapter is not None or cartridge is not None:
    lora = LoraConfig(path=adapter or '')
    slots = (slots if teaches else CartridgeConfig()).starting_from(cartridge or '')
    slots = dataclasses.replace(slots, positions=source.positions, distractors=())
  settings = dataclasses.replace(config.model, path=model, lora=lora, cartridge=slots)
  settings = _changed(settings, dtype, chat_template)
  config = dataclasses.replace(config, model=settings)
  check_adapter(config)
  return make_session(config, workdir='.', teaches=teaches, refit=True)


# Settings that affect an evaluation.
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
  'environments.reward_weights',
  'environments.judge.model',
  'environments.judge.template',
  'alarms.epistemic_words',
)


def measured_otherwise(trained: Config, config: Config) -> list[str]:
  """Return a phrase for each setting in which an evaluation with `config` differs from the run's own evaluations."""
  ours, now = flatten(trained), flatten(config)
  return [
    f'{name} is {ours[name]!r} there and {now[name]!r} here'
    for name in sorted(now)
    if is_listed(name, MEASURING) and ours[name] != now[name]
  ]


def evaluate_to_file(
  config: Config,
  source: RunOrModel,
  *,
  output: str,
  overwrite: bool = False,
  announce: Callable[[str], None] = lambda text: None,
) -> Evaluation:
  """Evaluate like `evaluate_source`; write the metrics to `output` and the samples beside it.

  Args:
    config: as in `evaluate_source`.
    source: as in `evaluate_source`.
    output: JSON file.
    overwrite: whether existing files may be replaced.
    announce: as in `evaluate_source`.

  Raises:
    UserError: as `evaluate_source`, or the output cannot be written.
  """
  target = epath.Path(output)
  samples = target.with_suffix('.samples.jsonl')
  for path in (target, samples):
    check_output(path, overwrite=overwrite)
  evaluation = evaluate_source(config, source, announce)
  if jax.process_index() == 0:
    write_output(target, json.dumps(jsonable(evaluation.metrics), indent=2, allow_nan=False) + '\n')
    write_output(samples, ''.join(json.dumps(sample, allow_nan=False) + '\n' for sample in evaluation.samples))
  return evaluation


def evaluate_source(
  config: Config, source: RunOrModel, announce: Callable[[str], None] = lambda text: None
) -> Evaluation:
  """Evaluate a run or a model on `config.data.val_files`.

  Questions, sampling and grading follow `config`; weights and model settings are the run's.

  Args:
    config: settings.
    source: the run or the model.
    announce: called with a sentence if the results cannot be compared with the run's own evaluations.

  Raises:
    UserError: as `open_source`, or there are no held-out rows.
  """
  if not config.data.val_files:
    raise UserError('data.val_files of the config is empty: there is nothing to evaluate on.')
  with Graders(config.environments) as graders:
    session, parameters = open_source(source, config, teaches=config.trainer.test_divergence)
    workdir = source.workdir
    check_turn_end(session.config, session.tokenizer)
    different = measured_otherwise(run_config(workdir), config) if workdir is not None else []
    if different:
      announce(f'Not comparable with the evaluations in {workdir}/eval: {"; ".join(different)}.')
    if other := _other_document(config, session, source):
      announce(other)
    examples = held_out_questions(session.config, session.tokenizer)
    graders.prepare({example.environment for example in examples})
    graders.check_questions(examples)
    return evaluate_session(session, parameters, examples, graders)


def _other_document(config: Config, session: Session, source: RunOrModel) -> str | None:
  """Return a warning if a cartridge's document differs from that of the settings; None if it is equal or unknown.

  Args:
    config: settings of the evaluation.
    session: session with the cartridge, if there is one.
    source: where the cartridge is from.
  """
  document, slots = config.model.cartridge.document, session.config.model.cartridge
  if not document or not slots.used or len(paths(slots.path)) + len(paths(document)) > 2:
    return None  # One of several texts may be that one.
  workdir = source.workdir
  if workdir is not None:
    taught = fingerprint.trained_document(workdir, newest(workdir) if source.step is None else source.step)
  else:
    taught = named_cartridges.describe(slots.path).about.get(DIGEST)
  if taught is None:
    return None
  model = dataclasses.replace(session.config.model, cartridge=CartridgeConfig(path=slots.path, document=document))
  try:
    tokens = read_document(dataclasses.replace(session.config, model=model), session.tokenizer)
  except UserError as error:
    return f'Whether {workdir or slots.path} was made from model.cartridge.document={document} is not checked: {error}'
  if identity.digest(tokens) == taught:
    return None
  return (
    f'{workdir or slots.path} was made from another text than {document} (model.cartridge.document of the config), so '
    'it cannot know the answers to questions about that text.'
  )


Format = Literal['model', 'peft', 'merged', 'cartridge', 'cartridge_pt', 'cartridge_pt_fixed']
FORMATS: Mapping[str, tuple[Format, ...]] = {  # By kind of trained parameters, the default first.
  'all parameters': ('model',),
  'an adapter': ('peft', 'merged'),
  'a cartridge': ('cartridge', 'cartridge_pt', 'cartridge_pt_fixed'),
}


def export(
  workdir: str,
  output: str,
  weights: Literal['student', 'teacher'],
  dtype: Literal['float32', 'bfloat16', 'float16'] = 'float32',
  step: int | None = None,
  form: Format | None = None,
  push: str | None = None,
  private: bool = False,
) -> int:
  """Export a run's checkpoint (of `step`, or the newest) for other programs; return its step.

  In a run of several processes, all call this and process 0 writes.

  Args:
    workdir: the run's directory.
    output: directory to create.
    weights: student's or teacher's.
    dtype: dtype of the stored tensors.
    step: the checkpoint's step; None: the newest.
    form: 'model', a Hugging Face model directory of a run that trained all parameters; 'peft', the adapter of a run
      that trained one; 'merged', a model directory with the adapter merged in; 'cartridge', the slots of a run that
      trained some, in this project's format; 'cartridge_pt', in the published one; 'cartridge_pt_fixed', in the
      published one with the key names of its first version. None: the first form that the run supports.
    push: OWNER/NAME of a model on the Hugging Face hub to which the directory is uploaded; None: it is not. Then none
      of its files names a folder of this machine.
    private: whether only those with access may see that model.

  Raises:
    UserError: there is no run or checkpoint, the run does not support the form, `output` is not empty or cannot be
      written, weights are out of the dtype's range, or the hub needs a login or denies writing.
  """
  trained = run_config(workdir)
  kind = (
    'an adapter' if trained.model.lora.used else 'a cartridge' if trained.model.cartridge.used else 'all parameters'
  )
  form = form or FORMATS[kind][0]
  if form not in FORMATS[kind]:
    raise UserError(
      f'--format={form}: {workdir} trained {kind}; export it with --format={" or --format=".join(FORMATS[kind])}.'
    )
  if private and push is None:
    raise UserError('--private is about the model on the hub: name it with --push=OWNER/NAME, or leave --private out.')
  writes = jax.process_index() == 0
  if writes:
    exporting.check_target(output)  # Before gigabytes are read.
  if writes and push is not None:
    hub.check_push(push)
  named = os.path.basename(os.path.abspath(output)) if push is None else push
  made = Exported(workdir, 0, weights, form, dtype, named)
  step = _export(trained, made, output, step, public=push is not None)
  if writes and push is not None:
    hub.push(output, push, private=private)
  return step


def _export(trained: Config, made: Exported, output: str, step: int | None, *, public: bool) -> int:
  """Write an export; return the checkpoint's step. If it becomes `public`, no file names a folder of this machine."""
  workdir, weights, dtype, form = made.workdir, made.weights, made.dtype, made.form
  shown = public_place if public else str
  if trained.model.lora.used:
    return _export_adapter(trained, made, output, step, public=public)
  if form == 'cartridge' and dtype == 'float16':
    raise UserError('--dtype=float16: cartridges are stored in float32 or bfloat16; name one of them.')
  spelling = {'cartridge_pt': 'frozen', 'cartridge_pt_fixed': 'fixed'}.get(form)
  if spelling is not None:
    policy = huggingface.read_policy(trained.model.path, _without_distractors(trained.model))
    published_cartridges.check_servable(output, policy.adapter, policy.config.kv_heads)
  session, parameters, step = open_run(workdir, weights, step=step)
  model, texts = session.config.model, _card(made, trained, step)
  if trained.model.cartridge.used:
    cartridge = cartridges.of_session(session, parameters)
    if spelling is not None:
      published_cartridges.write(output, cartridge, shown(model.path), spelling, dtype, texts)
    else:
      about = {'run': trained.name, 'step': str(step), 'document': shown(model.cartridge.document)}
      taught = fingerprint.trained_document(workdir, step)
      about |= {} if taught is None else {DIGEST: taught}
      origin = cartridge_files.Origin.of(model.path, session.policy.config)
      origin = dataclasses.replace(origin, name=shown(origin.name))
      cartridge_files.write(output, cartridge, origin, dtype, about, texts)
    return step
  huggingface.save(
    output,
    session.policy,
    merge(session.base, parameters),
    source=model.path,
    dtype=dtype,
    texts={**tokenizers.exported(model.path, session.tokenizer, model.chat_template), **texts},
  )
  return step


def _card(made: Exported, config: Config, step: int) -> dict[str, str]:
  """Return the model card of an export of this step, as a file and its text; only process 0 writes one."""
  if jax.process_index() != 0:
    return {}
  return {model_card.FILE: model_card.text_of(dataclasses.replace(made, step=step), config)}


def _export_adapter(config: Config, made: Exported, output: str, step: int | None, *, public: bool) -> int:
  """Write a run's adapter, alone or merged into its base, which stays off the devices; return the checkpoint's step."""
  model, workdir, weights, dtype = config.model, made.workdir, made.weights, made.dtype
  tokenizer = load_tokenizer(config)
  policy = huggingface.read_policy(model.path, model)
  mesh, table = model_mesh(config, policy, refit=True), policy.parameter_table()
  described = abstract_table(trainable(table), mesh)
  factors, step = _restored(workdir, weights, abstract_state(update_spec(config), described, mesh, table), step, config)
  _check_model(workdir, config, tokenizer, step)
  texts = {**tokenizers.exported(model.path, tokenizer, model.chat_template), **_card(made, config, step)}
  if made.form == 'merged':
    huggingface.save_merged(output, policy, factors, model.path, dtype=dtype, texts=texts)
    return step
  base = peft_files.AdapterBase.of(model, policy, identity.of_base(model.path))
  base = dataclasses.replace(base, name=public_place(model.path)) if public else base
  peft_files.save(output, base, factors, companions=model_files.resolve(model.path), texts=texts, dtype=dtype)
  return step
