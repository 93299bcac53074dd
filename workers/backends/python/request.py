"""Requests and responses of the Python backend's API.

A model receives requests and creates their responses. A model may also create requests to other
models, and receives their responses.
"""

from __future__ import annotations

import asyncio
import json
import operator
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from functools import partial
from itertools import repeat
from typing import Any

import numpy as np

from shmserve.errors import ShmserveError
from shmserve.ipc.trace import TraceContext
from shmserve.workers.backends import Output, OutputStream, Request, Response
from shmserve.workers.backends.python import server
from shmserve.workers.backends.python.errors import (
    NO_CAST,
    TritonError,
    TritonModelException,
    as_int,
    as_list,
    as_text,
    check_parameters,
    to_model_error,
    to_server_error,
)
from shmserve.workers.backends.python.tensor import Lender, ReceivedTensor, Tensor
from shmserve.workers.bls.calls import StreamBlsCall, UnaryBlsCall
from shmserve.workers.bls.request import CallRequest, CallResponse

# Creates an `Output` faster than its `__new__`, a Python function.
_make_output: Callable[[tuple[str, str, Any]], Output] = partial(tuple.__new__, Output)


class InferenceResponse:
    """The response to one request: output tensors and parameters, or an error."""

    __slots__ = ("_error", "_outputs", "_parameters")

    def __init__(
        self,
        output_tensors: Sequence[Tensor] = (),
        error: TritonError | None = None,
        parameters: dict[str, bool | int | str] | None = None,
    ) -> None:
        try:
            outputs = list(output_tensors)
        except TypeError:
            outputs = as_list(output_tensors, "output_tensors")
        for tensor in outputs:
            if tensor is None:
                text = "Output tensor for inference response should not be empty."
                raise TritonModelException(text)
            if type(tensor) is not Tensor and not isinstance(tensor, Tensor):
                raise TypeError(f"an output must be a Tensor, not {type(tensor).__name__}")
        if error is not None and not isinstance(error, TritonError):
            raise TypeError(f"the error must be a TritonError, not {type(error).__name__}")
        self._outputs = outputs
        self._error = error
        self._parameters = {} if parameters is None else check_parameters(parameters)

    def output_tensors(self) -> list[Tensor]:
        """Return the outputs."""
        return self._outputs

    def has_error(self) -> bool:
        """Check whether the response is an error."""
        return self._error is not None

    def error(self) -> TritonError | None:
        """Return the error, or None."""
        return self._error

    def parameters(self) -> str:
        """Return the parameters as JSON."""
        return json.dumps(self._parameters)


def to_response(response: InferenceResponse) -> Response:
    """Convert a model's response to the server's class."""
    error = response._error
    if error is not None:
        return Response(error=to_server_error(error))
    outputs = [  # outputs are usually unchanged tensors, for which no call is needed
        _make_output((tensor._name, tensor._datatype, tensor._data))
        if type(tensor) is Tensor
        else tensor.as_output()
        for tensor in response._outputs
    ]
    return Response(outputs, response._parameters)


def from_call(response: CallResponse) -> InferenceResponse:
    """Convert the response of another model."""
    result = InferenceResponse([ReceivedTensor(output, None) for output in response.outputs])
    result._parameters = response.parameters
    return result


def from_error(error: ShmserveError) -> InferenceResponse:
    """Convert an error of another model."""
    return InferenceResponse(error=to_model_error(error))


class ResponseIterator:
    """An iterator over the responses to a call, as they arrive.

    Once the iterator is exhausted, `iter()` starts again at the first response. Otherwise it
    continues after the last response taken. Collecting the iterator cancels its call.
    """

    def __init__(self, call: StreamBlsCall | None, *responses: InferenceResponse) -> None:
        self._call = call  # the call; None once all responses have arrived
        self._responses = list(responses)
        self._position = 0

    def __iter__(self) -> ResponseIterator:
        if self._call is None and self._position == len(self._responses):
            self._position = 0
        return self

    def __next__(self) -> InferenceResponse:
        if self._position == len(self._responses):
            self._receive()
        response = self._responses[self._position]
        self._position += 1
        return response

    def _receive(self) -> None:
        outcome = self._call.take() if self._call is not None else None
        if self._call is not None and self._call.is_finished:
            self._call = None
        if outcome is None:
            raise StopIteration("Iteration is done for the responses.")
        response = from_call(outcome) if isinstance(outcome, CallResponse) else from_error(outcome)
        self._responses.append(response)

    def cancel(self) -> None:
        """Cancel the call, unless all responses have arrived.

        Responses that the called model sends before it ends the call still arrive. The last one is
        usually an error with the code CANCELLED.
        """
        if self._call is not None:
            self._call.cancel()

    def __del__(self) -> None:
        if self._call is not None:
            self._call.abandon()


