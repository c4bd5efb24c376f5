"""The service as one ASGI application: all routes behind one gate."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from sdpo_jax.config import ServeConfig
from sdpo_jax.files import as_json
from sdpo_jax.serving.web import console, distill, native, openai, openapi, session_routes, tokasaurus, tokenizer_routes
from sdpo_jax.serving.web.admission import Lifetime
from sdpo_jax.serving.web.endpoints import handled
from sdpo_jax.serving.web.gate import behind_gate
from sdpo_jax.serving.web.keys import Keys
from sdpo_jax.serving.web.telemetry import CONTENT_TYPE, Log, Metrics

if TYPE_CHECKING:
  from sdpo_jax.serving.service import Service

TITLE, VERSION = 'sdpo_jax: continual distillation', '1'


def make_app(
  service: Service | None,
  settings: ServeConfig,
  keys: Keys | None = None,
  *,
  lifetime: Lifetime | None = None,
  log: Log | None = None,
) -> Starlette:
  """Make the ASGI application of a service.

  Args:
    service: the service; None: `lifetime` provides it later.
    settings: the settings of the service.
    keys: the accepted keys; None: no key is needed, and all clients act as the same owner.
    lifetime: knows whether the service is ready; None: made from `service`.
    log: the log of requests and errors; None: stderr.
  """
  lifetime = lifetime or Lifetime(service)
  log = log or Log(bodies=settings.http.log_bodies)
  metrics = Metrics(lifetime)
  routes = [
    *_own_routes(lifetime, metrics, settings.http.operator, keys is not None),
    *console.routes(),
    *native.ROUTES,
    *session_routes.ROUTES,
    *openai.ROUTES,
    *tokenizer_routes.ROUTES,
    *tokasaurus.routes(settings.tokasaurus_tenant),
    *distill.routes(lifetime),
  ]
  return behind_gate(routes, lifetime=lifetime, settings=settings, keys=keys, log=log, metrics=metrics)


def _own_routes(lifetime: Lifetime, metrics: Metrics, operator: str | None, needs_key: bool) -> list[Route]:
  """Return the routes about the state of the service and its API."""
  cached: dict[str, Any] = {}  # Bodies by the names of their kinds.

  def described_as(kind: str, request: Request) -> Any:
    if not cached:
      document = openapi.document(request.app.routes, title=TITLE, version=VERSION, needs_key=needs_key)
      cached.update(json=as_json(document), html=openapi.page(document))
    return cached[kind]

  @handled('GET', '/healthz', open=True, probe=True)
  async def healthz(request: Request) -> Response:
    """Report that the process is alive."""
    return JSONResponse({'status': 'alive'})

  @handled('GET', '/readyz', open=True, probe=True)
  async def readyz(request: Request) -> Response:
    """Report whether requests are accepted: 200, or 503 with the reason."""
    if lifetime.ready:
      why = await run_in_threadpool(lifetime.present.store.unwritable)
      if why:
        return JSONResponse({'status': 'storage_failed', 'reason': why}, 503, {'Retry-After': '1'})
      teacher = lifetime.present.endpoint  # The service is ready without it, since sampling needs none.
      return JSONResponse({'status': 'ready'} | ({} if teacher is None else {'teacher': teacher.state}))
    if lifetime.why_not():
      return JSONResponse({'status': 'failed', 'reason': lifetime.why_not()}, 503, {'Retry-After': '1'})
    status = 'draining' if lifetime.draining else 'starting'
    return JSONResponse({'status': status, 'stage': lifetime.stage}, 503, {'Retry-After': '1'})

  @handled('GET', '/metrics', answers=CONTENT_TYPE, observes=True, probe=True)
  async def scrape(request: Request) -> Response:
    """Return metrics in the format of Prometheus."""
    sender = request.state.sender
    every = sender.owner == operator or not needs_key
    return PlainTextResponse(metrics.text(None if every else sender.id), media_type=CONTENT_TYPE)

  @handled('GET', '/openapi.json', open=True)
  async def described(request: Request) -> Response:
    """Return all routes and fields as an OpenAPI document."""
    return Response(described_as('json', request), media_type='application/json')

  @handled('GET', '/docs', answers='text/html', open=True)
  async def docs(request: Request) -> Response:
    """Show all routes and fields on an HTML page."""
    policy = (
      "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    return HTMLResponse(described_as('html', request), headers={'Content-Security-Policy': policy})

  return [healthz, readyz, scrape, described, docs]
