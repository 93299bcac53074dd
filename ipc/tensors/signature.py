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
from shmserve.ipc.tensors.descriptors import MAX_INT64, TensorRef
from shmserve.ipc.tensors.padding import Pad
from shmserve.ipc.tensors.schemas import OutputSchema, RequestedOutput, RequestSchema
from shmserve.ipc.transport.frames import Record

# The limit of the product of an empty tensor's other dimensions. No machine has memory for so many
# elements, but the strides of numpy arrays with such dimensions still fit into 63 bits.
_MAX_EMPTY_ELEMENTS = 2**44
_STOPPING_TEXT = (
    "Server is stopping, scheduler for model has stopped accepting new inference requests"
)
_BATCH_NOTE = (
    " NOTE: Setting a non-zero max_batch_size in the model config requires a batch dimension to be "
    "prepended to each input shape. If you want to specify the full shape including the batch dim "
    "in your input dims config, try setting max_batch_size to zero. See the model configuration "
    "docs for more info on max_batch_size."
)


class BatchProperties(Record):
    """The batching properties of a request that matches its model's inputs and outputs.

    Attributes:
        batch_size: The rows of the request; 0 if the model does not batch.
        shape_key: The shape key. Requests with equal keys may share a batch.
    """

    batch_size: int
    shape_key: bytes


class _UnknownTensorError(InvalidArgument):
    """A request with an input or output that the model does not have."""


