"""DLPack capsules for memory that is not numpy's: what torch, cupy, jax and numpy take as it is.

The layout is DLPack's C header, version 0.x, which every consumer reads:
https://dmlc.github.io/dlpack/latest/c_api.html
"""

from __future__ import annotations

import ctypes
from typing import Any

CPU, CUDA = 1, 2
# datatype -> (type code, bits)
TYPES: dict[str, tuple[int, int]] = {
    **{f"INT{bits}": (0, bits) for bits in (8, 16, 32, 64)},
    **{f"UINT{bits}": (1, bits) for bits in (8, 16, 32, 64)},
    **{f"FP{bits}": (2, bits) for bits in (16, 32, 64)},
    "BF16": (4, 16),
    "BOOL": (6, 8),
}
_NAME = b"dltensor"


class _Tensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


class _Managed(ctypes.Structure):
    _fields_ = (("tensor", _Tensor), ("context", ctypes.c_void_p), ("deleter", ctypes.c_void_p))


# What consumers hold: the address of a structure -> it, its shape and what keeps the memory.
_held: dict[int, tuple[Any, ...]] = {}

_python = ctypes.pythonapi
_new = _python.PyCapsule_New
_new.restype, _new.argtypes = ctypes.py_object, (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)
_is_valid = _python.PyCapsule_IsValid
_is_valid.restype, _is_valid.argtypes = ctypes.c_int, (ctypes.c_void_p, ctypes.c_char_p)
_pointer = _python.PyCapsule_GetPointer
_pointer.restype, _pointer.argtypes = ctypes.c_void_p, (ctypes.c_void_p, ctypes.c_char_p)


def _delete(address: int) -> None:
    _held.pop(address, None)


def _capsule_ended(capsule: int) -> None:
    # A consumer has renamed it, and calls the deleter itself.
    if _is_valid(capsule, _NAME):
        _held.pop(_pointer(capsule, _NAME), None)


_CALLBACK = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
_callbacks = _CALLBACK(_delete), _CALLBACK(_capsule_ended)
_DELETER, _DESTRUCTOR = (ctypes.cast(function, ctypes.c_void_p) for function in _callbacks)
# Tensors may outlive this module, at the program's end.
_python.Py_IncRef(ctypes.py_object(_callbacks))


def capsule(
    pointer: int, shape: tuple[int, ...], datatype: str, device: tuple[int, int], owner: object
) -> Any:
    """A capsule over `pointer`, row-major; `owner` is kept until its consumer is done with it.

    `device` is (CPU or CUDA, its number).
    """
    code, bits = TYPES[datatype]
    dims = (ctypes.c_int64 * len(shape))(*shape)
    managed = _Managed()
    tensor = managed.tensor
    tensor.data = pointer
    tensor.device_type, tensor.device_id = device
    tensor.ndim, tensor.code, tensor.bits, tensor.lanes = len(shape), code, bits, 1
    tensor.shape = dims
    managed.deleter = _DELETER
    address = ctypes.addressof(managed)
    _held[address] = (managed, dims, owner)
    return _new(address, _NAME, _DESTRUCTOR)