RESPONSE_COMPLETE_FINAL = 1
MORE_THAN_ONE = "Unable to send response. Non-decoupled model cannot send more than one response."


class SingleResponse:
    """The single response to a request, sent by a sender instead of returned by `execute`.

    Attributes:
        done_event: Set when there is a response, or no sender is left.
        error: The exception of the sending thread, or None if it is unknown.
        on_change: Called when `done_event` is set.
        is_closed: Whether the flag for the last response was sent.
    """

    def __init__(self, is_cancelled: Callable[[], bool]) -> None:
        self.response: Response | None = None
        self.error: BaseException | None = None
        self.done_event = threading.Event()
        self.on_change: Callable[[], None] | None = None
        self.is_closed = False
        self._is_cancelled = is_cancelled

    def send(self, response: InferenceResponse | None, final: bool) -> None:
        """Store a copy of the response.

        Raises:
            TritonModelException: There is a response already, the end comes before the response, or
                the end was sent.
        """
        if response is not None and self.response is not None:
            raise TritonModelException(MORE_THAN_ONE)
        if response is None and self.response is None:
            raise TritonModelException(
                "Unable to send response. Non-decoupled model cannot send complete final before "
                "sending a response."
            )
        if self.is_closed:
            raise _closed_error()
        self.is_closed = final
        if response is not None:
            self.response = _copy_arrays(to_response(response))
            self.abandon()

    def is_cancelled(self) -> bool:
        """Check whether the request was cancelled."""
        return self._is_cancelled()

    def abandon(self, error: BaseException | None = None) -> None:
        """Complete the request, without a response if none was sent."""
        self.error = error
        self.done_event.set()
        if self.on_change is not None:
            self.on_change()


class StreamedResponses:
    """The responses of a decoupled model, each sent immediately."""

    def __init__(self, stream: OutputStream) -> None:
        self._stream = stream

    def send(self, response: InferenceResponse | None, final: bool) -> None:
        """Send a response.

        Raises:
            TritonModelException: The end was sent.
        """
        if self._stream.is_closed:
            raise _closed_error()
        self._stream.send(None if response is None else to_response(response), final)

    def is_cancelled(self) -> bool:
        """Check whether the request was cancelled."""
        return self._stream.is_cancelled()

    def abandon(self, error: BaseException | None = None) -> None:
        """End the request, because no sender is left."""
        self._stream.abandon(error)


class InferenceResponseSender:
    """The sender of the responses to one request, usable in any thread and after `execute`."""

    __slots__ = ("__weakref__", "_channel", "_thread_error")

    def __init__(self, response_channel: SingleResponse | StreamedResponses) -> None:
        self._channel = response_channel
        # The exception of the thread that owned the sender.
        self._thread_error: BaseException | None = None

    def send(self, response: InferenceResponse | None = None, flags: int = 0) -> None:
        """Send a response.

        The arrays may be reused when this method returns. The flag
        TRITONSERVER_RESPONSE_COMPLETE_FINAL marks the last response, and may be sent alone.

        Raises:
            TritonModelException: The last response was sent already. If the model is not decoupled,
                also: a response was sent already, or the flag comes before the response.
        """
        if type(flags) is not int:
            flags = _flags_as_int(self, response, flags)
        if response is None:
            if not flags:
                raise TritonModelException(
                    "Inference Response object must be provided when the response flags is set to "
                    "zero."
                )
        elif not isinstance(response, InferenceResponse):
            raise _argument_error(self, response, flags)
        if flags not in (0, RESPONSE_COMPLETE_FINAL):
            if flags < 0:
                raise _argument_error(self, response, flags)
            raise TritonModelException("Unable to send response. Unsupported flag provided.")
        self._channel.send(response, flags == RESPONSE_COMPLETE_FINAL)

    def is_cancelled(self) -> bool:
        """Check whether the request was cancelled."""
        return self._channel.is_cancelled()

    def __del__(self) -> None:
        self._channel.abandon(self._thread_error)


def _closed_error() -> TritonModelException:
    return TritonModelException("Unable to send response. Response sender has been closed.")


def _flags_as_int(sender: InferenceResponseSender, response: Any, flags: Any) -> int:
    try:
        return operator.index(flags)
    except TypeError:
        raise _argument_error(sender, response, flags) from None


