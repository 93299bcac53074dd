"""The bodies of requests: read within limits of size and time, and decoded to inference requests.

A small body is complete when its handler starts. The tensors of a large binary body are received
directly into the arena, once the header was checked. The body of an inference is decoded in one of
four ways, which `read_request` selects:

| body                                              | way                                       |
|---------------------------------------------------|-------------------------------------------|
| differs from an earlier one only in its tensors   | `fill_known_template`                     |
| binary, with large tensors, not yet received      | `_receive_tensors`: into the arena        |
| of a raw request, which has no header             | `_build_raw`: the model defines the input |
| any other                                         | `_parse_header`: parsed as a whole        |
"""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import Awaitable, Callable, Iterator
from functools import lru_cache
from typing import Any

from aiohttp import StreamReader

from shmserve.errors import InvalidArgument, ShmserveError
from shmserve.gateway.compression import BodyTooLarge, Inflater, UnsupportedEncoding, check_encoding
from shmserve.gateway.context import Gateway, GatewayModel
from shmserve.gateway.http.incoming import MalformedBody
from shmserve.gateway.http.json import tensors
from shmserve.gateway.http.json.codec import TOO_LARGE, decode_data, parse_request
from shmserve.gateway.http.json.fingerprint import (
    Fingerprint,
    fill_known_template,
    is_worth_caching,
    store_template,
)
from shmserve.gateway.http.json.parser import (
    LARGE_BYTES,
    MAX_OBJECTS,
    JsonFault,
    NumberArray,
    has_many_objects,
    loads,
    loads_large,
)
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
from shmserve.gateway.inference.infer_request import (
    InferInput,
    InferRequest,
    select_forwarded_headers,
)
from shmserve.gateway.inference.prepare import (
    ArrivingRequest,
    BuiltRequest,
    build_request,
    build_with_template,
    raw_request,
    reserve_tensors,
)
from shmserve.gateway.region_table import authorise
from shmserve.gateway.settings import GatewaySettings
from shmserve.ipc.tensors.descriptors import MAX_INT64
from shmserve.ipc.tensors.schemas import INLINE_LIMIT

# A larger body with prompts is parsed in a separate process, since 340,000 tokens take 15 ms.
_MAX_PROMPT_BODY_BYTES = 512 * 1024
JSON_TOO_LARGE = (
    "request JSON size of {size} bytes exceeds the maximum allowed input size of {limit} bytes. "
    "Use --http-max-input-size to increase the limit."
)
_MAX_CHUNKS = 65536  # in a body with Transfer-Encoding: chunked
_MAX_CHUNKS_AT_ONCE = 1024  # chunks that are returned together
_BODY_TOO_LARGE = (
    "request body of {size} bytes exceeds the {limit} bytes of server memory for tensors "
    "(--arena-byte-size)"
)
_JSON_STARTS = (b"{", b"[", b" ", b"\n", b"\r", b"\t", b"")
_RAW_HINT = " (a body that is an input, such as a file, needs Inference-Header-Content-Length: 0)"
_FORM_HINT = " (the body is a form; send only the file: curl --data-binary @FILE instead of -F)"
_TAIL_HINT = " (with binary_data_size, Inference-Header-Content-Length is the size of the JSON)"
_RAW_TOO_LARGE = "Raw input" + TOO_LARGE
_CUT_SHORT = "the request body ended early"
_INTEGER = re.compile(r"-?[0-9]+")


class BrokenBody(InvalidArgument):
    """The error for a body with invalid framing; the connection has to be closed."""


# Called with the pieces of a large body; returns the parsed body.
ParseLarge = Callable[[list[bytes]], Awaitable[Any]]


