"""Clients that send requests continuously during a test and check every response."""

from __future__ import annotations

import contextlib
import http.client
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from tests.support.regions import SharedObject
from tests.support.wire.raw_http import Http, json_input, region_request

if TYPE_CHECKING:
    from tests.support.servers import Server

# Pause between two requests: the load detects failures and should not saturate the server.
_BREATH_S = 0.01
_PATIENCE_S = 20.0


@dataclass(frozen=True)
class Answer:
    """A completed request: start and end (s), and "" or the difference from its expectation."""

    client: int
    started_at: float
    ended_at: float
    trouble: str

    @property
    def is_disconnected(self) -> bool:
        """Return whether the connection was closed before the response."""
        return self.trouble.startswith("connection")


# Sends the request with this number on a connection. Returns "", or the difference from the correct
# response.
SendRequest = Callable[[Http, int], str]


def infer_simple(http: Http, number: int) -> str:
    """Send a JSON request with new values to the model "simple" and check the response."""
    a = np.arange(16, dtype=np.int32).reshape(1, 16) + number
    b = np.full((1, 16), number % 97, np.int32)
    reply = http.infer("simple", {"inputs": [json_input("INPUT0", a), json_input("INPUT1", b)]})
    if reply.status != 200:
        return f"{reply.status}: {reply.error}"
    outputs = reply.tensors()
    is_right = (outputs["OUTPUT0"] == a + b).all() and (outputs["OUTPUT1"] == a - b).all()
    return "" if is_right else f"wrong: {outputs}"


class InferInMemory:
    """Requests for "identity" (FP32) through one region for input and output."""

    def __init__(self, http: Http, count: int = 4096) -> None:
        self.count = count
        self.size = 4 * count
        self.shared = SharedObject(2 * self.size)
        self.shared.create()
        try:
            http.register(self.shared.name, self.shared.key, 2 * self.size).ok()
        except BaseException:
            self.close(http)  # a killed server may have stored the region without a response
            raise

    def __call__(self, http: Http, number: int) -> str:
        """Write the input, send a request, and check the output."""
        values = np.arange(self.count, dtype=np.float32) + number
        self.shared.write(values)
        reply = http.infer("identity", region_request(self.shared.name, self.size))
        if reply.status != 200:
            return f"{reply.status}: {reply.error}"
        is_right = (self.shared.read(np.float32, self.count, self.size) == values).all()
        return "" if is_right else "wrong: the region does not hold what was sent"

    def close(self, http: Http) -> None:
        with contextlib.suppress(OSError, http_error):
            http.unregister(self.shared.name)
        self.shared.unlink()


http_error = http.client.HTTPException


class Load:
    """Threads that send requests continuously within a with block, each on its own connection.

    Without `senders`, there are `simple` clients of the model "simple", and `memory` clients that
    send tensors to "identity" through a region.
    """

    def __init__(
        self, server: Server, simple: int = 2, memory: int = 1, senders: Sequence[SendRequest] = ()
    ) -> None:
        self._server = server
        self._senders: Sequence[SendRequest | type[InferInMemory]] = senders or [
            *[infer_simple] * simple,
            *[InferInMemory] * memory,
        ]
        self._stop = threading.Event()
        self._answer_added = threading.Condition()
        self.answers: list[Answer] = []

    def __enter__(self) -> Load:
        self._threads = [
            threading.Thread(target=self._run, args=(client, sender), name=f"load-{client}")
            for client, sender in enumerate(self._senders)
        ]
        for thread in self._threads:
            thread.start()
        try:
            self.wait_answered(time.monotonic())
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()

    def _run(self, client: int, sender: SendRequest | type[InferInMemory]) -> None:
        with self._server.http(_PATIENCE_S) as connection, contextlib.ExitStack() as stack:
            if isinstance(sender, type):
                infer_through = sender(connection)
                stack.callback(infer_through.close, connection)
                send_request: SendRequest = infer_through
            else:
                send_request = sender
            number = 1000 * client
            while not self._stop.is_set():
                number += 1
                began_at = time.monotonic()
                try:
                    trouble = send_request(connection, number)
                except (OSError, http_error) as error:
                    trouble = f"connection: {error!r}"
                with self._answer_added:
                    self.answers.append(Answer(client, began_at, time.monotonic(), trouble))
                    self._answer_added.notify_all()
                self._stop.wait(_BREATH_S)

    def wait_answered(self, start_time: float, within_s: float = 10.0) -> float:
        """Return the seconds from `start_time` until each client has a correct later response."""
        waiting = set(range(len(self._senders)))
        answer_count = 0

        def have_all_answered() -> bool:
            nonlocal answer_count
            for answer in self.answers[answer_count:]:
                if answer.started_at >= start_time and not answer.trouble:
                    waiting.discard(answer.client)
            answer_count = len(self.answers)
            return not waiting

        with self._answer_added:
            all_have_answered = self._answer_added.wait_for(have_all_answered, within_s)
        assert all_have_answered, (
            f"clients {waiting} were not answered within {within_s} s; last: {self.answers[-3:]}"
        )
        return time.monotonic() - start_time

    def troubles(self) -> list[Answer]:
        return [answer for answer in self.answers if answer.trouble]
