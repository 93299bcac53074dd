"""Requests of the Python backend's API: received by a model, or created by it."""

from __future__ import annotations

import asyncio
import json
import operator
import weakref
from collections.abc import Mapping, Sequence
from enum import IntEnum
from itertools import repeat
from typing import Any

from shmserve.errors import ShmserveError
from shmserve.ipc.trace import TraceContext
from shmserve.workers.backends import Request, ResponseStream
from shmserve.workers.backends.python import server
from shmserve.workers.backends.python.errors import (
    NO_CAST,
    TritonModelException,
    checked_parameters,
    listed,
    text,
    whole,
)
from shmserve.workers.backends.python.response import (
    InferenceResponse,
    InferenceResponseSender,
    ResponseIterator,
    SingleResponse,
    StreamedResponses,
    from_call,
    from_error,
)
from shmserve.workers.backends.python.tensor import Lender, ReceivedTensor, Tensor
from shmserve.workers.bls.calls import StreamBlsCall
from shmserve.workers.bls.request import CallRequest, CallResponse

RELEASE_ALL = 1
RELEASE_RESCHEDULE = 2


class MemoryType(IntEnum):
    """The kinds of memory that a call may prefer for its outputs."""

    TRITONSERVER_MEMORY_GPU = 0
    TRITONSERVER_MEMORY_CPU = 1


class PreferredMemory:
    """The preferred memory of a call's outputs, which are in host memory regardless."""

    def __init__(self, preferred_memory_type: MemoryType, preferred_device_id: int = 0) -> None:
        if not isinstance(preferred_memory_type, MemoryType):
            raise TypeError(f"preferred_memory_type is no such type: {preferred_memory_type!r}")
        whole(preferred_device_id, "preferred_device_id", -(2**63))


class InferenceTrace:
    """The trace of a request in the form of a message, or ""."""

    def __init__(self, message: str = "") -> None:
        self.message = message

    def get_context(self) -> str | None:
        """Return the W3C context to pass on as JSON, or None for an untraced request."""
        if not self.message:
            return None
        return json.dumps({"traceparent": TraceContext.of(self.message).traceparent})


_ANY_MEMORY = PreferredMemory(MemoryType.TRITONSERVER_MEMORY_CPU)
_NO_TRACE = InferenceTrace()


