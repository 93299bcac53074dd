"""Requests that are in flight at the same time, each in a thread with a connection of its own."""

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


class Crowd:
    """Sends requests and does not wait for their answers."""

    def __init__(self, server: Server, pool: ThreadPoolExecutor) -> None:
        self._server = server
        self._pool = pool
        self.asked: list[Future[Any]] = []

    def call(self, asking: Callable[[], T]) -> Future[T]:
        """Call this beside what else is going on."""
        called = self._pool.submit(asking)
        self.asked.append(called)
        return called

    def do(self, ask: Callable[[Http], Reply]) -> Future[Reply]:
        """Call `ask` with a connection of its own."""

        def run() -> Reply:
            with self._server.http() as http:
                return ask(http)

        return self.call(run)

    def infer(
        self, model: str, request: Any, headers: Mapping[str, str] | None = None
    ) -> Future[Reply]:
        """An inference."""
        return self.do(lambda http: http.infer(model, request, headers))

    def number(
        self, model: str, value: int, rows: int = 1, columns: int = 1, **parameters: Any
    ) -> Future[Reply]:
        """An inference of an INT32 INPUT0 [rows, columns] that is `value` everywhere: what the
        model "gated" takes.
        """
        request: dict[str, Any] = {
            "inputs": [json_input("INPUT0", np.full((rows, columns), value, np.int32))]
        }
        if parameters:
            request["parameters"] = parameters
        return self.infer(model, request)


@contextlib.contextmanager
def crowd(server: Server, most: int = 64) -> Iterator[Crowd]:
    """A crowd of at most that many requests at a time; at the end all have their answers."""
    with ThreadPoolExecutor(most) as pool:
        people = Crowd(server, pool)
        try:
            yield people
        finally:
            # Whoever still stands at the gate, because a test failed, would stand there for ever.
            while not all(asked.done() for asked in people.asked):
                server.gate.let_through(0.1)
            server.gate.release_all()


def values(reply: Reply) -> list[int]:
    """What the model "gated" answered."""
    return reply.tensors()["OUTPUT0"].ravel().tolist()
