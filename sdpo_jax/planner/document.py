"""The number of tokens in the document that a cartridge's teacher reads, on which the cost of the run depends."""

from __future__ import annotations

from sdpo_jax.config import Config
from sdpo_jax.errors import UserError
from sdpo_jax.training.documents import check_length, check_slots, read_texts
from sdpo_jax.training.opening import load_tokenizer
from sdpo_jax.training.specs import objective_spec


def tokens(config: Config, positions: int | None) -> int:
  """Return the tokens of the run's document, from `plan.document_tokens` or counted by its tokenizer.

  Args:
    config: settings.
    positions: the model's maximum positions; None: unknown.

  Returns:
    The number of tokens; 0 without a cartridge, or without a teacher that reads a document.

  Raises:
    UserError: neither gives the number, or a run would reject a document of that length.
  """
  cartridge, given = config.model.cartridge, config.plan.document_tokens
  if not cartridge.used or not objective_spec(config).reads_teacher:
    return 0
  if cartridge.teacher_scope == 'chunk':
    given = cartridge.max_chunk
  if given is None:
    return len(_read(config))
  begins = cartridge.initializer == 'document' and not cartridge.path and cartridge.teacher_scope == 'full'
  if begins and given < cartridge.tokens:
    raise UserError(
      f'plan.document_tokens={given} is fewer than model.cartridge.tokens={cartridge.tokens}, which begin with the '
      'first tokens of the document: lower model.cartridge.tokens, or plan for a longer document.'
    )
  check_length(config, given, positions)
  if cartridge.tokens is not None:
    check_slots(config, positions)
  return given


def _read(config: Config) -> list[int]:
  try:
    return list(read_texts(config, load_tokenizer(config), teaches=True).document)
  except UserError as error:
    raise UserError(
      f'The tokens of model.cartridge.document cannot be counted: {error} Or set plan.document_tokens to their number; '
      'then neither the document nor the tokenizer is needed.'
    ) from error
