"""The dispatcher of a listener, which matches, authorises and handles each request.

Errors become responses in the format of the route's API.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Awaitable, Callable, Collection, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from urllib.parse import unquote

from multidict import istr

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
    ErrorEncoder,
    HttpRequest,
    HttpResponse,
    encode_triton_error,
    error_response,
    traceparent_header,
)
from shmserve.gateway.inference.body_arrival import BodyTimeout
from shmserve.gateway.listener import ActiveCount, ListenerKind
from shmserve.ipc.trace import TraceContext

logger = logging.getLogger(__name__)


Handler = Callable[..., Awaitable[HttpResponse]]

_URL_HOST = re.compile(r"^https?://[^/]*", re.IGNORECASE)
_MAX_CACHED_TARGETS = 1024  # maximum number of request targets whose route is cached
_NAMED_PART = re.compile(r"\\{(\w+)\\}")  # a named part of an escaped template
_ORIGIN = istr("Origin")
_REQUEST_ID = istr("x-request-id")
_VALID_REQUEST_ID = re.compile(r"[ -~]{1,512}")
ANY_PATH = "*"  # the template that matches any path without a route of its own


class MethodNotAllowed(InvalidArgument):
    """The error for an unsupported method; `allowed_methods` lists the methods of the path."""

    status = 405

    def __init__(self, message: str, allowed_methods: str = "") -> None:
        super().__init__(message)
        self.allowed_methods = allowed_methods


@dataclass(frozen=True, slots=True)
class Route:
    """A route: a method, a template of paths, and the handler of their requests.

    Attributes:
        method: The method; "" for any method.
        path: The template. `{name}` is a part of a path, `{version}` is a number, and `{id}` may
            contain slashes. A section in brackets is optional:
            "/v2/models/{model}[/versions/{version}]".
        scope: The API of the route, for which clients are authorised.
        handler: Called with the gateway, the request, and the parts of the path.
        encode_error: Encodes an error as the body of a response of this API.
        has_request_id: Whether each response has the header x-request-id.
    """

    method: str
    path: str  # a template
    scope: str  # the API that the client needs access to
    handler: Handler
    encode_error: ErrorEncoder = encode_triton_error
    has_request_id: bool = False  # whether responses have the header x-request-id


# A route, and the parts of a path that are the arguments of its handler.
RouteMatch = tuple[Route, tuple[str, ...]]


class RouteTable:
    """The routes of a listener, in order of precedence."""

    def __init__(self, *routes: Route) -> None:
        self.routes = routes
        self._patterns = [(route, _compile_template(route.path)) for route in routes]
        self.find = lru_cache(_MAX_CACHED_TARGETS)(self._find)

    def _find(self, target: str, method: str = "") -> RouteMatch | None:
        """Return the route of a request's target with the parts of its path, or None.

        If several routes match the path, the route for `method` is preferred. The path is matched
        as it was sent, so that an escaped slash is no separator; its parts are then unescaped. The
        path may follow a host, as in requests to proxies.
        """
        path = _target_path(target)
        method_mismatch = None  # a route of this path for another method
        for route, pattern in self._patterns:
            match = pattern.fullmatch(path)
            if match is None or (route.path == ANY_PATH and method_mismatch):
                continue
            route_match = route, tuple(map(unquote, match.groups("")))
            if route.method in (method, ""):
                return route_match
            method_mismatch = method_mismatch or route_match
        return method_mismatch

    def allowed_methods(self, target: str) -> str:
        """Return the methods of a request's target, separated by commas."""
        path = _target_path(target)
        matches = (route for route, pattern in self._patterns if pattern.fullmatch(path))
        methods = {route.method for route in matches} - {""}
        return ", ".join(sorted(methods | {"HEAD"} if "GET" in methods else methods))

    def unmatched(self, target: str) -> RouteMatch:
        """Return a route that raises NoRoute, with the error format of the target's API.

        The first part of a path identifies the API. A path that ends like a path of OpenAI's API
        is handled as that API, since the client's base URL may be wrong.
        """
        path = _target_path(target)
        first_part = "/v1" if _OPENAI_PATH.match(path) else "/".join(path.split("/")[:2])
        for route in self.routes:
            if route.path.startswith(first_part + "/"):
                return replace(route, handler=_not_found), ()
        return _NO_ROUTE, ()


def optional_parts(template: str) -> Iterator[tuple[str, bool]]:
    """Yield the parts of a route's template, and whether each part is optional."""
    for required_part, optional_part in re.findall(r"([^\[\]]+)|\[([^\]]+)\]", template):
        yield required_part or optional_part, bool(optional_part)


def _compile_template(template: str) -> re.Pattern[str]:
    if template == ANY_PATH:
        return re.compile(".*")
    pattern = ""
    for part, is_optional in optional_parts(template):
        part_pattern = _NAMED_PART.sub(_part_pattern, re.escape(part))
        pattern += f"(?:{part_pattern})?" if is_optional else part_pattern
    return re.compile(pattern)


