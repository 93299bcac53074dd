"""Untrusted clients: owners of regions, permissions of listeners, and limits."""

import contextlib
import json
import os
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from http.client import HTTPConnection, parse_headers
from pathlib import Path

import numpy as np
import psutil
import pytest

from tests.support import repositories
from tests.support.leaks import created_since, server_descriptors
from tests.support.regions import SharedObject
from tests.support.request_pool import request_pool
from tests.support.servers import ROOT, Server, running
from tests.support.users import ALICE, BOB, FRIENDS_GID, as_user, needs_users
from tests.support.waiting import repeating, until
from tests.support.wire.raw_http import (
    Http,
    Reply,
    UnixHttp,
    gated_request,
    in_region,
    join_bytes,
    json_request,
    raw_connection,
    region_request,
    shm_input,
)

VALUES = np.arange(1024, dtype=np.float32)
SIZE = VALUES.nbytes
MAX_REGIONS, SPARSE_BYTES = 40, 1 << 20
OWN_UID = os.geteuid()


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Server]:
    repository = folder / "models"
    repositories.add(repository, "identity", "gated", "text")
    flags = [
        f"--http-unix-socket={folder / 'socket'}",
        f"--shm-group={FRIENDS_GID}",
        "--shm-overlap=error",
        f"--shm-max-regions-per-uid={MAX_REGIONS}",
        f"--shm-max-regions={2 * MAX_REGIONS}",
        f"--shm-sparse-byte-size={SPARSE_BYTES}",
        f"--shm-max-byte-size={64 << 20}",
    ]
    with running(repository, *flags) as running_server:
        (folder / "socket").chmod(0o666)  # the tests include users outside the group
        yield running_server


@pytest.fixture
def http(server: Server) -> Iterator[Http]:
    with server.http() as connection:
        yield connection
        connection.unregister().ok()


class User:
    """A user at a listener, with its own connections and objects."""

    def __init__(self, server: Server, folder: Path, listener: str, uid: int, *groups: int) -> None:
        self._open: Callable[[], Http] = lambda: (
            UnixHttp(folder / "socket") if listener == "unix" else Http(server.http_port)
        )
        self.uid, self._groups = uid, groups

    def send_request(self, question: Callable[[Http], Reply]) -> Reply:
        def act() -> Reply:
            with contextlib.closing(self._open()) as connection:
                return question(connection)

        return act() if self.uid == OWN_UID else as_user(self.uid, act, self._groups)

    def register(self, name: str, shared: SharedObject, size: int = 2 * SIZE) -> Reply:
        return self.send_request(lambda http: http.register(name, shared.key, size))

    def infer(self, name: str) -> Reply:
        return self.send_request(lambda http: http.infer("identity", region_request(name, SIZE)))

    def names(self) -> list[str]:
        regions = self.send_request(lambda http: http.regions()).ok().json()
        return [region["name"] for region in regions]

    @contextlib.contextmanager
    def object(self, mode: int = 0o600, gid: int = -1) -> Iterator[SharedObject]:
        """Yield an object owned by this user, with values in its first half."""
        with SharedObject(2 * SIZE) as shared_object:
            shared_object.write(VALUES)
            shared_object.write(bytes(SIZE), SIZE)
            os.fchown(shared_object.fd, self.uid, gid)
            os.fchmod(shared_object.fd, mode)
            yield shared_object


