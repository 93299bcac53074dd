"""Local clients: the user at the other end of a connection, and the access policy of shared memory.

The kernel identifies a client's user:

    unix socket     SO_PEERCRED, SO_PEERGROUPS: the user who connected
    loopback TCP    sock_diag, or else /proc/net/tcp: the owner of the other end's socket. The query
                    is made once per connection, when the client first uses shared memory.
                    /proc/net/tcp lists all connections: with 10,000 it takes about 0.1 s

A proxy on this host is identified as the user it runs as.

A region belongs to the user who registered it.

    register    the object must belong to the client's user, or to the group of --shm-group with
                permission to read and write; the client must be a member of that group
    use, list,  permitted to the region's user and, for an object of the group, to its members
    unregister
    access      objects that only the server's user or root can write are mapped. All others are
                accessed by system calls, because truncating a mapped object raises SIGBUS

A client on another host has no uid. If --allow-client-shm permits shared memory to such clients,
they all are the user `REMOTE`, who may register the server's own objects.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import functools
import ipaddress
import os
import pwd
import socket
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shmserve.errors import PermissionDenied

_SO_PEERGROUPS = 59
_MAX_GROUPS = 256
_CREDENTIALS = struct.Struct("iII")

# Constants of sock_diag(7).
_NETLINK_SOCK_DIAG = 4
_SOCK_DIAG_BY_FAMILY = 20
_NLMSG_ERROR = 2
_NLM_F_REQUEST = 1
_ANY_STATE = 0xFFFFFFFF
_HEADER_STRUCT = struct.Struct("=IHHII")  # fields: length, type, flags, sequence number, port
_REQUEST_STRUCT = struct.Struct("=BBBBI")  # fields: family, protocol, extensions, padding, states
# Fields: source and destination port, source and destination address, interface, cookie.
_SOCKET_ID = struct.Struct("!HH16s16s12s")
_ANY_COOKIE = bytes(4) + b"\xff" * 8
_PORTS_STRUCT = struct.Struct("!HH")
_PORTS_OFFSET = _HEADER_STRUCT.size + 4
_OWNER_STRUCT = struct.Struct("=II")  # fields: uid, inode
_OWNER_OFFSET = _PORTS_OFFSET + _SOCKET_ID.size + 12
_MAX_RESPONSE_BYTES = 4096

Address = tuple[str, int]


@dataclass(frozen=True, slots=True)
class Peer:
    """The user of a client, and the groups of that user."""

    uid: int
    groups: tuple[int, ...] = ()  # gids


SHM_DISABLED = (
    "Client shared memory is disabled. Start the server with '--allow-client-shm=true' to enable."
)
REMOTE = Peer(-1)
# A uid for the server's administrator, who may list and unregister the regions of all users.
EVERYONE = -2
# The clients of a listener without shared memory, who own no regions.
NOBODY = Peer(-3)
NO_GROUP = -1


@dataclass(frozen=True, slots=True)
class ShmPolicy:
    """The server's settings for shared memory of clients. Sizes are in bytes.

    Attributes:
        allow: True: all listeners offer shared memory. False: no listener does. None: only
            listeners that other hosts cannot reach offer it.
        group: A gid, or NO_GROUP.
        max_regions: The maximum number of regions.
        max_regions_per_uid: The maximum number of regions of one user.
        max_byte_size: The maximum total size of all regions.
        max_byte_size_per_uid: The maximum total size of one user's regions.
        sparse_byte_size: The maximum bytes of pages that the server allocates because clients have
            not.
    """

    allow: bool | None
    group: int
    max_regions: int
    max_regions_per_uid: int
    max_byte_size: int
    max_byte_size_per_uid: int
    sparse_byte_size: int


@dataclass(frozen=True, slots=True)
class Ownership:
    """The owner of a region.

    Attributes:
        uid: The user who registered the region.
        group: A gid whose members share the region, or NO_GROUP.
        copied: Whether the region is accessed by system calls and never mapped.
    """

    uid: int
    group: int
    copied: bool

    def admits(self, peer: Peer) -> bool:
        """Check whether `peer` may use the region."""
        return peer.uid == self.uid or (self.group != NO_GROUP and self.group in peer.groups)


def ownership(peer: Peer, key: str, uid: int, gid: int, mode: int, group: int) -> Ownership:
    """Return the ownership of a region whose object has this `uid`, `gid` and `mode`.

    `group` is the gid of --shm-group. Raises PermissionDenied if the object is not `peer`'s.
    """
    server_uid = os.geteuid()
    is_group_object = group != NO_GROUP and gid == group and mode & 0o060 == 0o060
    if is_group_object and (group in peer.groups or peer == REMOTE):
        return Ownership(peer.uid, group, copied=True)
    if uid == (server_uid if peer == REMOTE else peer.uid):
        # A user with write permission can truncate the object.
        can_map = peer != REMOTE and uid in (server_uid, 0) and not mode & 0o022
        return Ownership(peer.uid, NO_GROUP, copied=not can_map)
    text = f"shared memory object '{key}' does not belong to the client"
    if peer != REMOTE:
        text += f": it belongs to uid {uid} (mode {mode & 0o777:04o}), the client is uid {peer.uid}"
    raise PermissionDenied(text)


def credentials(sock: Any) -> tuple[int, int, int]:
    """Return pid, uid and gid of the peer of a unix socket; raise OSError for other sockets.

    The pid is 0 for a process of another pid namespace.
    """
    packed_credentials = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, uid, gid = _CREDENTIALS.unpack(packed_credentials)
    return pid, uid, gid


def unix_peer(sock: Any) -> Peer:
    """Return the user at the other end of a unix socket; raise OSError for other sockets."""
    _, uid, gid = credentials(sock)
    packed_groups = sock.getsockopt(socket.SOL_SOCKET, _SO_PEERGROUPS, 4 * _MAX_GROUPS)
    return Peer(uid, (gid, *struct.unpack(f"{len(packed_groups) // 4}I", packed_groups)))


def unix_pid(transport: asyncio.BaseTransport | None) -> int:
    """Return the pid at the other end of a unix socket, 0 for any other connection."""
    sock = None if transport is None else transport.get_extra_info("socket")
    if sock is None or sock.family != socket.AF_UNIX:
        return 0
    # Event loops return a wrapper, not a socket.
    with socket.socket(fileno=os.dup(sock.fileno())) as duplicate_socket:
        return credentials(duplicate_socket)[0]


def loopback_peer(local_end: Address, remote_end: Address) -> Peer | None:
    """Return the user at the other end of a TCP connection between addresses of this host.

    The result is None if the kernel reports no user, for instance because that end is closed.
    """
    try:
        owner_ids = tcp_owner(remote_end, local_end)
    except OSError:
        owner_ids = _find_in_proc(local_end, remote_end)
    # A socket that no process owns any more (inode 0) is reported as root's.
    if owner_ids is None or not owner_ids[1]:
        return None
    return Peer(owner_ids[0], groups_of(owner_ids[0]))


def _find_in_proc(local_end: Address, remote_end: Address) -> tuple[int, int] | None:
    """Return uid and inode of the socket at `remote`, from the kernel's list of connections."""
    for table, addresses in _proc_net_tables(local_end, remote_end):
        with contextlib.suppress(OSError), open(table) as lines:
            for line in lines:
                # sl local_address rem_address st tx:rx tr:when retrnsmt uid timeout inode ...
                fields = line.split(None, 10)
                if fields[1:3] == addresses and fields[9] != "0":
                    return int(fields[7]), int(fields[9])
    return None


