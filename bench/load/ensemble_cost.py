"""The CPU time of a request in the process of an ensemble and its steps, without sockets.

    python -m bench.load.ensemble_cost [--profile]

The first figure is the time of the ensemble, of the schedulers of three steps, and of the stand-in
for the workers. The second figure is the part of the stand-in. The third figure is for the ensemble
alone, whose steps respond at once.
"""

from __future__ import annotations

import cProfile
import pstats
import sys
import time
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any

from bench.load.queue_cost import Outbox
from shmserve.ipc.memory.lent import LentMemory
from shmserve.ipc.messages import inference as m
from shmserve.ipc.messages.publications import ModelPublished
from shmserve.ipc.messages.supervision import InstanceExpected, SchedulingLimits
from shmserve.ipc.model_spec import ModelSpec
from shmserve.ipc.tensors.descriptors import TensorRef
from shmserve.ipc.tensors.schemas import (
    Inference,
    RequestSchema,
    Schemas,
    pack_inference,
    pack_response_schema,
)
from shmserve.ipc.tensors.signature import Signature
from shmserve.ipc.transport import frames
from shmserve.scheduler.batching import BatchingCore
from shmserve.scheduler.ensemble.core import EnsembleCore
from shmserve.scheduler.ensemble.memory import EnsembleMemory
from shmserve.scheduler.ensemble.runner import InProcessLinks, StepLinks
from shmserve.scheduler.front import Front
from shmserve.scheduler.hosting.host import DescriptorWaiter
from shmserve.scheduler.settings import Settings

_GATEWAY = b"7000.ab"
_IDENTITY = b"6000.1"
_SMALL_ELEMENTS = 16  # elements of a small tensor
_DATA = bytes(4 * _SMALL_ELEMENTS)


def _spec(
    name: str,
    input_name: str,
    input_size: int,
    output_name: str,
    output_size: int,
    steps: Sequence[dict[str, Any]] = (),
) -> ModelSpec:
    """Return a model with one FP32 input and one FP32 output; with `steps`, an ensemble."""
    config: dict[str, Any] = {
        "name": name,
        "max_batch_size": 0,
        "input": [{"name": input_name, "data_type": "TYPE_FP32", "dims": [input_size]}],
        "output": [{"name": output_name, "data_type": "TYPE_FP32", "dims": [output_size]}],
    }
    if steps:
        config["ensemble_scheduling"] = {"step": [{**step, "model_version": -1} for step in steps]}
    return ModelSpec.of(config)


@cache
def _response_schema(elements: int) -> bytes:
    return pack_response_schema([TensorRef("Y", "FP32", (elements,), _DATA)], {})


class _StepOutbox(Outbox):
    """The outbox of a step: messages to a scheduler in the same process are calls."""

    def __init__(self, endpoint: str, in_process_links: InProcessLinks) -> None:
        super().__init__()
        self._endpoint = endpoint
        self._in_process_links = in_process_links

    def post(self, *message: Any) -> None:
        if not self._in_process_links.post(message[0], self._endpoint, message[-1]):
            super().post(*message)

    def sender_of(self, peer: bytes) -> Callable[[Any], object]:
        if self._in_process_links.is_registered(peer):
            return partial(self._in_process_links.post, peer, self._endpoint)
        return super().sender_of(peer)


