"""`python -m bench peers`: a comparison of shmserve with other Python model servers."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from bench.load.client import RequestFailed
from bench.load.closed_loop import latencies
from bench.system import processes
from bench.system.servers import BENCH, ServerFailed, free_ports, stop_on_signal

_SERVERS = Path(__file__).parent / "servers"
_CACHE = Path("~/.cache/shmserve-newcomers").expanduser()
_READY_TIMEOUT_S = 120.0
_WARM_UP_S = 0.5
_IN_FLIGHT = (1, 16)
_IMAGE = np.linspace(0, 1, 3 * 224 * 224, dtype=np.float32)
_SIMPLE = (list(range(16)), [1] * 16)
_REGION = "bench-peers"


def post(path: str, body: bytes, headers: str = "") -> bytes:
    """Return an HTTP request with a body."""
    head = (
        f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n{headers}\r\n"
    )
    return head.encode() + body


def _plain(model: str) -> bytes:
    a, b = _SIMPLE
    body = json.dumps({"a": a, "b": b}).encode() if model == "simple" else _IMAGE.tobytes()
    return post("/infer", body, "Content-Type: application/octet-stream\r\n")


def _bentoml(model: str) -> bytes:
    if model == "simple":
        body = json.dumps({"rows": [_SIMPLE]}).encode()
        return post("/infer", body, "Content-Type: application/json\r\n")
    part = b'--b\r\nContent-Disposition: form-data; name="files"; filename="i"\r\n\r\n'
    body = part + _IMAGE.tobytes() + b"\r\n--b--\r\n"
    return post("/infer", body, "Content-Type: multipart/form-data; boundary=b\r\n")


def _shmserve(model: str) -> bytes:
    if model == "simple":
        inputs = [
            {"name": name, "datatype": "INT32", "shape": [1, 16], "data": data}
            for name, data in zip("ab", _SIMPLE, strict=True)
        ]
        return post("/v2/models/simple/infer", json.dumps({"inputs": inputs}).encode())
    return _image({"binary_data_size": _IMAGE.nbytes}, _IMAGE.tobytes())


def _shared_memory(model: str) -> bytes:
    region = {"shared_memory_region": _REGION, "shared_memory_byte_size": _IMAGE.nbytes}
    return _image(region) if model == "image" else b""


def _image(parameters: dict[str, object], tensor: bytes = b"") -> bytes:
    image_input = {"name": "image", "datatype": "FP32", "shape": [1, 3, 224, 224]}
    outputs = [{"name": "output", "parameters": {"binary_data": True}}]
    inputs = [{**image_input, "parameters": parameters}]
    head = json.dumps({"inputs": inputs, "outputs": outputs}).encode()
    header = f"Inference-Header-Content-Length: {len(head)}\r\n"
    return post("/v2/models/image/infer", head + tensor, header)


@dataclass(frozen=True)
class Peer:
    """A server: the packages that pip installs, its command, and its request to a model."""

    packages: tuple[str, ...]
    command: str
    request: Callable[[str], bytes] = _plain


_SHMSERVE = (
    "-m shmserve serve {servers}/shmserve_server.py:{Model} --http-address=127.0.0.1 "
    "--http-port={port} --allow-grpc=false --allow-metrics=false --run-dir={scratch}"
)
PEERS = {
    "shmserve": Peer((str(BENCH.parent),), _SHMSERVE, _shmserve),
    "shmserve, shared memory": Peer((str(BENCH.parent),), _SHMSERVE, _shared_memory),
    "FastAPI, uvicorn": Peer(("fastapi", "uvicorn[standard]"), "{servers}/fastapi_server.py"),
    "mosec": Peer(("mosec",), "{servers}/mosec_server.py --address=127.0.0.1 --port={port}"),
    "LitServe": Peer(("litserve",), "{servers}/litserve_server.py"),
    "BentoML": Peer(
        ("bentoml",),
        "-m bentoml serve bentoml_server:{Model} --working-dir {servers} -p {port} "
        "--host 127.0.0.1",
        _bentoml,
    ),
    "Ray Serve": Peer(("ray[serve]",), "{servers}/ray_server.py"),
}


def main(arguments: list[str]) -> int:
    """Install, start and load each server in turn, and print the medians of all rounds."""
    parser = argparse.ArgumentParser(prog="python -m bench peers", description=__doc__)
    parser.add_argument("--only", action="append", choices=PEERS, metavar="SERVER")
    parser.add_argument("--rounds", type=int, default=3, help="rounds of all servers (3)")
    parser.add_argument("--seconds", type=float, default=2.0, help="seconds of each load (2)")
    options = parser.parse_args(arguments)
    signal.signal(signal.SIGTERM, stop_on_signal)
    _CACHE.mkdir(parents=True, exist_ok=True)
    write_network(_CACHE / "network.onnx")
    names = options.only or list(PEERS)
    installations = {name: install(name) for name in names}
    figures: dict[tuple[str, str], list[list[float]]] = defaultdict(list)
    for number in range(options.rounds):
        for name in names:
            for model in ("simple", "image"):
                if PEERS[name].request(model):
                    load = f"load {os.getloadavg()[0]:.1f}"
                    print(f"round {number + 1}: {name}, {model} ({load})", file=sys.stderr)
                    with contextlib.suppress(ServerFailed):
                        figures[model, name].append(measure(name, model, options.seconds))
    report(figures, installations)
    return int(any(len(rows) < options.rounds for rows in figures.values()))


def install(name: str) -> tuple[float, float]:
    """Install a server in an environment of its own; return the seconds and MB that this took.

    An environment is kept for later runs, except for this checkout's.
    """
    folder = environment(name)
    record = folder / "installed.json"
    if not record.exists() or name == "shmserve":
        shutil.rmtree(folder, ignore_errors=True)
        subprocess.run([sys.executable, "-m", "venv", folder], check=True)
        pip = [str(folder / "bin" / "pip"), "install", "-q", "--disable-pip-version-check"]
        size_before, start_s = size_mb(folder), time.perf_counter()
        subprocess.run([*pip, *PEERS[name].packages], check=True, stderr=subprocess.DEVNULL)
        record.write_text(
            json.dumps([time.perf_counter() - start_s, size_mb(folder) - size_before])
        )
        # The runtime of the network, which is not a dependency of the server.
        subprocess.run([*pip, "onnxruntime", "numpy"], check=True, stderr=subprocess.DEVNULL)
    seconds, size = json.loads(record.read_text())
    return seconds, size


def environment(name: str) -> Path:
    """Return the folder of a server's environment."""
    return _CACHE / name.partition(",")[0].lower().replace(" ", "-")


