"""The clients of gRPC's calls: which user each is, and whether it is authorised.

gRPC tells a call's peer by its address alone, and a moment later that address may be another
user's. So a user is remembered with the connection, which is found among our own descriptors.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from shmserve.common.access.peer_credentials import Address, loopback_peer
from shmserve.common.access.shm_access import Peer
from shmserve.errors import ShmserveError
from shmserve.gateway.client_identity import ClientIdentity, ListenerRules
from shmserve.gateway.grpc.core import sockets as core_sockets

_MOST_KNOWN = 16384


class CallIdentity(ClientIdentity):
    """The client of one call; nothing is looked up unless it wants shared memory."""

    __slots__ = ("_call", "_users")

    def __init__(self, listener: ListenerRules, users: Users, call: Any) -> None:
        super().__init__(listener, None)
        self._users = users
        self._call = call

    @property
    def source(self) -> int:
        """As `ClientIdentity` says: of all calls of a connection the same."""
        return abs(hash(self._call.peer()))

    def _find_user(self) -> Peer | None:
        client = core_sockets.address_of(self._call.peer())
        return None if client is None else self._users.at(client)


class Users:
    """The users at the other ends of connections that this process has, by their addresses."""

    def __init__(self) -> None:
        self._known: dict[Address, tuple[core_sockets.GrpcConnection, Peer]] = {}

    def at(self, client: Address) -> Peer | None:
        """The user of the client that is connected from this address, None if nobody knows it;
        raises OSError."""
        found = self._known.get(client)
        if found is not None and core_sockets.is_open(found[0]):
            return found[1]
        self._known.pop(client, None)
        connection = core_sockets.find(client)
        if connection is None or (peer := loopback_peer(connection.here, client)) is None:
            return None
        if len(self._known) >= _MOST_KNOWN:
            self._known.clear()
        self._known[client] = (connection, peer)
        return peer


class Access:
    """The authorisation of calls by the rules of a listener, and the identity of their clients."""

    def __init__(self, listener: ListenerRules) -> None:
        self._listener = listener
        self._users = Users()

    def refuse(self, scope: str, metadata: Callable[[], Any]) -> ShmserveError | None:
        """Why a call to an API of `scope` is refused; None when it is not."""
        rules = self._listener.authorisation
        if not (rules.asks_for_tokens or rules.restrictions):
            return None
        given = {key: value for key, value in metadata() if type(value) is str}
        return rules.authorise(scope, given)

    def client(self, call: Any) -> ClientIdentity:
        """The client of a call."""
        return CallIdentity(self._listener, self._users, call)
