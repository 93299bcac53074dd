"""Clients on the server's host: `NativeTransport` and `NativeLaneFactory`.

`NativeTransport` blocks and uses `shmserve.client`. The lanes of `NativeLaneFactory` use that
client's request channel in the event loop of the load generator.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from shmserve.client.memory.region import Region, Specs
from shmserve.client.memory.views import noop
from shmserve.client.request.arrays import Array
from shmserve.client.request.channel import ClientRequest, RequestChannel
from shmserve.client.request.prepare import PLAIN
from shmserve.client.request.waiting import ClientStream
from shmserve.client.server_state import ClientModel
from shmserve.client.session import Call, Session, call_of
from shmserve.client.sync import Server
from shmserve.errors import ShmserveError
from shmserve.ipc.tensors.arrays import STORAGE_DTYPES, decode_bytes, encode_bytes
from shmserve.ipc.tensors.datatypes import TO_CONFIG
from shmserve.protocols import (
    InputTensor,
    LaneObserver,
    OutgoingRequest,
    TransportError,
    output_json,
    response_json,
)
from shmserve.protocols.connection import EventLoop
from shmserve.protocols.tensors import ModelTensor

_MAX_MEMORY_BYTES = 1 << 40  # no limit: the requests in flight bound the memory
_CONNECT_TIMEOUT_S = 10.0


class NativeTransport:
    """A transport to the server of a run directory. Raises Disconnected if there is no server."""

    def __init__(self, run_dir: Path) -> None:
        self.address_text = str(run_dir)
        self._session = Session(run_dir, _MAX_MEMORY_BYTES, _CONNECT_TIMEOUT_S)
        self._server = Server(self._session)

    def inputs(self, model: str, version: str) -> dict[str, ModelTensor]:
        """Return the inputs in the signature that the server sent at connection."""
        signature = self._resolve(model, version).signature
        batch_dims = (-1,) if signature.max_batch_size else ()
        inputs = signature.inputs.items()
        return {n: ModelTensor(n, spec.datatype, (*batch_dims, *spec.dims)) for n, spec in inputs}

    def config(self, model: str, version: str) -> dict[str, Any]:
        """Return the part of a model's configuration that the server sends to local clients."""
        client_model = self._resolve(model, version)
        outputs = client_model.signature.outputs.items()
        return {
            "max_batch_size": client_model.signature.max_batch_size,
            "output": [
                {"name": name, "data_type": TO_CONFIG[spec.datatype], "dims": list(spec.dims)}
                for name, spec in outputs
            ],
            "model_transaction_policy": {"decoupled": client_model.decoupled},
        }

    def stats(self, model: str, version: str) -> list[dict[str, Any]]:
        """Return an empty list: the server offers statistics over HTTP and gRPC only."""
        return []

    def _resolve(self, model: str, version: str) -> ClientModel:
        try:
            connection = self._session.connection()
            self._session.load(connection, model, version, PLAIN)
            return connection.models.resolve(model, version)
        except ShmserveError as error:
            raise TransportError(error.message) from error

    def infer(self, request: OutgoingRequest) -> Iterator[dict[str, Any]]:
        """Send a request as a stream, which every model supports, and yield its responses."""
        try:
            model = self._resolve(request.model, request.version)
            types = {name: spec.datatype for name, spec in model.signature.outputs.items()}
            with self._server.stream(
                request.model,
                {tensor.name: tensor_array(tensor, request.model) for tensor in request.inputs},
                outputs=request.outputs or None,
                **_call_options(request),
            ) as results:
                for result in results:
                    outputs = [_encode_output(name, types[name], result[name]) for name in result]
                    response_ids = (request.model, model.version, request.id)
                    yield response_json(*response_ids, result.parameters, outputs)
        except ShmserveError as error:
            raise TransportError(error.message) from error

    def close(self) -> None:
        """Disconnect from the server."""
        self._server.close()


def _call_options(request: OutgoingRequest) -> dict[str, Any]:
    timeout_s = request.timeout_us / 1e6 if request.timeout_us else None
    call_options = {"version": request.version, "timeout": timeout_s, "request_id": request.id}
    sequence = {"sequence": request.sequence or 0, "start": request.is_start, "end": request.is_end}
    return {**call_options, **sequence, "parameters": request.parameters}


def tensor_array(tensor: InputTensor, model: str) -> Array:
    """Return an input as an array for a request of the client."""
    if tensor.datatype == "BYTES":
        return decode_bytes(tensor.raw, tuple(tensor.shape), tensor.name, model)
    return np.frombuffer(tensor.raw, STORAGE_DTYPES[tensor.datatype]).reshape(tensor.shape)


