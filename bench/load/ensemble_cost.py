"""What a request costs in the process of an ensemble and its steps: without sockets and workers."""

from __future__ import annotations

import cProfile
import pstats
import sys
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any

from shmserve.ipc.memory.lent import LentMemory
from shmserve.ipc.messages import inference as m
from shmserve.ipc.messages.publications import ModelPublished
from shmserve.ipc.messages.supervision import InstanceExpected, SchedulingLimits
from shmserve.ipc.model_spec import ModelSpec
from shmserve.ipc.tensors.descriptors import TensorRef
from shmserve.ipc.tensors.inference import (
    Inference,
    Inferred,
    pack_inference,
    pack_inferred,
    unpack_inference,
)
from shmserve.ipc.tensors.schemas import Schemas
from shmserve.ipc.tensors.signature import Signature
from shmserve.ipc.transport import frames
from shmserve.scheduler.batching import BatchingCore
from shmserve.scheduler.ensemble.core import EnsembleCore
from shmserve.scheduler.ensemble.memory import EnsembleMemory
from shmserve.scheduler.ensemble.runner import StepSchedulers
from shmserve.scheduler.front import Front
from shmserve.scheduler.hosting.event_loop import InProcessLinks, Waiter
from shmserve.scheduler.settings import Settings

_GATEWAY = b"7000.ab"
_IDENTITY = b"6000.1"
_SMALL = 16  # elements
_DATA = bytes(4 * _SMALL)


def _io(names: str, elements: int) -> list[dict[str, Any]]:
    return [{"name": name, "data_type": "TYPE_FP32", "dims": [elements]} for name in names]


class _Outbox:
    """Messages to clients, workers or the supervisor; those to a neighbour are calls."""

    malformed = 0

    def __init__(self, endpoint: str = "", neighbours: InProcessLinks | None = None) -> None:
        self.posted: deque[Any] = deque()
        self._endpoint = endpoint
        self._neighbours = neighbours

    def post(self, *message: Any) -> None:
        """Queue a message."""
        if self._neighbours is None or not self._neighbours.post(
            message[0], self._endpoint, message[-1]
        ):
            self.posted.append(message[-1])

    def to(self, peer: bytes) -> Callable[[Any], object]:
        """As `ClientLinks` says."""
        if self._neighbours is not None and self._neighbours.has(peer):
            return partial(self._neighbours.post, peer, self._endpoint)
        return partial(self.post, peer)


