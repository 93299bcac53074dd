"""The datatypes, by their names in the protocol and in configurations, and the sizes of tensors."""

from __future__ import annotations

# Bytes of an element; 0 for BYTES, whose elements vary. In the order of Triton's numbering.
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
FROM_CONFIG: dict[str, str] = {
    ("TYPE_STRING" if name == "BYTES" else f"TYPE_{name}"): name for name in ITEM_SIZE
}
TO_CONFIG: dict[str, str] = {protocol: config for config, protocol in FROM_CONFIG.items()}
BEYOND = 2**64  # stands for any larger number of elements


def element_count(shape: tuple[int, ...] | list[int]) -> int:
    """Return the number of elements of a tensor; 1 for a scalar.

    A number of `BEYOND` or more is returned as `BEYOND`. A client could otherwise choose a shape
    whose exact product takes hours to compute.
    """
    count = 1
    for dim in shape:
        count *= dim
        if not -BEYOND < count < BEYOND:
            return 0 if 0 in shape else BEYOND
    return count
