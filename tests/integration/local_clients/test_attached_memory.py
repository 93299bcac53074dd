"""Memory that another process has made, and regions that are sent to other processes."""

import contextlib
import fcntl
import multiprocessing
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from multiprocessing import forkserver, resource_sharer
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import shmserve
import shmserve.client.aio
from shmserve.client import Region, Server
from shmserve.ipc.messages.control_requests import ShareMemory
from shmserve.ipc.tensors.descriptors import unpack_memory
from shmserve.model import FP32
from shmserve.serving import LocalServer
from tests.rigs.local_clients import Guest
from tests.support.servers import ROOT, python_program
from tests.support.waiting import until

SPECS = {"x": ((1, 20_000), "FP32"), "output": ((1, 20_000), "FP32")}
OUTPUT_OFFSET = 80_000  # of the output: 20,000 numbers are a multiple of 64 bytes
TOTAL_BYTES = OUTPUT_OFFSET + 80_000
SEALING = os.MFD_ALLOW_SEALING
CONTEXTS = ("fork", "spawn", "forkserver")


class Double:
    def predict(self, x: FP32[np.ndarray, 20_000]) -> FP32[np.ndarray, 20_000]:
        return x * 2


@pytest.fixture(scope="module")
def local_server() -> Iterator[LocalServer]:
    """A server of one model, and all that stays for as long as processes are started."""
    with shmserve.serve(Double) as running_server:
        forkserver.ensure_running()
        yield running_server
        forkserver._forkserver._stop()  # type: ignore[attr-defined]


@pytest.fixture
def server(local_server: LocalServer) -> Iterator[Server]:
    with shmserve.client.connect(local_server.run_dir) as native_client:
        yield native_client


@pytest.fixture(autouse=True)
def resource_sharer_stopped(leak_guard: None) -> Iterator[None]:
    """End the thread by which multiprocessing sends descriptors."""
    yield
    resource_sharer.stop()


@pytest.fixture
def shared_memory() -> Iterator[SharedMemory]:
    """Memory that a program has made with Python's own library; nothing has been written to it."""
    memory = SharedMemory(create=True, size=TOTAL_BYTES)
    yield memory
    memory.close()
    memory.unlink()


def numbers(buffer: Any, offset: int = 0) -> np.ndarray:
    return np.ndarray((1, 20_000), np.float32, buffer, offset)


SOURCES: dict[str, Callable[[SharedMemory], Any]] = {
    "object": lambda shared: shared,
    "name": lambda shared: shared.name,
    "slash": lambda shared: "/" + shared.name,
    "path": lambda shared: Path("/dev/shm", shared.name),
    "descriptor": lambda shared: vars(shared)["_fd"],
    "file": lambda shared: os.fdopen(os.dup(vars(shared)["_fd"]), "r+b"),
}


@pytest.mark.parametrize("source", SOURCES)
def test_memory_of_another_maker_is_used_in_place(
    server: Server, shared_memory: SharedMemory, source: str
) -> None:
    source_array = SOURCES[source](shared_memory)
    with server.attach(source_array, SPECS) as region:
        numbers(shared_memory.buf)[:] = 3
        server.infer("double", region)
        assert (numbers(shared_memory.buf, OUTPUT_OFFSET) == 6).all() and (
            region["output"] == 6
        ).all()
        second_result = server.infer("double", x=region["x"], outputs={"output": region["output"]})
        assert second_result["output"][0, 0] == 6
    assert Path("/dev/shm", shared_memory.name).exists(), "its maker unlinks it"
    if hasattr(source_array, "close") and source_array is not shared_memory:
        source_array.close()


def test_tensors_may_begin_anywhere_and_be_described_later(
    server: Server, shared_memory: SharedMemory
) -> None:
    header = 24
    numbers(shared_memory.buf, header)[:] = 5
    with server.attach(shared_memory, {"x": SPECS["x"]}, offset=header) as region:
        assert server.infer("double", region)["output"][0, -1] == 10
    with server.attach(shared_memory) as region:
        assert region.specs == {"data": ((TOTAL_BYTES,), "UINT8")}
        x = numbers(region["data"], header)
        assert server.infer("double", x=x)["output"][0, -1] == 10
        del x


async def test_asyncio_attaches(
    server: Server, local_server: LocalServer, shared_memory: SharedMemory
) -> None:
    numbers(shared_memory.buf)[:] = 1
    async with shmserve.client.aio.connect(local_server.run_dir) as other_client:
        region = await other_client.attach(shared_memory.name, SPECS)
        await other_client.infer("double", region)
    assert (numbers(shared_memory.buf, OUTPUT_OFFSET) == 2).all()


