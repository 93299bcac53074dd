"""Responses of models of the Python backend, by `execute` or a sender, and of models they call."""

from __future__ import annotations

import json
import operator
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from shmserve.errors import ShmserveError
from shmserve.workers.backends import Output, Response, ResponseStream
from shmserve.workers.backends.python.errors import (
    TritonError,
    TritonModelException,
    checked_parameters,
    to_model,
    to_server,
)
from shmserve.workers.backends.python.tensor import ReceivedTensor, Tensor
from shmserve.workers.bls.calls import StreamBlsCall
from shmserve.workers.bls.request import CallResponse

# An Output, created without the Python function of named tuples.
_output: Callable[[tuple[str, str, Any]], Output] = partial(tuple.__new__, Output)


class InferenceResponse:
    """The response to one request: output tensors and parameters, or an error."""

    __slots__ = ("_error", "_outputs", "_parameters")

    def __init__(
        self,
        output_tensors: Sequence[Tensor] = (),
        error: TritonError | None = None,
        parameters: dict[str, bool | int | str] | None = None,
    ) -> None:
        outputs = list(output_tensors)
        for tensor in outputs:
            if tensor is None:
                raise TritonModelException(
                    "Output tensor for inference response should not be empty."
                )
            if type(tensor) is not Tensor and not isinstance(tensor, Tensor):
                raise TypeError(f"an output of a response must be a Tensor, not {type(tensor)}")
        if error is not None and not isinstance(error, TritonError):
            raise TypeError(f"the error of a response must be a TritonError, not {type(error)}")
        self._outputs = outputs
        self._error = error
        self._parameters = {} if parameters is None else checked_parameters(parameters)

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
    """Convert a model's response to one of the server."""
    error = response._error
    if error is not None:
        return Response(error=to_server(error))
    outputs = [  # usually unchanged tensors, for which no call is needed
        _output((tensor._name, tensor._datatype, tensor._data))
        if type(tensor) is Tensor
        else tensor.as_output()
        for tensor in response._outputs
    ]
    return Response(outputs, response._parameters)


def from_call(response: CallResponse) -> InferenceResponse:
    """Convert the response of another model."""
    made = InferenceResponse([ReceivedTensor(output, None) for output in response.outputs])
    made._parameters = response.parameters
    return made


def from_error(error: ShmserveError) -> InferenceResponse:
    """Convert an error of another model."""
    return InferenceResponse(error=to_model(error))


class ResponseIterator:
    """An iterator over the responses to a call, as they arrive.

    Once the iterator is exhausted, `iter()` starts again at the first response. Otherwise it
    continues after the last response taken. Collecting the iterator cancels its call.
    """

    def __init__(self, call: StreamBlsCall | None, *responses: InferenceResponse) -> None:
        self._call = call  # None: all responses have arrived
        self._responses = list(responses)
        self._next = 0

    def __iter__(self) -> ResponseIterator:
        if self._call is None and self._next == len(self._responses):
            self._next = 0
        return self

    def __next__(self) -> InferenceResponse:
        if self._next == len(self._responses):
            self._receive()
        response = self._responses[self._next]
        self._next += 1
        return response

    def _receive(self) -> None:
        item = self._call.take() if self._call is not None else None
        if self._call is not None and self._call.finished:
            self._call = None
        if item is None:
            raise StopIteration("Iteration is done for the responses.")
        self._responses.append(
            from_call(item) if isinstance(item, CallResponse) else from_error(item)
        )

    def cancel(self) -> None:
        """Cancel the call, unless all responses have arrived.

        Responses until the called model ends it still arrive, most often an error with the code
        CANCELLED.
        """
        if self._call is not None:
            self._call.cancel()

    def __del__(self) -> None:
        if self._call is not None:
            self._call.abandon()


RESPONSE_COMPLETE_FINAL = 1


