"""Requests as the programs on the server's host make them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from shmserve.cli.client_tensors import ModelTensor
from shmserve.cli.transports import InputTensor, OutgoingRequest, TransportError, output, response
from shmserve.client.request.arrays import Array, dtype_of
from shmserve.client.request.options import PLAIN
from shmserve.client.session import Session
from shmserve.client.sync import Server
from shmserve.errors import ShmserveError
from shmserve.ipc.tensors.arrays import decode_bytes, encode_bytes

_MEMORY_LIMIT = 1 << 40  # what the request and its responses take
_WELCOME_WITHIN_S = 10.0


class NativeTransport:
    """The server of a run directory. Raises Disconnected when there is none."""

    def __init__(self, run_dir: Path) -> None:
        self.where = str(run_dir)
        self._session = Session(run_dir, _MEMORY_LIMIT, _WELCOME_WITHIN_S)
        self._server = Server(self._session)

    def inputs(self, model: str, version: str) -> dict[str, ModelTensor]:
        """As the server has told when it was connected to."""
        try:
            connection = self._session.connection()
            self._session.load(connection, model, version, PLAIN)
            signature = connection.models.resolve(model, version).signature
        except ShmserveError as error:
            raise TransportError(error.message) from error
        batch = (-1,) if signature.max_batch_size else ()
        return {
            name: ModelTensor(name, spec.datatype, (*batch, *spec.dims))
            for name, spec in signature.inputs.items()
        }

    def infer(self, request: OutgoingRequest) -> Iterator[dict[str, Any]]:
        """One request to the model's scheduler, which any model takes for a stream."""
        timeout_s = request.timeout_us / 1e6 if request.timeout_us else None
        try:
            connection = self._session.connection()
            self._session.load(connection, request.model, request.version, PLAIN)
            model = connection.models.resolve(request.model, request.version)
            datatypes = {name: spec.datatype for name, spec in model.signature.outputs.items()}
            with self._server.stream(
                request.model,
                {tensor.name: array_of(tensor, request.model) for tensor in request.inputs},
                outputs=request.outputs or None,
                version=request.version,
                timeout=timeout_s,
                request_id=request.id,
                sequence=request.sequence,
                start=request.start,
                end=request.end,
            ) as results:
                for result in results:
                    outputs = [_output(name, datatypes[name], result[name]) for name in result]
                    named = (request.model, model.version, request.id)
                    yield response(*named, result.parameters, outputs)
        except ShmserveError as error:
            raise TransportError(error.message) from error

    def close(self) -> None:
        """Leave the server."""
        self._server.close()


def array_of(tensor: InputTensor, model: str) -> Array:
    """The array that an input is, for a request of the client."""
    if tensor.datatype == "BYTES":
        return decode_bytes(tensor.raw, tuple(tensor.shape), tensor.name, model)
    return np.frombuffer(tensor.raw, dtype_of(tensor.datatype)).reshape(tensor.shape)


def _output(name: str, datatype: str, array: Array) -> dict[str, Any]:
    raw = encode_bytes(array) if datatype == "BYTES" else array.tobytes()
    return output(name, datatype, array.shape, raw)
