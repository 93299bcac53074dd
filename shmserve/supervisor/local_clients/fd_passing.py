"""Fd passing: descriptors that untrusted programs send over unix sockets (SCM_RIGHTS).

Closing the last one of a socket that lingers, or of a file in a file system that hangs, blocks for
as long as its owner likes. So no event loop does it: what is no memory is closed in a thread, and
so is what nobody has read of a link.
"""

from __future__ import annotations

import array
import contextlib
import fcntl
import os
import socket
import struct
import threading
from collections.abc import Callable, Iterable
from functools import partial
from typing import NamedTuple

_MESSAGE = 64 * 1024
_MOST = 253  # SCM_MAX_FD; the kernel would close what there is no room for, and we would wait
_MOST_TAKEN = 4
_CREDENTIALS = 12
_NO_LINGER = struct.pack("ii", 0, 0)


def receive(link: socket.socket) -> tuple[bytes, list[int]]:
    """One message and its descriptors; b"" at the end, or for more than anybody needs. Raises
    OSError."""
    received = _received(link, _MESSAGE)
    if not received.whole or len(received.fds) > _MOST_TAKEN:
        close_all(received.fds)
        return b"", []
    return received.data, received.fds


class _Received(NamedTuple):
    data: bytes
    fds: list[int]
    whole: bool
    any: bool  # with data or something beside it


def _received(link: socket.socket, size: int) -> _Received:
    room = socket.CMSG_SPACE(_MOST * 4) + socket.CMSG_SPACE(_CREDENTIALS)
    data, ancillary, flags, _ = link.recvmsg(size, room, socket.MSG_CMSG_CLOEXEC)
    fds = array.array("i")
    for level, kind, payload in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            fds.frombytes(payload[: len(payload) - len(payload) % fds.itemsize])
    whole = not flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC)
    return _Received(data, list(fds), whole, bool(data or ancillary))


def close_all(fds: Iterable[int]) -> None:
    """Close descriptors that were received."""
    slow = []
    for fd in fds:
        if is_memory(fd):
            os.close(fd)
        else:
            slow.append(fd)
    if slow:
        _in_thread(partial(_close, slow))


def is_memory(fd: int) -> bool:
    """Whether it is memory, and no file system and no program has a say in what is done with it."""
    try:
        fcntl.fcntl(fd, fcntl.F_GET_SEALS)
    except OSError:
        return False
    return True


def disconnect(link: socket.socket) -> None:
    """End a link, and close it with what of it was not read."""
    with contextlib.suppress(OSError):
        link.shutdown(socket.SHUT_RDWR)
    with contextlib.suppress(OSError):
        # So that an empty message, which has a sender, does not look like the end.
        link.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        while (received := _received(link, 1)).any:
            close_all(received.fds)
    link.close()


def _close(fds: Iterable[int]) -> None:
    for fd in fds:
        try:
            sock = socket.socket(fileno=fd)
        except OSError:  # not a socket
            with contextlib.suppress(OSError):  # what a file system says; it is closed
                os.close(fd)
            continue
        with contextlib.suppress(OSError):
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _NO_LINGER)
        with contextlib.suppress(OSError):
            sock.close()


def _in_thread(action: Callable[[], None]) -> None:
    try:
        threading.Thread(target=action, name="close", daemon=True).start()
    except RuntimeError:  # no thread can be had
        action()