class SingleResponse:
    """The response to a request that is sent apart from the return of `execute`.

    Attributes:
        done: Set when there is a response, or no sender is left.
        error: The exception of the sending thread, if that is known.
        listener: Called when `done` is set.
    """

    def __init__(self, is_cancelled: Callable[[], bool]) -> None:
        self.response: Response | None = None
        self.error: BaseException | None = None
        self.done = threading.Event()
        self.listener: Callable[[], None] | None = None
        self._closed = False
        self._is_cancelled = is_cancelled

    def send(self, response: InferenceResponse | None, final: bool) -> None:
        """Store a copy of the response.

        Raises:
            TritonModelException: There is a response already, or the end comes before the response.
        """
        if response is not None and self.response is not None:
            raise TritonModelException(
                "Unable to send response. Non-decoupled model cannot send more than one response."
            )
        if response is None and self.response is None:
            raise TritonModelException(
                "Unable to send response. Non-decoupled model cannot send complete final before "
                "sending a response."
            )
        if self._closed:
            raise _closed()
        self._closed = final
        if response is not None:
            self.response = _snapshot(to_response(response))
            self.abandon()

    def is_cancelled(self) -> bool:
        """Check whether the request was cancelled."""
        return self._is_cancelled()

    def abandon(self, error: BaseException | None = None) -> None:
        """Complete the request, because no sender is left."""
        self.error = error
        self.done.set()
        if self.listener is not None:
            self.listener()


class StreamedResponses:
    """The responses of a decoupled model, sent at once."""

    def __init__(self, stream: ResponseStream) -> None:
        self._stream = stream

    def send(self, response: InferenceResponse | None, final: bool) -> None:
        """Send a response.

        Raises:
            TritonModelException: The end was sent.
        """
        if self._stream.closed:
            raise _closed()
        self._stream.send(None if response is None else to_response(response), final)

    def is_cancelled(self) -> bool:
        """Check whether the request was cancelled."""
        return self._stream.is_cancelled()

    def abandon(self, error: BaseException | None = None) -> None:
        """End the request, because no sender is left."""
        self._stream.abandon(error)


class InferenceResponseSender:
    """The sender of the responses to one request, for any thread and after `execute`."""

    __slots__ = ("__weakref__", "_channel", "_raised")

    def __init__(self, channel: SingleResponse | StreamedResponses) -> None:
        self._channel = channel
        self._raised: BaseException | None = None  # by the thread that owned it

    def send(self, response: InferenceResponse | None = None, flags: int = 0) -> None:
        """Send a response.

        The arrays have been read when it returns. The flag TRITONSERVER_RESPONSE_COMPLETE_FINAL
        marks the last response, and may be sent alone.

        Raises:
            TritonModelException: The last response was sent. In a model that is not decoupled also
                for a second response, and for the flag before the first.
        """
        if type(flags) is not int:
            flags = _whole(self, response, flags)
        if response is None:
            if not flags:
                raise TritonModelException(
                    "Inference Response object must be provided when the response flags is set to "
                    "zero."
                )
        elif not isinstance(response, InferenceResponse):
            raise _incompatible(self, response, flags)
        if flags not in (0, RESPONSE_COMPLETE_FINAL):
            if flags < 0:
                raise _incompatible(self, response, flags)
            raise TritonModelException("Unable to send response. Unsupported flag provided.")
        self._channel.send(response, flags == RESPONSE_COMPLETE_FINAL)

    def is_cancelled(self) -> bool:
        """Check whether the request was cancelled."""
        return self._channel.is_cancelled()

    def __del__(self) -> None:
        self._channel.abandon(self._raised)


def _closed() -> TritonModelException:
    return TritonModelException("Unable to send response. Response sender has been closed.")


def _whole(sender: InferenceResponseSender, response: Any, flags: Any) -> int:
    try:
        return operator.index(flags)
    except TypeError:
        raise _incompatible(sender, response, flags) from None


def _incompatible(sender: InferenceResponseSender, response: Any, flags: Any) -> TypeError:
    return TypeError(
        "send(): incompatible function arguments. The following argument types are supported:\n"
        "    1. (self: c_python_backend_utils.InferenceResponseSender, response: "
        "c_python_backend_utils.InferenceResponse = None, flags: int = 0) -> None\n\n"
        f"Invoked with: {sender!r}, {response!r}, {flags!r}"
    )


def _snapshot(response: Response) -> Response:
    """Copy the arrays of a response, because the model may reuse them before they are written."""
    response.outputs = [
        output._replace(
            data=output.data.copy() if isinstance(output.data, np.ndarray) else output.data.clone()
        )
        for output in response.outputs
    ]
    return response
