"""The destination of a large ModelInferRequest, whose tensors are received into the arena.

    | fields before the tensors | tag, length | tensor | tag, length | tensor |
      collected, and parsed       collected     arena    collected     arena

A message of another layout is collected as a whole, and parsed as small messages are. Examples are
fields behind the tensors, a long head, and tensors of other sizes than the head describes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

from shmserve.gateway.grpc.wire.fingerprint import EARLIER, MOST_SHIFT, RAW_INPUT
from shmserve.gateway.inference.arriving import ArrivingTensors

_LONGEST_HEAD = 64 * 1024
_MORE, _BROKEN = -1, -2

A = TypeVar("A", bound=ArrivingTensors)


class RequestSink(Generic[A]):
    """The destination of one message.

    Args:
        find: Returns the tensors of the request with this head, given the size of the first
            tensor; None if the message has to be collected as a whole.
    """

    def __init__(self, find: Callable[[bytes, int], A | None]) -> None:
        self._find = find
        self._tensors: A | None = None
        self._head = bytearray()  # the head, then the bytes between two tensors
        self._at = 0  # the position of the next field in the head
        self._before: list[bytes] = []  # the bytes before each tensor that has begun
        self._plain: list[bytes] | None = None  # the message, if it is collected as a whole

    def place(self, most: int) -> memoryview | None:
        """Return the final memory of at most `most` of the next bytes, or None."""
        return None if self._tensors is None else self._tensors.place(most)

    def feed(self, piece: memoryview) -> None:
        """Receive the next bytes."""
        at, end = 0, len(piece)
        while at < end:
            if self._plain is not None:
                self._plain.append(bytes(piece[at:]))
                return
            if self._tensors is not None and self._tensors.missing:
                at += self._tensors.feed(piece[at:])
                continue
            taken = min(end - at, _LONGEST_HEAD)
            self._head += piece[at : at + taken]
            at += taken - self._look()

    def _look(self) -> int:
        """Read the collected fields; return the number of surplus bytes at the end."""
        head = self._head
        while self._at < len(head):
            tag = head[self._at]
            size, behind = _length(head, self._at + 1)
            if behind < 0:
                if behind == _BROKEN:
                    self._collect()
                return 0
            if tag == RAW_INPUT:
                surplus = len(head) - behind
                del head[behind:]
                self._begin(size)
                return surplus
            if tag not in EARLIER or self._before or behind + size > _LONGEST_HEAD:
                self._collect()
                return 0
            self._at = behind + size
        return 0

    def _begin(self, size: int) -> None:
        """Begin a tensor of this size."""
        if self._tensors is None:
            self._tensors = self._find(bytes(self._head[: self._at]), size)
        if self._tensors is None or not self._tensors.begin(size):
            self._collect()
            return
        self._before.append(bytes(self._head))
        self._head.clear()
        self._at = 0

    def _collect(self) -> None:
        """Collect the message as a whole, from the bytes that were received already."""
        pieces: list[bytes] = []
        if self._tensors is not None:
            for before, tensor in zip(self._before, self._tensors.received(), strict=True):
                pieces += (before, tensor)
            self.drop()
        pieces.append(bytes(self._head))
        self._plain = pieces

    def whole(self) -> bytes | A:
        """Return the message once it is complete: the tensors, or its bytes."""
        tensors = self._tensors
        if self._plain is None:
            if tensors is not None and tensors.complete and not self._head:
                return tensors
            self._collect()
        assert self._plain is not None
        return b"".join(self._plain)

    def drop(self) -> None:
        """Release the memory of the tensors. The method is idempotent."""
        tensors, self._tensors = self._tensors, None
        if tensors is not None:
            tensors.release()


def _length(data: bytearray, at: int) -> tuple[int, int]:
    """Return the length at `at`, and the position behind it, or `_MORE` or `_BROKEN`."""
    size = shift = 0
    while at < len(data):
        byte = data[at]
        at += 1
        size |= (byte & 127) << shift
        if byte < 128:
            return size, at
        shift += 7
        if shift > MOST_SHIFT:
            return 0, _BROKEN
    return 0, _MORE
