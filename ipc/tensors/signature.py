"""The signature of a model (its inputs and outputs), and the check of requests against it (no I/O).

Gateways, local clients, and models that call other models use the same check. The error texts are
Triton's.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from shmserve.errors import InvalidArgument
from shmserve.ipc.model_spec import ModelSpec, TensorSpec
from shmserve.ipc.tensors.datatypes import ITEM_SIZE, element_count
from shmserve.ipc.tensors.descriptors import LARGEST, TensorRef
from shmserve.ipc.tensors.inference import OutputSchema, RequestedOutput, RequestSchema
from shmserve.ipc.tensors.padding import Pad
from shmserve.ipc.transport.records import record

# More elements than any machine has memory for. The strides of a batch of such arrays still fit
# into 63 bits, for every datatype.
_MOST_ELEMENTS = 2**44
_STOPPING = "Server is stopping, scheduler for model has stopped accepting new inference requests"
_BATCH_NOTE = (
    " NOTE: Setting a non-zero max_batch_size in the model config requires a batch dimension to be "
    "prepended to each input shape. If you want to specify the full shape including the batch dim "
    "in your input dims config, try setting max_batch_size to zero. See the model configuration "
    "docs for more info on max_batch_size."
)


@record
class BatchFit:
    """The batching properties of a request that fits its model.

    Attributes:
        batch_size: The rows of the request; 0 if the model does not batch.
        shape_key: The shape key. Requests with equal keys may share a batch.
    """

    batch_size: int
    shape_key: bytes


class _Unexpected(InvalidArgument):
    """A request with an input or output that the model does not have."""


class Signature:
    """A model version's inputs and outputs by name."""

    def __init__(self, config: ModelSpec, version: str) -> None:
        self.name = config.name
        self.version = version
        self.max_batch_size = config.max_batch_size
        self.inputs = {spec.name: spec for spec in config.input}
        self.outputs = {spec.name: spec for spec in config.output}
        self.required = frozenset(s.name for s in self.inputs.values() if not s.optional)
        self.any_optional = len(self.required) != len(self.inputs)
        self.padding = config.padding

    def check(
        self,
        request_id: str,
        inputs: Sequence[TensorRef],
        outputs: Iterable[RequestedOutput],
    ) -> BatchFit:
        """Check a request against the model.

        Input byte sizes must already match `data`. The elements of BYTES inputs are checked by the
        worker, because only the worker reads them.

        Raises:
            InvalidArgument: The request does not fit. The text is Triton's, and starts with the id
                of the request except for unknown inputs and outputs.
        """
        try:
            return self._check(inputs, outputs, sized=True)
        except _Unexpected as error:
            raise InvalidArgument(error.message) from None
        except InvalidArgument as error:
            raise InvalidArgument(id_prefix(request_id) + error.message) from None

    def fit(self, schema: bytes) -> BatchFit:
        """Return the batching properties of requests with a packed schema.

        The sizes of their data are not checked.

        Raises:
            InvalidArgument: Requests of this schema do not fit the model.
            MalformedMessage: The bytes are not a request schema.
        """
        unpacked = RequestSchema(schema)
        return self._check(unpacked.inputs, unpacked.outputs, sized=False)

    def output_size(self, name: str, batch_size: int) -> int | None:
        """Return the byte size of an output for a request of `batch_size` rows.

        Returns:
            The size, or None if it depends on the model's results.
        """
        spec = self.outputs[name]
        item = ITEM_SIZE[spec.datatype]
        if not item or not spec.static:
            return None
        return element_count(spec.dims) * item * (batch_size if self.max_batch_size else 1)

    def _check(
        self,
        inputs: Sequence[Any],
        outputs: Iterable[RequestedOutput | OutputSchema],
        *,
        sized: bool,
    ) -> BatchFit:
        names: set[str] = set()
        for tensor in inputs:
            if tensor.name in names:
                raise InvalidArgument(f"input '{tensor.name}' already exists in request")
            names.add(tensor.name)
        requested: set[str] = set()
        for output in outputs:
            if output.name in requested:
                raise InvalidArgument(f"output '{output.name}' already exists in request")
            if output.name not in self.outputs:
                raise _Unexpected(
                    f"unexpected inference output '{output.name}' for model '{self.name}'"
                )
            requested.add(output.name)
        if len(names) != len(self.inputs) or self.any_optional:
            self._check_count(names)
        batch_size = self._batch_size(inputs) if self.max_batch_size > 0 else 0
        key: list[object] = [sorted(names)] if self.any_optional else []
        padded: dict[str, tuple[int, ...]] = {}
        for tensor in inputs:
            spec = self.inputs.get(tensor.name)
            if spec is None:
                raise _Unexpected(
                    f"unexpected inference input '{tensor.name}' for model '{self.name}'"
                )
            shape = tensor.shape
            if tensor.datatype != spec.datatype:
                raise InvalidArgument(
                    f"inference input '{tensor.name}' data-type is '{tensor.datatype}', "
                    f"but model '{self.name}' expects '{spec.datatype}'"
                )
            if self.max_batch_size > 0:
                shape = shape[1:]
            if shape != spec.dims:
                self._check_dims(tensor, spec, shape)
                if self.padding is not None and tensor.name in self.padding.pads:
                    self._check_bucket(self.padding.pads[tensor.name], shape)
                    padded[tensor.name] = shape
                elif not spec.ragged:
                    key.append((tensor.name, shape))
            if sized:
                _check_size(tensor, self.name)
        # Sorted, because clients send the inputs in any order and equal requests need equal keys.
        shape_key = repr(sorted(key, key=repr)).encode() if key else b""
        if self.padding is not None:
            shape_key = self.padding.key(shape_key, padded)
        return BatchFit(batch_size, shape_key)

    def _batch_size(self, inputs: Sequence[Any]) -> int:
        # Checked before the shapes: a wrong or missing batch dimension needs an error of its own.
        batch_size = -1
        for tensor in inputs:
            shape = tensor.shape
            if not shape:
                raise InvalidArgument(
                    f"input '{tensor.name}' has no shape but model requires batch dimension "
                    f"for '{self.name}'"
                )
            if batch_size == -1:
                batch_size = shape[0]
            elif shape[0] != batch_size:
                raise InvalidArgument(
                    f"input '{tensor.name}' batch size does not match other inputs for "
                    f"'{self.name}'"
                )
        if batch_size > self.max_batch_size:
            raise InvalidArgument(
                f"inference request batch-size must be <= {self.max_batch_size} for '{self.name}'"
            )
        return max(batch_size, 0)

    def _check_count(self, names: set[str]) -> None:
        missing = [name for name in self.inputs if name in self.required and name not in names]
        if not missing and len(names) <= len(self.inputs):
            return
        received = f"Got input(s) [{_names(sorted(names))}]"
        lost = f", but missing required input(s) [{_names(missing)}]" if missing else ""
        hint = " Please provide all required input(s)." if missing else ""
        if self.any_optional:
            raise InvalidArgument(
                f"expected number of inputs between {len(self.required)} and {len(self.inputs)} "
                f"but got {len(names)} inputs for model '{self.name}'. {received}{lost}.{hint}"
            )
        raise InvalidArgument(
            f"expected {len(self.inputs)} inputs but got {len(names)} inputs for model "
            f"'{self.name}'. {received}{lost}.{hint}"
        )

    def _check_dims(self, tensor: Any, spec: TensorSpec, shape: tuple[int, ...]) -> None:
        if agree(spec.dims, shape):
            return
        batched = self.max_batch_size > 0
        expected = (-1, *spec.dims) if batched else spec.dims
        raise InvalidArgument(
            f"unexpected shape for input '{tensor.name}' for model '{self.name}'. Expected "
            f"{shape_text(expected)}, got "
            f"{shape_text(tensor.shape)}.{_BATCH_NOTE if batched else ' '}"
        )

    def _check_bucket(self, pad: Pad, shape: tuple[int, ...]) -> None:
        if pad.padded(shape) is None:
            buckets = ", ".join(map(shape_text, pad.buckets))
            raise InvalidArgument(
                f"unexpected shape for input '{pad.name}' for model '{self.name}'. Its "
                f"buckets are {buckets} behind the batch dimension; {shape_text(shape)} fits none"
            )


