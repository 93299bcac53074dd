"""Tensors of the Python backend's API, and the lending of input arrays to models.

A model written for Triton owns the arrays it receives: it may write into them and keep them. Input
arrays of this server are views of memory that is reused. The first inputs are therefore lent as
copies. A model that has neither changed nor kept a copy receives read-only views from then on. Once
it keeps a view, the memory of that view becomes the model's before it is reused (copy-on-keep).
"""

from __future__ import annotations

import logging
import sys
import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from shmserve.ipc.memory.mappings import Mappings
from shmserve.ipc.tensors.arrays import NUMPY_DTYPES, STORAGE_DTYPES, encode_bytes
from shmserve.workers.backends.python.errors import TritonModelException, as_text
from shmserve.workers.batch.backend_request import Array, CopyCounter, Input, Output, Response
from shmserve.workers.bls.request import CallInput

if TYPE_CHECKING:
    import torch


logger = logging.getLogger(__name__)

_TRIAL_EXECUTIONS = 8  # number of executions with copied inputs, in which the model is observed
_NOT_WRITABLE = "The given NumPy array is not writable"


class Lender:
    """The provider of a model's shared inputs as arrays, in one thread.

    In its first executions the model receives copies. If these show that it keeps or changes its
    arrays, it always receives copies. Otherwise its later arrays are views of shared memory.
    """

    def __init__(
        self, model_name: str, mappings: Mappings, copy_counter: CopyCounter | None = None
    ) -> None:
        self._model_name = model_name
        self._mappings = mappings
        self._copy_counter = copy_counter or CopyCounter()
        self._lends_copies = True
        self._trials_left = _TRIAL_EXECUTIONS
        # The inputs whose arrays were lent in this execution; for a copy, also its original bytes.
        self._loans: dict[Input, memoryview | None] = {}
        self._torch_filter: Any = None

    def lend(self, source: Input) -> Array:
        """Return the array of a shared input of the running execution; the same on every call."""
        if source not in self._loans:
            if self._lends_copies:
                self._loans[source] = source.raw
                self._copy_counter.inputs += source.detach()
            else:
                if not self._loans and "torch" in sys.modules:
                    filters = warnings.filters
                    if not filters or filters[0] is not self._torch_filter:
                        self._refuse_aliases()
                self._loans[source] = None
        return source.numpy()

    def _refuse_aliases(self) -> None:
        # torch lacks read-only tensors: for a read-only array it only warns, by default once.
        sys.modules["torch"].set_warn_always(True)
        warnings.filterwarnings("error", message=_NOT_WRITABLE)
        self._torch_filter = warnings.filters[0]

    def discard_loans(self) -> None:
        """Discard the list of lent arrays after a failed execution: the error may refer to them."""
        self._loans = {}

    def check_loans(self, responses: Sequence[Response]) -> None:
        """Check, after an execution, which arrays the model has kept or changed."""
        if not self._loans:
            return
        loans, self._loans = self._loans, {}
        kept_inputs: list[Input] = []
        has_changed = False
        for source in loans:
            original_view = loans[source]
            if _count_references(source, responses) > _MIN_REFERENCES:
                kept_inputs.append(source)
            elif original_view is not None and not has_changed:
                has_changed = _has_changed(source, original_view)
        if kept_inputs or has_changed:
            self._trials_left = 0
            if not self._lends_copies:
                self._detach_kept(kept_inputs)
            self._lends_copies = True
        elif self._trials_left:
            self._trials_left -= 1
            self._lends_copies = self._trials_left > 0

    def _detach_kept(self, kept_inputs: Sequence[Input]) -> None:
        logger.warning(
            "model '%s' keeps references to its inputs, so each input is copied from now on",
            self._model_name,
        )
        memory_ranges = [s.memory_range for s in kept_inputs if s.memory_range is not None]
        self._mappings.detach(memory_ranges)
        self._copy_counter.inputs += sum(memory_range.byte_size for memory_range in memory_ranges)


def _has_changed(source: Input, original: memoryview) -> bool:
    bytes_before = np.frombuffer(original, np.uint8)
    return not np.array_equal(bytes_before, np.frombuffer(source.raw, np.uint8))


