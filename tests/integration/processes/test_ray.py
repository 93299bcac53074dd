"""`shmserve.ray`: a server per node of a Ray cluster, one of which is killed."""

import asyncio
import contextlib
import http.client
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import aiohttp
import psutil
import pytest

from shmserve.ray.server import NodeServer
from tests.support import repositories
from tests.support.servers import ROOT, Server, hold_ports, is_running, kill_together, port_of, tree
from tests.support.waiting import until
from tests.support.wire.raw_http import Http

FLAGS = {"allow-grpc": False, "allow-metrics": False, "model-repository": "models"}
AT_ONCE = 64
NAMED_MODEL = repositories.python_model(
    """
    def execute(self, requests):
        for request in requests:
            threading.Thread(target=self.answer, args=(request,), daemon=True).start()

    def answer(self, request):
        sender = request.get_response_sender()
        for _ in range(self.input(request, "COUNT")[0]):
            sender.send(self.response(NODE=NODE))
            time.sleep(0.1)
        sender.send(flags=FINAL)
""",
    before='NODE = np.array([os.environ["NODE"].encode()], object)',
)
NAMED_CONFIG = """
backend: "python"
model_transaction_policy { decoupled: true }
input { name: "COUNT" data_type: TYPE_INT32 dims: 1 }
output { name: "NODE" data_type: TYPE_STRING dims: 1 }
"""
ROWS = repositories.python_model("""
    def execute(self, requests):
        rows = np.full((1, 1), len(requests), np.int32)
        return [self.response(ROWS=rows) for _ in requests]
""")
ROWS_CONFIG = """
backend: "python"
max_batch_size: 64
dynamic_batching { max_queue_delay_microseconds: 500000 preferred_batch_size: 64 }
input { name: "X" data_type: TYPE_INT32 dims: 1 }
output { name: "ROWS" data_type: TYPE_INT32 dims: 1 }
"""


@pytest.fixture
def folder() -> Iterator[Path]:
    """Yield a short path with a repository.

    The model `named` returns the name of its node, once or several times. `rows` returns the number
    of requests executed together.
    """
    path = Path(tempfile.mkdtemp(prefix="st-"))
    for name, model, config in (("named", NAMED_MODEL, NAMED_CONFIG), ("rows", ROWS, ROWS_CONFIG)):
        repositories.write(path / "models", name, config, model)
    yield path
    shutil.rmtree(path)


def processes_in(folder: Path) -> list[psutil.Process]:
    """Return the processes whose temporary files are in a folder."""
    events = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.environ().get("TMPDIR") == str(folder):
                events.append(process)
    return list(filter(is_running, events))


def until_nothing_is_left(folder: Path) -> None:
    """Wait until no processes and no files of them are left."""
    until("nothing is left", lambda: not processes_in(folder) and not os.listdir(folder))


@pytest.fixture
def own_folder(
    folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """Return the folder for temporary files and run directories of a test's processes."""
    tmp_path_factory.getbasetemp()  # it is created once, and must outlive this folder
    path = folder / "own"
    path.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(path))
    for name in ("TMPDIR", "XDG_RUNTIME_DIR"):
        monkeypatch.setenv(name, str(path))
    monkeypatch.setenv("NODE", "own")
    return path


class Cluster:
    """The cluster of tests/rigs/ray_cluster.py, and its port."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (port_socket,) = hold_ports(1)
        self.port = port_of(port_socket)
        port_socket.close()
        flags = {**FLAGS, "model-repository": str(folder / "models")}
        with (folder / "log").open("w") as log:
            self._process = subprocess.Popen(
                [
                    *(sys.executable, ROOT / "tests" / "rigs" / "ray_cluster.py"),
                    *(folder, str(self.port), json.dumps(flags)),
                ],
                env={
                    **os.environ,
                    "PYTHONPATH": str(ROOT),
                    "CUDA_VISIBLE_DEVICES": "",
                    "RAY_TMPDIR": str(folder),
                },
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )
        self._wait("ready")

    def _wait(self, word: str) -> None:
        assert self._process.stdout
        for line in self._process.stdout:  # Ray prints lines of its own, too
            if line.strip() == word:
                return
        self._process.communicate()
        raise AssertionError((self.folder / "log").read_text()[-6000:])

    def kill_second(self) -> None:
        assert self._process.stdin
        self._process.stdin.write("kill\n")
        self._process.stdin.flush()
        self._wait("killed")

    def stop(self) -> None:
        self._process.communicate(timeout=60)
        assert self._process.returncode == 0


class Stream:
    """A stream of `count` responses of `named`, the first of which has arrived."""

    def __init__(self, port: int, count: int) -> None:
        self._connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
        body = json.dumps({"COUNT": count})
        self._connection.request("POST", "/v2/models/named/generate_stream", body)
        self._response = self._connection.getresponse()
        assert self._response.headers["Content-Type"] == "text/event-stream; charset=utf-8"
        (self.node,) = self._nodes(self._response.readline())

    @staticmethod
    def _nodes(lines: bytes) -> list[str]:
        events = [line[6:] for line in lines.splitlines() if line.startswith(b"data: ")]
        return [str(json.loads(event)["NODE"]) for event in events]

    def rest(self) -> list[str]:
        """Return the responses after the first; raise IncompleteRead if the stream was cut off."""
        with contextlib.closing(self):
            return self._nodes(self._response.read())

    def close(self) -> None:
        self._response.close()
        self._connection.close()


@pytest.mark.skipif(
    importlib.util.find_spec("ray") is None, reason="needs what `make ray` installs"
)
def test_a_node_is_killed(folder: Path) -> None:
    cluster = Cluster(folder)
    try:
        _batches_are_made(cluster.port)
        _what_only_a_node_can_answer_is_refused(cluster.port)
        streams: dict[str, Stream] = {}
        while streams.keys() != {"first", "second"}:
            stream = Stream(cluster.port, 20)
            if streams.setdefault(stream.node, stream) is not stream:
                stream.close()
        assert processes_in(folder / "second")
        cluster.kill_second()
        with pytest.raises((http.client.IncompleteRead, ConnectionError)):
            streams["second"].rest()
        assert streams["first"].rest() == ["first"] * 19
        for _ in range(20):
            assert Stream(cluster.port, 1).rest() == []
        until_nothing_is_left(folder / "second")
    finally:
        cluster.stop()
    until_nothing_is_left(folder / "first")


def _batches_are_made(port: int) -> None:
    """Check the batch size; with Ray's default concurrency it would not exceed five requests."""

    def rows(_: int) -> int:
        with contextlib.closing(Http(port)) as connection:
            request = {"inputs": [{"name": "X", "datatype": "INT32", "shape": [1, 1], "data": [1]}]}
            return int(connection.infer("rows", request).tensors()["ROWS"].item())

    with ThreadPoolExecutor(AT_ONCE) as clients:
        assert max(clients.map(rows, range(AT_ONCE))) > 10


