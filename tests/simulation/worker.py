"""A simulated worker: it reads inputs, takes time, and returns verifiable outputs."""

import contextlib
from collections import deque
from dataclasses import replace
from typing import Any

from shmserve.errors import ShmserveError
from shmserve.ipc.credit import SendWindow
from shmserve.ipc.messages import inference as m
from shmserve.ipc.tensors.descriptors import Range, TensorRef
from shmserve.ipc.tensors.schemas import (
    SEQUENCE_END,
    SEQUENCE_START,
    Inferred,
    Packed,
    byte_size_of,
    pack_inferred,
)
from tests.simulation.memory import SimulatedMemory
from tests.simulation.models import Model, join_inputs
from tests.simulation.scheduler import SchedulerProcess
from tests.simulation.world import MS, SECOND, US, Link, Process, Violation, World
from tests.support.messages import inference_of

MAX_WAIT_NS = 30 * SECOND
# After this number of batches, a worker returns a batch that it did not receive.
_NONSENSE_EVERY = 499


class Stream:
    """A request of a decoupled model that remains open after `execute`."""

    def __init__(self, work: m.Work, count: int) -> None:
        self.work = work
        self.count = self.remaining = count
        self.sent_count = self.credited = 0
        self.window = SendWindow()
        self.waits_since_ns = 0

    def credit(self, responses: int) -> None:
        """Return credit for responses; raise Violation if these were not sent."""
        self.credited += responses
        if self.credited > self.sent_count:
            raise Violation(
                f"{self.credited} responses to {self.work.request_id} are credited, and "
                f"{self.sent_count} were sent"
            )
        self.window.record_credit(responses)


