"""Chat templates: probes of how they format conversations."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import jinja2

from sdpo_jax.models.control_tokens import Tokenizer, control_strings

# Errors that a template may raise, on purpose or not, for a conversation that it was not made for.
TEMPLATE_ERRORS = jinja2.TemplateError, ArithmeticError, AttributeError, LookupError, RecursionError
TEMPLATE_ERRORS += TypeError, ValueError, SyntaxError  # The last: its Python code has too many nested blocks.
PROBE = 'qzx'  # A text that no template writes or changes.


def text_of(tokenizer: Tokenizer) -> str | None:
  """Return the template for conversations without tools; None if there is none."""
  template = tokenizer.chat_template
  return template.get('default') if isinstance(template, Mapping) else template


def unread(tokenizer: Tokenizer, variables: Iterable[str]) -> list[str]:
  """Return the variables that the template's code does not name, and that therefore have no effect."""
  names = {value for _, kind, value in jinja2.Environment().lex(text_of(tokenizer) or '') if kind == 'name'}
  return [name for name in variables if name not in names]


def is_dated(tokenizer: Tokenizer, variables: Mapping[str, Any]) -> bool:
  """Return whether prompts depend on the current date.

  Args:
    tokenizer: tokenizer whose chat template accepts a user's message.
    variables: variables of the template; some templates use a date among them instead.
  """
  # Replace the function that returns the date with one that raises.
  refusing = (text_of(tokenizer) or '').replace('strftime_now', 'raise_exception')
  messages = [{'role': 'user', 'content': 'x'}]
  try:
    tokenizer.apply_chat_template(
      messages, tokenize=False, add_generation_prompt=True, chat_template=refusing, **variables
    )
  except jinja2.TemplateError:
    return True
  return False


def has_system_turn(tokenizer: Tokenizer, variables: Mapping[str, Any]) -> bool:
  """Return whether the template writes a system message as a separate turn, which later messages do not change.

  Args:
    tokenizer: tokenizer with a chat template.
    variables: variables of the template.
  """
  first, then = {'role': 'system', 'content': PROBE}, {'role': 'user', 'content': PROBE[::-1]}
  try:
    alone, both = (
      tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=False, **variables)
      for messages in ([first], [first, then])
    )
  except TEMPLATE_ERRORS:
    return False
  rest = both.removeprefix(alone)
  return alone.count(PROBE) == 1 and rest != both and PROBE not in rest and PROBE[::-1] in rest


def turn_end(tokenizer: Tokenizer, variables: Mapping[str, Any]) -> str | None:
  """Return the control token that the template writes after an answer of the assistant; None if it writes none.

  Models trained with the template end their turns with this token.

  Args:
    tokenizer: tokenizer with a chat template.
    variables: variables of the template.
  """
  messages = [{'role': 'user', 'content': 'x'}, {'role': 'assistant', 'content': PROBE}]
  try:
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=False, **variables)
  except TEMPLATE_ERRORS:  # The template is for single questions only, which is allowed.
    return None
  _, found, behind = text.rpartition(PROBE)
  strings = [string for string in control_strings(tokenizer) if found and string in behind]
  return min(strings, key=lambda string: (behind.index(string), -len(string)), default=None)
