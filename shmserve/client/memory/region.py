"""Regions: memory for tensors that the server uses in place.

    allocate   creates a memfd, which exists until no process maps it any more
    attach     maps memory that another process has created, owns and unlinks
    pickle     sends the descriptor and the specs; the receiver maps the same memory

If a request uses a region of another client or process, the region is attached automatically.
"""

from __future__ import annotations

import contextlib
import os
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from operator import index
from typing import Any

import numpy as np

from shmserve.client.memory.segments import AnySegment, AttachedSegment, Memories, Segment, aligned
from shmserve.client.memory.views import MemoryLease, noop
from shmserve.client.request.arrays import datatype_of
from shmserve.client.server_state import ClientModel
from shmserve.errors import InvalidArgument, NotFound, PermissionDenied, Released, Unsupported
from shmserve.ipc.tensors.datatypes import ITEM_SIZE, element_count
from shmserve.ipc.tensors.descriptors import MAX_INT64, Range, TensorRef
from shmserve.ipc.tensors.schemas import Packed, TensorSchema
from shmserve.ipc.tensors.signature import Signature

_SHM_FOLDER = "/dev/shm/"
Shape = tuple[int, ...]
# Tensor name -> (shape or the size of the only dimension, datatype or numpy type).
Specs = Mapping[str, tuple[Sequence[int] | int, Any]]


