"""Unpacking: packed `Inference`s to requests with zero-copy views of their inputs, checked against
the model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from shmserve.errors import InvalidArgument
from shmserve.ipc.memory.mappings import Mappings
from shmserve.ipc.messages.inference import Work
from shmserve.ipc.model_spec import TensorSpec
from shmserve.ipc.tensors.datatypes import ITEM_SIZE, element_count
from shmserve.ipc.tensors.descriptors import Place, TensorRef
from shmserve.ipc.tensors.inference import Inference, RequestedOutput, unpack_inference
from shmserve.ipc.tensors.signature import Signature, id_prefix
from shmserve.ipc.tensors.template_cache import TemplateCache
from shmserve.workers.batch.request import Copied, Input, Request, never_cancelled


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


class _Template(NamedTuple):
    """A packed request that was read: its inputs with the shapes that the model sees and where they
    lie (None: inline) and how many are inline before them, and what responses to such requests were
    packed to (see `Request.known`)."""

    inference: Inference
    tensors: list[tuple[TensorRef, tuple[int, ...], Place | None, int]]
    batch_size: int
    requested: dict[str, RequestedOutput]
    known: dict[Any, Any]
    aliased: bool
    byte_size: int
    placed: bool
    shared: bool
    strings: list[str]  # the names of its BYTES inputs


@dataclass(eq=False)
class Unpacker:
    """Makes `Request`s of packed `Inference`s for one model.

    `device_inputs`: what is in device memory is left there; else it is copied to the host's.
    """

    _signature: Signature
    _mappings: Mappings
    _copied: Copied = field(default_factory=Copied)
    _device_inputs: bool = False
    _templates: TemplateCache[_Template] = field(default_factory=TemplateCache)

    def __post_init__(self) -> None:
        self._batched = self._signature.max_batch_size > 0
        self._all_outputs = {name: RequestedOutput(name) for name in self._signature.outputs}
        self._known: dict[int, dict[Any, Any]] = {}  # of requests for these, by batch size

    def request(
        self,
        work: Work,
        is_cancelled: Callable[[], bool] = never_cancelled,
    ) -> Request:
        """One request of a batch.

        Raises MalformedMessage for work that is none, InvalidArgument or Unavailable when a
        tensor's memory is not there.
        """
        inputs: dict[str, Input] = {}
        packed = work.work
        template, inline = self._templates.find(packed) or self._read(packed)
        model = self._signature.name
        for tensor, shape, place, index in template.tensors:
            name = tensor.name
            if place is not None:
                inputs[name] = self._placed(tensor, shape, place)
                continue
            # A copy of a few bytes that the model may write into.
            raw = memoryview(bytearray(inline[index]))
            self._copied.inputs += raw.nbytes
            inputs[name] = Input(name, tensor.datatype, shape, raw, None, model)
        if template.strings:
            _check_elements(inputs, template.strings, work.request_id)
        return Request(
            work,
            template.inference,
            template.batch_size,
            inputs,
            template.requested,
            is_cancelled,
            template.known,
            template.aliased,
            template.byte_size,
            template.placed,
            template.shared,
        )

    def _read(self, packed: bytes) -> tuple[_Template, list[bytes]]:
        """The template of a packed request, and the bytes of its inline tensors."""
        inference = unpack_inference(packed)
        tensors: list[tuple[TensorRef, tuple[int, ...], Place | None, int]] = []
        inline: list[bytes] = []
        batch_size = byte_size = 0
        for tensor in inference.inputs:
            shape, data = self._checked_shape(tensor), tensor.data
            if isinstance(data, bytes):
                tensors.append((tensor, shape, None, len(inline)))
                inline.append(data)
                byte_size += len(data)
            else:
                tensors.append((tensor, shape, data, len(inline)))
                byte_size += data.byte_size
            if self._batched:
                batch_size = tensor.shape[0]
        known: dict[Any, Any] = {}
        if not inference.outputs:
            requested = self._all_outputs
            known = self._known.setdefault(batch_size, known)
        else:
            requested = {output.name: output for output in inference.outputs}
        template = _Template(
            inference,
            tensors,
            batch_size,
            requested,
            known,
            inference.aliased,
            byte_size,
            placed=any(output.place is not None for output in inference.outputs),
            shared=len(inline) < len(tensors),
            strings=[tensor.name for tensor in inference.inputs if tensor.datatype == "BYTES"],
        )
        self._templates.learn(packed, inference, template)
        return template, inline

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

    def _placed(self, tensor: TensorRef, shape: tuple[int, ...], data: Place) -> Input:
        """The input that lies in memory."""
        place: Place | None = None
        on_device = shared = False
        if data.memory.copied:
            raw = self._mappings.read(data)
            self._copied.inputs += len(raw)
        else:
            place = data
            raw = self._mappings.view(data)
            shared = tensor.datatype != "BYTES"
            on_device = data.memory.cuda is not None
            if on_device and not (shared and self._device_inputs):
                from shmserve.workers.memory.tensors import to_host

                self._copied.inputs += len(raw)
                raw, place = to_host(raw), None
                on_device = shared = False
        model = self._signature.name
        return Input(tensor.name, tensor.datatype, shape, raw, place, model, on_device, shared)

    def _model_shape(self, shape: tuple[int, ...], spec: TensorSpec) -> tuple[int, ...]:
        if self._batched:
            return (shape[0], *reshape(shape[1:], spec.dims, spec.reshape))
        return reshape(shape, spec.dims, spec.reshape)


def _check_elements(inputs: dict[str, Input], names: Sequence[str], request_id: str) -> None:
    """Raises InvalidArgument for strings whose lengths do not add up: now, so that they fail this
    request and not its batch, and for all inputs that have any."""
    wrong: list[str] = []
    for name in names:
        try:
            inputs[name].numpy()
        except InvalidArgument as error:
            wrong.append(error.message)
    if wrong:
        raise InvalidArgument(id_prefix(request_id) + "; ".join(wrong))
