"""Regions: memory that a program allocates for tensors, and that the server uses in place."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from operator import index
from typing import Any

from shmserve.client.errors import Released
from shmserve.client.memory.segments import AnySegment, Memories, aligned
from shmserve.client.memory.views import MemoryLease, nothing
from shmserve.client.request.prepared import TensorTemplate
from shmserve.client.server_state import ClientModel
from shmserve.errors import InvalidArgument
from shmserve.ipc.tensors.datatypes import ITEM_SIZE, element_count
from shmserve.ipc.tensors.descriptors import LARGEST, Range, TensorRef
from shmserve.ipc.tensors.inference import Packed
from shmserve.ipc.tensors.signature import Signature

Shape = tuple[int, ...]
Specs = Mapping[str, tuple[Sequence[int], str]]  # of tensors by name: shape, datatype


class Region(Mapping[str, Any]):
    """Memory for named tensors that the server reads and writes in place.

    `region["image"]` is an array (on a device, a `DeviceView`). `infer(model, region)` uses those
    tensors of the region that are inputs of the model, and writes the outputs to the others.
    """

    def __init__(
        self,
        memories: Memories,
        tensors: Specs,
        make: Callable[[int], AnySegment] | None = None,
    ) -> None:
        """Allocate the memory, by `make(byte_size)` if given.

        >>> Region(memories, {"image": ((8, 1, 8, 8), "FP32")})  # doctest: +SKIP

        Raises:
            InvalidArgument: A shape or a datatype is invalid.
            Unavailable: There is not enough memory.
        """
        self._templates = _templates(tensors)
        total = sum(aligned(max(1, template.byte_size)) for template in self._templates.values())
        if make is None:
            self._block = block = memories.allocate(max(1, total), alone=True)
        else:
            self._block = block = memories.add(make(max(1, total)))
        self.segment: Any = block.segment
        self.lease = MemoryLease(partial(memories.part_with, block))
        self._memories = memories
        self._offsets: dict[str, int] = {}
        at = block.offset
        for template in self._templates.values():
            self._offsets[template.name] = at
            at += aligned(max(1, template.byte_size))
        # The schema and data of a request to each model.
        self.requests: dict[ClientModel, Packed] = {}

    def __getitem__(self, name: str) -> Any:
        return self.view(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._templates)

    def __len__(self) -> int:
        return len(self._templates)

    def remember(self, model: ClientModel, request: Packed) -> None:
        """Cache the packed request for `model`, and remove those of models that are closed."""
        for known in [known for known in list(self.requests) if known.closed]:
            self.requests.pop(known, None)
        self.requests[model] = request

    def view(self, name: str, shape: Shape | None = None) -> Any:
        """Return a tensor as an array (a `View`, or a `DeviceView` on a device).

        Args:
            name: The tensor's name.
            shape: A smaller shape, for instance with fewer rows, which uses the first bytes.

        Raises:
            KeyError: The region has no such tensor.
            Released: The region was released.
            InvalidArgument: The shape is invalid or exceeds the tensor's memory.
        """
        template = self._templates[name]
        if self.lease.released:
            raise Released("this region was released")
        if shape is not None:
            template, room = _template(name, shape, template.datatype), template
            if template.byte_size > room.byte_size:
                raise InvalidArgument(
                    f"'{name}' has room for {room.shape}, not for {template.shape}"
                )
        return self.segment.view(self._offsets[name], template.shape, template.datatype, self.lease)

    def ref(self, name: str) -> TensorRef:
        """Return the tensor in the form of a message. Raises Released."""
        template = self._templates[name]
        return template.ref(self.place(name))

    def room(self, name: str, signature: Signature) -> Range:
        """Return the range for an output of a model.

        Raises:
            Released: The region was released.
            InvalidArgument: The memory was allocated for another datatype.
        """
        check_room(name, self._templates[name].datatype, signature)
        return self.place(name)

    def place(self, name: str) -> Range:
        """Return the range of a tensor in the form sent to the server. Raises Released."""
        if self.lease.released:
            raise Released("this region was released")
        place: Range = self.segment.place(self._offsets[name], self._templates[name].byte_size)
        return place

    def release(self) -> None:
        """Free the memory; arrays over it raise Released from now on. This method is idempotent."""
        self.lease.released = True
        self.requests.clear()
        # The memory itself is freed with the last array over it and the last request in flight.
        self.lease = MemoryLease(nothing)
        self.lease.released = True
        self._memories.settle()

    def __enter__(self) -> Region:
        return self

    def __exit__(self, *error: object) -> None:
        self.release()


def check_room(name: str, given: str, signature: Signature) -> None:
    """Raise InvalidArgument if an output has another datatype than `given`, its memory's."""
    spec = signature.outputs.get(name)
    # The response decodes strings from the bytes of any tensor.
    if spec is not None and spec.datatype not in (given, "BYTES"):
        raise InvalidArgument(
            f"output '{name}' of model '{signature.name}' is {spec.datatype}, and the region's "
            f"tensor {given}"
        )


def _templates(tensors: Mapping[str, tuple[Sequence[int], str]]) -> dict[str, TensorTemplate]:
    if not isinstance(tensors, Mapping):
        raise InvalidArgument(
            f"expected a mapping of names to (shape, datatype), got {tensors!r:.80}"
        )
    templates: dict[str, TensorTemplate] = {}
    for name, spec in tensors.items():
        if not isinstance(name, str) or not isinstance(spec, list | tuple) or len(spec) != 2:
            raise InvalidArgument(f"{name!r:.80}: {spec!r:.80} is no (shape, datatype) by name")
        templates[name] = _template(name, *spec)
    return templates


def _template(name: str, shape: Sequence[int], datatype: str) -> TensorTemplate:
    item = ITEM_SIZE.get(datatype) if isinstance(datatype, str) else 0
    if not item:
        allowed = ", ".join(name for name, size in ITEM_SIZE.items() if size)
        raise InvalidArgument(f"'{name}': unknown datatype '{datatype}' (allowed: {allowed})")
    try:
        dims = tuple(map(index, shape))
    except TypeError:
        dims = (-1,)
    if any(dim < 0 for dim in dims):
        raise InvalidArgument(f"'{name}': shape {shape} has a size that is no whole number")
    size = element_count(dims) * item
    if size > LARGEST:
        raise InvalidArgument(f"'{name}': shape {dims} is too large")
    return TensorTemplate(name, datatype, dims, size)
