"""A model that is held at the gate while its queue fills as a test wants it."""

from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from tests.support.request_pool import RequestPool
from tests.support.servers import Server


class Queue:
    """A model whose only instance is held at the gate by request 0: what comes queues up."""

    def __init__(self, server: Server, pool: RequestPool, model: str) -> None:
        self.server, self.pool, self.model = server, pool, model
        self.first = pool.number(model, 0)
        self.holder = server.gate.next()
        self.waiting = 0

    def add(self, value: int, rows: int = 1, columns: int = 1, **parameters: Any) -> None:
        """One more request, and wait until it is in the queue: the order is the test's."""
        self.pool.number(self.model, value, rows, columns, **parameters)
        self.wait_queued()

    def call(self, asking: Callable[[], Any]) -> Future[Any]:
        """The same for a request that is sent in any other way."""
        asked = self.pool.call(asking)
        self.wait_queued()
        return asked

    def wait_queued(self) -> None:
        self.waiting += 1
        self.server.wait_pending(self.model, self.waiting)

    def batches(self, count: int) -> list[list[int]]:
        """Let the first go, and then the next `count` executions, one after the other: what each
        was given.
        """
        self.holder.release()
        found = []
        for _ in range(count):
            visit = self.server.gate.next()
            found.append(visit.batch)
            visit.release()
        return found
