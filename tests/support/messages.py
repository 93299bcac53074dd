"""Unpacking of the requests and responses in messages."""

from typing import Any

from shmserve.ipc.tensors.schemas import Inference, Inferred, unpack_inference, unpack_inferred


def inference_of(message: Any) -> Inference:
    return unpack_inference(message.schema, message.data)


def inferred_of(message: Any) -> Inferred:
    """Return the response in a `Finished`, a `Responded` or a `Reply`."""
    return unpack_inferred(message.schema, message.data)
