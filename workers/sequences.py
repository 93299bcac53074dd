"""Sequences in a worker: the inputs that the server adds to requests, and the executor.

A control is an input with the position of a request in its sequence (such as START), or with the
sequence's id. The control has one element and the shape [1], or [1, 1] if the model batches. A
state is an output that returns as an input of the sequence's next request:

    config ──> StateSpec ──START──> initial value ──> an input of the request
                                         ^                     │ the model
                                         └── its output <──────┘

The value of a state stays on the device where the model has computed it, in one buffer while its
size is constant. The worker never sends the value to the scheduler, and releases the value with its
sequence: after the execution of an END, or when the scheduler sends `EndSequences`.

The scheduler assigns rows of a batch to sequences. A request that a model has received has changed
the state of its sequence. The request is therefore never executed again. A request whose client has
disconnected is executed, too, because the next requests of its sequence depend on the state.
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
from shmserve.ipc.tensors.samples import read_data
from shmserve.ipc.tensors.schemas import (
    SEQUENCE_END,
    SEQUENCE_START,
    Inference,
    RequestSchema,
    pack_inference,
)
from shmserve.ipc.transport.frames import Record
from shmserve.workers.batch.backend_request import Input, Output, Request, Response
from shmserve.workers.batch.execute import Executor
from shmserve.workers.batch.response_stream import OutputStream
from shmserve.workers.links import HandlerTable, WorkerRequest

_START, _READY = "CONTROL_SEQUENCE_START", "CONTROL_SEQUENCE_READY"
_END = "CONTROL_SEQUENCE_END"
# The datatype and the `struct` format of a control, by the field with its values [false, true].
_CONTROL_FORMATS = {
    "int32_false_true": ("INT32", "<i"),
    "fp32_false_true": ("FP32", "<f"),
    "bool_false_true": ("BOOL", "<?"),
}


class ControlInput(Record):
    """A control input of a sequence model.

    Attributes:
        name: The name of the input.
        kind: The kind of the control, such as CONTROL_SEQUENCE_START.
        datatype: The datatype.
        values: The bytes of the input's element for false and for true; unused by a correlation id.
    """

    name: str
    kind: str
    datatype: str
    values: tuple[bytes, bytes] = (b"", b"")

    def encode(self, row: SequenceRow) -> bytes:
        """Return the bytes of the control for a row."""
        if self.kind == CORRELATION_ID:
            return self._encode_id(row)
        is_ready = row.key != 0
        states = {
            _START: is_ready and row.flags & SEQUENCE_START,
            _END: is_ready and row.flags & SEQUENCE_END,
            _READY: is_ready,
        }
        return self.values[bool(states[self.kind])]

    def _encode_id(self, row: SequenceRow) -> bytes:
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
        for field_name, (datatype, struct_format) in _CONTROL_FORMATS.items():
            if false_and_true := getattr(control, field_name):
                false, true = (struct.pack(struct_format, value) for value in false_and_true)
                controls.append(ControlInput(name, control.kind, datatype, (false, true)))
    return controls


def control_inputs(
    controls: list[ControlInput], row: SequenceRow, is_batched: bool
) -> dict[str, Input]:
    """Return the control inputs of a row, by name."""
    shape = (1, 1) if is_batched else (1,)
    return {
        control.name: Input(
            control.name, control.datatype, shape, memoryview(bytearray(control.encode(row)))
        )
        for control in controls
    }


_INITIAL_STATE_FOLDER = "initial_state"
_LENGTH_PREFIX_BYTES = 4  # bytes of the length prefix of a text


class StateSpec(Record):
    """A state of a configuration.

    Attributes:
        shape: The initial shape, with the batch dimension if there is one.
        initial_value: The initial bytes.
        same_buffer: Whether the model receives the buffer itself, and may write its output there.
    """

    input_name: str
    output_name: str
    datatype: str
    shape: tuple[int, ...]
    initial_value: bytes
    same_buffer: bool


class _StateValue(Record):
    """A state of a sequence: `raw` is host bytes, or a flat tensor of uint8 on a device."""

    datatype: str
    shape: tuple[int, ...]
    raw: Any  # bytes


class States:
    """The states of the sequences of one instance, by slot (see `SequenceRow`).

    With `copy_states`, states are copied for a model that may write into its inputs.
    """

    def __init__(self, specs: list[StateSpec], copy_states: bool) -> None:
        self._specs = specs
        self._copy_states = copy_states
        self._values_by_slot: dict[int, dict[str, _StateValue]] = {}
        self.output_names = tuple(spec.output_name for spec in specs)

    def add_inputs(self, request: Request, row: SequenceRow) -> tuple[tuple[int, ...], ...]:
        """Add the states of a sequence to a request's inputs; return their shapes."""
        if not self._specs:
            return ()
        if row.flags & SEQUENCE_START:
            self.release(row.slot)
        values = self._values_by_slot.setdefault(row.slot, {})
        for spec in self._specs:
            value = values.get(spec.input_name)
            if value is None:
                data = memoryview(bytearray(spec.initial_value))
                value = values[spec.input_name] = _StateValue(spec.datatype, spec.shape, data)
            request.inputs[spec.input_name] = self._create_input(spec, value)
        request.states = self.output_names
        return tuple(values[spec.input_name].shape for spec in self._specs)

    def _create_input(self, spec: StateSpec, value: _StateValue) -> Input:
        data = value.raw
        if self._copy_states and not spec.same_buffer:
            data = memoryview(bytearray(data)) if isinstance(data, memoryview) else data.clone()
        fields, in_place = (spec.input_name, value.datatype, value.shape, data), spec.same_buffer
        on_device = not isinstance(data, memoryview)
        return Input(*fields, on_device=on_device, is_state=not in_place, is_private=in_place)

    def __len__(self) -> int:
        """Return the number of sequences whose states are stored."""
        return len(self._values_by_slot)

    def release(self, slot: int) -> None:
        """Release the state of the sequence in a slot, if it has any."""
        self._values_by_slot.pop(slot, None)

    def clear(self) -> None:
        """Release the states of all sequences."""
        self._values_by_slot.clear()

    def store(self, row: SequenceRow, response: Response, client_outputs: frozenset[str]) -> None:
        """Store the states of a response; the old value of a missing state is kept.

        Outputs that are only states are removed, unless they are in `client_outputs`.
        """
        if not self._specs or response.error is not None:
            return
        values = self._values_by_slot[row.slot]
        outputs = {output.name: output for output in (*response.outputs, *response.states)}
        for spec in self._specs:
            output = outputs.get(spec.output_name)
            if output is not None:
                values[spec.input_name] = _updated_value(values[spec.input_name], output)
        state_names = self.output_names
        response.outputs = [
            o for o in response.outputs if o.name not in state_names or o.name in client_outputs
        ]
        response.states = []


