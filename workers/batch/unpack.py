"""Work from the wire -> requests with views of their inputs -> the batch of each input.

rows next to each other in one memory, or a batch of one    a view: nothing is copied
anything else                                               one copy into a buffer kept

Rows in clients' device memory become a batch there, unless the backend wants host memory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from shmserve.errors import InvalidArgument
from shmserve.ipc.memory.mappings import Mappings
from shmserve.ipc.tensors.aliasing import aliased
from shmserve.ipc.tensors.datatypes import ITEM_SIZE, element_count
from shmserve.ipc.tensors.descriptors import Place, TensorRef
from shmserve.ipc.tensors.inference import Inference, RequestedOutput, unpack_inference
from shmserve.ipc.tensors.signature import Signature, TensorSpec, id_prefix
from shmserve.ipc.tensors.template_cache import TemplateCache
from shmserve.workers.batch.request import Copied, Input, Request

_ROOM_AT_ONCE = 64 * 1024 * 1024  # bytes that a buffer may get for batches yet to come


def reshape(
    shape: tuple[int, ...], dims: tuple[int, ...], target: tuple[int, ...] | None
) -> tuple[int, ...]:
    """`shape`, which fits `dims`, as `target` has it: variable sizes are carried over in order.

    >>> reshape((5, 7), (-1, 7), (7, -1))
    (7, 5)
    """
    if target is None:
        return shape
    sizes = iter([size for size, dim in zip(shape, dims, strict=True) if dim == -1])
    return tuple(next(sizes) if dim == -1 else dim for dim in target)


class _Form(NamedTuple):
    """A packed request that was read: its inputs with the shapes that the model sees, and what
    responses to such requests were packed to (see `Request.bodies`)."""

    inference: Inference
    tensors: list[tuple[TensorRef, tuple[int, ...]]]
    batch_size: int
    requested: dict[str, RequestedOutput]
    bodies: dict[Any, bytes]
    aliased: bool
    byte_size: int


class Unpacker:
    """Makes `Request`s of packed `Inference`s for one model.

    `device_inputs`: what is in device memory is left there; else it is copied to the host's.
    """

    def __init__(
        self,
        signature: Signature,
        mappings: Mappings,
        copied: Copied | None = None,
        device_inputs: bool = False,
    ) -> None:
        self._signature = signature
        self._batched = signature.max_batch_size > 0
        self._mappings = mappings
        self._copied = copied or Copied()
        self._device_inputs = device_inputs
        self._all_outputs = {name: RequestedOutput(name) for name in signature.outputs}
        self._templates: TemplateCache[_Form] = TemplateCache()

    def request(
        self,
        key: int,
        client_pid: int,
        work: bytes,
        is_cancelled: Callable[[], bool] = lambda: False,
    ) -> Request:
        """One request of a batch.

        Raises MalformedMessage for work that is none, InvalidArgument or Unavailable when a
        tensor's memory is not there.
        """
        inputs: dict[str, Input] = {}
        form, inline = self._templates.find(work) or (self._read(work), None)
        request_id = form.inference.request_id
        datas = iter(inline or ())
        for tensor, shape in form.tensors:
            data = tensor.data
            if inline and type(data) is bytes:
                data = next(datas)
            inputs[tensor.name] = self._input(tensor, shape, data, request_id)
        return Request(
            key,
            client_pid,
            form.inference,
            form.batch_size,
            inputs,
            form.requested,
            is_cancelled,
            form.bodies,
            form.aliased,
            form.byte_size,
        )

    def _read(self, work: bytes) -> _Form:
        inference = unpack_inference(work)
        tensors: list[tuple[TensorRef, tuple[int, ...]]] = []
        batch_size = byte_size = 0
        for tensor in inference.inputs:
            tensors.append((tensor, self._checked_shape(tensor)))
            data = tensor.data
            byte_size += len(data) if isinstance(data, bytes) else data.byte_size
            if self._batched:
                batch_size = tensor.shape[0]
        if not inference.outputs:
            requested = self._all_outputs
        else:
            requested = {output.name: output for output in inference.outputs}
        in_place = aliased(inference)
        form = _Form(inference, tensors, batch_size, requested, {}, in_place, byte_size)
        self._templates.learn(work, inference, form)
        return form

    def _checked_shape(self, tensor: TensorRef) -> tuple[int, ...]:
        """The shape that the model sees; raises InvalidArgument for what is no input of it."""
        spec = self._signature.inputs.get(tensor.name)
        shape, data = tensor.shape, tensor.data
        if spec is None or (self._batched and not shape):
            raise InvalidArgument(
                f"unexpected inference input '{tensor.name}' for model '{self._signature.name}'"
            )
        size = len(data) if isinstance(data, bytes) else data.byte_size
        expected = element_count(shape) * ITEM_SIZE[tensor.datatype]
        if expected and size != expected:
            raise InvalidArgument(
                f"input byte size mismatch for input '{tensor.name}' for model "
                f"'{self._signature.name}'. Expected {expected}, got {size}"
            )
        return shape if spec.reshape is None else self._model_shape(shape, spec)

    def _input(
        self, tensor: TensorRef, shape: tuple[int, ...], data: bytes | Place, request_id: str
    ) -> Input:
        place: Place | None = None
        if isinstance(data, bytes):
            # A copy of a few bytes that the model may write into.
            raw = memoryview(bytearray(data))
            self._copied.inputs += len(raw)
        elif data.memory.copied:
            raw = self._mappings.read(data)
            self._copied.inputs += len(raw)
        else:
            place = data
            raw = self._mappings.view(data)
            if data.memory.cuda is not None and not self._stays(tensor.datatype):
                raw, place = self._fetched(raw), None
        made = Input(tensor.name, tensor.datatype, shape, raw, place, self._signature.name)
        if tensor.datatype == "BYTES":
            _check_elements(made, request_id)
        return made

    def _stays(self, datatype: str) -> bool:
        return self._device_inputs and datatype != "BYTES"

    def _fetched(self, raw: Any) -> memoryview:
        from shmserve.workers.memory.device import to_host

        self._copied.inputs += len(raw)
        return to_host(raw)

    def _model_shape(self, shape: tuple[int, ...], spec: TensorSpec) -> tuple[int, ...]:
        if self._batched:
            return (shape[0], *reshape(shape[1:], spec.dims, spec.reshape))
        return reshape(shape, spec.dims, spec.reshape)


class Gatherer:
    """The rows of a batch's requests, one input at a time, as one stretch of bytes.

    `allocate(byte_size)` makes a writable host buffer (pinned where that helps); one an input is
    kept and grown. If a row is in device memory, so is what is gathered: a tensor of uint8.
    """

    def __init__(
        self,
        signature: Signature,
        mappings: Mappings,
        allocate: Callable[[int], memoryview],
        copied: Copied | None = None,
    ) -> None:
        self._most_rows = max(1, signature.max_batch_size)
        self._ragged = {spec.name for spec in signature.inputs.values() if spec.ragged}
        self._mappings = mappings
        self._allocate = allocate
        self._copied = copied or Copied()
        self._buffers: dict[str, memoryview] = {}
        self._on_device: Any = None  # DeviceBuffers, once there are any

    def gather(
        self, name: str, requests: Sequence[Request], own: bool = False
    ) -> tuple[Any, tuple[int, ...], bool]:
        """(bytes, shape, is a view) of input `name`, which all `requests` have; not for BYTES.

        The batch dimension of the shape is the sum of the requests'; an input with
        `allow_ragged_batch` always comes flat, one request after the other. The bytes hold until
        the next call for the same input. `own`: never a view.
        """
        inputs = [request.inputs[name] for request in requests]
        shape = self._batch_shape(name, inputs)
        if not own:
            raw = inputs[0].raw if len(inputs) == 1 else self._adjacent(inputs)
            if raw is not None:
                return raw, shape, inputs[0].place is not None
        total = sum(len(item.raw) for item in inputs)
        rows = sum(request.batch_size for request in requests)
        self._copied.inputs += total
        most = room(total, rows, self._most_rows)
        if any(item.on_device for item in inputs):
            return self._gather_on_device(name, inputs, most), shape, False
        buffer = self._buffer(name, total, most)
        at = 0
        for item in inputs:
            end = at + len(item.raw)
            buffer[at:end] = item.raw
            at = end
        return buffer[:total], shape, False

    def _batch_shape(self, name: str, inputs: list[Input]) -> tuple[int, ...]:
        first = inputs[0].shape
        if name in self._ragged:
            return (sum(element_count(item.shape) for item in inputs),)
        if len(inputs) == 1:
            return first
        return (sum(item.shape[0] for item in inputs), *first[1:])

    def _gather_on_device(self, name: str, inputs: list[Input], most: int) -> Any:
        if self._on_device is None:
            from shmserve.workers.memory.device import DeviceBuffers

            self._on_device = DeviceBuffers()
        return self._on_device.gather(name, [item.raw for item in inputs], most)

    def _adjacent(self, inputs: list[Input]) -> Any:
        first = inputs[0].place
        if first is None:
            return None
        end = first.offset
        for item in inputs:
            place = item.place
            if place is None or place.offset != end or place.memory.id != first.memory.id:
                return None
            end += place.byte_size
        return self._mappings.view(Place(first.memory, first.offset, end - first.offset))

    def _buffer(self, name: str, byte_size: int, most: int) -> memoryview:
        buffer = self._buffers.get(name)
        if buffer is None or len(buffer) < byte_size:
            self._buffers.pop(name, None)  # before there is another one
            buffer = self._buffers[name] = self._allocate(most)
        return buffer


def room(byte_size: int, rows: int, most_rows: int) -> int:
    """The bytes that a buffer is given in which the first batch has `byte_size` and `rows`.

    Small ones have room for the largest batch of such rows at once, and never grow unless rows get
    larger. What is beyond `_ROOM_AT_ONCE` grows with what comes: by a quarter more, so that it does
    so seldom.

    >>> room(1000, 2, 8)
    4000
    >>> room(2 << 30, 2, 32) == 5 << 29
    True
    """
    rows = max(1, rows)
    largest = (byte_size + rows - 1) // rows * max(most_rows, rows)
    return min(largest, max(byte_size + byte_size // 4, _ROOM_AT_ONCE))


def _check_elements(tensor: Input, request_id: str) -> None:
    # Now, so that wrong lengths fail this request and not its batch.
    try:
        tensor.numpy()
    except InvalidArgument as error:
        raise InvalidArgument(id_prefix(request_id) + error.message) from None


def gather_strings(name: str, requests: Sequence[Request]) -> np.ndarray[Any, Any]:
    """A BYTES input of a whole batch as one object array of `bytes`."""
    arrays = [request.inputs[name].numpy() for request in requests]
    return arrays[0] if len(arrays) == 1 else np.concatenate(arrays)
