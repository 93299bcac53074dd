"""A model whose queue a test fills while its only instance is held at the gate."""

from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from tests.support.request_pool import RequestPool
from tests.support.servers import Server


class Queue:
    """A model whose only instance is held by request 0, so that later requests queue up."""

    def __init__(self, server: Server, pool: RequestPool, model: str) -> None:
        self.server, self.pool, self.model = server, pool, model
        self.first_response = pool.number(model, 0)
        self.holding_visit = server.gate.next()
        self.queued_count = 0

    def add(self, value: int, rows: int = 1, columns: int = 1, **parameters: Any) -> None:
        """Send a request and wait until it is queued, so that the order is fixed."""
        self.pool.number(self.model, value, rows, columns, **parameters)
        self.wait_queued()

    def call(self, send_request: Callable[[], Any]) -> Future[Any]:
        """Call a function that sends a request in another way, and wait until it is queued."""
        pending = self.pool.call(send_request)
        self.wait_queued()
        return pending

    def wait_queued(self) -> None:
        self.queued_count += 1
        self.server.wait_pending(self.model, self.queued_count)

    def batches(self, count: int) -> list[list[int]]:
        """Release request 0 and `count` executions one by one; return the values of each batch."""
        self.holding_visit.release()
        requests = []
        for _ in range(count):
            visit = self.server.gate.next()
            requests.append(visit.batch)
            visit.release()
        return requests
