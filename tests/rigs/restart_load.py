"""A program with clients of every protocol that send requests while servers are restarted. The
program runs until its input ends, and prints the responses of each protocol's clients as JSON.

    python -m tests.rigs.restart_load CLIENTS HTTP_PORT GRPC_PORT LOCAL [registering] [killed]

With `registering`, one client registers regions all the time. With `killed`, the servers are killed
and their requests are lost: clients of HTTP and gRPC repeat a request until it succeeds.
"""

import contextlib
import http.client
import json
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from typing import TypeVar

import grpc
import numpy as np
from tritonclient.grpc import service_pb2_grpc

import shmserve.client
from tests.support.load import InferInMemory, infer_simple
from tests.support.wire.grpc_calls import is_right, simple_request
from tests.support.wire.raw_http import Http

_PATIENCE_S = 120.0
_DISCONNECT_ERRORS = (http.client.RemoteDisconnected, ConnectionResetError, BrokenPipeError)

# Repeats a request; returns an error, or "" for a correct answer.
SendRequest = Callable[[int], str]
T = TypeVar("T")


# The service configuration of a gRPC client that may lose an answer with its server, and repeats
# the call.
_RETRIED_ERRORS = {
    "methodConfig": [
        {
            "name": [{}],
            "retryPolicy": {
                "maxAttempts": 5,
                "initialBackoff": "0.1s",
                "maxBackoff": "2s",
                "backoffMultiplier": 3,
                "retryableStatusCodes": ["UNAVAILABLE"],
            },
        }
    ]
}


def retry(send: Callable[[], T]) -> T:
    """Return the result of a call; repeat it if a killed server closed the connection."""
    for _ in range(2):
        with contextlib.suppress(*_DISCONNECT_ERRORS):
            return send()
    return send()


def send_over_http(port: int, shared: bool) -> Iterator[SendRequest]:
    """Send requests on one connection, and repeat one if the used connection was closed."""
    connection = Http(port, _PATIENCE_S)
    infer_through = InferInMemory(connection) if shared else infer_simple

    def send_request(number: int) -> str:
        return retry(lambda: infer_through(connection, number))

    try:
        yield send_request
    finally:
        if isinstance(infer_through, InferInMemory):
            infer_through.close(connection)


def registering(port: int) -> Iterator[SendRequest]:
    """Register, use and unregister a region on several connections in turn."""
    connections = [Http(port, _PATIENCE_S) for _ in range(2)]

    def send_request(number: int) -> str:
        first_client, second_client = connections[number % 2], connections[1 - number % 2]
        infer_through = retry(lambda: InferInMemory(first_client, 64))
        error = retry(lambda: infer_through(second_client, number)) or retry(
            lambda: infer_through(first_client, number)
        )
        retry(lambda: second_client.unregister(infer_through.shared.name))
        infer_through.shared.unlink()
        return error

    yield send_request


def send_over_grpc(port: int, is_killed: bool) -> Iterator[SendRequest]:
    options: list[tuple[str, int | str]] = [("grpc.use_local_subchannel_pool", 1)]
    if is_killed:
        options.append(("grpc.service_config", json.dumps(_RETRIED_ERRORS)))
    with grpc.insecure_channel(f"127.0.0.1:{port}", options) as channel:
        call = service_pb2_grpc.GRPCInferenceServiceStub(channel).ModelInfer

        def send_request(number: int) -> str:
            return (
                "" if is_right(call(simple_request(str(number)), timeout=_PATIENCE_S)) else "wrong"
            )

        yield send_request


def native(path: str) -> Iterator[SendRequest]:
    with shmserve.client.connect(path, timeout=_PATIENCE_S) as server:
        names = ("INPUT0", "INPUT1", "OUTPUT0")
        region = server.allocate(dict.fromkeys(names, ((1, 16), "INT32")))

        def send_request(number: int) -> str:
            region["INPUT0"][:], region["INPUT1"][:] = number, 1
            server.infer("simple", region)
            return "" if (np.asarray(region["OUTPUT0"]) == number + 1).all() else "wrong"

        yield send_request


def main(clients: int, http_port: int, grpc_port: int, local: str, often: bool, kill: bool) -> None:
    """Send requests until the input ends."""
    stop = threading.Event()
    counts: dict[str, Counter[str]] = {}

    def run(protocol: str, senders: Iterator[SendRequest]) -> None:
        with contextlib.closing(senders):  # type: ignore[type-var]
            try:
                send_request, number = next(senders), 0
            except Exception as error:
                counts[protocol][f"not begun: {error}"] += 1
                return
            while not stop.is_set():
                number += 1
                try:
                    outcome = send_request(number) or "right"
                except Exception as error:
                    outcome = f"{type(error).__name__}: {error}"
                counts[protocol][outcome[:300]] += 1
                stop.wait(0.02)

    senders_by_protocol = {
        "http": lambda number: (
            registering(http_port)
            if often and number == 0
            else send_over_http(http_port, number % 2 == 1)
        ),
        "grpc": lambda _: send_over_grpc(grpc_port, kill),
        "native": lambda _: native(local),
    }
    counts.update((protocol, Counter()) for protocol in senders_by_protocol)
    threads = [
        threading.Thread(target=run, args=(protocol, make(number)))
        for protocol, make in senders_by_protocol.items()
        for number in range(clients)
    ]
    for thread in threads:
        thread.start()
    while sys.stdin.readline():  # each asks how far they are
        print(json.dumps(counts), flush=True)
    stop.set()
    for thread in threads:
        thread.join()
    print(json.dumps(counts), flush=True)


if __name__ == "__main__":
    main(
        int(sys.argv[1]),
        int(sys.argv[2]),
        int(sys.argv[3]),
        sys.argv[4],
        "registering" in sys.argv[5:],
        "killed" in sys.argv[5:],
    )
