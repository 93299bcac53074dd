"""Memory that a program allocates for its tensors, and the server uses in place."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from operator import index
from typing import Any

from shmserve.client.errors import Released
from shmserve.client.memory.segments import AnySegment, Memories, aligned
from shmserve.client.memory.views import MemoryLease, nothing
from shmserve.client.request.prepared import TensorTemplate
from shmserve.client.server.state import ClientModel
from shmserve.errors import InvalidArgument
from shmserve.ipc.tensors.datatypes import ITEM_SIZE, element_count
from shmserve.ipc.tensors.descriptors import Place, TensorRef
from shmserve.ipc.tensors.inference import Packed
from shmserve.ipc.tensors.ranges import LARGEST
from shmserve.ipc.tensors.signature import Signature

Shape = tuple[int, ...]
Specs = Mapping[str, tuple[Sequence[int], str]]  # of tensors by name: shape, datatype


class Region(Mapping[str, Any]):
    """Memory for tensors, by name, that the server reads and writes in place.

    `region["image"]` is an array to fill or to read (on a device, a `DeviceView`);
    `infer(model, region)` takes those of its tensors that the model takes, and has the others
    written where they lie.
    """

    def __init__(
        self,
        memories: Memories,
        tensors: Specs,
        make: Callable[[int], AnySegment] | None = None,
    ) -> None:
        """Allocate, in what `make(byte_size)` gives if that is no usual segment. Raises
        InvalidArgument for a shape or a datatype, Unavailable without memory.

        >>> Region(memories, {"image": ((8, 1, 8, 8), "FP32")})  # doctest: +SKIP
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
        # The schema and data of a request of a model with these tensors.
        self.requests: dict[ClientModel, Packed] = {}

    def __getitem__(self, name: str) -> Any:
        return self.view(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._templates)

    def __len__(self) -> int:
        return len(self._templates)

    def remember(self, model: ClientModel, request: Packed) -> None:
        """Keep what a request of `model` comes to; nothing of models that are not there any more,
        as after each reload."""
        for known in [known for known in list(self.requests) if known.closed]:
            self.requests.pop(known, None)
        self.requests[model] = request

    def view(self, name: str, shape: Shape | None = None) -> Any:
        """The array (`View`, on a device `DeviceView`) of a tensor; with a smaller `shape` (fewer
        rows, say) of its first bytes.

        Raises KeyError, Released, or InvalidArgument when the shape is none, or has more than there
        is.
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
        """The tensor as it travels. Raises Released."""
        template = self._templates[name]
        return template.ref(self.place(name))

    def room(self, name: str, signature: Signature) -> Place:
        """The place for an output of a model. Raises Released, or InvalidArgument when another type
        was allocated."""
        check_room(name, self._templates[name].datatype, signature)
        return self.place(name)

    def place(self, name: str) -> Place:
        """The place of a tensor, for the server. Raises Released."""
        if self.lease.released:
            raise Released("this region was released")
        place: Place = self.segment.place(self._offsets[name], self._templates[name].byte_size)
        return place

    def release(self) -> None:
        """Give the memory back; arrays over it raise from now on. A second time is fine."""
        self.lease.released = True
        self.requests.clear()
        # The memory itself goes with the last array over it, and what is in flight.
        self.lease = MemoryLease(nothing)
        self.lease.released = True
        self._memories.settle()

    def __enter__(self) -> Region:
        return self

    def __exit__(self, *error: object) -> None:
        self.release()


def check_room(name: str, given: str, signature: Signature) -> None:
    """Raise InvalidArgument when an output is of another type than `given`, its room's."""
    spec = signature.outputs.get(name)
    # Strings are bytes of any tensor, which the response decodes.
    if spec is not None and spec.datatype not in (given, "BYTES"):
        raise InvalidArgument(
            f"output '{name}' of model '{signature.name}' is {spec.datatype}, and the region's "
            f"tensor {given}"
        )


def _templates(tensors: Mapping[str, tuple[Sequence[int], str]]) -> dict[str, TensorTemplate]:
    if not isinstance(tensors, Mapping):
        raise InvalidArgument(
            f"what to allocate is a mapping of names to (shape, datatype), got {tensors!r:.80}"
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
        raise InvalidArgument(f"'{name}': datatype '{datatype}' is none of {allowed}")
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
