"""Sequences in a worker: the inputs that the server adds to requests, and the executor.

A control is the position of a request in its sequence. It has one element and the shape [1], or [1,
1] if the model batches. A state is an output that returns as an input of the sequence's next
request:

    config ──> StateSpec ──START──> initial value ──> an input of the request
                                         ^                     │ the model
                                         └── its output <──────┘

A value stays in the memory that the model has written, and in the same buffer while its size is
constant. It is never sent to the scheduler. It is released with its sequence: after an END was
executed, or when the scheduler sends `EndSequences`.

The scheduler assigns rows of a batch to sequences. A request that a model has received has changed
its state. It is therefore never executed again, and a request whose client has disconnected is
executed, too.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from shmserve.errors import ShmserveError
from shmserve.ipc.messages.inference import (
    RESCHEDULED,
    BatchFinished,
    EndSequences,
    Execute,
    Reply,
    SequenceRow,
    Work,
)
from shmserve.ipc.model_spec import CORRELATION_ID, InitialState, ModelSpec, SequenceState
from shmserve.ipc.tensors.arrays import encode_bytes
from shmserve.ipc.tensors.datatypes import ITEM_SIZE, element_count
from shmserve.ipc.tensors.inference import (
    SEQUENCE_END,
    SEQUENCE_START,
    Inference,
    RequestSchema,
    pack_inference,
)
from shmserve.ipc.tensors.samples import read_data
from shmserve.ipc.transport.records import record
from shmserve.workers.batch.execute import Executor
from shmserve.workers.batch.request import Input, Output, Request, Response
from shmserve.workers.batch.response_stream import ResponseStream
from shmserve.workers.links.scheduler import MessageTable, WorkerRequest

_START, _READY = "CONTROL_SEQUENCE_START", "CONTROL_SEQUENCE_READY"
_END = "CONTROL_SEQUENCE_END"
# The datatype of each pair [false, true], and its format for struct.
_PAIRS = {
    "int32_false_true": ("INT32", "<i"),
    "fp32_false_true": ("FP32", "<f"),
    "bool_false_true": ("BOOL", "<?"),
}


@record
class ControlInput:
    """A control input, with the bytes of its values for false and true.

    A correlation id has neither.
    """

    name: str
    kind: str
    datatype: str
    values: tuple[bytes, bytes] = (b"", b"")

    def data(self, row: SequenceRow) -> bytes:
        """Return the bytes of the control for a row."""
        if self.kind == CORRELATION_ID:
            return self._id(row)
        ready = row.key != 0
        states = {
            _START: ready and row.flags & SEQUENCE_START,
            _END: ready and row.flags & SEQUENCE_END,
            _READY: ready,
        }
        return self.values[bool(states[self.kind])]

    def _id(self, row: SequenceRow) -> bytes:
        if self.datatype == "BYTES":
            text = row.correlation_text.encode()
            return struct.pack("<I", len(text)) + text
        # Too large values are truncated to the low bytes, as in Triton.
        return (row.correlation_id % 2**64).to_bytes(8, "little")[: ITEM_SIZE[self.datatype]]


def read_controls(config: ModelSpec) -> list[ControlInput]:
    """Return the control inputs of a model's configuration."""
    batching = config.sequence_batching
    controls: list[ControlInput] = []
    for name, control in batching.controls if batching is not None else ():
        if control.kind == CORRELATION_ID:
            controls.append(ControlInput(name, control.kind, control.datatype))
            continue
        for field, (datatype, packing) in _PAIRS.items():
            if pair := getattr(control, field):
                false, true = (struct.pack(packing, value) for value in pair)
                controls.append(ControlInput(name, control.kind, datatype, (false, true)))
    return controls


def control_inputs(
    controls: list[ControlInput], row: SequenceRow, batched: bool
) -> dict[str, Input]:
    """Return the control inputs of a row, by name."""
    shape = (1, 1) if batched else (1,)
    return {
        control.name: Input(
            control.name, control.datatype, shape, memoryview(bytearray(control.data(row)))
        )
        for control in controls
    }