@pytest.mark.parametrize(("seals", "flags"), [(0, 0), (0, SEALING), (fcntl.F_SEAL_SHRINK, SEALING)])
def test_a_memfd_with_and_without_seals(server: Server, seals: int, flags: int) -> None:
    fd = os.memfd_create("frames", flags)
    os.ftruncate(fd, TOTAL_BYTES)
    if seals:
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
    with server.attach(fd, SPECS) as region:
        region["x"][:] = 4
        server.infer("double", region)
    assert np.frombuffer(os.pread(fd, 80_000, OUTPUT_OFFSET), np.float32).min() == 8
    os.close(fd)


def test_unsuitable_objects_cannot_be_attached(server: Server, shared_memory: SharedMemory) -> None:
    with open(__file__) as file, open(f"/dev/shm/{shared_memory.name}", "rb") as reader:
        for invalid_source, kind, text in (
            ("nosuch", shmserve.client.NotFound, "no shared memory 'nosuch' in /dev/shm"),
            ("a\0b", shmserve.client.InvalidArgument, "cannot be used as shared memory"),
            ("\ud800", shmserve.client.InvalidArgument, "cannot be used as shared memory"),
            (-1, shmserve.client.InvalidArgument, "got -1"),
            (None, shmserve.client.InvalidArgument, "by its name in /dev/shm"),
            (np.zeros(4), shmserve.client.InvalidArgument, "by its name in /dev/shm"),
            (file, shmserve.client.InvalidArgument, "a memfd or an object in /dev/shm"),
            (reader, shmserve.client.InvalidArgument, "open for reading and writing"),
        ):
            with pytest.raises(kind, match=text):
                server.attach(invalid_source, SPECS)
    with pytest.raises(shmserve.client.InvalidArgument, match=r"has 160000 bytes, and .* 240000"):
        server.attach(shared_memory, {**SPECS, "y": SPECS["x"]})
    with pytest.raises(shmserve.client.InvalidArgument, match="offset must be"):
        server.attach(shared_memory, SPECS, offset=-1)
    closed = SharedMemory(create=True, size=64)
    closed.unlink()
    closed.close()
    with pytest.raises(shmserve.client.InvalidArgument, match="SharedMemory that is not closed"):
        server.attach(closed)
    region = server.allocate(SPECS)
    region.release()
    with pytest.raises(shmserve.client.Released):
        server.attach(region)


def test_memory_that_others_may_truncate_is_copied(
    server: Server, local_server: LocalServer, shared_memory: SharedMemory
) -> None:
    """Its mode lets another user shrink it, so that a worker never maps it."""
    path = Path("/dev/shm", shared_memory.name)
    path.chmod(0o666)
    with contextlib.closing(Guest(local_server)) as guest, path.open("r+b") as file:  # type: ignore[arg-type]
        os.posix_fallocate(file.fileno(), 0, TOTAL_BYTES)
        answer = guest.hello().request(ShareMemory(1, TOTAL_BYTES, False), file.fileno())
        memory = unpack_memory(answer.payload["memory"])
        assert memory.copied and not memory.sealed
    with server.attach(shared_memory, SPECS) as region:
        region["x"][:] = 3
        server.infer("double", region)
    assert (numbers(shared_memory.buf, OUTPUT_OFFSET) == 6).all()


def test_truncated_memory_fails_its_requests_only(server: Server) -> None:
    path = Path(f"/dev/shm/truncated-{os.getpid()}")
    with path.open("w+b") as file:
        file.truncate(TOTAL_BYTES)
        region = server.attach(file, SPECS)
        path.unlink()
        server.infer("double", region)
        file.truncate(4096)
        with pytest.raises(shmserve.client.InvalidArgument, match="was truncated"):
            server.infer("double", region)
        region.release()
    assert server.infer("double", x=np.ones((1, 20_000), np.float32))["output"][0, 0] == 2


def produce(region: Region, link: Any) -> None:
    """Write a frame; this process has no server."""
    region["x"][:] = 7
    link.send("written")
    link.recv()


def infer_there(region: Region, link: Any, run_dir: Path) -> None:
    with shmserve.client.connect(run_dir) as server:
        server.infer("double", region)
        link.send(float(region["output"][0, 9]))
        with server.attach(region) as own_region:
            server.infer("double", {"x": own_region["x"]}, outputs={"output": own_region["output"]})
            link.send(float(own_region["output"][0, 9]))


