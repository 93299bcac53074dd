"""An offline model on one Ascend device, through pyACL (`import acl`): loaded, run, taken apart.

All memory on the device is laid out at load. Each of these is one allocation; its shapes are fixed,
so nothing is allocated after them, and the sizes of tensors are known once the model lies in the
first.

    session    | weights | workspace |
    tensors    | input 0 | input 1 | ... | output 0 | ... |

    init, device, context ─> sizes ─> memory ─> model in it ─> description ─> memory ─> datasets
    finalize  <── in the reverse order ────────────────────────────────────────────────────┘

Written by the documentation of CANN 8 and tested against a recorded sequence of calls; it has not
run on hardware.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

from shmserve.errors import InvalidArgument, Unavailable
from shmserve.ipc.tensors.datatypes import element_count

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


logger = logging.getLogger(__name__)

_HUGE_PAGES_FIRST = 0
_TO_DEVICE, _TO_HOST = 1, 2
# ACL's numbers of the datatypes.
_DATATYPES = {
    0: "FP32",
    1: "FP16",
    2: "INT8",
    3: "INT32",
    4: "UINT8",
    6: "INT16",
    7: "UINT16",
    8: "UINT32",
    9: "INT64",
    10: "UINT64",
    11: "FP64",
    12: "BOOL",
    27: "BF16",
}


class AclError(Exception):
    """A call of the library failed."""


@dataclass(frozen=True, slots=True)
class OfflineTensor:
    """An input or output of the file: `dims` with the batch dimension, if it has one; `byte_size`
    of all."""

    name: str
    datatype: str
    dims: tuple[int, ...]
    byte_size: int


def import_acl() -> Any:
    """pyACL. Raises Unavailable where CANN is not installed, or not set up."""
    try:
        return importlib.import_module("acl")
    except ImportError as error:
        raise Unavailable(
            f"backend 'ascend' needs pyACL, whose module acl cannot be imported ({error}): install "
            "CANN (driver, firmware and toolkit or nnrt) and run its set_env.sh before the server "
            "starts"
        ) from None


class OfflineModel:
    """A file on device `device_id`. All calls come from the thread that made it, whose context it
    uses.

    Raises Unavailable without pyACL, InvalidArgument for tensors that cannot be served, AclError
    for what the library refuses; then nothing is left on the device.
    """

    def __init__(self, path: Path, device_id: int) -> None:
        self._acl = import_acl()
        with contextlib.ExitStack() as stack:
            self._open(stack, str(path), device_id)
            self._undo = stack.pop_all()

    def _open(self, stack: contextlib.ExitStack, path: str, device_id: int) -> None:
        acl = self._acl
        self._check("acl.init", acl.init())
        self._later(stack, "acl.finalize", acl.finalize)
        self._check("acl.rt.set_device", acl.rt.set_device(device_id))
        self._later(stack, "acl.rt.reset_device", acl.rt.reset_device, device_id)
        context = self._made("acl.rt.create_context", acl.rt.create_context(device_id))
        self._later(stack, "acl.rt.destroy_context", acl.rt.destroy_context, context)

        workspace, weights, error = acl.mdl.query_size(path)
        self._check("acl.mdl.query_size", error)
        (at_weights, at_workspace), size = layout([weights, workspace])
        base = self._allocate(stack, size)
        where = (base + at_workspace, workspace, base + at_weights, weights)
        loaded = acl.mdl.load_from_file_with_mem(path, *where)
        self._model = self._made("acl.mdl.load_from_file_with_mem", loaded)
        self._later(stack, "acl.mdl.unload", acl.mdl.unload, self._model)

        description = acl.mdl.create_desc()
        self._later(stack, "acl.mdl.destroy_desc", acl.mdl.destroy_desc, description)
        self._check("acl.mdl.get_desc", acl.mdl.get_desc(description, self._model))
        self.inputs = self._tensors(description, "input")
        self.outputs = self._tensors(description, "output")
        sizes = [tensor.byte_size for tensor in (*self.inputs, *self.outputs)]
        offsets, size = layout(sizes)
        base = self._allocate(stack, size)
        count = len(self.inputs)
        self._input_at = [base + offset for offset in offsets[:count]]
        self._output_at = [base + offset for offset in offsets[count:]]
        self._input_set = self._dataset(stack, self.inputs, self._input_at)
        self._output_set = self._dataset(stack, self.outputs, self._output_at)
        parts = {"weights": weights, "workspace": workspace}
        parts |= {"inputs": sum(sizes[:count]), "outputs": sum(sizes[count:])}
        logger.info("static plan: %s", summary(parts))

    def _allocate(self, stack: contextlib.ExitStack, byte_size: int) -> int:
        made = self._acl.rt.malloc(byte_size, _HUGE_PAGES_FIRST)
        base: int = self._made(f"acl.rt.malloc of {byte_size} bytes", made)
        self._later(stack, "acl.rt.free", self._acl.rt.free, base)
        return base

    def _tensors(self, description: Any, side: str) -> tuple[OfflineTensor, ...]:
        mdl = self._acl.mdl
        count = getattr(mdl, f"get_num_{side}s")(description)
        return tuple(self._tensor(description, side, index) for index in range(count))

    def _tensor(self, description: Any, side: str, index: int) -> OfflineTensor:
        mdl = self._acl.mdl
        name = getattr(mdl, f"get_{side}_name_by_index")(description, index)
        number = getattr(mdl, f"get_{side}_data_type")(description, index)
        got = getattr(mdl, f"get_{side}_dims")(description, index)
        dims = tuple(self._made(f"acl.mdl.get_{side}_dims", got)["dims"])
        size = getattr(mdl, f"get_{side}_size_by_index")(description, index)
        datatype = _DATATYPES.get(number)
        if datatype is None:
            raise InvalidArgument(f"{side} '{name}' has ACL's datatype {number}: no client has it")
        if any(dim < 1 for dim in dims) or not element_count(dims):
            raise InvalidArgument(
                f"{side} '{name}' has the shape {list(dims)}: only static shapes are served, so "
                "convert the model without dynamic dimensions"
            )
        return OfflineTensor(name, datatype, dims, size)

    def _dataset(
        self, stack: contextlib.ExitStack, tensors: Sequence[OfflineTensor], where: Sequence[int]
    ) -> Any:
        acl = self._acl
        dataset = acl.mdl.create_dataset()
        self._later(stack, "acl.mdl.destroy_dataset", acl.mdl.destroy_dataset, dataset)
        for tensor, address in zip(tensors, where, strict=True):
            buffer = acl.create_data_buffer(address, tensor.byte_size)
            self._later(stack, "acl.destroy_data_buffer", acl.destroy_data_buffer, buffer)
            added = acl.mdl.add_dataset_buffer(dataset, buffer)
            self._made("acl.mdl.add_dataset_buffer", added)
        return dataset

    def put(self, index: int, at: int, address: int, byte_size: int) -> None:
        """Copy host bytes into input `index`, from its byte `at` on."""
        there = self._input_at[index] + at
        room = self.inputs[index].byte_size - at
        copied = self._acl.rt.memcpy(there, room, address, byte_size, _TO_DEVICE)
        self._check("acl.rt.memcpy", copied)

    def run(self) -> None:
        """Run the model on what its inputs are; returns when its outputs are there."""
        done = self._acl.mdl.execute(self._model, self._input_set, self._output_set)
        self._check("acl.mdl.execute", done)

    def fetch(self, index: int, address: int, byte_size: int) -> None:
        """Copy the first bytes of output `index` to the host."""
        there = self._output_at[index]
        copied = self._acl.rt.memcpy(address, byte_size, there, byte_size, _TO_HOST)
        self._check("acl.rt.memcpy", copied)

    def close(self) -> None:
        """Take all apart, in the reverse order."""
        self._undo.close()

    def _made(self, call: str, result: Any) -> Any:
        value, error = result
        self._check(call, error)
        return value

    def _check(self, call: str, error: int) -> None:
        if error:
            raise AclError(f"{call} failed with error {error}")

    def _later(
        self, stack: contextlib.ExitStack, call: str, undo: Callable[..., int], *given: Any
    ) -> None:
        def end() -> None:
            error = undo(*given)
            if error:  # go on: the rest wants to be given back, too
                logger.warning("%s failed with error %d", call, error)

        stack.callback(end)
