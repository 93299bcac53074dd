"""Large inference requests that are placed while they arrive: their tensors go from the socket's
buffer to the arena, and nothing of them is copied again.

What stands before the tensors' bytes is collected, and those go piece by piece to where they are to
be.

One that is not written like this is collected as a whole, for whoever says what is wrong with it:
with fields behind the tensors, a long head, or contents of other sizes than its head says.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from google.protobuf.message import DecodeError

from shmserve.errors import ShmserveError
from shmserve.gateway.context import Gateway
from shmserve.gateway.grpc.wire.fingerprint import EARLIER, MOST_SHIFT, RAW_INPUT
from shmserve.gateway.grpc.wire.request import infer_request
from shmserve.gateway.inference.builder import (
    BuiltRequest,
    Resources,
    check_request,
    resources_of,
    tensor_ref,
)
from shmserve.gateway.inference.request import InferInput
from shmserve.gateway.model_table import GatewayModel, checked_version
from shmserve.ipc.tensors.datatypes import ITEM_SIZE
from shmserve.proto.grpc_service_pb2 import ModelInferRequest

_LONGEST_HEAD = 64 * 1024


class Room(Protocol):
    """Where the tensors' bytes of one request go."""

    @property
    def views(self) -> Sequence[memoryview]:
        """A place for each of its contents."""

    def drop(self) -> None:
        """Give it back: nobody needs it."""


class ArrivingRequest:
    """One request. `find` gives its room by its head and the size of its first contents, None where
    there is none. Once all has come there is a `room` that is filled, or `raw`, the whole message.
    """

    def __init__(self, find: Callable[[bytes, int], Room | None]) -> None:
        self._find = find
        self.room: Room | None = None
        self._head = bytearray()  # the head, then what stands between two contents
        self._at = 0  # in the head, where the next field begins
        self._before: list[bytes] = []  # what stood before the contents that are here
        self._left = memoryview(b"")  # of those that are arriving
        self._plain: list[bytes] | None = None

    def place(self, most: int) -> memoryview | None:
        """Where the next bytes go, `most` of them, if they are of a tensor: those that are there
        already when they are fed are not copied."""
        return self._left[:most] if self._left else None

    def feed(self, piece: memoryview) -> None:
        """The next bytes."""
        at, end = 0, len(piece)
        while at < end:
            if self._plain is not None:
                self._plain.append(bytes(piece[at:]))
                return
            if self._left:
                size = min(len(self._left), end - at)
                if piece.obj is not self._left.obj:  # else it was read to its place
                    self._left[:size] = piece[at : at + size]
                self._left = self._left[size:]
                at += size
                continue
            taken = min(end - at, _LONGEST_HEAD)
            self._head += piece[at : at + taken]
            at += taken - self._look()

    def _look(self) -> int:
        """Read the fields that are collected; how many bytes at the end are no part of them."""
        head = self._head
        while self._at < len(head):
            tag = head[self._at]
            size, behind = _length(head, self._at + 1)
            if behind < 0:
                if behind == _BROKEN:
                    self._give_up()
                return 0
            if tag == RAW_INPUT:
                over = len(head) - behind
                del head[behind:]
                self._begin(size)
                return over
            if tag not in EARLIER or self._before or behind + size > _LONGEST_HEAD:
                self._give_up()
                return 0
            self._at = behind + size
        return 0

    def _begin(self, size: int) -> None:
        """Contents of this size are next."""
        if self.room is None:
            self.room = self._find(bytes(self._head[: self._at]), size)
        room, number = self.room, len(self._before)
        if room is None or number >= len(room.views) or len(room.views[number]) != size:
            self._give_up()
            return
        self._before.append(bytes(self._head))
        self._head.clear()
        self._at = 0
        self._left = room.views[number]

    def _give_up(self) -> None:
        """Collect it as a whole: what is here already, and all that comes."""
        pieces: list[bytes] = []
        if self.room is not None:
            for number, before in enumerate(self._before):
                view = self.room.views[number]
                last = number == len(self._before) - 1
                there = len(view) - len(self._left) if last else len(view)
                pieces += (before, bytes(view[:there]))
            self.drop()
        pieces.append(bytes(self._head))
        self._left = memoryview(b"")
        self._plain = pieces

    def raw(self) -> bytes | None:
        """All has come: the message as a whole, None if its contents have filled their room."""
        room = self.room
        whole = room is not None and len(self._before) == len(room.views)
        if self._plain is None and not (whole and not self._left and not self._head):
            self._give_up()
        return None if self._plain is None else b"".join(self._plain)

    def drop(self) -> None:
        """Give its room back."""
        room, self.room = self.room, None
        if room is not None:
            room.drop()


