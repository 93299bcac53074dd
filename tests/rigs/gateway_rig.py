"""A real gateway process between a supervisor and schedulers that are played by the test."""

import contextlib
import json
import os
import select
import socket
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from shmserve.errors import NotFound
from shmserve.gateway.settings import GatewaySettings, GatewayStart, GrpcSettings
from shmserve.ipc import endpoints
from shmserve.ipc.messages import inference as m
from shmserve.ipc.messages.control_requests import Answered, Refused
from shmserve.ipc.messages.publications import Acknowledged, HealthChanged, ModelPublished
from shmserve.ipc.messages.supervision import encode_start
from shmserve.ipc.model_spec import ModelSpec
from shmserve.ipc.tensors.arrays import NUMPY_DTYPES
from shmserve.ipc.tensors.descriptors import TensorRef
from shmserve.ipc.tensors.schemas import Inference, Inferred, pack_inferred
from shmserve.ipc.transport.router import Router
from shmserve.supervisor.models.model_version import describe
from tests.rigs.forker import GATEWAY, GRPC, Forked, forker
from tests.support.messages import inference_of
from tests.support.waiting import until
from tests.support.wire.raw_http import Http

Compute = Callable[[Inference], Inferred]


class Puppet(threading.Thread):
    """A bound socket in a thread, which calls `on_message(peer, message)` for each message."""

    def __init__(self, endpoint: str, on_message: Callable[[bytes, Any], None]) -> None:
        super().__init__(daemon=True)
        self.endpoint = endpoint
        self.router = Router(endpoint)
        self._on_message = on_message
        self._wake = os.eventfd(0, os.EFD_NONBLOCK)
        self._calls: list[Callable[[], None]] = []
        self._ended = False
        self.start()

    def run(self) -> None:
        """Handle messages and calls until `close`."""
        poll = select.epoll()
        poll.register(self.router.fd, select.EPOLLIN)
        poll.register(self._wake, select.EPOLLIN)
        while not self._ended:
            for fd, _ in poll.poll():
                if fd == self._wake:
                    os.eventfd_read(self._wake)
            while self._calls:
                self._calls.pop(0)()
            for peer, message in self.router.receive():
                self._on_message(peer, message)
            self.router.flush()
        poll.close()
        self.router.close()

    def call(self, action: Callable[[], None]) -> None:
        has_run = threading.Event()

        def act_and_flush() -> None:
            action()
            self.router.flush()
            has_run.set()

        self._calls.append(act_and_flush)
        os.eventfd_write(self._wake, 1)
        assert has_run.wait(10)

    def close(self) -> None:
        if self.is_alive():
            self._calls.append(lambda: setattr(self, "_ended", True))
            os.eventfd_write(self._wake, 1)
            self.join(10)
            os.close(self._wake)


class Scheduler:
    """A scheduler that answers with `compute` at once, or later if `holds_responses` is set."""

    def __init__(self, run_dir: Path, number: int, compute: Compute) -> None:
        self.endpoint = endpoints.scheduler(run_dir, number)
        self.compute = compute
        self.holds_responses = False
        self.statistics: dict[str, Any] | None = None
        self.submits: list[m.Submit] = []
        self.notifications: list[Any] = []  # Cancel, Release
        self.peers: set[bytes] = set()
        self.unanswered_submits: list[tuple[bytes, m.Submit]] = []
        self.socket_thread = Puppet(self.endpoint, self._take)

    def _take(self, peer: bytes, message: Any) -> None:
        self.peers.add(peer)
        match message:
            case m.Submit():
                self.submits.append(message)
                if self.holds_responses:
                    self.unanswered_submits.append((peer, message))
                else:
                    self._answer(peer, message)
            case m.ReportStatistics(number):
                if self.statistics is not None:
                    self.socket_thread.router.post(
                        peer, m.StatisticsReported(number, self.statistics)
                    )
            case _:
                self.notifications.append(message)

    def _answer(self, peer: bytes, submit: m.Submit) -> None:
        body = pack_inferred(self.compute(inference_of(submit)))
        self.socket_thread.router.post(peer, m.Finished(submit.id, *body))

    def answer_all(self) -> None:
        def answer_waiting() -> None:
            for peer, submit in self.unanswered_submits:
                self._answer(peer, submit)
            self.unanswered_submits.clear()

        self.socket_thread.call(answer_waiting)

    def send(self, peer: bytes, *messages: Any) -> None:
        def post_all() -> None:
            for message in messages:
                self.socket_thread.router.post(peer, message)

        self.socket_thread.call(post_all)

    def close(self) -> None:
        self.socket_thread.close()


