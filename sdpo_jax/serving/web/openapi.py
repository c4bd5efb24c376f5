"""The OpenAPI document of all routes: as JSON (/openapi.json) and as a page for people (/docs)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
import html
import json
import re
from typing import Any

import pydantic
from pydantic.json_schema import models_json_schema
from starlette.routing import BaseRoute, Route

from sdpo_jax.serving.web.endpoints import JSON, Operation, operation_of

_PARAMETER = re.compile(r'{(\w+)(?::\w+)?}')


class ErrorBody(pydantic.BaseModel):
  """Why a request failed."""

  code: str = pydantic.Field(description='A word for programs, such as not_found.')
  message: str = pydantic.Field(description='One sentence for people.')
  field: str | None = pydantic.Field(None, description='The field of the request that caused the error.')
  retry_after_s: float | None = pydantic.Field(None, description='Seconds after which a retry may help.')


class ErrorAnswer(pydantic.BaseModel):
  """The response to a failed request.

  OpenAI-compatible ones have type and param, not field and retry_after_s; those below /tokasaurus only {detail}.
  """

  error: ErrorBody


def document(routes: Iterable[BaseRoute], *, title: str, version: str, needs_key: bool) -> dict[str, Any]:
  """Build the OpenAPI document of routes from the schemas that validate their bodies.

  Args:
    routes: the routes; their operations describe them.
    title: the title of the API.
    version: the version of the API.
    needs_key: whether requests need an API key.
  """
  described = [(route, operation_of(route)) for route in routes if isinstance(route, Route)]
  bodies = {known.body for _, known in described if known.body is not None}
  answers = {known.response for _, known in described if known.response is not None} | {ErrorAnswer}
  wanted: list[tuple[type[pydantic.BaseModel], Any]] = [(model, 'validation') for model in _sorted(bodies)]
  wanted += [(model, 'serialization') for model in _sorted(answers)]
  references, schemas = models_json_schema(wanted, ref_template='#/components/schemas/{model}')
  error = {
    'description': 'The request failed; the message says why.',
    'content': {JSON: {'schema': references[ErrorAnswer, 'serialization']}},
  }
  paths: dict[str, dict[str, Any]] = {}
  for route, known in described:
    entry: dict[str, Any] = {'summary': known.summary, 'parameters': _parameters(route, known)}
    if known.body is not None or known.content_type != JSON:
      schema = (
        references[known.body, 'validation'] if known.body is not None else {'type': 'string', 'format': 'binary'}
      )
      entry['requestBody'] = {'required': True, 'content': {known.content_type: {'schema': schema}}}
    answer: dict[str, Any] = {'description': 'Success.'}
    if known.response is not None:
      answer['content'] = {known.answers: {'schema': references[known.response, 'serialization']}}
    elif known.status != 204:
      answer['content'] = {known.answers: {}}
    entry['responses'] = {str(known.status): answer, 'default': error}
    if known.open or known.tenant is not None:
      entry['security'] = []
    for method in sorted((route.methods or set()) - {'HEAD'}):
      name = f'{method.lower()}{re.sub(r"[^a-z0-9]+", "_", route.path.lower()).rstrip("_")}'
      paths.setdefault(_PARAMETER.sub(r'{\1}', route.path), {})[method.lower()] = {'operationId': name, **entry}
  found: dict[str, Any] = {
    'openapi': '3.1.0',
    'info': {'title': title, 'version': version},
    'paths': dict(sorted(paths.items())),
    'components': {'schemas': schemas.get('$defs', {})},
  }
  if needs_key:
    found['components']['securitySchemes'] = {
      'bearer': {'type': 'http', 'scheme': 'bearer'},
      'header': {'type': 'apiKey', 'in': 'header', 'name': 'X-API-Key'},
    }
    found['security'] = [{'bearer': []}, {'header': []}]
  return found


def _sorted(models: Iterable[type[pydantic.BaseModel]]) -> Sequence[type[pydantic.BaseModel]]:
  return sorted(models, key=lambda model: (model.__module__, model.__qualname__))


def _parameters(route: Route, known: Operation) -> list[dict[str, Any]]:
  found = [
    {'name': name, 'in': 'path', 'required': True, 'schema': {'type': 'string'}}
    for name in _PARAMETER.findall(route.path)
  ]
  found += [
    {'name': name, 'in': 'query', 'description': meaning, 'schema': {'type': 'string'}}
    for name, meaning in known.query.items()
  ]
  if known.again is not None:
    found.append(_header('Idempotency-Key', 'A repeat with the same key and body gets the first response again.'))
  if known.token:
    found.append({**_header('X-Session-Token', 'The token from the opening of the session.'), 'required': True})
  changes = known.again is not None or 'DELETE' in (route.methods or ())
  if '{adapter}' in route.path and changes and not known.guarded:
    found.append(_header('If-Match', 'The version that the adapter must be at, in quotes.'))
  if not known.open and not known.endless:
    found.append(_header('X-Deadline-Ms', 'The time limit of the request in milliseconds.'))
  return found


def _header(name: str, meaning: str) -> dict[str, Any]:
  return {'name': name, 'in': 'header', 'description': meaning, 'schema': {'type': 'string'}}


_PAGE = """<!doctype html>
<html lang="en"><meta charset="utf-8"><title>{title}</title>
<style>
body{{font:15px/1.5 system-ui,sans-serif;max-width:60em;margin:2em auto;padding:0 1em;color:#222;background:#fff}}
h2{{font-size:1em;margin:1.6em 0 .2em}} code{{font:13px/1.45 ui-monospace,monospace}}
b{{display:inline-block;min-width:4.5em;color:#06c}} p{{margin:.2em 0}}
table{{border-collapse:collapse;margin:.3em 0}}
td{{padding:.15em 1em .15em 0;vertical-align:top;border-top:1px solid #8884}}
@media (prefers-color-scheme:dark){{body{{color:#ddd;background:#181818}}b,a{{color:#6cf}}}}
</style>
<h1>{title}</h1>
<p>For programs: <a href="/openapi.json">/openapi.json</a>.</p>
{operations}
<h1>Bodies and responses</h1>
{schemas}
</html>
"""


def page(found: Mapping[str, Any]) -> str:
  """Render an OpenAPI document as an HTML page that loads no other resources."""
  operations = [
    _operation_html(method, path, entry)
    for path, methods in found['paths'].items()
    for method, entry in methods.items()
  ]
  schemas = [_schema_html(name, schema) for name, schema in sorted(found['components']['schemas'].items())]
  return _PAGE.format(
    title=html.escape(found['info']['title']), operations='\n'.join(operations), schemas='\n'.join(schemas)
  )


def _operation_html(method: str, path: str, entry: Mapping[str, Any]) -> str:
  asked, answered = _named(entry.get('requestBody', {})), _named({**entry['responses'], 'default': None})
  lines = [
    f'<h2><b>{method.upper()}</b><code>{html.escape(path)}</code></h2>',
    f'<p>{html.escape(entry["summary"])}</p>',
  ]
  lines += [
    f'<p>{said}: {" ".join(map(_anchor, names))}</p>'
    for said, names in (('Body', asked), ('Response', answered))
    if names
  ]
  rows = [(each['name'], each['in'], each['description']) for each in entry['parameters'] if each['in'] != 'path']
  return '\n'.join([*lines, _table(tuple(map(html.escape, row)) for row in rows)])


def _schema_html(name: str, schema: Mapping[str, Any]) -> str:
  required = schema.get('required', ())
  rows = []
  for field, known in schema.get('properties', {}).items():
    kind = _kind(known)
    if field not in required and known.get('default') is not None:
      kind += f', default {html.escape(json.dumps(known["default"], ensure_ascii=False))}'
    needed = ', required' if field in required and not schema.get('additionalProperties') else ''
    rows.append((html.escape(field), kind + needed, html.escape(known.get('description', ''))))
  meaning = html.escape(schema.get('description', ''))
  return f'<h2 id="{html.escape(name)}"><code>{html.escape(name)}</code></h2><p>{meaning}</p>\n{_table(rows)}'


def _kind(schema: Mapping[str, Any]) -> str:
  """Return the type of a field in words, as HTML."""
  if '$ref' in schema:
    return _anchor(schema['$ref'].rsplit('/', 1)[-1])
  if 'anyOf' in schema:
    return ' or '.join(map(_kind, schema['anyOf']))
  if 'enum' in schema:
    return ' or '.join(html.escape(json.dumps(value)) for value in schema['enum'])
  if schema.get('type') == 'array' and 'items' in schema:
    return f'list of ({_kind(schema["items"])})' if 'anyOf' in schema['items'] else f'list of {_kind(schema["items"])}'
  bounds = [
    f'{sign} {schema[word]}'
    for word, sign in (('minimum', '≥'), ('exclusiveMinimum', '>'), ('maximum', '≤'), ('exclusiveMaximum', '<'))
    if word in schema
  ]
  return html.escape(' '.join([schema.get('type', 'any'), ', '.join(bounds)]).strip())


def _table(rows: Iterable[Sequence[str]]) -> str:
  """Return rows, each a name and further cells, as an HTML table; empty if there are none."""
  lines = [
    f'<tr><td><code>{name}</code></td>{"".join(f"<td>{cell}</td>" for cell in cells)}</tr>' for name, *cells in rows
  ]
  return '\n'.join(['<table>', *lines, '</table>']) if lines else ''


def _named(part: Any) -> list[str]:
  """Return the names of the schemas that a part of an operation refers to."""
  return re.findall(r'#/components/schemas/([^"]+)"', json.dumps(part))


def _anchor(name: str) -> str:
  return f'<a href="#{html.escape(name)}"><code>{html.escape(name)}</code></a>'
