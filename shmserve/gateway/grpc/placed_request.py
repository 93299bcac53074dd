"""Large inference requests that are placed while they arrive: their tensors go from the socket's
buffer to the arena, and nothing of them is copied again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from google.protobuf.message import DecodeError

from shmserve.errors import ShmserveError
from shmserve.gateway.context import Gateway
from shmserve.gateway.grpc.wire.arriving import ArrivingRequest
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
        built, _ = check_request(model, request, tensors, resources)
        return _Room(model, built, resources, [resources.view(place) for place in places])


def _size(tensor: InferInput) -> int:
    """The size in bytes that an input's contents must have; -1 if its shape does not say."""
    item = ITEM_SIZE.get(tensor.datatype, 0)
    return tensor.count * item if item > 0 else -1
