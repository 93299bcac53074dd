"""Scheduler messages that an instance serves: batches, or the messages in its backend's table."""

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from shmserve.ipc.messages import inference as m
from shmserve.ipc.tensors.schemas import pack_inference
from shmserve.workers.backends import Output, OutputStream, Request, Response
from shmserve.workers.links import HandlerTable, WorkerRequest
from tests.rigs.worker_rig import (
    CLIENT_PID,
    FunctionBackend,
    Rig,
    inference,
    model_config,
    tensor,
    tensor_config,
)
from tests.support.messages import inferred_of

CONFIG = model_config([tensor_config("X", "FP32", [-1])], [tensor_config("Y", "FP32", [-1])])


@dataclass
class Step:
    """A message of a scheduler that plans steps instead of batches."""

    number: int
    requests: list[m.Work] = field(default_factory=list)
    in_flight: int = 1


class StepBackend(FunctionBackend):
    """A backend for steps: each request of a step is answered with twice its input."""

    def __init__(self, context: Any) -> None:
        super().__init__(context, None)
        self.steps: list[tuple[int, list[bool]]] = []

    def serve(self, writer: Any, unpacker: Any) -> HandlerTable:
        """Return the message table, which contains only steps."""

        def step(message: Step, requests: list[WorkerRequest]) -> m.BatchFinished | None:
            self.steps.append((message.number, [r.cancelled for r in requests]))
            for r in requests:
                request: Request = unpacker.request(r.work)
                doubled_output = Output("Y", "FP32", request.inputs["X"].numpy() * 2)
                OutputStream(writer, r, request).send(Response([doubled_output]), final=True)
            if message.number < 0:
                return None
            return m.BatchFinished(message.number, 0, 0, 0, 0, [])

        return {Step: step}


def work(key: int, value: float) -> m.Work:
    x = tensor("X", np.array([value], np.float32))
    return m.Work(key, CLIENT_PID, *pack_inference(inference(x)))


def test_a_backend_serves_own_messages(worker: Rig, caplog: pytest.LogCaptureFixture) -> None:
    backend = StepBackend(worker.context)
    worker.serve(backend, CONFIG)
    instance = worker.instance
    link = instance.link
    link._dispatch(Step(7, [work(1, 3.0), work(2, 4.0)], in_flight=5))
    # The cancellation arrives after the step that began the request.
    link._dispatch(m.CancelExecution(2))
    link._dispatch(Step(-1))
    link._dispatch(m.Execute(1, [work(3, 1.0)]))  # the backend does not serve this message
    assert "unexpected Execute" in caplog.text
    assert not link._open_requests.keys() - {1, 2}
    instance.serve_commands()
    assert backend.steps == [(7, [False, True]), (-1, [])]
    assert instance._in_flight == 1 and not link.has_open_requests
    first_response, second_response, finished_message = worker.sent()
    assert (first_response.key, first_response.code, first_response.final) == (1, "", True)
    answer = inferred_of(first_response).outputs[0]
    assert answer.data == np.array([6.0], np.float32).tobytes()
    assert second_response.key == 2
    assert second_response.schema == b""
    assert second_response.final is True
    assert isinstance(finished_message, m.BatchFinished) and finished_message.batch == 7


def test_batches_are_the_default(worker: Rig) -> None:
    worker.serve_function(lambda rows: [Response() for _ in rows], CONFIG)
    worker.instance.link._dispatch(m.Execute(3, [work(1, 1.0)], in_flight=4))
    worker.instance.serve_commands()
    (finished_message,) = worker.sent()
    assert finished_message.batch == 3
    assert len(finished_message.replies) == 1
    assert worker.instance._in_flight == 4
