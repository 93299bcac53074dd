"""The classification extension: an output as its k largest values, with index and label.

[0.1, 0.7, 0.2], k = 2, labels cat dog cow  ->  "0.700000:1:dog" "0.200000:2:cow"
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from shmserve.errors import InvalidArgument
from shmserve.gateway.context import Gateway, GatewayModel
from shmserve.gateway.inference.infer_request import InferRequest
from shmserve.ipc.tensors.arrays import NUMPY_DTYPES
from shmserve.ipc.tensors.datatypes import ITEM_SIZE, element_count
from shmserve.ipc.tensors.descriptors import TensorRef
from shmserve.ipc.tensors.schemas import Inferred

_MAX_CLASSIFIED_ELEMENTS = 1_000_000
_MAX_CLASSES = 100_000  # formatted in 0.1 s, during which the gateway handles no other request
# Triton does not classify these datatypes, either.
_UNSORTABLE_DATATYPES = frozenset(("BOOL", "FP16", "BF16", "BYTES"))


def classify_outputs(
    gateway: Gateway, model: GatewayModel, request: InferRequest, inferred: Inferred
) -> Inferred:
    """Return a response whose classified outputs are replaced by BYTES tensors of classes.

    The values of each row are classified separately if the model supports batches.

    Raises:
        InvalidArgument: An output cannot be sorted, or is too large.
    """
    class_counts = request.class_counts
    if not class_counts:
        return inferred

    def classify(tensor: TensorRef) -> TensorRef:
        class_count = class_counts.get(tensor.name, 0)
        if not class_count:
            return tensor
        location = tensor.data  # the bytes, or their range in shared memory
        data = location if isinstance(location, bytes) else gateway.mappings.view(location)
        labels = model.labels.get(tensor.name, ())
        datatype, element_total = tensor.datatype, element_count(tensor.shape)
        if datatype in _UNSORTABLE_DATATYPES:
            text = f"class result not available for output due to unsupported type '{datatype}'"
            raise InvalidArgument(text)
        if element_total > _MAX_CLASSIFIED_ELEMENTS:
            raise InvalidArgument(
                f"output '{tensor.name}': {element_total} elements are too many for classification "
                f"(maximum: {_MAX_CLASSIFIED_ELEMENTS})"
            )
        if len(data) != element_total * ITEM_SIZE[datatype]:
            return tensor  # `output_bytes` reports the wrong size later
        batch_shape = tensor.shape[:1] if model.signature.max_batch_size else ()
        values = np.frombuffer(data, NUMPY_DTYPES[datatype])
        rows = values.reshape(batch_shape[0] if element_total and batch_shape else 1, -1)
        class_count = min(class_count, rows.shape[1])
        if len(rows) * class_count > _MAX_CLASSES:
            raise InvalidArgument(
                f"output '{tensor.name}': {len(rows) * class_count} classes are too many for a "
                f"response (maximum: {_MAX_CLASSES})"
            )
        texts = [text for row in rows for text in _class_texts(row, class_count, labels)]
        packed_texts = b"".join(len(text).to_bytes(4, "little") + text for text in texts)
        return TensorRef(tensor.name, "BYTES", (*batch_shape, class_count), packed_texts)

    return replace(inferred, outputs=tuple(map(classify, inferred.outputs)))


def _class_texts(row: NDArray[np.generic], class_count: int, labels: Sequence[str]) -> list[bytes]:
    texts = []
    for index in largest_indices(row, class_count):
        value = row[index].item()
        text = f"{value:.6f}:{index}" if isinstance(value, float) else f"{value}:{index}"
        if index < len(labels) and labels[index]:
            text += f":{labels[index]}"
        texts.append(text.encode())
    return texts


def largest_indices(row: NDArray[np.generic], count: int) -> list[int]:
    """Return the indices of the `count` largest values, in descending order.

    Equal values keep their order. NaN is larger than any number.
    """
    candidate_indices = np.arange(len(row))
    if not count:
        return []
    if count < len(row):
        # Only values that can be among the largest are sorted.
        threshold = np.partition(row, len(row) - count)[len(row) - count]
        candidate_indices = np.flatnonzero(~(row < threshold))
    descending_order = np.argsort(row[candidate_indices][::-1], kind="stable")[::-1]
    indices: list[int] = candidate_indices[::-1][descending_order][:count].tolist()
    return indices
