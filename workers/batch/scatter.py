"""Scattering: the outputs of a response, written once, where the client wants them.

the client's region    when the request names one for that output
where an input is      when it is that input, and the request allows it
inside the message     when all the others together are small
the worker's arena     else; the reader releases it

What goes to a client's device memory is copied there from wherever the model left it. A tensor that
is already where it should go is left there: a runner may have had the model compute it in place.

Programs ask for the same again and again, and a model's responses have few templates: names, types
and shapes. What follows from these alone is known, and only the bytes of small outputs are put
into the packed `Inferred`.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from shmserve.errors import Internal
from shmserve.ipc.model_spec import TensorSpec
from shmserve.ipc.tensors.arrays import STORED, encode_bytes
from shmserve.ipc.tensors.datatypes import ITEM_SIZE, TO_CONFIG
from shmserve.ipc.tensors.descriptors import Place, TensorRef
from shmserve.ipc.tensors.inference import INLINE_LIMIT, Inferred, PackedTemplate, pack_inferred
from shmserve.ipc.tensors.signature import Signature, agree, shape_text
from shmserve.workers.batch.request import Array, Copied, Output, Request, Response
from shmserve.workers.batch.unpack import reshape
from shmserve.workers.context import ModelContext
from shmserve.workers.memory.copying import Copier

logger = logging.getLogger(__name__)


_MOST_BODIES = 16
_MOST_TEMPLATES = 256

# An array that is smaller than this is copied sooner than it is found where it should go.
_WORTH_A_LOOK = 16 * 1024


class Ready(NamedTuple):
    """An output to be written: `data` is the wire form (BYTES), or an array of it (a tensor, if it
    goes to a device). `at`: where it is already, and may stay, as an input that was returned."""

    name: str
    datatype: str
    shape: tuple[int, ...]
    data: Any
    byte_size: int
    at: Place | None = None


class ResponsePacker:
    """Packs the responses of one model."""

    def __init__(self, copied: Copied) -> None:
        self._copied = copied
        self._templates: dict[Any, PackedTemplate | None] = {}  # None: seen once
        # By `_array_key`: what the request wanted, the template, and the bytes that go into it.
        self._inline: dict[Any, tuple[Any, PackedTemplate, int]] = {}

    def known(self, request: Request, response: Response) -> bytes | None:
        """The packed response, where one to such a request, of arrays of the same types and shapes,
        was inline and right before; else None."""
        if request.placed or response.parameters:
            return None
        known = self._inline.get(_array_key(request, response))
        if known is None or known[0] is not request.requested:
            return None
        _, template, byte_size = known
        self._copied.outputs += byte_size
        return template.fill([output.data.tobytes() for output in response.outputs])

    def pack(
        self, ready: list[Ready], data: list[bytes | Place], request: Request, response: Response
    ) -> bytes:
        """The response, packed; put together from the template of one before where there is one."""
        key = _wire_key(ready)
        if not response.parameters:
            inline = [where for where in data if isinstance(where, bytes)]
            if len(inline) == len(data):
                packed = self._filled(key, inline, ready)
                if not request.placed:
                    self._remember(request, response, ready)
                return packed
            known = request.bodies.get(key)
            if known is not None:
                return known
        packed = pack_inferred(Inferred(_refs(ready, data), response.parameters))
        wanted = request.requested
        if (
            not response.parameters
            and len(request.bodies) < _MOST_BODIES
            and all(wanted[item.name].place is not None for item in ready)
        ):
            # All is where the request says: shapes and sizes are all that can be new next time.
            request.bodies[key] = packed
        return packed

    def _remember(self, request: Request, response: Response, ready: list[Ready]) -> None:
        key = _array_key(request, response)
        template = self._templates.get(_wire_key(ready))
        if key is None or template is None or len(ready) != len(response.outputs):
            return
        # Not what is sent in another byte order.
        if all(
            item.data is output.data for item, output in zip(ready, response.outputs, strict=True)
        ):
            if len(self._inline) >= _MOST_TEMPLATES:
                self._inline.clear()
            byte_size = sum([item.byte_size for item in ready])
            self._inline[key] = request.requested, template, byte_size

    def _filled(self, key: Any, inline: list[bytes], ready: list[Ready]) -> bytes:
        template = self._templates.get(key)
        if template is not None:
            return template.fill(inline)
        response = Inferred(_refs(ready, inline))
        if key in self._templates:  # the second time: it was worth remembering
            self._templates[key] = PackedTemplate(response)
        else:
            if len(self._templates) >= _MOST_TEMPLATES:
                self._templates.clear()
            self._templates[key] = None
        return pack_inferred(response)


def _wire_key(ready: list[Ready]) -> Any:
    return tuple([(*item[:3], *item[4:]) for item in ready])


def _array_key(request: Request, response: Response) -> Any:
    """The key from which a response's checks and packing follow; None where not all of it
    are arrays of numbers."""
    key: list[Any] = [request.batch_size]
    for name, datatype, data in response.outputs:
        if type(data) is not np.ndarray or datatype == "BYTES":
            return None
        key += (name, datatype, data.dtype, data.shape)
    return tuple(key)


def _refs(ready: list[Ready], data: Sequence[bytes | Place]) -> tuple[TensorRef, ...]:
    return tuple([TensorRef(*item[:3], where) for item, where in zip(ready, data, strict=True)])


@dataclass(eq=False)
class Scatterer:
    """Writes responses of one model. `strict`: outputs must agree with the model's configuration;
    `whole`: a response should have all that were asked for. As many threads copy a large one as the
    instance has."""

    _signature: Signature
    _context: ModelContext
    _strict: bool
    _whole: bool

    def __post_init__(self) -> None:
        self._batched = self._signature.max_batch_size > 0
        self._copier = Copier(self._context.threads)
        self._packer = ResponsePacker(self._context.copied)

    def write(self, request: Request, response: Response) -> bytes:
        """The packed `Inferred` of a successful response, after its outputs have been written.

        Outputs that nobody asked for, or that the configuration does not have, are left out. Raises
        a ShmserveError when an output does not fit the model or its place, or memory is full; then
        no block of the arena stays allocated.
        """
        known = self._packer.known(request, response)
        if known is not None:
            return known
        ready = [
            self._prepare(output, self._signature.outputs[output.name], request)
            for output in response.outputs
            if output.name in request.requested and output.name in self._signature.outputs
        ]
        if len(ready) < len(request.requested):
            self._lacks(request, {item.name for item in ready})
        if request.aliased and len(ready) > 1:
            ready = [_detached(item, request) for item in ready]
        requested = request.requested
        loose = sum([item.byte_size for item in ready if requested[item.name].place is None])
        inline = loose <= INLINE_LIMIT
        taken: list[int] = []
        try:
            data = [
                self._put(item, requested[item.name].place, inline, request.work.client_pid, taken)
                for item in ready
            ]
        except BaseException:
            self._context.output_memory.take_back(taken)
            raise
        return self._packer.pack(ready, data, request, response)

    def _lacks(self, request: Request, made: set[str]) -> None:
        """The model has not made all that it was asked for, as Triton's Python models may. Where
        that was to be written, nothing is left that its client could take for an answer."""
        lacking = [name for name in request.requested if name not in made]
        for name in lacking:
            place = request.requested[name].place
            if place is not None:
                size = place.byte_size
                nothing = Ready(name, "UINT8", (size,), bytes(size), size)
                self._put(nothing, place, True, request.work.client_pid, [])
        if self._whole:
            self._whole = False  # once is enough
            logger.warning(
                "model '%s' was asked for outputs that it has not made: %s (not said again)",
                self._signature.name,
                ", ".join(lacking),
            )

    def _prepare(self, output: Output, spec: TensorSpec, request: Request) -> Ready:
        wanted, at = request.requested[output.name], None
        place = wanted.place
        if place is not None and place.memory.cuda is not None and output.datatype != "BYTES":
            array = _any_tensor(output)
        else:
            array = _host_array(output)
            at = request.returned(array) if place is not None and wanted.or_input else None
        shape = tuple(array.shape)
        if self._strict:
            self._check(output, spec, shape, request)
        if spec.reshape is not None:
            shape = self._client_shape(shape, spec)
        if output.datatype == "BYTES":
            data = encode_bytes(array)
            return Ready(output.name, "BYTES", shape, data, len(data))
        return Ready(output.name, output.datatype, shape, array, array.nbytes, at)

    def _check(
        self, output: Output, spec: TensorSpec, shape: tuple[int, ...], request: Request
    ) -> None:
        if output.datatype != spec.datatype:
            raise Internal(
                f"unexpected datatype {TO_CONFIG[output.datatype]} for inference output "
                f"'{output.name}', expecting {TO_CONFIG[spec.datatype]}"
            )
        dims = spec.model_dims
        expected = (request.batch_size, *dims) if self._batched else dims
        if not agree(expected, shape):
            raise Internal(
                f"unexpected shape for inference output '{output.name}' for model "
                f"'{self._signature.name}'. Expected {shape_text(expected)}, got "
                f"{shape_text(shape)}."
            )

    def _client_shape(self, shape: tuple[int, ...], spec: TensorSpec) -> tuple[int, ...]:
        # Only a shape that is the one before the reshape is reshaped; what else a model returned
        # passes as it is.
        dims = spec.reshape or ()
        head, rest = (shape[:1], shape[1:]) if self._batched else ((), shape)
        return (*head, *reshape(rest, dims, spec.dims)) if agree(dims, rest) else shape

    def _put(
        self,
        item: Ready,
        place: Place | None,
        inline: bool,
        client_pid: int,
        taken: list[int],
    ) -> bytes | Place:
        """Write an output; where it is then."""
        data: bytes | Place
        if item.at is not None:
            data = item.at
        elif place is not None:
            if item.byte_size > place.byte_size:
                raise Internal(
                    f"shared memory size specified with the request for output '{item.name}' "
                    f"({place.byte_size} bytes) should be at least {item.byte_size} bytes to hold "
                    "the results"
                )
            data = place
            if item.byte_size != place.byte_size:
                data = Place(place.memory, place.offset, item.byte_size)
            if place.memory.cuda is not None:
                self._put_on_device(item, data, place.memory.cuda.device)
            elif place.memory.copied:
                raw = item.data
                self._context.mappings.write(data, raw if isinstance(raw, bytes) else raw.tobytes())
                self._context.copied.outputs += item.byte_size
            else:
                self._context.copied.outputs += self._write(item, self._context.mappings.view(data))
        elif inline:
            data = item.data if isinstance(item.data, bytes) else item.data.tobytes()
            self._context.copied.outputs += item.byte_size
        else:
            data = self._put_in_arena(item, client_pid)
            taken.append(data.offset)
        return data

    def _put_in_arena(self, item: Ready, client_pid: int) -> Place:
        if isinstance(item.data, np.ndarray) and item.data.flags.c_contiguous:
            address = item.data.__array_interface__["data"][0]
            claimed = self._context.output_memory.claim(client_pid, address, item.byte_size)
            if claimed is not None:  # the model computed it there
                return claimed
        place, view = self._context.output_memory.allocate(client_pid, item.byte_size)
        try:
            self._context.copied.outputs += self._write(item, view)
        except BaseException:
            self._context.output_memory.take_back([place.offset])
            raise
        return place

    def _put_on_device(self, item: Ready, place: Place, device: int) -> None:
        destination = self._context.mappings.view(place)
        if not item.byte_size:
            return
        assert self._context.device_memory is not None
        data = item.data
        if isinstance(data, bytes):
            from shmserve.workers.memory.device_tensors import as_bytes

            data = as_bytes(bytearray(data))
        self._context.copied.outputs += self._context.device_memory.write(destination, data, device)

    def _write(self, item: Ready, destination: memoryview) -> int:
        """Put the bytes where they go; how many were copied."""
        size = item.byte_size
        if not size:
            return 0
        if isinstance(item.data, bytes):
            destination[:] = item.data
            return size
        # One copy, strided or not; an output may be a view of the very bytes it goes to.
        target: Array = np.ndarray(item.data.shape, item.data.dtype, destination)
        if size >= _WORTH_A_LOOK:
            if not np.may_share_memory(target, item.data):
                self._copier.copy(target, item.data)
                return size
            if _same(target, item.data):
                return 0  # the model computed it there
        np.copyto(target, item.data)
        return size

    def settle(self) -> None:
        """Wait until what was written to devices is there; before a response says that it is.

        Raises DeviceLost when that fails.
        """
        if self._context.device_memory is not None:
            self._context.device_memory.settle()


def _detached(item: Ready, request: Request) -> Ready:
    """An output that shows an input, as a copy: another one may be written over that before."""
    data = item.data
    if isinstance(data, bytes):
        return item
    if not isinstance(data, np.ndarray):
        return item._replace(data=data.clone())
    views = [source.raw for source in request.inputs.values() if source.shared]
    if any(np.may_share_memory(data, raw) for raw in views if isinstance(raw, memoryview)):
        return item._replace(data=data.copy())
    return item


def _same(one: Array, other: Array) -> bool:
    """Whether two arrays of one shape and type are the very same bytes."""
    return other.flags.c_contiguous and bool(
        one.__array_interface__["data"][0] == other.__array_interface__["data"][0]
    )


def _any_tensor(output: Output) -> Any:
    """An output as a tensor, wherever it is."""
    from shmserve.workers.memory.torch_types import PROTOCOL, as_torch

    if isinstance(output.data, np.ndarray):
        array = np.ascontiguousarray(_host_array(output))
        return as_torch(output.datatype, array.shape, bytearray(array))
    kind = PROTOCOL.get(output.data.dtype)
    if kind != output.datatype:
        raise Internal(
            f"inference output '{output.name}' was given as {output.data.dtype}, which is not "
            f"{output.datatype}"
        )
    return output.data


def _host_array(output: Output) -> Array:
    name, datatype, data = output
    if datatype not in ITEM_SIZE:
        raise Internal(f"inference output '{name}' has an unknown datatype")
    if not isinstance(data, np.ndarray):
        from shmserve.workers.memory.torch_types import host_array

        data = host_array(data)
    if datatype == "BYTES":
        return data
    kind = STORED[datatype]
    if data.dtype == kind:
        return data
    if data.dtype.newbyteorder("=") != kind:
        raise Internal(
            f"inference output '{name}' was given as {data.dtype}, which is not {datatype}"
        )
    swapped: Array = data.astype(kind)
    return swapped