class Signature:
    """A model version's inputs and outputs by name."""

    def __init__(self, config: ModelSpec, version: str) -> None:
        self.name = config.name
        self.version = version
        self.max_batch_size = config.max_batch_size
        self.inputs = {spec.name: spec for spec in config.input}
        self.outputs = {spec.name: spec for spec in config.output}
        self.required_inputs = frozenset(s.name for s in self.inputs.values() if not s.optional)
        self.has_optional_inputs = len(self.required_inputs) != len(self.inputs)
        self.padding = config.padding

    def check(
        self, request_id: str, inputs: Sequence[TensorRef], outputs: Iterable[RequestedOutput]
    ) -> BatchProperties:
        """Check a request against the model.

        The worker checks the elements of BYTES inputs, because no other process reads them.

        Raises:
            InvalidArgument: The request does not fit. The text is Triton's, and starts with the id
                of the request except for unknown inputs and outputs.
        """
        try:
            return self._check(inputs, outputs, check_sizes=True)
        except _UnknownTensorError as error:
            raise InvalidArgument(error.message) from None
        except InvalidArgument as error:
            raise InvalidArgument(id_prefix(request_id) + error.message) from None

    def batch_properties(self, schema: bytes) -> BatchProperties:
        """Return the batching properties of requests with a packed schema.

        The sizes of their data are not checked.

        Raises:
            InvalidArgument: Requests of this schema do not fit the model.
            MalformedMessage: The bytes are not a request schema.
        """
        request_schema = RequestSchema(schema)
        return self._check(request_schema.inputs, request_schema.outputs, check_sizes=False)

    def output_size(self, name: str, batch_size: int) -> int | None:
        """Return the byte size of an output for a request of `batch_size` rows.

        Returns:
            The size, or None if it depends on the model's results.
        """
        spec = self.outputs[name]
        item_size = ITEM_SIZE[spec.datatype]
        if not item_size or not spec.is_static:
            return None
        return element_count(spec.dims) * item_size * (batch_size if self.max_batch_size else 1)

    def _check(
        self,
        inputs: Sequence[Any],
        outputs: Iterable[RequestedOutput | OutputSchema],
        *,
        check_sizes: bool,
    ) -> BatchProperties:
        input_names: set[str] = set()
        for tensor in inputs:
            if tensor.name in input_names:
                raise InvalidArgument(f"input '{tensor.name}' already exists in request")
            input_names.add(tensor.name)
        output_names: set[str] = set()
        for output in outputs:
            if output.name in output_names:
                text = f"Duplicate output name '{output.name}' is not allowed in a request"
                raise InvalidArgument(text)
            if output.name not in self.outputs:
                text = f"unexpected inference output '{output.name}' for model '{self.name}'"
                raise _UnknownTensorError(text)
            output_names.add(output.name)
        if len(input_names) != len(self.inputs) or self.has_optional_inputs:
            self._check_count(input_names)
        batch_size = self._batch_size(inputs) if self.max_batch_size > 0 else 0
        key_parts: list[object] = [sorted(input_names)] if self.has_optional_inputs else []
        padded_shapes: dict[str, tuple[int, ...]] = {}
        for tensor in inputs:
            spec = self.inputs.get(tensor.name)
            if spec is None:
                text = f"unexpected inference input '{tensor.name}' for model '{self.name}'"
                raise _UnknownTensorError(text)
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
                    padded_shapes[tensor.name] = shape
                elif not spec.ragged:
                    key_parts.append((tensor.name, shape))
            if check_sizes:
                _check_size(tensor, self.name)
        # Sorted, because clients send the inputs in any order and equal requests need equal keys.
        shape_key = repr(sorted(key_parts, key=repr)).encode() if key_parts else b""
        if self.padding is not None:
            shape_key = self.padding.key(shape_key, padded_shapes)
        return BatchProperties(batch_size, shape_key)

    def _batch_size(self, inputs: Sequence[Any]) -> int:
        # The batch dimension is checked before the shapes, because Triton has errors of its own for
        # a wrong and for a missing batch dimension.
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
            text = (
                f"inference request batch-size must be <= {self.max_batch_size} for '{self.name}'"
            )
            for tensor in inputs:
                spec = self.inputs.get(tensor.name)
                if spec is not None and len(tensor.shape) == len(spec.dims):
                    shape = shape_text(tensor.shape)
                    text += f" (input '{tensor.name}': {shape} has no batch dimension)"
            raise InvalidArgument(text)
        return max(batch_size, 0)

    def _check_count(self, names: set[str]) -> None:
        missing_inputs = [n for n in self.inputs if n in self.required_inputs and n not in names]
        is_count_valid = len(self.required_inputs) <= len(names) <= len(self.inputs)
        # As in Triton, an unknown name is reported first if the count of inputs is valid.
        if is_count_valid and (not missing_inputs or not names <= self.inputs.keys()):
            return
        received_text = f"Got input(s) [{_quoted_names(sorted(names))}]"
        suffix = hint = ""
        if missing_inputs:
            suffix = f", but missing required input(s) [{_quoted_names(missing_inputs)}]"
            hint = " Please provide all required input(s)."
        expected_text = f"{len(self.inputs)} inputs"
        if self.has_optional_inputs:
            counts = f"{len(self.required_inputs)} and {len(self.inputs)}"
            expected_text = f"number of inputs between {counts}"
        raise InvalidArgument(
            f"expected {expected_text} but got {len(names)} inputs for model '{self.name}'. "
            f"{received_text}{suffix}.{hint}"
        )

    def _check_dims(self, tensor: Any, spec: TensorSpec, shape: tuple[int, ...]) -> None:
        if shapes_match(spec.dims, shape):
            return
        is_batched = self.max_batch_size > 0
        expected_dims = (-1, *spec.dims) if is_batched else spec.dims
        raise InvalidArgument(
            f"unexpected shape for input '{tensor.name}' for model '{self.name}'. Expected "
            f"{shape_text(expected_dims)}, got "
            f"{shape_text(tensor.shape)}.{_BATCH_NOTE if is_batched else ' '}"
        )

    def _check_bucket(self, pad: Pad, shape: tuple[int, ...]) -> None:
        if pad.padded_shape(shape) is None:
            buckets = ", ".join(map(shape_text, pad.buckets))
            raise InvalidArgument(
                f"unexpected shape for input '{pad.name}' for model '{self.name}'. "
                f"{shape_text(shape)} fits no bucket (without the batch dimension: {buckets})"
            )


def id_prefix(request_id: str) -> str:
    """Return the prefix of Triton's error texts that name the request."""
    return f"[request id: {request_id or '<id_unknown>'}] "