def _part_pattern(part: re.Match[str]) -> str:
    return {"version": "([0-9]+)", "id": "(.+)"}.get(part[1], "([^/]+)")


def _target_path(target: str) -> str:
    return _URL_HOST.sub("", target.partition("?")[0])


# The path of a client of OpenAI's API whose base URL is wrong.
_OPENAI_PATH = re.compile(r"(?!/v2/).*/(chat/completions|completions|responses|embeddings|models)$")
# Hints about frequent mistakes in paths.
_PATH_HINTS = {
    _OPENAI_PATH: " (the base URL of an OpenAI client is http://HOST:PORT/v1)",
    re.compile(r"/v2/models/[^/]+/versions/(?![0-9]+(/|$)).*"): " (a version is an integer)",
    re.compile(r"/v1/(responses|chat/completions/chatcmpl)."): " (responses are not stored)",
    re.compile(r"/v1(/|$)"): (
        " (/v1 has chat/completions, completions, responses, embeddings and models; GET /docs"
        " lists all routes)"
    ),
    re.compile(r"/v2/[a-z]+memory/region/[^/]+/.+/"): " (a / in a name is written %2F)",
}


class NoRoute(NotFound):
    """The error for a path without a route."""


async def _not_found(gateway: Gateway, request: HttpRequest) -> HttpResponse:
    path = _target_path(request.target)
    hints = (hint for pattern, hint in _PATH_HINTS.items() if pattern.match(path))
    raise NoRoute("Not Found" + next(hints, ""))


_NO_ROUTE = Route("", "", "", _not_found)


def check_authorised(route: Route, request: HttpRequest, cors: Cors | None = None) -> None:
    """Check that the client may use the API of a route.

    A request with the head of the last request on its connection is not checked again
    (`HttpRequest.route_match`). A POST from a page of another site is refused unless `cors` allows
    the page's origin, since a browser sends it without the user's consent. common/auth_tokens.py
    has the other rules.

    Raises:
        ShmserveError: The client may not use the API.
    """
    headers = request.headers
    is_allowed = cors is not None and cors.allows(request)
    if headers.get(FETCH_SITE) == "cross-site" and route.method == "POST" and not is_allowed:
        text = f"pages of other sites may not use the {route.scope} API (--cors-allow-origin)"
        raise PermissionDenied(text)
    if (refusal := request.connection.client.find_access_error(route.scope, headers)) is not None:
        raise refusal


class Cors:
    """The rules for pages of other origins in browsers, on TCP listeners.

    Args:
        origins: The origins whose pages may use the server, such as "https://app.example.com"; "*"
            stands for all.
    """

    _METHOD = istr("Access-Control-Request-Method")
    _HEADERS = istr("Access-Control-Request-Headers")
    _NETWORK = istr("Access-Control-Request-Private-Network")
    _HEADER_NAMES = re.compile(r"[\w!#$%&'*+.^`|~, -]{1,4096}", re.ASCII)
    _EXPOSE_HEADERS = (
        b"Access-Control-Expose-Headers: x-request-id, traceparent, Retry-After, "
        b"WWW-Authenticate, Inference-Header-Content-Length\r\n"
    )

    def __init__(self, origins: Collection[str]) -> None:
        self._allows_all = "*" in origins
        self._origins = frozenset(origins)

    def allows(self, request: HttpRequest) -> bool:
        """Return whether a request is from a page of an allowed origin."""
        origin = request.headers.get(_ORIGIN)
        is_tcp = request.connection.client.listener.kind is not ListenerKind.UNIX
        return is_tcp and origin is not None and (self._allows_all or origin in self._origins)

    def is_preflight(self, request: HttpRequest) -> bool:
        """Return whether this is a browser's preflight request for another origin's page."""
        is_options = request.method == "OPTIONS" and self._METHOD in request.headers
        return is_options and _ORIGIN in request.headers

    async def answer_preflight(self, gateway: Gateway, request: HttpRequest) -> HttpResponse:
        """Return the response to a preflight request, which browsers send without a token.

        Raises:
            PermissionDenied: The origin is not allowed.
        """
        headers = request.headers
        if (refusal := request.connection.client.find_host_error(headers)) is not None:
            raise refusal
        if not self.allows(request):
            origin = f"{headers[_ORIGIN]!r:.80}"
            raise PermissionDenied(
                f"pages of the origin {origin} are refused (--cors-allow-origin)"
            )
        header_lines = ["Access-Control-Allow-Methods: GET, POST", "Access-Control-Max-Age: 600"]
        requested_names = headers.get(self._HEADERS, "")
        if self._HEADER_NAMES.fullmatch(requested_names):
            header_lines.append(f"Access-Control-Allow-Headers: {requested_names}")
        if headers.get(self._NETWORK) == "true":
            header_lines.append("Access-Control-Allow-Private-Network: true")
        return HttpResponse(200, (), "".join(f"{line}\r\n" for line in header_lines).encode())

    def add_headers(self, request: HttpRequest, response: HttpResponse) -> None:
        """Set the headers that allow a page to read a response."""
        if not self._allows_all:
            response.headers += b"Vary: Origin\r\n"
        if self.allows(request):
            origin = "*" if self._allows_all else request.headers[_ORIGIN]
            allow_origin = b"Access-Control-Allow-Origin: %b\r\n" % origin.encode()
            response.headers += allow_origin + self._EXPOSE_HEADERS
            request.begin_repeated = None  # a repeated request's response would lack these headers


