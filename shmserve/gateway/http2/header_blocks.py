"""Header blocks (HPACK, RFC 7541): a cached decoder of requests, and literal response blocks.

Clients send the same headers repeatedly, and the encoder writes identical bytes once its dynamic
table contains the fields. Decoded blocks are therefore cached until the table changes.

The cache depends on the undocumented attribute `dynamic_entries` of the package `hpack`. Without
that attribute nothing is cached.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Generic, Protocol, TypeVar

from hpack import Decoder, HPACKError, OversizedHeaderListError

from shmserve.gateway.http2.frames import ConnectionFault, FaultCode, StreamFault


class Head(Protocol):
    """The headers of a request, as converted by its receiver."""

    @property
    def data_size(self) -> int:
        """Return the content-length of the request; -1: none is given."""


T = TypeVar("T", bound=Head)
Read = TypeVar("Read")
Fields = Sequence[tuple[bytes, bytes]]

# hpack's debug messages contain all headers, including secrets.
logging.getLogger("hpack").setLevel(logging.INFO)

_MOST_CACHED = 64
_LONGEST_CACHED = 512
_MOST_DECODED = 4  # a larger list, in multiples of the limit, ends the connection
_FIELD_OVERHEAD = 32  # the size of a field in addition to its name and value (RFC 7541, 4.1)
_SIZE_UPDATE, _SIZE_UPDATE_MASK = 0x20, 0xE0
_LONG_UPDATE = 0x1F  # in the first byte of a table size update: more bytes of the integer follow
_MOST_UPDATES = 2  # maximum number of table size updates per block
_LONGEST_LENGTH = 19  # maximum number of digits of a content-length

_PSEUDO = frozenset((b":method", b":scheme", b":path", b":authority"))
_NEEDED = frozenset((b":method", b":scheme", b":path"))
_OF_CONNECTIONS = frozenset(
    (b"connection", b"keep-alive", b"proxy-connection", b"transfer-encoding", b"upgrade")
)
_is_name = re.compile(rb"[!#$%&'*+\-.^_`|~0-9a-z]+").fullmatch
_BLANKS = b" \t"
_is_broken = re.compile(rb"[\0\r\n]").search


class HeaderDecoder(Generic[Read]):
    """The decoder of a connection's header blocks.

    Args:
        read: Converts the validated fields of a request.
        largest: The size limit of a request's header list.
    """

    def __init__(self, read: Callable[[Fields], Read], largest: int) -> None:
        # A list above the limit is decoded, too, so that only its stream fails. Otherwise the
        # dynamic table would be unknown, and all calls of the connection would fail.
        self._decoder = Decoder(_MOST_DECODED * largest)
        self._read = read
        self._largest = largest
        self._heads: dict[bytes, Read] = {}
        self._caches = hasattr(self._decoder.header_table, "dynamic_entries")

    def request(self, block: bytes) -> Read:
        """Return the head of a request.

        Raises:
            StreamFault: The fields are malformed or too large.
            ConnectionFault: The block cannot be decoded.
        """
        cached = self._heads.get(block)
        if cached is not None:
            return cached
        fields, is_cacheable = self._decode(block)
        if sum(len(name) + len(value) + _FIELD_OVERHEAD for name, value in fields) > self._largest:
            raise StreamFault(FaultCode.ENHANCE_YOUR_CALM)
        found = self._read(request_fields(fields))
        if is_cacheable and len(block) <= _LONGEST_CACHED:
            if len(self._heads) >= _MOST_CACHED:
                self._heads.clear()
            self._heads[block] = found
        return found

    def trailers(self, block: bytes) -> None:
        """Decode and validate the trailers of a request.

        Raises:
            StreamFault: The fields are malformed.
            ConnectionFault: The block cannot be decoded.
        """
        check_trailers(self._decode(block)[0])

    def skip(self, block: bytes) -> None:
        """Decode a block only to update the dynamic table; raise ConnectionFault."""
        self._decode(block)

    def _decode(self, block: bytes) -> tuple[Fields, bool]:
        """Return the fields of a block, and whether an identical block will decode identically.

        Raises:
            ConnectionFault: The block cannot be decoded, nor any later block.
        """
        table = self._decoder.header_table
        entries: Sequence[object] = table.dynamic_entries if self._caches else ()
        count, newest = len(entries), entries[0] if entries else None
        is_update = bool(block) and block[0] & _SIZE_UPDATE_MASK == _SIZE_UPDATE
        if is_update:
            _check_updates(block)
        try:
            fields: Fields = list(self._decoder.decode(block, raw=True))
        except OversizedHeaderListError:
            raise ConnectionFault(FaultCode.ENHANCE_YOUR_CALM, "header list too large") from None
        except HPACKError:
            raise ConnectionFault(FaultCode.COMPRESSION_ERROR, "a malformed header block") from None
        if is_update or len(entries) != count or (entries[0] if entries else None) is not newest:
            self._heads.clear()
            return fields, False
        return fields, self._caches


def _check_updates(block: bytes) -> None:
    """Raise ConnectionFault for more table size updates than RFC 7541, 4.2 permits.

    The limits on header lists do not count these updates.
    """
    at = count = 0
    while at < len(block) and block[at] & _SIZE_UPDATE_MASK == _SIZE_UPDATE:
        count += 1
        if count > _MOST_UPDATES:
            raise ConnectionFault(FaultCode.COMPRESSION_ERROR, "a malformed header block")
        is_continued = block[at] & ~_SIZE_UPDATE_MASK == _LONG_UPDATE
        at += 1
        while is_continued and at < len(block):
            is_continued = block[at] >= 128
            at += 1


def request_fields(fields: Fields) -> Fields:
    """Return the validated fields of a request.

    White space around values is removed, as in gRPC's core and HTTP/1.1. Fields of HTTP/1.1
    connections, which some programs forward as metadata, are removed: they have no effect in
    HTTP/2.

    Raises:
        StreamFault: The head is malformed (RFC 9113, 8.2 and 8.3).
    """
    pseudo: set[bytes] = set()
    checked: list[tuple[bytes, bytes]] = []
    for at, (name, value) in enumerate(fields):
        if name[:1] == b":":
            if name not in _PSEUDO or name in pseudo or len(pseudo) != at:
                raise StreamFault(FaultCode.PROTOCOL_ERROR)
            pseudo.add(name)
            if _is_broken(value) or not (value or name == b":authority"):
                raise StreamFault(FaultCode.PROTOCOL_ERROR)
            if value.strip(_BLANKS) != value:
                raise StreamFault(FaultCode.PROTOCOL_ERROR)
            checked.append((name, value))
        else:
            field = _field(name, value)
            if name not in _OF_CONNECTIONS:
                checked.append(field)
    if not pseudo >= _NEEDED:
        raise StreamFault(FaultCode.PROTOCOL_ERROR)
    return checked


def check_trailers(fields: Fields) -> None:
    """Raise StreamFault for malformed trailers."""
    for name, value in fields:
        _field(name, value)


def _field(name: bytes, value: bytes) -> tuple[bytes, bytes]:
    if not _is_name(name) or _is_broken(value):
        raise StreamFault(FaultCode.PROTOCOL_ERROR)
    value = value.strip(_BLANKS)
    if name == b"te" and value.lower() != b"trailers":
        raise StreamFault(FaultCode.PROTOCOL_ERROR)
    return name, value


def content_length(fields: Fields) -> int:
    """Return the content-length of a request, -1 if none; raise StreamFault if it is invalid."""
    lengths = {value for name, value in fields if name == b"content-length"}
    if not lengths:
        return -1
    digits = lengths.pop()
    if lengths or not digits.isdigit() or len(digits) > _LONGEST_LENGTH:
        raise StreamFault(FaultCode.PROTOCOL_ERROR)
    return int(digits)


def encode(fields: Iterable[tuple[bytes, bytes]]) -> bytes:
    """Return a block of literal fields that are not indexed, so it is the same for every client."""
    return b"".join(
        b"\0%b%b%b%b" % (_integer(len(name)), name, _integer(len(value)), value)
        for name, value in fields
    )


STATUS_200 = b"\x88"  # the index of ":status: 200" in the static table


def _integer(value: int) -> bytes:
    """Encode an integer with a prefix of seven bits (RFC 7541, 5.1)."""
    if value < 127:
        return bytes((value,))
    remaining = value - 127
    parts = bytearray((127,))
    while remaining >= 128:
        parts.append(remaining & 127 | 128)
        remaining >>= 7
    parts.append(remaining)
    return bytes(parts)