def _count_references(source: Input, responses: Sequence[Response]) -> int:
    """Count the references to an input's array, except from `responses` and their views."""
    array = source.array
    response_references = 0
    view_ids: set[int] = set()
    for response in responses:
        for output in response.outputs:
            if output.data is array:
                response_references += 1
            elif isinstance(output.data, np.ndarray) and output.data.base is array:
                view_ids.add(id(output.data))
    if view_ids:
        response_references += len(view_ids)
    return sys.getrefcount(array) - response_references


def _count_minimum_references() -> int:
    """Return the reference count of an array to which only its input refers."""
    source = Input("", "UINT8", (1,), memoryview(bytearray(1)))
    source.numpy()
    return _count_references(source, ())


_MIN_REFERENCES = _count_minimum_references()


# Triton's number of each datatype.
TYPE_NUMBERS = {name: number for number, name in enumerate(STORAGE_DTYPES, start=1)}
_DATATYPES = {dtype: name for name, dtype in NUMPY_DTYPES.items()}
_CPU = (1, 0)  # DLPack's device type kDLCPU, and device 0


class Tensor:
    """A named tensor: `Tensor(name, numpy_array)`, or `from_dlpack`.

    The array is not copied. Any numpy type with a protocol datatype is allowed; BYTES are object
    arrays or numpy's bytes.

    Raises:
        TritonModelException: The type is not supported, or the name is empty.
    """

    __slots__ = ("_data", "_datatype", "_name")

    _data: Any  # a numpy array or a torch tensor

    def __init__(self, name: str, numpy_array: Array) -> None:
        if type(name) is not str:
            name = as_text(name, "the name of a Tensor")
        if type(numpy_array) is not np.ndarray and not isinstance(numpy_array, np.ndarray):
            given_type = type(numpy_array)
            hint = " (Tensor.from_dlpack takes one)" if hasattr(given_type, "__dlpack__") else ""
            text = f"{given_type.__module__}.{given_type.__qualname__}{hint}"
            raise TypeError(f"Tensor: expected a numpy.ndarray, not {text}")
        if not name:
            raise TritonModelException("Tensor name cannot be an empty string.")
        try:
            self._datatype = _DATATYPES[numpy_array.dtype]
        except KeyError:
            if numpy_array.dtype.kind != "S":
                raise TritonModelException("NumPy dtype is not supported.") from None
            self._datatype = "BYTES"
        self._name = name
        self._data = numpy_array

    @staticmethod
    def from_dlpack(name: str, tensor: Any) -> Tensor:
        """Make a tensor over a DLPack capsule, or an object with `__dlpack__`, on any device.

        Raises:
            TritonModelException: The object is neither, is not contiguous, or has another datatype.
        """
        from torch.utils import dlpack

        from shmserve.workers.memory.tensors import PROTOCOL_DATATYPES

        name = as_text(name, "the name of a Tensor")
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
        datatype = PROTOCOL_DATATYPES.get(data.dtype)
        if datatype is None:
            raise TritonModelException("DLPack tensor type is not supported.")
        new_tensor: Tensor = object.__new__(Tensor)
        new_tensor._name, new_tensor._datatype, new_tensor._data = name, datatype, data
        return new_tensor

    def name(self) -> str:
        """Return the name."""
        return self._name

    def shape(self) -> list[int]:
        """Return the dimensions, including the batch dimension."""
        return list(self._data.shape)

    def triton_dtype(self) -> int:
        """Return Triton's number of the datatype: 1 is BOOL, 13 BYTES, 14 BF16."""
        return TYPE_NUMBERS[self._datatype]

    def is_cpu(self) -> bool:
        """Check whether the tensor is in host memory."""
        return self._device() == _CPU

    def as_numpy(self) -> Array:
        """Return the tensor as a numpy array, if possible without a copy; BYTES are objects.

        Raises:
            TritonModelException: The tensor is BF16, which numpy lacks, or is on a device.
        """
        if self._device() != _CPU:
            raise TritonModelException("Tensor is stored in GPU and cannot be converted to NumPy.")
        if self._datatype == "BF16":
            raise TritonModelException(
                "Tensor dtype is BF16 and cannot be converted to NumPy. Use to_dlpack() and "
                "from_dlpack() instead."
            )
        return self._array()

    def to_dlpack(self) -> Any:
        """Return the tensor as a DLPack capsule.

        Raises:
            TritonModelException: The tensor is BYTES.
        """
        return self.__dlpack__()

    def __dlpack__(self, stream: Any = None, **options: Any) -> Any:
        """Return the tensor as a DLPack capsule, for `from_dlpack` of numpy, torch and others."""
        if self._datatype == "BYTES":
            raise TritonModelException("DLPack does not have support for string tensors.")
        data = self._torch()
        if self._device() == _CPU:
            return data.__dlpack__(**options)
        return data.__dlpack__(stream=stream, **options)

    def __dlpack_device__(self) -> tuple[int, int]:
        """Return DLPack's (device type, device number)."""
        return self._device()

    # --- for the backend

    def as_output(self) -> Output:
        """Return the tensor as an output of a response."""
        return Output(self._name, self._datatype, self._data)

    def as_call_input(self) -> CallInput:
        """Return the tensor as an input of a call of another model."""
        array = self._array()
        wire_data: bytes | memoryview
        if self._datatype == "BYTES":
            wire_data = encode_bytes(array)
        else:
            wire_data = np.ascontiguousarray(array).reshape(-1).view(np.uint8).data
        return CallInput(self._name, self._datatype, tuple(array.shape), wire_data)

    def _device(self) -> tuple[int, int]:
        return _dlpack_device(self._data)

    def _array(self) -> Array:
        """Return the tensor in host memory; BF16 as bit patterns."""
        if isinstance(self._data, np.ndarray):
            return self._data
        from shmserve.workers.memory.tensors import host_array

        return host_array(self._data)

    def _torch(self) -> torch.Tensor:
        if isinstance(self._data, np.ndarray):
            import torch

            array = np.ascontiguousarray(self._data)
            return torch.from_numpy(array if array.flags.writeable else array.copy())
        tensor: torch.Tensor = self._data
        return tensor


