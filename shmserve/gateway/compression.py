"""Incremental gzip and deflate without I/O, with a limit against decompression bombs.

The encodings have Triton's names: "gzip" and "deflate" (zlib). The content identifies its format.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator

from shmserve.errors import InvalidArgument, Unsupported

_PIECE_BYTES = 256 * 1024  # bytes that are compressed or decompressed at a time
_GZIP_OR_ZLIB = zlib.MAX_WBITS | 32  # this mode makes zlib accept both gzip and zlib data
_MIN_MEMBER_BYTES = 1024  # the assumed minimum size of a gzip member limits the number of members
_FREE_MEMBERS = 16  # number of members permitted regardless of the size
_FAILURE = "failed to decompress the request body"  # the start of messages
WBITS_BY_ENCODING = {"gzip": zlib.MAX_WBITS | 16, "deflate": zlib.MAX_WBITS}
_ENCODING_ALIASES = {"x-gzip": "gzip"}


class BodyTooLarge(InvalidArgument):
    """The error for a body that is larger than the limit."""


class UnsupportedEncoding(Unsupported):
    """The error for a Content-Encoding that is not supported."""


def check_encoding(name: str) -> bool:
    """Return whether a body with this Content-Encoding is compressed.

    Raises:
        UnsupportedEncoding: The encoding is neither gzip, deflate nor identity.
    """
    encoding = _normalize(name)
    if encoding not in ("identity", *WBITS_BY_ENCODING):
        raise UnsupportedEncoding("Unsupported compression type")
    return encoding != "identity"


def _normalize(name: str) -> str:
    lower_name = name.strip().lower()
    return _ENCODING_ALIASES.get(lower_name, lower_name)


class Inflater:
    """An incremental decompressor of a body, with an output of at most `limit` bytes.

    The compressed input is limited, too, since some input produces no output. Compressed data may
    have several members (RFC 1952). Their number is limited, because each member restarts the
    decompressor.
    """

    def __init__(self, limit: int) -> None:  # of decompressed bytes
        self._limit = limit  # the maximum number of decompressed bytes
        self._input_bytes = 0
        self._member_count = 1
        self._decompressor = zlib.decompressobj(_GZIP_OR_ZLIB)
        self._output_bytes = 0

    def feed(self, chunk: bytes) -> Iterator[bytes]:
        """Yield the decompressed bytes of `chunk`, in pieces of at most 256 KiB.

        Raises:
            InvalidArgument: The data is not compressed, or exceeds `limit` bytes.
        """
        has_input = bool(chunk)
        self._input_bytes += len(chunk)
        if self._input_bytes > self._limit + self._limit // 64 + _PIECE_BYTES:
            text = f"{self._input_bytes} compressed bytes, too many for the limit of {self._limit}"
            raise InvalidArgument(f"{_FAILURE}: it has {text} decompressed bytes")
        while has_input:
            if self._decompressor.eof:
                self._member_count += 1
                if self._member_count > self._input_bytes // _MIN_MEMBER_BYTES + _FREE_MEMBERS:
                    text = f"{self._member_count} gzip members in {self._input_bytes} bytes"
                    raise InvalidArgument(f"{_FAILURE}: it has {text}; compress it as one member")
                # The next member of the compressed data begins.
                self._decompressor = zlib.decompressobj(_GZIP_OR_ZLIB)
            try:
                piece = self._decompressor.decompress(chunk, _PIECE_BYTES)
            except zlib.error:
                raise InvalidArgument(f"{_FAILURE}: it is not gzip or zlib data") from None
            self._output_bytes += len(piece)
            if self._output_bytes > self._limit:
                raise BodyTooLarge(
                    f"Decompressed data size exceeds the maximum allowed value of {self._limit} "
                    "bytes. "
                    "Use --http-max-input-size to increase the limit."
                )
            yield piece
            member_ended = self._decompressor.eof
            chunk = self._decompressor.unused_data or self._decompressor.unconsumed_tail
            # If the piece is full, the decompressor may have more output.
            has_input = bool(chunk) or (not member_ended and len(piece) == _PIECE_BYTES)

    def finish(self) -> None:
        """Check at the end of the body that the compressed data is complete.

        Raises:
            InvalidArgument: The data is empty or incomplete.
        """
        if not self._input_bytes:
            raise InvalidArgument("nothing to be decompressed")
        if not self._decompressor.eof:
            raise InvalidArgument(f"{_FAILURE}: it is truncated")


def compress_pieces(pieces: Iterable[bytes | memoryview], encoding: str) -> Iterator[bytes]:
    """Yield `pieces` compressed as "gzip" or "deflate"."""
    compressor = zlib.compressobj(wbits=WBITS_BY_ENCODING[encoding])
    for piece in pieces:
        for offset in range(0, len(piece), _PIECE_BYTES):
            yield compressor.compress(piece[offset : offset + _PIECE_BYTES])
    yield compressor.flush()


def preferred_encoding(header: str) -> str:
    """Return the encoding with the highest weight in an Accept-Encoding header.

    The result is "gzip", "deflate" or "identity". If weights are equal, the first encoding is
    returned.
    """
    best_encoding, best_weight = "identity", 0.0
    for item in header.split(","):
        name, _, parameter = item.partition(";")
        name = _normalize(name)
        weight = 1.0
        if parameter:
            key, _, value = parameter.partition(";")[0].partition("=")
            try:
                weight = float(value) if key.strip().lower() == "q" else 0.0
            except ValueError:
                weight = 0.0
        if name in ("identity", *WBITS_BY_ENCODING) and weight > best_weight:
            best_encoding, best_weight = name, weight
    return best_encoding
