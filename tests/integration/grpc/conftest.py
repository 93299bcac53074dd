"""The ways to the gRPC listener: TCP, TLS and a unix socket, each also cut at random places."""

import contextlib
import shutil
import socket
import stat
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import grpc
import pytest

from tests.support import certificates, repositories
from tests.support.servers import Server, running
from tests.support.wire.cutting_proxy import CuttingProxy, connect_unix

_MODELS = ("simple", "identity", "gated", "echo_request")
_SEED = 20260


@dataclass(frozen=True)
class Endpoint:
    """A way to a server: `target` for gRPC's clients, and with TLS the trusted certificate."""

    server: Server
    target: str
    root: Path | None = None

    @contextlib.contextmanager
    def channel(self, **options: int) -> Iterator[grpc.Channel]:
        arguments = [
            ("grpc.use_local_subchannel_pool", 1),
            ("grpc.max_receive_message_length", -1),
            *((f"grpc.{name}", value) for name, value in options.items()),
        ]
        with (
            grpc.insecure_channel(self.target, arguments)
            if self.root is None
            else grpc.secure_channel(
                self.target, grpc.ssl_channel_credentials(self.root.read_bytes()), arguments
            )
        ) as channel:
            yield channel


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder_path = tmp_path_factory.mktemp("clients") / "models"
    repositories.add(folder_path, *_MODELS)
    return folder_path


@pytest.fixture(scope="module")
def plain_endpoint(repository: Path) -> Iterator[Endpoint]:
    """A server without TLS, which compresses responses and has a unix socket, too."""
    folder = Path(tempfile.mkdtemp(prefix="sg-"))
    flags = (
        f"--grpc-unix-socket={folder / 'socket'}",
        "--grpc-infer-response-compression-level=low",
        "--grpc-header-forward-pattern=some.*",
    )
    with running(repository, *flags, grpc=True) as server:
        assert stat.S_IMODE((folder / "socket").stat().st_mode) == 0o600
        yield Endpoint(server, server.grpc_url)
    assert not (folder / "socket").exists()
    shutil.rmtree(folder)


@pytest.fixture(scope="module")
def tls_endpoint(repository: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Endpoint]:
    keys = certificates.make(tmp_path_factory.mktemp("keys"))
    flags = (f"--grpc-server-cert={keys}/server.pem", f"--grpc-server-key={keys}/server.key")
    with running(repository, "--grpc-use-ssl", *flags, grpc=True) as server:
        yield Endpoint(server, server.grpc_url, keys / "ca.pem")


def unix_socket(server: Server) -> Path:
    (flag,) = (part for part in server.command if part.startswith("--grpc-unix-socket="))
    return Path(flag.partition("=")[2])


@pytest.fixture(scope="module", params=["tcp", "tls", "unix"])
def endpoint(request: pytest.FixtureRequest) -> Endpoint:
    plain: Endpoint = request.getfixturevalue(
        "tls_endpoint" if request.param == "tls" else "plain_endpoint"
    )
    if request.param == "unix":
        return Endpoint(plain.server, f"unix:{unix_socket(plain.server)}")
    return plain


@pytest.fixture(params=["whole", "cut"])
def any_endpoint(request: pytest.FixtureRequest, endpoint: Endpoint) -> Iterator[Endpoint]:
    """The way to each, straight or through a proxy."""

    def connect() -> socket.socket:
        if not endpoint.target.startswith("unix:"):
            return socket.create_connection(("127.0.0.1", endpoint.server.grpc_port))
        return connect_unix(unix_socket(endpoint.server))

    if request.param == "whole":
        yield endpoint
        return
    with CuttingProxy(connect, _SEED) as proxy:
        yield replace(endpoint, target=f"127.0.0.1:{proxy.port}")
