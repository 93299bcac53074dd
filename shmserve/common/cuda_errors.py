"""Why CUDA memory is refused, in Triton's words."""

from __future__ import annotations

from shmserve.errors import InvalidArgument

INVALID = "failed to register shared memory region: invalid args"


def not_supported(name: str) -> InvalidArgument:
    """The refusal of region `name` where there is no CUDA device: a CPU-only Triton's text."""
    return InvalidArgument(
        f"failed to register CUDA shared memory region: '{name}', GPUs not supported"
    )