class Worker(Process):
    """Instance `index` of a version, which executes batches in order of arrival."""

    def __init__(
        self,
        world: World,
        memory: SimulatedMemory,
        model: Model,
        version: str,
        index: int,
        pid: int = 0,
    ) -> None:
        super().__init__(world, f"worker-{model.name}.{version}[{index}]", pid)
        self.model = model
        self.version = version
        self.index = index
        self.is_loaded = False
        self.arena = memory.arena(self, model.arena_byte_size)
        self._memory = memory
        self._inbox: deque[Any] = deque()
        self._batches: deque[Any] = deque()
        self._running: Any = None
        self._batch_start_ns = 0
        self._open_work: dict[int, m.Work] = {}
        self._cancelled: set[int] = set()
        self._streams: dict[int, Stream] = {}
        self._readers_by_offset: dict[int, int] = {}  # the reader of each lent block, by offset
        self._exited_pids: set[int] = set()
        self.slots: dict[int, bytes] = {}  # sequence states by slot
        self._host: SchedulerProcess | None = None
        self._scheduler_link: Link | None = None

    @property
    def busy(self) -> bool:
        """Return whether it has requests or sequence states of a live scheduler."""
        is_connected = self._scheduler_link is not None and self._scheduler_link.connected
        return is_connected and bool(self._running or self._batches or self._streams or self.slots)

    # --- messages ---------------------------------------------------------------------------------

    def take(self, messages: list[Any]) -> None:
        self._inbox.extend(messages)
        self._handle_inbox()

    def _handle_inbox(self) -> None:
        while self._inbox and self._running is None and self.alive:
            message = self._inbox.popleft()
            if isinstance(message, SchedulerProcess):
                if (
                    message is not self._host
                    or self._scheduler_link is None
                    or not self._scheduler_link.connected
                ):
                    self._attach(message)
            elif isinstance(message, tuple):
                host, words = message
                if (
                    host is self._host
                    and self._scheduler_link is not None
                    and self._scheduler_link.connected
                ):
                    self._handle(words)
            else:
                self._exited_pids.add(message.process)
                if self._scheduler_link is None or not self._scheduler_link.connected:
                    self._release_blocks_of(message.process)
            self._begin()

    def _attach(self, host: SchedulerProcess) -> None:
        """Register with a scheduler; discard the predecessor's work except releases in transit."""
        for message in self._take_last_messages():
            if isinstance(message, m.ReleaseOutputs | m.ReaderExited):
                self._handle(message)
        self._batches.clear()
        self._open_work.clear()
        self._streams.clear()
        self._cancelled.clear()
        self.slots.clear()
        self._host = host
        peer = b"%d.%d" % (self.index, self.pid)
        self._scheduler_link = host.connect_worker(
            peer, self, lambda messages: self.take([(host, message) for message in messages])
        )
        self._scheduler_link.post(m.InstanceReady(self.index, self.pid))
        for pid in self._exited_pids:
            self._release_blocks_of(pid)

    def _take_last_messages(self) -> list[Any]:
        """Return the messages that the scheduler has sent and that were not handled yet."""
        if self._host is None:
            return []
        words = [word for word in self._inbox if isinstance(word, tuple)]
        arrived = [word for host, word in words if host is self._host]
        return arrived + self._host.take_sent_to(self)

    def _handle(self, message: Any) -> None:
        match message:
            case m.Execute():
                self._batches.append(message)
                self._open_work.update((work.key, work) for work in message.requests)
            case m.CancelExecution(key=key):
                if key in self._open_work:
                    self._cancelled.add(key)
                    self._emit_soon(key)
            case m.CreditExecution(key=key, responses=responses):
                if key in self._streams:
                    self._streams[key].credit(responses)
                    self._emit_soon(key)
            case m.EndSequences(slots=slots):
                for slot in slots:
                    self.slots.pop(slot, None)
            case m.ReleaseOutputs(client_pid=reader, offsets=offsets, memory=memory):
                # Otherwise the message concerns a predecessor with the same pid.
                if memory == self.arena.memory.id:
                    self._release(reader, offsets)
            case m.ReaderExited(pid=pid):
                self._exited_pids.add(pid)
                self._release_blocks_of(pid)

    def _release_blocks_of(self, reader: int) -> None:
        self._release(
            reader, [at for at, user in self._readers_by_offset.items() if user == reader]
        )

    def _release(self, reader: int, offsets: list[int]) -> None:
        for offset in offsets:
            if self._readers_by_offset.get(offset) == reader:
                del self._readers_by_offset[offset]
                self.arena.free(offset)
            elif reader not in self._exited_pids:
                raise Violation(f"{self}: {reader} releases {offset}, which it does not have")

    # --- batches ----------------------------------------------------------------------------------

    def _begin(self) -> None:
        if self._running is not None or not self._batches:
            return
        self._running = self._batches.popleft()
        self._batch_start_ns = self.world.now_ns
        for work in self._running.requests:
            with contextlib.suppress(ShmserveError):  # a failure is reported when the input is read
                self._read_input(work)
        min_us, max_us = self.model.compute_us
        self.world.after(self.world.between(min_us * US, max_us * US), self._finish)

    def _read_input(self, work: m.Work) -> bytes:
        tensors = {tensor.name: tensor for tensor in inference_of(work).inputs}
        data = self._read(work, tensors["IN"])
        if not self.model.reads_second_input:
            return data
        return join_inputs(data, self._read(work, tensors["IN2"]) if "IN2" in tensors else b"")

    def _read(self, work: m.Work, tensor: TensorRef) -> bytes:
        """Return a tensor's bytes. While the scheduler is alive, the memory must be allocated."""
        if not isinstance(tensor.data, Range):
            return tensor.data
        try:
            return self._memory.read(tensor.data, f"{self} for {work.request_id}")
        except Violation:
            # No process waits for a request whose scheduler or ensemble has exited.
            alive = self._host is not None and self._host.alive
            if alive and not self._memory.ensembles_died:
                raise
            return b"stale"

    def _finish(self) -> None:
        batch = self._running
        if batch is None or not self.alive:
            return
        reserved: list[int] = []
        if self.model.is_iterative and self.model.is_decoupled:
            replies = [self._reply_in_rounds(work, batch) for work in batch.requests]
        elif self.model.is_decoupled:
            replies = self._open_streams(batch)
        else:
            replies = [self._reply(work, batch, reserved) for work in batch.requests]
            if self.world.chance(0.1):
                self.world.random.shuffle(replies)
        now_ns = self.world.now_ns
        times = (self._batch_start_ns, self._batch_start_ns, now_ns, now_ns)
        batch_finished = m.BatchFinished(batch.batch, *times, replies)
        for work in batch.requests:
            if work.key not in self._streams:
                self._open_work.pop(work.key, None)
                self._cancelled.discard(work.key)
        if self._scheduler_link is not None and self._scheduler_link.connected:
            # Computed without `world.random`, so that known seeds run as before.
            if (31 * self.pid + batch.batch) % _NONSENSE_EVERY == 0:
                self.world.fault("nonsense", self)
                self._scheduler_link.post(replace(batch_finished, batch=-batch.batch))
            self._scheduler_link.post(batch_finished)
        else:
            for offset in reserved:
                if offset in self._readers_by_offset:
                    self._release(self._readers_by_offset[offset], [offset])
        self._running = None
        self._begin()
        self._handle_inbox()

    def _reply(self, work: m.Work, batch: m.Execute, reserved: list[int]) -> m.Reply:
        state = self._advance(work, batch) if self.model.has_sequences else b""
        try:
            data = self._read_input(work)
            if work.key in self._cancelled:
                return m.Reply(work.key, "CANCELLED", "request cancelled")
            if self.model.error_probability and self.world.chance(self.model.error_probability):
                return m.Reply(work.key, "INTERNAL", "the model failed")
            if self.model.is_iterative and state.count(b".") < self.model.rounds(data):
                return m.Reply(work.key, m.RESCHEDULED, "")
            return m.Reply(work.key, "", "", *self._compute_response(work, data + state, reserved))
        except ShmserveError as error:
            return m.Reply(work.key, error.code, error.message)

    def _reply_in_rounds(self, work: m.Work, batch: m.Execute) -> m.Reply:
        """Return one response per round, and the end after the last one."""
        number = self._advance(work, batch).count(b".") - 1
        try:
            rounds = self.model.rounds(self._read_input(work))
            stream = Stream(work, rounds)
            stream.sent_count, stream.remaining = number, rounds - number
            self._send(stream, final=False)
        except ShmserveError as error:
            return m.Reply(work.key, error.code, error.message)
        return m.Reply(work.key, m.RESCHEDULED if stream.remaining else "", "")

    def _advance(self, work: m.Work, batch: m.Execute) -> bytes:
        """Return the new state of a request's sequence, which is stored in its slot."""
        (row,) = (row for row in batch.rows if row.key == work.key)
        if row.flags & SEQUENCE_START:
            self.slots[row.slot] = b""
        state = self.slots.get(row.slot, b"?")
        step = work.request_id.rpartition("/")[2].encode()
        if self.model.is_iterative:
            step = b"%d" % state.count(b".")
        state = self.slots[row.slot] = state + b"." + step
        if row.flags & SEQUENCE_END:
            del self.slots[row.slot]
        return state

    def _compute_response(self, work: m.Work, data: bytes, reserved: list[int]) -> Packed:
        """Return a packed response; the offsets of outputs in the arena are added to `reserved`."""
        memory_ranges = {out.name: out.memory_range for out in inference_of(work).outputs}
        outputs: list[TensorRef] = []
        results = dict(zip(("OUT", "WHO"), self.model.outputs_of(data, self.version), strict=True))
        if self.model.returns_condition:
            results["GO"] = b"%c" % self.model.runs_step(data)
        for name, output in results.items():
            if memory_ranges and name not in memory_ranges:
                continue
            output_data: bytes | Range = output
            memory_range = memory_ranges.get(name)
            if memory_range is not None:
                output_data = Range(memory_range.memory, memory_range.offset, len(output))
                # Otherwise the memory may belong to another request by now.
                if self._scheduler_link is not None and self._scheduler_link.connected:
                    self._memory.write(output_data, output, self)
            elif self.model.is_large and name == "OUT":
                output_data = self.arena.memory_range(output)
                self._readers_by_offset[output_data.offset] = work.client_pid
                reserved.append(output_data.offset)
            shape = (1, len(output)) if self.model.batches else (len(output),)
            outputs.append(TensorRef(name, "BOOL" if name == "GO" else "UINT8", shape, output_data))
        return pack_inferred(Inferred(tuple(outputs)))

    # --- responses of a decoupled model -----------------------------------------------------------

    def _open_streams(self, batch: m.Execute) -> list[m.Reply]:
        replies: list[m.Reply] = []
        for work in batch.requests:
            count = self.world.random.randint(0, self.model.most_responses)
            if self.model.error_probability and self.world.chance(self.model.error_probability):
                replies.append(m.Reply(work.key, "INTERNAL", "the model failed"))
                continue
            self._streams[work.key] = Stream(work, count)
            self._emit_soon(work.key)
        return replies

    def _emit_soon(self, key: int) -> None:
        if key in self._streams:
            stream = self._streams[key]
            self.world.after(self.world.between(5 * US, MS), self._emit, stream)

    def _emit(self, stream: Stream) -> None:
        key = stream.work.key
        if not self.alive or self._streams.get(key) is not stream:
            return
        if self._scheduler_link is None or not self._scheduler_link.connected:
            del self._streams[key]
            return
        cancelled = key in self._cancelled or stream.work.client_pid in self._exited_pids
        if stream.remaining and not cancelled:
            if not stream.window.is_open:
                stream.waits_since_ns = stream.waits_since_ns or self.world.now_ns
                if self.world.now_ns - stream.waits_since_ns >= MAX_WAIT_NS:
                    raise Violation(
                        f"{self}: nobody reads the responses to {stream.work.request_id}"
                    )
                else:
                    self.world.after(MAX_WAIT_NS, self._emit, stream)
                return
            final = stream.remaining == 1 and self.world.chance(0.5)
            self._respond(stream, final)
            self._emit_soon(key)
        else:
            self._end(stream, "")

    def _respond(self, stream: Stream, final: bool) -> None:
        if final:
            self._close(stream)
        self._send(stream, final)

    def _send(self, stream: Stream, final: bool) -> None:
        stream.waits_since_ns = 0
        stream.remaining -= 1
        code = ""
        body: Packed = (b"", [])
        number = b"#%d/%d" % (stream.sent_count, stream.count)
        try:
            body = self._compute_response(stream.work, self._read_input(stream.work) + number, [])
        except ShmserveError as error:
            code = error.code
        stream.sent_count += 1
        stream.window.record_sent(byte_size_of(body[1]))
        self._post_response(stream, code, body, final)

    def _end(self, stream: Stream, code: str) -> None:
        self._close(stream)
        self._post_response(stream, code, (b"", []), final=True)

    def _close(self, stream: Stream) -> None:
        key = stream.work.key
        del self._streams[key]
        self._open_work.pop(key, None)
        self._cancelled.discard(key)

    def _post_response(self, s: Stream, code: str, body: Packed, final: bool, *fields: Any) -> None:
        """Send a response in one frame with the messages that must precede it."""
        assert self._scheduler_link is not None
        now_ns = self.world.now_ns
        self._scheduler_link.post(
            *fields,
            m.ExecutionResponded(
                s.work.key, code, "", *body, final, now_ns, now_ns, 0, request_failed=bool(code)
            ),
        )