async def read_json(
    gateway: Gateway,
    request: HttpRequest,
    *,
    is_required: bool = False,
    parse: Callable[[bytes], Any] = loads,
    parse_large: ParseLarge | None = None,
) -> Any:
    """Return the parsed JSON body of a request.

    Args:
        gateway: The gateway.
        request: The request.
        is_required: Whether an empty body is an error; otherwise it is parsed as {}.
        parse: The parser.
        parse_large: The parser of bodies that are large or have many objects; by default `parse`.

    Raises:
        JsonFault: The body is not JSON.
    """
    body = Body(request, gateway.settings, gateway.body_budget)
    limit = gateway.settings.max_input_size
    try:
        if body.is_compressed():
            pieces, size = await body.inflate_pieces()
        else:
            pieces, size = await body.read_pieces(limit, JSON_TOO_LARGE)
        if (
            parse_large is not None
            and size > MAX_OBJECTS
            and (size > _MAX_PROMPT_BODY_BYTES or has_many_objects(b"".join(pieces)))
        ):
            return await parse_large(pieces)
        encoded_body = b"".join(pieces)
    finally:
        if body.arrival.received_bytes:
            body.arrival.release_budget()
    return parse(encoded_body) if encoded_body or is_required else {}


class Body:
    """The body of one request, a stream with back-pressure: bytes are read only when requested.

    The budget accounts for the received bytes while the rest of the body is arriving.

    Attributes:
        arrival: The time limit and the memory of the body.
        declared_size: The size in bytes, or -1 if it is unknown.
    """

    def __init__(self, request: HttpRequest, settings: GatewaySettings, budget: BodyBudget) -> None:
        self._request = request
        self._content = request.content
        self._max_input_size = settings.max_input_size
        self.arrival = Arrival(settings.body_timeout_s, budget)
        self._chunk_count = 0
        self._is_chunked = TRANSFER_ENCODING in request.headers
        self.declared_size = -1 if self._is_chunked else int(request.headers.get(CONTENT_LENGTH, 0))

    def received_whole(self) -> bytes | None:
        """Return the body if it was received completely, as small bodies are.

        Raises:
            BrokenBody: The declared size exceeds 63 bits.
        """
        if self.declared_size > MAX_INT64:
            raise BrokenBody("malformed HTTP request body")
        return self._content.read_nowait() if self._content.is_eof() else None

    def is_compressed(self) -> bool:
        """Return whether the body is compressed.

        Raises:
            UnsupportedEncoding: The encoding is not supported.
        """
        encodings = self._request.headers.getall(CONTENT_ENCODING, ())
        if not encodings:
            return False
        if len(encodings) > 1:
            raise UnsupportedEncoding("Unsupported compression type")
        return check_encoding(encodings[0])

    # --- pieces

    async def next(self) -> bytes:
        """Return the next bytes, or b"" at the end.

        Raises:
            BodyTimeout: The bytes did not arrive in time.
            BrokenBody: The framing is invalid.
        """
        if self.arrival.received_bytes == 0 and not self._content.is_eof():
            self._send_continue()
        pending_read = self._next_chunks() if self._is_chunked else self._content.readany()
        try:
            return await self.arrival.next(pending_read)
        except MalformedBody:
            raise BrokenBody("malformed HTTP request body") from None

    def _send_continue(self) -> None:
        """Send the interim response that some clients await before they send a body."""
        request = self._request
        if request.headers.get(EXPECT, "").lower() == "100-continue" and not request.is_http10:
            transport = request.connection.transport
            if transport is not None:
                transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")

    async def _next_chunks(self) -> bytes:
        # Received chunks are returned together: a turn of the loop for each tiny chunk would delay
        # all other requests.
        content = self._content
        assert isinstance(content, StreamReader)  # only an incomplete body has a stream
        start = self.arrival.received_bytes
        pieces: list[bytes] = []
        size = 0
        while True:
            data, is_chunk_end = await content.readchunk()
            self._chunk_count += is_chunk_end and bool(data)
            if self._chunk_count > _MAX_CHUNKS:
                raise BrokenBody(
                    f"Chunked request body exceeds maximum of {_MAX_CHUNKS} non-empty chunks. "
                    "Send fewer or larger HTTP chunks."
                )
            pieces.append(data)
            size += len(data)
            is_last = content.total_bytes <= start + size or len(pieces) >= _MAX_CHUNKS_AT_ONCE
            if (size and is_last) or not (data or is_chunk_end):
                return b"".join(pieces)

    # --- the whole body

    async def read(self, limit: int, error_text: str) -> bytes:
        """Return the whole body, as `read_pieces` does."""
        try:
            return b"".join((await self.read_pieces(limit, error_text))[0])
        finally:
            self.arrival.release_budget()

    async def read_pieces(self, limit: int, error_text: str) -> tuple[list[bytes], int]:
        """Return the pieces of the body, and their total size.

        The pieces count in the budget until `arrival.release_budget`.

        Args:
            limit: The largest size in bytes.
            error_text: The message of the error about a larger body, with {size} and {limit}.

        Raises:
            BodyTooLarge: The body is larger than `limit`.
            Unavailable: The memory for the bodies that are arriving is full.
        """
        if self.declared_size > limit:
            raise BodyTooLarge(error_text.format(size=self.declared_size, limit=limit))
        content = self.received_whole()
        pieces: list[bytes] = [] if content is None else [content]
        size = len(content or b"")
        while content is None and size <= limit and (piece := await self.next()):
            pieces.append(piece)
            size += len(piece)
            self.arrival.reserve(len(piece))
        if size > limit:
            raise BodyTooLarge(error_text.format(size=size, limit=limit))
        return pieces, size

    async def inflate(self) -> bytes:
        """Return the decompressed body, as `inflate_pieces` does."""
        try:
            return b"".join((await self.inflate_pieces())[0])
        finally:
            self.arrival.release_budget()

    async def inflate_pieces(self) -> tuple[list[bytes], int]:
        """Return the pieces and the size of the decompressed body, at most `max_input_size`.

        Raises:
            ShmserveError: As in `read_pieces`.
        """
        inflater = Inflater(self._max_input_size)
        pieces: list[bytes] = []
        size = 0
        while chunk := await self.next():
            for piece in inflater.feed(chunk):
                pieces.append(piece)
                size += len(piece)
                self.arrival.reserve(len(piece))
                await asyncio.sleep(0)
        inflater.finish()
        return pieces, size

    # --- the first part, and the rest into allocated memory

    async def read_start(self, size: int) -> bytes:
        """Return at least the first `size` bytes; fewer bytes if the body ends before.

        The bytes count in the budget until `arrival.release_budget`, since the rest may be late.

        Raises:
            ShmserveError: As in `read`.
        """
        pieces: list[bytes] = []
        while self.arrival.received_bytes < size and (piece := await self.next()):
            pieces.append(piece)
            self.arrival.reserve(len(piece))
        return b"".join(pieces)  # `join` does not copy a single piece

    async def read_tensors(self, arriving: ArrivingRequest, start: memoryview) -> bool:
        """Receive the tensors, which begin with `start`; return whether they are complete."""
        content, arrival, piece = self._content, self.arrival, start
        assert isinstance(content, StreamReader)
        while True:
            arriving.feed_across_tensors(piece)
            if arriving.is_complete:
                return True
            missing_bytes = self.declared_size - arrival.received_bytes
            if missing_bytes and arrival.received_bytes == content.total_bytes:
                connection = self._request.connection
                with connection.receiving(arriving, arrival, missing_bytes) as body_end:
                    await arrival.wait_for_end(body_end)
                return arriving.is_complete
            piece = memoryview(await self.next())
            if not piece:
                return False