_MORE, _BROKEN = -1, -2


def _length(data: bytearray, at: int) -> tuple[int, int]:
    """The length at `at`, and where what has it begins; or that more bytes are needed, or that it
    is none."""
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


@dataclass(frozen=True, slots=True, eq=False)
class PlacedRequest:
    """A request that is in place, checked against its model; its message had `size` bytes."""

    model: GatewayModel
    built: BuiltRequest
    size: int

    def __len__(self) -> int:
        return self.size

    def release(self) -> None:
        """Nobody needs it."""
        self.built.release()


class _Room:
    """The room of one request in the arena."""

    def __init__(
        self,
        model: GatewayModel,
        built: BuiltRequest,
        resources: Resources,
        views: Sequence[memoryview],
    ) -> None:
        self.model = model
        self.built = built
        self.views = views
        self._resources = resources

    def drop(self) -> None:
        """Give it back: nobody needs it."""
        self._resources.release()


class RequestSink:
    """A request of `size` bytes as it arrives. What is wrong with it is said when it is here: then
    it is not placed but whole. `headers` are parameters of it, too."""

    def __init__(
        self, gateway: Gateway, size: int, headers: Callable[[], Mapping[str, str]]
    ) -> None:
        self._gateway = gateway
        self._size = size
        self._headers = headers
        self._arriving = ArrivingRequest(self._find)

    def place(self, most: int) -> memoryview | None:
        """Where the next bytes go, `most` of them, if they are of a tensor."""
        return self._arriving.place(most)

    def feed(self, piece: memoryview) -> None:
        """The next bytes."""
        self._arriving.feed(piece)

    def whole(self) -> bytes | PlacedRequest:
        """All of it is here."""
        raw = self._arriving.raw()
        if raw is not None:
            return raw
        room = self._arriving.room
        assert isinstance(room, _Room)
        return PlacedRequest(room.model, room.built, self._size)

    def drop(self) -> None:
        """Nobody needs it any more."""
        self._arriving.drop()

    def _find(self, head: bytes, first_size: int) -> _Room | None:
        resources = resources_of(self._gateway)
        try:
            return self._room(head, first_size, resources)
        except (ShmserveError, DecodeError):
            resources.release()
            return None

    def _room(self, head: bytes, first_size: int, resources: Resources) -> _Room | None:
        message = ModelInferRequest.FromString(head)
        version = checked_version(message.model_version)
        model = self._gateway.models.resolve(message.model_name, version)
        request = infer_request(message, [b""] * len(message.inputs))
        request.parameters |= self._headers()
        inputs = request.inputs
        if any(tensor.place is not None for tensor in inputs):
            return None
        sizes = [first_size] if len(inputs) == 1 else [_size(tensor) for tensor in inputs]
        if any(size < 0 for size in sizes):
            return None
        places = resources.allocate(sizes)
        tensors = [
            tensor_ref(resources, tensor, place)
            for tensor, place in zip(inputs, places, strict=True)
        ]
        built = check_request(model, request, tensors, resources)
        return _Room(model, built, resources, [resources.view(place) for place in places])


def _size(tensor: InferInput) -> int:
    """The size in bytes that an input's contents must have; -1 if its shape does not say."""
    item = ITEM_SIZE.get(tensor.datatype, 0)
    return tensor.count * item if item > 0 else -1
