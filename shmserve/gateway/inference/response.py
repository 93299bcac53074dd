"""The outputs of a response before a protocol encodes them: unpacked, checked and classified.

The classification extension replaces an output by its k largest values with index and label:

    [0.1, 0.7, 0.2], k = 2, labels cat dog cow  ->  "0.700000:1:dog" "0.200000:2:cow"
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


# Shared by all models, since the entry of a schema does not depend on the model.
_SCHEMAS: Schemas[ResponseSchema] = Schemas(ResponseSchema)


def unpack(schema: bytes, data: Sequence[Any]) -> Inferred:
    """Return the outputs of a response.

    Raises:
        Internal: The response is malformed.
    """
    try:
        return (_SCHEMAS.find(schema) or _SCHEMAS.learn(schema)).inferred(data)
    except MalformedMessage as error:
        logger.error("a worker's response is malformed: %s", error)
        raise Internal("internal error") from None


def check_size(tensor: TensorRef, size: int) -> None:
    """Check the byte size of an output against its shape.

    Raises:
        Internal: The size differs.
    """
    item = ITEM_SIZE[tensor.datatype]
    if item and size != element_count(tensor.shape) * item:
        raise Internal(f"output '{tensor.name}' does not have the byte size of its shape")


def output_bytes(gateway: Gateway, tensor: TensorRef) -> bytes | memoryview:
    """Return the bytes of an output, without a copy.

    Raises:
        Internal: The size differs from that of the shape.
    """
    raw = tensor.data
    data = raw if isinstance(raw, bytes) else gateway.mappings.view(raw)
    check_size(tensor, len(data))
    return data


_MOST_ELEMENTS = 1_000_000
_UNSORTED = frozenset(("BOOL", "FP16", "BF16", "BYTES"))  # as in Triton


def classified_as_requested(
    gateway: Gateway, model: GatewayModel, request: InferRequest, inferred: Inferred
) -> Inferred:
    """Return a response with the requested outputs as classes, in BYTES tensors.

    The values of each row are classified separately if the model supports batches.

    Raises:
        InvalidArgument: An output cannot be sorted, or is too large.
    """
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
        return tensor  # `output_bytes` reports the wrong size
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
    """Return the indices of the `count` largest values, in descending order.

    Equal values keep their order. NaN is larger than any number.
    """
    found = np.arange(len(row))
    if not count:
        return []
    if count < len(row):
        # Only values that can be among the largest are sorted.
        least = np.partition(row, len(row) - count)[len(row) - count]
        found = np.flatnonzero(~(row < least))
    order = np.argsort(row[found][::-1], kind="stable")[::-1]
    indices: list[int] = found[::-1][order][:count].tolist()
    return indices