class App(ActiveCount):
    """The application of a listener, which dispatches requests to the handlers of `routes`.

    `active_count` counts the requests whose response is not sent yet.
    """

    def __init__(self, gateway: Gateway, routes: RouteTable, cors: Cors | None = None) -> None:
        super().__init__()
        self._gateway = gateway
        self._routes = routes
        self._cors = cors

    def malformed_response(self, error: ShmserveError, head: bytes) -> HttpResponse:
        """Return the response to malformed HTTP, in the error format of the path in `head`."""
        target = b"".join(head.split(b" ", 2)[1:2]).decode("latin-1")
        route, _ = self._routes.find(target) or self._routes.unmatched(target)
        headers = _request_id_header("") if route.has_request_id else b""
        return error_response(error, route.encode_error, headers=headers, closes_connection=True)

    async def handle(self, request: HttpRequest) -> HttpResponse:
        """Return the response to any request; raise only CancelledError.

        A request that was begun without a task is already counted in `active_count`.
        """
        begun_request, request.begun_request = request.begun_request, None
        if begun_request is None:
            self.active_count += 1
        routes, cors = self._routes, self._cors
        method = "GET" if request.method == "HEAD" else request.method
        route_match = request.route_match or routes.find(request.target, method)
        route, path_parts = route_match or routes.unmatched(request.target)
        if cors is not None and cors.is_preflight(request):
            route_match = None
            route, path_parts = replace(route, handler=cors.answer_preflight), ()
        try:
            if request.route_match is None and route_match is not None:
                check_authorised(route, request, cors)
                if route.method not in (method, ""):
                    allowed_methods = routes.allowed_methods(request.target)
                    raise MethodNotAllowed("Method Not Allowed", allowed_methods)
                request.route_match = route_match
            if begun_request is None:
                response: HttpResponse = await route.handler(self._gateway, request, *path_parts)
            else:
                response = await begun_request.response()
        except ShmserveError as error:
            response = _error_response(error, route.encode_error, request)
        except Exception:
            trace_id = TraceContext.of(_traceparent(request)).trace_id
            request_line = (request.method, request.target)
            logger.exception("request %s %s failed", *request_line, extra={"trace_id": trace_id})
            response = _error_response(Internal(), route.encode_error, request)
        except BaseException:
            self.decrement()
            raise
        if cors is not None:
            cors.add_headers(request, response)
        if route.has_request_id:
            response.headers += _request_id_header(request.headers.get(_REQUEST_ID, ""))
        if self._gateway.is_draining:
            response.closes_connection = True
        on_sent = response.on_sent
        response.on_sent = (
            self.decrement if on_sent is None else partial(self._decrement_after, on_sent)
        )
        return response

    def _decrement_after(self, on_sent: Callable[[], None]) -> None:
        try:
            on_sent()
        finally:
            self.decrement()


def _request_id_header(sent_id: str) -> bytes:
    """Return the header with the id that the client has sent, or else with a new id."""
    is_valid = sent_id and _VALID_REQUEST_ID.fullmatch(sent_id)
    request_id = sent_id if is_valid else f"req_{os.urandom(16).hex()}"
    return b"x-request-id: %b\r\n" % request_id.encode()


def _traceparent(request: HttpRequest) -> str:
    """Return the traceparent of the caller, or ""."""
    parent = TraceContext.of_header(request.headers.get(TRACEPARENT, ""))
    return "" if parent is None else parent.traceparent


def _error_response(
    error: ShmserveError, encode_error: ErrorEncoder, request: HttpRequest
) -> HttpResponse:
    headers = b""
    if isinstance(error, QueueFull):
        headers = b"Retry-After: %d\r\n" % error.retry_after_s
    elif isinstance(error, UnsupportedEncoding):
        headers = b"Accept-Encoding: gzip, deflate\r\n"
    elif isinstance(error, MethodNotAllowed):
        headers = b"Allow: %b\r\n" % error.allowed_methods.encode()
    elif isinstance(error, Unauthenticated):
        headers = b"WWW-Authenticate: Bearer\r\n"
    traceparent = error.traceparent or _traceparent(request)
    if traceparent:
        headers += traceparent_header(traceparent)
    is_broken = isinstance(error, BodyTimeout | BrokenBody)
    return error_response(error, encode_error, headers=headers, closes_connection=is_broken)