def _updated_value(value: _StateValue, output: Output) -> _StateValue:
    array = output.data
    shape = tuple(array.shape)
    if isinstance(array, np.ndarray):
        if output.datatype == "BYTES":
            return _StateValue("BYTES", shape, memoryview(bytearray(encode_bytes(array))))
        new_bytes = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    else:
        import torch

        new_bytes = array.detach().contiguous().reshape(-1).view(torch.uint8)
        if new_bytes.device.type == "cpu":
            new_bytes = new_bytes.numpy()
    return _StateValue(output.datatype, shape, _store_bytes(value.raw, new_bytes))


def _store_bytes(old_bytes: Any, new_bytes: Any) -> Any:
    """Return the new value of a state.

    The value is copied into the existing buffer if it fits, otherwise into a new buffer.
    """
    if isinstance(new_bytes, np.ndarray):
        if not isinstance(old_bytes, memoryview) or len(old_bytes) != new_bytes.nbytes:
            return memoryview(bytearray(new_bytes))
        buffer = np.frombuffer(old_bytes, np.uint8)
        if buffer.ctypes.data != new_bytes.ctypes.data:
            buffer[:] = new_bytes
        return old_bytes
    if (
        isinstance(old_bytes, memoryview)
        or old_bytes.nbytes != new_bytes.nbytes
        or old_bytes.device != new_bytes.device
    ):
        return new_bytes.clone()
    if old_bytes.data_ptr() != new_bytes.data_ptr():
        old_bytes.copy_(new_bytes)
    return old_bytes


