"""Concurrent requests, each in a thread with its own connection."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from tests.support.wire.raw_http import Http, Reply, json_input

if TYPE_CHECKING:
    from tests.support.servers import Server

T = TypeVar("T")


class RequestPool:
    """Requests that are sent without waiting for their responses."""

    def __init__(self, server: Server, threads: ThreadPoolExecutor) -> None:
        self._server = server
        self._threads = threads
        self.futures: list[Future[Any]] = []

    def call(self, send_request: Callable[[], T]) -> Future[T]:
        future = self._threads.submit(send_request)
        self.futures.append(future)
        return future

    def send(self, send_request: Callable[[Http], Reply]) -> Future[Reply]:
        def run() -> Reply:
            with self._server.http() as http:
                return send_request(http)

        return self.call(run)

    def infer(
        self, model: str, request: Any, headers: Mapping[str, str] | None = None
    ) -> Future[Reply]:
        return self.send(lambda http: http.infer(model, request, headers))

    def number(
        self, model: str, value: int, rows: int = 1, columns: int = 1, **fields: Any
    ) -> Future[Reply]:
        """Send an INT32 INPUT0 [rows, columns] filled with `value`, as "gated" takes it."""
        request: Any = {"inputs": [json_input("INPUT0", np.full((rows, columns), value, np.int32))]}
        if fields:
            request["parameters"] = fields
        return self.infer(model, request)


@contextlib.contextmanager
def request_pool(server: Server, thread_count: int = 64) -> Iterator[RequestPool]:
    """Yield a pool of `thread_count` concurrent requests; wait for all of them at the end."""
    with ThreadPoolExecutor(thread_count) as threads:
        pool = RequestPool(server, threads)
        try:
            yield pool
        finally:
            # After a failure, only this releases the executions that wait at the gate.
            while not all(future.done() for future in pool.futures):
                server.gate.release_arrivals(0.1)
            server.gate.release_all()


def values(reply: Reply) -> list[int]:
    return reply.tensors()["OUTPUT0"].ravel().tolist()
