"""Route tables: each route has a scope and a form for its errors; and chunked responses."""

import asyncio
import json
import re
from collections.abc import AsyncGenerator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from multidict import CIMultiDict

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
from shmserve.gateway.http.routing import App, Cors, Route, RouteTable
from shmserve.gateway.listener import ListenerKind, MisdirectedHost


def openai_error(error: ShmserveError) -> bytes:
    kind = "server_error" if error.status >= 500 else "invalid_request_error"
    body = {"message": error.message, "type": kind, "param": None, "code": None}
    return json.dumps({"error": body}).encode()


class Request(SimpleNamespace):
    """A request with `scopes`, or one that is refused with `refusal`."""

    def __init__(
        self,
        method: str,
        target: str,
        refusal: ShmserveError | None = None,
        kind: ListenerKind = ListenerKind.LOOPBACK,
        **headers: Any,
    ) -> None:
        self.scopes: list[str] = []

        def refuse(scope: str, headers: Any) -> ShmserveError | None:
            self.scopes.append(scope)
            return refusal

        def refuse_host(headers: Any) -> ShmserveError | None:
            return refusal if isinstance(refusal, MisdirectedHost) else None

        listener = SimpleNamespace(kind=kind)
        client = SimpleNamespace(
            find_access_error=refuse, find_host_error=refuse_host, listener=listener
        )
        fields = CIMultiDict({name.replace("_", "-"): value for name, value in headers.items()})
        super().__init__(
            method=method, target=target, headers=fields, route_match=None, begun_request=None
        )
        self.connection, self.begin_repeated = SimpleNamespace(client=client), succeed


async def fail(gateway: Any, request: Any, cause: str) -> HttpResponse:
    """Raise the error that the path names."""
    raise {"bad": InvalidArgument("bad"), "full": QueueFull("full", 3), "bug": KeyError("x")}[cause]


async def succeed(gateway: Any, request: Any) -> HttpResponse:
    return HttpResponse()


TABLE = RouteTable(
    Route("POST", "/v1/chat/{what}", "inference", fail, openai_error, has_request_id=True),
    Route("POST", "/v2/infer/{what}", "inference", fail),
    Route("GET", "/v2/health", "health", succeed),
    Route("", "/any", "metrics", succeed),
)


def handle(request: Request, table: RouteTable = TABLE, cors: Cors | None = None) -> HttpResponse:
    app = App(SimpleNamespace(is_draining=False), table, cors)  # type: ignore[arg-type]
    response = asyncio.run(app.handle(request))  # type: ignore[arg-type]
    assert app.active_count == 1 and response.on_sent is not None
    response.on_sent()
    assert app.active_count == 0
    return response


