"""A scheduler without process, socket or clock: messages in, messages out, time by hand."""

import itertools
from collections.abc import Callable
from functools import partial
from typing import Any

import msgpack

from shmserve.errors import InvalidArgument
from shmserve.ipc import model_spec
from shmserve.ipc.messages import inference as m
from shmserve.ipc.messages.supervision import InstanceExpected, SchedulingLimits, StatisticsSnapshot
from shmserve.ipc.model_spec import ModelSpec
from shmserve.ipc.tensors.descriptors import Memory, Range, TensorRef
from shmserve.ipc.tensors.schemas import (
    Inference,
    Inferred,
    Packed,
    RequestedOutput,
    Schemas,
    pack_inference,
    pack_inferred,
)
from shmserve.ipc.tensors.signature import BatchProperties
from shmserve.ipc.transport import frames
from shmserve.ipc.transport.frames import MalformedMessage
from shmserve.scheduler.batching import BatchingCore
from shmserve.scheduler.front import Front
from shmserve.scheduler.requests.scheduled import NEVER
from shmserve.scheduler.response_cache import ResponseCache
from shmserve.scheduler.settings import Settings

MS = 1_000_000
PLANNING_NS = 1_000
GATEWAY = b"7000.ab"
REPORTER = b"6999.cd"
WALL_NS = 1_700_000_000_000_000_000


class Outbox:
    """The posted messages by peer (b"" for the supervisor)."""

    def __init__(self) -> None:
        self.malformed_messages = 0
        self.posted_messages: list[tuple[bytes, Any]] = []

    def post(self, peer: bytes, message: Any) -> None:
        """Keep a message; it must survive the wire."""
        (unpacked,) = frames.unpack(frames.pack([message]))
        self.posted_messages.append((peer, unpacked))

    def sender_of(self, peer: bytes) -> Callable[[Any], None]:
        return partial(self.post, peer)

    def take(self) -> list[tuple[bytes, Any]]:
        """Return the messages posted since the last call."""
        taken_messages, self.posted_messages = self.posted_messages, []
        return taken_messages


class ControlOutbox(Outbox):
    def post(self, message: Any) -> None:  # type: ignore[override]
        super().post(b"", message)


