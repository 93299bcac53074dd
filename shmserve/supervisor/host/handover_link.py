"""The connection between a server and its successor in the same run directory.

    new ── connects to RUN_DIR/handover ──> old      must be of the same user
        <── its listening sockets ────────           or {"refused": reason}
    either ── [number, verb, name], descriptors ──> [number] from the other, once that is done

The connection ends when either server ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import logging
import os
import socket
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from shmserve.common.peers import credentials
from shmserve.common.tasks import resolve_future
from shmserve.errors import InvalidArgument
from shmserve.ipc import endpoints
from shmserve.ipc.processes import MAX_PASSED_FDS

logger = logging.getLogger(__name__)

_PROTOCOL_VERSION = 1
_PATIENCE_S = 10.0  # short, because a running server responds at once
_MAX_PACKET_BYTES = 64 * 1024
_CLIENT_LISTENER = "door"  # the name of the listener for local clients in an offer


@dataclass(slots=True, eq=False)
class Offer:
    """The listening sockets that a running server passes to its successor.

    `link` is the connection between the two servers. `sockets` has the sockets by protocol, and
    `shared` the sockets that the server itself has inherited. `client_listener` is the listener for
    local clients, whose path is in the run directory.
    """

    link: socket.socket
    sockets: dict[str, list[socket.socket]]
    shared: list[socket.socket]  # sockets that other servers use, too
    client_listener: socket.socket

    @classmethod
    def of(cls, run_dir: Path) -> Offer:
        """Receive the offer of the server that uses a run directory.

        Raises:
            InvalidArgument: No server runs there, or it refuses.
        """
        link = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        link.settimeout(_PATIENCE_S)
        try:
            link.connect(os.fspath(endpoints.handover(run_dir)))
            if credentials(link)[1] != os.geteuid():
                raise PermissionError
            data, fds = _receive(link, MAX_PASSED_FDS)
            response = json.loads(data or b'{"refused": "it is stopping"}')
            if response.get("version", _PROTOCOL_VERSION) != _PROTOCOL_VERSION:
                response = {"refused": "its version uses another handover protocol"}
            if "refused" in response:
                raise ConnectionAbortedError(response["refused"])
        except OSError as error:
            link.close()
            raise InvalidArgument(f"--take-over: {_describe_failure(run_dir, error)}") from None
        sockets: dict[str, list[socket.socket]] = {}
        shared_sockets = []
        for (name, is_shared), fd in zip(response["sockets"], fds, strict=True):
            sock = socket.socket(fileno=fd)
            sock.setblocking(False)
            sockets.setdefault(name, []).append(sock)
            if is_shared:
                shared_sockets.append(sock)
        return cls(link, sockets, shared_sockets, *sockets.pop(_CLIENT_LISTENER))

    def select(self, protocols: set[str]) -> dict[str, list[socket.socket]]:
        """Return the sockets of these protocols and of local clients, and close the rest."""
        for name in self.sockets.keys() - protocols - {"local"}:
            for sock in self.sockets.pop(name):
                sock.close()
        return self.sockets

    def send(self) -> None:
        """Send the offer over the link; raise OSError if the successor has disconnected."""
        listeners = [(name, sock) for name, sockets in self.sockets.items() for sock in sockets]
        listeners.append((_CLIENT_LISTENER, self.client_listener))
        sockets = [(name, sock in self.shared) for name, sock in listeners]
        packed_offer = json.dumps({"version": _PROTOCOL_VERSION, "sockets": sockets}).encode()
        socket.send_fds(self.link, [packed_offer], [sock.fileno() for _, sock in listeners])


def refuse(link: socket.socket, reason: str) -> None:
    """Refuse a successor. Its error is "the server of 'DIR' cannot be taken over: REASON"."""
    with link, contextlib.suppress(OSError):
        link.send(json.dumps({"refused": reason}).encode())


def _receive(link: socket.socket, max_descriptors: int) -> tuple[bytes, list[int]]:
    """Receive a packet and its descriptors, which child processes do not inherit.

    Raises:
        OSError: Nothing can be received.
    """
    data, fds, _, _ = socket.recv_fds(link, _MAX_PACKET_BYTES, max_descriptors)
    for fd in fds:
        os.set_inheritable(fd, False)
    return data, fds


def _describe_failure(run_dir: Path, error: OSError) -> str:
    if isinstance(error, ConnectionAbortedError):
        return f"the server of '{run_dir}' cannot be taken over: {error}"
    if isinstance(error, PermissionError):
        return f"'{run_dir}' belongs to another user"
    if isinstance(error, TimeoutError):
        return f"the server of '{run_dir}' does not respond"
    if (run_dir / "control").is_socket() and isinstance(error, FileNotFoundError):
        return (
            f"the server of '{run_dir}' has a version that cannot hand over: stop it, and "
            "start this one without --take-over"
        )
    return f"no server runs in '{run_dir}': start this one without --take-over"


class HandoverLink:
    """One end of the connection between two servers, in the event loop.

    `execute(verb, name, fds)` executes the requests of the other end in order, and owns their
    descriptors.
    """

    def __init__(
        self, link: socket.socket, execute: Callable[[str, str, list[int]], Awaitable[None]]
    ) -> None:
        link.setblocking(False)
        self._link = link
        self._execute = execute
        self._loop = asyncio.get_running_loop()
        self._request_numbers = itertools.count(1)
        self._pending_requests: dict[int, asyncio.Future[None]] = {}
        self._requests: asyncio.Queue[tuple[int, str, str, list[int]]] = asyncio.Queue()
        self._execution_task = asyncio.ensure_future(self._execute_requests())
        self.end_future: asyncio.Future[None] = self._loop.create_future()
        self._loop.add_reader(link.fileno(), self._read)

    def ask(self, verb: str, name: str = "", fds: Sequence[int] = ()) -> asyncio.Future[None]:
        """Send a request; the future resolves when the other end has executed it or has exited."""
        completion: asyncio.Future[None] = self._loop.create_future()
        number = next(self._request_numbers)
        self._pending_requests[number] = completion
        self._send([number, verb, name], fds)
        return completion

    async def until_done(self) -> None:
        """Wait until the other end has executed all requests so far."""
        if self._pending_requests:
            await asyncio.wait(self._pending_requests.copy().values())

    def _send(self, message: list[int | str], fds: Sequence[int] = ()) -> None:
        if not self.end_future.done():
            try:
                socket.send_fds(self._link, [json.dumps(message).encode()], fds)
                return
            except OSError as error:  # the other server has ended, or does not read
                logger.warning(
                    "the successor or predecessor is unreachable, so the handover ends: %s",
                    error.strerror,
                )
                self._end()
        self._resolve_all()

    def _read(self) -> None:
        fds: list[int] = []
        try:
            data, fds = _receive(self._link, 2)
            number, *request = json.loads(data)
            if request:
                verb, name = map(str, request)
                self._requests.put_nowait((number, verb, name, fds))
            else:
                resolve_future(self._pending_requests.pop(number, None), None)
        except BlockingIOError:
            return
        # The link has ended, or a message is invalid.
        except (OSError, ValueError, TypeError, RecursionError):
            for fd in fds:
                os.close(fd)
            self._end()

    async def _execute_requests(self) -> None:
        while True:
            number, verb, name, fds = await self._requests.get()
            try:
                await self._execute(verb, name, fds)
            except Exception:
                logger.exception("request '%s' of the successor or predecessor failed", verb)
            self._send([number])

    def _end(self) -> None:
        if not self.end_future.done():
            self.end_future.set_result(None)
            self._loop.remove_reader(self._link.fileno())
            self._link.close()
            self._resolve_all()

    def _resolve_all(self) -> None:
        for completion in self._pending_requests.values():
            resolve_future(completion, None)
        self._pending_requests.clear()

    def close(self) -> None:
        """Close the connection."""
        self._end()
        self._execution_task.cancel()
