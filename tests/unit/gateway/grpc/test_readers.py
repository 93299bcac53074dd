"""Who reads gRPC's connections."""

from __future__ import annotations

import asyncio
import functools
import socket
import threading

import pytest

from shmserve.gateway.grpc.core.readers import ReaderLoop, start


class _Queue:
    """As gRPC's: every thread that waits is kept until all are here."""

    def __init__(self, threads: int) -> None:
        self.all_here = threading.Barrier(threads)

    def _poll_wrapper(self) -> None:
        self.all_here.wait(10)

    def handle(self, loop: object) -> None:
        raise AssertionError("nothing has happened")


def test_several_threads_wait_beside_the_one_of_grpc() -> None:
    queue = _Queue(8)  # seven, and this one for gRPC's own
    start(functools.partial(queue.handle, object()))
    queue._poll_wrapper()


def test_a_release_that_has_no_such_queue(caplog: pytest.LogCaptureFixture) -> None:
    before = threading.active_count()
    start(functools.partial(print, 1))
    assert threading.active_count() == before
    assert "one thread reads all connections" in caplog.text


def test_events_that_are_here_together_take_one_turn_of_the_loop() -> None:
    reads, writes = socket.socketpair()
    reads.setblocking(False)
    turns: list[bytes] = []

    async def main() -> None:
        handled = asyncio.Event()

        def handle() -> None:
            turns.append(reads.recv(1))  # as gRPC's handler, which then handles all events
            handled.set()

        asyncio.get_running_loop().add_reader(reads, handle)
        for events in (1, 5, 2):
            writes.send(b"1" * events)
            await handled.wait()
            handled.clear()
        await asyncio.sleep(0)

    with reads, writes, asyncio.Runner(loop_factory=ReaderLoop) as runner:
        runner.run(main())
    assert turns == [b"1"] * 3
