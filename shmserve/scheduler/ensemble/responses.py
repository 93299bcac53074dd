"""Messages to an ensemble's clients: responses, as many as they take, failures, ends."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from shmserve.errors import InvalidArgument
from shmserve.ipc.messages.inference import (
    ExecutionResponded,
    Failed,
    Finished,
    Responded,
    Settled,
    Submit,
)
from shmserve.ipc.tensors.descriptors import Place, TensorRef, pack_place
from shmserve.ipc.tensors.inference import (
    SEQUENCE_END,
    SEQUENCE_START,
    Packed,
    pack_response_schema,
)
from shmserve.ipc.tensors.schemas import BoundedCache
from shmserve.ipc.tensors.signature import Signature
from shmserve.scheduler.batchers.dynamic import Closed
from shmserve.scheduler.ensemble.graph import Graph
from shmserve.scheduler.ensemble.memory import EnsembleMemory
from shmserve.scheduler.ensemble.requests import EnsembleRequest
from shmserve.scheduler.ensemble.steps.submission import fitted, sequence_of
from shmserve.scheduler.ensemble.values import Value, overrides
from shmserve.scheduler.requests.queue import believable
from shmserve.scheduler.requests.request import (
    CACHED,
    NOTHING,
    Client,
    Lookup,
    Timing,
)
from shmserve.scheduler.requests.responses import spans_of
from shmserve.scheduler.response_cache import ResponseCache
from shmserve.scheduler.statistics import Statistics

logger = logging.getLogger(__name__)

_MOST_SCHEMAS = 64


@dataclass(eq=False)
class EnsembleResponses:
    """Posts to clients, and knows what they are reading."""

    _signature: Signature
    _decoupled: bool
    _memory: EnsembleMemory
    _statistics: Statistics
    _cache: ResponseCache | None
    _warned: set[str] = field(default_factory=set)
    # By what a response is: the names, datatypes and shapes of its tensors, and its sequence.
    _schemas: BoundedCache[Any, bytes] = field(default_factory=partial(BoundedCache, _MOST_SCHEMAS))

    def relay(self, request: EnsembleRequest, now_ns: int) -> None:
        """Pass on the responses that there are, as many as the client takes."""
        responses = request.flow.responses
        while responses and request.window.is_open:
            response = responses.pop(0)
            schema, data = self._packed(request, response)
            request.unread.append(list(response.values()))
            request.window.sent(len(schema) + sum([len(d) for d in data if type(d) is bytes]))
            self._count(request, schema, final=False, now_ns=now_ns)
            request.responses += 1
            request.client.post(Responded(request.id, "", "", schema, data, final=False))

    def credit(self, request: EnsembleRequest, responses: int) -> None:
        """The client has read so many responses."""
        for _ in range(request.window.read(responses)):
            _release(request.unread.popleft())

    def failed(self, request: EnsembleRequest, early: bool = False) -> None:
        """Tell a failure; `early`: steps still have the request's memory, and `end` follows."""
        failure = request.failure
        assert failure is not None
        request.client.post(
            Failed(request.id, failure.code, failure.message, failure.retry_after_s, early)
        )

    def end(self, request: EnsembleRequest, now_ns: int) -> None:
        """No step has the request any more: tell its end, unless nobody is there."""
        if request.gone:
            pass
        elif request.told:
            request.client.post(Settled(request.id))
        elif request.failure is not None:
            self.failed(request)
        else:
            self._succeeded(request, now_ns)
        while request.unread:
            _release(request.unread.popleft())

    def _succeeded(self, request: EnsembleRequest, now_ns: int) -> None:
        for tensor in request.flow.absent - self._warned:
            self._warned.add(tensor)  # once is enough
            logger.warning("Composing models did not output tensor %s", tensor)
        input_ns, infer_ns, output_ns = request.times_ns
        timing = Timing(request.started_ns, input_ns, infer_ns, output_ns)
        self._statistics.executed(Closed.IDLE, request.units, timing, now_ns)
        packed = NOTHING
        if self._decoupled:
            self._count(request, b"", final=True, now_ns=now_ns)
        else:
            (response,) = request.flow.responses
            request.flow.responses.clear()
            packed = self._packed(request, response)
            _release(list(response.values()))
            self._keep(request, packed, now_ns)
        self._statistics.succeeded(request, timing, now_ns)
        steps = Timing(0, 0, 0, 0, request.units, spans=request.spans)
        times = (request.arrived_ns, request.enqueued_ns, steps, now_ns)
        spans = spans_of(self._statistics, request.submit, *times)
        times_ns = (input_ns, infer_ns, output_ns)
        if self._decoupled:
            last = Responded(request.id, "", "", b"", [], True, *times_ns, spans)
            request.client.post(last)
        else:
            request.client.post(Finished(request.id, *packed, *times_ns, spans))

    def hit(
        self, client: Client[EnsembleRequest], message: Submit, lookup: Lookup, now_ns: int
    ) -> None:
        """The response to a request is cached: no step runs."""
        assert self._cache is not None
        self._cache.lend(client.pid, lookup)
        arrived_ns = believable(message.arrived_ns, now_ns)
        self._statistics.hit(arrived_ns, 0, lookup.ns, now_ns)
        times = (arrived_ns, now_ns, Timing(now_ns, 0, 0, 0, closed=CACHED), now_ns)
        spans = spans_of(self._statistics, message, *times)
        client.post(Finished(message.id, *lookup.response, spans=spans))

    def _keep(self, request: EnsembleRequest, response: Packed, now_ns: int) -> None:
        lookup = request.lookup
        if lookup is not None and self._cache is not None:
            insert_ns = self._cache.insert(lookup.key, response)
            self._statistics.missed(lookup.ns, insert_ns, now_ns)

    def _count(self, request: EnsembleRequest, schema: bytes, final: bool, now_ns: int) -> None:
        response = ExecutionResponded(0, "", "", schema, [], final, now_ns, now_ns)
        self._statistics.responded(request, response, now_ns)

    def _packed(self, request: EnsembleRequest, response: dict[str, Value]) -> Packed:
        """Return a response's schema and data. The client releases what lies in our memory."""
        data: list[Any] = []
        sequence = sequence_of(request.submit, overrides(response.values()))
        key: list[Any] = [sequence]
        for name, value in response.items():
            tensor = value.given
            key += (name, value.batched, tensor.datatype, tensor.shape)
            where = tensor.data
            if type(where) is bytes:
                data.append(where)
                continue
            assert isinstance(where, Place)
            data.append(pack_place(where))
            if not (request.placed and name in request.placed_outputs):
                value.acquire()
                self._memory.lent.lend(request.client.pid, where, value)
        kind = tuple(key)
        schema = self._schemas.find(kind)
        if schema is None:
            schema = self._schema(response, *sequence)
            self._schemas.remember(kind, schema)
        return schema, data

    def _schema(self, response: dict[str, Value], correlation_id: int | str, flags: int) -> bytes:
        batches = self._signature.max_batch_size > 0
        tensors = [
            TensorRef(
                name,
                value.given.datatype,
                fitted(
                    value.given.shape,
                    self._signature.outputs[name].dims,
                    batches,
                    value.batched,
                ),
                b"",
            )
            for name, value in response.items()
        ]
        parameters = {
            "sequence_id": correlation_id,
            "sequence_start": bool(flags & SEQUENCE_START),
            "sequence_end": bool(flags & SEQUENCE_END),
        }
        return pack_response_schema(tensors, parameters)


def _release(values: list[Value]) -> None:
    for value in values:
        value.release()


def check_places(request: EnsembleRequest, graph: Graph) -> None:
    """Raise InvalidArgument where an output would go over an input that another step reads."""
    for output in request.inference.outputs:
        if output.place is None:
            continue
        writer = graph.writers[output.name]
        for tensor in request.inference.inputs:
            readers = set(request.plan.readers.get(tensor.name, ())) - {writer}
            data = tensor.data
            if readers and isinstance(data, Place) and output.place.overlaps(data):
                raise InvalidArgument(
                    f"output '{output.name}' is to go over input '{tensor.name}', which other "
                    "steps of the ensemble read"
                )
