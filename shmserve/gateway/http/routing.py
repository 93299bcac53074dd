"""The dispatch of a listener's requests by its route table: match, authorise, handle.

Errors become responses in the form of the route's API.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache, partial
from urllib.parse import unquote

from shmserve.errors import (
    Internal,
    InvalidArgument,
    NotFound,
    PermissionDenied,
    QueueFull,
    ShmserveError,
    Unauthenticated,
)
from shmserve.gateway.compression import UnsupportedEncoding
from shmserve.gateway.context import Gateway
from shmserve.gateway.http.body import BrokenBody
from shmserve.gateway.http.messages import (
    FETCH_SITE,
    TRACEPARENT,
    ErrorForm,
    HttpRequest,
    HttpResponse,
    error_response,
    traced,
    triton_error,
)
from shmserve.gateway.inference.body_arrival import BodyTimeout
from shmserve.gateway.inference.inference import ActiveCount
from shmserve.ipc.trace import TraceContext

logger = logging.getLogger(__name__)


Handler = Callable[..., Awaitable[HttpResponse]]

_HOST = re.compile(r"^https?://[^/]*", re.IGNORECASE)
_MOST_CACHED = 1024  # targets
_PART = re.compile(r"\\{(\w+)\\}")  # of a template, escaped
ANY = "*"  # the template of all paths without an earlier route


class MethodNotAllowed(InvalidArgument):
    """An error about a method that a path does not have."""

    status = 405


@dataclass(frozen=True, slots=True)
class Route:
    """A route: a method, a template of paths, and the handler of their requests.

    Attributes:
        method: The method; "" for any method.
        path: The template. `{name}` is a part of a path, and `{version}` is a number. A section in
            brackets is optional: "/v2/models/{model}[/versions/{version}]".
        scope: The API of the route, for which clients are authorised.
        handler: Called with the gateway, the request, and the parts of the path.
        error_form: Encodes an error as the body of a response of this API.
    """

    method: str
    path: str
    scope: str
    handler: Handler
    error_form: ErrorForm = triton_error


# A route, and the parts of a path that it takes.
Match = tuple[Route, tuple[str | None, ...]]


class RouteTable:
    """The routes of a listener, in order of precedence."""

    def __init__(self, *routes: Route) -> None:
        self.routes = routes
        self._patterns = [(route, _pattern(route.path)) for route in routes]
        self.find = lru_cache(_MOST_CACHED)(self._find)

    def _find(self, target: str, method: str = "") -> Match | None:
        """Return the route of a request's target with the parts of its path, or None.

        If several routes match the path, the route for `method` is preferred. The path is matched
        as it was sent, so that an escaped slash is no separator; its parts are then unescaped. The
        path may follow a host, as in requests to proxies.
        """
        path = _path(target)
        found = None
        for route, pattern in self._patterns:
            match = pattern.fullmatch(path)
            if match is None or (route.path == ANY and found):
                continue
            matched = route, tuple(part and unquote(part) for part in match.groups())
            if route.method in (method, ""):
                return matched
            found = found or matched
        return found


def optional_parts(template: str) -> Iterator[tuple[str, bool]]:
    """Yield the parts of a route's template, and whether each part is optional."""
    for must, may in re.findall(r"([^\[\]]+)|\[([^\]]+)\]", template):
        yield must or may, bool(may)


def _pattern(template: str) -> re.Pattern[str]:
    if template == ANY:
        return re.compile(".*")
    made = ((_PART.sub(_group, re.escape(part)), may) for part, may in optional_parts(template))
    return re.compile("".join(f"(?:{part})?" if may else part for part, may in made))


def _group(part: re.Match[str]) -> str:
    return "([0-9]+)" if part[1] == "version" else "([^/]+)"


def _path(target: str) -> str:
    return _HOST.sub("", target.partition("?")[0])


# Hints about frequent mistakes in paths.
_HINTS = {
    re.compile(r"/v2/models/[^/]+/versions/(?![0-9]+(/|$)).*"): " (a version is a whole number)",
    re.compile(r"/v2/[a-z]+memory/region/[^/]+/.+/"): " (a / in a name is written %2F)",
}


async def _not_found(gateway: Gateway, request: HttpRequest) -> HttpResponse:
    hints = (hint for pattern, hint in _HINTS.items() if pattern.match(_path(request.target)))
    raise NotFound("Not Found" + next(hints, ""))


_NO_ROUTE: Match = (Route("", "", "", _not_found), ())


def authorise(route: Route, request: HttpRequest) -> None:
    """Check that the client may use the API of a route.

    A request with the head of the last request on its connection is not checked again
    (`HttpRequest.match`). A page of another site in the user's browser could send a POST without
    the user's consent, and is refused. common/auth_tokens.py has the other rules.

    Raises:
        ShmserveError: The client may not use the API.
    """
    headers = request.headers
    if headers.get(FETCH_SITE) == "cross-site" and route.method == "POST":
        raise PermissionDenied(f"requests of another site to the {route.scope} API are not allowed")
    if (refusal := request.connection.client.refuse(route.scope, headers)) is not None:
        raise refusal


class App(ActiveCount):
    """The application of a listener, which dispatches requests to the handlers of `routes`.

    `active` counts the requests whose response is not sent yet.
    """

    def __init__(self, gateway: Gateway, routes: RouteTable) -> None:
        super().__init__()
        self._gateway = gateway
        self._routes = routes

    async def handle(self, request: HttpRequest) -> HttpResponse:
        """Return the response to any request; raise only CancelledError.

        A request that was begun without a task is counted already.
        """
        begun, request.begun = request.begun, None
        if begun is None:
            self.active += 1
        match = request.match or self._routes.find(request.target, request.method) or _NO_ROUTE
        route, groups = match
        try:
            if request.match is None and match is not _NO_ROUTE:
                authorise(route, request)
                if route.method not in (request.method, ""):
                    raise MethodNotAllowed("Method Not Allowed")
                request.match = match
            if begun is None:
                response: HttpResponse = await route.handler(self._gateway, request, *groups)
            else:
                response = await begun.response()
        except ShmserveError as error:
            response = _failed(error, route.error_form, request)
        except Exception:
            trace_id = TraceContext.of(_traceparent(request)).trace_id
            line = (request.method, request.target)
            logger.exception("%s %s failed", *line, extra={"trace_id": trace_id})
            response = _failed(Internal("internal error"), route.error_form, request)
        except BaseException:
            self.decrement()
            raise
        if self._gateway.draining:
            response.close = True
        then = response.on_sent
        response.on_sent = self.decrement if then is None else partial(self._decrement_after, then)
        return response

    def _decrement_after(self, then: Callable[[], None]) -> None:
        try:
            then()
        finally:
            self.decrement()


def _traceparent(request: HttpRequest) -> str:
    """Return the traceparent of the caller, or ""."""
    caller = TraceContext.of_header(request.headers.get(TRACEPARENT, ""))
    return "" if caller is None else caller.traceparent


def _failed(error: ShmserveError, form: ErrorForm, request: HttpRequest) -> HttpResponse:
    headers = b""
    if isinstance(error, QueueFull):
        headers = b"Retry-After: %d\r\n" % error.retry_after_s
    elif isinstance(error, UnsupportedEncoding):
        headers = b"Accept-Encoding: gzip, deflate\r\n"
    elif isinstance(error, Unauthenticated):
        headers = b"WWW-Authenticate: Bearer\r\n"
    traceparent = error.traceparent or _traceparent(request)
    if traceparent:
        headers += traced(traceparent)
    close = isinstance(error, BodyTimeout | BrokenBody)
    return error_response(error, form, headers=headers, close=close)
