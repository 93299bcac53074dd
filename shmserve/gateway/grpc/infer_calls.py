"""The inference RPCs as calls: ModelInfer, without a task for each, and ModelStreamInfer."""

from __future__ import annotations

import asyncio
import logging

from shmserve.errors import ShmserveError
from shmserve.gateway.context import Gateway
from shmserve.gateway.grpc.calls.call import GrpcCall, UnaryCall
from shmserve.gateway.grpc.calls.streaming_call import StreamingCall
from shmserve.gateway.grpc.infer import Inferences, RequestRefused
from shmserve.gateway.grpc.placed_request import PlacedRequest
from shmserve.gateway.grpc.status import INTERNAL, OVER, Ending, ending_of
from shmserve.gateway.grpc.stream_call import stream_infer
from shmserve.gateway.inference.malloc_trim import LARGE
from shmserve.ipc.inflight import Response
from shmserve.ipc.trace import TraceContext

logger = logging.getLogger(__name__)


class InferenceCalls:
    """Handles inference calls."""

    def __init__(self, gateway: Gateway, inferences: Inferences) -> None:
        self._trim = gateway.malloc_trim
        self._stall_s = gateway.settings.body_timeout_s
        self._inferences = inferences

    def infer(self, raw: bytes | PlacedRequest, call: UnaryCall) -> None:
        """Handle a ModelInfer, whose message is `raw`."""

        def responded(_: Response) -> None:
            try:
                response = submitted.response()
            except Exception as error:
                call.fail(*_ending_of_inference(error, call))
            else:
                call.finish(response)
                if len(response) >= LARGE:
                    self._trim.soon(len(response))

        try:
            headers = self._inferences.headers(call.head)
            submitted = self._inferences.submit(
                raw, call.client, call.time_remaining(), headers, call.head.traceparent
            )
        except Exception as error:
            if isinstance(error, RequestRefused) and self._inferences.awaits_load(raw):
                waiting = asyncio.ensure_future(self._infer_once_loaded(raw, call))
                call.on_gone = waiting.cancel
                return
            call.fail(*_ending_of_inference(error, call))
            return
        finally:
            if len(raw) >= LARGE:
                self._trim.soon(len(raw))
        call.on_gone = submitted.cancel
        call.on_over = submitted.leave
        submitted.taken_by(responded)

    async def _infer_once_loaded(self, raw: bytes | PlacedRequest, call: UnaryCall) -> None:
        try:
            await self._inferences.load(raw, call.time_remaining())
        except Exception as error:
            call.fail(*_ending_of_inference(error, call))
        else:
            call.on_gone = None
            self.infer(raw, call)

    async def stream(self, call: StreamingCall) -> Ending | None:
        """Handle a ModelStreamInfer."""
        try:
            await stream_infer(self._inferences, call, self._stall_s)
        except ShmserveError as error:
            return ending_of(error)
        return None


def _ending_of_inference(error: Exception, call: GrpcCall) -> Ending:
    """The status of a call whose inference failed with this."""
    if isinstance(error, RequestRefused):
        error = error.error
        caller = TraceContext.of_header(call.head.traceparent)
        error.traceparent = "" if caller is None else caller.traceparent
    if not isinstance(error, ShmserveError):
        logger.error("an inference failed", exc_info=error)
        return INTERNAL
    if call.is_out_of_time():
        # The scheduler kept the call's own deadline, and was faster than the client.
        return OVER
    return ending_of(error)