class Rig:
    """A gateway with its supervisor (`send`, `received`) and schedulers; `grpc` is on `port`."""

    def __init__(
        self,
        run_dir: Path,
        listener: socket.socket | None = None,
        *,
        grpc: bool = False,
        **settings: Any,
    ) -> None:
        self.run_dir = run_dir
        self.received: list[Any] = []
        self.refusals: dict[type, tuple[str, str]] = {}
        self.payloads: dict[type, dict[str, Any]] = {}
        self.schedulers: list[Scheduler] = []
        self._peer = b""
        self._supervisor_thread = Puppet(endpoints.control(run_dir), self._take)
        self._http = listener or socket.create_server(("127.0.0.1", 0))
        self._scrapes = socket.create_server(("127.0.0.1", 0))
        self.port = 0 if self._http.family == socket.AF_UNIX else self._http.getsockname()[1]
        self.http = Http(self.port)
        self.metrics_port = self._scrapes.getsockname()[1]
        fds = [self._http.fileno()] if grpc else [self._http.fileno(), self._scrapes.fileno()]
        start = GatewayStart(
            gateway_name="grpc" if grpc else "0",
            run_dir=run_dir,
            settings=GatewaySettings(**{"arena_byte_size": 256 * 1024 * 1024, **settings}),
            http_sockets=0 if grpc else 1,
            grpc=GrpcSettings() if grpc else None,
        )
        log_fd, stderr = os.pipe()
        self.process: Forked = forker(GRPC if grpc else GATEWAY).fork(
            encode_start(start), stderr, fds
        )
        os.close(stderr)
        self._log_pipe = open(log_fd, "rb")  # noqa: SIM115 - the reader closes it
        self._log = b""
        self._reader = threading.Thread(target=self._read_log, daemon=True)
        self._reader.start()
        until("the gateway says that it is there", lambda: self._peer)

    def _read_log(self) -> None:
        with self._log_pipe as lines:
            for line in lines:
                self._log += line

    @property
    def log(self) -> str:
        return self._log.decode()

    def _take(self, peer: bytes, message: Any) -> None:
        self._peer = peer
        self.received.append(message)
        n = getattr(message, "id", None)
        if n is None:
            return
        refusal = self.refusals.get(type(message))
        if refusal is not None:
            self._supervisor_thread.router.post(peer, Refused(n, *refusal))
        elif type(message) in self.payloads:
            self._supervisor_thread.router.post(peer, Answered(n, self.payloads[type(message)]))

    def send(self, *messages: Any) -> None:
        def post_all() -> None:
            for message in messages:
                self._supervisor_thread.router.post(self._peer, message)

        self._supervisor_thread.call(post_all)

    def apply(self, make: Callable[[int], Any]) -> None:
        """Send a message of the supervisor, and wait for its acknowledgement."""
        number = 1000 + len(self.received)
        self.send(make(number))
        until("it is acknowledged", lambda: Acknowledged(number) in self.received)

    def received_of(self, kind: type) -> list[Any]:
        return [message for message in self.received if type(message) is kind]

    def open(self, *, ready: bool = True) -> None:
        """Send that all models are known; the gateway then accepts connections."""
        self.send(HealthChanged(live=True, ready=ready, exiting=False))

    def scheduler(self, compute: Compute) -> Scheduler:
        scheduler = Scheduler(self.run_dir, len(self.schedulers) + 1, compute)
        self.schedulers.append(scheduler)
        return scheduler

    def serve(self, config: dict[str, Any], compute: Compute) -> Scheduler:
        """Publish a model with a scheduler of its own."""
        scheduler = self.scheduler(compute)
        self.publish(config, scheduler)
        return scheduler

    def publish(
        self,
        config: dict[str, Any],
        scheduler: Scheduler,
        version: str = "1",
        *,
        ready: bool = True,
        latest: bool = True,
    ) -> None:
        self.apply(lambda number: publication(config, scheduler, version, ready, latest, number))

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        self._reader.join()
        self.http.close()
        for scheduler in self.schedulers:
            scheduler.close()
        self._supervisor_thread.close()
        self._http.close()
        self._scrapes.close()