class Chain:
    """An ensemble of three steps in a row, with FP32 tensors of `elements` elements between them.

    Attributes:
        worker_ns: The time that the stand-in for the workers has taken.
    """

    def __init__(self, elements: int, ensemble_only: bool = False) -> None:
        """Create the ensemble and its steps; `ensemble_only`: the steps have no schedulers."""
        self.worker_ns = 0
        self._schemas = Schemas(RequestSchema)
        self._in_process_links = links = InProcessLinks()
        self._clients = Outbox()
        self._workers: list[tuple[BatchingCore, Front[Any], bytes, Outbox]] = []
        self._active_fronts: dict[Front[Any], None] = {}
        self._last_id = 0
        steps = [
            {"model_name": name, "input_map": {"X": input_name}, "output_map": {"Y": output_name}}
            for name, input_name, output_name in (("a", "I", "s"), ("b", "s", "t"), ("c", "t", "O"))
        ]
        spec = _spec("chain", "I", _SMALL_ELEMENTS, "O", _SMALL_ELEMENTS, steps)
        core: EnsembleCore

        def from_step(endpoint: str, message: Any) -> None:
            self._active_fronts[self._ensemble] = None
            core.step_runner.receive(endpoint, message, time.monotonic_ns())

        waiter = DescriptorWaiter()
        step_links = StepLinks(waiter.watch, waiter.unwatch, links, _IDENTITY, from_step)
        memory = EnsembleMemory(LentMemory(1 << 26), lambda memory_id: None)
        settings = Settings.read(spec, "1", SchedulingLimits())
        core = EnsembleCore(settings, spec, step_links, Outbox(), memory)
        self._ensemble = Front(core, self._clients, Outbox(), time.time_ns, "e")
        add = self._add_instant if ensemble_only else self._add
        for name, input_size, output_size in (
            ("a", _SMALL_ELEMENTS, elements),
            ("b", elements, elements),
            ("c", elements, _SMALL_ELEMENTS),
        ):
            step_spec = _spec(name, "X", input_size, "Y", output_size)
            add(step_spec)
            publication = ModelPublished(name, "1", step_spec, {}, name, True, True, 0.0, 0)
            core.handle_control_message(publication, time.monotonic_ns())

    def _add_instant(self, spec: ModelSpec) -> None:
        """Add a step that responds at once."""
        links = self._in_process_links
        schema = _response_schema(spec.output[0].dims[0])

        def respond(peer: bytes, message: Any) -> None:
            links.post(peer, spec.name, m.Finished(message.id, schema, [_DATA], 1, 2, 3))

        links.register(spec.name, respond)

    def _add(self, spec: ModelSpec) -> None:
        """Add a step with its scheduler and a worker."""
        index = len(self._workers)
        clients, workers, control = (
            _StepOutbox(spec.name, self._in_process_links),
            Outbox(),
            Outbox(),
        )
        settings = Settings.read(spec, "1", SchedulingLimits())
        properties = Schemas(Signature(spec, "1").batch_properties)
        core = BatchingCore(settings, properties, workers, control, time.perf_counter_ns)
        front = Front(core, clients, control, time.time_ns, spec.name)

        def from_in_process_peer(peer: bytes, message: Any) -> None:
            self._active_fronts[front] = None
            front.handle_client_message(peer, message, time.monotonic_ns())

        self._in_process_links.register(spec.name, from_in_process_peer)
        peer, now_ns = b"0.%d" % (100 + index), time.monotonic_ns()
        front.handle_control_message(InstanceExpected(0, 100 + index), now_ns)
        core.results.handle(peer, m.InstanceReady(0, 100 + index), now_ns)
        self._workers.append((core, front, peer, workers))

    def run(self) -> None:
        """Run one request from its client to its last response."""
        self._last_id += 1
        tensor = TensorRef("I", "FP32", (_SMALL_ELEMENTS,), _DATA)
        now_ns = time.monotonic_ns()
        packed_request = pack_inference(Inference((tensor,), ()))
        self._active_fronts[self._ensemble] = None
        self._ensemble.handle_client_message(
            _GATEWAY, m.Submit(self._last_id, *packed_request, now_ns, 0, 0, 0), now_ns
        )
        while not self._clients.posted:
            self._deliver()
            for core, front, peer, workers in self._workers:
                while workers.posted:
                    message = workers.posted.popleft()
                    if isinstance(message, m.Execute):
                        self._active_fronts[front] = None
                        began_ns = time.perf_counter_ns()
                        batch_finished = self._execute(message)
                        self.worker_ns += time.perf_counter_ns() - began_ns
                        core.results.handle(peer, batch_finished, time.monotonic_ns())
        (response,) = self._clients.posted
        assert isinstance(response, m.Finished), response
        self._clients.posted.clear()

    def _deliver(self) -> None:
        while self._active_fronts or self._in_process_links.queued_messages:
            self._in_process_links.deliver()
            active_fronts = list(self._active_fronts)
            self._active_fronts.clear()
            for front in active_fronts:
                front.tick(time.monotonic_ns())

    def _execute(self, batch: m.Execute) -> m.BatchFinished:
        """Return the message that ends a batch; unpack each schema once, like a worker."""
        (received_batch,) = frames.unpack(frames.pack([batch]))
        (request,) = received_batch.requests
        schema_entry = self._schemas[request.schema]
        size, data = _SMALL_ELEMENTS, _DATA
        if schema_entry.outputs[0].has_range:
            data = request.data[-1]
            size = data[2] // 4
        reply = m.Reply(request.key, "", "", _response_schema(size), [data])
        now_ns = time.monotonic_ns()
        batch_finished = m.BatchFinished(batch.batch, now_ns, now_ns, now_ns, now_ns, [reply])
        (returned_message,) = frames.unpack(frames.pack([batch_finished]))
        return returned_message  # type: ignore[no-any-return]


def measure(chain: Chain, requests: int = 4000) -> tuple[float, float]:
    """Return the µs of a request and of its workers' stand-in, the best of five rounds."""
    best_times = (float("inf"), 0.0)
    count = requests // 5
    for _ in range(5):
        chain.worker_ns = 0
        start_s = time.process_time()
        for _ in range(count):
            chain.run()
        took_us = (time.process_time() - start_s) / count * 1e6
        best_times = min(best_times, (took_us, chain.worker_ns / count / 1e3))
    return best_times


if __name__ == "__main__":
    if "--profile" in sys.argv:
        chain = Chain(_SMALL_ELEMENTS)
        profile = cProfile.Profile()
        with profile:
            for _ in range(3000):
                chain.run()
        pstats.Stats(profile).sort_stats("tottime").print_stats(45)
    else:
        for size in (_SMALL_ELEMENTS, 262144):
            total_us, worker_us = measure(Chain(size))
            print(
                f"{size * 4} bytes between steps: {total_us:.1f} us a request, "
                f"{worker_us:.1f} of them for the workers' stand-in"
            )
        total_us = measure(Chain(_SMALL_ELEMENTS, ensemble_only=True))[0]
        print(f"the ensemble alone: {total_us:.1f} us a request")
