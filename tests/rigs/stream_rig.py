"""A decoupled model in an instance, asked by a scheduler that the test plays."""

import contextlib
from collections.abc import Iterator
from typing import Any

import numpy as np

from shmserve.ipc.messages import inference as m
from shmserve.ipc.tensors.arrays import NUMPY_DTYPES
from shmserve.ipc.tensors.descriptors import Range
from shmserve.ipc.tensors.schemas import (
    Inference,
    RequestedOutput,
    pack_inference,
    unpack_inferred,
)
from tests.rigs.worker_rig import CLIENT_PID, Rig, model_config, tensor, tensor_config
from tests.support.waiting import repeating, until

DECOUPLED_CONFIG = model_config(
    [tensor_config("X", "FP32", [-1])],
    [tensor_config("Y", "FP32", [-1])],
    model_transaction_policy={"decoupled": True},
)


class Streams:
    """Requests with input `x` and output `y` to the model of `rig`, and their responses."""

    def __init__(self, rig: Rig, x: str = "X", y: str = "Y", rows: bool = False) -> None:
        self.rig = rig
        self.messages: list[Any] = []
        self._x = x
        self._y = y
        self._rows = rows  # whether inputs have a batch dimension

    def begin(self, *values: Any, memory_range: Range | None = None, output: Any = None) -> None:
        """Send one batch with a request for each value; the keys are 1, 2, ..."""
        outputs = (RequestedOutput(self._y, output),) if output is not None else ()
        work_items = []
        for key, value in enumerate(values, 1):
            array = np.atleast_1d(np.asarray(value, np.float32))
            x = tensor(self._x, array.reshape(1, -1) if self._rows else array, memory_range)
            packed = pack_inference(Inference((x,), outputs))
            work_items.append(m.Work(key, CLIENT_PID, *packed, f"id-{key}"))
        self.rig.execute(work_items)

    def responses(self, key: int, count: int = 0) -> list[Any]:
        """Return the responses (values, errors, "end") to a request up to its end, or the first."""
        events: list[Any] = []

        def has_expected_events() -> bool:
            self.messages += self.rig.sent(0.05)
            events[:] = [event for message in self.messages for event in self._show(message, key)]
            return "end" in events or (count > 0 and len(events) >= count)

        until("all has come", has_expected_events)
        return events

    def _show(self, message: Any, key: int) -> Iterator[Any]:
        if not isinstance(message, m.ExecutionResponded) or message.key != key:
            return
        assert message.computed_ns <= message.written_ns
        if message.code:
            yield message.message
        elif message.schema:
            (output,) = unpack_inferred(message.schema, message.data).outputs
            arena, data = self.rig.context.arena, output.data
            if isinstance(data, Range) and data.memory.id != arena.memory.id:
                yield "in its place"
            else:
                raw = data if isinstance(data, bytes) else arena.view(data)
                yield np.frombuffer(raw, NUMPY_DTYPES[output.datatype]).tolist()
        if message.final:
            yield "end"

    @property
    def replies(self) -> list[str]:
        """Return the error texts of the last batch's replies."""
        return [reply.message for reply in self.rig.finished.replies]

    def cancel(self, key: int) -> None:
        self.post(m.CancelExecution(key))

    def credit(self, key: int, responses: int) -> None:
        self.post(m.CreditExecution(key, responses))

    def post(self, message: Any) -> None:
        self.rig.scheduler.post(self.rig._peer, message)
        self.rig.scheduler.flush()

    @contextlib.contextmanager
    def pumping(self) -> Iterator[None]:
        """Run a thread that reads the socket as the loop does while no batch runs."""

        def pump() -> None:
            self.rig.context.control.wait(0.05)
            self.rig.instance.link.pump()
            self.rig.instance._writer.end_abandoned()

        with repeating(pump):
            yield