class Region(Mapping[str, Any]):
    """Memory for named tensors that the server reads and writes in place.

        region = server.allocate(
            {"image": ((1, 512, 512), "FP32"), "output": ((1, 512, 512), "FP32")}
        )
        region["image"][:] = 0.5
        server.infer("blur", region)

    `Server.allocate` and `Server.attach` return it. `region["image"]` is a numpy array over the
    memory; on a device it is a `DeviceView`. `region["image"] = array` copies into host memory.
    `infer(model, region)` uses those tensors of the region that are inputs of the model, and writes
    the outputs to the others. The end of a `with` block releases the region.

    A region in host memory can be sent to another process, in the arguments of a process (fork,
    forkserver or spawn) or through a queue or a pipe of `multiprocessing`. Its arrays there are the
    same memory, also without a server. The memory ends with the last process that maps it.
    """

    def __init__(
        self,
        memories: Memories,
        tensors: Specs,
        make_segment: Callable[[int], AnySegment] | None = None,
        offset: int = 0,
    ) -> None:
        """Create the region's memory by `make_segment(byte_size)`, or by `memories.allocate`.

        The tensors begin at `offset`.

        >>> Region(memories, {"image": ((8, 1, 8, 8), "FP32")})  # doctest: +SKIP

        Raises:
            InvalidArgument: A shape or a datatype is invalid.
            Unavailable: There is not enough memory.
        """
        self._schemas = _parse_specs(tensors)
        self._offsets: dict[str, int] = {}
        end = offset
        for schema in self._schemas.values():
            self._offsets[schema.name] = start_offset = offset + aligned(end - offset)
            end = start_offset + max(1, schema.byte_size)
        byte_size = max(1, end)
        if make_segment is None:
            self._block = block = memories.allocate(byte_size, whole_segment=True)
        else:
            self._block = block = memories.add(make_segment(byte_size))
        assert not block.offset  # the block of a region is a whole segment
        self._start_offset = offset
        self.segment: Any = block.segment
        self.lease = MemoryLease(partial(memories.withdraw_block, block))
        self.memories = memories
        # The packed request to each model to which the region was sent.
        self.requests: dict[ClientModel, Packed] = {}  # packed, by model
        self._attached_regions = weakref.WeakKeyDictionary[Memories, Region]()

    def attached_to(self, memories: Memories) -> Region:
        """Return this region, or the region over its memory of the client that has `memories`.

        Raises:
            Released: The region was released.
            Unsupported: The memory is on a device.
        """
        if self.memories is memories:
            return self
        region = self._attached_regions.get(memories)
        if region is None:
            region = attach_region(memories, self, pin=self.segment.pin)
            self._attached_regions[memories] = region
        return region

    def fileno(self) -> int:
        """Return the descriptor of the memory, which `send_fds` can send to any process.

        Raises:
            Released: The region was released.
            Unsupported: The memory is on a device.
        """
        if self.lease.released:
            raise Released("this region was released")
        if not isinstance(self.segment, Segment):
            raise Unsupported(
                "device memory cannot be sent to another process; send a region in host memory"
            )
        return self.segment.fd

    @property
    def specs(self) -> dict[str, tuple[Shape, str]]:
        """Return the shape and datatype of each tensor: {name: (shape, datatype)}."""
        return {tensor.name: (tensor.shape, tensor.datatype) for tensor in self._schemas.values()}

    def __reduce__(self) -> tuple[Any, ...]:
        from multiprocessing.reduction import DupFd

        duplicate_fd = DupFd(self.fileno())
        return _receive_region, (duplicate_fd, self.specs, self._start_offset, self.segment.pin)

    def __deepcopy__(self, memo: Any) -> Region:
        # Without this method, `__reduce__` would make a second region over the same memory.
        if not isinstance(self.segment, Segment):
            raise TypeError("a region in device memory cannot be copied; copy its tensors")
        region_copy = Region(self.memories, self.specs)
        for name in self:
            region_copy[name][...] = self[name]
        return region_copy

    # `Mapping` would compare arrays, whose comparison has no truth value.
    __eq__ = object.__eq__
    __hash__ = object.__hash__

    def __getitem__(self, name: str) -> Any:
        return self.view(name)

    def __setitem__(self, name: str, value: Any) -> None:
        self.view(name)[...] = value  # `region["x"] += 1` ends with this, too

    def __iter__(self) -> Iterator[str]:
        return iter(self._schemas)

    def __len__(self) -> int:
        return len(self._schemas)

    def store_request(self, model: ClientModel, request: Packed) -> None:
        """Cache the packed request to `model`; remove the requests to withdrawn versions."""
        for closed_model in [key for key in list(self.requests) if key.is_closed]:
            self.requests.pop(closed_model, None)
        self.requests[model] = request

    def view(self, name: str, shape: Shape | None = None) -> Any:
        """Return a tensor as an array (a `View`, or a `DeviceView` on a device).

        Args:
            name: The tensor's name.
            shape: The shape of the array, if it is smaller, for example with fewer rows. The array
                then uses the first bytes of the tensor.

        Raises:
            KeyError: The region has no such tensor.
            Released: The region was released.
            InvalidArgument: The shape is invalid or exceeds the tensor's memory.
        """
        schema = self._schemas[name]
        if self.lease.released:
            raise Released("this region was released")
        if shape is not None:
            schema, full_schema = _parse_spec(name, shape, schema.datatype), schema
            if schema.byte_size > full_schema.byte_size:
                raise InvalidArgument(
                    f"'{name}' has shape {full_schema.shape} in this region, which is too small "
                    f"for {schema.shape}"
                )
        return self.segment.view(self._offsets[name], schema.shape, schema.datatype, self.lease)

    def ref(self, name: str) -> TensorRef:
        """Return a tensor as it is sent to the server; raise Released after `release`."""
        return self._schemas[name].ref(self.memory_range(name))

    def output_range(self, name: str, signature: Signature) -> Range:
        """Return the range of the tensor `name`, to which the model writes the output `name`.

        Raises:
            Released: The region was released.
            InvalidArgument: The memory was allocated for another datatype.
        """
        check_datatype(name, self._schemas[name].datatype, signature)
        return self.memory_range(name)

    def memory_range(self, name: str) -> Range:
        """Return a tensor's range as it is sent to the server; raise Released after `release`."""
        if self.lease.released:
            raise Released("this region was released")
        byte_size = self._schemas[name].byte_size
        memory_range: Range = self.segment.memory_range(self._offsets[name], byte_size)
        return memory_range

    def release(self) -> None:
        """Free the memory; arrays over it raise Released from now on. This method is idempotent."""
        self.lease.released = True
        self.requests.clear()
        # The memory itself is freed with the last array over it and the last request in flight.
        self.lease = MemoryLease(noop)
        self.lease.released = True
        self.memories.free_recycled()
        for region in list(self._attached_regions.values()):
            region.release()

    def __enter__(self) -> Region:
        return self

    def __exit__(self, *error: object) -> None:
        self.release()


def attach_region(
    memories: Memories,
    source: Any,
    tensors: Specs | None = None,
    *,
    offset: int = 0,
    pin: bool = False,
) -> Region:
    """Return a region over memory that exists; see `sync.Server.attach`."""
    if not isinstance(offset, int) or offset < 0:
        raise InvalidArgument(f"offset must be an integer >= 0 (bytes), got {offset!r}")
    fd = _open_descriptor(source)
    try:
        if isinstance(source, Region):
            offset += source._start_offset
            tensors = source.specs if tensors is None else tensors
        if tensors is None:
            tensors = {"data": ([max(0, os.fstat(fd).st_size - offset)], "UINT8")}
        return Region(
            memories, tensors, lambda size: AttachedSegment(os.dup(fd), pin, size), offset
        )
    finally:
        os.close(fd)


