"""Redaction of settings and messages for publication: folders and server addresses are removed."""

from __future__ import annotations

from collections.abc import Mapping
import re
from typing import Any

from sdpo_jax.config.locations import is_hub_name

MODELS = (  # Settings with a path or a name on the hub.
  'model.path',
  'model.lora.path',
  'model.cartridge.path',
  'model.cartridge.distractors',
  'actor.self_distillation.teacher_model',
  'actor.self_distillation.teacher_endpoint.tokenizer',
)
FILES = (  # Settings with paths or sources of rows.
  'model.chat_template',
  'model.cartridge.document',
  'model.cartridge.init_text',
  'data.train_files',
  'data.val_files',
  'environments.modules',
  'serve.programs',
  'serve.http.keys',
  'serve.guards.canary_file',
  'serve.store.root',
  'serve.store.database',
)
SOURCE = re.compile(r'(hf:|generator:)([^?]*)(.*)', re.DOTALL)  # A source of rows other than a file.
# An address in a text, or a path that begins with /, ~, ./ or ../.
_END = r"""\s'"`,;|<>()\[\]{}"""
_PLACE = re.compile(rf'(?<!\w)[A-Za-z][\w+.-]{{,19}}://[^{_END}]*|(?<![\w*<}}/~-])(?:~[\w.-]*|\.\.?)?/[^{_END}&?]*')


def public_place(place: str, *, hub: bool = True) -> str:
  """Redact a path, an address or a source of rows.

  Args:
    place: value of a setting.
    hub: whether it may be a name on the hub, which is public.

  Returns:
    A name on the hub unchanged; of a path its last part; of the address of a server or a bucket only the scheme.
  """
  if source := SOURCE.fullmatch(place):
    prefix, name, options = source.groups()
    return prefix + (public_place(name) if prefix == 'hf:' else name) + public_text(options)
  if hub and is_hub_name(place):
    return place
  scheme, mark, address = place.rpartition('://')
  path = address.partition('?')[0].partition('/')[2] if mark else address
  shown = '' if scheme in ('http', 'https') else path.rstrip('/').rpartition('/')[2]
  return shown or (f'{scheme}://…' if mark else '')


def public_text(text: str) -> str:
  """Return a text with its paths and addresses redacted by `public_place`."""

  def last(found: re.Match[str]) -> str:
    place = found[0]
    is_word = place.startswith('/') and '/' not in place[1:]  # Such as /no_think.
    return place if is_word else public_place(place, hub=False)

  return _PLACE.sub(last, text)


def public_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
  """Return settings by dotted name with redacted JSON values."""
  return {public_text(name): _public(name, value) for name, value in settings.items()}


def _public(name: str, value: Any) -> Any:
  if name == 'serve.http.host' and value not in ('127.0.0.1', '0.0.0.0', 'localhost'):
    return '…'
  if isinstance(value, str):
    return public_place(value, hub=name in MODELS) if name in (*MODELS, *FILES) else public_text(value)
  if isinstance(value, list | tuple):
    return [_public(name, item) for item in value]
  if isinstance(value, Mapping):
    return {public_text(key): _public(name, item) for key, item in value.items()}
  return value
