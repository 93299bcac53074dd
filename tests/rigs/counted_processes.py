"""The gateway, the scheduler and the worker of a model, each in turn in this process, with the real
objects and sockets: how many calls of functions a request costs in each.

Eight requests come at a time: small ones, as a batch of the model's, or large ones in memory.
"""

import asyncio
import cProfile
import gc
import itertools
import json
import os
import shutil
import socket
import time
from collections.abc import Callable, Generator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import CodeType, coroutine
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import uvloop

from bench.system.servers import BENCH
from shmserve.common.auth_tokens import Authorisation
from shmserve.gateway.context import Gateway, ModelTable
from shmserve.gateway.grpc.call import GrpcContext
from shmserve.gateway.grpc.connection import GrpcConnection
from shmserve.gateway.grpc.infer import Inferences
from shmserve.gateway.grpc.service import Service
from shmserve.gateway.http.connection import HttpConnection
from shmserve.gateway.http.routes import ROUTES
from shmserve.gateway.http.routing import App
from shmserve.gateway.inference.body_arrival import BodyBudget, MallocTrim
from shmserve.gateway.links import GatewaySchedulers
from shmserve.gateway.listener import Acceptor, ListenerKind, ListenerRules
from shmserve.gateway.region_table import RegionTable
from shmserve.gateway.settings import GatewaySettings, GrpcSettings
from shmserve.ipc import endpoints
from shmserve.ipc.endpoints import KEY_SIZE
from shmserve.ipc.memory.arena import Arena
from shmserve.ipc.memory.mappings import Mappings
from shmserve.ipc.messages import inference as m
from shmserve.ipc.messages import supervision
from shmserve.ipc.messages.publications import HealthChanged, RegionPublished
from shmserve.ipc.messages.supervision import HostStart, SchedulerStart, encode_start
from shmserve.ipc.model_spec import ModelSpec
from shmserve.ipc.tensors.descriptors import TensorRef, pack_range
from shmserve.ipc.tensors.schemas import (
    Inference,
    Inferred,
    Packed,
    RequestedOutput,
    pack_inference,
    pack_inferred,
    unpack_inference,
)
from shmserve.ipc.transport.router import Router
from shmserve.ipc.transport.zmtp import Dealer
from shmserve.proto import grpc_service_pb2 as pb
from shmserve.scheduler.hosting.host import Host
from shmserve.scheduler.requests.scheduled import NEVER
from shmserve.workers.backends.python import PythonBackend
from tests.rigs import gateway_rig, worker_rig
from tests.rigs.arrivals import receive_arrived
from tests.rigs.grpc_scene import Transport
from tests.support.wire import http2
from tests.support.wire.http2 import CLIENT_OPENING

BATCH = 8
_WARM_UPS = 4
_NOT_COUNTED = (str(Path(__file__).parent), str(Path(uvloop.__file__).parent))
_REGION = "counted"
_REGION_BYTES = 600_000
REGION_SIZE = 2 * BATCH * _REGION_BYTES


class Calls:
    """Counts the calls of functions, in Python and in C, within its with blocks."""

    def __init__(self) -> None:
        self._profile = cProfile.Profile()

    def __enter__(self) -> None:
        gc.disable()  # objects of earlier tests would be finalized here
        self._profile.enable()

    def __exit__(self, *error: object) -> None:
        self._profile.disable()
        gc.enable()

    def by_function(self) -> dict[str, float]:
        """Return the calls per request by function; C functions count at their caller."""
        counts: dict[str, float] = {}
        for entry in self._profile.getstats():
            code: CodeType | str = entry.code
            if isinstance(code, str) or code.co_filename.startswith(_NOT_COUNTED):
                continue
            inner = [call for call in entry.calls or () if isinstance(call.code, str)]
            count = entry.callcount + sum(call.callcount for call in inner)
            name = f"{code.co_filename}:{code.co_firstlineno} {code.co_qualname}"
            counts[name] = counts.get(name, 0) + count / BATCH
        return counts