def _proc_net_tables(local_end: Address, remote_end: Address) -> list[tuple[Path, list[str]]]:
    folder, ports = Path("/proc/net"), (remote_end[1], local_end[1])
    packed_addresses = [_parse_ip(remote_end[0]).packed, _parse_ip(local_end[0]).packed]
    tables = []
    if all(len(ip) == 4 for ip in packed_addresses):
        tables.append((folder / "tcp", list(map(_proc_address, packed_addresses, ports))))
        # A client may use an IPv6 socket for IPv4.
        packed_addresses = [bytes(10) + b"\xff\xff" + ip for ip in packed_addresses]
    tables.append((folder / "tcp6", list(map(_proc_address, packed_addresses, ports))))
    return tables


def _proc_address(packed_address: bytes, port: int) -> str:
    # Each 32-bit word of an address is printed in the byte order of this machine.
    words = struct.unpack(f"={len(packed_address) // 4}I", packed_address)
    return "".join(f"{word:08X}" for word in words) + f":{port:04X}"


def groups_of(uid: int) -> tuple[int, ...]:
    """Return the groups of a user in the user database, none for an unknown user."""
    try:
        user = pwd.getpwuid(uid)
    except KeyError:
        return ()
    return tuple(os.getgrouplist(user.pw_name, user.pw_gid))