async def read_request(gateway: Gateway, model: GatewayModel, request: HttpRequest) -> BuiltRequest:
    """Read, decode and check an inference request.

    Raises:
        ShmserveError: The request is invalid, arrives too slowly, or the arena is full. Its
            resources are released.
    """
    headers = request.headers
    pattern = gateway.settings.http_header_forward_pattern
    forwarded_headers = select_forwarded_headers(pattern, headers.items()) if pattern else {}
    header_length = headers.get(HEADER_LENGTH)
    content = request.content
    if type(content) is WholeBody and CONTENT_ENCODING not in headers:
        body, content.data = content.data, b""
    else:
        result = await _read_or_build(gateway, model, request, header_length, forwarded_headers)
        if isinstance(result, BuiltRequest):
            return result
        body = result
    size = header_size(header_length, len(body))
    if not size:
        return _build_raw(gateway, model, body, forwarded_headers)
    limit = gateway.settings.max_input_size
    fingerprint = Fingerprint(body[:size], len(body) - size)
    # Forwarded headers are parameters that the body does not contain.
    if size <= limit and not forwarded_headers:
        known_request = fill_known_template(model.templates, fingerprint, body, size)
        if known_request is not None:
            return known_request
    try:
        infer_request = await _parse_header(body[:size], len(body) - size, model, limit)
    except JsonFault as error:
        if header_length is None and body[:1] not in _JSON_STARTS:
            is_form = headers.get("Content-Type", "").lower().startswith("multipart/")
            raise JsonFault(error.message + is_form * _FORM_HINT + _RAW_HINT) from None
        if b"binary_data_size" in body and (header_length is None or "UTF-8" in error.message):
            raise JsonFault(error.message + _TAIL_HINT) from None
        raise
    infer_request.parameters |= forwarded_headers
    if forwarded_headers or not is_worth_caching(model.templates, fingerprint):
        return build_request(gateway, model, infer_request, body, size)
    built_request, template = build_with_template(gateway, model, infer_request, body, size)
    if template is not None:
        store_template(model.templates, fingerprint, infer_request, template)
    return built_request


