"""Who reads gRPC's connections: as many threads as clients may flood the server, and one.

gRPC's core has its connections read by whoever waits for its events, or else by threads of its
own, which then wake the one that waits: a switch more for each message, and 20 % of the CPU time of
a small inference (of 640 µs in all processes 510 are left). But grpc.aio has one thread that waits,
and who reads a connection goes on with it as long as more comes: a client that floods the server
would have everybody else wait, for many seconds. So more threads wait here; while one is kept busy,
the others read the other connections.

Starting them stands on a part of gRPC that is not its public interface. Where a release does not
have it, gRPC's own threads read.
"""

from __future__ import annotations

import functools
import logging
import os
import threading
from collections.abc import Callable
from typing import Any

try:
    from grpc._cython.cygrpc import PollerCompletionQueue
except ImportError:
    PollerCompletionQueue = None

logger = logging.getLogger(__name__)

_READERS = 8
_EXPERIMENTS = "GRPC_EXPERIMENTS"
_OWN_THREADS = "event_engine_listener"


def prepare() -> None:
    """Tell gRPC's core who reads, unless somebody has; before anything of it is used."""
    ours = hasattr(PollerCompletionQueue, "_poll_wrapper")
    os.environ[_EXPERIMENTS] = experiments(os.environ.get(_EXPERIMENTS, ""), ours=ours)


def experiments(given: str, *, ours: bool) -> str:
    """The setting of gRPC's that has our threads read, or its own."""
    named = [name for name in given.split(",") if name]
    if not any(name.removeprefix("-") == _OWN_THREADS for name in named):
        named.append(f"-{_OWN_THREADS}" if ours else _OWN_THREADS)
    return ",".join(named)


def start(handler: Callable[..., Any]) -> None:
    """Have more threads wait for the events that `handler` takes: the method of gRPC's queue that
    grpc.aio gives its event loop. One of grpc.aio's own does already."""
    method = handler.func if isinstance(handler, functools.partial) else handler
    wait = getattr(getattr(method, "__self__", None), "_poll_wrapper", None)
    if wait is None:
        logger.debug("gRPC has no %s to wait for", handler)
        return
    for number in range(1, _READERS):
        threading.Thread(target=wait, name=f"gRPC reader {number}", daemon=True).start()
