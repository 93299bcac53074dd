"""Actions as another user, for permission tests; needs root.

Linux keeps credentials per thread, and only the C library synchronises them. A thread that calls
the kernel directly is therefore another user, including its connections and files.
"""

import contextlib
import ctypes
import os
import socket
import threading
from collections.abc import Callable, Iterator
from typing import TypeVar

import pytest

T = TypeVar("T")

# The numbers of the system calls setgroups, setresgid and setresuid.
_CALLS = {"x86_64": (116, 119, 117), "aarch64": (159, 149, 147)}.get(os.uname().machine)

# Users and a group that need no entry in any database.
ALICE, BOB, FRIENDS_GID = 54321, 54322, 54399

needs_users = pytest.mark.skipif(
    os.geteuid() != 0 or _CALLS is None, reason="only root can be another user"
)


def as_user(uid: int, action: Callable[[], T], groups: tuple[int, ...] = ()) -> T:
    items: list[T] = []
    errors: list[BaseException] = []

    def run_as_user() -> None:
        try:
            _set_user(uid, groups)
            items.append(action())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run_as_user)
    thread.start()
    thread.join()
    if errors:
        raise errors[0]
    return items[0]


def _set_user(uid: int, groups: tuple[int, ...]) -> None:
    assert _CALLS is not None
    libc = ctypes.CDLL(None, use_errno=True)
    ids = (ctypes.c_uint * len(groups))(*groups)
    for values in (
        (_CALLS[0], len(groups), ids),
        (_CALLS[1], uid, uid, uid),
        (_CALLS[2], uid, uid, uid),
    ):
        if libc.syscall(*values) != 0:
            raise OSError(ctypes.get_errno(), "cannot become another user")


@contextlib.contextmanager
def tunnel(port: int, uid: int) -> Iterator[int]:
    """Yield a port that forwards one connection to `port` from a socket of user `uid`."""

    def pump(source: socket.socket, sink: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                sink.sendall(data)
            sink.shutdown(socket.SHUT_WR)

    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        target = as_user(uid, lambda: socket.create_connection(("127.0.0.1", port)))
        stack.enter_context(target)
        threads: list[threading.Thread] = []

        def accept() -> None:
            with contextlib.suppress(OSError):
                accepted, _ = listener.accept()
                with accepted:
                    pump_thread = threading.Thread(target=pump, args=(target, accepted))
                    pump_thread.start()
                    pump(accepted, target)
                    pump_thread.join()

        threads.append(threading.Thread(target=accept))
        threads[0].start()
        try:
            yield int(listener.getsockname()[1])
        finally:
            with contextlib.suppress(OSError):
                target.shutdown(socket.SHUT_RDWR)
            with contextlib.suppress(OSError):
                listener.shutdown(socket.SHUT_RDWR)
            threads[0].join()
