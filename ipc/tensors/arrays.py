"""The numpy types of the protocol's datatypes, and the serialization of BYTES and BF16."""

from __future__ import annotations

from typing import Any

import numpy as np

from shmserve.errors import InvalidArgument
from shmserve.ipc.tensors.datatypes import element_count

# Datatype -> numpy type of the stored elements. numpy has no BF16, so its bits are uint16.
STORAGE_DTYPES: dict[str, np.dtype[Any]] = {
    "BOOL": np.dtype(np.bool_),
    **{f"UINT{bits}": np.dtype(f"uint{bits}") for bits in (8, 16, 32, 64)},
    **{f"INT{bits}": np.dtype(f"int{bits}") for bits in (8, 16, 32, 64)},
    **{f"FP{bits}": np.dtype(f"float{bits}") for bits in (16, 32, 64)},
    "BYTES": np.dtype(np.object_),
    "BF16": np.dtype(np.uint16),
}
NUMPY_DTYPES = {name: dtype for name, dtype in STORAGE_DTYPES.items() if name != "BF16"}


def array_interface(pointer: int, shape: tuple[int, ...], typestr: str) -> dict[str, Any]:
    """Return an `__array_interface__`, or a `__cuda_array_interface__`, of writable memory."""
    data = (pointer, False)
    return {"shape": shape, "typestr": typestr, "data": data, "strides": None, "version": 3}


def is_bfloat16(dtype: np.dtype[Any]) -> bool:
    """Check whether a type is the bfloat16 of ml_dtypes, which JAX and TensorFlow use."""
    return dtype.kind == "V" and dtype.name == "bfloat16"  # `name` takes 2 us


def to_bf16(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Convert floats to BF16 (as uint16), rounding to nearest with ties to even."""
    bits = array.astype(np.float32).view(np.uint32)
    rounded_bits = np.where(np.isnan(array), bits | 0x400000, bits + 0x7FFF + ((bits >> 16) & 1))
    return (rounded_bits >> 16).astype(np.uint16)


def encode_bytes(array: np.ndarray[Any, Any]) -> bytes:
    """Serialize a BYTES tensor.

    The elements follow each other in row-major order. Each has a 4-byte little-endian length and
    its bytes. As in Triton's clients, elements that are not bytes are encoded as `str()` in UTF-8.
    """
    parts: list[bytes] = []
    for item in array.ravel():
        element_bytes = item if isinstance(item, bytes) else str(item).encode("utf-8")
        parts.append(len(element_bytes).to_bytes(4, "little"))
        parts.append(element_bytes)
    return b"".join(parts)


def decode_bytes(
    serialized: bytes | bytearray | memoryview, shape: tuple[int, ...], name: str, model: str
) -> np.ndarray[Any, Any]:
    """Return the elements of a serialized BYTES tensor as an object array of `shape`.

    `serialized` is copied before it is read, so a client cannot change the lengths during decoding.

    Raises:
        InvalidArgument: The lengths or the number of elements do not match `serialized`.
    """
    data = bytes(serialized)
    size = len(data)
    expected_count = element_count(shape)
    # At most as many items as the data can contain, since each has a 4-byte length. An excessive
    # element count therefore allocates no memory.
    items = np.empty(min(expected_count, size // 4), dtype=np.object_)
    offset = count = 0
    while offset < size:
        if size - offset < 4:
            raise InvalidArgument(
                f"incomplete string length indicator for inference input '{name}' for model "
                f"'{model}', expecting 4 bytes but only {size - offset} bytes available. "
                "Please make sure the string length indicator is in one buffer."
            )
        length = int.from_bytes(data[offset : offset + 4], "little")
        offset += 4
        if length > size - offset:
            raise InvalidArgument(
                f"incomplete string data for inference input '{name}' for model '{model}', "
                f"expecting string of length {length} but only {size - offset} bytes available "
                "(before each element is its length in 4 bytes, little-endian)"
            )
        if count == expected_count:
            raise InvalidArgument(
                f"unexpected number of string elements {count + 1} for inference input '{name}' "
                f"for model '{model}', expecting {expected_count}"
            )
        items[count] = data[offset : offset + length]
        offset += length
        count += 1
    if count != expected_count:
        raise InvalidArgument(
            f"expected {expected_count} string elements for inference input '{name}' for model "
            f"'{model}', got {count}"
        )
    return items.reshape(shape)


def elements_as_text(datatype: str, array: np.ndarray[Any, Any]) -> str:
    """Return the elements of an array, separated by commas, as Triton's traces have them."""
    elements = array.reshape(-1)
    if datatype == "BF16" and elements.dtype == np.uint16:
        elements = (elements.astype(np.uint32) << 16).view(np.float32)
    if datatype == "BYTES":
        texts = (
            element.decode(errors="replace") if isinstance(element, bytes) else str(element)
            for element in elements.tolist()
        )
        return ",".join(f'"{text}"' for text in texts)
    format_spec = "d" if elements.dtype.kind in "biu" else "g"
    return ",".join(f"{element:{format_spec}}" for element in elements.tolist())