def size_mb(folder: Path) -> float:
    """Return the size of all files in a folder, without links."""
    files = (file for file in folder.rglob("*") if not file.is_symlink())
    return sum(file.stat().st_size for file in files) / 1e6


def measure(name: str, model: str, seconds: float) -> list[float]:
    """Return memory (MB), then for each concurrency the rate, p50 and p99 (ms), CPU time (us)."""
    request = PEERS[name].request(model)
    with running(name, model, request) as (root, port):
        figures = []
        for in_flight in _IN_FLIGHT:
            latencies(port, request, in_flight, _WARM_UP_S)
            cpu_before, start_s = processes.cpu_s(root), time.perf_counter()
            times = latencies(port, request, in_flight, seconds)
            rate = len(times) / (time.perf_counter() - start_s)
            cpu_us = (processes.cpu_s(root) - cpu_before) / len(times) * 1e6
            figures += [rate, *np.percentile(times, [50, 99]) * 1e3, cpu_us]
        return [processes.pss_mb(root), *figures]


@contextlib.contextmanager
def running(name: str, model: str, request: bytes) -> Iterator[tuple[int, int]]:
    """Run a server; yield its first process and its port once the server responds."""
    peer = PEERS[name]
    (port,) = free_ports(1)
    scratch = _CACHE / "run"
    fields = {"servers": _SERVERS, "port": port, "scratch": scratch}
    fields["Model"] = "Model" if peer.request is _bentoml else model.capitalize()
    command = [str(environment(name) / "bin" / "python")]
    command += [word.format(**fields) for word in peer.command.split()]
    settings = {"PORT": str(port), "MODEL": model, "NETWORK": str(_CACHE / "network.onnx")}
    telemetry_off = {"RAY_USAGE_STATS_ENABLED": "0", "BENTOML_DO_NOT_TRACK": "True"}
    log = _CACHE / "log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            env={**os.environ, **settings, **telemetry_off},
            cwd=_CACHE,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
    region = Path("/dev/shm") / _REGION
    try:
        if peer.request is _shared_memory:
            region.write_bytes(_IMAGE.tobytes())
        wait_ready(process, port, request, log)
        yield process.pid, port
    finally:
        members = processes.tree(process.pid)
        process.terminate()
        if not processes.wait_exited(members, 15):
            processes.signal_all(members, signal.SIGKILL)
        process.wait()
        region.unlink(missing_ok=True)