_FOLDER = "initial_state"
_STRING_HEAD = 4  # bytes of the length prefix of a text


@record
class StateSpec:
    """A state of a configuration.

    Attributes:
        shape: The initial shape, with the batch dimension if there is one.
        initial: The initial bytes.
        same_buffer: Whether the model receives the buffer itself, and may write its output there.
    """

    input_name: str
    output_name: str
    datatype: str
    shape: tuple[int, ...]
    initial: bytes
    same_buffer: bool


@record
class _Value:
    """A state of a sequence: `raw` is host bytes, or a flat tensor of uint8 on a device."""

    datatype: str
    shape: tuple[int, ...]
    raw: Any


class States:
    """The states of the sequences of one instance, by slot.

    With `copies`, states are copied for a model that may write into its inputs.
    """

    def __init__(self, specs: list[StateSpec], copies: bool) -> None:
        self._specs = specs
        self._copies = copies
        self._by_slot: dict[int, dict[str, _Value]] = {}
        self.outputs = tuple(spec.output_name for spec in specs)

    def lend(self, request: Request, row: SequenceRow) -> tuple[tuple[int, ...], ...]:
        """Add the states of a sequence to a request's inputs; return their shapes."""
        if not self._specs:
            return ()
        if row.flags & SEQUENCE_START:
            self.release(row.slot)
        values = self._by_slot.setdefault(row.slot, {})
        for spec in self._specs:
            value = values.get(spec.input_name)
            if value is None:
                raw = memoryview(bytearray(spec.initial))
                value = values[spec.input_name] = _Value(spec.datatype, spec.shape, raw)
            request.inputs[spec.input_name] = self._input(spec, value)
        request.states = self.outputs
        return tuple(values[spec.input_name].shape for spec in self._specs)

    def _input(self, spec: StateSpec, value: _Value) -> Input:
        raw = value.raw
        if self._copies and not spec.same_buffer:
            raw = memoryview(bytearray(raw)) if isinstance(raw, memoryview) else raw.clone()
        return Input(
            spec.input_name,
            value.datatype,
            value.shape,
            raw,
            on_device=not isinstance(raw, memoryview),
            kept=not spec.same_buffer,
            writable=spec.same_buffer,
        )

    def __len__(self) -> int:
        """Return the number of sequences with state."""
        return len(self._by_slot)

    def release(self, slot: int) -> None:
        """Release the state of the sequence in a slot, if it has any."""
        self._by_slot.pop(slot, None)

    def clear(self) -> None:
        """Release the states of all sequences."""
        self._by_slot.clear()

    def keep(self, row: SequenceRow, response: Response, returned: frozenset[str]) -> None:
        """Store the states of a response; the old value of a missing state is kept.

        Outputs that are only states are removed, unless they are in `returned`.
        """
        if not self._specs or response.error is not None:
            return
        values = self._by_slot[row.slot]
        outputs = {output.name: output for output in (*response.outputs, *response.states)}
        for spec in self._specs:
            output = outputs.get(spec.output_name)
            if output is not None:
                values[spec.input_name] = _updated(values[spec.input_name], output)
        response.outputs = [
            output
            for output in response.outputs
            if output.name not in self.outputs or output.name in returned
        ]
        response.states = []


def _updated(value: _Value, output: Output) -> _Value:
    data = output.data
    shape = tuple(data.shape)
    if isinstance(data, np.ndarray):
        if output.datatype == "BYTES":
            return _Value("BYTES", shape, memoryview(bytearray(encode_bytes(data))))
        fresh = np.ascontiguousarray(data).reshape(-1).view(np.uint8)
    else:
        import torch

        fresh = data.detach().contiguous().reshape(-1).view(torch.uint8)
        if fresh.device.type == "cpu":
            fresh = fresh.numpy()
    return _Value(output.datatype, shape, _stored(value.raw, fresh))


