"""A client for programs on the server's host.

Requests go directly to the schedulers of the models, and large tensors through shared memory.

    with shmserve.client.connect() as server:
        logits = server.infer("digits", image=x)["logits"]

`aio.connect` is the asyncio equivalent. PROTOCOL.md in this folder specifies the protocol for
clients in other languages.

    sync.py, aio.py              the public API
    session.py                   the connection, re-established after a restart of the server
    connection.py                one server's connection, and the thread that reads its listener
    events.py                    the server's events
    discovery.py                 the server's run directory
    server_state.py              the published state: models, lost schedulers; channels to wake
    request/                     tensors to requests, requests in flight, and responses to tensors
    memory/                      shared memory of the host or a device, and arrays over it
"""

from __future__ import annotations

import os

from shmserve.client.memory.region import Region
from shmserve.client.request.results import Result
from shmserve.client.request.waiting import ResponseStream
from shmserve.client.session import open_session
from shmserve.client.sync import Server
from shmserve.errors import (
    AlreadyExists,
    Cancelled,
    Disconnected,
    Internal,
    InvalidArgument,
    NotFound,
    PermissionDenied,
    QueueFull,
    Released,
    ShmserveError,
    TimedOut,
    Unauthenticated,
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
    "Unauthenticated",
    "Unavailable",
    "Unknown",
    "Unsupported",
    "connect",
]


def connect(
    run_dir: str | os.PathLike[str] | None = None,
    *,
    memory_limit: int = 1 << 30,
    timeout: float | None = None,
    token: str = "",
) -> Server:
    """Connect to a server on this host.

        with shmserve.client.connect() as server:
            result = server.infer("blur", image=np.zeros((1, 512, 512), np.float32))
        result["output"].shape
        # (1, 512, 512)

    Args:
        run_dir: The server's run directory (`--run-dir`), or the socket of systemd; by default
            $SHMSERVE_RUN_DIR, else the run directory of this user's server.
        memory_limit: The maximum shared memory of this client in bytes, by default 1 GiB.
        timeout: Seconds to wait for a server that has loaded its models. By default `connect` fails
            immediately if there is none, except at systemd's socket: there it waits for 10 seconds.
        token: A token for `load`, `unload`, `metadata` and `statistics`, if the server has
            --auth-token-file.

    Returns:
        The client, to be closed by `close` or the end of a `with` block.

    Raises:
        Disconnected: There is no server.
        InvalidArgument: Several servers of this user run, and `run_dir` selects none.
        Unavailable: This process has no free file descriptor, or the server still loads its models
            after the timeout.
    """
    return Server(open_session(run_dir, memory_limit, timeout, token))
