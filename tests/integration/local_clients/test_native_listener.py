"""Access rules and limits of local clients: the sockets behind shmserve.client, by hand."""

import contextlib
import os
import shutil
import socket
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgpack
import pytest
import zmq

import shmserve.client
from shmserve.ipc.messages import control_requests as m
from shmserve.ipc.messages.control_requests import Answered, Refused, UnloadModel, UnregisterRegion
from shmserve.ipc.messages.inference import Failed, Finished, Submit
from shmserve.ipc.messages.publications import HealthChanged, ModelPublished
from shmserve.ipc.messages.supervision import Stop
from shmserve.ipc.model_spec import ModelSpec
from shmserve.ipc.tensors.descriptors import Memory, Range, TensorRef, unpack_memory
from shmserve.ipc.tensors.schemas import RequestedOutput
from shmserve.ipc.transport import frames, zmtp
from tests.rigs.local_clients import Guest, answer, memfd, small_tensor, submit
from tests.support import repositories
from tests.support.servers import ROOT, Server, Start, run_python, running

CLIENT = ROOT / "examples" / "c_client" / "infer.c"


@pytest.fixture(scope="module")
def server(models: Path, start: Start) -> Server:
    repositories.add(models, "simple", "identity")
    return start(models)


@pytest.fixture
def local_client(server: Server) -> Iterator[Guest]:
    with contextlib.closing(Guest(server).hello()) as guest:
        yield guest


def test_memory_of_a_local_client_is_checked(local_client: Guest) -> None:
    with memfd() as fd:
        answer = local_client.request(m.ShareMemory(1, 4096, False), fd)
        assert isinstance(answer, Answered)
        assert unpack_memory(answer.payload["memory"]).byte_size == 4096
    for options, size, text in (
        ({"seals": 0}, 4096, "F_SEAL_SHRINK"),
        ({"reserve": False}, 4096, "must be reserved"),
        ({}, 4097, "from 1 to 4096"),
        ({}, 0, "from 1 to 4096"),
    ):
        with memfd(**options) as fd:
            refused_message = local_client.request(m.ShareMemory(2, size, False), fd)
        assert isinstance(refused_message, Refused) and text in refused_message.message
        assert refused_message.code == "INVALID_ARG"
    assert "1 descriptor" in local_client.request(m.ShareMemory(3, 1, False)).message
    with memfd() as fd, open(f"/proc/self/fd/{fd}", "rb") as reader:
        refused_message = local_client.request(m.ShareMemory(4, 4096, False), reader.fileno())
    assert "reading and writing" in refused_message.message


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give a file to another user")
def test_memory_of_another_user_is_refused(local_client: Guest) -> None:
    with memfd() as fd:
        os.fchown(fd, 12345, -1)
        refused_message = local_client.request(m.ShareMemory(1, 4096, False), fd)
    assert refused_message.code == "PERMISSION_DENIED"
    assert "it belongs to uid 12345 (mode 0777), the client is uid 0" in refused_message.message


def test_a_local_client_uses_only_its_own_memory(local_client: Guest, server: Server) -> None:
    link = local_client.link("identity")
    with memfd() as fd:
        memory = unpack_memory(
            local_client.request(m.ShareMemory(1, 4096, False), fd).payload["memory"]
        )
        os.pwrite(fd, b"\1\0\0\0" * 4, 0)
        tensor = TensorRef("INPUT0", "FP32", (4,), Range(memory, 0, 16))
        link.send(submit((tensor,), 1, (RequestedOutput("OUTPUT0", Range(memory, 64, 16)),)))
        assert isinstance(answer(link), Finished)
        assert os.pread(fd, 16, 64) == b"\1\0\0\0" * 4
    with contextlib.closing(Guest(server).hello()) as other_client:
        link = other_client.link("identity")
        link.send(submit((tensor,)))
        assert "has not shared" in answer(link).message
        made_up = Memory(memory.id, memory.pid, memory.fd, memory.inode, 8192, True)
        link.send(submit((TensorRef("INPUT0", "FP32", (4,), Range(made_up, 0, 16)),)))
        assert "has not shared" in answer(link).message
        link.send(submit((small_tensor(),), 1, (RequestedOutput("OUTPUT0", Range(memory, 0, 16)),)))
        assert "has not shared" in answer(link).message