def _stored(raw: Any, fresh: Any) -> Any:
    """Return the new value of a state.

    It is copied into the existing buffer if it fits, otherwise into a buffer of its own.
    """
    if isinstance(fresh, np.ndarray):
        if not isinstance(raw, memoryview) or len(raw) != fresh.nbytes:
            return memoryview(bytearray(fresh))
        buffer = np.frombuffer(raw, np.uint8)
        if buffer.ctypes.data != fresh.ctypes.data:
            buffer[:] = fresh
        return raw
    if isinstance(raw, memoryview) or raw.nbytes != fresh.nbytes or raw.device != fresh.device:
        return fresh.clone()
    if raw.data_ptr() != fresh.data_ptr():
        raw.copy_(fresh)
    return raw


def read_states(config: ModelSpec, model_dir: Path) -> list[StateSpec]:
    """Return the states of a model's configuration, with their initial values.

    Raises:
        InvalidArgument: A data file cannot be read or is too short.
    """
    batching = config.sequence_batching
    states = batching.state if batching is not None else ()
    return [_spec(state, model_dir, config.max_batch_size > 0) for state in states]


def _spec(state: SequenceState, model_dir: Path, batched: bool) -> StateSpec:
    datatype = state.datatype
    start = (*state.initial_state, InitialState())[0]
    shape = tuple(1 if dim == -1 else dim for dim in start.dims or state.dims)
    size = element_count(shape) * (ITEM_SIZE[datatype] or _STRING_HEAD)
    initial = bytes(size)
    if start.data_file:
        which = f"the data file of state '{state.input_name}'"
        initial = read_data(
            model_dir / _FOLDER,
            start.data_file,
            size if ITEM_SIZE[datatype] else None,
            setting="initial_state",
            outside=f"{which} must lie in the model's folder '{_FOLDER}'",
            unreadable=f"{which} cannot be read",
        )
    return StateSpec(
        state.input_name,
        state.output_name,
        datatype,
        (1, *shape) if batched else shape,
        initial,
        state.use_same_buffer_for_input_output,
    )


_NOTHING = pack_inference(Inference(()))
_NOBODY = Work(0, 0, *_NOTHING)
_NO_SCHEMA = RequestSchema(_NOTHING[0])
_NO_ROW = SequenceRow(0, 0)