async def timeout_in_body_us(gateway: Gateway, request: HttpRequest) -> int:
    """Return the time limit in the body of a request, in microseconds; 0 means no limit.

    The whole body is read and kept. Faults of the body are ignored, since `read_request` reports
    them.

    Raises:
        ShmserveError: As in `Body.read`.
    """
    if CONTENT_ENCODING in request.headers:
        return 0
    body = Body(request, gateway.settings, gateway.body_budget)
    content = await body.read(gateway.arena.memory.byte_size, _BODY_TOO_LARGE)
    request.content = WholeBody(content)
    with contextlib.suppress(ShmserveError, AttributeError, TypeError, ValueError, OverflowError):
        header = loads(content[: header_size(request.headers.get(HEADER_LENGTH), len(content))])
        parameters = header.get("parameters", {})
        limits_us = [int(parameters.get("deadline_us", 0))]
        if gateway.settings.request_timeout_is_deadline:
            limits_us.append(int(parameters.get("timeout", 0)))
        return min(filter(None, limits_us), default=0)
    return 0


def _build_raw(
    gateway: Gateway, model: GatewayModel, body: bytes, forwarded_headers: dict[str, str]
) -> BuiltRequest:
    limit = gateway.settings.max_input_size
    if len(body) > limit:
        raise InvalidArgument(_RAW_TOO_LARGE.format(size=len(body), limit=limit))
    infer_request, body = raw_request(model.signature, body)
    infer_request.parameters |= forwarded_headers
    return build_request(gateway, model, infer_request, body)


async def _read_or_build(
    gateway: Gateway,
    model: GatewayModel,
    request: HttpRequest,
    header_length: str | None,
    forwarded_headers: dict[str, str],
) -> bytes | BuiltRequest:
    """Return a body, decompressed if necessary, or the request that was built from it.

    The request is built while the body arrives if its tensors exceed `INLINE_LIMIT`.
    """
    body = Body(request, gateway.settings, gateway.body_budget)
    if CONTENT_ENCODING in request.headers and body.is_compressed():
        return await body.inflate()
    content = body.received_whole()
    if content is not None:
        return content
    limit = gateway.settings.max_input_size
    if header_length is None:
        return await body.read(limit, JSON_TOO_LARGE)
    if body.declared_size < 0:
        return await body.read(gateway.arena.memory.byte_size, _BODY_TOO_LARGE)
    size = header_size(header_length, body.declared_size)
    tail_size = body.declared_size - size if size else 0
    if tail_size > INLINE_LIMIT:
        try:
            return await _receive_tensors(gateway, model, request, body, size, forwarded_headers)
        finally:
            body.arrival.release_budget()
    return await body.read(limit + tail_size, JSON_TOO_LARGE if size else _RAW_TOO_LARGE)


