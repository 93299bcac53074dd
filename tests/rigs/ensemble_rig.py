"""An ensemble without process, socket or clock: messages in, messages out, time by hand."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from shmserve.ipc.memory.cuda_ipc import CudaExporter, Driver
from shmserve.ipc.memory.lent import LentMemory
from shmserve.ipc.messages import inference as m
from shmserve.ipc.messages.publications import ModelPublished
from shmserve.ipc.messages.supervision import CacheStart, SchedulingLimits
from shmserve.ipc.model_spec import ModelSpec
from shmserve.ipc.tensors.descriptors import TensorRef
from shmserve.ipc.tensors.schemas import (
    Inference,
    Inferred,
    Packed,
    RequestedOutput,
    pack_inference,
    pack_inferred,
)
from shmserve.scheduler.ensemble.core import EnsembleCore
from shmserve.scheduler.ensemble.memory import DeviceBlocks, EnsembleMemory
from shmserve.scheduler.front import Front
from shmserve.scheduler.response_cache import ResponseCache
from shmserve.scheduler.settings import Settings
from tests.rigs.scheduler_rig import GATEWAY, WALL_NS, ControlOutbox, Outbox
from tests.support.messages import inference_of

MS = 1_000_000


def io(name: str, dims: Sequence[int] = (-1,), **fields: Any) -> dict[str, Any]:
    """Return an FP32 input or output of a configuration."""
    return {"name": name, "data_type": "TYPE_FP32", "dims": list(dims), **fields}


def model(name: str, *, decoupled: bool = False, dims: Sequence[int] = (-1,)) -> dict[str, Any]:
    """Return a model with the input X, and Z if there is one, and the output Y."""
    return {
        "name": name,
        "max_batch_size": 0,
        "input": [io("X", dims), io("Z", dims, optional=True)],
        "output": [io("Y", dims)],
        "model_transaction_policy": {"decoupled": decoupled},
    }


def step(name: str, inputs: dict[str, str], output: str) -> dict[str, Any]:
    return {
        "model_name": name,
        "model_version": -1,
        "input_map": inputs,
        "output_map": {"Y": output},
    }


class StepsOutbox:
    """The messages posted to the steps' schedulers, by endpoint."""

    def __init__(self) -> None:
        self.posted_messages: list[tuple[str, Any]] = []

    def open(self, endpoint: str) -> None:
        """Do nothing: links need no opening."""

    def queue(self, endpoint: str, message: m.Submit, byte_size: int) -> None:
        self.posted_messages.append((endpoint, message))

    def post(self, endpoint: str, message: Any) -> None:
        self.posted_messages.append((endpoint, message))

    defer = post

    def drain(self, endpoint: str, take: Callable[[str, Any], None]) -> None:
        """Return no message: the schedulers of this rig send nothing at their end."""


def used_device_bytes(blocks: DeviceBlocks) -> int:
    return sum(segment.free_list.used_bytes for segment in blocks._segments.values())


