"""The credentials of a connection's peer, and the permissions of each listener."""

import contextlib
import os
import socket
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from multidict import CIMultiDict

from shmserve.common import peers
from shmserve.common.auth_tokens import Authorisation
from shmserve.common.peers import REMOTE, SHM_DISABLED, Peer, groups_of, loopback_peer, unix_peer
from shmserve.errors import PermissionDenied, ShmserveError, Unsupported
from shmserve.gateway.listener import ClientIdentity, ListenerKind, ListenerRules, listener_kind
from tests.support.users import ALICE, FRIENDS_GID, as_user, needs_users

OPEN_ACCESS = Authorisation(None, {})


@contextlib.contextmanager
def tcp_pair(
    listen: str = "127.0.0.1", connect: str = "", uid: int = -1
) -> Iterator[tuple[socket.socket, socket.socket]]:
    """Yield both ends of a TCP connection, of which user `uid` owns the client's."""
    family = socket.AF_INET6 if ":" in listen else socket.AF_INET
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(socket.create_server((listen, 0), family=family))
        address = (connect or listen, listener.getsockname()[1])

        def dial() -> socket.socket:
            sock = socket.socket(socket.AF_INET6 if ":" in address[0] else socket.AF_INET)
            stack.enter_context(sock)
            sock.connect(address)
            return sock

        client_socket = dial() if uid < 0 else as_user(uid, dial)
        server_socket, _ = listener.accept()
        with server_socket:
            yield server_socket, client_socket


def find_peer(server_socket: socket.socket) -> Peer | None:
    return loopback_peer(server_socket.getsockname()[:2], server_socket.getpeername()[:2])


