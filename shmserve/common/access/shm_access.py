"""The access policy of shared memory: who may pass which to the server (pure).

A client is a user of this host, whom the kernel names: the uid at the other end of a unix socket or
of a loopback connection. A region belongs to the user who registered it.

    register    the object must be the client's own, or its group must be the one of --shm-group,
                which may read and write it, and which the client is in
    use, list,  the region's user, and for an object of the group whoever is in it
    unregister
    access      what only the server's own user or root can write is mapped. Anything else is read
                and written by system calls, which a truncated object cannot turn into a signal

A client of another host has no uid. Where shared memory is offered to such clients at all
(--allow-client-shm), they are all one user, `REMOTE`, for whom the server's own objects are theirs.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

from shmserve.errors import PermissionDenied


@dataclass(frozen=True, slots=True)
class Peer:
    """A client's user, and the groups it is in."""

    uid: int
    groups: tuple[int, ...] = ()


SHM_DISABLED = (
    "Client shared memory is disabled. Start the server with '--allow-client-shm=true' to enable."
)
REMOTE = Peer(-1)
# Whoever administers the server: every region is theirs to see and to unregister.
EVERYONE = -2
# Whoever comes through a listener without shared memory: no region is theirs.
NOBODY = Peer(-3)
NO_GROUP = -1


@dataclass(frozen=True, slots=True)
class ShmPolicy:
    """The server's settings of clients' shared memory. Sizes in bytes.

    `allow`: over every listener, over none, or (None) over those of this host. `group`: a gid, or
    NO_GROUP. `sparse_byte_size`: how much memory the server may spend on pages that clients did not
    allocate. `overlap`: what to do with outputs of two requests in one place: error, warn, ignore.
    """

    allow: bool | None
    group: int
    max_regions: int
    max_regions_per_uid: int
    max_byte_size: int
    max_byte_size_per_uid: int
    sparse_byte_size: int
    overlap: str


@dataclass(frozen=True, slots=True)
class Ownership:
    """The owner of a region: `group` is a gid that shares it, or NO_GROUP; `copied`: its bytes are
    never mapped."""

    uid: int
    group: int
    copied: bool

    def admits(self, peer: Peer) -> bool:
        """Whether the region is `peer`'s to use."""
        return peer.uid == self.uid or (self.group != NO_GROUP and self.group in peer.groups)


def ownership(peer: Peer, key: str, uid: int, gid: int, mode: int, group: int) -> Ownership:
    """The ownership of a region whose object has this `uid`, `gid` and `mode`.

    `group` is the one of --shm-group. Raises PermissionDenied when the object is not `peer`'s.
    """
    server = os.geteuid()
    shared = group != NO_GROUP and gid == group and mode & 0o060 == 0o060
    if shared and (group in peer.groups or peer == REMOTE):
        return Ownership(peer.uid, group, copied=True)
    if uid == (server if peer == REMOTE else peer.uid):
        # Whoever may write to it may truncate it.
        safe = peer != REMOTE and uid in (server, 0) and not mode & 0o022
        return Ownership(peer.uid, NO_GROUP, copied=not safe)
    text = f"shared memory object '{key}' is not the client's"
    if peer != REMOTE:
        text += f": it belongs to uid {uid} (mode {mode & 0o777:04o}), the client is uid {peer.uid}"
    raise PermissionDenied(text)