class EnsembleRig:
    """The ensemble "e" from IN to `outputs`; `conditions`: condition tensors by step number."""

    def __init__(
        self,
        steps: Sequence[dict[str, Any]],
        models: Sequence[dict[str, Any]],
        outputs: Sequence[str] = ("OUT",),
        max_inflight: int = 0,
        max_queue_size: int = 0,
        dims: Sequence[int] = (-1,),
        conditions: Mapping[int, str] | None = None,
        cuda: Callable[[], CudaExporter] = Driver,
        cache_bytes: int = 0,
        arena_bytes: int = 1 << 27,
    ) -> None:
        decoupled = any(model["model_transaction_policy"]["decoupled"] for model in models)
        config = {
            "name": "e",
            "max_batch_size": 0,
            "input": [io("IN", dims)],
            "output": [io(name, dims) for name in outputs],
            "model_transaction_policy": {"decoupled": decoupled},
            "parameters": {
                f"step[{index}].condition": {"string_value": tensor}
                for index, tensor in (conditions or {}).items()
            },
            "ensemble_scheduling": {"step": list(steps), "max_inflight_requests": max_inflight},
        }
        self.clients, self.steps, self.control = Outbox(), StepsOutbox(), ControlOutbox()
        spec = ModelSpec.of(config)
        lent = LentMemory(arena_bytes)
        self.memory = EnsembleMemory(lent, lambda memory_id: None, cuda)
        cache = ResponseCache("e", "1", CacheStart(cache_bytes), lent) if cache_bytes else None
        self.core = EnsembleCore(
            Settings.read(spec, "1", SchedulingLimits(max_queue_size=max_queue_size)),
            spec,
            self.steps,
            self.control,
            self.memory,
            cache,
        )
        self.ensemble = Front(self.core, self.clients, self.control, lambda: WALL_NS, "e", cache)
        self.now_ns = 1_000 * MS
        for model in models:
            self.publish(model)

    @property
    def used_bytes(self) -> int:
        return self.memory.lent_memory.used_bytes + used_device_bytes(self.memory._device_blocks)

    def publish(self, config: dict[str, Any], endpoint: str = "") -> None:
        name = config["name"]
        self.from_control(
            ModelPublished(
                name, "1", ModelSpec.of(config), {}, endpoint or name, True, True, 0.0, 0
            )
        )

    def submit(
        self,
        number: int = 1,
        outputs: Sequence[str] = (),
        deadline_ms: int = 0,
        data: bytes = b"\0" * 4,
        priority: int = 0,
    ) -> None:
        tensor = TensorRef("IN", "FP32", (len(data) // 4,), data)
        work = pack_inference(Inference((tensor,), tuple(map(RequestedOutput, outputs))))
        deadline_ns = self.now_ns + deadline_ms * MS if deadline_ms else 0
        self.from_client(m.Submit(number, *work, self.now_ns, deadline_ns, 0, priority))

    def from_client(self, message: Any) -> None:
        self.ensemble.handle_client_message(GATEWAY, message, self.now_ns)
        self.ensemble.tick(self.now_ns)

    def from_control(self, message: Any) -> None:
        self.ensemble.handle_control_message(message, self.now_ns)
        self.ensemble.tick(self.now_ns)

    def from_step(self, endpoint: str, message: Any) -> None:
        self.core.step_runner.receive(endpoint, message, self.now_ns)
        self.ensemble.tick(self.now_ns)

    def pass_ms(self, ms: int) -> None:
        self.now_ns += ms * MS
        self.ensemble.tick(self.now_ns)

    def take_client_messages(self) -> list[Any]:
        """Return the messages to the gateway since the last call."""
        return [message for _, message in self.clients.take()]

    def take_sent(self, kind: type[Any] = m.Submit) -> list[tuple[str, Any]]:
        """Return the messages of this kind to steps since the last call."""
        posted_messages, self.steps.posted_messages = self.steps.posted_messages, []
        return [item for item in posted_messages if isinstance(item[1], kind)]

    def take_submits(self) -> dict[str, int]:
        """Return the numbers of the requests submitted since the last call, by endpoint."""
        return {endpoint: submit.id for endpoint, submit in self.take_sent()}

    def finish(self, endpoint: str, number: int, data: bytes = b"\0" * 4) -> None:
        self.from_step(endpoint, m.Finished(number, *packed_output(data)))

    def respond(self, endpoint: str, number: int, data: bytes, final: bool = False) -> None:
        """Respond for a decoupled step; without data it is the last response."""
        schema, tensors = packed_output(data) if data else (b"", [])
        self.from_step(endpoint, m.Responded(number, "", "", schema, tensors, final))


def packed_output(data: bytes) -> Packed:
    return pack_inferred(Inferred((TensorRef("Y", "FP32", (len(data) // 4,), data),)))


def inputs_of(submit: m.Submit) -> dict[str, Any]:
    """Return the bytes, or the memory ranges, of a submitted request's inputs."""
    return {tensor.name: tensor.data for tensor in inference_of(submit).inputs}