def rig(
    run_dir: Path, listener: socket.socket | None = None, *, grpc: bool = False, **settings: Any
) -> contextlib.closing[Rig]:
    return contextlib.closing(Rig(run_dir, listener, grpc=grpc, **settings))


def tensor_config(name: str, datatype: str, dims: list[int]) -> dict[str, Any]:
    type_name = "TYPE_STRING" if datatype == "BYTES" else f"TYPE_{datatype}"
    return {"name": name, "data_type": type_name, "dims": dims, "optional": False}


def model_config(
    name: str, batch: int, inputs: list[dict[str, Any]], outputs: list[dict[str, Any]]
) -> dict[str, Any]:
    return {
        "name": name, "platform": "", "backend": "python", "max_batch_size": batch, "input": inputs,
        "output": outputs,
    }  # fmt: skip


SIMPLE_CONFIG = model_config(
    "simple",
    8,
    [tensor_config(name, "INT32", [16]) for name in ("INPUT0", "INPUT1")],
    [tensor_config(name, "INT32", [16]) for name in ("OUTPUT0", "OUTPUT1")],
)


def publication(
    config: dict[str, Any],
    scheduler: Scheduler,
    version: str = "1",
    ready: bool = True,
    latest: bool = True,
    ack_number: int = 0,
) -> ModelPublished:
    spec = ModelSpec.of(config)
    return ModelPublished(
        name=config["name"],
        version=version,
        config=spec,
        metadata=describe(spec),
        endpoint=scheduler.endpoint,
        ready=ready,
        latest=latest,
        load_seconds=0.25,
        ack_number=ack_number,
    )


def identity_config(name: str, datatype: str, dims: list[int], batch: int = 0) -> dict[str, Any]:
    """Return the configuration of a model that returns its input IN as OUT."""
    inputs = [tensor_config("IN", datatype, dims)]
    return model_config(name, batch, inputs, [tensor_config("OUT", datatype, dims)])


def _inline(tensor: TensorRef) -> bytes:
    assert isinstance(tensor.data, bytes)
    return tensor.data


def add_sub(request: Inference) -> Inferred:
    """Return the requested ones of the sum and the difference of INPUT0 and INPUT1."""
    by_name = {tensor.name: tensor for tensor in request.inputs}
    shape = by_name["INPUT0"].shape
    a, b = (np.frombuffer(_inline(by_name[n]), np.int32) for n in ("INPUT0", "INPUT1"))
    requested = {output.name for output in request.outputs} or {"OUTPUT0", "OUTPUT1"}
    results = (("OUTPUT0", a + b), ("OUTPUT1", a - b))
    return Inferred(
        tuple(TensorRef(n, "INT32", shape, r.tobytes()) for n, r in results if n in requested)
    )


def echo(request: Inference) -> Inferred:
    """Return IN as OUT, converted by numpy as in a model, which makes a BOOL 0 or 1."""
    outputs = []
    for tensor in request.inputs:
        data = _inline(tensor)
        if tensor.datatype == "BOOL":
            data = np.frombuffer(data, NUMPY_DTYPES["BOOL"]).astype(np.uint8).clip(0, 1).tobytes()
        outputs.append(
            TensorRef(tensor.name.replace("IN", "OUT"), tensor.datatype, tensor.shape, data)
        )
    return Inferred(tuple(outputs))


def simple_body(**members: Any) -> bytes:
    """Return an inference of `SIMPLE_CONFIG` in JSON, with further members of the request."""
    inputs = [
        {"name": n, "datatype": "INT32", "shape": [1, 16], "data": [1] * 16}
        for n in ("INPUT0", "INPUT1")
    ]
    return json.dumps({"inputs": inputs, **members}).encode()


def error(number: int, text: str, *, final: bool = False) -> m.Responded:
    return m.Responded(number, NotFound.code, text, b"", [], final)


def end(number: int) -> m.Responded:
    """Return the empty final response of a decoupled model."""
    return m.Responded(number, "", "", b"", [], True)


def accepts_connections(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0
