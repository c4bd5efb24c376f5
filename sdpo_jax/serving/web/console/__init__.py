"""The web console, a page that shows and corrects adapters through the public routes."""

from __future__ import annotations

import importlib.resources

from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import Route

from sdpo_jax import invisible
from sdpo_jax.serving.web.endpoints import handled

_FILES = {'console': 'text/html', 'console.css': 'text/css', 'console.js': 'text/javascript'}  # Path → content type.
# Only its own files and routes, and not within other pages, so that users see what they approve.
POLICY = (
  "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; base-uri 'none'; "
  "form-action 'none'; frame-ancestors 'none'"
)


def routes() -> list[Route]:
  """Return the routes of the console, which need no key; the page asks its user for one."""
  return [_beginning, *(_file(path, kind) for path, kind in _FILES.items())]


@handled('GET', '/', answers='text/html', open=True)
async def _beginning(request: Request) -> Response:
  """Redirect to the web console."""
  return RedirectResponse('console')


def _file(path: str, kind: str) -> Route:
  name = path if '.' in path else f'{path}.html'
  content = importlib.resources.files(__package__).joinpath(name).read_bytes()
  if kind == 'text/javascript':
    content = invisible.SCRIPT.encode() + content

  @handled('GET', f'/{path}', summary=f'Return {name} of the web console.', answers=kind, open=True)
  async def file(request: Request) -> Response:
    return Response(content, media_type=kind, headers={'Content-Security-Policy': POLICY, 'X-Frame-Options': 'DENY'})

  return file
