"""The peers of a model that calls others: a supervisor and schedulers, played by the test."""

import threading
from concurrent.futures import Future
from pathlib import Path
from typing import Any, TypeVar

from shmserve.ipc.messages import inference as m
from shmserve.ipc.messages.control_requests import Answered, FindModel, LoadModel
from shmserve.ipc.tensors.descriptors import TensorRef
from shmserve.ipc.tensors.schemas import Inference, Inferred, pack_inferred
from shmserve.ipc.transport.router import Router
from tests.rigs.arrivals import receive_arrived
from tests.rigs.worker_rig import model_config, tensor_config
from tests.support.messages import inference_of

T = TypeVar("T", bound=m.Submit | m.Cancel | m.Release | FindModel | LoadModel)

CONFIG = model_config(
    [tensor_config("X", "FP32", [-1])],
    [tensor_config("Y", "FP32", [-1])],
    max_batch_size=4,
    name="other",
)


class Peer:
    """A bound socket: received messages in order; messages are sent to the last sender."""

    def __init__(self, router: Router, name: str = "") -> None:
        self.name = name
        self._router = router
        self._waiting: list[Any] = []
        self._peer = b""

    def next(self, kind: type[T]) -> T:
        self._listen(10.0)
        assert self._waiting, f"no {kind.__name__} came"
        message = self._waiting.pop(0)
        assert isinstance(message, kind), message
        return message

    def is_silent(self) -> bool:
        """Return whether no message arrives within a moment."""
        self._listen(0.05)
        return not self._waiting

    def _listen(self, patience_s: float) -> None:
        if not self._waiting:
            for peer, message in receive_arrived(self._router, patience_s):
                self._peer = peer
                self._waiting.append(message)

    def send(self, *messages: Any) -> None:
        for message in messages:
            self._router.post(self._peer, message)
        self._router.flush()


class CalledModels:
    """The called models, which run in this thread, and the calling model in another one."""

    def __init__(self, folder: Path, control: Router):
        self._folder = folder
        self.supervisor = Peer(control)
        self._routers: list[Router] = []

    def run(self, function: Any, *args: Any) -> Future[Any]:
        future: Future[Any] = Future()

        def work() -> None:
            try:
                future.set_result(function(*args))
            except BaseException as error:
                future.set_exception(error)

        # A daemon thread: a waiting thread of a failed test must not keep the process alive.
        threading.Thread(target=work, daemon=True).start()
        return future

    def endpoint(self, name: str) -> str:
        return f"ipc://{self._folder}/{name}"

    def scheduler(self, name: str) -> Peer:
        self._routers.append(Router(self.endpoint(name)))
        return Peer(self._routers[-1], name)

    def answer_find(self, name: str, config: dict[str, Any] = CONFIG, **fields: Any) -> FindModel:
        question = self.supervisor.next(FindModel)
        answer = {"endpoint": self.endpoint(name), "config": config, "version": "1", "ready": True}
        self.supervisor.send(Answered(question.id, {**answer, **fields}))
        return question

    def close(self) -> None:
        for router in self._routers:
            router.close()


def work(submit: m.Submit) -> Inference:
    return inference_of(submit)


def finished(submit: m.Submit, *outputs: TensorRef, **parameters: Any) -> m.Finished:
    return m.Finished(submit.id, *pack_inferred(Inferred(outputs, parameters)))