class Rig:
    """A model "m"; without `dynamic` with the default scheduler."""

    def __init__(
        self,
        dynamic: dict[str, Any] | None = None,
        max_batch_size: int = 8,
        parameters: dict[str, str] | None = None,
        decoupled: bool = False,
        buckets_ms: list[float] | None = None,
        sequences: dict[str, Any] | None = None,
        cache: ResponseCache | None = None,
        backend: str = "python",
        **server: Any,
    ) -> None:
        config: dict[str, Any] = {"name": "m", "max_batch_size": max_batch_size}
        config["backend"] = backend
        config["parameters"] = {k: {"string_value": v} for k, v in (parameters or {}).items()}
        if decoupled:
            config["model_transaction_policy"] = {"decoupled": True}
        if buckets_ms is not None:
            family = {"metric_identifier": {"family": model_spec.FIRST_RESPONSE_FAMILY}}
            control = {**family, "histogram_options": {"buckets": buckets_ms}}
            config["model_metrics"] = {"metric_control": [control]}
        if sequences is not None:
            config["sequence_batching"] = sequences
        if dynamic is not None:
            config["dynamic_batching"] = dynamic
        self.clients, self.workers, self.control = Outbox(), Outbox(), ControlOutbox()
        self.core = BatchingCore(
            Settings.read(ModelSpec.of(config), "1", SchedulingLimits(**server)),
            Schemas(partial(batch_properties_of, max_batch_size)),
            self.workers,
            self.control,
            itertools.count(0, PLANNING_NS).__next__,
            cache,
        )
        self.scheduler = Front(self.core, self.clients, self.control, lambda: WALL_NS, "m", cache)
        self.now = 1_000 * MS
        self.wake_ns = NEVER
        self._ids = 0

    # --- in ---------------------------------------------------------------------------------------

    def pass_time(self, ns: int) -> None:
        self.now += ns
        self.wake_ns = self.scheduler.tick(self.now)

    def submit(self, count: int = 1, peer: bytes = GATEWAY, **fields: Any) -> list[int]:
        """Submit requests in one turn; return their numbers.

        `timeout_ns` sets the deadline. `batch_size` and `shape_key` are packed into the schema;
        `work` is the data, or schema and data.
        """
        timeout_ns = fields.pop("timeout_ns", 0)
        kind = schema_of(fields.pop("batch_size", 1), fields.pop("shape_key", b""))
        work = fields.pop("work", None)
        packed = work if isinstance(work, tuple) else None
        numbers = []
        for _ in range(count):
            self._ids += 1
            defaults = {
                "id": self._ids,
                "schema": kind if packed is None else packed[0],
                "data": [work or b"w%d" % self._ids] if packed is None else packed[1],
                "arrived_ns": self.now,
                "deadline_ns": self.now + timeout_ns if timeout_ns else 0,
                "timeout_us": 0,
                "priority": 0,
                "request_id": "",
            }
            self.scheduler.handle_client_message(peer, m.Submit(**{**defaults, **fields}), self.now)
            numbers.append(self._ids)
        self.pass_time(0)
        return numbers

    def client(self, message: Any, peer: bytes = GATEWAY) -> None:
        self.scheduler.handle_client_message(peer, message, self.now)
        self.pass_time(0)

    def supervisor(self, *messages: Any) -> None:
        for message in messages:
            self.scheduler.handle_control_message(message, self.now)
        self.pass_time(0)

    def worker(self, peer: bytes, message: Any) -> None:
        if isinstance(message, m.MetricsReported):
            self.scheduler.metrics_reported(peer, message)
        else:
            self.core.results.handle(peer, message, self.now)
        self.pass_time(0)

    def start(self, index: int = 0, pid: int = 100) -> bytes:
        """Announce an instance and register its worker; return its address."""
        peer = b"%d.%d" % (index, pid)
        self.supervisor(InstanceExpected(index, pid))
        self.worker(peer, m.InstanceReady(index, pid))
        return peer

    def start_two(self) -> list[bytes]:
        """Start two instances, in the processes 100 and 101; return their workers' addresses."""
        return [self.start(0, 100), self.start(1, 101)]

    # --- out --------------------------------------------------------------------------------------

    def take_batches(self) -> list[tuple[bytes, m.Execute]]:
        """Return the batches sent since the last call, and drop other messages to workers."""
        return [(p, msg) for p, msg in self.workers.take() if isinstance(msg, m.Execute)]

    def execute(self) -> tuple[bytes, m.Execute]:
        """Return the only batch sent since the last call."""
        (message,) = self.take_batches()
        return message

    def submit_batch(self, count: int = 1, **fields: Any) -> tuple[list[int], m.Execute]:
        """Submit requests that run at once as one batch; return their numbers and the batch."""
        return self.submit(count, **fields), self.execute()[1]

    def submit_and_take_batch(self, **fields: Any) -> tuple[int, m.Execute]:
        """Submit a request that runs at once: its number, and its batch."""
        (number,) = self.submit(**fields)
        return number, self.execute()[1]

    def take_supervisor_messages(self, *kinds: type[Any]) -> list[Any]:
        """Return the messages to the supervisor since the last call, or those of these kinds."""
        return [sent for _, sent in self.control.take() if not kinds or isinstance(sent, kinds)]

    def take_worker_messages(self) -> list[Any]:
        return [message for _, message in self.workers.take()]

    def answers(self) -> list[Any]:
        """Return the messages to clients since the last call."""
        return [message for _, message in self.clients.take()]

    def finish(self, peer: bytes, batch: m.Execute, *replies: m.Reply) -> None:
        """Return a batch from its worker, with success unless `replies` are given."""
        answers = list(replies) or [ok_reply(request.key) for request in batch.requests]
        times = (self.now - 4, self.now - 3, self.now - 1, self.now)
        self.worker(
            peer,
            m.BatchFinished(
                batch.batch, *times, answers, copied_input_bytes=5, copied_output_bytes=6
            ),
        )

    def respond(
        self, peer: bytes, key: int, response: bytes | Packed = b"part", **fields: Any
    ) -> None:
        """Send a worker's response to a request; the last one if `final`."""
        defaults = {"code": "", "message": "", "final": False, "computed_ns": self.now}
        defaults |= {"written_ns": self.now}
        schema, data = pack_response(response)
        defaults |= {"schema": schema, "data": data}
        self.worker(peer, m.ExecutionResponded(key=key, **{**defaults, **fields}))

    def report_returned(self, peer: bytes, batch: m.Execute, *replies: m.Reply) -> None:
        """Report that a decoupled `execute` returned; all requests but `ended` continue."""
        times = (self.now - 4, self.now - 3, self.now - 1, self.now)
        self.worker(peer, m.BatchFinished(batch.batch, *times, list(replies)))

    def snapshot(self) -> dict[str, Any]:
        """Return the statistics as the supervisor receives them."""
        self.report()
        figures: dict[str, Any] = self.take_supervisor_messages(StatisticsSnapshot)[-1].statistics
        return figures

    def report(self) -> dict[str, Any]:
        """Return the statistics as a client receives them."""
        self.clients.take()
        self.client(m.ReportStatistics(5), REPORTER)
        (answer,) = self.answers()
        assert isinstance(answer, m.StatisticsReported) and answer.id == 5
        return answer.statistics


