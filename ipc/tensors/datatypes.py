"""The datatypes, by their names in the protocol and in configurations, and the sizes of tensors."""

from __future__ import annotations

# The bytes of an element of each datatype; 0 for BYTES, whose elements have any size. The order is
# that of Triton's numbers of datatypes.
ITEM_SIZE: dict[str, int] = {
    "BOOL": 1,
    "UINT8": 1,
    "UINT16": 2,
    "UINT32": 4,
    "UINT64": 8,
    "INT8": 1,
    "INT16": 2,
    "INT32": 4,
    "INT64": 8,
    "FP16": 2,
    "FP32": 4,
    "FP64": 8,
    "BYTES": 0,
    "BF16": 2,
}
# The configuration's spelling: TYPE_STRING is the protocol's BYTES.
FROM_CONFIG = {f"TYPE_{'STRING' if name == 'BYTES' else name}": name for name in ITEM_SIZE}
TO_CONFIG: dict[str, str] = {protocol: config for config, protocol in FROM_CONFIG.items()}
MAX_ELEMENT_COUNT = 2**64  # the result of `element_count` for this many elements or more


def element_count(shape: tuple[int, ...] | list[int]) -> int:
    """Return the number of elements of a tensor; 1 for a scalar.

    The result is at most `MAX_ELEMENT_COUNT`. A client could otherwise choose a shape whose exact
    product takes hours to compute.
    """
    count = 1
    for dim in shape:
        count *= dim
        if not -MAX_ELEMENT_COUNT < count < MAX_ELEMENT_COUNT:
            return 0 if 0 in shape else MAX_ELEMENT_COUNT
    return count
