"""A worker's response, unpacked and checked, before a protocol encodes it."""

from __future__ import annotations

import logging

from shmserve.errors import Internal
from shmserve.ipc.tensors.datatypes import ITEM_SIZE, element_count
from shmserve.ipc.tensors.descriptors import TensorRef
from shmserve.ipc.tensors.inference import Inferred, unpack_inferred
from shmserve.ipc.transport.records import MalformedMessage

logger = logging.getLogger(__name__)


def unpack(body: bytes) -> Inferred:
    """The outputs of a packed response; raises Internal when it is malformed."""
    try:
        return unpack_inferred(body)
    except MalformedMessage as error:
        logger.error("a worker's response is malformed: %s", error)
        raise Internal("internal error") from None


def check_size(tensor: TensorRef, size: int) -> None:
    """The model must have given as many bytes as its shape says; raises Internal."""
    item = ITEM_SIZE[tensor.datatype]
    if item and size != element_count(tensor.shape) * item:
        raise Internal(f"output '{tensor.name}' does not have the byte size of its shape")
