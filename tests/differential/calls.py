"""Requests over gRPC, and their responses as values that can be compared."""

import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import tritonclient.grpc as grpc
from tritonclient.utils import InferenceServerException, triton_to_np_dtype

from tests.differential.script import Send

_TIME_FIELDS = {"ns", "last_inference", "memory_usage"}


class Call:
    """A request under way."""

    def __init__(self, address: str, request: Send) -> None:
        self._client = grpc.InferenceServerClient(address)
        self._messages: list[Any] = []
        self._request = request
        self.is_done = False
        outputs = [grpc.InferRequestedOutput(name) for name in request.outputs] or None
        options: dict[str, Any] = {
            "request_id": request.label,
            "outputs": outputs,
            "sequence_id": request.sequence,
            "sequence_start": request.start,
            "sequence_end": request.end,
            "priority": request.priority,
            "timeout": request.timeout_us or None,
        }
        if request.stream:
            self._client.start_stream(self._came)
            options["enable_empty_final_response"] = True
            self._client.async_stream_infer(request.model, _inputs(request), **options)
        else:
            self._context = self._client.async_infer(
                request.model, _inputs(request), self._came, **options
            )

    def _came(
        self, result: grpc.InferResult | None, error: InferenceServerException | None
    ) -> None:
        if result is None:
            self._messages.append({"error": _error(error)})
            self.is_done = True
            return
        response = result.get_response()
        final = response.parameters["triton_final_response"].bool_param
        description: dict[str, Any] = {"id": response.id, "version": response.model_version}
        description["outputs"] = {o.name: _read_output(result, o) for o in response.outputs}
        description["parameters"] = sorted(set(response.parameters) - {"triton_final_response"})
        self._messages.append(description | ({"final": final} if self._request.stream else {}))
        self.is_done = final or not self._request.stream

    def cancel(self) -> None:
        if self._request.stream:
            self._client.stop_stream(cancel_requests=True)
            self.is_done = True
        else:
            self._context.cancel()

    def outcome(self) -> Any:
        """Return the outcome of a call: one response or error, or a list for a stream."""
        return self._messages if self._request.stream else self._messages[0]

    def close(self) -> None:
        self._client.close()


class Caller:
    """Whom the requests of a script are sent to."""

    def __init__(self, address: str) -> None:
        self._address = address

    def send_request(self, request: Send) -> Call:
        """Send the request over a connection of its own."""
        return Call(self._address, request)

    def statistics(self, model: str) -> Any:
        """Return the statistics without times once they no longer change."""
        with grpc.InferenceServerClient(self._address) as client:
            previous: Any = None
            while True:
                statistics = client.get_inference_statistics(model, as_json=True)
                if statistics == previous:
                    return _without_times(statistics["model_stats"][0])
                previous = statistics
                time.sleep(0.15)


def _inputs(request: Send) -> list[grpc.InferInput]:
    fields: dict[str, tuple[str, Sequence[int], Sequence[Any]]] = dict(request.inputs)
    if request.value is not None:
        elements = [request.value] * (request.rows * request.columns)
        fields["INPUT0"] = ("INT32", (request.rows, request.columns), elements)
    calls = []
    for name, (datatype, shape, values) in fields.items():
        infer_input = grpc.InferInput(name, list(shape), datatype)
        kind = np.object_ if datatype == "BYTES" else triton_to_np_dtype(datatype)
        infer_input.set_data_from_numpy(np.array(values, kind).reshape(list(shape)))
        calls.append(infer_input)
    return calls


def _error(error: InferenceServerException | None) -> list[str]:
    return [str(error.status()), str(error.message())] if error else []


def _read_output(result: grpc.InferResult, output: Any) -> list[Any]:
    values = result.as_numpy(output.name).reshape(-1).tolist()
    values = [value.decode() if isinstance(value, bytes) else value for value in values]
    return [output.datatype, list(output.shape), values]


def _without_times(tree: Any) -> Any:
    """Return the counts without times and empty or zero fields, which protobuf may omit."""
    if isinstance(tree, dict):
        rest = {
            key: _without_times(value) for key, value in tree.items() if key not in _TIME_FIELDS
        }
        return {key: value for key, value in rest.items() if value not in ({}, [], "0", 0)}
    if isinstance(tree, list):
        return [_without_times(part) for part in tree]
    return tree