def _argument_error(sender: InferenceResponseSender, response: Any, flags: Any) -> TypeError:
    return TypeError(
        "send(): incompatible function arguments. The following argument types are supported:\n"
        "    1. (self: c_python_backend_utils.InferenceResponseSender, response: "
        "c_python_backend_utils.InferenceResponse = None, flags: int = 0) -> None\n\n"
        f"Invoked with: {sender!r}, {response!r}, {flags!r}"
    )


def _copy_arrays(response: Response) -> Response:
    """Copy the arrays of a response, because the model may reuse them before they are written."""
    response.outputs = [
        output._replace(
            data=output.data.copy() if isinstance(output.data, np.ndarray) else output.data.clone()
        )
        for output in response.outputs
    ]
    return response


RELEASE_ALL = 1
RELEASE_RESCHEDULE = 2


class MemoryType(int, Enum):
    """The kinds of memory that a call may prefer for its outputs."""

    TRITONSERVER_MEMORY_GPU = 0
    TRITONSERVER_MEMORY_CPU = 1


class PreferredMemory:
    """The preferred memory of a call's outputs, which are in host memory regardless."""

    def __init__(self, preferred_memory_type: MemoryType, preferred_device_id: int = 0) -> None:
        if not isinstance(preferred_memory_type, MemoryType):
            text = f"preferred_memory_type must be a MemoryType, not {preferred_memory_type!r}"
            raise TypeError(text)
        as_int(preferred_device_id, "preferred_device_id", -(2**63))


class InferenceTrace:
    """The trace of a request; `message` is the trace as in `Submit`, or "" for no trace."""

    def __init__(self, message: str = "") -> None:
        self.message = message

    def get_context(self) -> str | None:
        """Return the W3C trace context for other requests as JSON, or None for no trace."""
        if not self.message:
            return None
        return json.dumps({"traceparent": TraceContext.of(self.message).traceparent})


_ANY_MEMORY = PreferredMemory(MemoryType.TRITONSERVER_MEMORY_CPU)
_NO_TRACE = InferenceTrace()


class InferenceRequest:
    """An inference of another model, for `exec` or `async_exec`.

    Args:
        inputs: The input tensors.
        requested_output_names: The outputs; all outputs if it is empty.
        model_version: The version; -1 is the latest.
        timeout: The timeout in microseconds; 0 for none.
        parameters: Custom parameters for the other model.
        priority: The priority in the other model's queue; 1 is the highest, 0 the model's default.
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
            text = "an InferenceRequest needs inputs, requested_output_names and model_name"
            raise TypeError(text)
        request_id = as_text(request_id, "request_id")
        model_name = as_text(model_name, "model_name")
        output_names = as_list(requested_output_names, "the outputs")
        requested_names = [as_text(name, "an output's name") for name in output_names]
        input_tensors = as_list(inputs, "inputs")
        options = {"preferred_memory": preferred_memory, "trace": trace}
        for option_name, kind in zip(options, (PreferredMemory, InferenceTrace), strict=True):
            if not isinstance(options[option_name], kind):
                raise TypeError(
                    f"{option_name} must be of type {kind.__name__}, not {options[option_name]!r}"
                )
        subject = f"for request with id '{request_id}' and model name '{model_name}'"
        for tensor in input_tensors:
            if tensor is None:
                raise TritonModelException(f"Input tensor {subject} should not be empty.")
            if not isinstance(tensor, Tensor):
                raise TypeError(f"an input must be a Tensor, not {type(tensor).__name__}")
        if not all(requested_names):
            raise TritonModelException(f"Requested output name {subject} should not be empty.")
        self._request_id = request_id
        self._correlation_id = _correlation_id(correlation_id)
        self._inputs = input_tensors
        self._outputs: Mapping[str, Any] = dict.fromkeys(requested_names)
        self._model_name = model_name
        self._model_version = as_int(model_version, "model_version", -(2**63))
        self._flags = as_int(flags, "flags", bits=32)
        self._timeout = as_int(timeout, "timeout", bits=64)
        self._priority = as_int(priority, "priority", bits=64)
        self._trace = trace
        self._parameters: dict[str, Any] = check_parameters(parameters)
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
        self._flags = as_int(flags, "flags", bits=32)

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
        self._release_flags = as_int(flags, "flags", bits=32)

    # --- calling another model

    def exec(self, decoupled: bool = False) -> InferenceResponse | ResponseIterator:
        """Run the inference and wait; an error is in the response.

        A model with any number of responses needs `decoupled`: the result is then an iterator over
        them, once the first has arrived. A signal handler must not call it, because it may have
        interrupted a thread that holds the locks of another call.
        """
        api = server.current_server()
        try:
            request = self._call_request()
            if not decoupled:
                return from_call(api.submit(UnaryBlsCall(api.calls, request)).wait())
            call = api.submit(StreamBlsCall(api.calls, request))
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
        loop, api = asyncio.get_running_loop(), server.current_server()
        future: asyncio.Future[Any] = loop.create_future()
        try:
            request = self._call_request()
            if not decoupled:
                api.submit(UnaryBlsCall(api.calls, request, future), future)
                unary_task = loop.create_task(_await_response(future))
                # A task that is cancelled before its first step does not cancel the future.
                unary_task.add_done_callback(lambda _: future.cancel())
                return unary_task
            call = api.submit(StreamBlsCall(api.calls, request, future), future)
        except ShmserveError as error:
            response = from_error(error)
            future.set_result(ResponseIterator(None, response) if decoupled else response)
            return future
        task = loop.create_task(_await_iterator(call, future))

        def on_done(task: asyncio.Future[Any]) -> None:
            if task.cancelled():
                call.abandon()

        task.add_done_callback(on_done)
        return task

    def _call_request(self) -> CallRequest:
        version, api = self._model_version, server.current_server()
        trace = self._trace.message or api.trace()
        return CallRequest(
            self._model_name,
            "" if version == -1 else str(version),
            [tensor.as_call_input() for tensor in self.inputs()],
            tuple(self._outputs),
            self._request_id,
            self._parameters,
            self._correlation_id,
            self._flags,
            self._timeout,
            api.deadline_ns(),
            self._priority,
            TraceContext.of(trace).child().encoded if trace else "",
            api.origins(),
            api.caller_lines(),
        )

    # --- only for requests from a client

    def is_cancelled(self) -> bool:
        """Check whether the request was cancelled."""
        return False

    def get_response_sender(self) -> InferenceResponseSender:
        """Return the sender of the response; `execute` then need not return a response.

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


