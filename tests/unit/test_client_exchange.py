"""Who waits for answers is told of all that happens, also of what happens while it looks around."""

from __future__ import annotations

import os
import select
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from shmserve.client.connection import Connection
from shmserve.client.exchange import Exchange
from shmserve.ipc import frames
from shmserve.ipc import messages as m


@pytest.fixture
def connection(tmp_path: Path) -> Iterator[Connection]:
    """A connection to a server that has no models and says nothing more."""
    (tmp_path / "guests").mkdir()
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as door:
        door.bind(str(tmp_path / "guests" / "door"))
        door.listen()

        def welcome() -> None:
            inside.append(door.accept()[0])
            inside[0].recv(4096)
            hello = [m.Welcome(1, "token"), m.HealthChanged(True, True, False)]
            inside[0].send(frames.pack(hello))

        inside: list[socket.socket] = []
        server = threading.Thread(target=welcome)
        server.start()
        made = Connection(tmp_path, 5.0)
        server.join()
        yield made
        made.close()
        inside[0].close()


def readable(fd: int) -> bool:
    return bool(select.select([fd], [], [], 0)[0])


def test_what_is_lost_while_one_looks_around_wakes_again(
    connection: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    exchange = Exchange(connection, lambda fd: None, lambda fd: None)
    try:
        exchange.wake()
        connection.losses += 1  # something is, or it would not look

        def look_around() -> None:
            exchange.wake()  # another thread, as soon as it has looked

        monkeypatch.setattr(exchange, "_look_around", look_around)
        exchange.take([exchange.waker])
        assert readable(exchange.waker)
        monkeypatch.undo()
        exchange.take([exchange.waker])
        assert not readable(exchange.waker)
    finally:
        exchange.close()


def test_a_task_that_comes_while_answers_are_taken_is_run(
    connection: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = connection._own
    take, ran = own.take, threading.Event()

    def beset(events: Any) -> None:
        monkeypatch.undo()
        connection.call(lambda _: ran.set())
        take(events)

    monkeypatch.setattr(own, "take", beset)
    os.eventfd_write(own.waker, 1)
    assert ran.wait(5)
