"""One inference with plain pyzmq and msgpack, by the protocol in shmserve/client/PROTOCOL.md.

    python examples/zmq_client.py [RUN_DIR]

The model `simple` of bench/models returns the sum and the difference of two arrays of sixteen
numbers. RUN_DIR is the server's `--run-dir`; by default $SHMSERVE_RUN_DIR, or the run directory of
this user's server. The client uses no package of the server.
"""

from __future__ import annotations

import os
import socket
import sys
import time
from typing import Any

import msgpack
import zmq

VERSION = 3  # version of the protocol
MODEL = "simple"
COUNT = 16


def main() -> None:
    """Send one request to the server of a run directory, and print the outputs."""
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    default = f"{runtime}/shmserve" if runtime else f"/tmp/shmserve-{os.getuid()}"
    run_dir = sys.argv[1] if len(sys.argv) > 1 else os.environ.get("SHMSERVE_RUN_DIR", default)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        try:
            listener.connect(f"{run_dir}/guests/door")
        except OSError as error:
            sys.exit(f"there is no server at {run_dir}: {error.strerror}")
        listener.send(packed("Hello", VERSION))
        number, token, endpoint = introduced(listener)
        with zmq.Context() as context, context.socket(zmq.DEALER) as scheduler:
            scheduler.set(zmq.LINGER, 0)
            scheduler.set(zmq.IDENTITY, f"{number}.{token}.only".encode())
            scheduler.connect(endpoint)
            outputs = infer(scheduler, INPUT0=list(range(COUNT)), INPUT1=[1] * COUNT)
    for name, values in outputs.items():
        print(name, *values)


def packed(*message: Any) -> bytes:
    """Return an encoded message: the version, the message's name and its fields."""
    frame: bytes = msgpack.packb([VERSION, message])
    return frame


def introduced(listener: socket.socket) -> tuple[int, str, str]:
    """Return this client's number and token, and the endpoint of the model's scheduler."""
    number, token, endpoint = 0, "", ""
    while True:
        packet = listener.recv(4 << 20)
        if not packet:
            sys.exit("the server has closed the connection")
        _, *messages = msgpack.unpackb(packet)
        for name, *fields in messages:
            if name == "Welcome":
                number, token = fields
            elif name == "Refused":  # client and server have different protocol versions
                sys.exit(f"{fields[1]}: {fields[2]}")
            # The latest version of the model.
            elif name == "ModelPublished" and fields[0] == MODEL and fields[6]:
                endpoint = fields[4]
            elif name == "HealthChanged":  # the snapshot of all models is complete
                if not endpoint:
                    sys.exit(f"the server has no model {MODEL}")
                return number, token, endpoint


def infer(scheduler: zmq.Socket[bytes], **inputs: list[int]) -> dict[str, list[int]]:
    """Send one request whose tensors are inside the messages, and return the response."""
    described_inputs = [[name, "INT32", [1, len(values)]] for name, values in inputs.items()]
    schema = msgpack.packb([described_inputs, [], {}])  # request all outputs, without parameters
    data = [
        b"".join(value.to_bytes(4, "little", signed=True) for value in values)
        for values in inputs.values()
    ]
    # Fields: number, schema, data, arrival, deadline, timeout, priority.
    scheduler.send(packed("Submit", 1, schema, data, time.monotonic_ns(), 0, 0, 0))
    while True:
        _, *messages = msgpack.unpackb(scheduler.recv())
        for name, _, *fields in messages:
            if name == "Failed":
                sys.exit(f"{fields[0]}: {fields[1]}")
            if name == "Finished":
                outputs_described, _ = msgpack.unpackb(fields[0])
                outputs = zip(outputs_described, fields[1], strict=True)
                return {name: numbers(raw) for (name, _, _), raw in outputs}


def numbers(data: bytes) -> list[int]:
    """Return the elements of an INT32 tensor."""
    return memoryview(data).cast("i").tolist()


if __name__ == "__main__":
    main()