def test_memory_ranges_are_encoded_as_documented(local_client: Guest) -> None:
    """Put together by hand from `PROTOCOL.md`, as another language does."""
    link = local_client.link("identity")
    with memfd() as fd:
        memory = local_client.request(m.ShareMemory(1, 4096, False), fd).payload["memory"]
        os.pwrite(fd, b"\2\0\0\0" * 4, 64)
        schema = msgpack.packb([[["INPUT0", "FP32", [4]]], [["OUTPUT0", 1]], {}])
        link.send(Submit(1, schema, [[memory, 64, 16], [memory, 128, 16]], 0, 0, 0, 0))
        finished_message = answer(link)
        assert isinstance(finished_message, Finished)
        ((name, datatype, shape),), parameters = msgpack.unpackb(finished_message.schema)
        assert (name, datatype, shape, parameters) == ("OUTPUT0", "FP32", [4], {})
        assert finished_message.data == [[memory, 128, 16]]
        assert os.pread(fd, 16, 128) == b"\2\0\0\0" * 4


def test_inputs_of_a_local_client_are_validated(local_client: Guest) -> None:
    link = local_client.link("simple")
    a = TensorRef("INPUT0", "INT32", (2, 16), bytes(128))
    link.send(submit((a, TensorRef("INPUT1", "INT32", (2, 16), bytes(128)))))
    assert isinstance(answer(link), Finished)
    for tensors, text in (
        ((a,), "expected 2 inputs but got 1"),
        ((a, TensorRef("INPUT1", "FP32", (2, 16), bytes(128))), "data-type is 'FP32'"),
        ((a, TensorRef("INPUT1", "INT32", (1, 16), bytes(64))), "batch size does not match"),
        ((a, TensorRef("INPUT1", "INT32", (2, 16), bytes(127))), "byte size mismatch"),
    ):
        link.send(submit(tensors, 2))
        failed_message = answer(link)
        assert isinstance(failed_message, Failed) and text in failed_message.message


@pytest.mark.parametrize(
    "data",
    [
        b"garbage",
        b"",
        frames.pack([m.Hello(99)]),
        msgpack.packb([1, ["Hello", 1]]),  # version 1 of the protocol
        frames.pack([Stop()]),
        frames.pack([UnloadModel(1, "simple", False)]),
        frames.pack([UnregisterRegion(1, "", 0, [])]),
        frames.pack([m.ShareMemory(1, 1, False)]),
        frames.pack([m.Hello(frames.VERSION), m.Hello(frames.VERSION)]),
        bytes((0x92, frames.VERSION)) + b"x" * 100_000,
    ],
)
def test_a_forbidden_message_ends_the_local_connection(server: Server, data: bytes) -> None:
    with contextlib.closing(Guest(server)) as local_client:
        local_client.listener.send(data)
        with contextlib.suppress(ConnectionResetError):
            while local_client.listener.recv(1 << 20):
                pass
    with shmserve.client.connect(server.run_dir) as client:
        assert ("simple", "1") in client.models()


ASKING_PROGRAM = """
import os, sys
import numpy as np, shmserve.client
os.setgroups([int(sys.argv[2])] if sys.argv[2] else [])
os.setgid(65534)
os.setuid(65534)
with shmserve.client.connect(sys.argv[1]) as client:
    x = np.arange(16, dtype=np.int32)[None]
    assert (client.infer("simple", INPUT0=x, INPUT1=x)["OUTPUT0"] == 2 * x).all()
    x = np.ones((1, 8192), np.float32)
    assert (client.infer("rows", INPUT0=x)["OUTPUT0"] == x).all()
    try:
        client.infer("identity", INPUT0=x[0])
    except shmserve.client.Unsupported:
        print("answered")
"""


