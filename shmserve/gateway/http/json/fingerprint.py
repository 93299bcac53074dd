"""The fingerprints of HTTP requests, and the cache of request templates by fingerprint.

The fingerprint of a request is its JSON text without the values of its tensors, its id and its
position in a sequence. Clients often send the same request with different values. Requests with
binary tensors have the same JSON header each time. In a JSON request the arrays are cut out:

    {"inputs": [{"name": "X", ..., "data": [1, 2]}]}  ->  {"inputs": [{"name": "X", ..., |}]}  1, 2

The cut text is an array in every JSON text, and never part of a string, since quotes in strings are
escaped. Texts with equal remainders therefore differ only in these arrays.

The id is cut out if it is the first member, and the sequence parameters at any index. A template is
stored only if the cut parts equal those of the parsed request.
"""

from __future__ import annotations

import re
import secrets
import struct
from collections.abc import Callable, Sequence
from typing import NamedTuple

import orjson

from shmserve.gateway.http.json.tensors import create_packer
from shmserve.gateway.inference.infer_request import InferRequest, RequestIdentity
from shmserve.gateway.inference.prepare import BuiltRequest, RequestTemplate
from shmserve.ipc.tensors.descriptors import MAX_UINT64
from shmserve.ipc.tensors.schemas import (
    LONGEST_CORRELATION_ID,
    SEQUENCE_END,
    SEQUENCE_START,
    BoundedCache,
)

_ID_PATTERN = re.compile(rb'\{"id": ?"([ !#-\[\]-~]*)"')
_SEQUENCE_PATTERN = re.compile(
    rb'"sequence_id": ?([1-9][0-9]{0,19}|"[ !#-\[\]-~]{1,%d}"), ?'
    rb'"sequence_start": ?(true|false), ?"sequence_end": ?(true|false)' % LONGEST_CORRELATION_ID
)
_ID_START = b'{"id"'
_ID_PLACEHOLDER = b'{"id":0'
_SEQUENCE_PLACEHOLDER = b'"sequence_id":0'
_NUMBER_ARRAY = re.compile(rb'"data": ?\[([-+.0-9eE, \t\r\n]*+)\]')
MAX_CUT_TEXT_BYTES = 64 * 1024  # nothing is cut out of a larger header
_MAX_KEY_BYTES = 2048  # templates with a longer key are not cached

# The kept text of a header, and the size of the binary data (`Fingerprint.key`).
Key = tuple[bytes, int]


class Fingerprint:
    """The fingerprint of a request, and the parts cut out of its text.

    Attributes:
        key: The remaining text, and the size of the binary data.
        arrays: The texts of the arrays of numbers, if the request has no binary data.
        identity: The id and the position in a sequence, or None if nothing was cut out.
    """

    __slots__ = ("arrays", "identity", "key")

    def __init__(self, header: bytes, tail_size: int) -> None:
        """Create the fingerprint of a JSON header.

        Args:
            header: The text of the header.
            tail_size: The size of the binary data after the header, in bytes.
        """
        self.arrays: Sequence[bytes] = ()  # the texts of the arrays that were cut out
        self.identity: RequestIdentity | None = None
        if header[:5] == _ID_START or b'"sequence_id"' in header:
            header, self.identity = cut_identity(header)
        if not tail_size and b'"data":' in header and len(header) <= MAX_CUT_TEXT_BYTES:
            parts = _NUMBER_ARRAY.split(header)
            self.arrays = parts[1::2]
            header = b"\0".join(parts[::2])
        # `~tail_size` marks a header without its identity. An equal header, from which nothing was
        # cut, has another key.
        self.key: Key = (header, tail_size if self.identity is None else ~tail_size)


def cut_identity(header: bytes) -> tuple[bytes, RequestIdentity | None]:
    """Cut the id and the position in a sequence out of a header.

    Returns:
        The remaining header and the cut parts; the header itself and None if it has neither, or
        not in the usual notation.
    """
    if len(header) > MAX_CUT_TEXT_BYTES:
        return header, None
    request_id = ""
    correlation_id: int | str = 0
    flags = position = 0
    kept_parts: list[bytes] = []
    if header[:5] == _ID_START and (id_match := _ID_PATTERN.match(header)) is not None:
        request_id = id_match[1].decode()
        kept_parts.append(_ID_PLACEHOLDER)
        position = id_match.end()
    if b'"sequence_id"' in header:
        sequence_match = _SEQUENCE_PATTERN.search(header, position)
        if sequence_match is None or header.count(b'"sequence_') != 3:
            return header, None
        sequence_id, start, end = sequence_match.groups()
        correlation_id = sequence_id[1:-1].decode() if sequence_id[:1] == b'"' else int(sequence_id)
        if isinstance(correlation_id, int) and correlation_id > MAX_UINT64:
            return header, None
        flags = SEQUENCE_START * (start == b"true") | SEQUENCE_END * (end == b"true")
        kept_parts += (header[position : sequence_match.start()], _SEQUENCE_PLACEHOLDER)
        position = sequence_match.end()
    if not kept_parts:
        return header, None
    kept_parts.append(header[position:])
    return b"".join(kept_parts), RequestIdentity(request_id, correlation_id, flags)


