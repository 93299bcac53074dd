"""Route tables: each route has a scope and a form for its errors; and chunked responses."""

import asyncio
import json
from collections.abc import AsyncGenerator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from shmserve.errors import (
    InvalidArgument,
    NotFound,
    PermissionDenied,
    QueueFull,
    ShmserveError,
    Unauthenticated,
)
from shmserve.gateway.http.dashboard import LiveFigures
from shmserve.gateway.http.messages import ChunkedResponse, HttpResponse
from shmserve.gateway.http.routes import ROUTES, metrics_routes
from shmserve.gateway.http.routing import App, Route, RouteTable


def openai_error(error: ShmserveError) -> bytes:
    """The error form of another API."""
    kind = "server_error" if error.status >= 500 else "invalid_request_error"
    body = {"message": error.message, "type": kind, "param": None, "code": None}
    return json.dumps({"error": body}).encode()


class Request(SimpleNamespace):
    """A request whose client is refused with `refusal`; `asked` are the scopes that it was
    authorised for."""

    def __init__(self, method: str, target: str, refusal: ShmserveError | None = None) -> None:
        self.asked: list[str] = []

        def refuse(scope: str, headers: Any) -> ShmserveError | None:
            self.asked.append(scope)
            return refusal

        connection = SimpleNamespace(client=SimpleNamespace(refuse=refuse))
        super().__init__(
            method=method, target=target, headers={}, match=None, begun=None, connection=connection
        )


async def fail(gateway: Any, request: Any, what: str) -> HttpResponse:
    """A handler that raises what its path says."""
    raise {"bad": InvalidArgument("bad"), "full": QueueFull("full", 3), "bug": KeyError("x")}[what]


async def succeed(gateway: Any, request: Any) -> HttpResponse:
    return HttpResponse()


TABLE = RouteTable(
    Route("POST", "/v1/chat/{what}", "inference", fail, openai_error),
    Route("POST", "/v2/infer/{what}", "inference", fail),
    Route("GET", "/v2/health", "health", succeed),
    Route("", "/any", "metrics", succeed),
)


def handled(request: Request, table: RouteTable = TABLE) -> HttpResponse:
    app = App(SimpleNamespace(draining=False), table)  # type: ignore[arg-type]
    response = asyncio.run(app.handle(request))  # type: ignore[arg-type]
    assert app.active == 1 and response.on_sent is not None
    response.on_sent()
    assert app.active == 0
    return response


@pytest.mark.parametrize(
    ("method", "target", "refusal", "status", "message", "header"),
    [
        ("POST", "bad", None, 400, "bad", b""),
        ("POST", "full", None, 503, "full", b"Retry-After: 3"),
        ("POST", "bug", None, 500, "internal error", b""),
        ("GET", "bad", None, 405, "Method Not Allowed", b""),
        ("POST", "bad", PermissionDenied("no"), 403, "no", b""),
        ("POST", "bad", Unauthenticated("who"), 401, "who", b"WWW-Authenticate: Bearer"),
    ],
)
def test_an_error_has_the_form_of_its_route(
    method: str,
    target: str,
    refusal: ShmserveError | None,
    status: int,
    message: str,
    header: bytes,
) -> None:
    requests = [Request(method, f"/{api}/{target}?x", refusal) for api in ("v1/chat", "v2/infer")]
    responses = [handled(request) for request in requests]
    assert [response.status for response in responses] == [status, status]
    assert all(header in response.headers for response in responses)
    other, tritons = (json.loads(b"".join(response.pieces)) for response in responses)
    assert other["error"]["message"] == message and "type" in other["error"]
    assert tritons == {"error": message}
    assert [request.asked for request in requests] == [["inference"]] * 2


