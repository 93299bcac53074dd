"""Responses as models of the Python backend give them, and what sends one outside `execute`."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from shmserve.errors import ShmserveError
from shmserve.workers.backends.python.errors import (
    TritonError,
    TritonModelException,
    to_model,
    to_server,
)
from shmserve.workers.backends.python.tensor import Tensor
from shmserve.workers.batch.request import Answer
from shmserve.workers.bls.request import Reply

RESPONSE_COMPLETE_FINAL = 1
_INT64 = 2**63


def checked_parameters(parameters: Any) -> dict[str, bool | int | str]:
    """Custom parameters from a model; raises TritonModelException where one is none."""
    if parameters is None:
        return {}
    if not isinstance(parameters, dict):
        raise TypeError(f"parameters must be a dict, not {type(parameters)}")
    for key, value in parameters.items():
        if not isinstance(key, str):
            raise TritonModelException(
                f"Expect parameters keys to have type str, found type {type(key)}"
            )
        if not isinstance(value, bool | int | str):
            raise TritonModelException(
                f"Expect parameters values to have type bool/int/str, found type {type(value)}"
            )
        if isinstance(value, int) and not -_INT64 <= value < _INT64:
            raise TritonModelException(f"parameter '{key}' is out of the range of int64")
    return dict(parameters)


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
            if not isinstance(tensor, Tensor):
                raise TypeError(f"an output of a response must be a Tensor, not {type(tensor)}")
        if error is not None and not isinstance(error, TritonError):
            raise TypeError(f"the error of a response must be a TritonError, not {type(error)}")
        self._outputs = outputs
        self._error = error
        self._parameters = {} if parameters is None else checked_parameters(parameters)

    def output_tensors(self) -> list[Tensor]:
        """Its outputs."""
        return self._outputs

    def has_error(self) -> bool:
        """Whether it is an error."""
        return self._error is not None

    def error(self) -> TritonError | None:
        """Its error, if it is one."""
        return self._error

    def parameters(self) -> str:
        """Its parameters, as JSON."""
        return json.dumps(self._parameters)


def to_answer(response: InferenceResponse) -> Answer:
    """A model's response as the server carries it."""
    error = response._error
    if error is not None:
        return Answer(error=to_server(error))
    return Answer([tensor.as_output() for tensor in response._outputs], response._parameters)


def from_reply(reply: Reply) -> InferenceResponse:
    """Another model's answer as a model sees it."""
    response = InferenceResponse([Tensor.of_input(output, None) for output in reply.outputs])
    response._parameters = reply.parameters
    return response


def from_error(error: ShmserveError) -> InferenceResponse:
    """What another model failed with as a model sees it."""
    return InferenceResponse(error=to_model(error))


class ResponseIterator:
    """The responses to a call that may have several; today it has one."""

    def __init__(self, response: InferenceResponse) -> None:
        self._responses = iter((response,))

    def __iter__(self) -> Iterator[InferenceResponse]:
        return self

    def __next__(self) -> InferenceResponse:
        return next(self._responses)

    def cancel(self) -> None:
        """Ask for no more responses."""
        self._responses = iter(())


class Outbox:
    """Where the one response to a request is put that does not come back from `execute`.

    `done` is set when it is there, or when nobody is left who could put it; `listener` is called
    then too.
    """

    def __init__(self) -> None:
        self.answer: Answer | None = None
        self.closed = False
        self.done = threading.Event()
        self.listener: Callable[[], None] = lambda: None

    def finish(self) -> None:
        """Nothing more comes."""
        self.done.set()
        self.listener()


class InferenceResponseSender:
    """Sends the response to one request, from any thread, also after `execute` has returned."""

    def __init__(self, outbox: Outbox, is_cancelled: Callable[[], bool]) -> None:
        self._outbox = outbox
        self._is_cancelled = is_cancelled

    def send(self, response: InferenceResponse | None = None, flags: int = 0) -> None:
        """Send the response; with TRITONSERVER_RESPONSE_COMPLETE_FINAL as flag nothing follows.

        Its arrays are copied. Raises TritonModelException for a second response, and for a final
        flag before the first.
        """
        outbox = self._outbox
        if response is None and not flags:
            raise TritonModelException(
                "Inference Response object must be provided when the response flags is set to zero."
            )
        if flags not in (0, RESPONSE_COMPLETE_FINAL):
            raise TritonModelException("Unable to send response. Unsupported flag provided.")
        if response is not None and outbox.answer is not None:
            raise TritonModelException(
                "Unable to send response. Non-decoupled model cannot send more than one response."
            )
        if response is None and outbox.answer is None:
            raise TritonModelException(
                "Unable to send response. Non-decoupled model cannot send complete final before "
                "sending a response."
            )
        if outbox.closed:
            raise TritonModelException("Unable to send response. Response sender has been closed.")
        outbox.closed = flags == RESPONSE_COMPLETE_FINAL
        if response is not None:
            outbox.answer = _snapshot(to_answer(response))
            outbox.finish()

    def is_cancelled(self) -> bool:
        """Whether nobody waits for the response any more."""
        return self._is_cancelled()

    def __del__(self) -> None:
        self._outbox.finish()


def _snapshot(answer: Answer) -> Answer:
    """The model goes on, and may reuse its arrays, before the answer is written."""
    answer.outputs = [
        output._replace(
            data=output.data.copy() if isinstance(output.data, np.ndarray) else output.data.clone()
        )
        for output in answer.outputs
    ]
    return answer
