"""Backend `python`: a `TritonPythonModel` in model.py, run as Triton's Python backend runs it."""

from __future__ import annotations

import asyncio
import json
import logging
import sys
import time
from collections.abc import Coroutine, Sequence
from typing import Any

from shmserve.errors import Internal, InvalidArgument
from shmserve.workers import triton_python_backend_utils as pb_utils
from shmserve.workers.backends import (
    Backend,
    ModelContext,
    Request,
    Response,
    ResponseStream,
    parameters,
)
from shmserve.workers.backends.python import metrics, server
from shmserve.workers.backends.python.config import ModelConfig
from shmserve.workers.backends.python.inputs import Lender
from shmserve.workers.backends.python.loading import file_name, model_class
from shmserve.workers.backends.python.request import DecoupledRequest, ReceivedRequest
from shmserve.workers.backends.python.response import InferenceResponse, to_response
from shmserve.workers.backends.python.sender import SingleResponse
from shmserve.workers.event_loop import EventLoopThread

logger = logging.getLogger(__name__)

# What models import, and what a few import although it is Triton's own affair.
_MODULE_NAMES = ("triton_python_backend_utils", "c_python_backend_utils")
_NOT_ITERATIVE = (
    "Request is released with TRITONSERVER_REQUEST_RELEASE_RESCHEDULE, while the model is not "
    "configured to handle such a flag."
)
# How the count of an object looks that only a list refers to.
_LISTED = (lambda items: sys.getrefcount(items[0]))([object()])


