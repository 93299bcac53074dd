"""The addresses where the server listens: all addresses of a name that belong to this host."""

import errno
import socket
from pathlib import Path

import pytest

from shmserve.common.peers import NO_GROUP
from shmserve.errors import InvalidArgument
from shmserve.supervisor.host import listeners
from shmserve.supervisor.host.listeners import close, listen, listen_unix

UNUSED_ADDRESS = "192.0.2.1"  # RFC 5737: for documentation only


def resolve_names(monkeypatch: pytest.MonkeyPatch, *addresses: str) -> None:
    """Let every host name resolve to these addresses."""
    found = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, 0)) for address in addresses]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: found)


def test_unavailable_addresses_are_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    """`localhost` is 127.0.0.1 and ::1 also where there is no IPv6."""
    resolve_names(monkeypatch, UNUSED_ADDRESS, "127.0.0.1")
    (sock,) = listen("localhost", 0, "--http-address", True)
    with sock:
        assert sock.getsockname()[0] == "127.0.0.1"


def test_unsupported_address_families_are_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    original_socket = socket.socket

    def refuse_ipv6(family: int, kind: int = socket.SOCK_STREAM) -> socket.socket:
        if family == socket.AF_INET6:
            raise OSError(errno.EAFNOSUPPORT, "Address family not supported by protocol")
        return original_socket(family, kind)

    monkeypatch.setattr(socket, "socket", refuse_ipv6)
    (sock,) = listen("", 0, "--http-address", True)
    with sock:
        assert sock.family == socket.AF_INET


def test_a_name_without_local_addresses_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    resolve_names(monkeypatch, UNUSED_ADDRESS)
    with pytest.raises(InvalidArgument, match="cannot listen on x:0: Cannot assign requested"):
        listen("x", 0, "--http-address", True)


def test_a_port_must_be_free_on_every_address(monkeypatch: pytest.MonkeyPatch) -> None:
    """Then none is listened on: clients would find the server by one address and not by another."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        sockets = [
            (socket.AF_INET, socket.SOCK_STREAM, 6, "", address)
            for address in (("127.0.0.2", 0), listener.getsockname(), (UNUSED_ADDRESS, 0))
        ]
        monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: sockets)
        monkeypatch.setattr(listeners, "port_users", lambda _: [])
        with pytest.raises(InvalidArgument, match=r"already in use; .* another --http-port"):
            listen("localhost", 0, "--http-address", True)


def test_a_port_of_two_flags_names_no_other_program() -> None:
    refusal = pytest.raises(InvalidArgument, match="another flag of this server has this port")
    with socket.create_server(("127.0.0.1", 0)) as listener, refusal:
        listen("127.0.0.1", listener.getsockname()[1], "--grpc-address", True)


def test_a_unix_socket_of_another_server_is_not_removed(tmp_path: Path) -> None:
    """A server that starts while this one ends keeps its socket."""
    path = tmp_path / "socket"
    first_socket = listen_unix(path, NO_GROUP, "--http-unix-socket")
    close(first_socket)
    assert not path.exists()
    with listen_unix(path, NO_GROUP, "--http-unix-socket") as second_socket:
        close(first_socket)
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(str(path))
        close(second_socket)
        assert not path.exists()


def test_a_unix_socket_that_is_in_use(tmp_path: Path) -> None:
    path = tmp_path / "socket"
    (tmp_path / "file").touch()
    with pytest.raises(InvalidArgument, match="the path exists, and is not a socket"):
        listen_unix(tmp_path / "file", NO_GROUP, "--http-unix-socket")
    with listen_unix(path, NO_GROUP, "--http-unix-socket") as first_socket:
        with pytest.raises(InvalidArgument, match=r"in use; .* another --http-unix-socket"):
            listen_unix(path, NO_GROUP, "--http-unix-socket")
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(str(path))
        close(first_socket)


def test_unix_sockets_take_no_descriptors(tmp_path: Path) -> None:
    """A descriptor that is slow to close would block the gateway."""
    path = tmp_path / "sock"
    with socket.socket(socket.AF_UNIX) as probe_socket:
        try:
            probe_socket.setsockopt(socket.SOL_SOCKET, 83, 0)  # SO_PASSRIGHTS
        except OSError:
            pytest.skip("this kernel (before Linux 6.16) cannot refuse descriptors")
    with listen_unix(path, NO_GROUP, "--flag") as sock, socket.socket(socket.AF_UNIX) as client:
        sock.setblocking(True)
        client.connect(str(path))
        with pytest.raises(PermissionError):
            socket.send_fds(client, [b"x"], [client.fileno()])
        with sock.accept()[0], pytest.raises(PermissionError):
            socket.send_fds(client, [b"x"], [client.fileno()])