def _open_descriptor(source: Any) -> int:
    """Duplicate the descriptor of a memory object, or open the memory by its name."""
    if isinstance(source, str | os.PathLike):
        name = os.fspath(source).removeprefix(_SHM_FOLDER).lstrip("/")
        flags = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
        try:
            return os.open(_SHM_FOLDER + name, flags)
        except FileNotFoundError:
            raise NotFound(f"there is no shared memory '{name}' in {_SHM_FOLDER}") from None
        except PermissionError:
            text = f"shared memory '{name}': this user may not read and write it (see its mode)"
            raise PermissionDenied(text) from None
        except (OSError, ValueError) as error:  # a ValueError if the name is no path, as "a\0b"
            reason = getattr(error, "strerror", None) or error
            text = f"'{name}' cannot be used as shared memory: {reason}"
            raise InvalidArgument(text) from None
    fd = getattr(source, "_fd", source)  # SharedMemory's descriptor
    try:
        return os.dup(fd.fileno() if hasattr(fd, "fileno") else fd)
    except (OSError, TypeError, OverflowError):
        raise InvalidArgument(
            "memory is attached by its name in /dev/shm, an open descriptor, a SharedMemory that "
            f"is not closed, or a region, got {source!r:.80}"
        ) from None


def _receive_region(descriptor: Any, specs: Specs, start_offset: int, pin: bool) -> Region:
    """Return a region that another process has sent.

    The region belongs to no client: a client that sends a request with it attaches the memory.
    """
    memories = Memories(MAX_INT64, _share_nothing, _share_nothing)
    return Region(memories, specs, partial(AttachedSegment, descriptor.detach(), pin), start_offset)


def _share_nothing(_: AnySegment) -> None:
    """Do nothing: the memory of a received region is shared with no server."""


def check_datatype(name: str, datatype: str, signature: Signature) -> None:
    """Raise InvalidArgument if output `name` cannot be written to memory of `datatype`."""
    spec = signature.outputs.get(name)
    # A BYTES output may be written to memory of any datatype, and is decoded from its bytes.
    if spec is not None and spec.datatype not in (datatype, "BYTES"):
        raise InvalidArgument(
            f"output '{name}' of model '{signature.name}' is {spec.datatype}, but the region's "
            f"tensor is {datatype}"
        )


def _parse_specs(tensors: Specs) -> dict[str, TensorSchema]:
    if not isinstance(tensors, Mapping):
        text = f"expected a mapping of names to (shape, datatype), got {tensors!r:.80}"
        raise InvalidArgument(text)
    schemas: dict[str, TensorSchema] = {}
    for name, spec in tensors.items():
        if not isinstance(name, str) or not isinstance(spec, list | tuple) or len(spec) != 2:
            raise InvalidArgument(f"{name!r:.80}: {spec!r:.80} is not a pair (shape, datatype)")
        schemas[name] = _parse_spec(name, *spec)
    return schemas


def _datatype(name: str, datatype: Any) -> str:
    """Return the protocol's name of a datatype, given by this name or as a numpy type.

    The tensor's `name` is for error messages.
    """
    if isinstance(datatype, str) and ITEM_SIZE.get(datatype):
        return datatype
    with contextlib.suppress(TypeError, ValueError):
        protocol_name = "" if datatype is None else datatype_of(np.empty(0, datatype), "")
        if protocol_name:
            return protocol_name
    allowed_names = ", ".join(name for name, size in ITEM_SIZE.items() if size)
    raise InvalidArgument(
        f"'{name}': unknown datatype '{datatype}' (allowed: {allowed_names}, and types of numpy "
        "such as numpy.float32 or 'float32')"
    )


def _parse_spec(name: str, shape: Sequence[int] | int, dtype: Any) -> TensorSchema:
    datatype = _datatype(name, dtype)
    item_size = ITEM_SIZE[datatype]
    try:
        dims = tuple(map(index, (shape,) if isinstance(shape, int | np.integer) else shape))
    except TypeError:
        dims = (-1,)
    if any(dim < 0 for dim in dims):
        text = f"'{name}': shape {shape} has a dimension that is not an integer >= 0"
        raise InvalidArgument(text)
    size = element_count(dims) * item_size
    if size > MAX_INT64:
        raise InvalidArgument(f"'{name}': shape {dims} has {size} bytes (maximum: {MAX_INT64})")
    return TensorSchema(name, datatype, dims, size)