@dataclass(frozen=True)
class Case:
    """One kind of request: `works` by step, the same over `http`; `batch` are executed together."""

    config: dict[str, Any]
    batch: int
    works: Callable[[int, int], Packed]
    http: Callable[[int, int], dict[str, Any]]
    response: Callable[[Inference], Inferred]
    path: str = ""  # the HTTP path; empty: that of inference

    @property
    def model(self) -> str:
        return str(self.config["name"])

    def respond(self, work: Packed) -> Packed:
        return pack_inferred(self.response(unpack_inference(*work)))

    def post(self, step: int, request: int) -> bytes:
        body = json.dumps(self.http(step, request)).encode()
        path = self.path or f"/v2/models/{self.model}/infer"
        head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\n"
        return b"%bContent-Length: %d\r\n\r\n%b" % (head.encode(), len(body), body)

    def call(self, step: int, request: int) -> bytes:
        """Return the same request over gRPC, as the first call of its connection or a later one."""
        reply = self.http(step, request)
        built = pb.ModelInferRequest(model_name=self.model)
        for tensor in reply["inputs"]:
            tensor_fields = {key: tensor[key] for key in ("name", "datatype", "shape")}
            _place(built.inputs.add(**tensor_fields), tensor)
            if "data" in tensor:
                built.raw_input_contents.append(np.array(tensor["data"], np.int32).tobytes())
        for tensor in reply.get("outputs", ()):
            _place(built.outputs.add(name=tensor["name"]), tensor)
        preface = b"" if step else CLIENT_OPENING + http2.frame(http2.SETTINGS, http2.ACK, 0)
        head = http2.post(f"{http2.SERVICE}ModelInfer")
        body = http2.message(built.SerializeToString())
        stream = 2 * step + 1
        return (
            preface
            + http2.frame(http2.HEADERS, http2.END_HEADERS, stream, head)
            + http2.frame(http2.DATA, http2.END_STREAM, stream, body)
        )


def _place(tensor: Any, tensor_json: dict[str, Any]) -> None:
    """Add the parameters of a memory range in a region to a tensor."""
    for key, value in tensor_json.get("parameters", {}).items():
        kind = "string_param" if isinstance(value, str) else "int64_param"
        setattr(tensor.parameters[key], kind, value)


def inline() -> Case:
    """Return a case with two small tensors in the message, with other numbers in each step."""
    names = ("INPUT0", "INPUT1")

    def work(step: int, request: int) -> Packed:
        numbers = np.full((1, 16), step, np.int32)
        return pack_inference(Inference(tuple(worker_rig.tensor(name, numbers) for name in names)))

    def http(step: int, request: int) -> dict[str, Any]:
        tensor_fields = {"datatype": "INT32", "shape": [1, 16], "data": [10 + step] * 16}
        return {"inputs": [{"name": name, **tensor_fields} for name in names]}

    config = {
        **gateway_rig.SIMPLE_CONFIG,
        "dynamic_batching": {"max_queue_delay_microseconds": 100},
    }
    return Case(config, BATCH, work, http, gateway_rig.add_sub)


