"""The body of an inference request: read whole, or streamed into place without a copy.

Small bodies are here when the handler starts. A large binary body goes from the socket straight
into one arena block, after its header was checked.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import Iterator
from functools import lru_cache
from typing import Any

from shmserve.errors import InvalidArgument, ShmserveError
from shmserve.gateway.client_identity import ClientIdentity
from shmserve.gateway.context import Gateway
from shmserve.gateway.http.body.reader import JSON_TOO_LARGE, Body
from shmserve.gateway.http.json import tensors
from shmserve.gateway.http.json.fingerprint import (
    identity,
    remember,
    repeat,
    split,
    worth_preparing,
)
from shmserve.gateway.http.json.infer_request import TOO_LARGE, decode_data, parse_request
from shmserve.gateway.http.json.large_arrays import LARGE, Numbers, loads_large
from shmserve.gateway.http.json.parser import loads
from shmserve.gateway.http.request import CONTENT_ENCODING, HEADER_LENGTH, HttpRequest, WholeBody
from shmserve.gateway.inference.builder import (
    Resources,
    build,
    check_request,
    raw_request,
    resources_of,
    tensor_ref,
)
from shmserve.gateway.inference.prepared import BuiltRequest
from shmserve.gateway.inference.request import InferInput, InferRequest, forwarded_headers
from shmserve.gateway.model_table import GatewayModel
from shmserve.gateway.region_table import authorise
from shmserve.ipc.tensors.inference import INLINE_LIMIT

_BODY_TOO_LARGE = (
    "request body of {size} bytes does not fit the {limit} bytes of server memory for tensors "
    "(--arena-byte-size)"
)
_RAW_TOO_LARGE = "Raw input" + TOO_LARGE
_CUT_SHORT = "the request body ended early"
_NUMBER = re.compile(r"-?[0-9]+")
_NOTHING: dict[str, str] = {}


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
    kept, itself = identity(header)
    key, arrays = split(kept, tail_size)
    if itself is not None:
        key = key[0], ~key[1]  # that of no header as it came
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
    built, _ = check_request(model, infer_request, tensors, resources)
    views: list[memoryview] = []
    for tensor, place in zip(infer_request.inputs, places, strict=True):
        if tensor.data is not None:
            resources.view(place)[:] = tensor.data
        elif tensor.binary_size > 0:
            views.append(resources.view(place))
    return built, views