def read_states(config: ModelSpec, model_dir: Path) -> list[StateSpec]:
    """Return the states of a model's configuration, with their initial values.

    Raises:
        InvalidArgument: A data file cannot be read or is too short.
    """
    batching = config.sequence_batching
    states = batching.state if batching is not None else ()
    return [_state_spec(state, model_dir, config.max_batch_size > 0) for state in states]


def _state_spec(state: SequenceState, model_dir: Path, is_batched: bool) -> StateSpec:
    datatype = state.datatype
    initial_state = (*state.initial_state, InitialState())[0]
    shape = tuple(1 if dim == -1 else dim for dim in initial_state.dims or state.dims)
    byte_size = element_count(shape) * (ITEM_SIZE[datatype] or _LENGTH_PREFIX_BYTES)
    initial_bytes = bytes(byte_size)
    if initial_state.data_file:
        file_text = f"the data file of state '{state.input_name}'"
        initial_bytes = read_data(
            model_dir / _INITIAL_STATE_FOLDER,
            initial_state.data_file,
            byte_size if ITEM_SIZE[datatype] else None,
            setting="initial_state",
            outside_error=f"{file_text} must lie in the model's folder '{_INITIAL_STATE_FOLDER}'",
            read_error=f"{file_text} cannot be read",
        )
    full_shape = (1, *shape) if is_batched else shape
    names = (state.input_name, state.output_name)
    same_buffer = state.use_same_buffer_for_input_output
    return StateSpec(*names, datatype, full_shape, initial_bytes, same_buffer)


_EMPTY_INFERENCE = pack_inference(Inference(()))
_NULL_WORK = Work(0, 0, *_EMPTY_INFERENCE)
_NULL_SCHEMA = RequestSchema(_EMPTY_INFERENCE[0])
_NULL_ROW = SequenceRow(0, 0)