def _dlpack_device(data: Any) -> tuple[int, int]:
    if isinstance(data, np.ndarray) or data.device.type == "cpu":
        return _CPU
    device_type, device_number = data.__dlpack_device__()
    return int(device_type), int(device_number)


class ReceivedTensor(Tensor):
    """An input of a request, or an output of another model."""

    __slots__ = ("_lender",)

    _data: Input

    def __init__(self, source: Input, lender: Lender | None) -> None:
        self._name = source.name
        self._datatype = source.datatype
        self._data = source
        self._lender = lender

    def as_numpy(self) -> Array:
        source = self._data
        if source.on_device or self._datatype == "BF16":
            return super().as_numpy()  # this call raises the error
        if source.is_shared and self._lender is not None:
            return self._lender.lend(source)
        return source.numpy()

    def as_output(self) -> Output:
        source = self._data
        data = source.torch() if source.on_device else source.numpy()
        return Output(self._name, self._datatype, data)

    def as_call_input(self) -> CallInput:
        """Return the tensor as an input of a call; a tensor in shared memory is not copied."""
        source = self._data
        wire_data: Any = source.raw if source.memory_range is None else source.memory_range
        if source.memory_range is None and source.on_device:
            from shmserve.workers.memory.tensors import to_host

            wire_data = to_host(source.raw)
        return CallInput(self._name, self._datatype, source.shape, wire_data)

    def detach(self) -> None:
        """Copy shared data, because the model keeps the tensor beyond its request."""
        self._data.detach()

    def _device(self) -> tuple[int, int]:
        return _dlpack_device(self._data.torch()) if self._data.on_device else _CPU

    def _array(self) -> Array:
        return self._data.numpy()

    def _torch(self) -> torch.Tensor:
        # Copied, because a consumer may write to the memory without detection.
        tensor = self._data.torch()
        return tensor.clone() if self._data.is_shared else tensor