def ready_rig(*args: Any, **options: Any) -> tuple[Rig, bytes]:
    rig = Rig(*args, **options)
    return rig, rig.start()


def stream_rig(**options: Any) -> tuple[Rig, bytes, int, int]:
    """Return a decoupled model, its worker, and the number and key of a request at the worker."""
    rig, peer = ready_rig(decoupled=True, **options)
    number, batch = rig.submit_and_take_batch()
    return rig, peer, number, batch.requests[0].key


def schema_of(batch_size: int = 1, shape_key: bytes = b"") -> bytes:
    schema: bytes = msgpack.packb((batch_size, shape_key))
    return schema


def batch_properties_of(max_batch_size: int, schema: bytes) -> BatchProperties:
    try:
        kind = msgpack.unpackb(schema)
    except ValueError as error:
        raise MalformedMessage("the schema is not MessagePack") from error
    if len(kind) != 2:
        return BatchProperties(1, b"")
    properties = BatchProperties(*kind)
    if not 0 <= properties.batch_size <= max_batch_size:
        raise InvalidArgument(f"inference request batch-size must be <= {max_batch_size} for 'm'")
    return properties


def pack_response(response: bytes | Packed) -> Packed:
    """Return schema and data of a response; an opaque one, which no test reads, is both."""
    if isinstance(response, tuple):
        return response
    return response, [response] if response else []


def ok_reply(key: int, response: bytes | Packed = b"done") -> m.Reply:
    return m.Reply(key, "", "", *pack_response(response))


def response_in_arena(pid: int, *offsets: int) -> Packed:
    """Return an answer with one output in the arena of worker `pid` and one in the message."""
    memory = Memory(5, pid, 9, 11, 1 << 20, True)
    tensors = [TensorRef(f"O{at}", "UINT8", (8,), Range(memory, at, 8)) for at in offsets]
    return pack_inferred(Inferred((*tensors, TensorRef("I", "UINT8", (1,), b"x"))))


def in_place_work() -> Packed:
    """Return a request whose output overwrites its input."""
    memory_range = Range(Memory(1, 4321, 5, 6, 1 << 20, True), 4096, 64)
    tensor = TensorRef("INPUT0", "INT8", (64,), memory_range)
    return pack_inference(Inference((tensor,), (RequestedOutput("OUTPUT0", memory_range),)))
