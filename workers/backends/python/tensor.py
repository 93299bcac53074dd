"""Tensors as models of the Python backend know them: of numpy, of torch, or an input as it came."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from shmserve.ipc.tensors.arrays import NUMPY, STORED, encode_bytes
from shmserve.ipc.tensors.descriptors import Place
from shmserve.workers.backends.python.errors import TritonModelException, text
from shmserve.workers.backends.python.inputs import Lender
from shmserve.workers.batch.request import Array, Input, Output
from shmserve.workers.bls.request import CallInput

if TYPE_CHECKING:
    import torch

NUMBER = {name: number for number, name in enumerate(STORED, start=1)}  # Triton's
_DATATYPE = {dtype: name for name, dtype in NUMPY.items()}
_CPU = (1, 0)  # DLPack's kDLCPU, device 0
# An Output without the function in Python that makes a named tuple.
_output: Callable[[tuple[str, str, Any]], Output] = partial(tuple.__new__, Output)


class Tensor:
    """A named tensor: `Tensor(name, numpy_array)`, or `from_dlpack`.

    The array may be of any numpy type that has a protocol datatype; BYTES are object arrays, or
    numpy's bytes. It is not copied. Raises TritonModelException for other types and an empty name.
    """

    __slots__ = ("_data", "_datatype", "_lender", "_name")

    _data: Array | torch.Tensor | Input
    _lender: Lender | None

    def __init__(self, name: str, numpy_array: Array) -> None:
        if type(name) is not str:
            name = text(name, "the name of a Tensor")
        if type(numpy_array) is not np.ndarray and not isinstance(numpy_array, np.ndarray):
            raise TypeError(f"a Tensor is made of a numpy.ndarray, not of {type(numpy_array)}")
        if not name:
            raise TritonModelException("Tensor name cannot be an empty string.")
        kind = numpy_array.dtype
        datatype = "BYTES" if kind.kind == "S" else _DATATYPE.get(kind)
        if datatype is None:
            raise TritonModelException("NumPy dtype is not supported.")
        self._name = name
        self._datatype = datatype
        self._data = numpy_array
        self._lender = None

    @staticmethod
    def of_input(source: Input, lender: Lender | None) -> Tensor:
        """An input of a request, or an output of another model. Not for models."""
        tensor: Tensor = object.__new__(Tensor)
        tensor._name = source.name
        tensor._datatype = source.datatype
        tensor._data = source
        tensor._lender = lender
        return tensor

    @staticmethod
    def from_dlpack(name: str, tensor: Any) -> Tensor:
        """A tensor over a DLPack capsule, or over what has `__dlpack__`; on any device.

        Raises TritonModelException for what is neither, not contiguous, or of another type.
        """
        from torch.utils import dlpack

        from shmserve.workers.memory.torch_types import PROTOCOL

        name = text(name, "the name of a Tensor")
        if not name:
            raise TritonModelException("Tensor name cannot be an empty string.")
        if type(tensor).__name__ != "PyCapsule" and not (
            hasattr(tensor, "__dlpack__") and hasattr(tensor, "__dlpack_device__")
        ):
            raise TritonModelException(
                "Provided tensor is not supported. Tensor must be a DLPack capsule         or "
                "have `__dlpack__` and `__dlpack_device__` attributes"
            )
        data: torch.Tensor = dlpack.from_dlpack(tensor)
        if not data.is_contiguous():
            raise TritonModelException(
                "DLPack tensor is not contiguous. Only contiguous DLPack tensors that are stored "
                "in C-Order are supported."
            )
        datatype = PROTOCOL.get(data.dtype)
        if datatype is None:
            raise TritonModelException("DLPack tensor type is not supported.")
        made: Tensor = object.__new__(Tensor)
        made._name, made._datatype, made._data, made._lender = name, datatype, data, None
        return made

    def name(self) -> str:
        """Its name."""
        return self._name

    def shape(self) -> list[int]:
        """Its dimensions, the batch dimension included."""
        return list(self._data.shape)

    def triton_dtype(self) -> int:
        """Triton's number of its datatype: 1 is BOOL, 13 BYTES, 14 BF16."""
        return NUMBER[self._datatype]

    def is_cpu(self) -> bool:
        """Whether it is in host memory."""
        return self._device() == _CPU

    def as_numpy(self) -> Array:
        """The tensor as a numpy array, without a copy where the model may have it so; BYTES as
        objects.

        Raises TritonModelException for BF16, which numpy lacks, and for a tensor on a device.
        """
        data = self._data
        if type(data) is Input and not (data.on_device or data.shared) and self._datatype != "BF16":
            return data.numpy()  # as mostly
        if self._device() != _CPU:
            raise TritonModelException("Tensor is stored in GPU and cannot be converted to NumPy.")
        if self._datatype == "BF16":
            raise TritonModelException(
                "Tensor dtype is BF16 and cannot be converted to NumPy. Use to_dlpack() and "
                "from_dlpack() instead."
            )
        return self._array()

    def to_dlpack(self) -> Any:
        """The tensor as a DLPack capsule; raises TritonModelException for BYTES."""
        return self.__dlpack__()

    def __dlpack__(self, stream: Any = None, **options: Any) -> Any:
        """The tensor as a DLPack capsule, for `from_dlpack` of numpy, torch and others."""
        data = self._torch()
        if self._device() == _CPU:
            return data.__dlpack__(**options)
        return data.__dlpack__(stream=stream, **options)

    def __dlpack_device__(self) -> tuple[int, int]:
        """DLPack's (device type, device number)."""
        return self._device()

    # --- for the backend

    def as_output(self) -> Output:
        """The tensor as an output of a response."""
        data: Any = self._data
        if type(data) is Input:
            data = data.torch() if data.on_device else data.numpy()
        return _output((self._name, self._datatype, data))

    def as_call_input(self) -> CallInput:
        """The tensor as an input of a call of another model; where it came in memory, it stays
        there."""
        data = self._data
        wire: bytes | memoryview | Place
        if isinstance(data, Input):
            if data.place is None and data.on_device:
                from shmserve.workers.memory.device_tensors import to_host

                wire = to_host(data.raw)
            else:
                wire = data.raw if data.place is None else data.place
        elif self._datatype == "BYTES":
            wire = encode_bytes(self._array())
        else:
            wire = np.ascontiguousarray(self._array()).reshape(-1).view(np.uint8).data
        return CallInput(self._name, self._datatype, tuple(data.shape), wire)

    def own(self) -> None:
        """The model keeps this tensor beyond its request."""
        if isinstance(self._data, Input):
            self._data.detach()

    def _device(self) -> tuple[int, int]:
        data = self._data
        if isinstance(data, Input) and data.on_device:
            data = data.torch()
        if isinstance(data, Input | np.ndarray) or data.device.type == "cpu":
            return _CPU
        kind, number = data.__dlpack_device__()
        return int(kind), int(number)

    def _array(self) -> Array:
        """The tensor in host memory; BF16 as its bits."""
        data = self._data
        if type(data) is Input:
            lender = self._lender if data.shared else None
            return data.numpy() if lender is None else lender.lend(data)
        if isinstance(data, np.ndarray):
            return data
        from shmserve.workers.memory.torch_types import host_array

        return host_array(data)

    def _torch(self) -> torch.Tensor:
        data = self._data
        if self._datatype == "BYTES":
            raise TritonModelException("DLPack does not have support for string tensors.")
        if isinstance(data, Input):
            # Whoever takes it may write into it, and nothing would show.
            return data.torch().clone() if data.shared else data.torch()
        if isinstance(data, np.ndarray):
            import torch

            array = np.ascontiguousarray(data)
            return torch.from_numpy(array if array.flags.writeable else array.copy())
        return data