def _what_only_a_node_can_answer_is_refused(port: int) -> None:
    with contextlib.closing(Http(port)) as connection:
        refused_reply = connection.register("region", "/region", 64)
        assert (refused_reply.status, refused_reply.error) == (
            501,
            "memory is shared with the server of the client's own node; send this request to the "
            "server of a node, not to Ray's proxy",
        )
        assert connection.get("/v2/models/rows").ok().json()["name"] == "rows"
        unknown = connection.get("/v2/models/a%2Fb")
        assert unknown.status == 404
        assert unknown.error == "Request for unknown model: 'a/b' is not found"


@contextlib.asynccontextmanager
async def start_server(args: dict[str, object]) -> AsyncIterator[NodeServer]:
    server = NodeServer(args)
    try:
        yield server
    finally:
        server.stop()
        await server._session.close()


def node_server_processes() -> list[psutil.Process]:
    """Return the processes that node servers have started as children of this process."""
    children = psutil.Process().children()
    return [child for child in children if "shmserve.ray.launch" in child.cmdline()]


async def no_response() -> bytes:
    return b""


def test_a_server_is_started_and_ended(own_folder: Path) -> None:
    async def use() -> None:
        async with start_server(
            {**FLAGS, "model-repository": own_folder.parent / "models"}
        ) as server:
            await server.wait_ready()
            await server.check()
            assert "shmserve" in os.listdir(
                own_folder
            )  # the folder in which clients on the node search
            async with await server.request(
                "GET", "/v2/models/rows/ready", [], no_response
            ) as answer:
                assert answer.status == 200

    asyncio.run(use())
    assert not list(own_folder.iterdir())


def test_server_is_found(own_folder: Path, serve: Callable[..., Server], repository: Path) -> None:
    running_server = serve(
        repository, "--exit-on-error=false", f"--http-unix-socket={own_folder / 'http.sock'}"
    )

    async def use() -> None:
        async with start_server({"server": str(own_folder / "http.sock")}) as server:
            await server.wait_ready()
            await server.check()
        assert running_server.answers("/v2/health/ready")
        async with start_server({"server": str(own_folder / "other.sock")}) as server:
            with pytest.raises(RuntimeError, match=r"no server responds at .*other.sock"):
                await server.check()

    asyncio.run(use())


def test_a_server_that_cannot_start_raises_its_error(own_folder: Path) -> None:
    async def use() -> None:
        async with start_server({**FLAGS, "model-repository": "/missing"}) as server:
            with pytest.raises(RuntimeError, match=r"shmserve serve exited with status [12]; see"):
                await server.wait_ready()

    asyncio.run(use())
    assert not list(own_folder.iterdir())


def test_a_server_that_exits_raises_an_error(own_folder: Path) -> None:
    async def use() -> None:
        async with start_server(
            {**FLAGS, "model-repository": own_folder.parent / "models"}
        ) as server:
            await server.wait_ready()
            (launched,) = node_server_processes()
            kill_together(tree(launched.pid)[1:])
            with pytest.raises(aiohttp.ClientConnectionError):
                await server.request("GET", "/v2", [], no_response)
            until("it has heard of it", lambda: not is_running(launched))
            with pytest.raises(RuntimeError, match="exited with status 137"):
                await server.check()

    asyncio.run(use())
    assert not list(own_folder.glob("shmserve-ray-*"))


REPLICA_PROGRAM = """
import asyncio, json, sys
from shmserve.ray.server import NodeServer

async def main():
    await NodeServer(json.loads(sys.argv[1])).wait_ready()
    print("ready", flush=True)
    await asyncio.sleep(3600)

asyncio.run(main())
"""


@pytest.mark.parametrize("with_its_child", [False, True])
def test_nothing_outlives_a_replica(own_folder: Path, with_its_child: bool) -> None:
    """Ray kills the children of a replica, too, when it can."""
    flags = json.dumps({**FLAGS, "model-repository": str(own_folder.parent / "models")})
    command = [sys.executable, "-c", REPLICA_PROGRAM, flags]
    with subprocess.Popen(command, stdout=subprocess.PIPE, cwd=ROOT, text=True) as replica:
        assert replica.stdout and replica.stdout.readline() == "ready\n"
        children = psutil.Process(replica.pid).children() if with_its_child else []
        replica.kill()
        for child in children:
            child.kill()
    until_nothing_is_left(own_folder)
