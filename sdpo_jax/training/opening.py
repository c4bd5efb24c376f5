"""Opening of sessions: loading a model and its tokenizer, and the checks that runs, evaluations and exports share."""

from __future__ import annotations

from collections.abc import Sequence
import functools
import logging
from typing import Any

from etils import epath
import jax

from sdpo_jax.config import Config, MeshConfig
from sdpo_jax.distributed.mesh import check_divides, make_mesh
from sdpo_jax.errors import UserError
from sdpo_jax.learning.optimizer import check_excluded
from sdpo_jax.learning.update import abstract_state, make_update
from sdpo_jax.models import chat_template, flops, huggingface, identity
from sdpo_jax.models import parameters as parameter_tables
from sdpo_jax.models import tokenizer as tokenizers
from sdpo_jax.models.policy import Policy
from sdpo_jax.rollout.sampler import Sampler
from sdpo_jax.teacher.signal import Teacher, check_base, self_teacher
from sdpo_jax.training import cartridges, feedback_writing, teacher_model
from sdpo_jax.training.chunk_bank import ChunkBank, Chunks
from sdpo_jax.training.documents import Texts, read_texts
from sdpo_jax.training.session import Session
from sdpo_jax.training.specs import chat_format, declared_buckets, objective_spec, teacher_spec, update_spec
from sdpo_jax.types import Tree

_logger = logging.getLogger('sdpo_jax.training')


def load_tokenizer(config: Config) -> Any:
  """Return the tokenizer of the model directory; no weights are read.

  Raises:
    UserError: there is no such directory, the architecture is not supported, there is no chat template, or the
      tokenizer or `rollout.stop_token_ids` has token ids without an embedding in the model.
  """
  policy = huggingface.read_policy(config.model.path, config.model)
  if unknown := [token for token in config.rollout.stop_token_ids if not 0 <= token < policy.vocab_size]:
    raise UserError(
      f'rollout.stop_token_ids holds {unknown}: the token ids of {config.model.path} go from 0 to '
      f'{policy.vocab_size - 1}.'
    )
  return tokenizers.load(config.model.path, policy.vocab_size, config.model.chat_template)


def stop_token_ids(config: Config, tokenizer: Any) -> tuple[int, ...]:
  """Return the token ids that end a completion: the model's own and those of the settings, in order."""
  return tuple(sorted({*config.rollout.stop_token_ids, *tokenizers.stop_token_ids(config.model.path, tokenizer)}))


def check_turn_end(config: Config, tokenizer: Any) -> None:
  """Raise UserError if completions do not stop at the token with which the chat template ends an answer.

  A model that writes this token would continue after its answer, and every completion would end at its length limit.
  """
  end = chat_template.turn_end(tokenizer, chat_format(config).variables)
  if end is None or any(stop in end for stop in config.rollout.stop):
    return
  token, stops = tokenizer.convert_tokens_to_ids(end), stop_token_ids(config, tokenizer)
  if token not in stops:
    raise UserError(
      f'The chat template ends an answer with {end!r} (token id {token}), but completions of {config.model.path} end '
      f'with {", ".join(map(str, stops))} only and would go on after it: add {token} to rollout.stop_token_ids, or to '
      'eos_token_id in generation_config.json.'
    )


def template_remarks(config: Config, tokenizer: Any) -> list[str]:
  """Return a sentence about each questionable combination of chat template and settings, which may be intended."""
  variables, remarks = chat_format(config).variables, []
  if unread := [f'data.apply_chat_template_kwargs.{name}' for name in chat_template.unread(tokenizer, variables)]:
    remarks.append(f'The chat template does not read {" and ".join(unread)}, which therefore has no effect.')
  if chat_template.is_dated(tokenizer, variables):
    remarks.append(
      'The chat template writes the current date, so that prompts differ from day to day, even within a resumed run: '
      'set the date by a variable of the template in data.apply_chat_template_kwargs (date_string for Llama), or name '
      'a template without it in model.chat_template.'
    )
  return remarks


def model_mesh(
  config: Config, policy: Policy, devices: Sequence[jax.Device] | None = None, *, refit: bool = False
) -> jax.sharding.Mesh:
  """Return the mesh over `devices` (None: all devices of this run) for a model.

  Args:
    config: settings.
    policy: the model.
    devices: devices of the mesh.
    refit: whether to use the default mesh, with a warning, if the settings do not fit these devices; for commands
      that do not train.

  Raises:
    UserError: the settings do not fit the devices, or they cannot divide the model's axes.
  """
  described = [(parameter.name, parameter.axes, parameter.shape) for parameter in policy.parameter_table()]
  try:
    mesh = make_mesh(config.mesh, devices, described)
    check_divides(mesh, described)
  except UserError as error:
    if not refit:
      raise
    mesh = make_mesh(MeshConfig(), devices, described)
    _logger.warning('A mesh of fsdp=%d × tensor=%d is used, as nothing is trained: %s', *mesh.devices.shape, error)
  return mesh


def check_adapter(config: Config) -> None:
  """Check that the adapter to start from, if any, belongs to this model; log differences that may be intended.

  It is only for new runs: a resumed run is compared with the model that it was trained with (`fingerprint`).

  Raises:
    UserError: the adapter belongs to another model, and `trainer.accept_changes` does not include `model`.
  """
  if config.model.lora.path and 'model' not in config.trainer.accept_changes:
    for remark in identity.compare_base(config.model.lora.path, config.model.path):
      _logger.warning('%s', remark)


