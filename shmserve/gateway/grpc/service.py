"""The table of RPCs, and the dispatch of the calls that grpc.aio accepts: look up, authorise,
handle, errors mapped to a status. Most inferences do not come this way: infer_calls.py takes them
from gRPC's core, and authorises them itself.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import grpc
from google.protobuf.message import DecodeError, Message

from shmserve.errors import InvalidArgument, ShmserveError
from shmserve.gateway.context import Gateway
from shmserve.gateway.grpc.admin import AdminCall, serving
from shmserve.gateway.grpc.client_identity import Access
from shmserve.gateway.grpc.core.call_watchdog import Calls, Reading
from shmserve.gateway.grpc.infer import Inferences
from shmserve.gateway.grpc.infer_calls import InferenceCalls
from shmserve.gateway.grpc.status import INTERNAL, Ending, ending_of
from shmserve.proto import grpc_service_pb2 as pb
from shmserve.proto.health_pb2 import HealthCheckRequest

logger = logging.getLogger(__name__)


Handler = Callable[[AdminCall, Any], Awaitable[Message | None]]


@dataclass(frozen=True, slots=True)
class Rpc:
    """One RPC: the API it belongs to (`scope`, as common/access/auth_tokens.py has them), and
    the method `handler` of `AdminCall` for plain ones.

    Those without a handler are the `Service`'s own.
    """

    scope: str
    request: type[Message] | None = None
    handler: Handler | None = None


_PLAIN: tuple[tuple[str, type[Message], Handler], ...] = (
    ("health", pb.ServerLiveRequest, AdminCall.server_live),
    ("health", pb.ServerReadyRequest, AdminCall.server_ready),
    ("health", pb.ModelReadyRequest, AdminCall.model_ready),
    ("metadata", pb.ServerMetadataRequest, AdminCall.server_metadata),
    ("metadata", pb.ModelMetadataRequest, AdminCall.model_metadata),
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

_TRITON = "/inference.GRPCInferenceService/"
_HEALTH = "/grpc.health.v1.Health/"
MODEL_INFER = _TRITON + "ModelInfer"
MODEL_STREAM_INFER = _TRITON + "ModelStreamInfer"
HEALTH_WATCH = _HEALTH + "Watch"

RPCS: dict[str, Rpc] = {
    MODEL_INFER: Rpc("inference"),
    MODEL_STREAM_INFER: Rpc("inference"),
    HEALTH_WATCH: Rpc("health"),
    _HEALTH + "Check": Rpc("health", HealthCheckRequest, AdminCall.check),
    **{
        _TRITON + request.__name__.removesuffix("Request"): Rpc(scope, request, handler)
        for scope, request, handler in _PLAIN
    },
}


class Service(grpc.GenericRpcHandler):  # type: ignore[misc]
    """The dispatcher of grpc.aio's calls: finds the handler of each, if the listener's rules allow
    it.

    Messages go through as bytes: the handlers know best how to read and write theirs.
    """

    def __init__(
        self, gateway: Gateway, inferences: Inferences, access: Access, calls: Calls
    ) -> None:
        self._gateway = gateway
        self._inferences = inferences
        self._access = access
        self._calls = calls
        self._health_changed = asyncio.Event()
        self.inference = InferenceCalls(gateway, inferences, access, calls)
        self._handlers: dict[str, Any] = {
            path: self._unary(self._plain(path, rpc))
            for path, rpc in RPCS.items()
            if rpc.handler is not None
        }
        self._handlers[MODEL_INFER] = self._unary(self.inference.infer)
        self._handlers[MODEL_STREAM_INFER] = self.inference.stream_handler
        self._handlers[HEALTH_WATCH] = grpc.stream_stream_rpc_method_handler(self._watch)

    def service(self, call: grpc.HandlerCallDetails) -> Any:
        """The handler for a call, or one that refuses it; None for an unknown method. Calls of the
        methods that are registered with gRPC's core (core_call.py) do not pass here."""
        handler = self._handlers.get(call.method)
        if handler is None:
            return None
        error = self._access.refuse(RPCS[call.method].scope, lambda: call.invocation_metadata)
        return handler if error is None else _refusal(error)

    @property
    def infer_handler(self) -> Any:
        """grpc.aio's handler of ModelInfer where its calls do not pass `service`."""
        return self._unary(self.inference.infer, self.inference.refusal)

    def health_changed(self) -> None:
        """Wake the Watch calls."""
        self._health_changed.set()
        self._health_changed = asyncio.Event()

    def _plain(self, path: str, rpc: Rpc) -> Callable[[bytes, Any], Awaitable[bytes | Ending]]:
        assert rpc.handler is not None and rpc.request is not None
        handle, parse = rpc.handler, rpc.request.FromString

        async def respond(raw: bytes, context: Any) -> bytes | Ending:
            try:
                try:
                    request = parse(raw)
                except DecodeError:
                    raise InvalidArgument("malformed request") from None
                call = AdminCall(self._gateway, self._access.client(context))
                response = await handle(call, request)
                return b"" if response is None else response.SerializeToString()
            except ShmserveError as error:
                return ending_of(error)
            except Exception:
                logger.exception("%s failed", path)
                return INTERNAL

        return respond

    def _unary(
        self,
        respond: Callable[[bytes, Any], Awaitable[bytes | Ending]],
        refuse: Callable[[Any], Ending | None] = lambda _: None,
    ) -> Any:
        """grpc.aio's handler of a call with one request, whose response `respond` gives, unless
        `refuse` gives what the call ends with.

        To gRPC it is one with many, so that it begins before its request is here.

        gRPC keeps the exception that `abort` raises for as long as the call's context lives, and
        that is in a cycle with it: no frame that it goes through may hold the request, which can be
        large.
        """

        async def run(_: Any, context: Any) -> bytes:
            if (ending := refuse(context)) is not None:
                await context.abort(*ending)
            with Reading(self._calls, context) as reading:
                raw = await reading.request()
                if self._inferences.came():
                    context.add_done_callback(lambda _: self._inferences.left())
                responding = respond(raw, context)
                del raw
                outcome = await responding
            if type(outcome) is bytes:
                return outcome
            await context.abort(*outcome)
            raise AssertionError("abort raises")

        return grpc.stream_unary_rpc_method_handler(run)

    async def _watch(self, _: Any, context: Any) -> AsyncIterator[bytes]:
        with Reading(self._calls, context) as reading:
            await reading.request()
            said = None
            while True:
                changed = self._health_changed
                status = serving(self._gateway)
                if status != said:
                    said = status
                    yield status.SerializeToString()
                await changed.wait()


def _refusal(error: ShmserveError) -> Any:
    """A handler that ends a call of any kind with this error."""

    async def refuse(requests: Any, context: Any) -> None:
        await context.abort(*ending_of(error))

    return grpc.stream_stream_rpc_method_handler(refuse)
