"""Large requests whose tensors are received into the arena, without further copies.

    head parsed ──> `receive`: block allocated, request checked ──> begin, feed* for each tensor
        └──> a fault: the block is released                             └──> complete

HTTP and gRPC use the same class. Tensors follow each other immediately in an HTTP body, while gRPC
has a field header before each tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import islice
from typing import final

from shmserve.gateway.context import Gateway
from shmserve.gateway.inference.prepare import BuiltRequest, check_request, resources_of
from shmserve.gateway.inference.request import InferRequest
from shmserve.gateway.model_table import GatewayModel

_NOTHING = memoryview(b"")


class ArrivingTensors:
    """The tensors of one request, which are received one after the other into their memory.

    Attributes:
        views: The memory of each tensor.
        begun: The number of tensors that have begun to arrive.
    """

    def __init__(self, views: Sequence[memoryview], release: Callable[[], None]) -> None:
        self.views = views
        self.begun = 0
        self.release = release
        self._left = _NOTHING  # the rest of the tensor that is arriving

    def begin(self, size: int) -> bool:
        """Begin the next tensor; return whether there is one of this size."""
        if self.begun == len(self.views) or len(self.views[self.begun]) != size:
            return False
        self._left = self.views[self.begun]
        self.begun += 1
        return True

    def feed(self, piece: memoryview) -> int:
        """Receive bytes of the current tensor; return how many bytes belong to it."""
        size = min(len(self._left), len(piece))
        if size and piece.obj is not self._left.obj:  # else they are in place
            self._left[:size] = piece[:size]
        self._left = self._left[size:]
        return size

    def feed_all(self, piece: memoryview) -> None:
        """Receive bytes of tensors that follow each other immediately; ignore surplus bytes."""
        while True:
            piece = piece[self.feed(piece) :]
            if self._left or self.begun == len(self.views):
                return
            self.begin(len(self.views[self.begun]))

    def next_buffer(self, most: int) -> memoryview | None:
        """Return the final memory of at most `most` of the next bytes, or None between tensors."""
        return self._left[:most] if self._left else None

    @property
    def missing(self) -> int:
        """Return the number of bytes that the current tensor lacks."""
        return len(self._left)

    @property
    def complete(self) -> bool:
        """Return whether all tensors were received."""
        return not self._left and self.begun == len(self.views)

    def received(self) -> list[bytes]:
        """Return the received bytes of each tensor that has begun."""
        found = [bytes(view) for view in islice(self.views, self.begun)]
        if self._left:
            found[-1] = found[-1][: -len(self._left)]
        return found


@final
class ArrivingRequest(ArrivingTensors):
    """A checked request whose binary tensors are received; `len` is the size of its message.

    Attributes:
        built: The request, which is complete once its tensors are.
    """

    def __init__(self, built: BuiltRequest, views: Sequence[memoryview], byte_size: int) -> None:
        super().__init__(views, built.release)
        self.built = built
        self._byte_size = byte_size

    def __len__(self) -> int:
        return self._byte_size


def receive(
    gateway: Gateway, model: GatewayModel, request: InferRequest, byte_size: int
) -> ArrivingRequest:
    """Allocate the memory for the tensors of a request whose head was received.

    The request is checked first, so that an invalid request costs no upload.

    Args:
        gateway: The gateway.
        model: The model of the request.
        request: The parsed request. Inputs with a `binary_size` are to be received.
        byte_size: The size of the message.

    Raises:
        ShmserveError: The request is invalid, or the arena is full.
    """
    resources = resources_of(gateway)
    try:
        inputs = request.inputs
        sizes = [max(tensor.binary_size, 0) or len(tensor.data or b"") for tensor in inputs]
        ranges = resources.allocate(sizes)
        stored = [
            None if tensor.memory_range is not None else memory_range
            for tensor, memory_range in zip(inputs, ranges, strict=True)
        ]
        built = check_request(model, request, stored, resources)
        views: list[memoryview] = []
        for tensor, memory_range in zip(inputs, ranges, strict=True):
            if tensor.data is not None:
                resources.view(memory_range)[:] = tensor.data
            elif tensor.binary_size >= 0:
                views.append(resources.view(memory_range))
    except BaseException:
        resources.release()
        raise
    return ArrivingRequest(built, views, byte_size)