def make_session(
  config: Config,
  workdir: epath.PathLike,
  tokenizer: Any = None,
  texts: Texts | None = None,
  chunks: Chunks | None = None,
  teaches: bool = False,
  refit: bool = False,
) -> tuple[Session, Tree]:
  """Return a session and the trainable parameters, after loading the model, its tokenizer and its teacher.

  Args:
    config: settings.
    workdir: directory of the run.
    tokenizer: a tokenizer with a chat template; None: that of the model directory.
    texts: texts of a cartridge, if there is one; None: they are read as needed.
    chunks: what the prompts ask about, as `chunk_bank.check` returns it; None: it is read as needed.
    teaches: whether a teacher is needed; then its document is read, or the separate teacher model is loaded.
    refit: as in `model_mesh`.

  Returns:
    The session, and the trainable parameters as stored in the model directory.

  Raises:
    UserError: the model directory cannot be read, the mesh does not fit, or the model does not support the settings.
  """
  tokenizer = tokenizer or load_tokenizer(config)
  spec = objective_spec(config)
  described = huggingface.read_policy(config.model.path, config.model)
  trained = parameter_tables.trainable(described.parameter_table())
  check_excluded(config.optimizer.weight_decay_exclude, [parameter.name for parameter in trained])
  mesh = model_mesh(config, described, refit=refit)
  policy, parameters = huggingface.load(config.model.path, config.model, mesh=mesh, seed=config.seed)
  teacher: Teacher | None = None  # The model itself.
  bank: ChunkBank | None = None
  if config.model.cartridge.used:
    texts = texts or read_texts(config, tokenizer, teaches=teaches and spec.reads_teacher)
    if texts.document is not None and config.model.cartridge.teacher_scope == 'chunk':
      bank = ChunkBank(config, policy, parameters, chunks or Chunks(config, tokenizer))
      teacher = Teacher(bank.policy, bank.base, beside_student=True)
    elif texts.document is not None:
      teacher = cartridges.document_teacher(config, policy, parameters, texts.document)
    parameters = cartridges.with_slots(config, policy, parameters, texts)
  base, trainable = parameter_tables.split(policy.parameter_table(), parameters)
  state = abstract_state(update_spec(config), trainable, mesh, policy.parameter_table())
  if teaches and teacher_model.is_used(config):
    teacher = teacher_model.load(config, mesh)
  if spec.reads_teacher and teacher is None and not teacher_model.is_used(config):
    check_base(teacher_spec(config), base)
  reader = teacher or self_teacher(policy, teacher_spec(config))
  sampler = functools.partial(
    make_sampler, tokenizer=tokenizer, mesh=mesh, least=config.data.train_batch_size * config.rollout.n
  )
  # If nothing is trained, as in an export, no teacher reads the document.
  writes = config.rollout.sampled_by == 'teacher' or config.trainer.test_divergence
  session = Session(
    config=config,
    workdir=epath.Path(workdir),
    tokenizer=tokenizer,
    policy=policy,
    base=base,
    mesh=mesh,
    sampler=sampler(config, policy=policy),
    spec=spec,
    teacher=reader if spec.reads_teacher else None,
    update=make_update(policy, update_spec(config), jax.tree.map(lambda leaf: leaf.sharding, state), reader),
    flops_per_token=flops.forward_flops_per_token(policy.parameter_table()),
    update_flops_per_token=flops.update_flops_per_token(policy.parameter_table()),
    teacher_flops_per_token=flops.forward_flops_per_token(reader.policy.parameter_table()),
    teachers_sampler=sampler(config, policy=reader.policy) if teacher is not None and writes else None,
    chunks=bank,
  )
  if feedback_writing.writes_itself(config):
    session.feedback_sampler = sampler(feedback_writing.sampler_settings(config), policy=policy)
    session.feedback_sampler.share_base(session.sampler)
  return session, trainable


def make_sampler(
  config: Config,
  policy: Policy,
  tokenizer: Any,
  mesh: jax.sharding.Mesh,
  *,
  resized: bool = True,
  least: int | None = None,
  reprompts: bool = False,
) -> Sampler:
  """Return the sampler that the settings describe.

  Args:
    config: settings.
    policy: the model.
    tokenizer: its tokenizer.
    mesh: as in `Sampler`.
    resized: as in `Sampler`.
    least: as in `Sampler`.
    reprompts: whether it takes prompts of the teacher, too, which may be longer.
  """
  declared = declared_buckets(config)
  return Sampler(
    policy,
    tokenizer,
    prompt_buckets=(*declared.prompt, *declared.reprompt) if reprompts else declared.prompt,
    response_buckets=declared.response,
    max_batch_rows=config.rollout.max_batch_rows,
    decode_chunk=config.rollout.decode_chunk,
    quantized=config.rollout.cache_dtype == 'int8',
    stop=config.rollout.stop,
    stop_token_ids=stop_token_ids(config, tokenizer),
    mesh=mesh,
    resized=resized,
    least=least,
  )