class CachedTemplate(NamedTuple):
    """A cached template for the requests with one fingerprint.

    Attributes:
        template: The template, which needs only the tensors of a request.
        packers: The functions that convert the numbers of each array to the bytes of its tensor.
        array_format: A format string, which joins the texts of the arrays to one JSON array.
    """

    template: RequestTemplate
    packers: list[Callable[..., bytes]]  # one for each array
    array_format: bytes  # a JSON array with %b for the text of each array


Cache = BoundedCache[Key, CachedTemplate]


def fill_known_template(
    cache: Cache, fingerprint: Fingerprint, body: bytes, offset: int
) -> BuiltRequest | None:
    """Fill the cached template of a fingerprint with the tensors of a request.

    Args:
        cache: The cached templates of a model.
        fingerprint: The fingerprint of the request.
        body: The body of the request.
        offset: The offset of the binary tensors in the body.

    Returns:
        The request; None if the fingerprint is unknown, or if the numbers are invalid. The parser
        then reports the fault.

    Raises:
        AlreadyExists: The range of an output is in use, and `shm_overlap` is "error".
        Unavailable: The arena is full.
    """
    cached_template = cache.find(fingerprint.key)
    if cached_template is None:
        return None
    template, packers, array_format = cached_template
    if packers:
        try:
            values = orjson.loads(array_format % tuple(fingerprint.arrays))
            tensors = [pack(*elements) for pack, elements in zip(packers, values, strict=True)]
        except (ValueError, TypeError, struct.error, OverflowError):
            return None
        built_request = template.fill(tensors)
    else:
        built_request = template.fill_from(body, offset)
    if built_request is not None and fingerprint.identity is not None:
        built_request.identify(fingerprint.identity)
    return built_request


def is_worth_caching(cache: Cache, fingerprint: Fingerprint) -> bool:
    """Return whether a fingerprint has occurred before, and is short enough for the cache."""
    return len(fingerprint.key[0]) <= _MAX_KEY_BYTES and cache.mark_seen(fingerprint.key)


def store_template(
    cache: Cache, fingerprint: Fingerprint, request: InferRequest, template: RequestTemplate
) -> None:
    """Store the template of a parsed request in the cache.

    The template is not stored if the parts cut out of the text are not the request's id, position
    in a sequence and input arrays.
    """
    identity, array_count = fingerprint.identity, len(fingerprint.arrays)
    if identity is not None and not identity.is_identity_of(request):
        return
    inputs = [tensor for tensor in request.inputs if tensor.data is not None]
    packers = [create_packer(tensor.datatype, tensor.count) for tensor in inputs]
    array_format = b"[%b]" % b",".join([b"[%b]"] * array_count)
    available_packers = [pack for pack in packers if pack is not None]
    are_input_arrays = not array_count or _are_input_arrays(fingerprint.key[0], array_count)
    if len(available_packers) == len(inputs) == array_count and are_input_arrays:
        for tensor in inputs:
            tensor.data = None  # cleared, because later requests have other values
        cache.store(fingerprint.key, CachedTemplate(template, available_packers, array_format))


def _are_input_arrays(kept_parts: bytes, array_count: int) -> bool:
    """Return whether the arrays that were cut out are the data of the inputs, in their order."""
    random_text = secrets.token_hex(16)  # random, so that no string in the request equals it
    placeholders = [f"{random_text}{number}" for number in range(array_count)]
    document = kept_parts
    for mark in placeholders:
        document = document.replace(b"\0", b'"data":["%b"]' % mark.encode(), 1)
    try:
        header = orjson.loads(document)
    except orjson.JSONDecodeError:
        return False  # orjson rejects some texts that the parser of requests accepts
    input_arrays = [tensor["data"] for tensor in header["inputs"] if "data" in tensor]
    return input_arrays == [[mark] for mark in placeholders]
