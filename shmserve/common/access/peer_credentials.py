"""Peer credentials: the user at the other end of a local connection, from the kernel.

    unix socket     SO_PEERCRED, SO_PEERGROUPS: who connected
    loopback TCP    sock_diag, or /proc/net/tcp: who has the other end's socket; asked once a
                    connection, and only when it wants shared memory

A program that passes on what others send (a proxy on this host) is the user it runs as.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import os
import pwd
import socket
import struct
from pathlib import Path
from typing import Any

from shmserve.common.access import sock_diag
from shmserve.common.access.shm_access import Peer

_SO_PEERGROUPS = 59
_MOST_GROUPS = 256
_CREDENTIALS = struct.Struct("iII")

Address = tuple[str, int]


def credentials(sock: Any) -> tuple[int, int, int]:
    """The pid (0: it cannot be seen from here), uid and gid of who connected to a unix socket;
    raises OSError."""
    raw = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, uid, gid = _CREDENTIALS.unpack(raw)
    return pid, uid, gid


def unix_peer(sock: Any) -> Peer:
    """The user at the other end of a unix socket; raises OSError."""
    _, uid, gid = credentials(sock)
    raw = sock.getsockopt(socket.SOL_SOCKET, _SO_PEERGROUPS, 4 * _MOST_GROUPS)
    return Peer(uid, (gid, *struct.unpack(f"{len(raw) // 4}I", raw)))


def unix_pid(transport: asyncio.BaseTransport | None) -> int:
    """The process at the other end of a unix socket; 0 for any other connection."""
    sock = None if transport is None else transport.get_extra_info("socket")
    if sock is None or sock.family != socket.AF_UNIX:
        return 0
    # What event loops hand out is no real socket.
    with socket.socket(fileno=os.dup(sock.fileno())) as own:
        return credentials(own)[0]


def loopback_peer(ours: Address, theirs: Address) -> Peer | None:
    """The user at the other end of a TCP connection between addresses of this host.

    None when the kernel does not say, as for an end that is closed already.
    """
    try:
        found = sock_diag.owner(theirs, ours)
    except OSError:
        found = _listed(ours, theirs)
    # An end that no process has any more (no inode) is shown as root's.
    if found is None or not found[1]:
        return None
    return Peer(found[0], groups_of(found[0]))


def _listed(ours: Address, theirs: Address) -> tuple[int, int] | None:
    """As `sock_diag.owner`, from the kernel's list of all connections."""
    for table, spelled in _tables(ours, theirs):
        with contextlib.suppress(OSError), open(table) as lines:
            for line in lines:
                # sl local_address rem_address st tx:rx tr:when retrnsmt uid timeout inode ...
                fields = line.split(None, 10)
                if fields[1:3] == spelled and fields[9] != "0":
                    return int(fields[7]), int(fields[9])
    return None


def _tables(ours: Address, theirs: Address) -> list[tuple[Path, list[str]]]:
    folder = Path("/proc/net")
    a, b = (ipaddress.ip_address(address.partition("%")[0]) for address, _ in (theirs, ours))
    found = []
    if isinstance(a, ipaddress.IPv4Address) and isinstance(b, ipaddress.IPv4Address):
        found.append((folder / "tcp", [_spell(a.packed, theirs[1]), _spell(b.packed, ours[1])]))
        # A client may use a socket of the newer family for the older protocol.
        prefix = bytes(10) + b"\xff\xff"
        a, b = (ipaddress.IPv6Address(prefix + address.packed) for address in (a, b))
    found.append((folder / "tcp6", [_spell(a.packed, theirs[1]), _spell(b.packed, ours[1])]))
    return found


def _spell(packed: bytes, port: int) -> str:
    # Each 32 bits of an address are printed as a number of this machine's byte order.
    words = struct.unpack(f"={len(packed) // 4}I", packed)
    return "".join(f"{word:08X}" for word in words) + f":{port:04X}"


def groups_of(uid: int) -> tuple[int, ...]:
    """The groups that the user database has a user in; none for one that it does not know."""
    try:
        entry = pwd.getpwuid(uid)
    except KeyError:
        return ()
    return tuple(os.getgrouplist(entry.pw_name, entry.pw_gid))


def is_loopback(address: str) -> bool:
    """Whether only this host can reach this numeric address."""
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback


def network(address: str) -> str:
    """Whose address this is: of the newer protocol, whoever has one has the 2**64 around it."""
    try:
        found = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return address
    if isinstance(found, ipaddress.IPv6Address):
        if found.ipv4_mapped is not None:
            return str(found.ipv4_mapped)
        return str(ipaddress.IPv6Address(int(found) >> 64 << 64))
    return str(found)