def test_a_route_is_authorised_once_for_a_head_and_what_is_no_route_is_not() -> None:
    request = Request("GET", "/v2/health")
    assert handled(request).status == handled(request).status == 200
    assert request.asked == ["health"]
    unknown = Request("GET", "/nowhere", PermissionDenied("no"))
    assert (handled(unknown).status, unknown.asked) == (404, [])
    for method in ("GET", "PUT"):
        assert handled(Request(method, "/any")).status == 200


@pytest.mark.parametrize(
    ("method", "target", "status", "body"),
    [
        ("GET", "/metrics", 200, b"nv_inference_count 1"),
        ("GET", "/metrics/?x", 200, b"nv_inference_count 1"),
        ("POST", "/metrics", 405, b'{"error":"Method Not Allowed"}'),
        ("GET", "/metricsx", 200, b""),
        ("POST", "/v2/models/m/infer", 200, b""),
    ],
)
def test_the_metrics_listener_has_a_table_of_its_own(
    method: str, target: str, status: int, body: bytes
) -> None:
    class Exporter:
        async def page(self) -> bytes:
            return b"nv_inference_count 1"

    request = Request(method, target)
    exporter: Any = Exporter()
    response = handled(request, metrics_routes(exporter, LiveFigures(exporter, Path())))
    assert (response.status, b"".join(response.pieces)) == (status, body)
    assert request.asked == ["metrics"]
    assert ROUTES.find("/metrics") is None


# --- chunked responses


class Transport:
    """Remembers what is written; the client leaves at the write number `leaves`."""

    def __init__(self, leaves: int = -1) -> None:
        self.written: list[bytes] = []
        self.leaves = leaves
        self.writing_paused = False
        self.transport = self

    def is_closing(self) -> bool:
        return False

    def write(self, data: bytes) -> None:
        self.written.append(data)
        self.writing_paused = len(self.written) == self.leaves

    async def drain(self) -> None:
        raise ConnectionResetError("the client is gone")


class Batches:
    """Chunks; `ended` once nobody wants more."""

    def __init__(self, *batches: Sequence[bytes] | Exception) -> None:
        self.ended = False
        self.made = 0
        self._batches = batches

    async def generate(self) -> AsyncGenerator[Sequence[bytes], None]:
        try:
            for batch in self._batches:
                if isinstance(batch, Exception):
                    raise batch
                self.made += 1
                yield batch
        finally:
            self.ended = True


def sent(batches: Batches, transport: Transport, *, http10: bool = False) -> bytes:
    request: Any = SimpleNamespace(connection=transport, is_http10=http10)
    response = ChunkedResponse(200, batches.generate(), b"Content-Type: text/plain\r\n")
    try:
        asyncio.run(response.send(request, 1.0))
    finally:
        assert batches.ended and response.close is http10
    head, _, body = b"".join(transport.written).partition(b"\r\n\r\n")
    assert (b"Transfer-Encoding: chunked" in head) is not http10
    return body


def test_chunks_that_are_there_are_written_at_once_and_an_empty_one_ends_nothing() -> None:
    transport = Transport()
    body = sent(Batches([b"ab", b"", b"c" * 17], [b"d"]), transport)
    assert body == b"2\r\nab\r\n11\r\n" + b"c" * 17 + b"\r\n1\r\nd\r\n0\r\n\r\n"
    assert len(transport.written) == 4  # the head, two batches, the end
    assert sent(Batches([b"ab", b"c"], [b"d"]), Transport(), http10=True) == b"abcd"


def test_no_more_is_made_for_a_client_that_is_gone() -> None:
    batches, transport = Batches([b"a"], [b"b"], [b"c"]), Transport(leaves=2)
    with pytest.raises(ConnectionResetError):
        sent(batches, transport)
    assert batches.made == 1


def test_a_body_that_fails_is_not_ended_as_a_whole_one() -> None:
    transport = Transport()
    with pytest.raises(NotFound):
        sent(Batches([b"a"], NotFound("x")), transport)
    assert not b"".join(transport.written).endswith(b"0\r\n\r\n")
