"""The example of a client of pyzmq and msgpack alone."""

from tests.support.servers import ROOT, Server, run_python


def test_one_inference(server: Server) -> None:
    result = run_python("-I", ROOT / "examples" / "zmq_client.py", server.run_dir, timeout_s=30)
    assert (result.returncode, result.stderr) == (0, "")
    sums, differences = (line.split() for line in result.stdout.splitlines())
    assert sums == ["OUTPUT0", *(str(n + 1) for n in range(16))]
    assert differences == ["OUTPUT1", *(str(n - 1) for n in range(16))]
