"""The load of the demo: clients in threads, each with a connection of its own.

As a program, it receives an `Order` as JSON in its argument, and prints the measurements of its
clients as JSON.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field

import numpy as np
import tritonclient.http as triton
import tritonclient.utils.shared_memory as shm

import shmserve.client

# The default interval of 5 ms would delay a thread whose response has arrived.
sys.setswitchinterval(0.0005)
_START_WITHIN_S = 30.0
_SIZE = "Inference-Header-Content-Length"
_DATATYPES = {"float32": "FP32", "uint8": "UINT8"}
Send = Callable[[int], np.ndarray]


@dataclass
class Order:
    """A load: each client sends the arrays of the file `data` to `model`, one per request.

    Only requests that begin after `warm_up` seconds are measured, for `seconds` seconds.
    """

    port: int
    run_dir: str
    model: str
    data: str
    transport: str
    clients: int
    warm_up: float
    seconds: float


@dataclass
class Measured:
    """The latencies of one client's requests in seconds, and the number of correct responses."""

    latencies: list[float] = field(default_factory=list)
    correct: int = 0


def run(order: Order) -> list[Measured]:
    """Run all clients of a load in this process."""
    with np.load(order.data) as data:
        images, expected = data["images"], data["expected"]
    barrier = threading.Barrier(order.clients, timeout=_START_WITHIN_S)
    with ThreadPoolExecutor(order.clients) as pool:
        clients = [
            pool.submit(_run_client, order, images, expected, client, barrier)
            for client in range(order.clients)
        ]
        return [client.result() for client in clients]


def _run_client(
    order: Order, images: np.ndarray, expected: np.ndarray, client: int, barrier: threading.Barrier
) -> Measured:
    measured = Measured()
    # The output is either the scores of labels, or an image.
    has_labels = expected.ndim == 1
    output = np.empty((1, 10), np.float32) if has_labels else images[0]
    name = f"demo-{os.getpid()}-{client}"
    with _TRANSPORTS[order.transport](order, name, images, output) as send:
        barrier.wait()
        start_s = time.perf_counter() + order.warm_up
        index = client * len(images) // order.clients  # the clients begin with different images
        while (sent_s := time.perf_counter()) < start_s + order.seconds:
            index = (index + 1) % len(images)
            response = send(index)
            latency_s = time.perf_counter() - sent_s
            if sent_s >= start_s:
                result = response.argmax() if has_labels else response[0]
                measured.latencies.append(latency_s)
                measured.correct += bool(np.array_equal(result, expected[index]))
            del response  # a view of shared memory would prevent the region from being closed
    return measured


def _tensor(image: np.ndarray) -> triton.InferInput:
    return triton.InferInput("image", list(image.shape), _DATATYPES[image.dtype.name])


@contextlib.contextmanager
def _in_bodies(order: Order, name: str, images: np.ndarray, output: np.ndarray) -> Iterator[Send]:
    """Send each image in the body of an HTTP request, and receive the output in the response."""
    outputs = [triton.InferRequestedOutput("output", binary_data=True)]
    requests = []
    for image in images:
        tensor = _tensor(image)
        tensor.set_data_from_numpy(image)
        requests.append(
            triton.InferenceServerClient.generate_request_body([tensor], outputs=outputs)
        )
    with contextlib.closing(http.client.HTTPConnection("127.0.0.1", order.port)) as connection:

        def send(index: int) -> np.ndarray:
            body, size = requests[index]
            offset, content = _post(connection, order.model, body, {_SIZE: str(size)})
            return np.frombuffer(content, output.dtype, offset=offset).reshape(output.shape)

        yield send


@contextlib.contextmanager
def _in_region(order: Order, name: str, images: np.ndarray, output: np.ndarray) -> Iterator[Send]:
    """Send names and offsets over HTTP. The images and the output are in a registered region."""
    client = triton.InferenceServerClient(f"127.0.0.1:{order.port}")
    size = images.nbytes + output.nbytes
    region = shm.create_shared_memory_region(name, f"/{name}", size)
    requested_output = triton.InferRequestedOutput("output")
    requested_output.set_shared_memory(name, output.nbytes, offset=images.nbytes)
    bodies = []
    for index, image in enumerate(images):
        tensor = _tensor(image)
        tensor.set_shared_memory(name, image.nbytes, offset=index * image.nbytes)
        bodies.append(client.generate_request_body([tensor], outputs=[requested_output])[0])
    try:
        shm.set_shared_memory_region(region, [images])
        client.register_system_shared_memory(name, f"/{name}", size)
        with contextlib.closing(http.client.HTTPConnection("127.0.0.1", order.port)) as connection:

            def send(index: int) -> np.ndarray:
                _post(connection, order.model, bodies[index], {})
                view: np.ndarray = shm.get_contents_as_numpy(
                    region, output.dtype, output.shape, images.nbytes
                )
                return view

            yield send
        client.unregister_system_shared_memory(name)
    finally:
        shm.destroy_shared_memory_region(region)
        client.close()


@contextlib.contextmanager
def _by_native_client(
    order: Order, name: str, images: np.ndarray, output: np.ndarray
) -> Iterator[Send]:
    """Send arrays by `shmserve.client`, which copies them into shared memory and back."""
    with shmserve.client.connect(order.run_dir) as server:
        yield lambda index: server.infer(order.model, image=images[index])["output"]


@contextlib.contextmanager
def _in_allocated(
    order: Order, name: str, images: np.ndarray, output: np.ndarray
) -> Iterator[Send]:
    """Send images from memory that `shmserve.client` has allocated, which receives the outputs."""
    with shmserve.client.connect(order.run_dir) as server:
        tensors = {
            tensor: (array.shape, _DATATYPES[array.dtype.name])
            for tensor, array in (("image", images[0]), ("output", output))
        }
        regions = [server.allocate(tensors) for _ in images]
        for region, image in zip(regions, images, strict=True):
            region["image"][:] = image
        yield lambda index: server.infer(order.model, regions[index])["output"]


_TRANSPORTS = {
    "HTTP bodies": _in_bodies,
    "HTTP, shared memory": _in_region,
    "shmserve.client": _by_native_client,
    "the same, in place": _in_allocated,
}


def _post(
    connection: http.client.HTTPConnection, model: str, body: bytes, headers: dict[str, str]
) -> tuple[int, bytes]:
    """Return the offset of the binary tensors in a response, and the response's body."""
    connection.request("POST", f"/v2/models/{model}/infer", body, headers)
    response = connection.getresponse()
    content = response.read()
    if response.status != 200:
        raise RuntimeError(f"status {response.status}: {content.decode(errors='replace')}")
    return int(response.headers.get(_SIZE, 0)), content


if __name__ == "__main__":
    json.dump([asdict(measured) for measured in run(Order(**json.loads(sys.argv[1])))], sys.stdout)