@dataclass(eq=False)
class SequenceExecutor(Executor):
    """The executor of batches of sequences."""

    _config: ModelSpec

    _skips_cancelled = False

    def __post_init__(self) -> None:
        super().__post_init__()
        config = self._config
        self._controls = read_controls(config)
        self._supports_batching = config.max_batch_size > 0
        # Always copies, because requests of sequences are not retried with copies.
        self._input_policy.copies_inputs = True
        states = read_states(config, self._context.model_dir)
        self._states = States(states, self._backend.read_only_inputs)
        # The outputs that are also sent to clients.
        self._client_outputs = frozenset(output.name for output in config.output)
        batching = config.sequence_batching
        self._has_fixed_rows = batching is not None and batching.oldest is None
        self._max_part_bytes = 1 << 63  # unlimited, because the rows of a batch run together
        self._rows: list[SequenceRow] = []  # of the running batch

    def handlers(self) -> HandlerTable:
        return {**super().handlers(), EndSequences: self._end_sequences}

    def _end_sequences(self, message: EndSequences, _: list[WorkerRequest]) -> None:
        for slot in message.slots:
            self._states.release(slot)

    def on_scheduler_change(self) -> None:
        self._states.clear()

    def execute(self, batch: Execute, requests: list[WorkerRequest]) -> BatchFinished:
        self._rows = batch.rows
        message = super().execute(batch, requests)
        rescheduled_keys = {reply.key for reply in message.replies if reply.code == RESCHEDULED}
        for row in batch.rows:
            if row.flags & SEQUENCE_END and row.key not in rescheduled_keys:
                self._states.release(row.slot)
        return message

    def _control_inputs(self, row: SequenceRow) -> dict[str, Input]:
        return control_inputs(self._controls, row, self._supports_batching)

    def run_warmup(self, requests: list[Request]) -> list[ShmserveError]:
        """Run warm-up requests: each is a whole sequence, unless it has its own controls."""
        for slot, request in enumerate(requests):
            key = request.work.key
            row = SequenceRow(slot, key, SEQUENCE_START | SEQUENCE_END, key)
            request.inputs = self._control_inputs(row) | request.inputs
            self._states.add_inputs(request, row)
        try:
            return super().run_warmup(requests)
        finally:
            self._states.clear()

    def _run(self, open_requests: list[WorkerRequest], requests: list[Request]) -> list[Reply]:
        pairs = zip(open_requests, requests, strict=True)
        requests_by_key = {r.key: _RowRequest(r, request) for r, request in pairs}
        requests_by_shapes: dict[Any, list[_RowRequest]] = {}
        for row in self._rows:
            row_request = requests_by_key.get(row.key)
            if row_request is not None:
                row_request.row = row
                row_request.request.work = _with_ids(row_request.request.work, row)
                row_request.request.inputs |= self._control_inputs(row)
                shapes = self._states.add_inputs(row_request.request, row)
                requests_by_shapes.setdefault(shapes, []).append(row_request)
        if self._is_decoupled:
            streams = [
                OutputStream(self._writer, r.open_request, r.request)
                for r in requests_by_key.values()
            ]
            return self._run_streams(streams)
        # States of different shapes cannot be in one batch.
        return [reply for group in requests_by_shapes.values() for reply in self._run_rows(group)]

    def _run_rows(self, row_requests: list[_RowRequest]) -> list[Reply]:
        requests = [row_request.request for row_request in row_requests]
        if self._has_fixed_rows:
            requests = self._with_null_rows(row_requests)
        try:
            responses = self._execute(requests)
        except BaseException as error:  # SystemExit, too: a model must not end its worker
            client_error = self._client_error
            return [
                self._close_with_error(r.open_request, client_error(error, r.request))
                for r in row_requests
            ]
        pairs = zip(requests, responses, strict=True)
        response_by_id = {id(request): response for request, response in pairs}
        with self._link.lock:
            self._link.pump()
            replies = [self._respond(r, response_by_id[id(r.request)]) for r in row_requests]
            self._writer.scatterer.finish_writes()
        return replies

    def _with_null_rows(self, requests: list[_RowRequest]) -> list[Request]:
        """Return the requests in their rows, with null rows before and between them."""
        by_slot = {row_request.row.slot: row_request.request for row_request in requests}
        return [by_slot.get(row.slot) or self._null_request(requests[0], row) for row in self._rows]

    def _null_request(self, template: _RowRequest, row: SequenceRow) -> Request:
        """Return a null row: a request without a client, with zeros in the shapes of `template`."""
        inputs: dict[str, Input] = {}
        for name, source in template.request.inputs.items():
            item_bytes = ITEM_SIZE[source.datatype] or _LENGTH_PREFIX_BYTES
            zeros = memoryview(bytearray(item_bytes * element_count(source.shape)))
            inputs[name] = Input(name, source.datatype, source.shape, zeros, None, source.model)
        inputs |= self._control_inputs(SequenceRow(row.slot, 0))
        null_request = Request(_NULL_WORK, _NULL_SCHEMA, template.request.batch_size, inputs, {})
        null_request.states = template.request.states
        return null_request

    def _respond(self, row_request: _RowRequest, response: Response) -> Reply:
        open_request, request = row_request.open_request, row_request.request
        try:
            self._states.store(row_request.row, response, self._client_outputs)
        except BaseException as error:  # a text that is not Unicode, or too little memory
            return self._close_with_error(open_request, self._client_error(error, request))
        if response.is_rescheduled:
            reply: Reply | None = Reply(open_request.key, RESCHEDULED, "")
        else:
            reply = self._scatter(open_request, request, response)
        assert reply is not None  # None would mean that the request runs again
        return reply


@dataclass(slots=True, eq=False)
class _RowRequest:
    """A request and its row in the batch."""

    open_request: WorkerRequest
    request: Request
    row: SequenceRow = _NULL_ROW


def _with_ids(work: Work, row: SequenceRow) -> Work:
    """Return the work with the ids and flags that the scheduler has assigned.

    The scheduler gives ids to requests without one, and removes flags of requests that run again.
    """
    assigned_fields = (row.flags, row.correlation_id, row.correlation_text)
    if (work.flags, work.correlation_id, work.correlation_text) == assigned_fields:
        return work
    flags, correlation_id, correlation_text = assigned_fields
    return replace(
        work, flags=flags, correlation_id=correlation_id, correlation_text=correlation_text
    )
