"""The owner of a TCP socket, by both its addresses, from the kernel (sock_diag(7)).

/proc/net/tcp tells the same, and all others with it: a host that has just ended some ten thousand
connections takes a tenth of a second to list them.
"""

from __future__ import annotations

import errno
import functools
import ipaddress
import socket
import struct

_NETLINK_SOCK_DIAG = 4
_SOCK_DIAG_BY_FAMILY = 20
_NLMSG_ERROR = 2
_NLM_F_REQUEST = 1
_ANY_STATE = 0xFFFFFFFF
_HEADER = struct.Struct("=IHHII")  # length, type, flags, sequence number, port
_REQUEST = struct.Struct("=BBBBI")  # family, protocol, extensions, padding, states
_SOCKET = struct.Struct("!HH16s16s12s")  # ports and addresses, own end first; interface, cookie
_ANY_COOKIE = bytes(4) + b"\xff" * 8
_ENDS = struct.Struct("!HH")
_ENDS_AT = _HEADER.size + 4
_OWNER = struct.Struct("=II")  # uid, inode
_OWNER_AT = _ENDS_AT + _SOCKET.size + 12
_LARGEST = 4096

Address = tuple[str, int]


def owner(end: Address, other: Address) -> tuple[int, int] | None:
    """The uid and the inode of the socket at `end` of a connection of this host with `other`; inode
    0: no process has it any more. None when there is none.

    Raises OSError where the kernel does not support such queries.
    """
    response = _query(end, other)
    if response is None:
        if not _supported():
            raise OSError(errno.ENOENT, "sock_diag")
        return None
    # Where nobody has the connection, whoever listens at that port is found.
    if _ENDS.unpack_from(response, _ENDS_AT) != (end[1], other[1]):
        return None
    uid, inode = _OWNER.unpack_from(response, _OWNER_AT)
    return uid, inode


def _query(end: Address, other: Address) -> bytes | None:
    """The kernel's response, None where it knows no such socket; raises OSError."""
    a, b = (ipaddress.ip_address(address.partition("%")[0]) for address, _ in (end, other))
    family = socket.AF_INET if a.version == b.version == 4 else socket.AF_INET6
    body = _REQUEST.pack(family, socket.IPPROTO_TCP, 0, 0, _ANY_STATE)
    body += _SOCKET.pack(end[1], other[1], a.packed, b.packed, _ANY_COOKIE)
    size = _HEADER.size + len(body)
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, _NETLINK_SOCK_DIAG) as asked:
        asked.sendto(_HEADER.pack(size, _SOCK_DIAG_BY_FAMILY, _NLM_F_REQUEST, 1, 0) + body, (0, 0))
        response = asked.recv(_LARGEST, socket.MSG_DONTWAIT)
    _, kind, *_ = _HEADER.unpack_from(response)
    if kind != _NLMSG_ERROR:
        return response
    number = -struct.unpack_from("=i", response, _HEADER.size)[0]
    if number == errno.ENOENT:
        return None
    raise OSError(number, "sock_diag")


@functools.cache
def _supported() -> bool:
    """Whether a socket that is there is found: a kernel without TCP's part of this knows none."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        address = listening.getsockname()
        return _query(address, address) is not None
