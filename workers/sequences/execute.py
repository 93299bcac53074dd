"""A batch of sequences of an instance: rows as the scheduler has put them, and nothing runs twice.

A model's state has moved on by a request that it has seen, so none is given to it again, and one
whose client has left is not passed over either.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from shmserve.ipc.messages import RESCHEDULED, BatchFinished, Reply, SequenceRow
from shmserve.ipc.tensors.datatypes import ITEM_SIZE, element_count
from shmserve.ipc.tensors.inference import Inference
from shmserve.workers.backends import Backend, ModelContext
from shmserve.workers.batch.execute import Executor
from shmserve.workers.batch.request import Input, Request, Response
from shmserve.workers.batch.response_stream import ResponseStream, ResponseWriter
from shmserve.workers.batch.unpack import Unpacker
from shmserve.workers.links.scheduler import Batch, OpenRequest
from shmserve.workers.sequences import controls

_NOBODY = Inference("", ())
_STRING_HEAD = 4  # the bytes of a text's length


class SequenceExecutor(Executor):
    """Runs batches of a model with sequences."""

    def __init__(
        self,
        context: ModelContext,
        backend: Backend,
        unpacker: Unpacker,
        writer: ResponseWriter,
        decoupled: bool,
        config: dict[str, Any],
    ) -> None:
        super().__init__(context, backend, unpacker, writer, decoupled)
        self._controls = controls.read(config)
        self._batched = config["max_batch_size"] > 0
        self._policy.copies = True  # no second try would find out that a model needs them
        self._largest_part = 1 << 63  # rows stay together
        self._rows: list[SequenceRow] = []

    def finish(self, batch: Batch) -> BatchFinished:
        """As `Executor` says."""
        self._rows = batch.rows
        return super().finish(batch)

    def _passes_over(self, opened: OpenRequest) -> bool:
        return False

    def _run(self, part: list[tuple[OpenRequest, Request]]) -> list[Reply]:
        known = {opened.key: (opened, request) for opened, request in part}
        first = part[0][1]
        real: list[tuple[OpenRequest, Request]] = []
        batch: list[Request] = []
        for row in self._rows:
            pair = known.get(row.key)
            if pair is None and self._decoupled:
                continue
            if pair is None:
                request = _null(first)
                row = SequenceRow(row.slot, 0)
            else:
                request = pair[1]
                request.inference = _identified(request.inference, row)
                real.append(pair)
            request.inputs |= controls.inputs(self._controls, row, self._batched)
            batch.append(request)
        if self._decoupled:
            return self._run_streams([ResponseStream(self._writer, *pair) for pair in real])
        return self._run_rows(real, batch)

    def _run_rows(
        self, real: list[tuple[OpenRequest, Request]], batch: list[Request]
    ) -> list[Reply]:
        try:
            responses = self._execute(batch)
        except BaseException as error:  # SystemExit too: a model does not end its worker so
            return [self._failed(opened, self._explain(error, each)) for opened, each in real]
        answered = {
            id(request): response for request, response in zip(batch, responses, strict=True)
        }
        with self._link.lock:
            self._link.pump()
            replies = [
                self._answer(opened, request, answered[id(request)]) for opened, request in real
            ]
            self._writer.scatterer.settle()
        return replies

    def _answer(self, opened: OpenRequest, request: Request, response: Response) -> Reply:
        if response.rescheduled:
            self._link.close(opened)
            return Reply(opened.key, RESCHEDULED, "", b"")
        reply = self._scatter(opened, request, response)
        assert reply is not None  # which would have it run again
        return reply


def _identified(inference: Inference, row: SequenceRow) -> Inference:
    """As the scheduler has it: it gives ids to requests without, and takes flags from those that
    run again."""
    correlation_id = row.correlation_text or row.correlation_id
    if (inference.correlation_id, inference.flags) == (correlation_id, row.flags):
        return inference
    return replace(inference, correlation_id=correlation_id, flags=row.flags)


def _null(like: Request) -> Request:
    """A null row: nobody's request, with zeros in the shapes of another one."""
    inputs: dict[str, Input] = {}
    for name, item in like.inputs.items():
        size = ITEM_SIZE[item.datatype] or _STRING_HEAD
        zeros = memoryview(bytearray(size * element_count(item.shape)))
        inputs[name] = Input(name, item.datatype, item.shape, zeros, None, item.model)
    return Request(0, 0, _NOBODY, like.batch_size, inputs, {})