@pytest.fixture(params=["unix", "loopback"])
def listener(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@needs_users
def test_users_and_listeners(server: Server, folder: Path, listener: str) -> None:
    """Over the Unix socket and over loopback, a user has access only to its own objects."""
    own_user, alice, bob = (User(server, folder, listener, uid) for uid in (OWN_UID, ALICE, BOB))
    with alice.object() as hers, bob.object(0o666) as his, own_user.object(0o666) as own:
        alice.register("hers", hers).ok()
        for foreign_object in (his, own):
            refused_reply = alice.register("other", foreign_object)
            assert refused_reply.status == 403
            assert f"the client is uid {ALICE}" in refused_reply.error
        assert f"it belongs to uid {OWN_UID} (mode 0666)" in refused_reply.error
        missing = alice.send_request(lambda http: http.register("none", "/not-there", SIZE))
        assert missing.status == 500
        assert missing.error.startswith("Unable to open shared memory region: '/not-there'")
        bob.register("his", his).ok()
        own_user.register("ours", own).ok()
        # A name that another user has registered is rejected.
        refused_reply = bob.register("hers", his)
        assert refused_reply.status == 400
        assert refused_reply.error == "shared memory region 'hers' already in manager"
        assert alice.names() == ["hers"]
        assert bob.names() == ["his"]
        alice.infer("hers").ok()
        assert (hers.read(np.float32, 1024, SIZE) == VALUES).all()
        for user, name in ((alice, "his"), (bob, "hers"), (alice, "ours")):
            refused_reply = user.infer(name)
            assert refused_reply.status == 404
            assert refused_reply.error.startswith(f"Unable to find shared memory region: '{name}'")
            assert user.send_request(partial(Http.regions, name=name)).status == 404
            user.send_request(partial(Http.unregister, name=name)).ok()
        alice.send_request(lambda http: http.unregister()).ok()
        assert bob.names() == ["his"]
        assert (his.read(np.float32, 1024, SIZE) == 0).all()
        bob.send_request(lambda http: http.unregister("his")).ok()
        own_user.send_request(lambda http: http.unregister()).ok()


@needs_users
def test_an_arriving_body_cannot_hold_another_users_region(server: Server, http: Http) -> None:
    """The server checks the regions of a request before it waits for a large body."""
    outputs = [{"name": "OUTPUT0", "parameters": in_region("ours", SIZE)}]
    parameters = {"binary_data_size": 4 * 65536}
    tensor = {"name": "INPUT0", "datatype": "FP32", "shape": [65536], "parameters": parameters}
    header = json.dumps({"inputs": [tensor], "outputs": outputs}).encode()

    def ask_and_send_nothing() -> tuple[int, bytes]:
        connection = HTTPConnection("127.0.0.1", server.http_port, timeout=20)
        with contextlib.closing(connection):
            connection.putrequest("POST", "/v2/models/identity/infer")
            connection.putheader("Inference-Header-Content-Length", str(len(header)))
            connection.putheader("Content-Length", str(len(header) + 4 * 65536))
            connection.endheaders(header)
            reply = connection.getresponse()
            return reply.status, reply.read()

    with SharedObject(SIZE) as shared_object:
        http.register("ours", shared_object.key, SIZE).ok()
        status, body = as_user(ALICE, ask_and_send_nothing)
        assert (status, b"registered by another user" in body) == (404, True)


@needs_users
def test_a_group_shares(server: Server, folder: Path) -> None:
    """Members may use objects of the group that the group may read and write."""
    alice, bob = (User(server, folder, "unix", uid, FRIENDS_GID) for uid in (ALICE, BOB))
    stranger_user = User(server, folder, "unix", BOB + 1)
    with alice.object(0o660, FRIENDS_GID) as shared, alice.object(0o640, FRIENDS_GID) as own:
        bob.register("shared", shared).ok()
        assert bob.register("hers", own).status == 403
        assert stranger_user.register("mine", shared).status == 403
        for user in (alice, bob):
            user.infer("shared").ok()
            assert user.names() == ["shared"]
        assert stranger_user.infer("shared").status == 404
        assert stranger_user.names() == []
        alice.send_request(lambda http: http.unregister("shared")).ok()
        assert bob.names() == []


@needs_users
def test_the_servers_user_sees_all_regions_on_the_unix_socket(server: Server, folder: Path) -> None:
    """Over TCP, every user, including the server's, sees only its own regions."""
    alice = User(server, folder, "unix", ALICE)
    with alice.object() as alices_object:
        alice.register("hers", alices_object).ok()
        assert User(server, folder, "unix", OWN_UID).names() == ["hers"]
        assert User(server, folder, "loopback", OWN_UID).names() == []
        User(server, folder, "unix", OWN_UID).send_request(lambda http: http.unregister()).ok()
        assert alice.names() == []


def maps(worker: psutil.Process) -> str:
    return Path(f"/proc/{worker.pid}/maps").read_text()


@needs_users
def test_memory_others_can_cut_is_never_mapped(server: Server, folder: Path, http: Http) -> None:
    """Memory of the server's user is mapped; others' is accessed by system calls."""
    alice = User(server, folder, "unix", ALICE)
    worker = server.find_one("worker identity.0")
    with alice.object() as alices_object, SharedObject(2 * SIZE) as own_object:
        alice.register("hers", alices_object).ok()
        http.register("ours", own_object.key, 2 * SIZE).ok()
        for _ in range(3):
            alice.infer("hers").ok()
            http.infer("identity", region_request("ours", SIZE)).ok()
        assert (alices_object.read(np.float32, 1024, SIZE) == VALUES).all()
        assert own_object.name in maps(worker)
        assert alices_object.name not in maps(worker)
        # The same holds for adjacent ranges in one batch, and for BYTES.
        words = [b"one", b"two", b""]
        alices_object.write(join_bytes(words))
        size = len(join_bytes(words))
        request = {"inputs": [shm_input("INPUT0", "BYTES", [1, 3], "hers", size)]}
        output = alice.send_request(lambda http: http.infer("text", request)).tensors()["OUTPUT0"]
        assert output == words
        assert alices_object.name not in maps(server.find_one("worker text.0"))
        alice.send_request(lambda http: http.unregister()).ok()


def cut(shared: SharedObject, size: int) -> None:
    """Truncate and extend the object, and punch holes."""
    os.ftruncate(shared.fd, 0)
    os.ftruncate(shared.fd, size)
    shared.punch()


@needs_users
def test_truncation_of_an_untrusted_region_ends_no_process(server: Server, folder: Path) -> None:
    """The client truncates, extends and punches the object during 200 requests."""
    alice = User(server, folder, "unix", ALICE)
    pids_before = {process.pid for process in server.tree()}
    size = 64 * 1024
    with SharedObject(2 * size) as shared_object:
        os.fchown(shared_object.fd, ALICE, -1)
        os.posix_fallocate(shared_object.fd, 0, 2 * size)
        alice.register("cut", shared_object, 2 * size).ok()

        def send_requests() -> list[int]:
            with contextlib.closing(UnixHttp(folder / "socket")) as http:
                request = region_request("cut", size)
                return [http.infer("identity", request).status for _ in range(200)]

        with repeating(partial(cut, shared_object, 2 * size)):
            statuses = as_user(ALICE, send_requests)
        assert set(statuses) <= {200, 400}
        alice.send_request(lambda http: http.unregister()).ok()
        os.ftruncate(shared_object.fd, 2 * size)
    assert {process.pid for process in server.tree()} == pids_before


def test_truncating_a_mapped_region_costs_it_and_a_worker(server: Server, http: Http) -> None:
    """Truncation may kill the worker and that of the retry; the region is unregistered."""
    other_pids = {p.pid for p in server.tree() if "worker identity" not in " ".join(p.cmdline())}
    size = 64 * 1024
    with SharedObject(2 * size) as shared_object:
        http.register("cut", shared_object.key, 2 * size).ok()
        statuses = []
        with repeating(partial(cut, shared_object, 2 * size)):
            for _ in range(200):
                statuses.append(http.infer("identity", region_request("cut", size)).status)
                if statuses[-1] == 404:
                    break
        assert set(statuses) <= {200, 400, 404, 500, 503} and statuses.count(500) <= 1
        if 404 in statuses:
            assert "region 'cut' was truncated while a worker used it" in server.log()
        http.unregister("cut").ok()
    assert other_pids <= {process.pid for process in server.tree()}
    until("the worker is back", lambda: server.answers("/v2/health/ready"))
    request = json_request(INPUT0=VALUES)
    assert (http.infer("identity", request).tensors()["OUTPUT0"] == VALUES).all()


def test_sparse_objects_are_metered(server: Server, http: Http) -> None:
    """Pages that the server must allocate count until removal; pages of the client do not."""
    with SharedObject(4 * SPARSE_BYTES) as large, SharedObject(SPARSE_BYTES // 2) as small:
        refused_reply = http.register("large", large.key, 4 * SPARSE_BYTES)
        assert refused_reply.status == 400
        assert f"{4 * SPARSE_BYTES} bytes of shared memory object" in refused_reply.error
        assert "posix_fallocate" in refused_reply.error
        assert os.fstat(large.fd).st_blocks == 0, "nothing was allocated for it"
        os.posix_fallocate(large.fd, 0, 4 * SPARSE_BYTES)
        http.register("large", large.key, 4 * SPARSE_BYTES).ok()
        http.register("small", small.key, SPARSE_BYTES // 2).ok()
        assert os.fstat(small.fd).st_blocks * 512 == SPARSE_BYTES // 2
        http.unregister("small").ok()
        with SharedObject(SPARSE_BYTES) as other_object:
            assert http.register("other", other_object.key, SPARSE_BYTES).status == 400
            small.unlink()
            http.register("other", other_object.key, SPARSE_BYTES).ok()
            http.unregister().ok()
    with SharedObject(65 << 20) as huge_object:
        assert "--shm-max-byte-size" in http.register("huge", huge_object.key, 65 << 20).error


def in_one_go(port: int, requests: list[bytes]) -> Iterator[tuple[int, bytes]]:
    """Yield the status and body of pipelined requests, which are sent a hundred at a time."""
    with raw_connection(port) as connection, connection.makefile("rb") as answers:
        for begin in range(0, len(requests), 100):
            request_group = requests[begin : begin + 100]
            connection.sendall(b"".join(request_group))
            for _ in request_group:
                status = int(answers.readline().split()[1])
                size = int(parse_headers(answers)["Content-Length"])
                yield status, answers.read(size)


def test_registrations_have_a_limit(server: Server, http: Http) -> None:
    """Of ten thousand registrations, those beyond the limit fail; nothing is leaked."""
    with SharedObject(SIZE) as shared_object:
        shared_object.write(VALUES)
        for number in range(MAX_REGIONS):
            http.register(f"r{number}", shared_object.key, SIZE).ok()
        before, objects = server_descriptors(server), set(os.listdir("/dev/shm"))
        body = json.dumps({"key": shared_object.key, "byte_size": SIZE}).encode()
        pending_calls = [
            b"POST /v2/systemsharedmemory/region/s%d/register HTTP/1.1\r\nHost: localhost\r\n"
            b"Content-Length: %d\r\n\r\n%b" % (number, len(body), body)
            for number in range(10_000)
        ]
        answers = Counter(in_one_go(server.http_port, pending_calls))
        ((status, text),) = answers
        assert (status, answers[status, text]) == (400, 10_000)
        assert f"at most {MAX_REGIONS} shared memory regions can be registered".encode() in text
        until("descriptors are what they were", lambda: server_descriptors(server) == before)
        assert not created_since(objects)
        assert len(http.regions().json()) == MAX_REGIONS
        http.unregister().ok()
        http.register("again", shared_object.key, SIZE).ok()


def test_outputs_that_overlap_are_refused(server: Server, http: Http) -> None:
    """The second writer of a range fails, also with another name of the object."""
    with SharedObject(4096) as shared_object, request_pool(server) as pool:
        http.register("a", shared_object.key, 4096).ok()
        http.register("b", shared_object.key, 2048, 1024).ok()
        first_request = pool.infer("gated", gated_request(7, "a", 1024))
        visit = server.gate.next()
        for region, offset in (("a", 1024), ("a", 1087), ("a", 961), ("b", 0), ("b", 63)):
            refused_reply = http.infer("gated", gated_request(9, region, offset))
            assert refused_reply.status == 400
            assert refused_reply.error == (
                f"an output in shared memory region '{region}' overlaps an output of a request in "
                "flight"
            )
        valid = [
            pool.infer("gated", gated_request(7, "a", input_offset)) for input_offset in (960, 1088)
        ]
        server.wait_pending("gated", 2)
        visit.release()
        for _ in valid:
            server.gate.next().release()
        assert [answer.result().status for answer in (first_request, *valid)] == [200] * 3
        assert (shared_object.read(np.int32, 48, 960) == 7).all()
        http.infer("identity", json_request(INPUT0=VALUES[:16])).ok()


def test_lengths_that_change_while_they_are_read(server: Server, http: Http) -> None:
    """Another thread rewrites the prefixes; each request is consistent or fails."""
    good_bytes, bad_bytes = join_bytes([b"ab", b"cd"]), (1 << 31).to_bytes(4, "little")
    with SharedObject(4096) as shared_object:
        shared_object.write(good_bytes)
        http.register("r", shared_object.key, 4096).ok()

        def flip() -> None:
            os.pwrite(shared_object.fd, bad_bytes, 0)
            os.pwrite(shared_object.fd, good_bytes[:4], 0)

        request = {"inputs": [shm_input("INPUT0", "BYTES", [1, 2], "r", len(good_bytes))]}
        with repeating(flip):
            for _ in range(200):
                reply = http.infer("text", request)
                if reply.status == 200:
                    assert reply.tensors()["OUTPUT0"] == [b"ab", b"cd"]
                else:
                    assert reply.status == 400 and "incomplete string" in reply.error


PREEXEC_HOOK = """
import os, sys

def hook(event, arguments):
    if event == "pickle.find_class":
        with open(os.environ["PICKLED"], "a") as seen:
            seen.write(f"{sys.argv} {arguments}\\n")

sys.addaudithook(hook)
with open(os.environ["PICKLED"], "a") as seen:
    seen.write("hook\\n")
"""


def test_nothing_is_unpickled(tmp_path: Path) -> None:
    """No process of a server that starts, serves and stops unpickles anything."""
    (tmp_path / "sitecustomize.py").write_text(PREEXEC_HOOK)
    repositories.add(tmp_path / "models", "identity")
    seen_file = tmp_path / "seen"
    environment = {"PYTHONPATH": f"{tmp_path}:{ROOT}", "PICKLED": str(seen_file)}
    with running(tmp_path / "models", environment=environment) as server, server.http() as http:
        request = json_request(INPUT0=VALUES)
        assert (http.infer("identity", request).tensors()["OUTPUT0"] == VALUES).all()
        http.get("/v2/models/stats").ok()
    # The supervisor and both zygotes. Their forked processes have the same audit hook.
    lines = seen_file.read_text().splitlines()
    assert lines == ["hook"] * len(lines) and len(lines) >= 3
