"""The readers of gRPC's connections: as many threads as clients may flood the server, and one.

gRPC's core can have threads of its own that read, and wake the one that waits for its events. That
is a switch more for each message, and 10 to 20 % of the CPU time of a small inference (in all
processes), so it is told to do without (config/grpc.py): then whoever waits reads. But grpc.aio has
one thread that waits, and who reads a connection goes on with it as long as more comes: a client
that floods the server would have everybody else wait, for many seconds. So more threads wait here;
while one is kept busy, the others read the other connections.

This stands on a part of gRPC that is not its public interface. In a release without it one thread
reads, and a line says so.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import socket
import threading
from collections.abc import Callable
from typing import Any

import grpc
import uvloop

logger = logging.getLogger(__name__)

_READERS = 8
_MOST_EVENTS = 4096  # that are handled in a turn of the loop without one more for each


class ReaderLoop(uvloop.Loop):
    """A uvloop that starts the readers when gRPC joins it.

    gRPC joins with a socket object that it has watched; everybody else watches descriptors.
    """

    def add_reader(self, fd: Any, callback: Callable[..., Any], *args: Any) -> None:  # type: ignore[override]
        """Watch a descriptor, or gRPC's socket."""
        if isinstance(fd, socket.socket):
            start(callback)
            callback = functools.partial(_handle_all, fd, callback)
        super().add_reader(fd, callback, *args)


def _handle_all(woken: socket.socket, handler: Callable[..., Any], *args: Any) -> None:
    """Have gRPC's handler handle the events that are here: it reads the byte of one of them, and
    the loop would turn once more for each of the others, of which there are many under load."""
    number = len(woken.recv(_MOST_EVENTS, socket.MSG_PEEK))
    if number > 1:
        woken.recv(number - 1)
    handler(*args)


def run(main: Any) -> None:
    """Like `uvloop.run`."""
    with asyncio.Runner(loop_factory=ReaderLoop) as runner:
        runner.run(main)


def start(handler: Callable[..., Any]) -> None:
    """Have more threads wait for the events that `handler` takes: the method of gRPC's queue that
    grpc.aio gives its event loop. One of grpc.aio's own does already."""
    method = handler.func if isinstance(handler, functools.partial) else handler
    wait = getattr(getattr(method, "__self__", None), "_poll_wrapper", None)
    if wait is None:
        logger.warning(
            "gRPC %s is not one that was tested: one thread reads all connections, and who floods "
            "one has the others wait",
            grpc.__version__,
        )
        return
    for number in range(1, _READERS):
        threading.Thread(target=wait, name=f"gRPC reader {number}", daemon=True).start()
