"""Requests over gRPC (the extra `grpc`)."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import grpc
from google.protobuf.message import Message

from shmserve.cli.client_tensors import ModelTensor
from shmserve.cli.transports import (
    NOT_READY,
    Address,
    Credentials,
    OutgoingRequest,
    TransportError,
    output,
    response,
)
from shmserve.proto import grpc_service_pb2

pb: Any = grpc_service_pb2

_SERVICE = "/inference.GRPCInferenceService/"
_FINAL = "triton_final_response"  # of the stream, not of the model
_UNLIMITED = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]


class GrpcTransport:
    """A server at an address of gRPC."""

    def __init__(self, address: Address, credentials: Credentials) -> None:
        self.where = address.where
        self._metadata = [(name.lower(), value) for name, value in credentials.headers]
        self._channel = (
            grpc.secure_channel(address.target, _tls(credentials), _UNLIMITED)
            if address.tls
            else grpc.insecure_channel(address.target, _UNLIMITED)
        )

    def inputs(self, model: str, version: str) -> dict[str, ModelTensor]:
        """ModelMetadata."""
        metadata = self._call("ModelMetadata", name=model, version=version)
        return {
            tensor.name: ModelTensor(tensor.name, tensor.datatype, tuple(tensor.shape))
            for tensor in metadata.inputs
        }

    def infer(self, request: OutgoingRequest) -> Iterator[dict[str, Any]]:
        """ModelStreamInfer, which any model takes."""
        call = self._channel.stream_stream(
            _SERVICE + "ModelStreamInfer",
            pb.ModelInferRequest.SerializeToString,
            pb.ModelStreamInferResponse.FromString,
        )
        with _failing():
            for told in call(iter([infer_message(request)]), metadata=self._metadata):
                if told.error_message:
                    raise TransportError(told.error_message)
                yield _response(told.infer_response)

    def ready(self, model: str, version: str) -> None:
        """ServerReady, or ModelReady."""
        if not model and not self._call("ServerReady").ready:
            raise TransportError(NOT_READY)
        if model and not self._call("ModelReady", name=model, version=version).ready:
            raise TransportError("Model version not ready")

    def models(self) -> list[dict[str, Any]]:
        """RepositoryIndex."""
        rows = [as_json(row) for row in self._call("RepositoryIndex").models]
        return [{name: text for name, text in row.items() if text} for row in rows]

    def load(self, model: str, config: Mapping[str, Any] | None = None) -> None:
        """RepositoryModelLoad."""
        given = pb.ModelRepositoryParameter(string_param=json.dumps(config))
        parameters = {"config": given} if config else {}
        self._call("RepositoryModelLoad", model_name=model, parameters=parameters)

    def unload(self, model: str) -> None:
        """RepositoryModelUnload."""
        self._call("RepositoryModelUnload", model_name=model)

    def stats(self, model: str, version: str) -> list[dict[str, Any]]:
        """ModelStatistics."""
        found = self._call("ModelStatistics", name=model, version=version)
        return [as_json(row) for row in found.model_stats]

    def config(self, model: str, version: str) -> dict[str, Any]:
        """ModelConfig."""
        found = self._call("ModelConfig", name=model, version=version)
        return dict(as_json(found.config))

    def regions(self) -> list[dict[str, Any]]:
        """SystemSharedMemoryStatus and CudaSharedMemoryStatus."""
        return [
            as_json(found.regions[name])
            for kind in ("System", "Cuda")
            for found in [self._call(f"{kind}SharedMemoryStatus")]
            for name in sorted(found.regions)
        ]

    def register(self, kind: str, name: str, fields: Mapping[str, Any]) -> None:
        """SystemSharedMemoryRegister, or of CUDA."""
        self._call(f"{kind.title()}SharedMemoryRegister", name=name, **fields)

    def unregister(self, kind: str, name: str) -> None:
        """SystemSharedMemoryUnregister, or of CUDA."""
        self._call(f"{kind.title()}SharedMemoryUnregister", name=name)

    def _call(self, method: str, **fields: Any) -> Any:
        request = getattr(pb, f"{method}Request")(**fields)
        call = self._channel.unary_unary(
            _SERVICE + method,
            type(request).SerializeToString,
            getattr(pb, f"{method}Response").FromString,
        )
        with _failing():
            return call(request, metadata=self._metadata)

    def close(self) -> None:
        """Close the channel."""
        self._channel.close()


@contextlib.contextmanager
def _failing() -> Iterator[None]:
    try:
        yield
    except grpc.RpcError as error:
        text = error.details() or str(error.code())
        if error.code() is grpc.StatusCode.UNAVAILABLE and "connect" in text:
            text = f"no answer: {text}"
        raise TransportError(text) from error


def _tls(credentials: Credentials) -> grpc.ChannelCredentials:
    credentials.tls()  # says what is wrong with a file, which gRPC does not
    files = (credentials.root_cert, credentials.client_key, credentials.client_cert)
    return grpc.ssl_channel_credentials(
        *(Path(file).read_bytes() if file else None for file in files)
    )


def infer_message(request: OutgoingRequest) -> Any:
    """The ModelInferRequest."""
    asked = pb.ModelInferRequest(
        model_name=request.model, model_version=request.version, id=request.id
    )
    if request.timeout_us:
        asked.parameters["timeout"].int64_param = request.timeout_us
    set_parameters(asked, request.sequence_parameters())
    for tensor in request.inputs:
        made = asked.inputs.add(name=tensor.name, datatype=tensor.datatype, shape=tensor.shape)
        if tensor.part:
            set_parameters(made, tensor.part.parameters())
        else:
            asked.raw_input_contents.append(tensor.raw)
    for name in request.outputs:
        wanted = asked.outputs.add(name=name)
        if name in request.parts:
            set_parameters(wanted, request.parts[name].parameters())
    return asked


def set_parameters(message: Any, values: Mapping[str, int | str | bool]) -> None:
    """Set parameters of a request, an input or an output."""
    for name, value in values.items():
        if isinstance(value, bool):
            message.parameters[name].bool_param = value
        elif isinstance(value, int):
            # The protocol has no other integers for it; the server reads it without the sign.
            message.parameters[name].int64_param = (value + 2**63) % 2**64 - 2**63
        else:
            message.parameters[name].string_param = value


def as_json(found: Any, field: Any = None) -> Any:
    """A message, or the value of a field, as HTTP has it in JSON."""
    if isinstance(found, Message):
        return {
            each.name: as_json(getattr(found, each.name), each)
            for each in found.DESCRIPTOR.fields
            if not each.has_presence or found.HasField(each.name)
        }
    if isinstance(found, Mapping):
        return {key: as_json(found[key]) for key in sorted(found)}
    if isinstance(found, Sequence) and not isinstance(found, str):
        return [as_json(each, field) for each in found]
    if field is not None and field.enum_type is not None:
        return field.enum_type.values_by_number[found].name
    return found


def _response(found: Any) -> dict[str, Any]:
    try:
        outputs = [
            output(each.name, each.datatype, each.shape, raw)
            for each, raw in zip(found.outputs, found.raw_output_contents, strict=True)
        ]
    except (KeyError, ValueError) as error:
        raise TransportError("the server's response is malformed") from error
    parameters = {
        name: getattr(value, value.WhichOneof("parameter_choice"))
        for name, value in found.parameters.items()
        if name != _FINAL
    }
    return response(found.model_name, found.model_version, found.id, parameters, outputs)
