"""The service manager that started the server: the protocols sd_notify(3) and sd_listen_fds(3).

Its environment variables are removed, since the server's processes must not send notifications.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import time
from collections import deque
from collections.abc import Mapping, MutableMapping, Sequence
from typing import Self

from shmserve.errors import InvalidArgument

logger = logging.getLogger(__name__)

_FIRST_FD = 3  # SD_LISTEN_FDS_START, the first inherited descriptor
# The allowed values of FileDescriptorName= of a socket.
LISTENER_NAMES = ("http", "grpc", "metrics", "local")
_STORED_PREFIX = "kept-"  # the prefix of the names of stored descriptors
# Seconds by which each message extends the service manager's timeout for the start or the end.
_TIMEOUT_EXTENSION_S = 60
_SIGN_OF_LIFE_INTERVAL_S = 10.0
_FLUSH_TIMEOUT_S = 5.0  # the longest time that a registration waits for a manager that hangs
_MAX_NAMED_MODELS = 5  # maximum number of models that the status line names for each state


class ServiceManager:
    """The service manager at `address`, a path or "@" with an abstract name; None: no manager.

    The manager requires a keep-alive message every `watchdog_s` seconds (0: none). Its socket holds
    about ten messages. Further messages are queued, because the descriptors of a lost message would
    be missing after the next restart.
    """

    def __init__(self, address: str | None, watchdog_s: float = 0.0) -> None:
        self._socket: socket.socket | None = None
        self._state = ""  # the status line
        self._is_stopping = False
        self._unsent_messages: deque[tuple[bytes, list[int]]] = deque()
        self._all_sent = asyncio.Event()
        self._all_sent.set()
        self.watchdog_s = watchdog_s if address else 0.0
        if address:
            self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC)
            self._socket.setblocking(False)
            socket_address = f"\0{address[1:]}" if address.startswith("@") else address
            try:
                self._socket.connect(socket_address)
            except OSError as error:
                logger.warning("the service manager cannot be notified: %s", error.strerror)
                self.close()

    @property
    def is_present(self) -> bool:
        """Return whether there is a service manager."""
        return self._socket is not None

    @classmethod
    def from_environment(cls, environment: MutableMapping[str, str]) -> Self:
        """Return the service manager that the environment names, and remove its variables."""
        variables = {name: environment.pop(f"WATCHDOG_{name}", "") for name in ("PID", "USEC")}
        has_watchdog = variables["USEC"].isdecimal() and variables["PID"] in ("", str(os.getpid()))
        watchdog_s = int(variables["USEC"]) / 1e6 if has_watchdog else 0.0
        return cls(environment.pop("NOTIFY_SOCKET", None), watchdog_s)

    def notify_ready(self, state: str) -> None:
        """Report that the server has started; `state` is its status line."""
        self._state = state
        self._notify("READY=1", f"STATUS={state}")

    def report_reloading(self) -> None:
        """Report that the server reloads its configuration, until `notify_ready`."""
        now_us = time.monotonic_ns() // 1000
        self._notify("RELOADING=1", f"MONOTONIC_USEC={now_us}", "STATUS=reloading")

    def notify_alive(self) -> None:
        """Notify the service manager's watchdog that the server is alive."""
        self._notify_unless_queued("WATCHDOG=1")

    def report_stopping(self, state: str) -> None:
        """Report that the server ends; `state` is its last status line."""
        self._is_stopping = True
        self._notify("STOPPING=1", f"STATUS={state}")

    def notify_status(self, state: str) -> None:
        """Report the status line for `systemctl status` if it has changed."""
        if state != self._state and not self._is_stopping:
            self._state = state
            self._notify(f"STATUS={state}")

    async def extend_timeout(self) -> None:
        """Extend the timeout of a long start or end until the task is cancelled."""
        while self._socket is not None:
            self._notify_unless_queued(f"EXTEND_TIMEOUT_USEC={_TIMEOUT_EXTENSION_S * 1_000_000}")
            await asyncio.sleep(_SIGN_OF_LIFE_INTERVAL_S)

    def keep(self, name: str, fds: list[int]) -> None:
        """Store descriptors under a name for the next server."""
        self._notify("FDSTORE=1", f"FDNAME={_STORED_PREFIX}{name}", "FDPOLL=0", fds=fds)

    def remove_stored(self, name: str) -> None:
        """Remove the stored descriptors that have this name."""
        self._notify("FDSTOREREMOVE=1", f"FDNAME={_STORED_PREFIX}{name}")

    async def wait_until_flushed(self) -> None:
        """Wait until the manager has received all messages, for some seconds at most."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_FLUSH_TIMEOUT_S):
                await self._all_sent.wait()

    def _notify_unless_queued(self, line: str) -> None:
        """Send a periodic message, unless other messages are queued."""
        if not self._unsent_messages:
            self._notify(line)

    def _notify(self, *lines: str, fds: Sequence[int] = ()) -> None:
        message = "\n".join(lines).encode()
        if self._socket is None or (not self._unsent_messages and self._send(message, fds)):
            return
        if not self._unsent_messages:
            asyncio.get_running_loop().add_writer(self._socket, self._send_queued)
            self._all_sent.clear()
        self._unsent_messages.append((message, [os.dup(fd) for fd in fds]))

    def _send(self, message: bytes, fds: Sequence[int]) -> bool:
        """Send a message; return False if the socket is full."""
        assert self._socket is not None
        try:
            # `socket.send_fds` ignores its argument `flags`, so none are passed.
            socket.send_fds(self._socket, [message], fds)
        except BlockingIOError:
            return False
        except OSError:
            pass  # the service manager has exited
        return True

    def _send_queued(self) -> None:
        """Send queued messages, since the socket is writable."""
        while self._unsent_messages and self._send(*self._unsent_messages[0]):
            self._discard_first()
        if not self._unsent_messages and self._socket is not None:
            asyncio.get_running_loop().remove_writer(self._socket)
            self._all_sent.set()

    def _discard_first(self) -> None:
        for fd in self._unsent_messages.popleft()[1]:
            os.close(fd)

    def close(self) -> None:
        """Close the socket after a last attempt to send the queued messages."""
        if self._socket is None:
            return
        if self._unsent_messages:
            self._send_queued()
            asyncio.get_running_loop().remove_writer(self._socket)
        while self._unsent_messages:
            self._discard_first()
        self._all_sent.set()
        self._socket.close()
        self._socket = None


def progress_line(progress: Mapping[str, str]) -> str:
    """Format the progress of loads by model in one line."""
    states = [state.partition(":")[0] for state in progress.values()]
    line = f"{states.count('ready')}/{len(progress)} models ready"
    for state in ("loading", "failed"):
        names = [
            model
            for model, model_state in zip(progress, states, strict=True)
            if model_state == state
        ]
        unnamed_count = len(names) - _MAX_NAMED_MODELS
        remainder = f" and {unnamed_count} more" if unnamed_count > 0 else ""
        if names:
            line += f"; {state} {', '.join(names[:_MAX_NAMED_MODELS])}{remainder}"
    return line


Sockets = dict[str, list[socket.socket]]


def take_inherited(environment: MutableMapping[str, str]) -> tuple[Sockets, dict[str, list[int]]]:
    """Take the inherited descriptors, and remove their variables from the environment.

    Returns:
        The listening sockets by name (`LISTENER_NAMES`), and the stored descriptors by name.

    Raises:
        InvalidArgument: A socket has another name, or does not listen.
    """
    variables = {name: environment.pop(f"LISTEN_{name}", "") for name in ("PID", "FDS", "FDNAMES")}
    if variables["PID"] != str(os.getpid()) or not variables["FDS"].isdecimal():
        return {}, {}
    count = int(variables["FDS"])
    names = variables["FDNAMES"].split(":") if variables["FDNAMES"] else []
    sockets: Sockets = {}
    descriptors: dict[str, list[int]] = {}
    for number in range(count):
        fd = _FIRST_FD + number
        os.set_inheritable(fd, False)
        name = names[number] if number < len(names) else ""
        if name.startswith(_STORED_PREFIX):
            descriptors.setdefault(name.removeprefix(_STORED_PREFIX), []).append(fd)
            continue
        if name not in LISTENER_NAMES:
            raise InvalidArgument(
                f"LISTEN_FDNAMES: unknown socket name '{name}' "
                f"(allowed for FileDescriptorName=: {', '.join(LISTENER_NAMES)})"
            )
        sockets.setdefault(name, []).append(_listening_socket(fd, name))
    return sockets, descriptors


def _listening_socket(fd: int, name: str) -> socket.socket:
    try:
        sock = socket.socket(fileno=fd)
        is_listening = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
        kind = socket.SOCK_SEQPACKET if name == "local" else socket.SOCK_STREAM
        is_listening = is_listening and sock.type == kind
    except OSError:
        is_listening = 0
    if not is_listening:
        raise InvalidArgument(f"LISTEN_FDS: descriptor {fd} ('{name}') is not a listening socket")
    sock.setblocking(False)
    return sock
