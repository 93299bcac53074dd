"""The number of connections of one peer is limited, without effect on other peers."""

import contextlib
import os
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from shmserve.common.peers import network
from tests.rigs.gateway_rig import Rig, rig
from tests.support.users import ALICE, BOB, as_user, needs_users
from tests.support.wire.raw_http import read_reply

MAX_CONNECTIONS, ADDRESS_SHARE = 40, 30
HEALTH_REQUEST = b"GET /v2/health/live HTTP/1.1\r\nHost: localhost\r\n\r\n"
HALF_REQUEST = (
    b"POST /v2/models/m/infer HTTP/1.1\r\nHost: localhost\r\nContent-Length: 99999\r\n\r\n{"
)


class PeerConnections:
    """Connections of one peer, that stay."""

    def __init__(self, connect: Callable[[], socket.socket]) -> None:
        self._connect = connect
        self._socks: list[socket.socket] = []

    def open(self, count: int, initial_data: bytes = b"") -> None:
        for _ in range(count):
            self._socks.append(self._connect())
            with contextlib.suppress(ConnectionError):
                self._socks[-1].sendall(initial_data)

    def connect_again(self) -> None:
        """Open a connection and wait for an answer: all earlier ones are admitted or refused."""
        self.open(1)
        assert _is_answered(self._socks[-1])

    def count_answered(self) -> int:
        """Return how many of the connections are answered; the others were closed."""
        return sum(map(_is_answered, self._socks))

    def close(self) -> None:
        """End them all."""
        for sock in self._socks:
            sock.close()
        self._socks.clear()


def _is_answered(sock: socket.socket) -> bool:
    with contextlib.suppress(ConnectionError):
        sock.sendall(HEALTH_REQUEST)
        return read_reply(sock).status == 200
    return False


@pytest.fixture
def stack() -> Iterator[contextlib.ExitStack]:
    with contextlib.ExitStack() as stack:
        yield stack


def connect_from(gateway: Rig, address: str, stack: contextlib.ExitStack) -> PeerConnections:
    """Yield clients with one address at a listener for other hosts."""
    target, source = ("127.0.0.1", gateway.port), (address, 0)
    found = PeerConnections(lambda: socket.create_connection(target, 20, source_address=source))
    stack.callback(found.close)
    return found


def test_an_address_has_a_quota(folder: Path, stack: contextlib.ExitStack) -> None:
    """Beyond the quota, the connection of the same address that is idle for longest is closed."""
    listener = socket.create_server(("0.0.0.0", 0))
    gateway = stack.enter_context(rig(folder, listener, max_connections=MAX_CONNECTIONS))
    gateway.open()
    calm_address, crowded_address = (
        connect_from(gateway, "127.0.0.2", stack),
        connect_from(gateway, "127.0.0.3", stack),
    )
    calm_address.open(8)
    crowded_address.open(3 * MAX_CONNECTIONS)
    crowded_address.connect_again()
    assert calm_address.count_answered() == 8
    assert ADDRESS_SHARE // 2 <= crowded_address.count_answered() <= ADDRESS_SHARE
    # Other addresses may use the connections that this one may not.
    third_address = connect_from(gateway, "127.0.0.4", stack)
    third_address.open(2)
    assert third_address.count_answered() == 2
    assert calm_address.count_answered() == 8
    crowded_address.close()
    calm_address.open(ADDRESS_SHARE - 8)
    assert calm_address.count_answered() == ADDRESS_SHARE


def test_partial_requests_are_evicted_or_refused(folder: Path, stack: contextlib.ExitStack) -> None:
    """Nothing of theirs is idle, and nothing of others' is ended for it."""
    listener = socket.create_server(("0.0.0.0", 0))
    gateway = stack.enter_context(rig(folder, listener, max_connections=MAX_CONNECTIONS))
    gateway.open()
    calm_address, crowded_address = (
        connect_from(gateway, "127.0.0.2", stack),
        connect_from(gateway, "127.0.0.3", stack),
    )
    calm_address.open(8)
    crowded_address.open(3 * MAX_CONNECTIONS, HALF_REQUEST)
    assert calm_address.count_answered() == 8


def test_loopback_has_no_quota(folder: Path, stack: contextlib.ExitStack) -> None:
    """On loopback an address does not identify a client."""
    gateway = stack.enter_context(rig(folder, max_connections=MAX_CONNECTIONS))
    gateway.open()
    all_of_them = connect_from(gateway, "127.0.0.1", stack)
    all_of_them.open(MAX_CONNECTIONS)
    assert all_of_them.count_answered() == MAX_CONNECTIONS


@needs_users
def test_a_user_has_a_quota(folder: Path, stack: contextlib.ExitStack) -> None:
    path = folder / "socket"
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(path))
    path.chmod(0o666)
    listener.listen(4 * MAX_CONNECTIONS)
    stack.enter_context(rig(folder, listener, max_connections=MAX_CONNECTIONS)).open()

    def connect() -> socket.socket:
        sock = socket.socket(socket.AF_UNIX)
        sock.settimeout(20)
        sock.connect(str(path))
        return sock

    users = {
        uid: PeerConnections(lambda uid=uid: as_user(uid, connect))  # type: ignore[misc]
        for uid in (os.geteuid(), ALICE, BOB)
    }
    for connections in users.values():
        stack.callback(connections.close)
    users[os.geteuid()].open(4)
    users[ALICE].open(4)
    users[BOB].open(3 * MAX_CONNECTIONS)
    users[BOB].connect_again()
    assert users[os.geteuid()].count_answered() == users[ALICE].count_answered() == 4
    assert ADDRESS_SHARE // 2 <= users[BOB].count_answered() <= ADDRESS_SHARE


@pytest.mark.parametrize(
    ("address", "expected"),
    [
        ("192.0.2.7", "192.0.2.7"),
        ("::ffff:192.0.2.7", "192.0.2.7"),
        ("2001:db8:1:2:3:4:5:6", "2001:db8:1:2::"),
        ("2001:db8:1:2:ffff::1", "2001:db8:1:2::"),
        ("fe80::1%eth0", "fe80::"),
        ("", ""),
    ],
)
def test_ipv6_addresses_share_the_quota_of_their_network(address: str, expected: str) -> None:
    assert network(address) == expected