@pytest.mark.skipif(os.getuid() != 0, reason="only root can be two users")
def test_other_users_need_the_group(repository: Path) -> None:
    """And their tensors are theirs: the memory of workers stays closed to them."""
    repositories.add(repository, "simple", "identity")
    repositories.add_identity(repository, "rows", "FP32", [8192], max_batch_size=8)
    with running(repository, "--shm-group=4321") as server:
        os.chmod(server.folder, 0o755)

        def run_client(group: str) -> subprocess.CompletedProcess[str]:
            return run_python("-c", ASKING_PROGRAM, server.run_dir, group)

        stranger_run = run_client("")
        assert "Disconnected" in stranger_run.stderr, stranger_run.stderr
        group_member = run_client("4321")
        assert group_member.stdout == "answered\n", group_member.stderr
        paths = {path.name: path.stat().st_mode & 0o777 for path in server.run_dir.iterdir()}
        assert server.run_dir.stat().st_mode & 0o777 == 0o710 and paths["guests"] == 0o710


def test_a_socket_of_a_zeromq_library(local_client: Guest) -> None:
    with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
        dealer.linger = 0
        dealer.identity = f"{local_client.number}.{local_client.token}.z".encode()
        dealer.connect(local_client.models["identity"])
        dealer.send(frames.pack([submit((small_tensor(),))]))
        assert dealer.poll(10_000)
        (message,) = frames.unpack(dealer.recv())
    assert isinstance(message, Finished)


@pytest.fixture(scope="module")
def client_in_c(tmp_path_factory: pytest.TempPathFactory) -> Path:
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("there is no C compiler")
    program = tmp_path_factory.mktemp("c") / "infer"
    subprocess.run([compiler, "-Wall", "-Wextra", "-Werror", "-o", program, CLIENT], check=True)
    return program


@contextlib.contextmanager
def listening(path: Path, kind: socket.SocketKind) -> Iterator[socket.socket]:
    """Yield a listener in the run directory of a server that the test plays."""
    path.parent.mkdir(exist_ok=True)
    with socket.socket(socket.AF_UNIX, kind) as listener:
        listener.bind(str(path))
        listener.listen()
        listener.settimeout(20)
        yield listener


def test_a_client_is_notified_of_its_eviction(run_dir: Path) -> None:
    """A server of another version closes the connection in the same way."""
    with (
        listening(run_dir / "guests" / "door", socket.SOCK_SEQPACKET) as client_listener,
        ThreadPoolExecutor(1) as threads,
    ):

        def evict_client() -> None:
            with client_listener.accept()[0] as inside:
                inside.recv(4096)

        threads.submit(evict_client)
        with pytest.raises(shmserve.client.Disconnected, match="its version may differ"):
            shmserve.client.connect(run_dir)


def test_the_c_client_survives_the_end_of_a_scheduler(client_in_c: Path, run_dir: Path) -> None:
    """The client reports the loss, and it had asked for the latest version."""
    with (
        contextlib.ExitStack() as stack,
        listening(run_dir / "guests" / "door", socket.SOCK_SEQPACKET) as client_listener,
        listening(run_dir / "guests" / "1", socket.SOCK_STREAM) as scheduler,
    ):
        c_client = stack.enter_context(
            subprocess.Popen([client_in_c, run_dir], stderr=subprocess.PIPE, text=True)
        )
        stack.callback(c_client.kill)
        inside = stack.enter_context(client_listener.accept()[0])
        assert frames.unpack(inside.recv(4096)) == [m.Hello(frames.VERSION)]
        models = [
            ModelPublished(
                "simple",
                version,
                ModelSpec.of({}),
                {},
                f"ipc://{run_dir}/guests/{n}",
                True,
                is_last,
                0.0,
                0,
            )
            for version, n, is_last in (("3", 1, True), ("2", 2, False))
        ]
        inside.send(frames.pack([m.Welcome(1, "token"), *models, HealthChanged(True, True, False)]))
        link = stack.enter_context(scheduler.accept()[0])
        link.recv(64, socket.MSG_WAITALL)
        link.shutdown(socket.SHUT_RD)
        link.sendall(zmtp.GREETING)
        assert c_client.communicate(timeout=20)[1] == "infer: nothing can be sent to the server\n"
        assert c_client.returncode == 1


def test_the_client_in_c(server: Server, client_in_c: Path) -> None:
    run = subprocess.run(
        [client_in_c, server.run_dir], capture_output=True, text=True, check=False, timeout=20
    )
    assert run.returncode == 0, run.stderr
    sums, differences = (line.split() for line in run.stdout.splitlines())
    assert sums == ["OUTPUT0", *map(str, range(1, 17))]
    assert differences == ["OUTPUT1", *map(str, range(-1, 15))]
