"""A worker's response before a protocol encodes it: unpacked, checked, and with the classification
extension applied: top-k of an output, each value with its index and label.

[0.1, 0.7, 0.2], the 2 largest, labels cat dog cow  ->  "0.700000:1:dog" "0.200000:2:cow"
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shmserve.errors import Internal, InvalidArgument
from shmserve.gateway.context import Gateway
from shmserve.gateway.inference.request import InferRequest
from shmserve.gateway.model_table import GatewayModel
from shmserve.ipc.tensors.arrays import NUMPY
from shmserve.ipc.tensors.datatypes import ITEM_SIZE, element_count
from shmserve.ipc.tensors.descriptors import TensorRef
from shmserve.ipc.tensors.inference import Inferred, ResponseSchema
from shmserve.ipc.tensors.schemas import Schemas
from shmserve.ipc.transport.records import MalformedMessage

logger = logging.getLogger(__name__)


# Of all models: what follows from a response's schema is the same for each.
_SCHEMAS: Schemas[ResponseSchema] = Schemas(ResponseSchema)


def unpack(schema: bytes, data: Sequence[Any]) -> Inferred:
    """Return the outputs of a response. Raises Internal when it is malformed."""
    try:
        return (_SCHEMAS.find(schema) or _SCHEMAS.learn(schema)).inferred(data)
    except MalformedMessage as error:
        logger.error("a worker's response is malformed: %s", error)
        raise Internal("internal error") from None


def check_size(tensor: TensorRef, size: int) -> None:
    """The model must have given as many bytes as its shape says; raises Internal."""
    item = ITEM_SIZE[tensor.datatype]
    if item and size != element_count(tensor.shape) * item:
        raise Internal(f"output '{tensor.name}' does not have the byte size of its shape")


def output_bytes(gateway: Gateway, tensor: TensorRef) -> bytes | memoryview:
    """An output where it lies, as many bytes as its shape says; raises Internal for others."""
    raw = tensor.data
    data = raw if isinstance(raw, bytes) else gateway.mappings.view(raw)
    check_size(tensor, len(data))
    return data


_MOST_ELEMENTS = 1_000_000
_UNSORTED = frozenset(("BOOL", "FP16", "BF16", "BYTES"))  # as in Triton


def classified_as_requested(
    gateway: Gateway, model: GatewayModel, request: InferRequest, inferred: Inferred
) -> Inferred:
    """A response with those of its outputs classified that the request wants so: as BYTES tensors
    of their largest values, those of each row where the model batches. Raises InvalidArgument for
    an output that cannot be sorted."""
    classes = request.classes
    if not classes:
        return inferred
    batched = bool(model.signature.max_batch_size)

    def shown(tensor: TensorRef) -> TensorRef:
        count = classes.get(tensor.name, 0)
        if not count:
            return tensor
        raw = tensor.data
        data = raw if isinstance(raw, bytes) else gateway.mappings.view(raw)
        return _shown(tensor, data, count, model.labels.get(tensor.name, ()), batched=batched)

    return replace(inferred, outputs=tuple(map(shown, inferred.outputs)))


def _shown(
    tensor: TensorRef,
    data: bytes | memoryview,
    count: int,
    labels: Sequence[str],
    *,
    batched: bool,
) -> TensorRef:
    datatype, elements = tensor.datatype, element_count(tensor.shape)
    if datatype in _UNSORTED:
        raise InvalidArgument(
            f"class result not available for output due to unsupported type '{datatype}'"
        )
    if elements > _MOST_ELEMENTS:
        raise InvalidArgument("classification output tensor too large")
    if len(data) != elements * ITEM_SIZE[datatype]:
        return tensor  # whoever sends it finds the fault
    batch = tensor.shape[:1] if batched else ()
    values = np.frombuffer(data, NUMPY[datatype])
    rows = values.reshape(batch[0], -1) if elements and batch else values.reshape(1, -1)
    shown = min(count, rows.shape[1])
    texts = [text for row in rows for text in _texts(row, shown, labels)]
    packed = b"".join(len(text).to_bytes(4, "little") + text for text in texts)
    return TensorRef(tensor.name, "BYTES", (*batch, shown), packed)


def _texts(row: NDArray[np.generic], count: int, labels: Sequence[str]) -> list[bytes]:
    texts = []
    for index in largest(row, count):
        value = row[index].item()
        text = f"{value:.6f}:{index}" if isinstance(value, float) else f"{value}:{index}"
        if index < len(labels) and labels[index]:
            text += f":{labels[index]}"
        texts.append(text.encode())
    return texts


def largest(row: NDArray[np.generic], count: int) -> list[int]:
    """Top-k selection: the indices of the `count` largest values, in descending order; of equal
    ones the first comes first, and NaN is larger than any."""
    found = np.arange(len(row))
    if not count:
        return []
    if count < len(row):
        # Only what can be among them is sorted.
        least = np.partition(row, len(row) - count)[len(row) - count]
        found = np.flatnonzero(~(row < least))
    order = np.argsort(row[found][::-1], kind="stable")[::-1]
    indices: list[int] = found[::-1][order][:count].tolist()
    return indices