class PythonBackend(Backend):
    """One `TritonPythonModel`. Where its `execute` is a coroutine function, one loop runs them."""

    strict_outputs = False

    def __init__(self, context: ModelContext) -> None:
        super().__init__(context)
        for name in _MODULE_NAMES:
            sys.modules[name] = pb_utils
        self._server = server.Server(context)
        server.install(self._server)
        self._lender = Lender(context.model_name, context.copied)
        self._runner: asyncio.Runner | None = None
        self._background: EventLoopThread | None = None
        self._class: Any = None
        self._model: Any = None

    def complete_config(self, config: dict[str, Any]) -> dict[str, Any]:
        """What the model's `auto_complete_config` makes of it; raises what that raises."""
        kind = self._find(config)
        completed = ModelConfig(json.dumps(config))
        if hasattr(kind, "auto_complete_config"):
            completed = kind.auto_complete_config(completed)
        if not isinstance(completed, ModelConfig):
            raise Internal(
                f"auto_complete_config function in model '{self.context.model_name}' must return "
                "a valid pb.ModelConfig object."
            )
        # Through JSON, as in Triton: what is none, such as numpy's numbers, is the model's mistake.
        plain: dict[str, Any] = json.loads(json.dumps(completed.as_dict()))
        return plain

    def load(self, config: dict[str, Any]) -> None:
        """Make the model and call its `initialize`; raises what that raises."""
        context = self.context
        metrics.on_change = context.control.wake
        self.device_inputs = parameters(config).get("FORCE_CPU_ONLY_INPUT_TENSORS") == "no"
        kind = self._find(config)
        if not hasattr(kind, "execute"):
            raise InvalidArgument(
                f"Python model {context.version}/{file_name(config)} does not implement `execute` "
                "method."
            )
        self._model = kind()
        if hasattr(self._model, "initialize"):
            self._model.initialize(
                {
                    "model_config": json.dumps(config, separators=(",", ":")),
                    "model_instance_kind": context.kind,
                    "model_instance_name": context.instance_name,
                    "model_instance_device_id": str(context.device_id),
                    "model_repository": str(context.model_dir),
                    "model_version": context.version,
                    "model_name": context.model_name,
                }
            )
        self.checks_ready = hasattr(self._model, "is_ready")
        self._server.alone = _instances(config) == 1
        self._server.running = True

    def execute(self, requests: list[Request]) -> list[Response]:
        """One call of the model's `execute`. Raises what it raises, Internal for a bad return."""
        self._server.executing = requests
        self._lender.prepare()
        received = [ReceivedRequest(request, self._lender) for request in requests]
        try:
            responses = self._execute(received)
        except Exception:
            responses = self._sent(received)
            if not responses:
                raise
            logger.exception("model '%s' failed after it had answered", self.context.model_name)
        finally:
            self._server.executing = ()
        self._lender.settle(responses)
        _give_up(requests, received)
        return responses

    def execute_decoupled(self, streams: list[ResponseStream]) -> None:
        """One call of the model's `execute`, which must return None: what it sends, it sends by
        itself. A coroutine runs on in an event loop of its own. Raises what it raises."""
        self._server.executing = [stream.request for stream in streams]
        try:
            self._execute_decoupled(streams)
        finally:
            self._server.executing = ()

    def is_ready(self) -> bool:
        """What the model's `is_ready` says, plain or a coroutine. Raises what it raises, Internal
        for what is no bool."""
        said = self._model.is_ready()
        if asyncio.iscoroutine(said):
            said = self._run(said) if self._background is None else self._background.wait(said)
        if not isinstance(said, bool):
            raise Internal(f"`is_ready` must return a bool, found type '{type(said)}'")
        return said

    def metrics(self) -> list[list[Any]] | None:
        """What the model has made with `pb_utils.MetricFamily`."""
        return metrics.changes()

    def unload(self) -> None:
        """Call the model's `finalize`; raises what it raises."""
        self._server.running = False
        try:
            if hasattr(self._model, "finalize"):
                self._model.finalize()
        finally:
            self._model = None
            if self._runner is not None:
                self._runner.close()
            if self._background is not None:
                self._background.close()
            self._server.calls.close()
            server.install(None)

    # --- loading

    def _find(self, config: dict[str, Any]) -> Any:
        if self._class is None:
            self._class = model_class(config, self.context.model_dir, self.context.version_dir)
        return self._class

    # --- execution

    def _execute(self, received: list[ReceivedRequest]) -> list[Response]:
        # Its own list: a model may empty what it is given.
        returned = self._model.execute(list(received))
        if not isinstance(returned, list):
            returned = self._listed(returned, received)
        if len(returned) != len(received):
            raise self._misbehaved(
                "Number of InferenceResponse objects do not match the number of InferenceRequest "
                f"objects. InferenceRequest(s) size is:{len(received)}, and InferenceResponse(s) "
                f"size is:{len(returned)}"
            )
        pairs = list(zip(received, returned, strict=True))
        self._await_senders(
            [request.outbox for request, item in pairs if item is None and request.outbox]
        )
        self.context.stopwatch.output_start_ns = time.monotonic_ns()
        return [self._answer(*pair) for pair in pairs]

    def _listed(self, returned: Any, received: list[ReceivedRequest]) -> list[Any]:
        """What `execute` has returned, if that is not yet a list."""
        if asyncio.iscoroutine(returned):
            returned = self._run(returned)
        if returned is None and all(r.outbox is not None or r.is_rescheduled for r in received):
            return [None] * len(received)
        if not isinstance(returned, list):
            raise self._misbehaved(_no_list(returned))
        return returned

    def _run(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        if self._runner is None:
            self._runner = asyncio.Runner()  # one event loop for all
        return self._runner.run(coroutine)

    def _execute_decoupled(self, streams: list[ResponseStream]) -> None:
        for stream in streams:
            # Nobody knows when the model's threads have done with them.
            for item in stream.request.inputs.values():
                self.context.copied.inputs += item.detach()
        received = [DecoupledRequest(stream) for stream in streams]
        returned = self._model.execute(list(received))
        if asyncio.iscoroutine(returned):
            if self._background is None:
                self._background = EventLoopThread()
            self._background.run(returned, streams)
        elif returned is not None:
            raise self._misbehaved(
                f"Python model '{self.context.instance_name}' is using the decoupled mode and the "
                "execute function must return None."
            )
        for request, stream in zip(received, streams, strict=True):
            if request.is_rescheduled:
                stream.fail(Internal(_NOT_ITERATIVE))

    def _answer(self, request: ReceivedRequest, response: Any) -> Response:
        if request.is_rescheduled:
            return self._not_rescheduled(response)
        if request.outbox is not None and request.outbox.response is not None:
            return request.outbox.response
        if isinstance(response, InferenceResponse):
            return to_response(response)
        what = (
            "Expected an 'InferenceResponse' object in the execute function return list, found "
            f"type '{type(response)}'."
        )
        return Response(error=self._misbehaved(what))

    def _not_rescheduled(self, response: Any) -> Response:
        """Why a request that its model wants to get again has failed."""
        if response is None:
            return Response(error=Internal(_NOT_ITERATIVE))
        what = (
            "Expected a None object in the execute function return list for reschduled request, "
            f"found type '{type(response)}'."
        )
        return Response(error=self._misbehaved(what))

    def _await_senders(self, outboxes: Sequence[SingleResponse]) -> None:
        """Wait for responses that the model sends from its threads, or tasks of its loop."""
        if self._runner is not None and not all(outbox.done.is_set() for outbox in outboxes):
            self._run(_arrival(outboxes))
        for outbox in outboxes:
            outbox.done.wait()

    @staticmethod
    def _sent(received: Sequence[ReceivedRequest]) -> list[Response]:
        """What the model has sent, if that is a response to every request."""
        sent = [r.outbox.response for r in received if r.outbox is not None]
        responses = [response for response in sent if response is not None]
        return responses if len(responses) == len(received) else []

    def _misbehaved(self, what: str) -> Internal:
        where = self.context.instance_name
        return Internal(f"Failed to process the request(s) for model '{where}', message: {what}")


def _no_list(returned: Any) -> str:
    return f"Expected a list in the execute return, found type '{type(returned)}'."


async def _arrival(outboxes: Sequence[SingleResponse]) -> None:
    loop = asyncio.get_running_loop()
    changed = asyncio.Event()

    def notify() -> None:
        loop.call_soon_threadsafe(changed.set)

    for outbox in outboxes:
        outbox.listener = notify
    while not all(outbox.done.is_set() for outbox in outboxes):
        await changed.wait()
        changed.clear()


def _give_up(requests: Sequence[Request], received: Sequence[ReceivedRequest]) -> None:
    """The memory of the inputs is used again: what the model keeps of them becomes its own."""
    for index, request in enumerate(requests):
        if not any(source.shared for source in request.inputs.values()):
            continue
        kept = sys.getrefcount(received[index]) > _LISTED
        tensors = received[index].tensors
        for name in tensors:
            if kept or sys.getrefcount(tensors[name]) > _LISTED:
                tensors[name].own()


def _instances(config: dict[str, Any]) -> int:
    groups = config.get("instance_group") or [{}]
    return sum(group.get("count", 1) * max(1, len(group.get("gpus", ()))) for group in groups)
