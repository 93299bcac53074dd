"""A program that speaks the native protocol by hand and sends the messages that a test chooses."""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
from collections.abc import Iterator
from typing import Any

from shmserve.ipc import endpoints
from shmserve.ipc.messages import control_requests as m
from shmserve.ipc.messages.inference import Submit
from shmserve.ipc.messages.publications import HealthChanged, ModelPublished
from shmserve.ipc.tensors.descriptors import TensorRef
from shmserve.ipc.tensors.schemas import Inference, RequestedOutput, pack_inference
from shmserve.ipc.transport import frames
from shmserve.ipc.transport.zmtp import Dealer
from tests.support.servers import Server


class Guest:
    """A native client that sends the messages that a test chooses."""

    def __init__(self, server: Server) -> None:
        self.listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        # A socket with a timeout would fail at once if the queue of connections is full.
        self.listener.connect(str(endpoints.listener(server.run_dir)))
        self.listener.settimeout(10)
        self.models: dict[str, str] = {}
        self.number, self.token = 0, ""
        self.links: list[Dealer] = []

    def hello(self) -> Guest:
        self.send(m.Hello(frames.VERSION))
        while True:
            match self.next():
                case m.Welcome(number, token):
                    self.number, self.token = number, token
                case ModelPublished(name=name, endpoint=endpoint):
                    self.models[name] = endpoint
                case HealthChanged():
                    return self

    def send(self, message: Any, *fds: int) -> None:
        socket.send_fds(self.listener, [frames.pack([message])], fds)

    def next(self) -> Any:
        (message,) = frames.unpack(self.listener.recv(1 << 20))
        return message

    def request(self, message: Any, *fds: int) -> Any:
        self.send(message, *fds)
        return self.next()

    def link(self, model: str, identity: str = "") -> Dealer:
        dealer = Dealer(self.models[model], identity or f"{self.number}.{self.token}.1")
        self.links.append(dealer)
        return dealer

    def close(self) -> None:
        self.listener.close()
        for link in self.links:
            link.close()


@contextlib.contextmanager
def memfd(
    size: int = 4096, reserve: bool = True, seals: int = fcntl.F_SEAL_SHRINK
) -> Iterator[int]:
    fd = os.memfd_create("test", os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, size)
        if reserve:
            os.posix_fallocate(fd, 0, size)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
        yield fd
    finally:
        os.close(fd)


def submit(
    inputs: tuple[TensorRef, ...], number: int = 1, outputs: tuple[RequestedOutput, ...] = ()
) -> Submit:
    return Submit(number, *pack_inference(Inference(inputs, outputs)), 0, 0, 0, 0)


def answer(link: Dealer) -> Any:
    while link.wait(10):
        for message in link.receive():
            return message
    raise AssertionError("no answer")


def small_tensor() -> TensorRef:
    return TensorRef("INPUT0", "FP32", (4,), bytes(16))
