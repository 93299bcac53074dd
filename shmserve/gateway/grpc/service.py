"""The table of RPCs, and the way of every call: look up, authorise, handle, errors to a status."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

import grpc
from google.protobuf.message import DecodeError, Message

from shmserve.errors import InvalidArgument, ShmserveError
from shmserve.gateway.client_identity import ClientIdentity, Listener
from shmserve.gateway.context import Gateway
from shmserve.gateway.grpc.admin import log_and_trace, metadata, shared_memory
from shmserve.gateway.grpc.client_identity import CallIdentity, Users
from shmserve.gateway.grpc.core.call_watchdog import Calls, Reading
from shmserve.gateway.grpc.core.direct_stream import StreamCall
from shmserve.gateway.grpc.core.direct_unary import Call
from shmserve.gateway.grpc.infer import Inferences, Refused, Submitted
from shmserve.gateway.grpc.status import DONE, INTERNAL, OVER, Ending, ending_of
from shmserve.gateway.grpc.stream import stream_infer
from shmserve.gateway.inference import malloc_trim
from shmserve.proto import grpc_service_pb2 as pb
from shmserve.proto.health_pb2 import HealthCheckRequest

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Rpc:
    """One RPC: the API it belongs to (`scope`, as common/access/auth_tokens.py has them), and
    `handler(gateway, client, request) -> response` for plain ones.

    Those without a handler are the `Service`'s own.
    """

    scope: str
    request: type[Message] | None = None
    handler: Callable[[Gateway, ClientIdentity, Any], Awaitable[Message]] | None = None


_PLAIN: tuple[
    tuple[str, type[Message], Callable[[Gateway, ClientIdentity, Any], Awaitable[Message]]], ...
] = (
    ("health", pb.ServerLiveRequest, metadata.server_live),
    ("health", pb.ServerReadyRequest, metadata.server_ready),
    ("health", pb.ModelReadyRequest, metadata.model_ready),
    ("metadata", pb.ServerMetadataRequest, metadata.server_metadata),
    ("metadata", pb.ModelMetadataRequest, metadata.model_metadata),
    ("model-config", pb.ModelConfigRequest, metadata.model_config),
    ("statistics", pb.ModelStatisticsRequest, metadata.model_statistics),
    ("model-repository", pb.RepositoryIndexRequest, metadata.repository_index),
    ("model-repository", pb.RepositoryModelLoadRequest, metadata.repository_model_load),
    ("model-repository", pb.RepositoryModelUnloadRequest, metadata.repository_model_unload),
    ("shared-memory", pb.SystemSharedMemoryStatusRequest, shared_memory.system_status),
    ("shared-memory", pb.SystemSharedMemoryRegisterRequest, shared_memory.system_register),
    ("shared-memory", pb.SystemSharedMemoryUnregisterRequest, shared_memory.system_unregister),
    ("shared-memory", pb.CudaSharedMemoryStatusRequest, shared_memory.cuda_status),
    ("shared-memory", pb.CudaSharedMemoryRegisterRequest, shared_memory.cuda_register),
    ("shared-memory", pb.CudaSharedMemoryUnregisterRequest, shared_memory.cuda_unregister),
    ("trace", pb.TraceSettingRequest, log_and_trace.trace_setting),
    ("logging", pb.LogSettingsRequest, log_and_trace.log_settings),
)

_OVER_S = 0.005  # a call with less time left is over
_TRITON = "/inference.GRPCInferenceService/"
_HEALTH = "/grpc.health.v1.Health/"
MODEL_INFER = _TRITON + "ModelInfer"
MODEL_STREAM_INFER = _TRITON + "ModelStreamInfer"
HEALTH_WATCH = _HEALTH + "Watch"

RPCS: dict[str, Rpc] = {
    MODEL_INFER: Rpc("inference"),
    MODEL_STREAM_INFER: Rpc("inference"),
    HEALTH_WATCH: Rpc("health"),
    _HEALTH + "Check": Rpc("health", HealthCheckRequest, metadata.check),
    **{
        _TRITON + request.__name__.removesuffix("Request"): Rpc(scope, request, handler)
        for scope, request, handler in _PLAIN
    },
}


class Service(grpc.GenericRpcHandler):  # type: ignore[misc]
    """Finds the handler of every call, after the listener's rules have let it pass.

    Messages go through as bytes: the handlers know best how to read and write theirs.
    """

    def __init__(
        self, gateway: Gateway, inferences: Inferences, listener: Listener, calls: Calls
    ) -> None:
        self._gateway = gateway
        self._inferences = inferences
        self._listener = listener
        self._calls = calls
        self._users = Users()
        self._health_changed = asyncio.Event()
        self._handlers: dict[str, Any] = {
            path: self._unary(self._plain(path, rpc))
            for path, rpc in RPCS.items()
            if rpc.handler is not None
        }
        self._handlers[MODEL_INFER] = self._unary(self._infer)
        self._handlers[MODEL_STREAM_INFER] = grpc.stream_stream_rpc_method_handler(self._stream)
        self._handlers[HEALTH_WATCH] = grpc.stream_stream_rpc_method_handler(self._watch)

    def service(self, call: grpc.HandlerCallDetails) -> Any:
        """The handler for a call, None for an unknown method; every call passes here."""
        handler = self._handlers.get(call.method)
        if handler is None:
            return None
        error = self._refuse(call.method, lambda: call.invocation_metadata)
        return handler if error is None else _refusal(error)

    def _refuse(self, path: str, metadata: Callable[[], Any]) -> ShmserveError | None:
        rules = self._listener.authorisation
        if not (rules.asks_for_tokens or rules.restrictions):
            return None
        given = {key: value for key, value in metadata() if type(value) is str}
        return rules.authorise(RPCS[path].scope, given)

    @property
    def infer_handler(self) -> Any:
        """grpc.aio's own way for ModelInfer, on which calls do not pass `service`."""
        return self._unary(self._infer, self.refuses_inference)

    def refuses_inference(self, call: Any) -> Ending | None:
        """How a ModelInfer ends that the listener's rules refuse; None when it may go on."""
        error = self._refuse(MODEL_INFER, call.invocation_metadata)
        return None if error is None else ending_of(error)

    @property
    def stream_handler(self) -> Any:
        """grpc.aio's own way for ModelStreamInfer, on which calls do not pass `service`."""

        async def stream(requests: AsyncIterator[bytes], context: Any) -> None:
            if (ending := self.refuses_inference(context)) is not None:
                await context.abort(*ending)
            await self._stream(requests, context)

        return grpc.stream_stream_rpc_method_handler(stream)

    def begin_infer(self, state: Any) -> None:
        """Take a ModelInfer that gRPC has given us itself."""
        Call(state, self._calls).begin(self.infer, self.refuses_inference)

    def begin_stream(self, state: Any) -> None:
        """Take a ModelStreamInfer that gRPC has given us itself."""
        StreamCall(state).run(self._answer_stream)

    async def _answer_stream(self, call: StreamCall) -> None:
        ending: Ending | None = None
        try:
            ending = self.refuses_inference(call)
            if ending is None:
                await self._streamed(call.requests(), call, call.write_all)
        except ShmserveError as error:
            ending = ending_of(error)
        except Exception:
            logger.exception("a stream failed")
            ending = INTERNAL
        call.finish(*(ending or DONE))

    def health_changed(self) -> None:
        """Tell those who watch."""
        self._health_changed.set()
        self._health_changed = asyncio.Event()

    def _client(self, context: Any) -> ClientIdentity:
        return CallIdentity(self._listener, self._users, context)

    def _plain(self, path: str, rpc: Rpc) -> Callable[[bytes, Any], Awaitable[bytes | Ending]]:
        assert rpc.handler is not None and rpc.request is not None
        handle, parse = rpc.handler, rpc.request.FromString

        async def answer(raw: bytes, context: Any) -> bytes | Ending:
            try:
                try:
                    request = parse(raw)
                except DecodeError:
                    raise InvalidArgument("malformed request") from None
                response = await handle(self._gateway, self._client(context), request)
                return response.SerializeToString()
            except ShmserveError as error:
                return ending_of(error)
            except Exception:
                logger.exception("%s failed", path)
                return INTERNAL

        return answer

    def _unary(
        self,
        answer: Callable[[bytes, Any], Awaitable[bytes | Ending]],
        refuse: Callable[[Any], Ending | None] = lambda _: None,
    ) -> Any:
        """grpc.aio's handler of a call with one request, which gets what `answer` makes of it,
        unless `refuse` gives what the call ends with.

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
                answered = answer(raw, context)
                del raw
                outcome = await answered
            if type(outcome) is bytes:
                return outcome
            await context.abort(*outcome)
            raise AssertionError("abort raises")

        return grpc.stream_unary_rpc_method_handler(run)

    async def _infer(self, raw: bytes, context: Any) -> bytes | Ending:
        try:
            submitted = self._submitted(raw, context)
            context.add_done_callback(lambda _: submitted.leave())
            response = await submitted.wait()
            malloc_trim.soon(len(response))
            return response
        except Exception as error:
            return _ending_of_inference(error, context)
        finally:
            malloc_trim.soon(len(raw))

    def infer(self, raw: bytes, call: Call) -> None:
        """ModelInfer, for a call that no task waits for."""

        def answered(submitted: Submitted) -> None:
            try:
                response = submitted.response()
            except Exception as error:
                call.fail(*_ending_of_inference(error, call))
            else:
                call.finish(response)
                malloc_trim.soon(len(response))

        try:
            submitted = self._submitted(raw, call)
        except Exception as error:
            call.fail(*_ending_of_inference(error, call))
            return
        finally:
            malloc_trim.soon(len(raw))
        call.on_gone = submitted.abandon
        call.on_over = submitted.leave
        submitted.when_answered(answered)

    def _submitted(self, raw: bytes, call: Any) -> Submitted:
        headers = self._inferences.headers(call)
        return self._inferences.submit(raw, self._client(call), call.time_remaining(), headers)

    async def _stream(self, requests: AsyncIterator[bytes], context: Any) -> None:
        async def write_all(responses: Sequence[bytes]) -> None:
            for response in responses:
                await context.write(response)

        try:
            await self._streamed(requests, context, write_all)
        except ShmserveError as error:
            await context.abort(*ending_of(error))

    async def _streamed(
        self,
        requests: AsyncIterator[bytes],
        context: Any,
        write_all: Callable[[Sequence[bytes]], Awaitable[None]],
    ) -> None:
        patience_s = self._gateway.settings.body_timeout_s
        with Reading(self._calls, context):
            await stream_infer(
                self._inferences, self._client(context), requests, context, write_all, patience_s
            )

    async def _watch(self, _: Any, context: Any) -> AsyncIterator[bytes]:
        with Reading(self._calls, context) as reading:
            await reading.request()
            said = None
            while True:
                changed = self._health_changed
                status = metadata.serving(self._gateway)
                if status != said:
                    said = status
                    yield status.SerializeToString()
                await changed.wait()


def _ending_of_inference(error: Exception, call: Any) -> Ending:
    """What a call ends with whose inference failed with this."""
    if isinstance(error, Refused):
        return ending_of(error.error)
    if not isinstance(error, ShmserveError):
        logger.error("an inference failed", exc_info=error)
        return INTERNAL
    if (left_s := call.time_remaining()) is not None and left_s < _OVER_S:
        # The scheduler kept the call's own deadline, and was faster than the client.
        return OVER
    return ending_of(error)


def _refusal(error: ShmserveError) -> Any:
    """A handler that answers a call of any kind with this error."""

    async def refuse(requests: Any, context: Any) -> None:
        await context.abort(*ending_of(error))

    return grpc.stream_stream_rpc_method_handler(refuse)
