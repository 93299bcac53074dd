"""One process of the demo's load: several clients, each a thread with a connection of its own.

Reads its orders as JSON from standard input, and writes what it measured to standard output.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import numpy as np
import tritonclient.http as triton
import tritonclient.utils.shared_memory as shm

# A thread that has its response should not wait 5 ms for another thread of this process to yield.
sys.setswitchinterval(0.0005)
_SCORE_BYTES = 10 * 4
_TOGETHER_WITHIN_S = 30.0


@dataclass
class Orders:
    """Send the images of `data` (an .npz file) to `model`, in requests of the given sizes in turn.

    Only what begins after `warm_up` seconds is measured, for `seconds`.
    """

    port: int
    model: str
    data: str
    clients: int
    shared_memory: bool
    warm_up: float
    seconds: float
    batch_sizes: list[int]


@dataclass
class Measured:
    """The results of a client: the latency of each request in seconds, and the right images."""

    latencies: list[float] = field(default_factory=list)
    images: int = 0
    correct: int = 0


@dataclass
class Prepared:
    """A request that is ready to be sent, and how to find the scores (n, 10) in its response."""

    body: bytes
    headers: dict[str, str]
    labels: np.ndarray
    scores: Callable[[http.client.HTTPResponse, bytes], np.ndarray]


def main() -> None:
    """Run the clients side by side and report."""
    orders = Orders(**json.load(sys.stdin))
    data = np.load(orders.data)
    images, labels = data["images"], data["labels"]
    together = threading.Barrier(orders.clients, timeout=_TOGETHER_WITHIN_S)
    with ThreadPoolExecutor(orders.clients) as pool:
        clients = [
            pool.submit(run_client, orders, images, labels, index, together)
            for index in range(orders.clients)
        ]
        measured = [vars(client.result()) for client in clients]
    json.dump(measured, sys.stdout)


def run_client(
    orders: Orders,
    images: np.ndarray,
    labels: np.ndarray,
    index: int,
    together: threading.Barrier,
) -> Measured:
    """Send one request after the other; each is built once, and sent often."""
    measured = Measured()
    prepare = in_shared_memory if orders.shared_memory else in_the_body
    name = f"demo-{os.getpid()}-{index}"
    with (
        prepare(
            orders.port, name, images, labels, batches(len(images), orders.batch_sizes)
        ) as requests,
        contextlib.closing(http.client.HTTPConnection("127.0.0.1", orders.port)) as connection,
    ):
        together.wait()
        start = time.perf_counter() + orders.warm_up
        number = index * len(requests) // orders.clients  # not all clients begin with the same
        while (began := time.perf_counter()) < start + orders.seconds:
            request = requests[number % len(requests)]
            number += 1
            connection.request(
                "POST", f"/v2/models/{orders.model}/infer", request.body, request.headers
            )
            response = connection.getresponse()
            body = response.read()
            latency = time.perf_counter() - began
            if response.status != 200:
                raise RuntimeError(f"{response.status}: {body.decode(errors='replace')}")
            right = int((request.scores(response, body).argmax(1) == request.labels).sum())
            if began >= start:
                measured.latencies.append(latency)
                measured.images += len(request.labels)
                measured.correct += right
    return measured


def batches(images: int, sizes: Sequence[int]) -> list[slice]:
    """All images, in slices of these sizes in turn."""
    found: list[slice] = []
    first = 0
    while first < images:
        last = min(images, first + sizes[len(found) % len(sizes)])
        found.append(slice(first, last))
        first = last
    return found


@contextlib.contextmanager
def in_shared_memory(
    port: int, name: str, images: np.ndarray, labels: np.ndarray, rows: Sequence[slice]
) -> Iterator[list[Prepared]]:
    """A region with all images and room for all scores: a request says where its own are."""
    image_bytes = images[0].nbytes
    size = len(images) * (image_bytes + _SCORE_BYTES)
    client = triton.InferenceServerClient(f"127.0.0.1:{port}")
    region = shm.create_shared_memory_region(name, "/" + name, size)
    try:
        shm.set_shared_memory_region(region, [images])
        client.register_system_shared_memory(name, "/" + name, size)
        yield [_in_region(region, name, images, labels, part) for part in rows]
        client.unregister_system_shared_memory(name)
    finally:
        shm.destroy_shared_memory_region(region)
        client.close()


def _in_region(
    region: shm.SharedMemoryRegion, name: str, images: np.ndarray, labels: np.ndarray, rows: slice
) -> Prepared:
    image_bytes = images[0].nbytes
    part = images[rows]
    given = triton.InferInput("INPUT__0", list(part.shape), "FP32")
    given.set_shared_memory(name, part.nbytes, offset=rows.start * image_bytes)
    offset = len(images) * image_bytes + rows.start * _SCORE_BYTES
    wanted = triton.InferRequestedOutput("OUTPUT__0")
    wanted.set_shared_memory(name, len(part) * _SCORE_BYTES, offset=offset)
    body, _ = triton.InferenceServerClient.generate_request_body([given], outputs=[wanted])

    def scores(response: http.client.HTTPResponse, body: bytes) -> np.ndarray:
        # A view, made anew each time: one that is kept would keep the region from being closed.
        found: np.ndarray = shm.get_contents_as_numpy(region, np.float32, [len(part), 10], offset)
        return found

    return Prepared(body, {}, labels[rows], scores)


@contextlib.contextmanager
def in_the_body(
    port: int, name: str, images: np.ndarray, labels: np.ndarray, rows: Sequence[slice]
) -> Iterator[list[Prepared]]:
    """The images travel in the request and the scores in the response, both as binary tensors."""
    yield [_in_body(images[part], labels[part]) for part in rows]


def _in_body(images: np.ndarray, labels: np.ndarray) -> Prepared:
    given = triton.InferInput("INPUT__0", list(images.shape), "FP32")
    given.set_data_from_numpy(images)
    wanted = triton.InferRequestedOutput("OUTPUT__0", binary_data=True)
    body, size = triton.InferenceServerClient.generate_request_body([given], outputs=[wanted])

    def scores(response: http.client.HTTPResponse, body: bytes) -> np.ndarray:
        header = int(response.headers["Inference-Header-Content-Length"])
        return np.frombuffer(body, np.float32, offset=header).reshape(-1, 10)

    return Prepared(body, {"Inference-Header-Content-Length": str(size)}, labels, scores)


if __name__ == "__main__":
    main()