def _encode_output(name: str, datatype: str, array: Array) -> dict[str, Any]:
    data = encode_bytes(array) if datatype == "BYTES" else array.tobytes()
    return output_json(name, datatype, array.shape, data)


class NativeLaneFactory:
    """A factory of lanes for a program on the server's host.

    Tensors are in a region on the `device` "cpu" or "cuda:0"; with "" they are copied.
    """

    def __init__(
        self,
        run_dir: Path,
        loop: EventLoop,
        *,
        is_decoupled: bool,
        device: str = "",
        output_specs: Specs | None = None,
    ) -> None:
        """Connect to the server.

        Args:
            run_dir: The run directory of the server.
            loop: The event loop of the lanes.
            is_decoupled: Whether a request may have many responses.
            device: The device of the region with the tensors, or "" to copy tensors.
            output_specs: The shape and datatype of each output with space in the region.

        Raises:
            Disconnected: There is no server.
        """
        self.is_decoupled = is_decoupled
        self.loop = loop
        self._device = device
        self._output_specs = output_specs or {}
        self.session = Session(run_dir, _MAX_MEMORY_BYTES, _CONNECT_TIMEOUT_S)
        self.connection = self.session.connection()
        self.channel = RequestChannel(self.connection, self._watch, loop.unwatch)
        self.regions: list[Region] = []

    def _watch(self, fd: int) -> None:
        self.loop.watch(fd, lambda _: self.channel.process_events((fd,)))

    def encode(self, request: OutgoingRequest) -> Call:
        """Return a call; if a device is set, its tensors are in a region with the outputs."""
        arrays: Any = {item.name: tensor_array(item, request.model) for item in request.inputs}
        if self._device:
            arrays = self._copy_to_region(request.inputs, arrays)
        return call_of(request.model, arrays, **_call_options(request))

    def _copy_to_region(self, inputs: Sequence[InputTensor], arrays: dict[str, Any]) -> Region:
        specs = {tensor.name: (tensor.shape, tensor.datatype) for tensor in inputs}
        region = self.session.allocate({**specs, **self._output_specs}, device=self._device)
        self.regions.append(region)
        for name, array in arrays.items():
            view = region[name]
            view.fill(array) if self._device != "cpu" else np.copyto(view, array)
        return region

    def lane(self, observer: LaneObserver) -> NativeLane:
        """Open a lane on the channel."""
        return NativeLane(self, observer)

    def close(self) -> None:
        """Disconnect from the server."""
        self.channel.close()
        self.session.close()


class NativeLane:
    """A lane on the request channel of the factory."""

    def __init__(self, lane_factory: NativeLaneFactory, observer: LaneObserver) -> None:
        self._lane_factory = lane_factory
        self._observer = observer
        self._stream_error = ""  # the first error of the current stream

    def send(self, request: Call) -> None:
        """Queue a request."""
        self._stream_error = ""
        lane_factory = self._lane_factory
        session, connection = lane_factory.session, lane_factory.connection
        built_request = session.pack(connection, request, stream=lane_factory.is_decoupled)
        if lane_factory.is_decoupled:
            pending_request = ClientStream(lane_factory.channel, built_request)
            pending_request.on_item = partial(self._on_responses, pending_request)
            lane_factory.channel.start(pending_request)
        else:
            lane_factory.channel.submit(built_request, self._on_completed)
        lane_factory.channel.flush_soon(lane_factory.loop.call_soon)

    def _on_completed(self, request: ClientRequest) -> None:
        outcome, request.outcome = request.outcome, None
        self._end(outcome.message if isinstance(outcome, ShmserveError) else "")

    def _on_responses(self, pending_request: ClientStream) -> None:
        while pending_request.items:
            try:
                pending_request.take()
                self._observer.on_response()
            except ShmserveError as failure:
                self._stream_error = self._stream_error or failure.message
            credit = pending_request.record_read()
            if credit:
                channel = self._lane_factory.channel
                channel.schedulers.credit(pending_request, credit)
                channel.flush_soon(self._lane_factory.loop.call_soon)
        if pending_request.has_finished:
            pending_request.on_item = noop
            pending_request.abandon()
            self._end(self._stream_error)

    def _end(self, error: str) -> None:
        if error:
            # Deferred, because a request may fail in `send`, and the observer sends the next one.
            self._lane_factory.loop.call_soon(partial(self._observer.on_end, error))
        else:
            self._observer.on_end()

    def close(self) -> None:
        """Do nothing: the factory closes the channel."""
