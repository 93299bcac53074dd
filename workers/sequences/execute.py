"""The executor of sequences: rows are placed by the scheduler, and no request runs twice.

A request that a model has received has changed its state. It is therefore never executed again, and
a request whose client has disconnected is executed, too.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

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
from shmserve.ipc.model_spec import ModelSpec
from shmserve.ipc.tensors.datatypes import ITEM_SIZE, element_count
from shmserve.ipc.tensors.inference import (
    SEQUENCE_END,
    SEQUENCE_START,
    Inference,
    RequestSchema,
    pack_inference,
)
from shmserve.workers.batch.execute import Executor
from shmserve.workers.batch.request import Input, Request, Response
from shmserve.workers.batch.response_stream import ResponseStream
from shmserve.workers.links.scheduler import MessageTable, WorkerRequest
from shmserve.workers.sequences.inputs import States, control_inputs, read_controls, read_states

_NOTHING = pack_inference(Inference(()))
_NOBODY = Work(0, 0, *_NOTHING)
_NO_SCHEMA = RequestSchema(_NOTHING[0])
_NO_ROW = SequenceRow(0, 0)
_STRING_HEAD = 4  # the bytes of a text's length


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
        self._policy.copies = True  # no second try would find out that a model needs them
        self._states = States(
            read_states(config, self._context.model_dir), self._backend.read_only_inputs
        )
        # The outputs that are also sent to clients.
        self._returned = frozenset(output.name for output in config.output)
        sequences = config.sequence_batching
        self._keeps_rows = sequences is not None and sequences.oldest is None
        self._largest_part = 1 << 63  # rows stay together
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
            made = control_inputs(self._controls, row, self._batched)
            request.inputs = made | request.inputs
            self._states.lend(request, row)
        try:
            return super().rehearse(requests)
        finally:
            self._states.clear()

    def _run(self, opened: list[WorkerRequest], requests: list[Request]) -> list[Reply]:
        known = {each.key: _Row(each, it) for each, it in zip(opened, requests, strict=True)}
        by_shape: dict[Any, list[_Row]] = {}
        for row in self._rows:
            real = known.get(row.key)
            if real is not None:
                real.row = row
                real.request.work = _identified(real.request.work, row)
                real.request.inputs |= control_inputs(self._controls, row, self._batched)
                shapes = self._states.lend(real.request, row)
                by_shape.setdefault(shapes, []).append(real)
        if self._decoupled:
            each = [(real.opened, real.request) for real in known.values()]
            return self._run_streams([ResponseStream(self._writer, *pair) for pair in each])
        # States of other shapes cannot be in one batch.
        return [reply for rows in by_shape.values() for reply in self._run_rows(rows)]

    def _run_rows(self, real: list[_Row]) -> list[Reply]:
        requests = [each.request for each in real]
        if self._keeps_rows:
            requests = self._with_gaps(real)
        try:
            responses = self._execute(requests)
        except BaseException as error:  # SystemExit too: a model does not end its worker so
            return [self._failed(each.opened, self._explain(error, each.request)) for each in real]
        by_request = {id(request): each for request, each in zip(requests, responses, strict=True)}
        with self._link.lock:
            self._link.pump()
            replies = [self._respond(each, by_request[id(each.request)]) for each in real]
            self._writer.scatterer.settle()
        return replies

    def _with_gaps(self, real: list[_Row]) -> list[Request]:
        """Return the requests in their rows, with null rows before and between them."""
        by_slot = {each.row.slot: each.request for each in real}
        return [by_slot.get(row.slot) or self._null(real[0], row) for row in self._rows]

    def _null(self, like: _Row, row: SequenceRow) -> Request:
        """Return a null row: a request without a client, with zeros in the shapes of another."""
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
        assert reply is not None  # which would have it run again
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
