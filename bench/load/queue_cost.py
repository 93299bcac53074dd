"""The cost of a request in a scheduler with many queued requests, without processes."""

from __future__ import annotations

import gc
import random
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any

from shmserve.ipc.messages import inference as m
from shmserve.ipc.messages.supervision import InstanceExpected, SchedulingLimits
from shmserve.ipc.model_spec import ModelSpec
from shmserve.ipc.tensors.schemas import Schemas
from shmserve.ipc.tensors.signature import BatchProperties
from shmserve.scheduler.batching import BatchingCore
from shmserve.scheduler.front import Front
from shmserve.scheduler.settings import Settings

_LEVELS = 8
_BATCH = 8
_GATEWAY = b"7000.ab"
_TIMEOUT_US = 3_600_000_000
_STEP_NS = 50_000
CONFIG: dict[str, Any] = {
    "name": "m",
    "max_batch_size": _BATCH,
    "dynamic_batching": {
        "priority_levels": _LEVELS,
        "default_priority_level": _LEVELS // 2,
        "default_queue_policy": {
            "default_timeout_microseconds": _TIMEOUT_US,
            "allow_timeout_override": True,
        },
        # The lowest priority level delays requests after their timeout, which expires at once.
        "priority_queue_policy": {
            str(_LEVELS): {"default_timeout_microseconds": 1, "timeout_action": "DELAY"}
        },
    },
}


class Outbox:
    """An outbox of messages to clients, workers or the supervisor.

    Attributes:
        posted: The queued messages, oldest first.
    """

    malformed_messages = 0

    def __init__(self, capacity: int | None = None) -> None:
        """Create an outbox that keeps the last `capacity` messages; None: all messages."""
        self.posted: deque[Any] = deque(maxlen=capacity)

    def post(self, *message: Any) -> None:
        """Queue a message."""
        self.posted.append(message[-1])

    def sender_of(self, peer: bytes) -> Callable[[Any], object]:
        """Return a function that queues a message for a peer."""
        return partial(self.post, peer)


def _one_row(schema: bytes) -> BatchProperties:
    return BatchProperties(1, b"")


class BusyQueue:
    """A scheduler with `queued` queued requests of all priorities, whose only instance is busy.

    `turn` keeps the scheduler in this state: requests arrive, one in the middle of the queue is
    cancelled, another one expires, some are delayed, and the running batch ends.
    """

    def __init__(self, queued_count: int, config: dict[str, Any] | None = None) -> None:
        self._worker = Outbox()
        settings = Settings.read(ModelSpec.of(config or CONFIG), "1", SchedulingLimits())
        control = Outbox(capacity=0)
        self.core = BatchingCore(
            settings, Schemas(_one_row), self._worker, control, time.perf_counter_ns
        )
        self.scheduler = Front(self.core, Outbox(capacity=0), control, time.time_ns, "m")
        self._random = random.Random(queued_count)
        self._now_ns = 1_000_000_000
        self._last_id = 0
        self._live_count = queued_count + 2 * _BATCH
        self._queued_ids: list[int] = []
        self.scheduler.handle_control_message(InstanceExpected(0, 100), self._now_ns)
        self._peer = b"0.100"
        self.core.results.handle(self._peer, m.InstanceReady(0, 100), self._now_ns)
        for _ in range(self._live_count):
            self._submit()
        self.scheduler.tick(self._now_ns)

    def turn(self) -> int:
        """Run the loop once, and return the number of requests that arrived; as many end."""
        self._now_ns += _STEP_NS
        self._submit(timeout_us=20)
        arrived_count = 1
        while self.core.live_count < self._live_count:
            self._submit()
            arrived_count += 1
        self.scheduler.handle_client_message(_GATEWAY, m.Cancel(self._draw_queued()), self._now_ns)
        while type(batch := self._worker.posted.popleft()) is not m.Execute:
            pass  # a cancellation of a running request
        times = (self._now_ns - 4, self._now_ns - 3, self._now_ns - 1, self._now_ns)
        replies = [m.Reply(work.key, "", "") for work in batch.requests]
        batch_finished = m.BatchFinished(batch.batch, *times, replies)
        self.core.results.handle(self._peer, batch_finished, self._now_ns)
        self.scheduler.tick(self._now_ns)
        return arrived_count

    def _submit(self, timeout_us: int = 0) -> None:
        self._last_id += 1
        priority = self._random.randint(1, _LEVELS)
        message = m.Submit(
            self._last_id, b"", [], self._now_ns, 0, timeout_us, priority, f"r{self._last_id}"
        )
        self.scheduler.handle_client_message(_GATEWAY, message, self._now_ns)
        self._queued_ids.append(self._last_id)

    def _draw_queued(self) -> int:
        """Return the key of a random request that may still be queued."""
        ids = self._queued_ids
        index = self._random.randrange(len(ids))
        ids[index], ids[-1] = ids[-1], ids[index]
        return ids.pop()


def sample(count: int, turns: int = 3000) -> float:
    """Return the scheduler's time per request in microseconds, with `count` requests in the queue.

    The time includes all work between the request's messages.
    """
    queue = BusyQueue(count)
    for _ in range(turns // 10):
        queue.turn()
    gc.collect()
    start_ns = time.process_time_ns()
    requests = sum(queue.turn() for _ in range(turns))
    return (time.process_time_ns() - start_ns) / 1000 / requests
