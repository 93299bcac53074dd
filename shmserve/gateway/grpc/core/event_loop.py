"""The event loop under gRPC: uvloop, with one wake-up for many of gRPC's events.

gRPC's own thread puts each event (a call, its message, a response that is sent) in a queue and
writes a byte to a socket pair. Its handler in the loop reads one byte and then empties the whole
queue. So under load the loop is woken again and again for bytes whose events are handled already,
with a system call or two each time, and whatever is done once a turn (our links send what was
posted in it) is done for one event at a time. Here the bytes that are behind are taken first.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Callable
from typing import Any

import uvloop

from shmserve.gateway.grpc.core import readers

_MOST_BYTES = 4096


class Loop(uvloop.Loop):
    """A uvloop whose readers of socket objects find one byte of those that were waiting.

    Only gRPC gives this loop socket objects to watch; everybody else watches descriptors.
    """

    def add_reader(self, fd: Any, callback: Callable[..., Any], *args: Any) -> None:  # type: ignore[override]
        """Watch a descriptor, or gRPC's socket."""
        if isinstance(fd, socket.socket):
            super().add_reader(fd, _once, fd, callback, *args)
            readers.start(callback)
        else:
            super().add_reader(fd, callback, *args)


def _once(sock: socket.socket, callback: Callable[..., Any], *args: Any) -> None:
    with contextlib.suppress(BlockingIOError):
        waiting = len(sock.recv(_MOST_BYTES, socket.MSG_PEEK))
        if waiting > 1:
            sock.recv(waiting - 1)
    callback(*args)


def run(main: Any) -> None:
    """Like `uvloop.run`."""
    with asyncio.Runner(loop_factory=Loop) as runner:
        runner.run(main)
