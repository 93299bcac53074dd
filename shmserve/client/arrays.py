"""Tensors as programs have them, and as they travel: numpy, torch, anything with DLPack, lists.

Torch is never imported here: a program that passes torch tensors has done it.
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

from shmserve.errors import InvalidArgument
from shmserve.ipc.signature import TensorSpec
from shmserve.ipc.tensors import NUMPY

Array = np.ndarray[Any, Any]

_DATATYPES = {dtype: name for name, dtype in NUMPY.items() if name != "BYTES"}
BF16 = np.dtype(np.uint16)  # numpy has none: its bit patterns


def dtype_of(datatype: str) -> np.dtype[Any]:
    """The numpy type of a protocol's datatype, BF16 as uint16."""
    return NUMPY.get(datatype, BF16)


def is_torch(value: object) -> bool:
    """Whether this is a torch tensor."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.Tensor)


def from_program(value: Any, spec: TensorSpec | None, name: str) -> tuple[Array, str]:
    """(C-contiguous array, datatype) of what a program passes; no copy where that is possible.

    `spec` decides what lists become, and that uint16 may be BF16. Raises InvalidArgument.
    """
    wanted = spec.datatype if spec is not None else ""
    if type(value) is not np.ndarray:
        value, datatype = _converted(value, wanted, name)
        if datatype:
            return np.ascontiguousarray(value), datatype
    array: Array = value
    if array.dtype.kind in "OSU":
        return array, "BYTES"
    if wanted == "BF16" and array.dtype == BF16:
        return np.ascontiguousarray(array), "BF16"
    known = _DATATYPES.get(array.dtype)
    if known is None:
        raise InvalidArgument(f"input '{name}' is of {array.dtype}, which no datatype is")
    if not array.flags.c_contiguous:
        array = np.ascontiguousarray(array)
    return array, known


def _converted(value: Any, wanted: str, name: str) -> tuple[Any, str]:
    if is_torch(value):
        if value.device.type != "cpu":
            raise InvalidArgument(
                f"input '{name}' is on device '{value.device}': this door takes host memory, or "
                "what lies in a region that was allocated there"
            )
        torch = sys.modules["torch"]
        value = value.detach().contiguous()
        if value.dtype == torch.bfloat16:
            return value.view(torch.uint16).numpy(), "BF16"
        return value.numpy(), ""
    if isinstance(value, np.ndarray):
        plain = getattr(value, "plain", None)  # a view that may be released
        return (value.view(np.ndarray) if plain is None else plain()), ""
    if hasattr(value, "__dlpack__"):
        try:
            return np.from_dlpack(value), ""
        except (BufferError, RuntimeError, TypeError) as error:
            raise InvalidArgument(f"input '{name}' cannot be taken by DLPack: {error}") from error
    try:
        return np.asarray(value, dtype_of(wanted) if wanted else None), ""
    except (TypeError, ValueError, OverflowError) as error:
        raise InvalidArgument(f"input '{name}' is no {wanted} tensor: {error}") from error


def to_torch(array: Array, datatype: str) -> Any:
    """A torch tensor over the same memory. BYTES stay an object array."""
    if datatype == "BYTES":
        return array
    if not isinstance(array, np.ndarray):  # on a device
        return array.torch()
    torch = sys.modules["torch"]
    tensor = torch.from_numpy(array)
    return tensor.view(torch.bfloat16) if datatype == "BF16" else tensor
