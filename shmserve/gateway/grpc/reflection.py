"""grpc.reflection: a server's services and the files that describe them, so that clients such as
grpcurl need no .proto.

v1 and v1alpha have the same messages; the services that are listed are described in a file each.
"""

from __future__ import annotations

from typing import Any

from google.protobuf.message import DecodeError

from shmserve.gateway.grpc.calls.streaming_call import StreamingCall
from shmserve.gateway.grpc.status import Ending, StatusCode
from shmserve.proto import grpc_service_pb2, health_pb2, reflection_pb2
from shmserve.proto.reflection_pb2 import ServerReflectionRequest, ServerReflectionResponse

_FILES = (grpc_service_pb2, health_pb2, reflection_pb2)
_POOL = grpc_service_pb2.DESCRIPTOR.pool
_MALFORMED: Ending = (StatusCode.INVALID_ARGUMENT, "malformed request", ())


async def reflect(call: StreamingCall) -> Ending | None:
    """Handle a ServerReflectionInfo."""
    async for raw in call.requests():
        try:
            request = ServerReflectionRequest.FromString(raw)
        except DecodeError:
            return _MALFORMED
        await call.write_all([answer(request).SerializeToString()])
    return None


def answer(request: ServerReflectionRequest) -> ServerReflectionResponse:
    """The response to one question."""
    response = ServerReflectionResponse(valid_host=request.host, original_request=request)
    try:
        match request.WhichOneof("message_request"):
            case "list_services":
                for name in sorted(SERVICES):
                    response.list_services_response.service.add(name=name)
            case "file_by_filename":
                _describe(response, _POOL.FindFileByName(request.file_by_filename))
            case "file_containing_symbol":
                _describe(response, _file_of(request.file_containing_symbol))
            case "all_extension_numbers_of_type":
                symbol = request.all_extension_numbers_of_type
                _POOL.FindMessageTypeByName(symbol)
                response.all_extension_numbers_response.base_type_name = symbol
            case "file_containing_extension":
                number = request.file_containing_extension.extension_number
                raise KeyError(f"there is no extension {number}")
            case _:
                _refuse(response, StatusCode.INVALID_ARGUMENT, "an empty request")
    except KeyError as error:
        _refuse(response, StatusCode.NOT_FOUND, str(error.args[0]))
    return response


SERVICES = frozenset(
    service.full_name
    for module in _FILES
    for service in module.DESCRIPTOR.services_by_name.values()
)


def _file_of(symbol: str) -> Any:
    """The file that has a symbol; of a method, which the pool does not know by name, the one that
    has its service. Raises KeyError."""
    try:
        return _POOL.FindFileContainingSymbol(symbol)
    except KeyError:
        return _POOL.FindMethodByName(symbol).containing_service.file


def _describe(response: ServerReflectionResponse, file: Any) -> None:
    """Send a file, and behind it those that it imports."""
    waiting, sent = [file], set()
    while waiting:
        each = waiting.pop(0)
        if each.name not in sent:
            sent.add(each.name)
            response.file_descriptor_response.file_descriptor_proto.append(each.serialized_pb)
            waiting += each.dependencies


def _refuse(response: ServerReflectionResponse, code: StatusCode, text: str) -> None:
    response.error_response.error_code = code.value
    response.error_response.error_message = text
