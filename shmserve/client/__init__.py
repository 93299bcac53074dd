"""A client for programs on the server's host: requests go to the models' schedulers directly, large
tensors through shared memory.

    with shmserve.client.connect() as server:
        logits = server.infer("digits", image=x)["logits"]

`aio.connect` is the same for asyncio. PROTOCOL.md, beside this file, is for other languages.

    sync.py, aio.py              what programs call
    session.py                   the connection, made again when the server was started anew
    connection.py                one server's, and the thread that hears its listener
    events.py                    the server's events, for whoever listens
    errors.py                    what went wrong here
    server/                      where it is, what it tells: models, losses
    inflight/                    requests on their way, one response or many
    request/                     a program's tensors -> a request; a response -> its tensors
    memory/                      shared memory, of the host or a device, and arrays over it
"""

from __future__ import annotations

import os

from shmserve.client.errors import Disconnected, Released, TimedOut
from shmserve.client.inflight.streaming import ResponseStream
from shmserve.client.memory.region import Region
from shmserve.client.request.results import Result
from shmserve.client.session import Session
from shmserve.client.sync import Server
from shmserve.errors import (
    AlreadyExists,
    Cancelled,
    Internal,
    InvalidArgument,
    NotFound,
    PermissionDenied,
    QueueFull,
    ShmserveError,
    Unavailable,
    Unknown,
    Unsupported,
)

__all__ = [
    "AlreadyExists",
    "Cancelled",
    "Disconnected",
    "Internal",
    "InvalidArgument",
    "NotFound",
    "PermissionDenied",
    "QueueFull",
    "Region",
    "Released",
    "ResponseStream",
    "Result",
    "Server",
    "ShmserveError",
    "TimedOut",
    "Unavailable",
    "Unknown",
    "Unsupported",
    "connect",
]


def connect(
    run_dir: str | os.PathLike[str] | None = None,
    *,
    memory_limit: int = 1 << 30,
    timeout: float = 10.0,
) -> Server:
    """Connect to a server by its run directory (`--run-dir`): the one given, else
    $SHMSERVE_RUN_DIR, else that of this user's server.

    `memory_limit`: bytes of shared memory that the client may take. `timeout`: seconds to wait for
    the server's welcome. Raises Disconnected when there is no server, InvalidArgument where several
    of this user's run and none is named.
    """
    return Server(Session(run_dir, memory_limit, timeout))