def id_prefix(request_id: str) -> str:
    """Return the prefix of Triton's error texts that name the request."""
    return f"[request id: {request_id or '<id_unknown>'}] "


def stopping(request_id: str, *, of_sequence: bool = False) -> str:
    """Return the error text for a request that is rejected because the server stops.

    As in Triton, the text for a request of a sequence omits the id if the client sent none.
    """
    return _STOPPING if of_sequence and not request_id else id_prefix(request_id) + _STOPPING


def agree(one: Sequence[int], other: Sequence[int]) -> bool:
    """Return whether two shapes match; -1 in either of them matches any size."""
    return len(one) == len(other) and all(
        a == b or -1 in (a, b) for a, b in zip(one, other, strict=True)
    )


def shape_text(shape: Sequence[int]) -> str:
    """Return a shape in Triton's format: [1,16]."""
    return "[" + ",".join(map(str, shape)) + "]"


def check_extent(name: str, shape: Sequence[int], count: int, item: int) -> None:
    """Check that the extent of an input fits into signed 64-bit integers.

    Args:
        name: The name of the input.
        shape: Its shape.
        count: Its number of elements.
        item: The byte size of an element; 0 if the size varies.

    Raises:
        InvalidArgument: A dimension, the number of elements or the byte size is too large.
    """
    text = f"invalid shape for input '{name}': shape {shape_text(shape)}"
    if any(dim > LARGEST for dim in shape):
        raise InvalidArgument(f"{text} contains one or more invalid dimensions")
    if count > LARGEST:
        raise InvalidArgument(
            f"{text} causes total element count to exceed maximum size of {LARGEST}"
        )
    if count * item > LARGEST:
        raise InvalidArgument(
            f"byte size overflow for input '{name}': "
            f"element count ({count}) * data type size ({item}) "
            f"exceeds maximum allowed size ({LARGEST})"
        )


def _names(names: Iterable[str]) -> str:
    return ",".join(f"'{name}'" for name in names)


def _check_size(tensor: TensorRef, model: str) -> None:
    item = ITEM_SIZE[tensor.datatype]
    count = element_count(tensor.shape)
    expected = count * item
    if expected > LARGEST:
        check_extent(tensor.name, tensor.shape, count, item)
    # An array with a dimension of 0 is empty, but its other dimensions may still be too large.
    if not count and element_count([dim for dim in tensor.shape if dim]) > _MOST_ELEMENTS:
        raise InvalidArgument(f"input '{tensor.name}' for model '{model}' is too large")
    if not item:
        return
    data = tensor.data
    size = len(data) if isinstance(data, bytes) else data.byte_size
    if size != expected:
        raise InvalidArgument(
            f"input byte size mismatch for input '{tensor.name}' for model '{model}'. Expected "
            f"{expected}, got {size}"
        )
