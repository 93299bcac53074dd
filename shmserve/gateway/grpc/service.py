"""The table of RPCs, and the dispatcher that looks up, authorises and handles each call.

Errors become the status of the call. A call of ModelInfer is handled without a task.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from google.protobuf.message import DecodeError, Message

from shmserve.common.auth_tokens import MODEL_METADATA
from shmserve.errors import ShmserveError
from shmserve.gateway.context import Gateway
from shmserve.gateway.grpc.admin import AdminCall, reflect, serving_status
from shmserve.gateway.grpc.call import Carrier, GrpcCall, StreamHandler, StreamingCall, UnaryCall
from shmserve.gateway.grpc.framing import (
    INTERNAL_FAILURE,
    MISSING_REQUEST,
    UNKNOWN_METHOD,
    CallHead,
    CreateSink,
    Status,
    StatusCode,
    status_from_error,
)
from shmserve.gateway.grpc.infer import Inferences
from shmserve.gateway.grpc.stream_infer import stream_infer
from shmserve.gateway.http2.outgoing import Stream
from shmserve.gateway.listener import ClientIdentity
from shmserve.proto import grpc_service_pb2 as pb
from shmserve.proto.health_pb2 import HealthCheckRequest

logger = logging.getLogger(__name__)


Handler = Callable[[AdminCall, Any], Awaitable[Message | None]]


@dataclass(frozen=True, slots=True)
class Rpc:
    """An RPC: the scope that authorises it (common/auth_tokens.py), and its method of `AdminCall`.

    `Service` handles RPCs without such a method itself.
    """

    scope: str
    request_class: type[Message] | None = None
    handler: Handler | None = None


_ADMIN_RPCS: tuple[tuple[str, type[Message], Handler], ...] = (
    ("health", pb.ServerLiveRequest, AdminCall.server_live),
    ("health", pb.ServerReadyRequest, AdminCall.server_ready),
    ("health", pb.ModelReadyRequest, AdminCall.model_ready),
    ("metadata", pb.ServerMetadataRequest, AdminCall.server_metadata),
    (MODEL_METADATA, pb.ModelMetadataRequest, AdminCall.model_metadata),
    ("model-config", pb.ModelConfigRequest, AdminCall.model_config),
    ("statistics", pb.ModelStatisticsRequest, AdminCall.model_statistics),
    ("model-repository", pb.RepositoryIndexRequest, AdminCall.repository_index),
    ("model-repository", pb.RepositoryModelLoadRequest, AdminCall.repository_model_load),
    ("model-repository", pb.RepositoryModelUnloadRequest, AdminCall.repository_model_unload),
    ("shared-memory", pb.SystemSharedMemoryStatusRequest, AdminCall.system_status),
    ("shared-memory", pb.SystemSharedMemoryRegisterRequest, AdminCall.system_register),
    ("shared-memory", pb.SystemSharedMemoryUnregisterRequest, AdminCall.system_unregister),
    ("shared-memory", pb.CudaSharedMemoryStatusRequest, AdminCall.cuda_status),
    ("shared-memory", pb.CudaSharedMemoryRegisterRequest, AdminCall.cuda_register),
    ("shared-memory", pb.CudaSharedMemoryUnregisterRequest, AdminCall.cuda_unregister),
    ("trace", pb.TraceSettingRequest, AdminCall.trace_setting),
    ("logging", pb.LogSettingsRequest, AdminCall.log_settings),
)

_TRITON_SERVICE = "/inference.GRPCInferenceService/"
_HEALTH_SERVICE = "/grpc.health.v1.Health/"
MODEL_INFER = _TRITON_SERVICE + "ModelInfer"
MODEL_STREAM_INFER = _TRITON_SERVICE + "ModelStreamInfer"
HEALTH_WATCH = _HEALTH_SERVICE + "Watch"
_REFLECTION = "/grpc.reflection.{}.ServerReflection/ServerReflectionInfo"
REFLECTION_METHODS = (_REFLECTION.format("v1"), _REFLECTION.format("v1alpha"))

RPCS: dict[str, Rpc] = {
    MODEL_INFER: Rpc("inference"),
    MODEL_STREAM_INFER: Rpc("inference"),
    HEALTH_WATCH: Rpc("health"),
    **dict.fromkeys(REFLECTION_METHODS, Rpc("metadata")),
    _HEALTH_SERVICE + "Check": Rpc("health", HealthCheckRequest, AdminCall.check),
    **{
        _TRITON_SERVICE + message.__name__.removesuffix("Request"): Rpc(scope, message, handler)
        for scope, message, handler in _ADMIN_RPCS
    },
}

CallFactory = Callable[[Carrier, Stream, CallHead], GrpcCall]


class Service:
    """The dispatcher of calls, which begins the calls that the listener's rules allow."""

    def __init__(self, gateway: Gateway, inferences: Inferences) -> None:
        self._gateway = gateway
        self._tasks: set[asyncio.Task[None]] = set()
        self._factories: dict[str, CallFactory] = {
            path: partial(UnaryCall, on_message=self._create_task_handler(path, rpc))
            for path, rpc in RPCS.items()
            if rpc.handler is not None
        }
        infer, create_sink = inferences.infer, inferences.create_sink
        self._factories[MODEL_INFER] = partial(UnaryCall, on_message=infer, create_sink=create_sink)
        handler = partial(stream_infer, inferences)
        self._factories[MODEL_STREAM_INFER] = _stream_factory(handler, create_sink=create_sink)
        self._factories[HEALTH_WATCH] = _stream_factory(
            self._watch_health, has_message_timeout=True
        )
        for path in REFLECTION_METHODS:
            self._factories[path] = _stream_factory(reflect)

    def begin_call(self, connection: Carrier, stream: Stream, head: CallHead) -> GrpcCall:
        """Begin a call, and return it.

        A refused call has ended already: its messages, which can be large, are not received.
        """
        create_call = self._factories.get(head.path)
        refusal = head.refusal
        if refusal is None and create_call is not None:
            if not connection.requires_authorisation:
                return create_call(connection, stream, head)
            error = _find_access_error(connection.client, RPCS[head.path].scope, head)
            if error is None:
                return create_call(connection, stream, head)
            refusal = status_from_error(error)
        call = UnaryCall(connection, stream, head, _ignore_message)
        call.fail(refusal or UNKNOWN_METHOD)
        return call

    def _create_task_handler(self, path: str, rpc: Rpc) -> Callable[[bytes, UnaryCall], None]:
        """Return the handler of an RPC of `AdminCall`, which creates a task for each call."""
        assert rpc.handler is not None and rpc.request_class is not None
        handle, parse = rpc.handler, rpc.request_class.FromString

        async def respond(encoded_request: bytes, call: UnaryCall) -> None:
            try:
                request = parse(encoded_request)
                response = await handle(AdminCall(self._gateway, call.client), request)
                call.finish(b"" if response is None else response.SerializeToString())
            except DecodeError:
                call.fail(Status(StatusCode.INVALID_ARGUMENT, f"malformed request of {path}"))
            except ShmserveError as error:
                call.fail(status_from_error(error))
            except Exception:
                logger.exception("gRPC call %s failed", path)
                call.fail(INTERNAL_FAILURE)

        def start_task(encoded_request: bytes, call: UnaryCall) -> None:
            task = asyncio.ensure_future(respond(encoded_request, call))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
            call.on_disconnect = task.cancel

        return start_task

    async def _watch_health(self, call: StreamingCall) -> Status | None:
        async for _ in call.read_messages():
            break
        else:
            return MISSING_REQUEST
        sent_status = None
        while True:
            health_event = self._gateway.health_changed
            status = serving_status(self._gateway)
            if status != sent_status:
                sent_status = status
                await call.write_all([status.SerializeToString()])
            await health_event.wait()


def _find_access_error(client: ClientIdentity, scope: str, head: CallHead) -> ShmserveError | None:
    """Return the error if a client may not use the API of this scope."""
    rules = client.listener.authorisation
    metadata = {key: value for key, value in head.metadata if type(value) is str}
    if client.is_server_user:
        return rules.refuse_restricted(scope, metadata)
    return rules.authorise(scope, metadata)


def _ignore_message(_: bytes, call: UnaryCall) -> None:
    """Ignore the message of a call that has ended."""


def _stream_factory(
    handler: StreamHandler,
    *,
    has_message_timeout: bool = False,
    create_sink: CreateSink | None = None,
) -> CallFactory:
    """Return the factory of streaming calls.

    Args:
        handler: The handler of the call's messages.
        has_message_timeout: Whether the first message has a time limit.
        create_sink: The factory of the sinks that receive large messages.
    """

    def create_call(connection: Carrier, stream: Stream, head: CallHead) -> StreamingCall:
        call = StreamingCall(connection, stream, head, create_sink)
        if has_message_timeout:
            call.start_time_limit()
        call.run(handler)
        return call

    return create_call
