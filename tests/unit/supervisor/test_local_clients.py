"""The listener for local clients: its limit, and the release of what clients leave."""

import asyncio
import contextlib
import os
import socket
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import msgpack
import pytest

from shmserve.common import fd_limits
from shmserve.common.peers import NO_GROUP
from shmserve.errors import Internal
from shmserve.ipc import endpoints
from shmserve.ipc.endpoints import Capabilities
from shmserve.ipc.messages import publications as m
from shmserve.ipc.messages.control_requests import Hello, Refused, ShareMemory, WantModel
from shmserve.ipc.messages.publications import Acknowledged, HealthChanged
from shmserve.ipc.model_spec import ModelSpec
from shmserve.ipc.tensors.descriptors import unpack_memory
from shmserve.ipc.transport import frames
from shmserve.supervisor.local_clients.server import (
    LocalClientServer,
    LocalMemory,
    _convert_for_clients,
)
from shmserve.supervisor.processes.control_socket import Acknowledgements
from shmserve.supervisor.regions.opener import RegionOpener
from tests.rigs.local_clients import memfd
from tests.rigs.process_rig import RecordedProcesses
from tests.rigs.region_rig import policy
from tests.support.regions import SharedObject

MAX_CLIENTS = 8
POLICY = policy(max_regions=8, max_regions_per_uid=4)


