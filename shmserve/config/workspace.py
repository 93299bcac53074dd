"""How large the workspace pools are: --workspace-byte-size DEVICE=BYTES."""

from __future__ import annotations

import re
from collections.abc import Sequence

from shmserve.config.option import Flag
from shmserve.errors import InvalidArgument

_FLAG = "--workspace-byte-size"
_DEVICE = re.compile(r"cpu|cuda:(0|[1-9][0-9]{0,2})")
_SIZE = Flag("workspace-byte-size", kind=int, low=4096, high=1 << 44)


def workspace_byte_sizes(settings: Sequence[str]) -> dict[str, int]:
    """The bytes of each device's pool, by torch's name of the device.

    Raises InvalidArgument for what is not DEVICE=BYTES, for a device that stands twice, and for one
    that has no pools: the host and CUDA devices have.
    """
    sizes: dict[str, int] = {}
    for setting in settings:
        device, equals, value = setting.partition("=")
        if not (device and equals):
            raise InvalidArgument(f"{_FLAG}: '{setting}' is not DEVICE=BYTES (cpu=1073741824)")
        if _DEVICE.fullmatch(device) is None:
            raise InvalidArgument(
                f"{_FLAG}: '{device}' is no device with a pool (there are: cpu, cuda:NUMBER)"
            )
        if device in sizes:
            raise InvalidArgument(f"{_FLAG}: device '{device}' stands twice")
        size = _SIZE.parse(value)
        assert isinstance(size, int)
        sizes[device] = size
    return sizes
