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
    """The interface of a request's converted headers."""

    @property
    def data_size(self) -> int:
        """Return the content-length of the request, or -1 if the request has none."""


HeadT = TypeVar("HeadT", bound=Head)
ConvertedHead = TypeVar("ConvertedHead")
Fields = Sequence[tuple[bytes, bytes]]

# hpack's debug messages contain all headers, including secrets.
logging.getLogger("hpack").setLevel(logging.INFO)

_MAX_CACHED_BLOCKS = 64
_MAX_CACHED_BLOCK_BYTES = 512  # larger header blocks are not cached
# A header list above this multiple of its size limit ends the connection, not only its stream.
_MAX_DECODED_FACTOR = 4
_FIELD_OVERHEAD = 32  # the size of a field in addition to its name and value (RFC 7541, 4.1)
_SIZE_UPDATE, _SIZE_UPDATE_MASK = 0x20, 0xE0
_LONG_UPDATE = 0x1F  # in the first byte of a table size update: more bytes of the integer follow
_MAX_UPDATES = 2  # maximum number of table size updates per block
_MAX_LENGTH_DIGITS = 19  # maximum number of digits of a content-length

_PSEUDO_FIELDS = frozenset((b":method", b":scheme", b":path", b":authority"))
_REQUIRED_PSEUDO_FIELDS = frozenset((b":method", b":scheme", b":path"))
_CONNECTION_FIELDS = frozenset(
    (b"connection", b"keep-alive", b"proxy-connection", b"transfer-encoding", b"upgrade")
)
_is_valid_name = re.compile(rb"[!#$%&'*+\-.^_`|~0-9a-z]+").fullmatch
_WHITE_SPACE = b" \t"
_has_forbidden_byte = re.compile(rb"[\0\r\n]").search


class HeaderDecoder(Generic[ConvertedHead]):
    """The decoder of a connection's header blocks.

    Args:
        convert: Converts the validated fields of a request.
        max_list_size: The size limit of a request's header list.
    """

    def __init__(self, convert: Callable[[Fields], ConvertedHead], max_list_size: int) -> None:
        # A list above the limit is decoded, too, so that only its stream fails. Without decoding
        # it, the dynamic table would be unknown, and all calls of the connection would fail.
        self._decoder = Decoder(_MAX_DECODED_FACTOR * max_list_size)
        self._convert = convert
        self._max_list_size = max_list_size
        self._heads: dict[bytes, ConvertedHead] = {}  # by encoded header block
        self._can_cache = hasattr(self._decoder.header_table, "dynamic_entries")

    def decode_request(self, block: bytes) -> ConvertedHead:
        """Return the head of a request.

        Raises:
            StreamFault: The fields are malformed or too large.
            ConnectionFault: The block cannot be decoded.
        """
        cached_head = self._heads.get(block)
        if cached_head is not None:
            return cached_head
        fields, is_cacheable = self._decode(block)
        list_size = sum(len(name) + len(value) + _FIELD_OVERHEAD for name, value in fields)
        if list_size > self._max_list_size:
            raise StreamFault(FaultCode.ENHANCE_YOUR_CALM)
        head = self._convert(validate_request(fields))
        if is_cacheable and len(block) <= _MAX_CACHED_BLOCK_BYTES:
            if len(self._heads) >= _MAX_CACHED_BLOCKS:
                self._heads.clear()
            self._heads[block] = head
        return head

    def decode_trailers(self, block: bytes) -> None:
        """Decode and validate the trailers of a request.

        Raises:
            StreamFault: The fields are malformed.
            ConnectionFault: The block cannot be decoded.
        """
        check_trailers(self._decode(block)[0])

    def skip_block(self, block: bytes) -> None:
        """Decode a block only to update the dynamic table; raise ConnectionFault if that fails."""
        self._decode(block)

    def _decode(self, block: bytes) -> tuple[Fields, bool]:
        """Return the fields of a block, and whether they may be cached for identical blocks.

        Raises:
            ConnectionFault: The block cannot be decoded, nor any later block.
        """
        table = self._decoder.header_table
        entries: Sequence[object] = table.dynamic_entries if self._can_cache else ()
        count, newest = len(entries), entries[0] if entries else None
        is_update = bool(block) and block[0] & _SIZE_UPDATE_MASK == _SIZE_UPDATE
        if is_update:
            _check_updates(block)
        try:
            fields: Fields = list(self._decoder.decode(block, raw=True))
        except OversizedHeaderListError:
            text = f"header list of more than {self._decoder.max_header_list_size} bytes"
            raise ConnectionFault(FaultCode.ENHANCE_YOUR_CALM, text) from None
        except HPACKError:
            raise ConnectionFault(FaultCode.COMPRESSION_ERROR, "a malformed header block") from None
        if is_update or len(entries) != count or (entries[0] if entries else None) is not newest:
            self._heads.clear()
            return fields, False
        return fields, self._can_cache