async def _await_response(
    response_future: asyncio.Future[CallResponse],
) -> InferenceResponse | ResponseIterator:
    try:
        return from_call(await response_future)
    except ShmserveError as error:
        return from_error(error)


async def _await_iterator(
    call: StreamBlsCall, first_response: asyncio.Future[None]
) -> InferenceResponse | ResponseIterator:
    await first_response
    return ResponseIterator(call)


class ReceivedRequest(InferenceRequest):
    """A request that `execute` receives."""

    # Class attributes, because most requests never set these.
    _model_name = ""
    _model_version = -1
    is_rescheduled = False  # whether the model reschedules the request
    _trace = _NO_TRACE
    _sender: weakref.ref[InferenceResponseSender] | None = None
    outbox: SingleResponse | None = None  # of a response sent by a sender

    def __init__(self, batch_request: Request, lender: Lender | None) -> None:
        work = batch_request.work
        self._batch_request = batch_request
        self._request_id = work.request_id
        self._correlation_id = work.correlation_text or work.correlation_id
        self._flags = work.flags
        self._timeout = work.timeout_us
        self._priority = work.priority
        self._parameters = batch_request.schema.parameters
        self._outputs = batch_request.requested_outputs
        inputs = batch_request.inputs
        tensors = map(ReceivedTensor, inputs.values(), repeat(lender))
        self.tensors = dict(zip(inputs, tensors, strict=True))

    def set_release_flags(self, flags: int) -> None:
        super().set_release_flags(flags)
        self.is_rescheduled = self._release_flags == RELEASE_RESCHEDULE

    def inputs(self) -> list[Tensor]:
        return list(self.tensors.values())

    def parameters(self) -> str:
        return json.dumps(self._parameters, separators=(",", ":"), ensure_ascii=False)

    def trace(self) -> InferenceTrace:
        trace = self._batch_request.work.trace
        return InferenceTrace(trace) if trace else _NO_TRACE

    def is_cancelled(self) -> bool:
        return self._batch_request.is_cancelled()

    def get_response_sender(self) -> InferenceResponseSender:
        sender = self._sender() if self._sender is not None else None
        if sender is None:
            if self.outbox is None:
                self.outbox = SingleResponse(self._batch_request.is_cancelled)
            # Only the model refers to the sender, whose finalizer completes the request.
            sender = InferenceResponseSender(self.outbox)
            self._sender = weakref.ref(sender)
        return sender


class DecoupledRequest(ReceivedRequest):
    """A request that `execute` of a decoupled model receives.

    The request ends when the model refers to neither the request nor its sender.
    """

    def __init__(self, stream: OutputStream) -> None:
        super().__init__(stream.request, None)
        self._response_sender = InferenceResponseSender(StreamedResponses(stream))

    def get_response_sender(self) -> InferenceResponseSender:
        """Return the sender of the responses, the same on every call."""
        return self._response_sender