class InferenceRequest:
    """An inference of another model, for `exec` or `async_exec`.

    Args:
        inputs: Tensors.
        requested_output_names: The outputs; all outputs if it is empty.
        model_version: -1 is the latest.
        timeout: In microseconds; 0 for none.
        parameters: Custom parameters for the other model.
        priority: The level in the other model's queue; 1 is the highest, 0 the model's default.
    """

    def __init__(
        self,
        request_id: str = "",
        correlation_id: int | str = 0,
        inputs: Sequence[Tensor] | None = None,
        requested_output_names: Sequence[str] | None = None,
        model_name: str | None = None,
        model_version: int = -1,
        flags: int = 0,
        timeout: int = 0,
        preferred_memory: PreferredMemory = _ANY_MEMORY,
        trace: InferenceTrace = _NO_TRACE,
        parameters: dict[str, bool | int | str] | None = None,
        priority: int = 0,
    ) -> None:
        if inputs is None or requested_output_names is None or model_name is None:
            raise TypeError(
                "an InferenceRequest needs inputs, requested_output_names and model_name"
            )
        request_id, model_name = text(request_id, "request_id"), text(model_name, "model_name")
        names = [text(n, "an output's name") for n in listed(requested_output_names, "the outputs")]
        given = listed(inputs, "inputs")
        for what, kind in ((preferred_memory, PreferredMemory), (trace, InferenceTrace)):
            if not isinstance(what, kind):
                raise TypeError(f"{what!r} is no {kind.__name__}")
        of = f"for request with id '{request_id}' and model name '{model_name}'"
        for tensor in given:
            if tensor is None:
                raise TritonModelException(f"Input tensor {of} should not be empty.")
            if not isinstance(tensor, Tensor):
                raise TypeError(f"an input of a request must be a Tensor, not {type(tensor)}")
        if not all(names):
            raise TritonModelException(f"Requested output name {of} should not be empty.")
        self._request_id = request_id
        self._correlation_id = _correlation_id(correlation_id)
        self._inputs = given
        self._outputs: Mapping[str, Any] = dict.fromkeys(names)
        self._model_name = model_name
        self._model_version = whole(model_version, "model_version", -(2**63))
        self._flags = whole(flags, "flags", bits=32)
        self._timeout = whole(timeout, "timeout", bits=64)
        self._priority = whole(priority, "priority", bits=64)
        self._trace = trace
        self._parameters: dict[str, Any] = checked_parameters(parameters)
        self._release_flags = 0

    # --- fields

    def inputs(self) -> list[Tensor]:
        """Return the input tensors."""
        return list(self._inputs)

    def request_id(self) -> str:
        """Return the id; it may be empty."""
        return self._request_id

    def correlation_id(self) -> int | str:
        """Return the id of the sequence; 0 for none."""
        return self._correlation_id

    def requested_output_names(self) -> set[str]:
        """Return the names of the requested outputs."""
        return set(self._outputs)

    def parameters(self) -> str:
        """Return the custom parameters as JSON."""
        return json.dumps(self._parameters)

    def flags(self) -> int:
        """Return the combination of TRITONSERVER_REQUEST_FLAG_SEQUENCE_START and _END."""
        return self._flags

    def set_flags(self, flags: int) -> None:
        """Set the flags."""
        self._flags = whole(flags, "flags", bits=32)

    def timeout(self) -> int:
        """Return the timeout in microseconds; 0 for none."""
        return self._timeout

    def trace(self) -> InferenceTrace:
        """Return the trace."""
        return self._trace

    def set_release_flags(self, flags: int) -> None:
        """Set what happens to the request when `execute` returns.

        Args:
            flags: TRITONSERVER_REQUEST_RELEASE_ALL, or TRITONSERVER_REQUEST_RELEASE_RESCHEDULE to
                receive the request once more.
        """
        self._release_flags = whole(flags, "flags", bits=32)

    # --- calling another model

    def exec(self, decoupled: bool = False) -> InferenceResponse | ResponseIterator:
        """Run the inference and wait; an error is in the response.

        A model with any number of responses needs `decoupled`: the result is then an iterator over
        them, once the first has arrived. A signal handler must not call it, because it may have
        interrupted a thread that holds the locks of another call.
        """
        try:
            if not decoupled:
                return from_call(server.current().call(self._call_request()))
            call = server.current().open(self._call_request())
        except ShmserveError as error:
            response = from_error(error)
            return ResponseIterator(None, response) if decoupled else response
        call.wait()
        return ResponseIterator(call)

    def async_exec(
        self, decoupled: bool = False
    ) -> asyncio.Future[InferenceResponse | ResponseIterator]:
        """Start the inference from a coroutine; the future has the result of `exec`.

        Raises:
            RuntimeError: No event loop is running.
        """
        loop = asyncio.get_running_loop()
        reply: asyncio.Future[CallResponse]
        try:
            if decoupled:
                first_response: asyncio.Future[None] = loop.create_future()
                call = server.current().open_soon(self._call_request(), first_response)
                task = loop.create_task(_iterator(call, first_response))

                def on_done(task: asyncio.Future[Any]) -> None:
                    if task.cancelled():
                        call.abandon()

                task.add_done_callback(on_done)
                return task
            reply = server.current().call_soon(self._call_request())
        except ShmserveError as error:
            failed = from_error(error)
            future = loop.create_future()
            future.set_result(ResponseIterator(None, failed) if decoupled else failed)
            return future
        return loop.create_task(_response(reply))

    def _call_request(self) -> CallRequest:
        version = self._model_version
        trace = self._trace.message or server.current().trace()
        return CallRequest(
            self._model_name,
            "" if version <= 0 else str(version),
            [tensor.as_call_input() for tensor in self.inputs()],
            tuple(self._outputs),
            self._request_id,
            self._parameters,
            self._correlation_id,
            self._flags,
            self._timeout,
            server.current().deadline_ns(),
            self._priority,
            TraceContext.of(trace).child().message if trace else "",
            server.current().origins(),
            server.current().callers(),
        )

    # --- only for requests from a client

    def is_cancelled(self) -> bool:
        """Check whether the request was cancelled."""
        return False

    def get_response_sender(self) -> InferenceResponseSender:
        """Return the sender of the response, apart from the return of `execute`.

        Raises:
            TritonModelException: The model has not received the request.
        """
        raise TritonModelException("only a request that a model received has a response sender")


