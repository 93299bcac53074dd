"""Senders of responses outside of `execute`'s return, for ordinary and for decoupled models."""

from __future__ import annotations

import operator
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import numpy as np

from shmserve.workers.backends import Response, ResponseStream
from shmserve.workers.backends.python.errors import TritonModelException
from shmserve.workers.backends.python.response import InferenceResponse, to_response

RESPONSE_COMPLETE_FINAL = 1


class ResponseChannel(ABC):
    """Where a sender's responses go."""

    @abstractmethod
    def send(self, response: InferenceResponse | None, final: bool) -> None:
        """Take a response, the end, or both. Raises TritonModelException where it may not come."""

    @abstractmethod
    def is_cancelled(self) -> bool:
        """Whether nobody waits for a response any more."""

    @abstractmethod
    def abandon(self) -> None:
        """The model has let go of the sender."""


class SingleResponse(ResponseChannel):
    """Where the one response to a request is put that does not come back from `execute`.

    `done` is set when it is there, or when nobody is left who could put it; `listener` is called
    then too.
    """

    def __init__(self, is_cancelled: Callable[[], bool]) -> None:
        self.response: Response | None = None
        self.done = threading.Event()
        self.listener: Callable[[], None] | None = None
        self._closed = False
        self._is_cancelled = is_cancelled

    def send(self, response: InferenceResponse | None, final: bool) -> None:
        """Keep a copy of the response. Raises TritonModelException for a second one, and for an end
        before the first."""
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
        """Whether nobody waits for the response any more."""
        return self._is_cancelled()

    def abandon(self) -> None:
        """Nothing more comes."""
        self.done.set()
        if self.listener is not None:
            self.listener()


class StreamedResponses(ResponseChannel):
    """The responses of a decoupled model: each is sent at once."""

    def __init__(self, stream: ResponseStream) -> None:
        self._stream = stream

    def send(self, response: InferenceResponse | None, final: bool) -> None:
        """Send it. Raises TritonModelException after the end."""
        if self._stream.closed:
            raise _closed()
        self._stream.send(None if response is None else to_response(response), final)

    def is_cancelled(self) -> bool:
        """Whether nobody waits for more responses."""
        return self._stream.is_cancelled()

    def abandon(self) -> None:
        """The request ends here, whether or not the model has said so."""
        self._stream.abandon()


class InferenceResponseSender:
    """Sends the responses to one request, from any thread, also after `execute` has returned."""

    __slots__ = ("__weakref__", "_channel")

    def __init__(self, channel: ResponseChannel) -> None:
        self._channel = channel

    def send(self, response: InferenceResponse | None = None, flags: int = 0) -> None:
        """Send a response; with TRITONSERVER_RESPONSE_COMPLETE_FINAL it is the last, and the flag
        may also come alone.

        Its arrays are read before this returns. Raises TritonModelException after the last one; in
        a model that is not decoupled also for a second response, and for the flag before the first.
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
        """Whether nobody waits for a response any more."""
        return self._channel.is_cancelled()

    def __del__(self) -> None:
        self._channel.abandon()


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
    """The model goes on, and may reuse its arrays, before the response is written."""
    response.outputs = [
        output._replace(
            data=output.data.copy() if isinstance(output.data, np.ndarray) else output.data.clone()
        )
        for output in response.outputs
    ]
    return response
