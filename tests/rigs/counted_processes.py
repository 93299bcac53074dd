"""The gateway, the scheduler and the worker of the model `simple`, each in turn in this process,
with the real objects and sockets: how many calls of functions a request costs in each.

Eight requests come at a time, as a batch of the model's.
"""

from __future__ import annotations

import asyncio
import cProfile
import gc
import itertools
import json
import os
import shutil
from collections.abc import Generator
from functools import partial
from pathlib import Path
from types import CodeType, coroutine
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import uvloop

from bench.system.servers import BENCH
from shmserve.common.access.auth_tokens import Authorisation
from shmserve.gateway.client_identity import ListenerKind, ListenerRules
from shmserve.gateway.connection_limits import Acceptor
from shmserve.gateway.context import Gateway
from shmserve.gateway.http.connection.protocol import HttpConnection
from shmserve.gateway.http.routes import ROUTES
from shmserve.gateway.http.routing import App
from shmserve.gateway.inference.body_arrival import BodyBudget
from shmserve.gateway.inference.malloc_trim import MallocTrim
from shmserve.gateway.links.schedulers import RequestDispatcher
from shmserve.gateway.model_table import ModelTable
from shmserve.gateway.region_table import RegionTable
from shmserve.gateway.settings import GatewaySettings
from shmserve.ipc import endpoints
from shmserve.ipc.capabilities import KEY_SIZE
from shmserve.ipc.memory.arena import Arena
from shmserve.ipc.memory.mappings import Mappings
from shmserve.ipc.messages import inference as m
from shmserve.ipc.messages import supervision
from shmserve.ipc.messages.start import HostStart, SchedulerStart, encode
from shmserve.ipc.model_spec import ModelSpec
from shmserve.ipc.tensors.inference import (
    Inference,
    pack_inference,
    pack_inferred,
    unpack_inference,
)
from shmserve.ipc.transport.dealer import Dealer
from shmserve.ipc.transport.router import Router
from shmserve.scheduler.hosting.host import Host
from shmserve.scheduler.requests.request import NEVER
from shmserve.workers.backends.python import PythonBackend
from tests.rigs import gateway_rig, worker_rig
from tests.rigs.arrivals import arrived

BATCH = 8
_WARM_UPS = 4
_NOT_COUNTED = (str(Path(__file__).parent), str(Path(uvloop.__file__).parent))
_CONFIG = {**gateway_rig.SIMPLE, "dynamic_batching": {"max_queue_delay_microseconds": 100}}


class Calls:
    """Counts the calls of functions, in Python and in C, within its with blocks."""

    def __init__(self) -> None:
        self._profile = cProfile.Profile()

    def __enter__(self) -> None:
        gc.disable()  # what others have left would be finalized here
        self._profile.enable()

    def __exit__(self, *error: object) -> None:
        self._profile.disable()
        gc.enable()

    def by_function(self) -> dict[str, float]:
        """The calls a request, those of C functions with the Python function that called them."""
        found: dict[str, float] = {}
        for entry in self._profile.getstats():
            code: CodeType | str = entry.code
            if isinstance(code, str) or code.co_filename.startswith(_NOT_COUNTED):
                continue
            inner = [each for each in entry.calls or () if isinstance(each.code, str)]
            count = entry.callcount + sum(each.callcount for each in inner)
            name = f"{code.co_filename}:{code.co_firstlineno} {code.co_qualname}"
            found[name] = found.get(name, 0) + count / BATCH
        return found


def _work(step: int) -> bytes:
    """A packed request, whose numbers differ from those of other steps."""
    numbers = np.full((1, 16), step, np.int32)
    names = ("INPUT0", "INPUT1")
    return pack_inference(Inference(tuple(worker_rig.tensor(name, numbers) for name in names)))


def _response(work: bytes) -> bytes:
    return pack_inferred(gateway_rig.add_sub(unpack_inference(work)))


def _http(step: int) -> bytes:
    """The same as a client sends it."""
    inputs = [
        {"name": name, "datatype": "INT32", "shape": [1, 16], "data": [10 + step] * 16}
        for name in ("INPUT0", "INPUT1")
    ]
    body = json.dumps({"inputs": inputs}).encode()
    head = b"POST /v2/models/simple/infer HTTP/1.1\r\nHost: localhost\r\n"
    return b"%bContent-Length: %d\r\n\r\n%b" % (head, len(body), body)


def worker(folder: Path) -> Calls:
    """The worker's: from the scheduler's batch to its end."""
    calls = Calls()
    with worker_rig.rig(folder) as rig:
        backend = PythonBackend(rig.context)
        shutil.copy(BENCH / "models" / "simple" / "1" / "model.py", rig.context.version_dir)
        rig.serve(backend, _CONFIG)
        link = rig.instance.link
        for step in range(_WARM_UPS + 1):
            works = [m.Work(key, 4242, _work(step), "") for key in range(1, BATCH + 1)]
            rig.scheduler.post(rig._peer, m.Execute(step + 1, works))
            rig.scheduler.flush()
            with calls if step == _WARM_UPS else MagicMock():
                link.receive()
                rig.instance.serve_commands()
            (done,) = rig.said()
            assert isinstance(done, m.BatchFinished) and not any(r.code for r in done.replies)
        backend.unload()
    return calls