def _check_updates(block: bytes) -> None:
    """Raise ConnectionFault for more table size updates than RFC 7541, 4.2 permits.

    The limits on header lists do not count these updates.
    """
    position = update_count = 0
    while position < len(block) and block[position] & _SIZE_UPDATE_MASK == _SIZE_UPDATE:
        update_count += 1
        if update_count > _MAX_UPDATES:
            text = f"more than {_MAX_UPDATES} table size updates in a header block"
            raise ConnectionFault(FaultCode.COMPRESSION_ERROR, text)
        has_more_bytes = block[position] & ~_SIZE_UPDATE_MASK == _LONG_UPDATE
        position += 1
        while has_more_bytes and position < len(block):
            has_more_bytes = block[position] >= 128
            position += 1


def validate_request(fields: Fields) -> Fields:
    """Return the validated fields of a request.

    White space around values is removed, as in gRPC's core and HTTP/1.1. Fields of HTTP/1.1
    connections, which some programs forward as metadata, are removed: they have no effect in
    HTTP/2.

    Raises:
        StreamFault: The head is malformed (RFC 9113, 8.2 and 8.3).
    """
    pseudo_names: set[bytes] = set()
    validated_fields: list[tuple[bytes, bytes]] = []
    for index, (name, value) in enumerate(fields):
        if name[:1] == b":":
            if name not in _PSEUDO_FIELDS or name in pseudo_names or len(pseudo_names) != index:
                raise StreamFault(FaultCode.PROTOCOL_ERROR)
            pseudo_names.add(name)
            if _has_forbidden_byte(value) or not (value or name == b":authority"):
                raise StreamFault(FaultCode.PROTOCOL_ERROR)
            if value.strip(_WHITE_SPACE) != value:
                raise StreamFault(FaultCode.PROTOCOL_ERROR)
            validated_fields.append((name, value))
        else:
            field = _validate_field(name, value)
            if name not in _CONNECTION_FIELDS:
                validated_fields.append(field)
    if not pseudo_names >= _REQUIRED_PSEUDO_FIELDS:
        raise StreamFault(FaultCode.PROTOCOL_ERROR)
    return validated_fields


def check_trailers(fields: Fields) -> None:
    """Raise StreamFault for malformed trailers."""
    for name, value in fields:
        _validate_field(name, value)


def _validate_field(name: bytes, value: bytes) -> tuple[bytes, bytes]:
    if not _is_valid_name(name) or _has_forbidden_byte(value):
        raise StreamFault(FaultCode.PROTOCOL_ERROR)
    value = value.strip(_WHITE_SPACE)
    if name == b"te" and value.lower() != b"trailers":
        raise StreamFault(FaultCode.PROTOCOL_ERROR)
    return name, value


def parse_content_length(fields: Fields) -> int:
    """Return the content-length of a request, -1 if none; raise StreamFault if it is invalid."""
    lengths = {value for name, value in fields if name == b"content-length"}
    if not lengths:
        return -1
    digits = lengths.pop()
    if lengths or not digits.isdigit() or len(digits) > _MAX_LENGTH_DIGITS:
        raise StreamFault(FaultCode.PROTOCOL_ERROR)
    return int(digits)


def encode_block(fields: Iterable[tuple[bytes, bytes]]) -> bytes:
    """Return a block of literal fields. Without indexing, it is the same for every client."""
    return b"".join(
        b"\0%b%b%b%b" % (_encode_integer(len(name)), name, _encode_integer(len(value)), value)
        for name, value in fields
    )


STATUS_200 = b"\x88"  # the index of ":status: 200" in the static table


def _encode_integer(value: int) -> bytes:
    """Encode an integer with a prefix of seven bits (RFC 7541, 5.1)."""
    if value < 127:
        return bytes((value,))
    remainder = value - 127
    encoded_integer = bytearray((127,))
    while remainder >= 128:
        encoded_integer.append(remainder & 127 | 128)
        remainder >>= 7
    encoded_integer.append(remainder)
    return bytes(encoded_integer)