def region_case(region: worker_rig.Region) -> Case:
    """Return a case with an input and an output in a region, alone in its execution."""
    shape = (_REGION_BYTES // 4,)

    def work(step: int, request: int) -> Packed:
        tensor = TensorRef(
            "INPUT0", "FP32", shape, region.memory_range(2 * request * _REGION_BYTES, _REGION_BYTES)
        )
        output = RequestedOutput(
            "OUTPUT0", region.memory_range((2 * request + 1) * _REGION_BYTES, _REGION_BYTES)
        )
        return pack_inference(Inference((tensor,), (output,)))

    def http(step: int, request: int) -> dict[str, Any]:
        def tensor(name: str, index: int, **fields: Any) -> dict[str, Any]:
            parameters = {"shared_memory_region": _REGION, "shared_memory_byte_size": _REGION_BYTES}
            parameters["shared_memory_offset"] = index * _REGION_BYTES
            return {"name": name, **fields, "parameters": parameters}

        input_tensor = tensor("INPUT0", 2 * request, datatype="FP32", shape=shape)
        return {"inputs": [input_tensor], "outputs": [tensor("OUTPUT0", 2 * request + 1)]}

    def response(request: Inference) -> Inferred:
        (output,) = request.outputs
        assert output.memory_range is not None
        return Inferred((TensorRef("OUTPUT0", "FP32", shape, output.memory_range),))

    tensors = [[gateway_rig.tensor_config(name, "FP32", [-1])] for name in ("INPUT0", "OUTPUT0")]
    return Case(gateway_rig.model_config("identity", 0, *tensors), 1, work, http, response)


def text() -> Case:
    """Return a case with a completion of OpenAI's API whose whole text is the only response."""
    values = {
        "text_output": b"a text",
        "finish_reason": b"length",
        "stop_reason": b"null",
        "usage": b'{"prompt_tokens": 2, "completion_tokens": 4}',
    }

    def http(step: int, request: int) -> dict[str, Any]:
        return {"model": "text", "prompt": f"text {step}", "max_tokens": 4, "temperature": 0}

    def response(request: Inference) -> Inferred:
        named_arrays = {o.name: np.array([values[o.name]], object) for o in request.outputs}
        return Inferred(tuple(worker_rig.tensor(*item) for item in named_arrays.items()))

    inputs, outputs = (
        [gateway_rig.tensor_config(name, "BYTES", [-1]) for name in names]
        for names in (("text_input", "sampling_parameters"), values)
    )
    config = gateway_rig.model_config("text", 0, inputs, outputs)
    config["model_transaction_policy"] = {"decoupled": True}

    def work(step: int, request: int) -> Packed:
        raise NotImplementedError

    return Case(config, 1, work, http, response, "/v1/completions")


def worker(folder: Path, case: Case) -> Calls:
    """Count the calls of the worker from the scheduler's batch to its end."""
    import torch  # every worker imports it

    calls = Calls()
    with worker_rig.rig(folder) as rig:
        backend = PythonBackend(rig.context)
        shutil.copy(BENCH / "models" / case.model / "1" / "model.py", rig.context.version_dir)
        rig.serve(backend, case.config)
        link = rig.instance.link
        numbers = itertools.count(1)
        for step in range(_WARM_UPS + 1):
            for first_index in range(0, BATCH, case.batch):
                indices = range(first_index, first_index + case.batch)
                work = [m.Work(index + 1, 4242, *case.works(step, index), "") for index in indices]
                rig.scheduler.post(rig._peer, m.Execute(next(numbers), work))
                rig.scheduler.flush()
                with calls if step == _WARM_UPS else MagicMock():
                    link.receive()
                    rig.instance.serve_commands()
                (finished,) = rig.sent()
                assert isinstance(finished, m.BatchFinished) and not any(
                    r.code for r in finished.replies
                )
        backend.unload()
    torch.set_warn_always(False)
    return calls


def scheduler(run_dir: Path, case: Case) -> Calls:
    """Count the scheduler's calls: a turn sends the batch, and one sends the responses."""
    calls = Calls()
    endpoints.local_client_folder(run_dir).mkdir()
    control = Router(endpoints.control(run_dir))
    host = Host(HostStart("counted", run_dir))
    spec = ModelSpec.of(case.config)
    start = SchedulerStart("scheduler", 1, "1", spec, run_dir, bytes(KEY_SIZE))
    ((peer, _),) = receive_arrived(control)
    control.post(peer, supervision.OpenScheduler(encode_start(start)))
    control.flush()
    _run_turn(host)
    pid = os.getpid()
    worker = Dealer(endpoints.instances(run_dir, 1), f"0.{pid}")
    client = Dealer(endpoints.scheduler(run_dir, 1), f"{pid}.ab")
    ((peer, _),) = receive_arrived(control)
    control.post(peer, supervision.InstanceExpected(0, pid))
    control.flush()
    worker.send(m.InstanceReady(0, pid))
    while host._schedulers[0].core.gauges()["instances"]["idle"] == 0:
        _run_turn(host)
    body = case.respond(case.works(0, 0))
    numbers = itertools.count(1)
    for step in range(_WARM_UPS + 1):
        counting = calls if step == _WARM_UPS else MagicMock()
        for index in range(BATCH):
            client.post(m.Submit(next(numbers), *case.works(step, index), 1, 0, 0, 0))
        client.flush()
        with counting:
            _run_turn(host)
        batches: list[m.Execute] = []
        responses: list[m.Finished] = []
        while len(responses) < BATCH:
            batches += [] if batches else receive_arrived(worker)
            batch = batches.pop(0)
            replies = [m.Reply(work.key, "", "", *body) for work in batch.requests]
            now_ns = time.monotonic_ns()
            times_ns = (now_ns, now_ns, now_ns, now_ns)
            worker.send(m.BatchFinished(batch.batch, *times_ns, replies))
            with counting:
                _run_turn(host)
            responses += receive_arrived(client)
        assert {type(response) for response in responses} == {m.Finished}
    for scheduler in host._schedulers:
        scheduler.close()
    for link in (client, worker, control, host._control):
        link.close()
    return calls


def _run_turn(host: Host) -> None:
    live = max([scheduler.live_count for scheduler in host._schedulers], default=0)
    for fd, _ in host._waiter.wait(NEVER, live):
        host._waiter.handlers[fd]()
    host._run_turns(NEVER)


class _Transport(Transport):
    """A transport that keeps the pieces written to a unix socket."""

    def __init__(self, sock: socket.socket) -> None:
        super().__init__()
        self._sock = sock
        self.pieces: list[bytes] = []
        self.write = self.pieces.append  # type: ignore[assignment, method-assign]

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return self._sock if name == "socket" else default


def _http(gateway: Gateway) -> Callable[[Acceptor], HttpConnection]:
    return partial(HttpConnection, app=App(gateway, ROUTES), settings=gateway.settings)


def _grpc(gateway: Gateway) -> Callable[[Acceptor], GrpcConnection]:
    context = GrpcContext(
        settings=GrpcSettings(),
        begin_call=Service(gateway, Inferences(gateway)).begin_call,
        budget=gateway.body_budget,
        header_timeout_s=gateway.settings.header_timeout_s,
        body_timeout_s=gateway.settings.body_timeout_s,
        max_inflated_bytes=gateway.settings.max_input_size,
        tls=None,
    )
    return partial(GrpcConnection, context=context)


@coroutine
def _loop_turn() -> Generator[None]:
    """Yield to the loop once, as asyncio.sleep(0) does, without calls that would be counted."""
    yield


def gateway(run_dir: Path, case: Case, region: worker_rig.Region, *, grpc: bool = False) -> Calls:
    """Count the calls of the gateway from the bytes of requests to those of responses."""
    return uvloop.run(_gateway(run_dir, case, region, grpc))


async def _gateway(run_dir: Path, case: Case, region: worker_rig.Region, grpc: bool) -> Calls:
    calls = Calls()
    schedulers = Router(endpoints.scheduler(run_dir, 1))
    links = GatewaySchedulers()
    trim = MallocTrim()
    settings = GatewaySettings()
    counted_gateway = Gateway(
        settings=settings,
        schedulers=links,
        models=ModelTable(links),
        regions=RegionTable(lambda memory: None, settings.shm_overlap),
        supervisor=MagicMock(),
        arena=Arena(1 << 20),
        body_budget=BodyBudget(1 << 20, trim),
        malloc_trim=trim,
        mappings=Mappings(),
        health=HealthChanged(live=True, ready=True, exiting=False),
    )
    published = MagicMock(endpoint=schedulers.endpoint)
    counted_gateway.models.publish(gateway_rig.publication(case.config, published))
    packed_range = pack_range(region.memory_range(0, region.memory.byte_size))
    counted_gateway.regions.publish(
        RegionPublished(_REGION, "/key", list(packed_range), os.getuid(), -1, 0)
    )
    rules = ListenerRules(ListenerKind.UNIX, Authorisation(None, {}), None)
    server = Acceptor(_grpc(counted_gateway) if grpc else _http(counted_gateway), rules, 1000)
    request = case.call if grpc else case.post
    socket_pair = socket.socketpair()
    connections: list[tuple[Any, _Transport]] = [
        (server(), _Transport(socket_pair[0])) for _ in range(BATCH)
    ]
    for link, transport in connections:
        link.connection_made(transport)
    await asyncio.sleep(0)
    for step in range(_WARM_UPS + 1):
        counting = calls if step == _WARM_UPS else MagicMock()
        requests = [request(step, index) for index in range(BATCH)]
        sizes = list(map(len, requests))
        with counting:
            for (link, _), text, size in zip(connections, requests, sizes, strict=True):
                if grpc:
                    link.get_buffer(-1)[:size] = text
                    link.buffer_updated(size)
                else:
                    link.data_received(text)
            for _ in range(3):
                await _loop_turn()
        submits = list(schedulers.receive())
        while len(submits) < BATCH:
            submits += receive_arrived(schedulers)
        for peer, submit in submits:
            schedulers.post(
                peer, m.Finished(submit.id, *case.respond((submit.schema, submit.data)), 1, 2, 3)
            )
        schedulers.flush()
        with counting:
            for _ in range(3):
                await _loop_turn()
        for _, transport in connections:
            response = transport.pieces[-1]
            assert b"grpc-status\x010" in response or response.startswith(b"HTTP/1.1 200")
            transport.pieces.clear()
    for link, _ in connections:
        link.connection_lost(None)
    for end in socket_pair:
        end.close()
    links.close()
    schedulers.close()
    await asyncio.sleep(0)
    return calls