@pytest.mark.parametrize(
    ("method", "target", "refusal", "status", "message", "header"),
    [
        ("POST", "bad", None, 400, "bad", b""),
        ("POST", "full", None, 503, "full", b"Retry-After: 3"),
        ("POST", "bug", None, 500, "internal error; the server's log has the cause", b""),
        ("GET", "bad", None, 405, "Method Not Allowed", b"Allow: POST\r\n"),
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
    responses = [handle(request) for request in requests]
    assert [response.status for response in responses] == [status, status]
    assert all(header in response.headers for response in responses)
    api_error, triton_families = (json.loads(b"".join(response.pieces)) for response in responses)
    assert api_error["error"]["message"] == message and "type" in api_error["error"]
    assert triton_families == {"error": message}
    assert [request.scopes for request in requests] == [["inference"]] * 2


def test_a_head_is_authorised_once_and_unknown_paths_never() -> None:
    request = Request("GET", "/v2/health")
    assert handle(request).status == handle(request).status == 200
    assert request.scopes == ["health"]
    unknown_request = Request("GET", "/nowhere", PermissionDenied("no"))
    assert (handle(unknown_request).status, unknown_request.scopes) == (404, [])
    for method in ("GET", "PUT"):
        assert handle(Request(method, "/any")).status == 200


def parse_headers(response: HttpResponse) -> dict[str, str]:
    lines = response.headers.decode().splitlines()
    return {name.lower(): value for name, value in (line.split(": ", 1) for line in lines)}


def test_an_unknown_path_has_the_form_of_its_api() -> None:
    for target, kind in (("/v1/nowhere", dict), ("/v1", dict), ("/v2/x", str), ("/v10/x", str)):
        response = handle(Request("GET", target))
        assert response.status == 404
        assert type(json.loads(b"".join(response.pieces))["error"]) is kind
        assert ("x-request-id" in parse_headers(response)) is (kind is dict)


@pytest.mark.parametrize(
    ("given_id", "is_kept"),
    [("id 1", True), ("", False), ("x" * 512, True), ("x" * 513, False), ("caf\xe9", False)],
)
def test_a_response_has_the_id_of_its_request(given_id: str, is_kept: bool) -> None:
    responses = [parse_headers(handle(Request("POST", "/v1/chat/bad", X_Request_Id=given_id)))] * 2
    request_id = responses[0]["x-request-id"]
    assert (request_id == given_id) is is_kept
    assert is_kept or re.fullmatch("req_[0-9a-f]{32}", request_id)
    other_id = parse_headers(handle(Request("POST", "/v1/chat/bad")))["x-request-id"]
    assert other_id != request_id


PAGE = "https://app.example.com"


@pytest.mark.parametrize(
    ("origins", "is_allowed"),
    [((PAGE, "https://b.example"), PAGE), (("*",), "*"), (("https://b.example",), ""), ((), "")],
)
def test_pages_of_allowed_origins_may_use_it(origins: tuple[str, ...], is_allowed: str) -> None:
    cors = Cors(origins) if origins else None
    preflight_headers: dict[str, Any] = {"Origin": PAGE, "Access_Control_Request_Method": "POST"}
    preflight_headers["Access_Control_Request_Headers"] = "authorization,x-stainless-os"
    preflight = Request("OPTIONS", "/v1/chat/bad", Unauthenticated("who"), **preflight_headers)
    response = handle(preflight, cors=cors)
    headers = parse_headers(response)
    if cors is None:
        assert response.status == 401 and "access-control-allow-origin" not in headers
    else:
        assert response.status == (200 if is_allowed else 403) and preflight.scopes == []
    if is_allowed:
        assert headers["access-control-allow-headers"] == "authorization,x-stainless-os"
        assert headers["access-control-allow-methods"] == "GET, POST"
        assert headers["access-control-allow-origin"] == is_allowed
    assert (headers.get("vary") == "Origin") is (bool(origins) and "*" not in origins)
    post = Request("POST", "/v1/chat/bad", Origin=PAGE, Sec_Fetch_Site="cross-site")
    response = handle(post, cors=cors)
    headers = parse_headers(response)
    assert response.status == (400 if is_allowed else 403)
    assert headers.get("access-control-allow-origin", "") == is_allowed
    assert ("x-request-id" in headers.get("access-control-expose-headers", "")) is bool(is_allowed)
    assert (post.begin_repeated is None) is bool(is_allowed)


def test_other_origins_have_no_permission() -> None:
    cors = Cors(["*"])
    preflight: dict[str, Any] = {"Origin": PAGE, "Access_Control_Request_Method": "POST"}
    for request, status in (
        (Request("OPTIONS", "/v1/chat/bad", Unauthenticated("who"), Origin=PAGE), 401),
        (Request("OPTIONS", "/v1/chat/bad", Unauthenticated("who")), 401),
        (Request("OPTIONS", "/v1/chat/bad", kind=ListenerKind.UNIX, **preflight), 403),
        (Request("OPTIONS", "/v1/chat/bad", MisdirectedHost("no"), **preflight), 421),
    ):
        assert handle(request, cors=cors).status == status
    plain_headers = parse_headers(handle(Request("POST", "/v1/chat/bad"), cors=cors))
    assert not [name for name in plain_headers if name.startswith("access-control")]
    preflight["Access_Control_Request_Headers"] = "x\r\ny"
    foreign = parse_headers(handle(Request("OPTIONS", "/v1/chat/bad", **preflight), cors=cors))
    assert "access-control-allow-headers" not in foreign


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
def test_the_metrics_port_has_its_routes(
    method: str, target: str, status: int, body: bytes
) -> None:
    class Exporter:
        async def render_page(self) -> bytes:
            return b"nv_inference_count 1"

    request = Request(method, target)
    exporter: Any = Exporter()
    response = handle(request, metrics_routes(exporter, LiveFigures(exporter, Path())))
    assert (response.status, b"".join(response.pieces)) == (status, body)
    assert request.scopes == ["metrics"]
    assert ROUTES.find("/metrics") is None


class Transport:
    """A transport that records writes; the client disconnects at write `lost_after`."""

    def __init__(self, lost_after: int = -1) -> None:
        self.written: list[bytes] = []
        self.lost_after = lost_after
        self.is_writing_paused = False
        self.transport = self

    def is_closing(self) -> bool:
        return False

    def write(self, data: bytes) -> None:
        self.written.append(data)
        self.is_writing_paused = len(self.written) == self.lost_after

    def get_write_buffer_size(self) -> int:
        return 0

    async def drain(self) -> None:
        raise ConnectionResetError("the client has disconnected")


class ResponseChunks:
    """Chunks of a response; `ended` is set when the response needs no further chunk."""

    def __init__(self, *batches: Sequence[bytes] | Exception) -> None:
        self.ended = False
        self.created = 0
        self._batches = batches

    async def generate(self) -> AsyncGenerator[Sequence[bytes], None]:
        try:
            for batch in self._batches:
                if isinstance(batch, Exception):
                    raise batch
                self.created += 1
                yield batch
        finally:
            self.ended = True


def send_batches(
    batches: ResponseChunks, transport: Transport, *, http10: bool = False, method: str = "POST"
) -> bytes:
    request: Any = SimpleNamespace(connection=transport, is_http10=http10, method=method)
    response = ChunkedResponse(200, batches.generate(), b"Content-Type: text/plain\r\n")
    try:
        asyncio.run(response.send(request, 1.0))
    finally:
        assert (batches.ended or method == "HEAD") and response.closes_connection is http10
    head, _, body = b"".join(transport.written).partition(b"\r\n\r\n")
    assert (b"Transfer-Encoding: chunked" in head) is not http10
    return body


def test_available_chunks_are_written_together_and_an_empty_chunk_ends_nothing() -> None:
    transport = Transport()
    body = send_batches(ResponseChunks([b"ab", b"", b"c" * 17], [b"d"]), transport)
    assert body == b"2\r\nab\r\n11\r\n" + b"c" * 17 + b"\r\n1\r\nd\r\n0\r\n\r\n"
    assert len(transport.written) == 4  # the head, two batches, the end
    assert send_batches(ResponseChunks([b"ab", b"c"], [b"d"]), Transport(), http10=True) == b"abcd"
    assert send_batches(ResponseChunks([b"ab"]), Transport(), method="HEAD") == b""


def test_nothing_is_produced_for_a_disconnected_client() -> None:
    batches, transport = ResponseChunks([b"a"], [b"b"], [b"c"]), Transport(lost_after=2)
    with pytest.raises(ConnectionResetError):
        send_batches(batches, transport)
    assert batches.created == 1


def test_a_failed_body_is_not_terminated() -> None:
    transport = Transport()
    with pytest.raises(NotFound):
        send_batches(ResponseChunks([b"a"], NotFound("x")), transport)
    assert not b"".join(transport.written).endswith(b"0\r\n\r\n")
