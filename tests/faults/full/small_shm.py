"""A server with a small /dev/shm, and a program that fills it."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

from tests.faults.scene import assert_recovers, scene
from tests.support.servers import ROOT, running

_MOUNT_COMMAND = 'mount -t tmpfs -o size=1M tmpfs /dev/shm && exec "$@"'


def can_mount() -> bool:
    """Return whether this user may mount a private /dev/shm."""
    mounting = subprocess.run(
        ["unshare", "-m", "mount", "-t", "tmpfs", "tmpfs", "/dev/shm"],
        capture_output=True,
        check=False,
    )
    return mounting.returncode == 0


# This program runs in the server's mount namespace, which has the small /dev/shm.
_PROGRAM = """
import json, os, sys
import numpy as np
from tests.support.wire.raw_http import Http, in_region, shm_input
from tests.support.regions import SharedObject

http, results = Http(int(sys.argv[1])), {}


def use(shared, size):
    half = size // 2
    request = {
        "inputs": [shm_input("INPUT0", "FP32", [half // 4], "r", half)],
        "outputs": [{"name": "OUTPUT0", "parameters": in_region("r", half, half)}],
    }
    return http.infer("identity", request).status


with SharedObject(8 << 20) as sparse:
    reply = http.register("r", sparse.key, 8 << 20)
    results["sparse"] = [reply.status, reply.error]
with SharedObject(512 << 10) as small:
    results["small"] = http.register("r", small.key, 512 << 10).status
    small.write(np.arange(65536, dtype=np.float32))
    results["infer"] = use(small, 512 << 10)
    results["right"] = bool((small.read(np.float32, 65536, 256 << 10) == np.arange(65536)).all())
    fill = os.open("/dev/shm/fill", os.O_RDWR | os.O_CREAT)
    try:
        while True:
            os.write(fill, bytes(65536))
    except OSError:
        pass
    results["infer while full"] = use(small, 512 << 10)
    values = np.arange(1_000_000, dtype=np.float32)
    outputs = [{"name": "OUTPUT0", "parameters": {"binary_data": True}}]
    inputs = [("INPUT0", "FP32", [1_000_000], values.tobytes())]
    reply = http.infer_binary("identity", inputs, outputs=outputs)
    results["large while full"] = bool((reply.tensors()["OUTPUT0"] == values).all())
    with SharedObject(4096) as empty:
        results["another while full"] = http.register("r2", empty.key, 4096).status
    os.close(fill)
    os.unlink("/dev/shm/fill")
    results["unregister"] = http.unregister().status
print(json.dumps(results))
"""


def fill_shared_memory(repository: Path) -> None:
    """Check that an object without free pages is rejected at its registration, and no other."""
    prefix = ["unshare", "-m", "sh", "-c", _MOUNT_COMMAND, "sh"]
    with running(repository, prefix=prefix) as server, scene(server, regions=0) as stage:
        enter = ["nsenter", "-t", str(server.pid), "-m", sys.executable, "-c", _PROGRAM]
        completed = subprocess.run(
            [*enter, str(server.http_port)],
            cwd=ROOT,
            # The working directory changes when the process enters another mount namespace.
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert completed.returncode == 0, completed.stderr
        report = json.loads(completed.stdout)
        status, text = report.pop("sparse")
        assert status == 503
        assert "shared memory is full" in text
        assert report == {
            "small": 200, "infer": 200, "right": True, "infer while full": 200,
            "large while full": True, "another while full": 503, "unregister": 200,
        }  # fmt: skip
        assert_recovers(stage, time.monotonic())
        assert stage.load.troubles() == []
