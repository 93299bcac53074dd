"""The execution of a Python model: from its requests to a response for each, or to streams."""

from __future__ import annotations

import asyncio
import gc
import logging
import sys
import threading
import time
import traceback
from collections.abc import Coroutine, Sequence
from functools import partial
from itertools import repeat
from typing import Any

from shmserve.errors import Internal
from shmserve.workers.backends import ModelContext, OutputStream, Request, Response
from shmserve.workers.backends.python.request import (
    DecoupledRequest,
    InferenceResponse,
    InferenceResponseSender,
    ReceivedRequest,
    SingleResponse,
    to_response,
)
from shmserve.workers.backends.python.tensor import Lender
from shmserve.workers.context import WrongCount
from shmserve.workers.user_code import EventLoopThread

logger = logging.getLogger(__name__)

_NOT_ITERATIVE = (
    "Request is released with TRITONSERVER_REQUEST_RELEASE_RESCHEDULE, while the model is not "
    "configured to handle such a flag."
)
# The reference count of an object that only a list refers to.
_LIST_REFCOUNT = (lambda items: sys.getrefcount(items[0]))([object()])


def _misuse_error(instance: str, problem: str) -> Internal:
    """Return the error for clients of a model that violates the API, in Triton's words."""
    return Internal(f"Failed to process the request(s) for model '{instance}', message: {problem}")


