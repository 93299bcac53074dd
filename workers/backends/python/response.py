"""Responses as models of the Python backend give them, and get them from other models."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from shmserve.errors import ShmserveError
from shmserve.workers.backends.python.errors import (
    TritonError,
    TritonModelException,
    to_model,
    to_server,
)
from shmserve.workers.backends.python.tensor import Tensor
from shmserve.workers.batch.request import Response
from shmserve.workers.bls.request import CallResponse
from shmserve.workers.bls.streams import StreamCall

_INT64 = 2**63


def checked_parameters(parameters: Any) -> dict[str, bool | int | str]:
    """Custom parameters from a model; raises TritonModelException where one is none."""
    if parameters is None:
        return {}
    if not isinstance(parameters, dict):
        raise TritonModelException(f"Expect dict, got {type(parameters)}")
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


def to_response(response: InferenceResponse) -> Response:
    """A model's response as the server carries it."""
    error = response._error
    if error is not None:
        return Response(error=to_server(error))
    return Response([tensor.as_output() for tensor in response._outputs], response._parameters)


def from_call(response: CallResponse) -> InferenceResponse:
    """Another model's response as a model sees it."""
    made = InferenceResponse([Tensor.of_input(output, None) for output in response.outputs])
    made._parameters = response.parameters
    return made


def from_error(error: ShmserveError) -> InferenceResponse:
    """The error of another model as a model sees it."""
    return InferenceResponse(error=to_model(error))


class ResponseIterator:
    """The responses to a call, each when it comes; once all have, it can be iterated again.

    Letting go of it cancels the call.
    """

    def __init__(self, call: StreamCall | None, *responses: InferenceResponse) -> None:
        self._call = call  # None: all have come
        self._responses = list(responses)
        self._next = 0

    def __iter__(self) -> ResponseIterator:
        if self._call is None:
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
        """Ask for no more responses: those that have not come yet will not."""
        call, self._call = self._call, None
        if call is not None:
            call.cancel()

    def __del__(self) -> None:
        self.cancel()
