"""The parts of a worker in one process: a backend in its loop, batches, and clients' regions."""

from __future__ import annotations

import os
import secrets
import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from shmserve.ipc.memory.arena import Arena
from shmserve.ipc.memory.mappings import Mappings
from shmserve.ipc.messages.inference import (
    CancelExecution,
    CreditExecution,
    Execute,
    ReleaseOutputs,
    Work,
)
from shmserve.ipc.model_spec import ModelSpec
from shmserve.ipc.tensors.arrays import NUMPY_DTYPES, encode_bytes
from shmserve.ipc.tensors.descriptors import Memory, Range, TensorRef
from shmserve.ipc.tensors.schemas import (
    Inference,
    Inferred,
    Packed,
    RequestedOutput,
    pack_inference,
)
from shmserve.ipc.transport.router import Router
from shmserve.ipc.transport.zmtp import Dealer
from shmserve.workers.backends import Backend, ModelContext, Request, Response
from shmserve.workers.links import InstanceLink, SupervisorLink, Timer
from shmserve.workers.main import WorkerInstance
from shmserve.workers.memory.outputs import OutputMemory
from shmserve.workers.memory.workspace import Workspace
from tests.rigs.arrivals import receive_arrived
from tests.support.messages import inferred_of

MIB = 1024 * 1024
CLIENT_PID = 4242

ModelFunction = Callable[[list[Request]], Any]


def tensor_config(name: str, data_type: str, dims: Sequence[int], **fields: Any) -> dict[str, Any]:
    return {"name": name, "data_type": f"TYPE_{data_type}", "dims": list(dims), **fields}


def model_config(
    inputs: Sequence[dict[str, Any]],
    outputs: Sequence[dict[str, Any]],
    max_batch_size: int = 0,
    **settings: Any,
) -> dict[str, Any]:
    return {
        "name": "m",
        "backend": "",
        "max_batch_size": max_batch_size,
        "input": list(inputs),
        "output": list(outputs),
        "default_model_filename": "",
        "parameters": {},
        **settings,
    }


class Region:
    """Memory like a client's: another object than ours, not sealed, of any size.

    Attributes:
        close: Closes the descriptor, which otherwise lives as long as the object.
    """

    def __init__(self, byte_size: int) -> None:
        self.fd = os.memfd_create("test-region")
        self.close = weakref.finalize(self, os.close, self.fd)
        os.ftruncate(self.fd, byte_size)
        inode = os.fstat(self.fd).st_ino
        self.memory = Memory(secrets.randbits(62), os.getpid(), self.fd, inode, byte_size, False)

    def memory_range(self, offset: int, byte_size: int) -> Range:
        return Range(self.memory, offset, byte_size)

    def write(self, offset: int, array: np.ndarray[Any, Any]) -> Range:
        """Put an array in, as a client does."""
        raw = array.tobytes()
        os.pwrite(self.fd, raw, offset)
        return self.memory_range(offset, len(raw))

    def read(self, offset: int, byte_size: int) -> bytes:
        return os.pread(self.fd, byte_size, offset)


def tensor(
    name: str, array: Any, memory_range: Range | None = None, datatype: str | None = None
) -> TensorRef:
    """Return an input in the message, or in a memory range that already contains its bytes."""
    array = np.asarray(array)
    if datatype is None:
        kinds = {kind: name for name, kind in NUMPY_DTYPES.items()}
        datatype = kinds.get(array.dtype, "BYTES")
    raw = encode_bytes(array) if datatype == "BYTES" else array.tobytes()
    return TensorRef(name, datatype, array.shape, raw if memory_range is None else memory_range)


@dataclass(frozen=True)
class Reply:
    """The outcome of one request."""

    code: str
    message: str
    answer: Inferred | None

    @property
    def outputs(self) -> tuple[TensorRef, ...]:
        """The outputs of a request that has not failed."""
        assert self.answer is not None, self.message
        return self.answer.outputs

    def array(self, name: str, rig: Rig | None = None) -> np.ndarray[Any, Any]:
        """Return an output as an array; an output in the worker's arena is read through `rig`."""
        ref = next(ref for ref in self.outputs if ref.name == name)
        if isinstance(ref.data, bytes):
            raw: Any = ref.data
        else:
            assert rig is not None
            raw = rig.context.arena.view(ref.data)
        kind = np.dtype(np.uint16) if ref.datatype == "BF16" else NUMPY_DTYPES[ref.datatype]
        return np.frombuffer(raw, kind).reshape(ref.shape)


