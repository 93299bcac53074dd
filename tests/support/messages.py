"""Requests and responses in the messages that carry them."""

from typing import Any

from shmserve.ipc.tensors.inference import Inference, Inferred, unpack_inference, unpack_inferred


def inference_of(message: Any) -> Inference:
    """Return the request that a `Submit` or a `Work` carries."""
    return unpack_inference(message.schema, message.data)


def inferred_of(message: Any) -> Inferred:
    """Return the response that a `Finished`, a `Responded` or a `Reply` carries."""
    return unpack_inferred(message.schema, message.data)