@pytest.fixture(params=["asked for", "listed"])
def implementation(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Select one of the two implementations; some kernels lack the first one."""

    def raise_os_error(*_: object) -> None:
        raise OSError

    if request.param == "listed":
        monkeypatch.setattr(peers, "tcp_owner", raise_os_error)


@pytest.mark.usefixtures("implementation")
@pytest.mark.parametrize(
    ("listen", "connect"), [("127.0.0.1", ""), ("::1", ""), ("127.0.0.1", "::ffff:127.0.0.1")]
)
def test_the_user_of_a_loopback_connection(listen: str, connect: str) -> None:
    with tcp_pair(listen, connect) as (server_socket, _):
        assert find_peer(server_socket) == Peer(os.geteuid(), groups_of(os.geteuid()))


@needs_users
@pytest.mark.usefixtures("implementation")
def test_another_user_of_a_loopback_connection() -> None:
    with tcp_pair(uid=ALICE) as (server_socket, _):
        assert find_peer(server_socket) == Peer(ALICE)


@needs_users
@pytest.mark.usefixtures("implementation")
def test_a_closed_socket_belongs_to_no_user() -> None:
    """The kernel reports such a socket as root's; a client must not become root."""
    with tcp_pair(uid=ALICE) as (server_socket, client_socket):
        client_socket.close()
        assert find_peer(server_socket) is None


@pytest.mark.usefixtures("implementation")
def test_a_missing_connection_has_no_peer() -> None:
    """Holds also if a server listens at the client's port."""
    with tcp_pair() as (server_socket, _), socket.create_server(("127.0.0.1", 0)) as unconnected:
        address = server_socket.getsockname()
        for port in (1, unconnected.getsockname()[1]):
            assert loopback_peer(address, ("127.0.0.1", port)) is None


def test_connections_of_other_processes_are_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """A host may have ten thousand recently closed connections, which a lookup must not scan."""
    with tcp_pair() as (server, client):
        try:
            assert peers.tcp_owner(client.getsockname(), server.getsockname()) is not None
        except OSError:
            pytest.skip("needs a kernel with sock_diag for TCP")
        monkeypatch.setattr(peers, "_proc_net_tables", None)
        assert find_peer(server) == Peer(os.geteuid(), groups_of(os.geteuid()))
        address = server.getpeername()
        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        client.close()  # a linger time of 0 makes the kernel remove the connection at once
        assert loopback_peer(server.getsockname(), address) is None


@needs_users
def test_the_user_and_the_groups_of_a_unix_socket() -> None:
    own_end, peer_end = as_user(ALICE, socket.socketpair, groups=(FRIENDS_GID, 77))
    with own_end, peer_end:
        peer = unix_peer(own_end)
        assert peer.uid == ALICE and set(peer.groups) == {ALICE, FRIENDS_GID, 77}


def test_a_large_uid_is_not_read_as_a_special_value() -> None:
    """Read as a signed number, the uid would be one of the values for all users or no user."""
    assert unix_peer(FakeUnixSocket(2**32 - 2)).uid == 2**32 - 2


class FakeUnixSocket:
    """A fake Unix socket whose peer is user `uid`."""

    def __init__(self, uid: int) -> None:
        self._uid = uid

    def getsockopt(self, level: int, option: int, size: int) -> bytes:
        """Return SO_PEERCRED or SO_PEERGROUPS."""
        words = (1, self._uid, 5) if option == socket.SO_PEERCRED else (6,)
        return b"".join(word.to_bytes(4, "little") for word in words)


def peer_or_error(kind: ListenerKind, shm: bool | None, sock: Any) -> Peer | type[ShmserveError]:
    try:
        return ClientIdentity(ListenerRules(kind, OPEN_ACCESS, shm), sock).peer()
    except ShmserveError as error:
        return type(error)


OWN_PEER = Peer(os.geteuid(), groups_of(os.geteuid()))


@pytest.mark.parametrize(
    ("kind", "allows_shm", "peer"),
    [
        (ListenerKind.UNIX, None, Peer(1001, (5, 6))),
        (ListenerKind.UNIX, True, Peer(1001, (5, 6))),
        (ListenerKind.UNIX, False, Unsupported),
        (ListenerKind.LOOPBACK, None, OWN_PEER),
        (ListenerKind.LOOPBACK, True, OWN_PEER),
        (ListenerKind.LOOPBACK, False, Unsupported),
        (ListenerKind.REMOTE, None, Unsupported),
        (ListenerKind.REMOTE, True, REMOTE),
        (ListenerKind.REMOTE, False, Unsupported),
    ],
)
def test_which_listeners_have_shared_memory(
    kind: ListenerKind, allows_shm: bool | None, peer: Peer | type[ShmserveError]
) -> None:
    """Shared memory is enabled for clients of this host, and for others only by a flag."""
    with tcp_pair() as (server_socket, _):
        assert (
            peer_or_error(
                kind,
                allows_shm,
                FakeUnixSocket(1001) if kind is ListenerKind.UNIX else server_socket,
            )
            == peer
        )


def test_a_client_of_this_host_whom_the_kernel_does_not_know() -> None:
    """This client must not have access to the server user's objects."""
    with tcp_pair() as (server, client_socket):
        client_socket.close()
        for allows_shm in (None, True):
            assert peer_or_error(ListenerKind.LOOPBACK, allows_shm, server) is PermissionDenied
            assert peer_or_error(ListenerKind.UNIX, allows_shm, server) is PermissionDenied


def test_the_error_text_equals_tritons() -> None:
    with pytest.raises(Unsupported, match=SHM_DISABLED.partition("--")[0]):
        ClientIdentity(ListenerRules(ListenerKind.REMOTE, OPEN_ACCESS, None), None).peer()


def test_where_sockets_can_be_reached_from(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as unix:
        unix.bind(str(tmp_path / "s"))
        assert listener_kind(unix) is ListenerKind.UNIX
    for address, kind in (
        ("127.0.0.1", ListenerKind.LOOPBACK),
        ("127.9.9.9", ListenerKind.LOOPBACK),
        ("0.0.0.0", ListenerKind.REMOTE),
    ):
        with socket.create_server((address, 0)) as listener:
            assert listener_kind(listener) is kind


@pytest.mark.parametrize(
    ("host", "is_own"),
    [
        *((name, True) for name in ("localhost", "LOCALHOST:8000", "a.localhost", "127.0.0.1:80")),
        *((name, True) for name in ("[::1]", "[::1]:8000", "10.1.2.3", "box", "localhost.", "")),
        *((name, True) for name in ("a.corp.test", "a.b.Corp.test:1", "Proxy.example")),
        *((name, False) for name in ("corp.test", "acorp.test", "corp.test.evil",
            "x.proxy.example")),
        *((name, False) for name in ("evil", "evil.example:8000", "localhost.evil", "127.0.0.1.x")),
        *((name, False) for name in ("::1:8000:", "box.evil", "localhost:8000:1",
            "user@localhost")),
    ],
)  # fmt: skip
def test_foreign_host_names_are_refused_on_loopback(host: str, is_own: bool) -> None:
    """A web page whose host name resolves to this address must not be served."""
    for kind in ListenerKind:
        listener = ListenerRules(
            kind, OPEN_ACCESS, None, frozenset({"box", "*.corp.test", "proxy.example"})
        )
        caller = ClientIdentity(listener, FakeUnixSocket(1))
        refusal = caller.find_access_error("metadata", CIMultiDict({"Host": host}))
        if is_own or kind is not ListenerKind.LOOPBACK:
            assert refusal is None
        else:
            assert refusal is not None and refusal.status == 421


def test_a_token_is_looked_up_once_a_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    digest = "00" * 32
    rules = Authorisation({digest: ("inference",)}, {})
    pending_calls: list[str | None] = []

    def find_scopes(header: str | None) -> frozenset[str] | None:
        pending_calls.append(header)
        return frozenset({"inference"}) if header == "Bearer good" else None

    monkeypatch.setattr(rules, "scopes", find_scopes)
    caller = ClientIdentity(ListenerRules(ListenerKind.REMOTE, rules, None), None)
    for _ in range(3):
        assert (
            caller.find_access_error("inference", CIMultiDict(Authorization="Bearer good")) is None
        )
    assert pending_calls == ["Bearer good"]
    access_error = caller.find_access_error("inference", CIMultiDict(Authorization="Bearer bad"))
    assert access_error is not None and access_error.status == 401
    access_error = caller.find_access_error("inference", CIMultiDict())
    assert access_error is not None and access_error.status == 401
    access_error = caller.find_access_error("trace", CIMultiDict(Authorization="Bearer good"))
    assert access_error is not None and access_error.status == 403


def test_the_servers_user_needs_no_token_on_the_unix_socket() -> None:
    rules = Authorisation({"00" * 32: ("inference",)}, {})
    for uid, status in ((os.geteuid(), 0), (0, 0), (1001, 401)):
        access_error = ClientIdentity(
            ListenerRules(ListenerKind.UNIX, rules, None), FakeUnixSocket(uid)
        ).find_access_error("inference", CIMultiDict())
        assert (access_error.status if access_error else 0) == status


def test_any_host_name_is_admitted_if_configured() -> None:
    listener = ListenerRules(ListenerKind.LOOPBACK, OPEN_ACCESS, None, frozenset({"*"}))
    caller = ClientIdentity(listener, FakeUnixSocket(1))
    assert caller.find_host_error(CIMultiDict({"Host": "evil.example"})) is None
