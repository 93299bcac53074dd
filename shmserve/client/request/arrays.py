"""Conversion of numpy and torch arrays, DLPack tensors and lists to the protocol's datatypes.

Torch is never imported here: a program that passes torch tensors has imported it.
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

from shmserve.errors import InvalidArgument
from shmserve.ipc.model_spec import TensorSpec
from shmserve.ipc.tensors.arrays import NUMPY_DTYPES, STORAGE_DTYPES, is_bfloat16, to_bf16
from shmserve.ipc.tensors.datatypes import ITEM_SIZE

Array = np.ndarray[Any, Any]

_NAMES_BY_DTYPE = {dtype: name for name, dtype in NUMPY_DTYPES.items() if name != "BYTES"}
BF16 = STORAGE_DTYPES["BF16"]


def datatype_of(array: Array, expected_datatype: str) -> str:
    """Return the datatype of a numeric array, or "" if the protocol has none for its numpy type.

    An array of uint16 has BF16 if that is expected.
    """
    if is_bfloat16(array.dtype) or (expected_datatype == "BF16" and array.dtype == BF16):
        return "BF16"
    return _NAMES_BY_DTYPE.get(array.dtype, "")


def is_torch(value: object) -> bool:
    """Check whether `value` is a torch tensor."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.Tensor)


def as_array(value: Any, spec: TensorSpec | None, name: str) -> tuple[Array, str]:
    """Return a C-contiguous array and its datatype, without a copy if possible.

    Args:
        value: An array, a tensor, or lists.
        spec: The model's input, which determines the datatype of lists and whether uint16 is BF16.
        name: The input's name, for error texts.

    Raises:
        InvalidArgument: The value has no datatype of the protocol.
    """
    expected_datatype = spec.datatype if spec is not None else ""
    if type(value) is not np.ndarray:
        value, datatype = _convert(value, expected_datatype, name)
        if datatype:
            return value, datatype
    array: Array = value
    if array.dtype.kind == "O" and ITEM_SIZE.get(expected_datatype):
        text = f"input '{name}' is an array of Python objects; model expects {expected_datatype}"
        if expected_datatype != "BF16":  # its storage type is that of its bit patterns
            text += f": pass array.astype('{STORAGE_DTYPES[expected_datatype]}')"
        raise InvalidArgument(text)
    if array.dtype.kind in "OSUT":
        return array, "BYTES"
    array_datatype = datatype_of(array, expected_datatype)
    if array_datatype == "BF16":
        array = array.view(BF16)
    if not array_datatype:
        text = f"input '{name}' has the type {array.dtype}, which has no corresponding datatype"
        if not array.dtype.isnative:
            text += f" (byte order: pass array.astype('{array.dtype.newbyteorder('=')}'))"
        raise InvalidArgument(text)
    if not array.flags.c_contiguous:  # numpy.ascontiguousarray turns a scalar into a vector
        array = np.ascontiguousarray(array)
    return array, array_datatype


def _convert(value: Any, expected_datatype: str, name: str) -> tuple[Any, str]:
    if is_torch(value):
        if value.device.type != "cpu":
            raise InvalidArgument(
                f"input '{name}' is on device '{value.device}': pass a tensor in host memory, or "
                "a region allocated on that device"
            )
        torch = sys.modules["torch"]
        try:
            value = value.detach().resolve_conj().resolve_neg().contiguous()
            if value.dtype == torch.bfloat16:
                return value.view(torch.uint16).numpy(), "BF16"
            return value.numpy(), ""
        # Raised for a sparse or quantized tensor, and for a dtype without a numpy type.
        except (RuntimeError, TypeError) as error:
            raise InvalidArgument(f"input '{name}' cannot be read from torch: {error}") from error
    if isinstance(value, np.ma.MaskedArray):
        text = f"input '{name}' is a masked array: pass its .data, or call .filled()"
        raise InvalidArgument(text)
    if isinstance(value, np.ndarray):
        # `View.plain` raises Released after the release of the memory.
        as_plain_array = getattr(value, "plain", None)
        return (value.view(np.ndarray) if as_plain_array is None else as_plain_array()), ""
    if hasattr(value, "__dlpack__"):
        problem: Exception | None = None
        # JAX arrays with a type of ml_dtypes, or on a GPU, support `__array__` only.
        for convert in (np.from_dlpack, np.asarray if hasattr(value, "__array__") else None):
            try:
                if convert is not None:
                    return convert(value), ""
            except (BufferError, RuntimeError, TypeError, ValueError) as error:
                problem = error
        text = f"input '{name}' cannot be read through DLPack: {problem}"
        raise InvalidArgument(text) from problem
    try:
        return _from_lists(value, expected_datatype)
    except (TypeError, ValueError, OverflowError) as error:
        text = f"input '{name}' cannot be converted to {expected_datatype}: {error}"
        raise InvalidArgument(text) from error


def _from_lists(value: Any, expected_datatype: str) -> tuple[Array, str]:
    if not expected_datatype or expected_datatype == "BYTES":
        return np.asarray(value, STORAGE_DTYPES.get(expected_datatype)), ""
    array = np.asarray(value)
    if is_bfloat16(array.dtype):  # a list of arrays
        array = array.astype(np.float32)
    if array.size and array.dtype.kind not in "biuf":
        wrong = next((v for v in array.flat if np.asarray(v).dtype.kind not in "biuf"), value)
        raise ValueError(
            f"an element is not a number of at most 64 bits: {wrong!r:.60} ({type(wrong).__name__})"
        )
    with np.errstate(over="ignore", invalid="ignore"):
        if expected_datatype == "BF16":
            return to_bf16(np.asarray(array, np.float32)), expected_datatype
        # Lists are converted directly: a floating-point array would round large integers.
        exact_values = array if hasattr(value, "__array__") else value
        converted_array = np.asarray(exact_values, STORAGE_DTYPES[expected_datatype])
    if converted_array.dtype.kind != "f" and not np.array_equal(converted_array, array):
        wrong = array[np.asarray(converted_array != array)].flat[0]
        raise ValueError(f"the element {wrong} cannot be represented in {expected_datatype}")
    return converted_array, ""


def to_torch(array: Array, datatype: str) -> Any:
    """Return a torch tensor over the same memory. BYTES remain an object array."""
    if datatype == "BYTES":
        return array
    if not isinstance(array, np.ndarray):  # the output is a `DeviceView`
        return array.torch()
    torch = sys.modules["torch"]
    tensor = torch.from_numpy(array)
    return tensor.view(torch.bfloat16) if datatype == "BF16" else tensor
