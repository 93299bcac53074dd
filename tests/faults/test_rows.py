"""Failures of shared memory, in addition to tests/integration/memory."""

import contextlib
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

import shmserve.client
from tests.faults.full.small_shm import can_mount, fill_shared_memory
from tests.support import repositories
from tests.support.leaks import created_since
from tests.support.regions import SharedObject
from tests.support.request_pool import RequestPool, request_pool
from tests.support.servers import Server, kill_together, running
from tests.support.waiting import until
from tests.support.wire.raw_http import Http, UnixHttp, gated_request, region_request, shm_input

VALUES = np.arange(1024, dtype=np.float32)
SIZE = VALUES.nbytes
PAGE = os.sysconf("SC_PAGESIZE")


@pytest.fixture(scope="module")
def repository(folder: Path) -> Path:
    repositories.add(folder / "models", "identity", "gated", "simple")
    return folder / "models"


@pytest.fixture(scope="module")
def server(folder: Path, repository: Path) -> Iterator[Server]:
    flags = [f"--http-unix-socket={folder / 'socket'}", "--shm-overlap=error"]
    with running(repository, *flags) as running_server:
        (folder / "socket").chmod(0o666)
        yield running_server


@dataclass(frozen=True)
class Stage:
    """A server with a connection, a pool of concurrent requests, its Unix socket and its models."""

    server: Server
    http: Http
    pool: RequestPool
    socket: Path
    models: Path

    @contextlib.contextmanager
    def region(self, name: str, size: int = 2 * SIZE, offset: int = 0) -> Iterator[SharedObject]:
        with SharedObject(size + offset) as shared_object:
            shared_object.write(VALUES, offset)
            self.http.register(name, shared_object.key, size, offset).ok()
            yield shared_object

    def infer_in_region(self, name: str) -> int:
        return self.http.infer("identity", region_request(name, SIZE)).status

    def replaced(self, title: str) -> None:
        victim = self.server.find_one(title)
        victim.kill()
        until(f"{title} runs", lambda: any(p.pid != victim.pid for p in self.server.find(title)))
        self.server.wait_ready()


def wait_regions(stage: Stage, names: list[str]) -> None:
    until(f"they are {names}", lambda: [r["name"] for r in stage.http.regions().json()] == names)


def client_dies_and_leaves_a_region(stage: Stage) -> None:
    """Disconnect a client: its region with the lifetime of a connection is removed."""
    with SharedObject(SIZE) as shared_object:
        body = {"key": shared_object.key, "byte_size": SIZE, "lifetime": "connection"}
        with stage.server.http() as client:
            client.post("/v2/systemsharedmemory/region/leased/register", body).ok()
            client.register("kept", shared_object.key, SIZE).ok()
            wait_regions(stage, ["kept", "leased"])
        wait_regions(stage, ["kept"])
        body["lifetime"] = "forever"
        refused_reply = stage.http.post("/v2/systemsharedmemory/region/leased/register", body)
        assert refused_reply.status == 400


def numbers_that_overflow(stage: Stage) -> None:
    """Use offsets and sizes near all limits; each request is rejected or correct."""
    edges = [0, 1, PAGE, 2 * SIZE, 2**31, 2**32, 2**53, 2**63, 2**64]
    numbers = sorted({max(0, edge_value + delta) for edge_value in edges for delta in (-1, 0, 1)})
    with SharedObject(2 * SIZE) as shared_object:
        for offset in numbers:
            for size in numbers:
                fits = size > 0 and offset + size <= 2 * SIZE
                reply = stage.http.register("r", shared_object.key, size, offset)
                assert (reply.status == 200) == fits, (offset, size, reply)
                if fits:
                    stage.http.unregister("r").ok()
        stage.http.register("r", shared_object.key, 2 * SIZE).ok()
        for offset in numbers:
            inputs = [shm_input("INPUT0", "FP32", [16], "r", 64, offset)]
            status = stage.http.infer("identity", {"inputs": inputs}).status
            assert (status == 200) == (offset + 64 <= 2 * SIZE), offset


def truncate_while_used(stage: Stage) -> None:
    """Truncate an object before it is read; for the other moments see test_faults.py."""
    with stage.region("r") as region:
        assert stage.infer_in_region("r") == 200
        worker = stage.server.find_one("worker identity.0")
        region.truncate(SIZE)
        assert stage.infer_in_region("r") == 400
        region.truncate(2 * SIZE)
        assert stage.server.find_one("worker identity.0") == worker


def shared_memory_is_full(stage: Stage) -> None:
    """Register a sparse object that does not fit: registration fails, not its later use."""
    if not can_mount():
        pytest.skip("needs the right to mount a small /dev/shm (unshare -m)")
    fill_shared_memory(stage.models)


def killed_servers_leave_nothing(stage: Stage) -> None:
    """Kill all processes at once; no object, socket or process remains."""
    names_before = set(os.listdir("/dev/shm"))
    for _ in range(2):
        server = Server([stage.models]).wait_ready()
        members = server.tree()
        kill_together(members)
        server.process.wait()
        with contextlib.suppress(AssertionError):
            # The last process removes the run directory. If it was killed, the next start removes
            # it.
            server.assert_exited(members, within_s=1.0)
        server.discard(members)
        assert not created_since(names_before)


ATTACH_SCRIPT = """
import sys
from multiprocessing import shared_memory
shared_memory.SharedMemory(sys.argv[1]).close()
"""


