"""Control inputs: the tensors that tell a model where in its sequence a request is (pure).

One element each, shape [1], or [1, 1] where the model batches.
"""

from __future__ import annotations

import struct

from shmserve.ipc.messages.inference import SequenceRow
from shmserve.ipc.model_spec import CORRELATION_ID, ModelSpec
from shmserve.ipc.tensors.datatypes import ITEM_SIZE
from shmserve.ipc.tensors.inference import SEQUENCE_END, SEQUENCE_START
from shmserve.ipc.transport.records import record
from shmserve.workers.batch.request import Input

_START, _READY = "CONTROL_SEQUENCE_START", "CONTROL_SEQUENCE_READY"
_END = "CONTROL_SEQUENCE_END"
# Of each pair [false, true] its datatype, and how struct packs one.
_PAIRS = {
    "int32_false_true": ("INT32", "<i"),
    "fp32_false_true": ("FP32", "<f"),
    "bool_false_true": ("BOOL", "<?"),
}


@record
class ControlInput:
    """One control input: the bytes of its false and its true; of the correlation id none."""

    name: str
    kind: str
    datatype: str
    values: tuple[bytes, bytes] = (b"", b"")

    def data(self, row: SequenceRow) -> bytes:
        """Its bytes for a row."""
        if self.kind == CORRELATION_ID:
            return self._id(row)
        ready = row.key != 0
        says = {
            _START: ready and row.flags & SEQUENCE_START,
            _END: ready and row.flags & SEQUENCE_END,
            _READY: ready,
        }
        return self.values[bool(says[self.kind])]

    def _id(self, row: SequenceRow) -> bytes:
        if self.datatype == "BYTES":
            text = row.correlation_text.encode()
            return struct.pack("<I", len(text)) + text
        # The low bytes of what is too large, as Triton has it.
        return (row.correlation_id % 2**64).to_bytes(8, "little")[: ITEM_SIZE[self.datatype]]


def read(config: ModelSpec) -> list[ControlInput]:
    """The control inputs of a model's configuration."""
    batching = config.sequence_batching
    found: list[ControlInput] = []
    for name, control in batching.controls if batching is not None else ():
        if control.kind == CORRELATION_ID:
            found.append(ControlInput(name, control.kind, control.datatype))
            continue
        for field, (datatype, packing) in _PAIRS.items():
            if pair := getattr(control, field):
                false, true = (struct.pack(packing, value) for value in pair)
                found.append(ControlInput(name, control.kind, datatype, (false, true)))
    return found


def inputs(controls: list[ControlInput], row: SequenceRow, batched: bool) -> dict[str, Input]:
    """The control inputs of a row, by name."""
    shape = (1, 1) if batched else (1,)
    return {
        control.name: Input(
            control.name, control.datatype, shape, memoryview(bytearray(control.data(row)))
        )
        for control in controls
    }