class Chain:
    """Three steps in a row, with FP32 tensors of so many elements between them."""

    def __init__(self, elements: int) -> None:
        self._neighbours = links = InProcessLinks()
        self._clients = _Outbox()
        self._workers: list[tuple[BatchingCore, Front[Any], bytes, _Outbox]] = []
        self._touched: dict[Front[Any], None] = {}
        self._numbers = 0
        config = {
            "name": "chain",
            "max_batch_size": 0,
            "input": _io("I", _SMALL),
            "output": _io("O", _SMALL),
            "ensemble_scheduling": {
                "step": [
                    {
                        "model_name": name,
                        "model_version": -1,
                        "input_map": {"X": before},
                        "output_map": {"Y": after},
                    }
                    for name, before, after in (("a", "I", "s"), ("b", "s", "t"), ("c", "t", "O"))
                ]
            },
        }
        core: EnsembleCore

        def from_step(endpoint: str, message: Any) -> None:
            self._touched[self._ensemble] = None
            core.from_step(endpoint, message, time.monotonic_ns())

        steps = StepSchedulers(Waiter(), links, _IDENTITY, from_step)
        memory = EnsembleMemory(LentMemory(1 << 26), lambda memory_id: None)
        settings = Settings.read(ModelSpec.of(config), "1", SchedulingLimits())
        core = EnsembleCore(settings, ModelSpec.of(config), steps, _Outbox(), memory)
        self._ensemble = Front(core, self._clients, _Outbox(), time.time_ns, "e")
        self._add("a", _SMALL, elements, core)
        self._add("b", elements, elements, core)
        self._add("c", elements, _SMALL, core)

    def _add(self, name: str, takes: int, gives: int, ensemble: EnsembleCore) -> None:
        index = len(self._workers)
        config = {
            "name": name,
            "max_batch_size": 0,
            "input": _io("X", takes),
            "output": _io("Y", gives),
        }
        clients, workers, control = _Outbox(name, self._neighbours), _Outbox(), _Outbox()
        settings = Settings.read(ModelSpec.of(config), "1", SchedulingLimits())
        fits = Schemas(Signature(ModelSpec.of(config), "1").fit)
        core = BatchingCore(settings, fits, workers, control, time.perf_counter_ns)
        front = Front(core, clients, control, time.time_ns, name)

        def from_neighbour(peer: bytes, message: Any) -> None:
            self._touched[front] = None
            front.from_client(peer, message, time.monotonic_ns())

        self._neighbours.enter(name, from_neighbour)
        peer, now_ns = b"0.%d" % (100 + index), time.monotonic_ns()
        front.from_control(InstanceExpected(0, 100 + index), now_ns)
        core.results.handle(peer, m.InstanceReady(0, 100 + index), now_ns)
        self._workers.append((core, front, peer, workers))
        ensemble.from_control(
            ModelPublished(name, "1", ModelSpec.of(config), {}, name, True, True, 0.0, 0), now_ns
        )

    def run(self) -> None:
        """One request, from its client to its last response."""
        self._numbers += 1
        tensor = TensorRef("I", "FP32", (_SMALL,), _DATA)
        now_ns = time.monotonic_ns()
        work = pack_inference(Inference((tensor,), ()))
        self._touched[self._ensemble] = None
        self._ensemble.from_client(
            _GATEWAY, m.Submit(self._numbers, *work, now_ns, 0, 0, 0), now_ns
        )
        while not self._clients.posted:
            self._turn()
            for core, front, peer, workers in self._workers:
                while workers.posted:
                    message = workers.posted.popleft()
                    if isinstance(message, m.Execute):
                        self._touched[front] = None
                        core.results.handle(peer, self._executed(message), time.monotonic_ns())
        (finished,) = self._clients.posted
        assert isinstance(finished, m.Finished), finished
        self._clients.posted.clear()

    def _turn(self) -> None:
        while self._touched:
            touched = list(self._touched)
            self._touched.clear()
            for front in touched:
                front.tick(time.monotonic_ns())
            self._neighbours.deliver()

    @staticmethod
    def _executed(batch: m.Execute) -> m.BatchFinished:
        (received,) = frames.unpack(frames.pack([batch]))
        (work,) = received.requests
        outputs = unpack_inference(work.schema, work.data).outputs
        place = outputs[0].place
        shape = (_SMALL,) if place is None else (place.byte_size // 4,)
        packed = pack_inferred(Inferred((TensorRef("Y", "FP32", shape, place or _DATA),)))
        now_ns = time.monotonic_ns()
        finished = m.BatchFinished(
            batch.batch, now_ns, now_ns, now_ns, now_ns, [m.Reply(work.key, "", "", *packed)]
        )
        (returned,) = frames.unpack(frames.pack([finished]))
        return returned  # type: ignore[no-any-return]


def measure(elements: int, requests: int = 4000) -> float:
    """µs of CPU a request, the best of five."""
    chain = Chain(elements)
    best = float("inf")
    for _ in range(5):
        began = time.process_time()
        for _ in range(requests // 5):
            chain.run()
        best = min(best, (time.process_time() - began) / (requests // 5) * 1e6)
    return best


if __name__ == "__main__":
    if "--profile" in sys.argv:
        made = Chain(_SMALL)
        profile = cProfile.Profile()
        with profile:
            for _ in range(3000):
                made.run()
        pstats.Stats(profile).sort_stats("tottime").print_stats(45)
    else:
        for size in (_SMALL, 262144):
            print(f"{size * 4} bytes between steps: {measure(size):.1f} us a request")