def stopping_text(request_id: str, *, of_sequence: bool = False) -> str:
    """Return the error text for a request that is rejected because the server stops.

    As in Triton, the text for a request of a sequence omits the id if the client sent none.
    """
    return (
        _STOPPING_TEXT if of_sequence and not request_id else id_prefix(request_id) + _STOPPING_TEXT
    )


def shapes_match(first_shape: Sequence[int], second_shape: Sequence[int]) -> bool:
    """Return whether two shapes match; -1 in either of them matches any size."""
    pairs = zip(first_shape, second_shape, strict=True)
    return len(first_shape) == len(second_shape) and all(a == b or -1 in (a, b) for a, b in pairs)


def reshape(
    shape: tuple[int, ...], dims: tuple[int, ...], target: tuple[int, ...]
) -> tuple[int, ...]:
    """Return `target` with the sizes of `shape` in place of -1, in order; `shape` matches `dims`.

    >>> reshape((5, 7), (-1, 7), (7, -1))
    (7, 5)
    """
    sizes = iter([size for size, dim in zip(shape, dims, strict=True) if dim == -1])
    return tuple(next(sizes) if dim == -1 else dim for dim in target)


def model_shape(spec: TensorSpec, shape: tuple[int, ...], is_batched: bool) -> tuple[int, ...]:
    """Return the shape in which the model receives an input that a client sends with `shape`."""
    if spec.reshape is None:
        return shape
    return (*shape[:is_batched], *reshape(shape[is_batched:], spec.dims, spec.reshape))


def client_shape(spec: TensorSpec, shape: tuple[int, ...], is_batched: bool) -> tuple[int, ...]:
    """Return the clients' shape of an output that the model returns with `shape`.

    A shape that does not match the configured `reshape` is returned unchanged.
    """
    if spec.reshape is None or not shapes_match(spec.reshape, shape[is_batched:]):
        return shape
    return (*shape[:is_batched], *reshape(shape[is_batched:], spec.reshape, spec.dims))


def shape_text(shape: Sequence[int]) -> str:
    """Return a shape in Triton's format: [1,16]."""
    return "[" + ",".join(map(str, shape)) + "]"


def check_extent(name: str, shape: Sequence[int], count: int, item_size: int) -> None:
    """Check that the extent of an input fits into signed 64-bit integers.

    Args:
        name: The name of the input.
        shape: Its shape.
        count: Its number of elements.
        item_size: The byte size of an element; 0 if the size varies.

    Raises:
        InvalidArgument: A dimension, the number of elements or the byte size is too large.
    """
    problem = f"invalid shape for input '{name}': shape {shape_text(shape)}"
    if any(dim > MAX_INT64 for dim in shape):
        raise InvalidArgument(f"{problem} contains one or more invalid dimensions")
    if count > MAX_INT64:
        text = f"{problem} causes total element count to exceed maximum size of {MAX_INT64}"
        raise InvalidArgument(text)
    if count * item_size > MAX_INT64:
        raise InvalidArgument(
            f"byte size overflow for input '{name}': "
            f"element count ({count}) * data type size ({item_size}) "
            f"exceeds maximum allowed size ({MAX_INT64})"
        )


def _quoted_names(names: Iterable[str]) -> str:
    return ",".join(f"'{name}'" for name in names)


def _check_size(tensor: TensorRef, model: str) -> None:
    item_size = ITEM_SIZE[tensor.datatype]
    count = element_count(tensor.shape)
    expected_size = count * item_size
    if expected_size > MAX_INT64:
        check_extent(tensor.name, tensor.shape, count, item_size)
    # An array with a dimension of 0 is empty, but its other dimensions may still be too large.
    if not count and element_count([dim for dim in tensor.shape if dim]) > _MAX_EMPTY_ELEMENTS:
        raise InvalidArgument(f"input '{tensor.name}' for model '{model}' is too large")
    if not item_size:
        return
    data = tensor.data
    size = len(data) if isinstance(data, bytes) else data.byte_size
    if size != expected_size:
        raise InvalidArgument(
            f"input byte size mismatch for input '{tensor.name}' for model '{model}'. Expected "
            f"{expected_size}, got {size}"
        )