def scheduler(run_dir: Path) -> Calls:
    """The scheduler's: a turn for the requests, with the batch that it sends, and one for its end,
    with the responses."""
    calls = Calls()
    endpoints.local_client_folder(run_dir).mkdir()
    control = Router(endpoints.control(run_dir))
    host = Host(HostStart("counted", run_dir))
    spec = ModelSpec.of(_CONFIG)
    start = SchedulerStart("scheduler", 1, "1", spec, run_dir, bytes(KEY_SIZE))
    ((peer, _),) = arrived(control)
    control.post(peer, supervision.OpenScheduler(encode(start)))
    control.flush()
    _turn(host)
    pid = os.getpid()
    worker = Dealer(endpoints.instances(run_dir, 1), f"0.{pid}")
    client = Dealer(endpoints.scheduler(run_dir, 1), f"{pid}.ab")
    ((peer, _),) = arrived(control)
    control.post(peer, supervision.InstanceExpected(0, pid))
    control.flush()
    worker.send(m.InstanceReady(0, pid))
    while host._schedulers[0]._core.gauges()["instances"]["idle"] == 0:
        _turn(host)
    body = _response(_work(0))
    numbers = itertools.count(1)
    for step in range(_WARM_UPS + 1):
        counted = calls if step == _WARM_UPS else MagicMock()
        for _ in range(BATCH):
            client.post(m.Submit(next(numbers), 1, b"key", 1, 0, 0, 0, _work(step)))
        client.flush()
        with counted:
            _turn(host)
        (batch,) = arrived(worker)
        replies = [m.Reply(work.key, "", "", body) for work in batch.requests]
        worker.send(m.BatchFinished(batch.batch, 1, 2, 3, 4, replies))
        with counted:
            _turn(host)
        assert [type(each) for each in arrived(client)] == [m.Finished] * BATCH
    for scheduler in host._schedulers:
        scheduler.close()
    for link in (client, worker, control, host._control):
        link.close()
    return calls


def _turn(host: Host) -> None:
    """One of its loop's."""
    live = max([scheduler.live for scheduler in host._schedulers], default=0)
    for fd, _ in host._waiter.wait(NEVER, live):
        host._waiter.takers[fd]()
    host._turn(NEVER)


class _Transport(asyncio.Transport):
    """Keeps what is written."""

    def __init__(self) -> None:
        super().__init__()
        self.written: list[bytes] = []
        self.write = self.written.append  # type: ignore[assignment]

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return default

    def is_closing(self) -> bool:
        return False

    def close(self) -> None:
        pass

    def get_write_buffer_size(self) -> int:
        return 0


@coroutine
def _loop_turn() -> Generator[None]:
    """As asyncio.sleep(0), without calls that would be counted."""
    yield


def gateway(run_dir: Path) -> Calls:
    """The gateway's: from the bytes of the requests to those of the responses, as many connections
    as requests."""
    return uvloop.run(_gateway(run_dir))


async def _gateway(run_dir: Path) -> Calls:
    calls = Calls()
    schedulers = Router(endpoints.scheduler(run_dir, 1))
    dispatcher = RequestDispatcher()
    trim = MallocTrim()
    settings = GatewaySettings()
    made = Gateway(
        settings=settings,
        dispatcher=dispatcher,
        models=ModelTable(dispatcher),
        regions=RegionTable(lambda memory: None, settings.shm_overlap),
        supervisor=MagicMock(),
        arena=Arena(1 << 20),
        body_budget=BodyBudget(1 << 20, trim),
        malloc_trim=trim,
        mappings=Mappings(),
        health=supervision.HealthChanged(live=True, ready=True, exiting=False),
    )
    published = MagicMock(endpoint=schedulers.endpoint)
    made.models.publish(gateway_rig.publication(_CONFIG, published))
    rules = ListenerRules(ListenerKind.LOOPBACK, Authorisation(None, {}), None)
    make = partial(HttpConnection, handle=App(made, ROUTES).handle, settings=settings)
    server = Acceptor(make, rules, 1000)
    connections = [(server(), _Transport()) for _ in range(BATCH)]
    for connection, transport in connections:
        connection.connection_made(transport)
    await asyncio.sleep(0)
    for step in range(_WARM_UPS + 1):
        counted = calls if step == _WARM_UPS else MagicMock()
        data = _http(step)
        with counted:
            for connection, _ in connections:
                connection.data_received(data)
            for _ in range(3):
                await _loop_turn()
        submits = list(schedulers.receive())
        while len(submits) < BATCH:
            submits += arrived(schedulers)
        for peer, submit in submits:
            schedulers.post(peer, m.Finished(submit.id, _response(submit.work), 1, 2, 3))
        schedulers.flush()
        with counted:
            for _ in range(3):
                await _loop_turn()
        for _, transport in connections:
            (response,) = transport.written
            assert response.startswith(b"HTTP/1.1 200")
            transport.written.clear()
    for connection, _ in connections:
        connection.connection_lost(None)
    dispatcher.close()
    schedulers.close()
    await asyncio.sleep(0)
    return calls
