"""The static plan of a model: all that it needs on the device, laid out at load (pure).

    session    | weights | workspace |
    tensors    | input 0 | input 1 | ... | output 0 | ... |

Each is one allocation. An offline model has fixed shapes, so nothing is allocated after these; the
sizes of the tensors are known only once the model lies in the first.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate

_ALIGNMENT = 512  # what the device's memory has to be aligned to
_MIB = 1024 * 1024


def layout(sizes: Sequence[int]) -> tuple[list[int], int]:
    """Where parts of these sizes (bytes) lie in one allocation, each aligned, and its size.

    >>> layout([100, 1000, 8])
    ([0, 512, 1536], 2048)
    """
    aligned = [-(-size // _ALIGNMENT) * _ALIGNMENT for size in sizes]
    *offsets, total = accumulate(aligned, initial=0)
    return offsets, total


def summary(parts: Mapping[str, int]) -> str:
    """The plan for the log, of parts in bytes.

    >>> summary({"weights": 3 << 20, "workspace": 1 << 19})
    'weights 3.0 MiB, workspace 0.5 MiB, 3.5 MiB in all'
    """
    each = [f"{name} {size / _MIB:.1f} MiB" for name, size in parts.items()]
    return ", ".join([*each, f"{sum(parts.values()) / _MIB:.1f} MiB in all"])
