"""Where a client wants outputs, as far as a model may compute them there (pure)."""

from __future__ import annotations

from shmserve.ipc.tensors.descriptors import Place
from shmserve.workers.batch.request import Request


def free_places(request: Request, least: int) -> dict[str, Place]:
    """The places of outputs, by name, that have `least` bytes and overlap nothing else of the
    request."""
    found = {
        name: output.place
        for name, output in request.requested.items()
        if output.place is not None
        and output.place.byte_size >= least
        and not output.place.memory.copied
    }
    if not found:
        return {}
    others = [item.place for item in request.inputs.values() if item.place is not None]
    others += [output.place for output in request.requested.values() if output.place is not None]
    return {
        name: place
        for name, place in found.items()
        if sum(place.overlaps(other) for other in others) == 1  # itself
    }