async def _receive_tensors(
    gateway: Gateway,
    model: GatewayModel,
    request: HttpRequest,
    body: Body,
    size: int,
    forwarded_headers: dict[str, str],
) -> BuiltRequest:
    """Read the header, which has `size` bytes, and receive the tensors into the arena."""
    limit = gateway.settings.max_input_size
    if size > limit:
        raise InvalidArgument(JSON_TOO_LARGE.format(size=size, limit=limit))
    start = await body.read_start(size)
    if len(start) < size:
        raise InvalidArgument(_CUT_SHORT)
    infer_request = await _parse_header(start[:size], body.declared_size - size, model, limit)
    infer_request.parameters |= forwarded_headers
    arriving_request = reserve_tensors(gateway, model, infer_request, body.declared_size)
    try:
        if arriving_request.built_request.regions:
            # A client must not hold regions of another user while its body arrives.
            authorise(arriving_request.built_request.regions, request.connection.client.peer())
        body.arrival.register_block(arriving_request.release)
        if not await body.read_tensors(arriving_request, memoryview(start)[size:]):
            raise InvalidArgument(_CUT_SHORT)
    except BaseException:
        arriving_request.release()
        raise
    return arriving_request.built_request


def header_size(header_length: str | None, body_size: int) -> int:
    """Return the size of the JSON part of a body in bytes.

    Args:
        header_length: The value of the header Inference-Header-Content-Length, or None.
        body_size: The size of the body.

    Raises:
        InvalidArgument: The size is not a number in [0, body_size].
    """
    if header_length is None:
        return body_size
    size = _parse_integer(header_length)
    if not 0 <= size <= body_size:
        text = f"inference header size should be in range (0, {body_size}), got: {header_length}"
        raise InvalidArgument(text)
    return size


@lru_cache(maxsize=256)
def _parse_integer(text: str) -> int:
    if _INTEGER.fullmatch(text) is None:
        raise InvalidArgument(f"Unable to parse Inference-Header-Content-Length, got: {text}")
    if len(text) > 11 or not -(2**31) <= int(text) < 2**31:
        raise InvalidArgument(
            "Unable to parse Inference-Header-Content-Length, value is out of range "
            f"[ -2147483648, 2147483647 ], got: {text}"
        )
    return int(text)


async def _parse_header(
    header: bytes, tail_size: int, model: GatewayModel, limit: int
) -> InferRequest:
    if len(header) > limit:
        raise InvalidArgument(JSON_TOO_LARGE.format(size=len(header), limit=limit))
    is_large = len(header) >= LARGE_BYTES
    value = loads_large(header) if is_large else loads(header)
    infer_request = parse_request(value, tail_size, model.name, limit)
    for tensor in infer_request.inputs if is_large else ():
        data = tensor.data
        if isinstance(data, NumberArray):
            tensor.data = await _read_parts(data.parts(), tensor)
        elif type(data) is list and tensor.count:
            tensor.data = await _read_parts(tensors.split_values(data), tensor)
    decode_data(infer_request)
    return infer_request


async def _read_parts(value_lists: Iterator[list[Any]], tensor: InferInput) -> bytes:
    pieces: list[bytes] = []
    for piece in tensors.decode_parts(value_lists, tensor.datatype, tensor.count, tensor.name):
        pieces.append(piece)
        await asyncio.sleep(0)  # other requests are handled between two slices
    return b"".join(pieces)
