"""The body of a request, read within limits of size, and no further than is asked for; that of an
inference is read whole, or streamed into place without a copy.

Small bodies are here when the handler starts. A large binary body goes from the socket straight
into one arena block, after its header was checked.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import lru_cache
from typing import Any

from aiohttp import StreamReader

from shmserve.errors import InvalidArgument, ShmserveError
from shmserve.gateway.client_identity import ClientIdentity
from shmserve.gateway.compression import Inflater, UnsupportedEncoding, check_encoding
from shmserve.gateway.context import Gateway
from shmserve.gateway.http.connection.incoming import MalformedBody
from shmserve.gateway.http.json import tensors
from shmserve.gateway.http.json.fingerprint import (
    fingerprint,
    remember,
    repeat,
    worth_preparing,
)
from shmserve.gateway.http.json.infer_request import TOO_LARGE, decode_data, parse_request
from shmserve.gateway.http.json.parser import LARGE, Numbers, loads, loads_large
from shmserve.gateway.http.messages import (
    CONTENT_ENCODING,
    CONTENT_LENGTH,
    EXPECT,
    HEADER_LENGTH,
    TRANSFER_ENCODING,
    HttpRequest,
    WholeBody,
)
from shmserve.gateway.inference.body_arrival import Arrival, BodyBudget
from shmserve.gateway.inference.builder import (
    BuiltRequest,
    Resources,
    build,
    check_request,
    raw_request,
    resources_of,
    tensor_ref,
)
from shmserve.gateway.inference.request import InferInput, InferRequest, forwarded_headers
from shmserve.gateway.model_table import GatewayModel
from shmserve.gateway.region_table import authorise
from shmserve.gateway.settings import GatewaySettings
from shmserve.ipc.tensors.inference import INLINE_LIMIT
from shmserve.ipc.tensors.ranges import LARGEST

JSON_TOO_LARGE = (
    "request JSON size of {size} bytes exceeds the maximum allowed input size of {limit} bytes. "
    "Use --http-max-input-size to increase the limit."
)
_MOST_CHUNKS = 65536
_TOGETHER = 1024
_BODY_TOO_LARGE = (
    "request body of {size} bytes does not fit the {limit} bytes of server memory for tensors "
    "(--arena-byte-size)"
)
_RAW_TOO_LARGE = "Raw input" + TOO_LARGE
_CUT_SHORT = "the request body ended early"
_NUMBER = re.compile(r"-?[0-9]+")
_NOTHING: dict[str, str] = {}


class BrokenBody(InvalidArgument):
    """The body is not framed as HTTP says; the connection cannot go on."""


async def read_json(gateway: Gateway, request: HttpRequest, *, required: bool = False) -> Any:
    """A request's body as JSON; an empty body is an empty object, unless one is `required`.

    Raises JsonFault for what is not JSON.
    """
    body = Body(request, gateway.settings, gateway.body_budget)
    if body.compressed():
        raw = await body.inflate()
    else:
        raw = await body.read(gateway.settings.max_input_size, JSON_TOO_LARGE)
    return loads(raw) if raw or required else {}


class Body:
    """One request's body, as a stream with back-pressure: nothing is read before it is asked for.

    `declared` is its size in bytes, -1 if unknown. What of it is here while the rest is arriving
    counts in `budget`.
    """

    def __init__(self, request: HttpRequest, settings: GatewaySettings, budget: BodyBudget) -> None:
        self._request = request
        self._content = request.content
        self._max_input_size = settings.max_input_size
        self._arrival = Arrival(settings.body_timeout_s, budget)
        self._chunks = 0
        self._chunked = TRANSFER_ENCODING in request.headers
        self.declared = -1 if self._chunked else int(request.headers.get(CONTENT_LENGTH, 0))

    def here(self) -> bytes | None:
        """The whole body if it has arrived already, as small ones have.

        Raises BrokenBody for a size that the parser does not count with.
        """
        if self.declared > LARGEST:
            raise BrokenBody("malformed HTTP request body")
        return self._content.read_nowait() if self._content.is_eof() else None

    def compressed(self) -> bool:
        """Whether the body is compressed; raises UnsupportedEncoding."""
        encodings = self._request.headers.getall(CONTENT_ENCODING, ())
        if not encodings:
            return False
        if len(encodings) > 1:
            raise UnsupportedEncoding("Unsupported compression type")
        return check_encoding(encodings[0])

    # --- pieces of it

    async def next(self) -> bytes:
        """The next bytes; b"" at the end. Raises BodyTimeout, BrokenBody or InvalidArgument."""
        if self._arrival.received == 0 and not self._content.is_eof():
            self._invite()
        read = self._next_chunks() if self._chunked else self._content.readany()
        try:
            return await self._arrival.next(read)
        except MalformedBody:
            raise BrokenBody("malformed HTTP request body") from None

    def _invite(self) -> None:
        """The interim response that some clients wait for before they send a body."""
        if self._request.headers.get(EXPECT, "").lower() == "100-continue":
            transport = self._request.connection.transport
            if transport is not None:
                transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")

    async def _next_chunks(self) -> bytes:
        # Those that are here go together: one by one, tiny ones keep everybody else waiting.
        content = self._content
        assert isinstance(content, StreamReader)  # one that came whole was not in chunks
        received = self._arrival.received
        pieces: list[bytes] = []
        size = 0
        while True:
            data, ends = await content.readchunk()
            self._chunks += ends and bool(data)
            if self._chunks > _MOST_CHUNKS:
                raise BrokenBody(
                    f"Chunked request body exceeds maximum of {_MOST_CHUNKS} non-empty chunks. "
                    "Send fewer or larger HTTP chunks."
                )
            pieces.append(data)
            size += len(data)
            all_here = content.total_bytes <= received + size or len(pieces) >= _TOGETHER
            if (size and all_here) or not (data or ends):
                return b"".join(pieces)

    # --- the whole of it

    async def read(self, limit: int, too_large: str) -> bytes:
        """The whole body, of at most `limit` bytes.

        Raises InvalidArgument with `too_large`, {size} and {limit} filled in, when it is more, and
        Unavailable when too much of others' is here.
        """
        if self.declared > limit:
            raise InvalidArgument(too_large.format(size=self.declared, limit=limit))
        whole = self.here()
        if whole is None:
            pieces: list[bytes] = []
            size = 0
            try:
                while size <= limit and (piece := await self.next()):
                    pieces.append(piece)
                    size += len(piece)
                    self._arrival.hold(len(piece))
                whole = b"".join(pieces)
            finally:
                self._arrival.give_back()
        if len(whole) > limit:
            raise InvalidArgument(too_large.format(size=len(whole), limit=limit))
        return whole

    async def inflate(self) -> bytes:
        """The decompressed body, of at most `max_input_size` bytes; raises as `read`."""
        inflater = Inflater(self._max_input_size)
        pieces: list[bytes] = []
        try:
            while chunk := await self.next():
                for piece in inflater.feed(chunk):
                    pieces.append(piece)
                    self._arrival.hold(len(piece))
                    await asyncio.sleep(0)
            inflater.finish()
            return b"".join(pieces)
        finally:
            self._arrival.give_back()

    # --- a part of it, and the rest into memory that is there already

    @contextmanager
    def arriving(self) -> Iterator[None]:
        """A block in which the bytes of `read_start` count: the rest may be long in coming."""
        try:
            yield
        finally:
            self._arrival.give_back()

    def keeping(self, release: Callable[[], None]) -> AbstractContextManager[None]:
        """While this runs, it has a block of the arena, which eviction frees with `release`."""
        return self._arrival.keeping(release)

    async def read_start(self, size: int) -> bytes:
        """The first `size` bytes and what came with them; fewer at the end. While the body is
        `arriving`; raises as `read`."""
        start = bytearray()
        while len(start) < size and (piece := await self.next()):
            start += piece
            self._arrival.hold(len(piece))
        return bytes(start)

    async def read_into(self, views: Sequence[memoryview], start: bytes = b"") -> bool:
        """Fill `views`, one after the other, with `start` and then with what comes.

        False when the body ends before they are full.
        """
        piece = memoryview(start)
        for view in views:
            at = 0
            while at < len(view):
                if not piece:
                    piece = memoryview(await self.next())
                    if not piece:
                        return False
                taken = min(len(piece), len(view) - at)
                view[at : at + taken] = piece[:taken]
                at += taken
                piece = piece[taken:]
        return True


async def read_request(gateway: Gateway, model: GatewayModel, request: HttpRequest) -> BuiltRequest:
    """Read, parse and admit a request.

    Raises what the client did wrong, BodyTimeout, or Unavailable when memory for its tensors is
    full; then it holds nothing.
    """
    headers = request.headers
    pattern = gateway.settings.http_header_forward_pattern
    extra = forwarded_headers(pattern, headers.items()) if pattern else _NOTHING
    said = headers.get(HEADER_LENGTH)
    content = request.content
    if type(content) is WholeBody and CONTENT_ENCODING not in headers:
        body, content.data = content.data, b""
    else:
        read = await _read(gateway, model, request, said, extra)
        if isinstance(read, BuiltRequest):
            return read
        body = read
    limit = gateway.settings.max_input_size
    whole_size = len(body)
    size = whole_size if said is None else header_size(said, whole_size)
    if not size:
        return _raw(gateway, model, body, extra)
    tail_size = whole_size - size
    header = body[:size] if tail_size else body
    key, arrays, itself = fingerprint(header, tail_size)
    if size <= limit and not extra:
        known = repeat(model.prepared, key, body, size, arrays)
        if known is not None:
            if itself is not None:
                known.identify(itself)
            return known
    infer_request = await _parse(header, tail_size, model, limit)
    infer_request.parameters |= extra
    # What comes with parameters of its own is not like others with its body.
    prepare = not extra and worth_preparing(model.prepared, key)
    built, prepared = build(gateway, model, infer_request, body, size, prepare=prepare)
    if prepared is not None and (itself is None or itself.is_of(infer_request)):
        remember(model.prepared, key, infer_request, prepared, len(arrays))
    return built


def repeated_request(
    gateway: Gateway, model: GatewayModel, body: bytes, said: str | None
) -> BuiltRequest | None:
    """The request that a whole body is, as `read_request` makes it of one that is known by its
    fingerprint; None for any other. `said` is the size of its header."""
    whole_size = len(body)
    size = whole_size if said is None else header_size(said, whole_size)
    if size > gateway.settings.max_input_size:
        return None
    tail_size = whole_size - size
    header = body[:size] if tail_size else body
    key, arrays, itself = fingerprint(header, tail_size)
    known = repeat(model.prepared, key, body, size, arrays)
    if known is not None and itself is not None:
        known.identify(itself)
    return known


async def own_timeout_us(gateway: Gateway, request: HttpRequest) -> int:
    """How long a request may take, as its body says, in microseconds, 0: any time. The body is
    all here then; what is wrong with it is said when it is read. Raises as `Body.read` does."""
    if CONTENT_ENCODING in request.headers:
        return 0
    body = Body(request, gateway.settings, gateway.body_budget)
    whole = await body.read(gateway.arena.memory.byte_size, _BODY_TOO_LARGE)
    request.content = WholeBody(whole)
    with contextlib.suppress(ShmserveError, AttributeError, TypeError, ValueError):
        said = loads(whole[: header_size(request.headers.get(HEADER_LENGTH), len(whole))])
        return int(said.get("parameters", {}).get("timeout", 0))
    return 0


def _raw(gateway: Gateway, model: GatewayModel, body: bytes, extra: dict[str, str]) -> BuiltRequest:
    limit = gateway.settings.max_input_size
    if len(body) > limit:
        raise InvalidArgument(_RAW_TOO_LARGE.format(size=len(body), limit=limit))
    infer_request, body = raw_request(model.signature, body)
    infer_request.parameters |= extra
    return build(gateway, model, infer_request, body, 0)[0]


async def _read(
    gateway: Gateway,
    model: GatewayModel,
    request: HttpRequest,
    said: str | None,
    extra: dict[str, str],
) -> bytes | BuiltRequest:
    """A body that is compressed, or still arriving; a large binary one as the request that it is,
    in its place."""
    body = Body(request, gateway.settings, gateway.body_budget)
    if CONTENT_ENCODING in request.headers and body.compressed():
        return await body.inflate()
    whole = body.here()
    if whole is not None:
        return whole
    limit = gateway.settings.max_input_size
    if said is None:
        return await body.read(limit, JSON_TOO_LARGE)
    if body.declared < 0:
        return await body.read(gateway.arena.memory.byte_size, _BODY_TOO_LARGE)
    size = header_size(said, body.declared)
    tail_size = body.declared - size if size else 0
    if tail_size > INLINE_LIMIT:
        with body.arriving():
            client = request.connection.client
            return await _streamed(gateway, model, body, size, client, extra)
    return await body.read(limit + tail_size, JSON_TOO_LARGE if size else _RAW_TOO_LARGE)


def header_size(said: str | None, body_size: int) -> int:
    """The size of a body's JSON part in bytes, by the header that says so; all where there is none.

    Raises InvalidArgument for what is no number in [0, body_size].
    """
    if said is None:
        return body_size
    size = _number(said)
    if not 0 <= size <= body_size:
        raise InvalidArgument(
            f"inference header size should be in range (0, {body_size}), got: {said}"
        )
    return size


@lru_cache(maxsize=256)
def _number(said: str) -> int:
    if _NUMBER.fullmatch(said) is None:
        raise InvalidArgument(f"Unable to parse Inference-Header-Content-Length, got: {said}")
    if len(said) > 11 or not -(2**31) <= int(said) < 2**31:
        raise InvalidArgument(
            "Unable to parse Inference-Header-Content-Length, value is out of range "
            f"[ -2147483648, 2147483647 ], got: {said}"
        )
    return int(said)


async def _parse(header: bytes, tail_size: int, model: GatewayModel, limit: int) -> InferRequest:
    if len(header) > limit:
        raise InvalidArgument(JSON_TOO_LARGE.format(size=len(header), limit=limit))
    if len(header) < LARGE:
        infer_request = parse_request(loads(header), tail_size, model.name, limit)
        decode_data(infer_request)
        return infer_request
    infer_request = parse_request(loads_large(header), tail_size, model.name, limit)
    for tensor in infer_request.inputs:
        data = tensor.data
        if isinstance(data, Numbers):
            tensor.data = await _read_parts(data.parts(), tensor)
        elif type(data) is list and tensor.count:
            tensor.data = await _read_parts(tensors.parts(data), tensor)
    decode_data(infer_request)
    return infer_request


async def _read_parts(parts: Iterator[list[Any]], tensor: InferInput) -> bytes:
    pieces: list[bytes] = []
    for piece in tensors.decode_parts(parts, tensor.datatype, tensor.count, tensor.name):
        pieces.append(piece)
        await asyncio.sleep(0)  # cooperative: others have their turn between two slices
    return b"".join(pieces)


async def _streamed(
    gateway: Gateway,
    model: GatewayModel,
    body: Body,
    size: int,
    client: ClientIdentity,
    extra: dict[str, str],
) -> BuiltRequest:
    """Read the header, allocate, and fill that from the socket, zero-copy behind its buffer."""
    limit = gateway.settings.max_input_size
    if size > limit:
        raise InvalidArgument(JSON_TOO_LARGE.format(size=size, limit=limit))
    start = await body.read_start(size)
    if len(start) < size:
        raise InvalidArgument(_CUT_SHORT)
    infer_request = await _parse(start[:size], body.declared - size, model, limit)
    infer_request.parameters |= extra
    start = start[size:]
    resources = resources_of(gateway)
    try:
        built, views = _room(model, infer_request, resources)
        if resources.regions:
            # Nobody waits for the body with another's region in use.
            authorise(resources.regions, client.peer())
        with body.keeping(resources.release):
            if not await body.read_into(views, start):
                raise InvalidArgument(_CUT_SHORT)
    except BaseException:
        resources.release()
        raise
    return built


def _room(
    model: GatewayModel, infer_request: InferRequest, resources: Resources
) -> tuple[BuiltRequest, list[memoryview]]:
    """The request, and where its binary tensors are to be read to."""
    sizes = [
        len(tensor.data) if tensor.data is not None else max(tensor.binary_size, 0)
        for tensor in infer_request.inputs
    ]
    places = resources.allocate(sizes)
    tensors = [
        tensor_ref(resources, tensor, None if tensor.place is not None else place)
        for tensor, place in zip(infer_request.inputs, places, strict=True)
    ]
    # Before the body is read, so that a wrong request costs no upload's time.
    built = check_request(model, infer_request, tensors, resources)
    views: list[memoryview] = []
    for tensor, place in zip(infer_request.inputs, places, strict=True):
        if tensor.data is not None:
            resources.view(place)[:] = tensor.data
        elif tensor.binary_size > 0:
            views.append(resources.view(place))
    return built, views
