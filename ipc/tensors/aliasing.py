"""Aliasing: requests whose outputs overlap their inputs.

Once a worker has begun to write, the inputs are gone: such a request can run only once, and where
nobody knows whether it has begun, it fails. What it would give on its own output is no response.
"""

from __future__ import annotations

from shmserve.ipc.tensors.descriptors import Place
from shmserve.ipc.tensors.inference import Inference, unpack_inference
from shmserve.ipc.transport.records import MalformedMessage


def aliased(inference: Inference) -> bool:
    """Whether an output goes where an input is."""
    inputs = [tensor.data for tensor in inference.inputs if isinstance(tensor.data, Place)]
    places = [output.place for output in inference.outputs if output.place is not None]
    return any(place.overlaps(other) for place in places for other in inputs)


def runs_once(work: bytes) -> bool:
    """The same of a packed request; what cannot be read fails wherever it runs."""
    try:
        return aliased(unpack_inference(work))
    except MalformedMessage:
        return False
