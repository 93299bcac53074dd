"""The layout of HTTP/2 frames (RFC 9113, 4 and 6): types, flags, error codes, settings."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from enum import IntEnum

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"

# Frame types.
DATA, HEADERS, PRIORITY, RST_STREAM, SETTINGS, PUSH_PROMISE = range(6)
PING, GOAWAY, WINDOW_UPDATE, CONTINUATION = range(6, 10)

# Flags.
END_STREAM = ACK = 0x1
END_HEADERS = 0x4
PADDED = 0x8
HAS_PRIORITY = 0x20

FRAME_HEADER_SIZE = 9
# A frame header: the upper two bytes of the length, the lowest one, type, flags, stream.
FRAME_HEADER = struct.Struct(">HBBBI")
STREAM_BITS = 0x7FFFFFFF  # the bits of a stream id, or of a window increment
LARGEST_WINDOW = 2**31 - 1
DEFAULT_WINDOW = 65535
DEFAULT_MAX_FRAME_SIZE = 16384

# Identifiers of settings.
ENABLE_PUSH, MAX_CONCURRENT_STREAMS = 2, 3
INITIAL_WINDOW_SIZE, MAX_FRAME_SIZE, MAX_HEADER_LIST_SIZE = 4, 5, 6
_SETTING_FORMAT = struct.Struct(">HI")
_UINT32_FORMAT = struct.Struct(">I")


class FaultCode(IntEnum):
    """An error code of a stream or a connection (RFC 9113, 7)."""

    NO_ERROR = 0x0
    PROTOCOL_ERROR = 0x1
    INTERNAL_ERROR = 0x2
    FLOW_CONTROL_ERROR = 0x3
    SETTINGS_TIMEOUT = 0x4
    STREAM_CLOSED = 0x5
    FRAME_SIZE_ERROR = 0x6
    REFUSED_STREAM = 0x7
    CANCEL = 0x8
    COMPRESSION_ERROR = 0x9
    ENHANCE_YOUR_CALM = 0xB


# The name, the smallest and largest value, and the error code of other values, for each setting.
_SETTING_RANGES = {
    ENABLE_PUSH: ("ENABLE_PUSH", 0, 1, FaultCode.PROTOCOL_ERROR),
    INITIAL_WINDOW_SIZE: ("INITIAL_WINDOW_SIZE", 0, LARGEST_WINDOW, FaultCode.FLOW_CONTROL_ERROR),
    MAX_FRAME_SIZE: ("MAX_FRAME_SIZE", 2**14, 2**24 - 1, FaultCode.PROTOCOL_ERROR),
}


class ConnectionFault(Exception):
    """A protocol violation that ends the connection with this code."""

    def __init__(self, code: FaultCode, reason: str) -> None:
        super().__init__(reason)
        self.code = code
        self.reason = reason


def length_fault(frame_name: str, size: int, expected_size: str) -> ConnectionFault:
    """Return the error about a frame whose payload of `size` bytes has a forbidden length."""
    text = f"{frame_name} with a payload of {size} bytes, expected {expected_size}"
    return ConnectionFault(FaultCode.FRAME_SIZE_ERROR, text)


class StreamFault(Exception):
    """A protocol violation that ends one stream with this code."""

    def __init__(self, code: FaultCode) -> None:
        super().__init__(code.name)
        self.code = code


def encode_frame_header(size: int, frame_type: int, flags: int, stream_id: int) -> bytes:
    """Return the header of a frame whose payload has `size` bytes."""
    return FRAME_HEADER.pack(size >> 8, size & 0xFF, frame_type, flags, stream_id)


def encode_frame(frame_type: int, flags: int, stream_id: int, payload: bytes = b"") -> bytes:
    """Return the bytes of a frame with this payload."""
    return encode_frame_header(len(payload), frame_type, flags, stream_id) + payload


pack_uint32 = _UINT32_FORMAT.pack  # packs a 32-bit integer: a window, an error code or a stream id


def encode_goaway(last_stream_id: int, code: FaultCode, reason: str = "") -> bytes:
    """Return a GOAWAY frame; streams above `last_stream_id` are not processed."""
    payload = pack_uint32(last_stream_id) + pack_uint32(code) + reason.encode()
    return encode_frame(GOAWAY, 0, 0, payload)


def encode_settings(values: dict[int, int]) -> bytes:
    """Return the bytes of a SETTINGS frame with these values by identifier."""
    payload = b"".join(_SETTING_FORMAT.pack(*item) for item in values.items())
    return encode_frame(SETTINGS, 0, 0, payload)


def parse_settings(payload: bytes) -> Iterator[tuple[int, int]]:
    """Yield the identifier and the value of each setting in a SETTINGS frame.

    Raises:
        ConnectionFault: The size of the payload is wrong, or a value is out of range.
    """
    if len(payload) % _SETTING_FORMAT.size:
        raise length_fault("SETTINGS", len(payload), f"a multiple of {_SETTING_FORMAT.size}")
    for key, value in _SETTING_FORMAT.iter_unpack(payload):
        if key in _SETTING_RANGES:
            name, minimum, maximum, code = _SETTING_RANGES[key]
            if not minimum <= value <= maximum:
                text = f"SETTINGS_{name} out of range: {value} (allowed: {minimum} to {maximum})"
                raise ConnectionFault(code, text)
        yield key, value


def parse_uint32(payload: bytes, frame_name: str) -> int:
    """Return the integer that is a frame's payload; raise ConnectionFault for another size."""
    if len(payload) != _UINT32_FORMAT.size:
        raise length_fault(frame_name, len(payload), str(_UINT32_FORMAT.size))
    return int.from_bytes(payload, "big")