class Rig:
    """An instance and the scheduler's side of its socket; one batch at a time."""

    def __init__(self, folder: Path) -> None:
        self._dealers: list[Dealer] = []
        self._links: list[InstanceLink] = []
        self.supervisor = Router(f"ipc://{folder}/control")
        control = SupervisorLink(Dealer(f"ipc://{folder}/control", "worker.1.0.1"))
        arena, mappings = Arena(64 * MIB), Mappings()
        self.context = ModelContext(
            number=1,
            index=0,
            model_name="m",
            version="1",
            model_dir=folder / "m",
            instance_name="m_0_0",
            kind="CPU",
            device="cpu",
            device_id=0,
            backend_config={},
            arena_byte_size=64 * MIB,
            threads=1,
            run_dir=folder,
            control=control,
            arena=arena,
            output_memory=OutputMemory(arena),
            mappings=mappings,
            workspace=Workspace(control, mappings, "cpu", lambda device: None),
        )
        self.context.version_dir.mkdir(parents=True, exist_ok=True)
        self._batches = self._served = 0
        self._schedulers: list[Router] = []
        self._timers: list[Timer] = []

    def serve(self, backend: Backend, config: dict[str, Any]) -> Rig:
        decoded = ModelSpec.of(config)
        backend.load(decoded)
        self.instance = WorkerInstance(self.context, backend, decoded)
        self._links.append(self.instance.link)
        self._timers += (self.instance.link._timer, self.instance._metrics.timer)
        return self.attach()

    def serve_function(self, execute: ModelFunction, config: dict[str, Any]) -> Rig:
        """Serve a backend whose `execute` is a function of the test."""
        return self.serve(FunctionBackend(self.context, execute), config)

    def attach(self) -> Rig:
        """Attach a scheduler to the instance: the first one or a successor."""
        self._served += 1
        endpoint = f"ipc://{self.context.run_dir}/w{self._served}"
        self.scheduler = Router(endpoint)
        self._schedulers.append(self.scheduler)
        self.instance.attach(endpoint)
        ((self._peer, _),) = receive_arrived(self.scheduler)
        self._dealer = self.instance.link._dealer
        assert self._dealer is not None
        # Kept: a socket that is collected unclosed is a warning, at any later moment.
        self._dealers.append(self._dealer)
        return self

    def infer(
        self, *inputs: TensorRef, outputs: Sequence[RequestedOutput] = (), **fields: Any
    ) -> Reply:
        """Run a batch of one request and return its reply."""
        (reply,) = self.batch(inference(*inputs, outputs=outputs), **fields)
        return reply

    def batch(self, *requests: Inference, pid: int = CLIENT_PID, **fields: Any) -> list[Reply]:
        """Run a batch that contains `requests`; return the replies in order."""
        return self.raw_batch([pack_inference(request) for request in requests], pid, **fields)

    def raw_batch(
        self,
        work_items: Sequence[Packed],
        pid: int = CLIENT_PID,
        request_id: str = "id-1",
        **fields: Any,
    ) -> list[Reply]:
        """Run a batch of packed requests with the keys 1, 2, ..."""
        keyed = enumerate(work_items, 1)
        self.execute([Work(key, pid, *work, request_id, **fields) for key, work in keyed])
        replies = {reply.key: reply for reply in self.finished.replies}
        assert sorted(replies) == list(range(1, len(work_items) + 1))
        return [
            Reply(reply.code, reply.message, inferred_of(reply) if reply.code == "" else None)
            for _, reply in sorted(replies.items())
        ]

    def execute(self, work_items: Sequence[Work]) -> None:
        """Run a batch of these requests in the worker, without sending its replies."""
        self._batches += 1
        command = self.instance.link.register_requests(Execute(self._batches, list(work_items)))
        self.finished = self.instance._executor.execute(*command)
        assert self.finished.batch == self._batches

    def sent(self, timeout_s: float = 5.0) -> list[Any]:
        """Return the messages to the scheduler; wait for a first one."""
        return [message for _, message in receive_arrived(self.scheduler, timeout_s)]

    def cancel(self, key: int) -> None:
        """Send the scheduler's cancellation, and wait until the worker has received it."""
        self._send(CancelExecution(key))

    def release(self, offsets: list[int], pid: int = CLIENT_PID) -> None:
        """Send the scheduler's message that readers released the outputs received so far."""
        self.context.output_memory.mark_sent()
        self._send(ReleaseOutputs(pid, offsets, self.context.output_memory.id))

    def credit(self, key: int, responses: int) -> None:
        """Grant the request's client credit for more responses."""
        self._send(CreditExecution(key, responses))

    def _send(self, message: Any) -> None:
        self.scheduler.post(self._peer, message)
        self.scheduler.flush()
        assert self._dealer is not None and self._dealer.wait(5.0)

    def close(self) -> None:
        for timer in self._timers:
            timer.close()
        for served in self._links:
            with served.lock:  # a model's thread may be about to ask there
                served._dealer = None
        links: list[Dealer | Router] = [*self._dealers, *self._schedulers]
        for link in links:
            link.close()
        self.context.control.close(0)
        # In a worker, the exit of the process closes these.
        self.context.mappings.unmap_process(os.getpid())
        os.close(self.context.control._wake_eventfd)
        os.close(self.context.arena._fd)
        self.supervisor.close()


@contextmanager
def rig(folder: Path) -> Iterator[Rig]:
    """Yield a rig for one test. Modules that its models import are unloaded at the end, because all
    models use the same names.
    """
    path, modules = list(sys.path), set(sys.modules)
    worker_rig = Rig(folder)
    try:
        yield worker_rig
    finally:
        worker_rig.close()
        sys.path[:] = path
        for name in set(sys.modules) - modules:
            if name == "1" or name.startswith(("1.", "helper", "triton_python", "c_python")):
                del sys.modules[name]


class FunctionBackend(Backend):
    """A backend whose `execute` is a function of the test."""

    def __init__(self, context: ModelContext, execute: Any) -> None:
        super().__init__(context)
        self._call = execute

    def load(self, config: ModelSpec) -> None:
        """Load nothing."""

    def execute(self, requests: list[Request]) -> list[Response]:
        result: list[Response] = self._call(requests)
        return result


def inference(*inputs: TensorRef, outputs: Sequence[RequestedOutput] = ()) -> Inference:
    return Inference(tuple(inputs), tuple(outputs))