def is_loopback(address: str) -> bool:
    """Check whether only this host can reach a numeric address."""
    return _parse_ip(address).is_loopback


def _parse_ip(address: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    return ipaddress.ip_address(address.partition("%")[0])


def network(address: str) -> str:
    """Return the network of a host: its IPv4 address, or the /64 of its IPv6 address.

    One host may own all IPv6 addresses of a /64.
    """
    try:
        parsed_address = _parse_ip(address)
    except ValueError:
        return address
    if isinstance(parsed_address, ipaddress.IPv6Address):
        if parsed_address.ipv4_mapped is not None:
            return str(parsed_address.ipv4_mapped)
        return str(ipaddress.IPv6Address(int(parsed_address) >> 64 << 64))
    return str(parsed_address)


def tcp_owner(owned_end: Address, other_end: Address) -> tuple[int, int] | None:
    """Return uid and inode of the socket at `owned_end` of a local connection with `other_end`.

    Returns:
        None if there is no such socket. The inode is 0 if no process owns the socket any more.

    Raises:
        OSError: The kernel does not support sock_diag queries.
    """
    response = _query_sock_diag(owned_end, other_end)
    if response is None:
        if not _supports_sock_diag():
            raise OSError(errno.ENOENT, "sock_diag")
        return None
    # If the connection does not exist, the kernel returns the listener at that port.
    if _PORTS_STRUCT.unpack_from(response, _PORTS_OFFSET) != (owned_end[1], other_end[1]):
        return None
    uid, inode = _OWNER_STRUCT.unpack_from(response, _OWNER_OFFSET)
    return uid, inode


def _query_sock_diag(end: Address, other_end: Address) -> bytes | None:
    """Return sock_diag's response for the socket at `end` of a connection; None if unknown.

    Raises:
        OSError: The kernel rejects the query, or does not respond at once.
    """
    source_ip, target_ip = _parse_ip(end[0]), _parse_ip(other_end[0])
    family = socket.AF_INET if source_ip.version == target_ip.version == 4 else socket.AF_INET6
    body = _REQUEST_STRUCT.pack(family, socket.IPPROTO_TCP, 0, 0, _ANY_STATE)
    body += _SOCKET_ID.pack(end[1], other_end[1], source_ip.packed, target_ip.packed, _ANY_COOKIE)
    message_size = _HEADER_STRUCT.size + len(body)
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, _NETLINK_SOCK_DIAG) as netlink:
        header = _HEADER_STRUCT.pack(message_size, _SOCK_DIAG_BY_FAMILY, _NLM_F_REQUEST, 1, 0)
        netlink.sendto(header + body, (0, 0))
        response = netlink.recv(_MAX_RESPONSE_BYTES, socket.MSG_DONTWAIT)
    _, message_type, *_ = _HEADER_STRUCT.unpack_from(response)
    if message_type != _NLMSG_ERROR:
        return response
    error_number = -struct.unpack_from("=i", response, _HEADER_STRUCT.size)[0]
    if error_number == errno.ENOENT:
        return None
    raise OSError(error_number, "sock_diag")


@functools.cache
def _supports_sock_diag() -> bool:
    """Check whether the kernel finds an existing TCP socket by sock_diag."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = listener.getsockname()
        return _query_sock_diag(address, address) is not None


def admit_group(path: Path, group: int) -> None:
    """Permit a group to traverse a folder, or to connect to a socket."""
    if path.stat().st_gid != group:  # the sandbox of a service may forbid chown
        os.chown(path, -1, group)
    path.chmod(0o710 if path.is_dir() else 0o660)
