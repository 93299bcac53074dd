"""The route table, and the dispatch of every request: route, authorise, handle, errors mapped to
responses."""

from __future__ import annotations

import logging
import re
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import lru_cache, partial
from urllib.parse import unquote

from shmserve.errors import PermissionDenied, QueueFull, ShmserveError, Unauthenticated
from shmserve.gateway.context import Gateway
from shmserve.gateway.http import infer
from shmserve.gateway.http.body.arrival import BodyTimeout
from shmserve.gateway.http.body.reader import BrokenBody
from shmserve.gateway.http.compression import UnsupportedEncoding
from shmserve.gateway.http.handlers import repository, server, shared_memory
from shmserve.gateway.http.request import FETCH_SITE, Call, HttpRequest
from shmserve.gateway.http.response import HttpResponse, error_response
from shmserve.gateway.http.streaming import generate

logger = logging.getLogger(__name__)

Handler = Callable[..., Awaitable[HttpResponse]]

_MODEL = r"/v2/models/([^/]+)(?:/versions/([0-9]+))?"
_REPOSITORY = r"/v2/repository(?:/([^/]+))?"
_REGION = r"(?:/region/([^/]+))?"


@dataclass(frozen=True, slots=True)
class Route:
    """`handler(gateway, request, *groups of path)`.

    `scope` is the API that the route belongs to.
    """

    method: str
    path: str
    scope: str
    handler: Handler


ROUTES = (
    Route("POST", _MODEL + "/infer", "inference", infer.infer),
    Route("GET", "/v2/health/live", "health", server.live),
    Route("GET", "/v2/health/ready", "health", server.ready),
    Route("GET", "/v2", "metadata", server.server),
    Route("GET", "/v2/models/stats", "statistics", server.all_statistics),
    Route("GET", _MODEL, "metadata", server.model),
    Route("GET", _MODEL + "/ready", "health", server.model_ready),
    Route("GET", _MODEL + "/config", "model-config", server.model_config),
    Route("GET", _MODEL + "/stats", "statistics", server.model_statistics),
    Route("POST", _MODEL + "/generate", "inference", generate.generate),
    Route("POST", _MODEL + "/generate_stream", "inference", generate.generate_stream),
    *(
        Route(method, r"/v2(?:/models/([^/]+))?/trace/setting", "trace", server.trace)
        for method in ("GET", "POST")
    ),
    Route("GET", "/v2/logging", "logging", server.show_logging),
    Route("POST", "/v2/logging", "logging", server.change_logging),
    Route("POST", _REPOSITORY + "/index", "model-repository", repository.index),
    Route("POST", _REPOSITORY + "/models/([^/]+)/load", "model-repository", repository.load),
    Route("POST", _REPOSITORY + "/models/([^/]+)/unload", "model-repository", repository.unload),
    *(
        Route(method, f"/v2/{kind}sharedmemory{_REGION}/{verb}", "shared-memory", handler)
        for kind, verbs in (
            ("system", (shared_memory.register, shared_memory.status, shared_memory.unregister)),
            (
                "cuda",
                (
                    shared_memory.register_cuda,
                    shared_memory.status_cuda,
                    shared_memory.unregister_cuda,
                ),
            ),
        )
        for method, verb, handler in zip(
            ("POST", "GET", "POST"), ("register", "status", "unregister"), verbs, strict=True
        )
    ),
)

_HOST = re.compile(r"^https?://[^/]*", re.IGNORECASE)
_PATTERNS = [(route, re.compile(route.path)) for route in ROUTES]


@lru_cache(maxsize=1024)
def find_route(raw_path: str, method: str = "") -> tuple[Route, tuple[str | None, ...]] | None:
    """The route of a request's target and the parts of the path it takes; None for no route. Where
    several have the path it is the one for `method`, if there is one.

    The path is matched as it was sent, so that an escaped slash separates nothing; its parts are
    then unescaped. A target may name a host before the path, as those sent to proxies do.
    """
    path = _HOST.sub("", raw_path.partition("?")[0])
    found = None
    for route, pattern in _PATTERNS:
        match = pattern.fullmatch(path)
        if match is None:
            continue
        here = route, tuple(part and unquote(part) for part in match.groups())
        if route.method == method:
            return here
        found = found or here
    return found


def authorise(route: Route, request: HttpRequest) -> None:
    """Decide whether this request may use this API; every route passes here.

    Another site's page in the user's browser may not: it could send such a POST unasked. What else
    is refused says common/access/auth_tokens.py.
    """
    headers = request.headers
    if headers.get(FETCH_SITE) == "cross-site" and route.method == "POST":
        raise PermissionDenied(f"requests of another site to the {route.scope} API are not allowed")
    if (refusal := request.connection.client.refuse(route.scope, headers)) is not None:
        raise refusal


class App:
    """The application of a listener: dispatches requests to handlers.

    `active` counts those whose response is not sent yet.
    """

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self.active = 0
        self._idle: Callable[[], None] | None = None

    async def handle(self, request: HttpRequest) -> HttpResponse:
        """One request, whatever it is."""
        self.active += 1
        try:
            call = request.call
            if call is None:
                call = request.call = _find_call(request)
            handler, groups = call
            response: HttpResponse = await handler(self._gateway, request, *groups)
        except ShmserveError as error:
            response = _mapped(error)
        except Exception:
            logger.exception("%s %s failed", request.method, request.target)
            response = error_response(500, "internal error")
        except BaseException:
            self._left()
            raise
        if self._gateway.draining:
            response.close = True
        then = response.on_sent
        response.on_sent = self._left if then is None else partial(self._left, then)
        return response

    def _left(self, then: Callable[[], None] | None = None) -> None:
        self.active -= 1
        if then is not None:
            then()
        if not self.active and self._idle is not None:
            self.when_idle(self._idle)

    def when_idle(self, then: Callable[[], None]) -> None:
        """Call `then` once, as soon as every response is sent."""
        self._idle = then if self.active else None
        if not self.active:
            then()


def _find_call(request: HttpRequest) -> Call:
    """What a head asks for; raises what `authorise` does."""
    found = find_route(request.target, request.method)
    if found is None:
        return _not_found, ()
    route, groups = found
    authorise(route, request)
    return (route.handler if request.method == route.method else _not_allowed), groups


async def _not_found(gateway: Gateway, request: HttpRequest) -> HttpResponse:
    return error_response(404, "Not Found")


async def _not_allowed(gateway: Gateway, request: HttpRequest, *groups: str | None) -> HttpResponse:
    return error_response(405, "Method Not Allowed")


def _mapped(error: ShmserveError) -> HttpResponse:
    headers = b""
    if isinstance(error, QueueFull):
        headers = b"Retry-After: %d\r\n" % error.retry_after_s
    elif isinstance(error, UnsupportedEncoding):
        headers = b"Accept-Encoding: gzip, deflate\r\n"
    elif isinstance(error, Unauthenticated):
        headers = b"WWW-Authenticate: Bearer\r\n"
    close = isinstance(error, BodyTimeout | BrokenBody)
    return error_response(error.status, error.message, headers=headers, close=close)