def wait_ready(process: subprocess.Popen[bytes], port: int, request: bytes, log: Path) -> None:
    """Send the request, and register the region that it uses, until the server responds.

    Raises:
        ServerFailed: The server has exited, or does not respond in time.
    """
    body = json.dumps({"key": f"/{_REGION}", "offset": 0, "byte_size": _IMAGE.nbytes}).encode()
    register = post(f"/v2/systemsharedmemory/region/{_REGION}/register", body)
    failure: Exception | None = None
    deadline = time.monotonic() + _READY_TIMEOUT_S
    while process.poll() is None and time.monotonic() < deadline:
        try:
            if _REGION.encode() in request:
                latencies(port, register, 1, 0)
            latencies(port, request, 1, 0)
            return
        except (OSError, RequestFailed) as error:
            failure = error
            time.sleep(0.2)
    text = f"{failure}\n{log.read_text(errors='replace')[-1500:]}"
    print(text, file=sys.stderr)
    raise ServerFailed(text)


def report(
    figures: dict[tuple[str, str], list[list[float]]], installations: dict[str, tuple[float, float]]
) -> None:
    """Print a Markdown table for each model, and the installation figures."""
    for model, title in (("simple", "Two arrays of 16 numbers"), ("image", "An image of 600 KB")):
        print(f"\n| {title} | 1 in flight: requests/s | p50, p99 in ms | 16 in flight:", end="")
        print(" requests/s | p50, p99 in ms | CPU per request in us | memory in MB |")
        print("|---|---|---|---|---|---|---|")
        for (measured_case, name), rounds in figures.items():
            if measured_case == model:
                memory, rate, p50, p99, _, rate16, p50s, p99s, cpu = map(
                    statistics.median, zip(*rounds, strict=True)
                )
                rates = [row[5] for row in rounds]
                spread = f"[{min(rates):,.0f} .. {max(rates):,.0f}]"
                print(f"| {name} | {rate:,.0f} | {p50:.2f}, {p99:.2f} | {rate16:,.0f}", end="")
                print(f" {spread} | {p50s:.1f}, {p99s:.1f} | {cpu:,.0f} | {memory:,.0f} |")
    print("\n| | installation in s | installed in MB |\n|---|---|---|")
    for name, (seconds, size) in installations.items():
        print(f"| {name} | {seconds:.0f} | {size:,.0f} |")


def write_network(path: Path) -> None:
    """Write an ONNX network of two convolutions from an image (n, 3, 224, 224) to 10 scores."""
    from onnx import TensorProto, helper, numpy_helper, save_model

    random = np.random.default_rng(0)
    shapes = {"w1": (8, 3, 7, 7), "w2": (16, 8, 5, 5), "w3": (16, 10)}
    weights = [
        numpy_helper.from_array(random.normal(0, 0.1, shape).astype(np.float32), name)
        for name, shape in shapes.items()
    ]
    nodes = [
        helper.make_node("Conv", ["image", "w1"], ["c1"], strides=[4, 4]),
        helper.make_node("Relu", ["c1"], ["r1"]),
        helper.make_node("Conv", ["r1", "w2"], ["c2"], strides=[2, 2]),
        helper.make_node("Relu", ["c2"], ["r2"]),
        helper.make_node("GlobalAveragePool", ["r2"], ["p"]),
        helper.make_node("Flatten", ["p"], ["f"]),
        helper.make_node("MatMul", ["f", "w3"], ["output"]),
    ]
    tensor_value_info = helper.make_tensor_value_info(
        "image", TensorProto.FLOAT, ["n", 3, 224, 224]
    )
    result = helper.make_tensor_value_info("output", TensorProto.FLOAT, ["n", 10])
    graph = helper.make_graph(nodes, "network", [tensor_value_info], [result], weights)
    opset = [helper.make_opsetid("", 17)]
    save_model(helper.make_model(graph, opset_imports=opset, ir_version=8), path)