async def test_one_user_cannot_take_them_all(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A user may have three quarters of the connections, and a new one once another has ended."""
    monkeypatch.setattr(fd_limits, "local_clients_share", lambda: MAX_CLIENTS)
    unused: Any = None
    disconnected = asyncio.Event()
    capabilities = Capabilities(os.urandom(32))
    local_clients = LocalClientServer(
        run_dir,
        NO_GROUP,
        capabilities,
        unused,
        lambda: (),
        Acknowledgements(),
        lambda _: disconnected.set(),
        unused,
    )
    with contextlib.ExitStack() as stack:
        stack.callback(local_clients.connections.close)
        admitted_links = []
        for _ in range(MAX_CLIENTS):
            link = stack.enter_context(join_server(run_dir))
            if await is_welcomed(link):
                admitted_links.append(link)
        assert len(admitted_links) == fd_limits.max_connections_per_peer(MAX_CLIENTS) < MAX_CLIENTS
        admitted_links.pop().close()
        await disconnected.wait()
        assert await is_welcomed(stack.enter_context(join_server(run_dir)))


async def test_memory_of_a_program_that_exits_before_its_welcome_is_released(run_dir: Path) -> None:
    """The program sent its hello and shared memory in one message; all of it is released."""
    disconnected = asyncio.Event()
    capabilities = Capabilities(bytes(32))
    registry = LocalMemory(capabilities, RegionOpener(POLICY), RecordedProcesses(), print)
    unused: Any = None

    def release_place(number: int) -> None:
        registry.release(number)
        disconnected.set()

    local_clients = LocalClientServer(
        run_dir, NO_GROUP, capabilities, registry, list, Acknowledgements(), release_place, unused
    )
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as program, memfd() as fd:
        program.connect(str(endpoints.listener(run_dir)))
        greeting = frames.pack([Hello(frames.VERSION), ShareMemory(1, 4096, False)])
        socket.send_fds(program, [greeting], [fd])
    async with asyncio.timeout(10):
        await disconnected.wait()
    assert not len(registry)
    local_clients.connections.close()
    registry.close()


def test_memory_that_was_truncated_is_released_after_a_worker_died_of_it() -> None:
    processes, events = RecordedProcesses(), list[Any]()
    memory = LocalMemory(Capabilities(bytes(32)), RegionOpener(POLICY), processes, events.append)
    client: Any = SimpleNamespace(number=100_000_001, uid=os.getuid(), pid=1)
    with SharedObject(8192) as object_, memfd() as sealed_fd:
        os.posix_fallocate(object_.fd, 0, 8192)
        shared_memory = unpack_memory(memory.share(client, 8192, False, [os.dup(object_.fd)]))
        assert not shared_memory.sealed and not shared_memory.copied
        assert unpack_memory(memory.share(client, 4096, False, [os.dup(sealed_fd)])).sealed
        memory.release_shrunk()
        assert len(memory) == 2
        os.ftruncate(object_.fd, 4096)
        memory.release_shrunk()
        assert [region.memory_id != shared_memory.id for region in memory.all()] == [True]
        _, _, blamed, unregistered = events
        assert (blamed.name, blamed.reason) == (unregistered.name, unregistered.reason)
        assert "truncated" in blamed.reason
    memory.close()


@pytest.mark.parametrize(
    "packet",
    [
        msgpack.packb([frames.VERSION - 1, ["Hello", frames.VERSION - 1]]),
        msgpack.packb([frames.VERSION, ["Hello", frames.VERSION - 1]]),
    ],
)
async def test_a_program_of_another_version_gets_an_error_that_names_both(
    run_dir: Path, packet: bytes
) -> None:
    unused: Any = object()
    memory = LocalMemory(Capabilities(bytes(32)), RegionOpener(POLICY), RecordedProcesses(), print)
    local_clients = LocalClientServer(
        run_dir,
        NO_GROUP,
        Capabilities(bytes(32)),
        memory,
        list,
        Acknowledgements(),
        lambda number: None,
        unused,
    )
    with join_server(run_dir) as link:
        link.send(packet)
        loop = asyncio.get_running_loop()
        async with asyncio.timeout(10):
            (refusal,) = frames.unpack(await loop.sock_recv(link, 1024))
            assert await loop.sock_recv(link, 1024) == b""
    text = "the peer has protocol version 2, this process has version 3"
    assert refusal == Refused(0, "UNSUPPORTED", text)
    local_clients.connections.close()
    memory.close()


@pytest.mark.parametrize(("tensors", "all_fit"), [(2000, True), (20_000, False)])
async def test_many_inputs_end_no_connection(run_dir: Path, tensors: int, all_fit: bool) -> None:
    """Holds for a client that is connected during the load, and for a later one."""
    wide = _model("wide", tensors)
    models: list[Any] = [_model("plain", 1), HealthChanged(True, True, False)]
    unused: Any = None
    acknowledgements = Acknowledgements()
    local_clients = LocalClientServer(
        run_dir,
        NO_GROUP,
        Capabilities(bytes(32)),
        *(unused, lambda: models, acknowledgements, lambda _: None, unused),
    )
    with contextlib.ExitStack() as stack:
        stack.callback(local_clients.connections.close)
        link = stack.enter_context(join_server(run_dir))
        assert _names(await _receive(link, 3)) == {"plain"}
        number = acknowledgements.begin(local_clients.numbers())
        local_clients.announce(replace(wide, ack_number=number))
        (message,) = await _receive(link, 1, sends_hello=False)
        assert isinstance(message, m.ModelPublished if all_fit else m.ModelWithdrawn)
        link.send(frames.pack([Acknowledged(message.ack_number)]))
        while not acknowledgements.is_acknowledged(number):
            await acknowledgements.until_next_complete()
        models.insert(0, wide)
        later = stack.enter_context(join_server(run_dir))
        assert _names(await _receive(later, 4)) == ({"plain", "wide"} if all_fit else {"plain"})


@pytest.mark.parametrize("request_", [WantModel(7, "m", 0.0), ShareMemory(7, 4096, False)])
async def test_a_request_that_fails_unexpectedly_is_refused(
    run_dir: Path, request_: WantModel | ShareMemory, caplog: pytest.LogCaptureFixture
) -> None:
    """Otherwise the program would wait for its response for ever."""

    async def load_on_demand(name: str, timeout_s: float) -> None:
        raise OSError("no descriptor is free")

    memory: Any = SimpleNamespace(share=MagicMock(side_effect=OSError("no descriptor is free")))
    arguments = Capabilities(bytes(32)), memory, list, Acknowledgements(), lambda _: None
    local_clients = LocalClientServer(run_dir, NO_GROUP, *arguments, load_on_demand)
    with join_server(run_dir) as link:
        link.send(frames.pack([Hello(frames.VERSION), request_]))
        _, response = await _receive(link, 2, sends_hello=False)
    local_clients.connections.close()
    assert response == Refused(7, Internal.code, Internal().message)
    assert "no descriptor is free" in caplog.text


def test_the_tensors_that_a_welcome_lists() -> None:
    """All that is set, of what a request must fit."""
    tensor = {"name": "x", "data_type": "TYPE_FP32", "dims": [], "reshape": {"shape": [1]}}
    unset_fields = {"format": "FORMAT_NONE", "optional": False, "allow_ragged_batch": False}
    model = replace(
        _model("m", 0),
        config=ModelSpec.of({"name": "m", "input": [{**tensor, **unset_fields}]}),
        metadata={"name": "m"},
    )
    assert _convert_for_clients(model).metadata == {}
    assert _convert_for_clients(model).config.source == {
        "name": "m",
        "input": [tensor],
        "output": [],
    }
    optional = {**tensor, **unset_fields, "optional": True}
    model = replace(model, config=ModelSpec.of({"name": "m", "output": [optional]}))
    assert _convert_for_clients(model).config.source["output"] == [{**tensor, "optional": True}]
    for field, value in (("backend", "native"), ("ensemble_scheduling", {})):
        model = replace(model, config=ModelSpec.of({"name": "m", field: value}))
        assert _convert_for_clients(model).config.may_omit_outputs


def _model(name: str, count: int) -> m.ModelPublished:
    """Return a model with this number of inputs, in Triton's form."""
    unset = {"format": "FORMAT_NONE", "is_shape_tensor": False, "allow_ragged_batch": False}
    unset |= {"optional": False, "is_non_linear_format_io": False}
    tensors = [
        {"name": f"INPUT{n}", "data_type": "TYPE_FP32", "dims": [1], **unset} for n in range(count)
    ]
    config = {"name": name, "max_batch_size": 0, "input": tensors, "output": []}
    return m.ModelPublished(name, "1", ModelSpec.of(config), {}, "ipc:///run/1", True, True, 0.0, 0)


def _names(messages: list[Any]) -> set[str]:
    return {message.name for message in messages if isinstance(message, m.ModelPublished)}


async def _receive(link: socket.socket, count: int, *, sends_hello: bool = True) -> list[Any]:
    if sends_hello:
        link.send(frames.pack([Hello(frames.VERSION)]))
    loop = asyncio.get_running_loop()
    async with asyncio.timeout(10):
        return [r for _ in range(count) for r in frames.unpack(await loop.sock_recv(link, 1 << 22))]


def join_server(run_dir: Path) -> socket.socket:
    link = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    link.connect(str(endpoints.listener(run_dir)))
    link.setblocking(False)
    return link


async def is_welcomed(link: socket.socket) -> bool:
    """Return whether a hello is answered with a welcome."""
    with contextlib.suppress(
        BrokenPipeError, ConnectionResetError
    ):  # the server may have closed the link
        link.send(frames.pack([Hello(frames.VERSION)]))
        return await asyncio.get_running_loop().sock_recv(link, 1024) != b""
    return False