class PythonExecution:
    """The execution of a model that is not decoupled.

    If its `execute` is a coroutine function, one event loop runs the coroutines. An `iterative`
    model may reschedule a request once.
    """

    def __init__(self, context: ModelContext, model: Any, iterative: bool = False) -> None:
        self._context = context
        self._model = model
        self._iterative = iterative
        self._instance = context.instance_name
        self._lender = Lender(context.model_name, context.mappings, context.copy_counter)
        self._runner: asyncio.Runner | None = None

    def execute(self, requests: list[Request]) -> list[Response]:
        """Call the model, and return a response for each request.

        Raises:
            Internal: The model did not return a list.
            WrongCount: The model did not return one response for each request.
            BaseException: Any exception of the model.
        """
        received = list(map(ReceivedRequest, requests, repeat(self._lender)))
        try:
            responses = self._execute(received)
        except BaseException as error:
            responses = self._sent_responses(received) if isinstance(error, Exception) else []
            if not responses:
                self._lender.discard_loans()
                raise
            logger.exception(
                "model '%s' failed after it had sent its responses", self._context.model_name
            )
        self._lender.check_loans(responses)
        _detach_kept_inputs(requests, received)
        return responses

    def run(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        """Run a coroutine of the model; return its result or raise its exception."""
        if self._runner is None:
            self._runner = asyncio.Runner()
        return self._runner.run(coroutine)

    def close(self) -> None:
        """Close the event loop."""
        if self._runner is not None:
            self._runner.close()

    def _execute(self, received: list[ReceivedRequest]) -> list[Response]:
        # A copy, because a model may empty its list.
        returned = self._model.execute(list(received))
        if type(returned) is not list:
            returned = self._as_list(returned, received)
        try:
            pairs = list(zip(received, returned, strict=True))
        except ValueError:
            raise WrongCount(len(received), len(returned)) from None
        outboxes: list[SingleResponse] = []
        for request, response in pairs:
            if request.outbox and response is None:
                outboxes.append(request.outbox)
        if outboxes:
            self._await_senders(outboxes)
        self._context.stopwatch.output_start_ns = time.monotonic_ns()
        return [
            to_response(response)
            if type(response) is InferenceResponse
            and not request.outbox
            and not request.rescheduled
            else self._response(request, response)
            for request, response in pairs
        ]

    def _as_list(self, returned: Any, received: list[ReceivedRequest]) -> list[Any]:
        """Return the list that `execute`, or its coroutine, has returned."""
        if asyncio.iscoroutine(returned):
            returned = self.run(returned)
        if returned is None and all(
            request.outbox is not None or request.rescheduled for request in received
        ):
            return [None] * len(received)
        if not isinstance(returned, list):
            problem = f"Expected a list in the execute return, found type '{type(returned)}'."
            raise _misuse_error(self._instance, problem)
        return returned

    def _response(self, request: ReceivedRequest, response: Any) -> Response:
        if request.rescheduled:
            if self._iterative and response is None:
                return Response(rescheduled=True)
            return self._not_rescheduled(response)
        if request.outbox is not None and request.outbox.response is not None:
            return request.outbox.response
        if isinstance(response, InferenceResponse):
            return to_response(response)
        problem = (
            "Expected an 'InferenceResponse' object in the execute function return list, found "
            f"type '{type(response)}'."
        )
        return Response(error=_misuse_error(self._instance, problem))

    def _not_rescheduled(self, response: Any) -> Response:
        """Return the error of a request that its model reschedules although it may not."""
        if response is None:
            return Response(error=Internal(_NOT_ITERATIVE))
        problem = (
            "Expected a None object in the execute function return list for reschduled request, "
            f"found type '{type(response)}'."
        )
        return Response(error=_misuse_error(self._instance, problem))

    def _await_senders(self, outboxes: Sequence[SingleResponse]) -> None:
        """Wait for responses that threads of the model, or tasks of its loop, send."""
        if self._runner is not None and not all(outbox.done.is_set() for outbox in outboxes):
            self.run(_wait_for_senders(outboxes))
        for outbox in outboxes:
            outbox.done.wait()
        for outbox in outboxes:
            if outbox.response is None and outbox.error is not None:
                raise outbox.error

    @staticmethod
    def _sent_responses(received: Sequence[ReceivedRequest]) -> list[Response]:
        """Return the responses that the model has sent, if every request has one."""
        sent_responses = [
            request.outbox.response for request in received if request.outbox is not None
        ]
        responses = [response for response in sent_responses if response is not None]
        return responses if len(responses) == len(received) else []


class DecoupledExecution:
    """The execution of a decoupled model, whose responses may outlast the batch.

    If its `execute` is a coroutine function, the coroutines run concurrently in an event loop with
    a thread of its own. An `iterative` model may reschedule a request once.
    """

    def __init__(self, context: ModelContext, model: Any, iterative: bool = False) -> None:
        self._context = context
        self._model = model
        self._iterative = iterative
        self._loop: EventLoopThread | None = None

    def execute(self, streams: list[OutputStream]) -> None:
        """Call the model's `execute`.

        Raises:
            Internal: The model returned a value. Exceptions of the model are passed on.
        """
        for stream in streams:
            # The time when the model's threads have finished with the inputs is unknown.
            for item in stream.request.inputs.values():
                self._context.copy_counter.inputs += item.detach()
        received = [DecoupledRequest(stream) for stream in streams]
        returned = self._model.execute(list(received))
        if asyncio.iscoroutine(returned):
            self._running_loop().run(returned, partial(_fail_all, streams))
        elif returned is not None:
            instance = self._context.instance_name
            raise _misuse_error(
                instance,
                f"Python model '{instance}' is using the decoupled mode and the execute function "
                "must return None.",
            )
        for request, stream in zip(received, streams, strict=True):
            if request.rescheduled and self._iterative:
                stream.reschedule()
            elif request.rescheduled:
                stream.fail(Internal(_NOT_ITERATIVE))

    def run(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        """Run a coroutine of the model; return its result or raise its exception."""
        return self._running_loop().wait(coroutine)

    def close(self) -> None:
        """Close the event loop."""
        if self._loop is not None:
            self._loop.close()

    def _running_loop(self) -> EventLoopThread:
        if self._loop is None:
            self._loop = EventLoopThread()
        return self._loop


def _fail_all(streams: Sequence[OutputStream], error: BaseException) -> None:
    explained = streams[0].explain(error)  # explained once, so that the error is logged once
    for stream in streams:
        stream.fail(explained)


async def _wait_for_senders(outboxes: Sequence[SingleResponse]) -> None:
    loop = asyncio.get_running_loop()
    outbox_changed = asyncio.Event()

    def notify() -> None:
        loop.call_soon_threadsafe(outbox_changed.set)

    for outbox in outboxes:
        outbox.listener = notify
    while not all(outbox.done.is_set() for outbox in outboxes):
        await outbox_changed.wait()
        outbox_changed.clear()


def _detach_kept_inputs(requests: Sequence[Request], received: Sequence[ReceivedRequest]) -> None:
    """Copy the inputs that the model keeps, because their memory is reused."""
    for index, request in enumerate(requests):
        if not request.shared:
            continue
        is_referenced = sys.getrefcount(received[index]) > _LIST_REFCOUNT
        tensors = received[index].tensors
        for name in tensors:
            if is_referenced or sys.getrefcount(tensors[name]) > _LIST_REFCOUNT:
                tensors[name].detach()


def log_thread_exception(args: threading.ExceptHookArgs) -> None:
    """Log an exception of a thread, and release the variables of its functions.

    This function is a `threading.excepthook`, which a model may replace.
    """
    if args.exc_type is not SystemExit and args.thread is not None:
        logger.error("thread '%s' of the model failed", args.thread.name, exc_info=args.exc_value)
    for frame, _ in traceback.walk_tb(args.exc_traceback):
        for local in gc.get_referents(frame):
            if isinstance(local, DecoupledRequest):
                local = local.get_response_sender()
            if isinstance(local, InferenceResponseSender):
                local._thread_error = args.exc_value
    # Otherwise an error in one of their variables would keep them alive until the next collection.
    traceback.clear_frames(args.exc_traceback)
