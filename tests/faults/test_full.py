"""What is full: /dev/shm, the queue, a process's memory for tensors."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path

import numpy as np
import pytest

from tests.crowd import values
from tests.faults.scene import assert_recovers, scene
from tests.raw_http import Reply
from tests.servers import ROOT, Server

_SHM_BYTES = 1 << 20


def can_mount() -> bool:
    """Whether this user may have a /dev/shm of its own."""
    tried = subprocess.run(
        ["unshare", "-m", "mount", "-t", "tmpfs", "tmpfs", "/dev/shm"],
        capture_output=True,
        check=False,
    )
    return tried.returncode == 0


# Runs in the server's mount namespace: its /dev/shm is the small one.
CLIENT = """
import json, os, sys
import numpy as np
from tests.raw_http import Http, in_region, shm_input
from tests.regions import SharedObject

http, told = Http(int(sys.argv[1])), {}


def use(shared, size):
    half = size // 2
    request = {
        "inputs": [shm_input("INPUT0", "FP32", [half // 4], "r", half)],
        "outputs": [{"name": "OUTPUT0", "parameters": in_region("r", half, half)}],
    }
    return http.infer("identity", request).status


with SharedObject(8 << 20) as sparse:
    reply = http.register("r", sparse.key, 8 << 20)
    told["sparse"] = [reply.status, reply.error]
with SharedObject(512 << 10) as small:
    told["small"] = http.register("r", small.key, 512 << 10).status
    small.write(np.arange(65536, dtype=np.float32))
    told["infer"] = use(small, 512 << 10)
    told["right"] = bool((small.read(np.float32, 65536, 256 << 10) == np.arange(65536)).all())
    fill = os.open("/dev/shm/fill", os.O_RDWR | os.O_CREAT)
    try:
        while True:
            os.write(fill, bytes(65536))
    except OSError:
        pass
    told["infer while full"] = use(small, 512 << 10)
    values = np.arange(1_000_000, dtype=np.float32)
    outputs = [{"name": "OUTPUT0", "parameters": {"binary_data": True}}]
    inputs = [("INPUT0", "FP32", [1_000_000], values.tobytes())]
    reply = http.infer_binary("identity", inputs, outputs=outputs)
    told["large while full"] = bool((reply.tensors()["OUTPUT0"] == values).all())
    with SharedObject(4096) as empty:
        told["another while full"] = http.register("r2", empty.key, 4096).status
    os.close(fill)
    os.unlink("/dev/shm/fill")
    told["unregister"] = http.unregister().status
print(json.dumps(told))
"""


@pytest.mark.skipif(
    not can_mount(), reason="needs the right to mount a small /dev/shm (unshare -m)"
)
def test_shared_memory_is_full(serve: Callable[..., Server]) -> None:
    mount = f'mount -t tmpfs -o size={_SHM_BYTES} tmpfs /dev/shm && exec "$@"'
    server = serve(prefix=["unshare", "-m", "sh", "-c", mount, "sh"])
    with scene(server, regions=0) as stage:
        told = subprocess.run(
            [
                "nsenter",
                "-t",
                str(server.pid),
                "-m",
                sys.executable,
                "-c",
                CLIENT,
                str(server.http_port),
            ],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert told.returncode == 0, told.stderr
        found = json.loads(told.stdout)
        status, text = found.pop("sparse")
        assert status == 503
        assert "shared memory is full" in text
        assert found == {
            "small": 200,
            "infer": 200,
            "right": True,
            "infer while full": 200,
            "large while full": True,
            "another while full": 503,
            "unregister": 200,
        }
        assert_recovers(stage, time.monotonic())
        assert stage.load.troubles() == []


@pytest.fixture
def narrow(repository: Path, tmp_path: Path, serve: Callable[..., Server]) -> Server:
    """At most four requests of a model wait."""
    return serve("--max-queue-size=4")


def test_the_queue_is_full(narrow: Server) -> None:
    with scene(narrow) as stage:
        first = stage.people.number("gated", 0)
        holder = narrow.gate.next()
        waiting: list[Future[Reply]] = []
        for value in range(1, 5):
            waiting.append(stage.people.number("gated", value))
            narrow.wait_pending("gated", value)
        for _ in range(10):
            refused = stage.people.number("gated", 9).result()
            assert refused.status == 503
            assert refused.error == "[request id: <id_unknown>] Exceeds maximum queue size"
            assert int(refused.headers["Retry-After"]) >= 1
        holder.release()
        for value, answer in enumerate(waiting, 1):
            narrow.gate.next().release()
            assert values(answer.result()) == [value]
        assert values(first.result()) == [0]
        assert_recovers(stage, time.monotonic())
        assert stage.load.troubles() == []


def test_the_memory_for_tensors_is_full(serve: Callable[..., Server]) -> None:
    """Requests that do not fit into what a process may use are refused, or wait; small ones are
    served.
    """
    server = serve(f"--arena-byte-size={8 << 20}")
    large = np.zeros(1_500_000, np.float32)
    with scene(server) as stage:
        huge = stage.http.infer_binary(
            "identity", [("INPUT0", "FP32", [3_000_000], bytes(12_000_000))]
        )
        assert huge.status in (400, 503)
        inputs = [("INPUT0", "FP32", [len(large)], large.tobytes())]
        outputs = [{"name": "OUTPUT0", "parameters": {"binary_data": True}}]
        asked = [
            stage.people.do(lambda http: http.infer_binary("identity", inputs, outputs=outputs))
            for _ in range(8)
        ]
        replies = [answer.result() for answer in asked]
        assert {reply.status for reply in replies} <= {200, 503}
        assert stage.http.infer_binary("identity", inputs, outputs=outputs).status == 200
        assert_recovers(stage, time.monotonic())
        assert stage.load.troubles() == []