def somebody_attaches_and_unlinks(stage: Stage) -> None:
    """Attach with Python before 3.13, which unlinks an object when the attached program exits."""
    with stage.region("r") as region:
        subprocess.run([sys.executable, "-Wignore", "-c", ATTACH_SCRIPT, region.name], check=True)
        with contextlib.suppress(FileNotFoundError):
            region.path.unlink()
        assert stage.infer_in_region("r") == 200
        assert (region.read(np.float32, 1024, SIZE) == VALUES).all()


def another_object_of_the_same_name(stage: Stage) -> None:
    """Create an object with the same key again; this new object is not registered."""
    with stage.region("r") as region:
        keeper = os.dup(region.fd)
        try:
            region.unlink()
            region.create()
            assert stage.infer_in_region("r") == 200
            assert not region.read(np.uint8, 2 * SIZE).any()
            assert (np.frombuffer(os.pread(keeper, SIZE, SIZE), np.float32) == VALUES).all()
        finally:
            os.close(keeper)


def keys_with_tricks(stage: Stage) -> None:
    """Every key names a plain shared memory object."""
    with SharedObject(SIZE) as shared_object:
        link = shared_object.path.with_name(shared_object.name + "-link")
        pipe = shared_object.path.with_name(shared_object.name + "-pipe")
        folder = shared_object.path.with_name(shared_object.name + "-folder")
        link.symlink_to(shared_object.path)
        os.mkfifo(pipe)
        folder.mkdir()
        try:
            for path in (link, pipe, folder):
                refused_reply = stage.http.register("r", f"/{path.name}", 64)
                assert refused_reply.status in (400, 500) and refused_reply.error, path
            for key in (shared_object.name, shared_object.key, "//" + shared_object.name):
                stage.http.register("r", key, SIZE).ok()
        finally:
            link.unlink()
            pipe.unlink()
            folder.rmdir()


def objects_of_others(stage: Stage) -> None:
    """The server's memory has no name, and objects of other users are rejected."""
    with stage.region("r"):
        pending = stage.pool.infer("gated", gated_request(1, "r"))
        visit = stage.server.gate.next()
        names = set()
        for process in stage.server.tree():
            for entry in Path(f"/proc/{process.pid}/fd").iterdir():
                with contextlib.suppress(OSError):
                    target = os.readlink(entry)
                    if target.startswith("/dev/shm/"):
                        names.add(target.removeprefix("/dev/shm/").removesuffix(" (deleted)"))
        assert all(name.startswith("test-") for name in names), names
        for name in set(os.listdir("/dev/shm")) - names:
            # An object of another run, which has ended.
            with contextlib.suppress(FileNotFoundError):
                if os.stat(f"/dev/shm/{name}").st_uid != os.geteuid():
                    assert stage.http.register("x", name, 1).status in (400, 403, 500)
        visit.release()
        assert pending.result().status == 200


def before_it_is_registered(stage: Stage) -> None:
    """Use an unregistered name: the error has a hint, but no other names."""
    with stage.region("secret-name"):
        refused_reply = stage.http.infer("identity", region_request("r", SIZE))
        assert refused_reply.status == 404
        assert "(1 are registered; register it before the request" in refused_reply.error
        assert "secret-name" not in refused_reply.error


def pinned_memory(stage: Stage) -> None:
    """Without a device, memory is not pinned, with a reason; empty objects are rejected.

    The driver itself is called only on hardware (tests/integration/cuda/test_cuda_memory.py).
    """
    path = "/v2/systemsharedmemory/region/r/register"
    with SharedObject(2 * SIZE) as shared_object:
        shared_object.write(VALUES)
        body = {"key": shared_object.key, "byte_size": 2 * SIZE}
        assert stage.http.post(path, {**body, "pin": "yes"}).status == 400
        assert "invalid args" in stage.http.post(path, {**body, "byte_size": 0, "pin": True}).error
        # This server sees no GPU, whether or not the host has one.
        pinned = stage.http.post(path, {**body, "pin": True})
        assert (pinned.status, "the server has none" in pinned.error) == (400, True)
        stage.http.post(path, {**body, "pin": False}).ok()
        assert stage.infer_in_region("r") == 200
        assert (shared_object.read(np.float32, len(VALUES), SIZE) == VALUES).all()
    with shmserve.client.connect(stage.server.run_dir) as client:
        signature = {"INPUT0": ((64,), "FP32"), "OUTPUT0": ((64,), "FP32")}
        with pytest.raises(shmserve.client.InvalidArgument, match="the server has none"):
            client.allocate(signature, pin=True)
        free_pages = re.search(r"HugePages_Free: *[1-9]", Path("/proc/meminfo").read_text())
        if not free_pages:
            with pytest.raises(shmserve.client.Unavailable, match="too few huge pages of"):
                client.allocate(signature, huge_pages=True)
        region = client.allocate(signature, huge_pages=free_pages is not None)
        region["INPUT0"][:] = VALUES[:64]
        assert (client.infer("identity", region)["OUTPUT0"] == VALUES[:64]).all()


ROWS: tuple[Callable[[Stage], None], ...] = (
    client_dies_and_leaves_a_region, numbers_that_overflow, truncate_while_used,
    shared_memory_is_full, killed_servers_leave_nothing, somebody_attaches_and_unlinks,
    another_object_of_the_same_name, keys_with_tricks, objects_of_others, before_it_is_registered,
    pinned_memory,
)  # fmt: skip


@pytest.mark.parametrize("row", ROWS)
def test_recovery_from_a_fault(server: Server, folder: Path, row: Callable[[Stage], None]) -> None:
    with server.http() as http, request_pool(server) as pool:
        try:
            row(Stage(server, http, pool, folder / "socket", folder / "models"))
        finally:
            with contextlib.closing(UnixHttp(folder / "socket")) as admin:
                admin.unregister().ok()
