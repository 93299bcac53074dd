"""Content coding: gzip and deflate, incremental, with a limit against decompression bombs (pure).

The names are Triton's: "gzip" and "deflate" (zlib). Both formats are recognised by their content.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator

from shmserve.errors import InvalidArgument, Unsupported

_STEP = 256 * 1024
_AUTO = zlib.MAX_WBITS | 32  # a mode in which zlib recognises gzip or zlib data
_SMALLEST_MEMBER = 1024  # assumed minimum size of a gzip member, which limits their number
_FEW = 16
_NO_USE = "failed to decompress the request body: it is mostly overhead"
WBITS = {"gzip": zlib.MAX_WBITS | 16, "deflate": zlib.MAX_WBITS}


class BodyTooLarge(InvalidArgument):
    """An error about a body that exceeds the limit of its size."""


class UnsupportedEncoding(Unsupported):
    """The error about a Content-Encoding that is not supported; it lists the supported ones."""


def check_encoding(name: str) -> bool:
    """Return whether a body with this Content-Encoding is compressed; raise UnsupportedEncoding."""
    lower = name.strip().lower()
    if lower not in ("identity", *WBITS):
        raise UnsupportedEncoding("Unsupported compression type")
    return lower != "identity"


class Inflater:
    """A decompressor of a chunked body, with an output of at most `limit` bytes.

    The input is limited, too, since it may produce no output. The number of members is limited
    because each member restarts the decompressor.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._received = 0
        self._members = 1
        self._stream = zlib.decompressobj(_AUTO)
        self._size = 0

    def feed(self, chunk: bytes) -> Iterator[bytes]:
        """Yield the decompressed `chunk`, in pieces of at most 256 KiB.

        Raises:
            InvalidArgument: The data is not compressed, or exceeds `limit` bytes.
        """
        more = bool(chunk)
        self._received += len(chunk)
        if self._received > self._limit + self._limit // 64 + _STEP:
            raise InvalidArgument(_NO_USE)
        while more:
            if self._stream.eof:
                self._members += 1
                if self._members > self._received // _SMALLEST_MEMBER + _FEW:
                    raise InvalidArgument(_NO_USE)
                # The next member of the compressed data begins.
                self._stream = zlib.decompressobj(_AUTO)
            try:
                piece = self._stream.decompress(chunk, _STEP)
            except zlib.error:
                raise InvalidArgument("failed to decompress the request body") from None
            self._size += len(piece)
            if self._size > self._limit:
                raise BodyTooLarge(
                    f"Decompressed data size exceeds the maximum allowed value of {self._limit} "
                    "bytes. "
                    "Use --http-max-input-size to increase the limit."
                )
            yield piece
            ended = self._stream.eof
            chunk = self._stream.unused_data if ended else self._stream.unconsumed_tail
            # After a full piece, the stream may have buffered output.
            more = bool(chunk) or (not ended and len(piece) == _STEP)

    def finish(self) -> None:
        """Check at the end of the body that the compressed data is complete.

        Raises:
            InvalidArgument: The data is empty or incomplete.
        """
        if not self._received:
            raise InvalidArgument("nothing to be decompressed")
        if not self._stream.eof:
            raise InvalidArgument("failed to decompress the request body: it is truncated")


def deflated(pieces: Iterable[bytes | memoryview], encoding: str) -> Iterator[bytes]:
    """Yield `pieces` compressed as "gzip" or "deflate"."""
    stream = zlib.compressobj(wbits=WBITS[encoding])
    for piece in pieces:
        for at in range(0, len(piece), _STEP):
            yield stream.compress(piece[at : at + _STEP])
    yield stream.flush()


def accepted_encoding(header: str) -> str:
    """Return the encoding with the highest weight ("gzip", "deflate" or "identity").

    The first wins ties.
    """
    best, best_weight = "identity", 0.0
    for item in header.split(","):
        name, _, parameter = item.partition(";")
        name = name.strip()
        weight = 1.0
        if parameter:
            key, _, value = parameter.partition(";")[0].partition("=")
            try:
                weight = float(value) if key.strip() == "q" else 0.0
            except ValueError:
                weight = 0.0
        if name in ("identity", *WBITS) and weight > best_weight:
            best, best_weight = name, weight
    return best