def _correlation_id(value: Any) -> int | str:
    if isinstance(value, str):
        return value
    if value is None:
        raise TypeError("correlation_id must not be None")
    try:
        number = operator.index(value)
    except TypeError:
        raise TritonModelException("Correlation ID must be integer or string") from None
    if not 0 <= number < 2**64:
        raise RuntimeError(NO_CAST)
    return number


async def _response(reply: asyncio.Future[CallResponse]) -> InferenceResponse | ResponseIterator:
    try:
        return from_call(await reply)
    except ShmserveError as error:
        return from_error(error)


async def _iterator(
    call: StreamBlsCall, first_response: asyncio.Future[None]
) -> InferenceResponse | ResponseIterator:
    await first_response
    return ResponseIterator(call)


class ReceivedRequest(InferenceRequest):
    """A request that `execute` receives."""

    # Class attributes, because most requests never set these.
    _model_name = ""
    _model_version = -1
    rescheduled = False  # the model reschedules the request
    _trace = _NO_TRACE
    _sender: weakref.ref[InferenceResponseSender] | None = None
    outbox: SingleResponse | None = None

    def __init__(self, origin: Request, lender: Lender | None) -> None:
        work = origin.work
        self._origin = origin
        self._request_id = work.request_id
        self._correlation_id = work.correlation_text or work.correlation_id
        self._flags = work.flags
        self._timeout = work.timeout_us
        self._priority = work.priority
        self._parameters = origin.schema.parameters
        self._outputs = origin.requested
        inputs = origin.inputs
        tensors = map(ReceivedTensor, inputs.values(), repeat(lender))
        self.tensors = dict(zip(inputs, tensors, strict=True))

    def set_release_flags(self, flags: int) -> None:
        super().set_release_flags(flags)
        self.rescheduled = self._release_flags == RELEASE_RESCHEDULE

    def inputs(self) -> list[Tensor]:
        return list(self.tensors.values())

    def parameters(self) -> str:
        return json.dumps(self._parameters, separators=(",", ":"))

    def trace(self) -> InferenceTrace:
        trace = self._origin.work.trace
        return InferenceTrace(trace) if trace else _NO_TRACE

    def is_cancelled(self) -> bool:
        return self._origin.is_cancelled()

    def get_response_sender(self) -> InferenceResponseSender:
        sender = self._sender() if self._sender is not None else None
        if sender is None:
            if self.outbox is None:
                self.outbox = SingleResponse(self._origin.is_cancelled)
            # The outbox detects when the model has released its sender, so nothing else may refer
            # to it.
            sender = InferenceResponseSender(self.outbox)
            self._sender = weakref.ref(sender)
        return sender


class DecoupledRequest(ReceivedRequest):
    """A request that `execute` of a decoupled model receives.

    The request ends once neither it nor its sender is referenced.
    """

    def __init__(self, stream: ResponseStream) -> None:
        super().__init__(stream.request, None)
        self._kept_sender = InferenceResponseSender(StreamedResponses(stream))

    def get_response_sender(self) -> InferenceResponseSender:
        """Return the sender of the responses, the same on every call."""
        return self._kept_sender