def receive(link: Any) -> None:
    produce(link.recv(), link)


@pytest.mark.parametrize("start", CONTEXTS)
@pytest.mark.parametrize("way", ["argument", "message"])
def test_a_region_is_shared_with_another_process(server: Server, start: str, way: str) -> None:
    context: Any = multiprocessing.get_context(start)
    local_end, remote_end = context.Pipe()
    with server.allocate(SPECS) as region:
        arguments = (region, remote_end) if way == "argument" else (remote_end,)
        child = context.Process(
            target=produce if way == "argument" else receive, args=arguments, daemon=True
        )
        child.start()
        remote_end.close()
        if way == "message":
            local_end.send(region)
        assert local_end.recv() == "written" and (region["x"] == 7).all()
        server.infer("double", region)
        assert (region["output"] == 14).all()
        local_end.send("seen")
        child.join()
        assert child.exitcode == 0


@pytest.mark.parametrize("start", CONTEXTS)
def test_a_region_is_used_with_the_server_by_every_process(
    server: Server, local_server: LocalServer, start: str
) -> None:
    context: Any = multiprocessing.get_context(start)
    local_end, remote_end = context.Pipe()
    with server.allocate(SPECS) as region:
        region["x"][:] = 2
        child = context.Process(target=infer_there, args=(region, remote_end, local_server.run_dir))
        child.start()
        remote_end.close()
        assert local_end.recv() == 4 and (region["output"] == 4).all()
        assert local_end.recv() == 4
        child.join()
        assert child.exitcode == 0
        assert server.infer("double", region)["output"][0, 0] == 4


def test_a_region_of_another_client_in_process(server: Server, local_server: LocalServer) -> None:
    region = server.allocate(SPECS)
    region["x"][:] = 1
    with shmserve.client.connect(local_server.run_dir) as other_client:
        other_client.infer("double", region)
        assert (region["output"] == 2).all()
        outputs = server.allocate({"output": SPECS["output"]})
        other_client.infer("double", {"x": region["x"]}, outputs=outputs)
        assert (outputs["output"] == 2).all()
        region.release()
        with pytest.raises(shmserve.client.Released):
            other_client.infer("double", region)


MAKER_PROGRAM = """
import sys, numpy as np, shmserve.client
from multiprocessing.shared_memory import SharedMemory
shared = SharedMemory(create=True, size=160_000)
server = shmserve.client.connect(sys.argv[1])
specs = {"x": ((1, 20_000), "FP32"), "output": ((1, 20_000), "FP32")}
regions = server.attach(shared, specs), server.allocate(specs)
for region in regions:
    server.infer("double", region)
print(shared.name, flush=True)
sys.stdin.read()
"""


def regions_of(server: LocalServer) -> int:
    from urllib.request import urlopen

    with urlopen(f"{server.url}/v2/systemsharedmemory/status") as response:
        return response.read().count(b"shmserve.client")


def test_killed_processes_leave_nothing(server: Server, local_server: LocalServer) -> None:
    """Killing the creator or a user of memory leaks nothing in /dev/shm or in the server."""
    regions_before, objects_before = regions_of(local_server), set(os.listdir("/dev/shm"))
    with python_program(MAKER_PROGRAM, local_server.run_dir) as p:
        assert p.stdout
        name = p.stdout.readline().strip()
        context = multiprocessing.get_context("spawn")
        local_end, remote_end = context.Pipe()
        user = context.Process(target=produce, args=(server.attach(name, SPECS), remote_end))
        user.start()
        remote_end.close()
        assert local_end.recv() == "written" and user.pid
        os.kill(user.pid, signal.SIGKILL)
        user.join()
        assert Path("/dev/shm", name).exists(), "a user of memory does not unlink it"
    until("memory is released", lambda: regions_of(local_server) <= regions_before)
    until("its maker's tracker unlinks it", lambda: not Path("/dev/shm", name).exists())
    leftover_objects = {
        entry_name for entry_name in os.listdir("/dev/shm") if "shmserve" in entry_name
    }
    assert leftover_objects <= objects_before


def test_the_example_draws_the_frames_of_the_camera() -> None:
    command = [sys.executable, str(ROOT / "examples" / "camera.py"), "--frames=5"]
    completed = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert completed.returncode == 0 and not completed.stderr, completed.stderr
    assert "###" in completed.stdout and "5 frames" in completed.stdout
