"""The example of a client of pyzmq and msgpack alone."""

import subprocess
import sys

from tests.support.servers import ROOT, Server


def test_one_inference(server: Server) -> None:
    done = subprocess.run(
        [sys.executable, "-I", ROOT / "examples" / "zmq_client.py", server.run_dir],
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    sums, differences = (line.split() for line in done.stdout.splitlines())
    assert sums == ["OUTPUT0", *(str(n + 1) for n in range(16))]
    assert differences == ["OUTPUT1", *(str(n - 1) for n in range(16))]
