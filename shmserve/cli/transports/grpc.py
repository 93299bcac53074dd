"""Requests over gRPC (the extra `grpc`)."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import grpc

from shmserve.cli.client_tensors import ModelTensor
from shmserve.cli.transports import OutgoingRequest, TransportError, output, response
from shmserve.proto import grpc_service_pb2

pb: Any = grpc_service_pb2

_SERVICE = "/inference.GRPCInferenceService/"
_FINAL = "triton_final_response"  # of the stream, not of the model
_UNLIMITED = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]


class GrpcTransport:
    """A server at `target`, HOST:PORT."""

    def __init__(self, target: str) -> None:
        self._target = target
        self._channel = grpc.insecure_channel(target, _UNLIMITED)

    def inputs(self, model: str, version: str) -> dict[str, ModelTensor]:
        """ModelMetadata."""
        asked = pb.ModelMetadataRequest(name=model, version=version)
        metadata = self._call("ModelMetadata", asked, pb.ModelMetadataResponse)
        return {
            tensor.name: ModelTensor(tensor.name, tensor.datatype, tuple(tensor.shape))
            for tensor in metadata.inputs
        }

    def infer(self, request: OutgoingRequest) -> Iterator[dict[str, Any]]:
        """ModelStreamInfer, which any model takes."""
        asked = pb.ModelInferRequest(
            model_name=request.model, model_version=request.version, id=request.id
        )
        if request.timeout_us:
            asked.parameters["timeout"].int64_param = request.timeout_us
        for name, value in request.sequence_parameters().items():
            if isinstance(value, bool):
                asked.parameters[name].bool_param = value
            elif isinstance(value, int):
                # The protocol has no other integers for it; the server reads it without the sign.
                asked.parameters[name].int64_param = (value + 2**63) % 2**64 - 2**63
            else:
                asked.parameters[name].string_param = value
        for tensor in request.inputs:
            asked.inputs.add(name=tensor.name, datatype=tensor.datatype, shape=tensor.shape)
            asked.raw_input_contents.append(tensor.raw)
        for name in request.outputs:
            asked.outputs.add(name=name)
        call = self._channel.stream_stream(
            _SERVICE + "ModelStreamInfer",
            pb.ModelInferRequest.SerializeToString,
            pb.ModelStreamInferResponse.FromString,
        )
        with self._failing():
            for told in call(iter([asked])):
                if told.error_message:
                    raise TransportError(told.error_message)
                yield _response(told.infer_response)

    def _call(self, method: str, request: Any, response: Any) -> Any:
        call = self._channel.unary_unary(
            _SERVICE + method, type(request).SerializeToString, response.FromString
        )
        with self._failing():
            return call(request)

    @contextlib.contextmanager
    def _failing(self) -> Iterator[None]:
        try:
            yield
        except grpc.RpcError as error:
            text = error.details() or str(error.code())
            if error.code() is grpc.StatusCode.UNAVAILABLE and "connect" in text:
                text = f"no answer from {self._target}: {text}"
            raise TransportError(text) from error

    def close(self) -> None:
        """Close the channel."""
        self._channel.close()


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
