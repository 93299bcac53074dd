"""Messages that reach a gateway before the objects that they refer to."""

import asyncio
import contextlib
import socket
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest

from shmserve.gateway import process
from shmserve.gateway.grpc.main import GrpcServer
from shmserve.gateway.http.main import HttpServer
from shmserve.gateway.listener import Acceptor
from shmserve.gateway.settings import GatewaySettings, GatewayStart, GrpcSettings
from shmserve.ipc.endpoints import control
from shmserve.ipc.memory.arena import Arena
from shmserve.ipc.messages import publications as m
from shmserve.ipc.transport.router import Router


@contextlib.contextmanager
def running_process(tmp_path: Path) -> Iterator[process._Process]:
    server: Any = None
    settings = GatewaySettings(arena_byte_size=1 << 20)
    with contextlib.closing(Router(control(tmp_path))):
        new_process = process._Process(GatewayStart("0", tmp_path, settings), (), lambda *_: server)
        yield new_process
        gateway = new_process._gateway
        for part in (gateway.supervisor, gateway.schedulers, gateway.arena):
            part.close()


async def test_responses_of_dead_workers_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The exit and the responses arrive on two sockets, so the memory is unmapped after a delay."""
    monkeypatch.setattr(process, "_UNMAP_DELAY_S", 0.05)
    worker = Arena(4096)
    memory_range = worker.allocate(64)
    worker.view(memory_range)[:] = bytes(range(64))
    with running_process(tmp_path) as gateway_process:
        mappings = gateway_process._gateway.mappings
        mappings.view(memory_range)
        worker.close()  # from here on, only a process that has mapped it can read it
        gateway_process._handle_message(m.ProcessExited(memory_range.memory.pid, ""))
        assert bytes(mappings.view(memory_range)) == bytes(range(64))
        await asyncio.sleep(0.1)  # a later timer
        assert not mappings._mappings_by_id


async def test_a_message_that_cannot_be_handled_is_acknowledged(tmp_path: Path) -> None:
    """Otherwise the supervisor would wait for the acknowledgement for ever."""
    posted: list[Any] = []
    with running_process(tmp_path) as gateway_process:
        gateway = gateway_process._gateway
        gateway.supervisor.post = posted.append  # type: ignore[assignment, method-assign]
        gateway.models = MagicMock(withdraw=MagicMock(side_effect=KeyError))
        with pytest.raises(KeyError):
            gateway_process._handle_message(m.ModelWithdrawn("m", "1", 7))
    assert posted == [m.Acknowledged(7)]


async def test_a_drain_during_the_start_completes_without_connections() -> None:
    class FakeServer(process.ProtocolServer):
        async def open(self) -> None: ...

        def call_when_idle(self, on_drained: Any) -> None: ...

    server = FakeServer()
    records: list[bool] = []
    with socket.create_server(("127.0.0.1", 0)) as sock:
        acceptor: Any = SimpleNamespace(connections=[], drain=lambda on_done, **_: on_done())
        server.drain(lambda: records.append(True), has_successor=False)
        await server.listen(sock, acceptor)
        await asyncio.sleep(0)
        await server.accept()
        assert records == [True]
        assert not any(accepting.is_serving() for accepting in server._accepting_servers)
        await server.close()


def test_tokens_that_change_while_listeners_open_apply_to_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gateway: Any = MagicMock(settings=GatewaySettings())
    tokens = {"0" * 64: ("all",)}

    async def listen(server: process.ProtocolServer, sock: Any, acceptor: Acceptor) -> None:
        """Change the tokens while the server of a socket is created, as `_Process` does."""
        server.acceptors.append(acceptor)
        gateway.settings = replace(gateway.settings, tokens=tokens)
        for listener in [acceptor.listener for acceptor in server.acceptors]:
            listener.authorisation = listener.authorisation.with_tokens(tokens)

    monkeypatch.setattr(process.ProtocolServer, "listen", listen)
    start = GatewayStart("0", tmp_path, gateway.settings, http_sockets=2, grpc=GrpcSettings())
    with socket.socket(socket.AF_UNIX) as first, socket.socket(socket.AF_UNIX) as second:
        for server in (
            HttpServer(gateway, start, (first, second)),
            GrpcServer(gateway, start, (first, second)),
        ):
            gateway.settings = replace(gateway.settings, tokens={})
            asyncio.run(server.open())
            rules = [acceptor.listener.authorisation for acceptor in server.acceptors]
            assert [rule.requires_token for rule in rules] == [True, True]