@dataclass(eq=False)
class SequenceExecutor(Executor):
    """The executor of batches of sequences."""

    _config: ModelSpec

    _passes_over_cancelled = False

    def __post_init__(self) -> None:
        super().__post_init__()
        config = self._config
        self._controls = read_controls(config)
        self._batched = config.max_batch_size > 0
        # Always copies, because requests of sequences are not retried with copies.
        self._policy.copies = True
        self._states = States(
            read_states(config, self._context.model_dir), self._backend.read_only_inputs
        )
        # The outputs that are also sent to clients.
        self._returned = frozenset(output.name for output in config.output)
        sequences = config.sequence_batching
        self._keeps_rows = sequences is not None and sequences.oldest is None
        self._largest_part = 1 << 63  # unlimited, because the rows of a batch run together
        self._rows: list[SequenceRow] = []

    def messages(self) -> MessageTable:
        return {**super().messages(), EndSequences: self._end}

    def _end(self, message: EndSequences, _: list[WorkerRequest]) -> None:
        for slot in message.slots:
            self._states.release(slot)

    def attached(self) -> None:
        self._states.clear()

    def execute(self, batch: Execute, requests: list[WorkerRequest]) -> BatchFinished:
        self._rows = batch.rows
        try:
            return super().execute(batch, requests)
        finally:
            for row in batch.rows:
                if row.flags & SEQUENCE_END:
                    self._states.release(row.slot)

    def rehearse(self, requests: list[Request]) -> list[ShmserveError]:
        """Run warm-up requests: each is a whole sequence, unless it has its own controls."""
        for slot, request in enumerate(requests):
            key = request.work.key
            row = SequenceRow(slot, key, SEQUENCE_START | SEQUENCE_END, key)
            controls = control_inputs(self._controls, row, self._batched)
            request.inputs = controls | request.inputs
            self._states.lend(request, row)
        try:
            return super().rehearse(requests)
        finally:
            self._states.clear()

    def _run(self, opened: list[WorkerRequest], requests: list[Request]) -> list[Reply]:
        by_key = {each.key: _Row(each, it) for each, it in zip(opened, requests, strict=True)}
        by_shape: dict[Any, list[_Row]] = {}
        for row in self._rows:
            real = by_key.get(row.key)
            if real is not None:
                real.row = row
                real.request.work = _identified(real.request.work, row)
                real.request.inputs |= control_inputs(self._controls, row, self._batched)
                shapes = self._states.lend(real.request, row)
                by_shape.setdefault(shapes, []).append(real)
        if self._decoupled:
            each = [(real.opened, real.request) for real in by_key.values()]
            return self._run_streams([ResponseStream(self._writer, *pair) for pair in each])
        # States of other shapes cannot be in one batch.
        return [reply for rows in by_shape.values() for reply in self._run_rows(rows)]

    def _run_rows(self, real: list[_Row]) -> list[Reply]:
        requests = [each.request for each in real]
        if self._keeps_rows:
            requests = self._with_gaps(real)
        try:
            responses = self._execute(requests)
        except BaseException as error:  # SystemExit, too: a model must not end its worker
            return [self._failed(each.opened, self._explain(error, each.request)) for each in real]
        by_request = {id(request): each for request, each in zip(requests, responses, strict=True)}
        with self._link.lock:
            self._link.pump()
            replies = [self._respond(each, by_request[id(each.request)]) for each in real]
            self._writer.scatterer.finish_writes()
        return replies

    def _with_gaps(self, real: list[_Row]) -> list[Request]:
        """Return the requests in their rows, with null rows before and between them."""
        by_slot = {each.row.slot: each.request for each in real}
        return [by_slot.get(row.slot) or self._null(real[0], row) for row in self._rows]

    def _null(self, like: _Row, row: SequenceRow) -> Request:
        """Return a null row: a request without a client, with zeros in the shapes of `like`."""
        inputs: dict[str, Input] = {}
        for name, item in like.request.inputs.items():
            size = ITEM_SIZE[item.datatype] or _STRING_HEAD
            zeros = memoryview(bytearray(size * element_count(item.shape)))
            inputs[name] = Input(name, item.datatype, item.shape, zeros, None, item.model)
        inputs |= control_inputs(self._controls, SequenceRow(row.slot, 0), self._batched)
        null = Request(_NOBODY, _NO_SCHEMA, like.request.batch_size, inputs, {})
        null.states = like.request.states
        return null

    def _respond(self, each: _Row, response: Response) -> Reply:
        opened, request = each.opened, each.request
        self._states.keep(each.row, response, self._returned)
        if response.rescheduled:
            reply: Reply | None = Reply(opened.key, RESCHEDULED, "")
        else:
            reply = self._scatter(opened, request, response)
        assert reply is not None  # None would mean that the request runs again
        return reply


@dataclass(slots=True, eq=False)
class _Row:
    """A request and its row in the batch."""

    opened: WorkerRequest
    request: Request
    row: SequenceRow = _NO_ROW


def _identified(work: Work, row: SequenceRow) -> Work:
    """Return the work with the ids and flags that the scheduler has assigned.

    The scheduler gives ids to requests without one, and removes flags of requests that run again.
    """
    sequence = (row.flags, row.correlation_id, row.correlation_text)
    if (work.flags, work.correlation_id, work.correlation_text) == sequence:
        return work
    flags, number, text = sequence
    return replace(work, flags=flags, correlation_id=number, correlation_text=text)
