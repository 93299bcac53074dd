"""The inference RPCs as calls: ModelInfer and ModelStreamInfer, each directly on gRPC's core and
through grpc.aio."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any

import grpc

from shmserve.errors import ShmserveError
from shmserve.gateway.context import Gateway
from shmserve.gateway.grpc.client_identity import Access
from shmserve.gateway.grpc.core.call_watchdog import Calls, Reading
from shmserve.gateway.grpc.core.direct_stream import DirectStreamCall
from shmserve.gateway.grpc.core.direct_unary import DirectUnaryCall
from shmserve.gateway.grpc.infer import Inferences, RequestRefused, Submitted
from shmserve.gateway.grpc.status import DONE, INTERNAL, OVER, Ending, ending_of
from shmserve.gateway.grpc.stream_call import stream_infer

logger = logging.getLogger(__name__)

_OVER_S = 0.005  # a call with less time left is over


class InferenceCalls:
    """Handles inference calls: `begin_...` those that gRPC's core hands over, without a task for
    each; `infer` and `stream_handler` those that grpc.aio has accepted."""

    def __init__(
        self, gateway: Gateway, inferences: Inferences, access: Access, calls: Calls
    ) -> None:
        self._trim = gateway.malloc_trim
        self._stall_s = gateway.settings.body_timeout_s
        self._inferences = inferences
        self._access = access
        self._calls = calls

    def refusal(self, call: Any) -> Ending | None:
        """The status of an inference call that the listener's rules refuse; None for others."""
        error = self._access.refuse("inference", call.invocation_metadata)
        return None if error is None else ending_of(error)

    # --- ModelInfer

    def begin_infer(self, state: Any) -> None:
        """Take a ModelInfer from gRPC's core."""
        DirectUnaryCall(state, self._calls).begin(self._infer, self.refusal)

    def _infer(self, raw: bytes, call: DirectUnaryCall) -> None:
        def responded(_: Any) -> None:
            try:
                response = submitted.response()
            except Exception as error:
                call.fail(*_ending_of_inference(error, call))
            else:
                call.finish(response)
                self._trim.soon(len(response))

        try:
            submitted = self._submitted(raw, call)
        except Exception as error:
            call.fail(*_ending_of_inference(error, call))
            return
        finally:
            self._trim.soon(len(raw))
        call.on_gone = submitted.cancel
        call.on_over = submitted.leave
        submitted.taken_by(responded)

    async def infer(self, raw: bytes, context: Any) -> bytes | Ending:
        """The response to a ModelInfer that grpc.aio has accepted."""
        try:
            submitted = self._submitted(raw, context)
            context.add_done_callback(lambda _: submitted.leave())
            response = await submitted.wait()
            self._trim.soon(len(response))
            return response
        except Exception as error:
            return _ending_of_inference(error, context)
        finally:
            self._trim.soon(len(raw))

    def _submitted(self, raw: bytes, call: Any) -> Submitted:
        headers = self._inferences.headers(call)
        return self._inferences.submit(
            raw, self._access.client(call), call.time_remaining(), headers
        )

    # --- ModelStreamInfer

    def begin_stream(self, state: Any) -> None:
        """Take a ModelStreamInfer from gRPC's core."""
        DirectStreamCall(state).run(self._stream)

    async def _stream(self, call: DirectStreamCall) -> None:
        ending: Ending | None = None
        try:
            ending = self.refusal(call)
            if ending is None:
                await self._streamed(call.requests(), call, call.write_all)
        except ShmserveError as error:
            ending = ending_of(error)
        except Exception:
            logger.exception("a stream failed")
            ending = INTERNAL
        call.finish(*(ending or DONE))

    @property
    def stream_handler(self) -> Any:
        """grpc.aio's handler of ModelStreamInfer."""

        async def stream(requests: AsyncIterator[bytes], context: Any) -> None:
            async def write_all(responses: Sequence[bytes]) -> None:
                for response in responses:
                    await context.write(response)

            if (ending := self.refusal(context)) is not None:
                await context.abort(*ending)
            try:
                await self._streamed(requests, context, write_all)
            except ShmserveError as error:
                await context.abort(*ending_of(error))

        return grpc.stream_stream_rpc_method_handler(stream)

    async def _streamed(
        self,
        requests: AsyncIterator[bytes],
        context: Any,
        write_all: Callable[[Sequence[bytes]], Awaitable[None]],
    ) -> None:
        client = self._access.client(context)
        with Reading(self._calls, context):
            await stream_infer(
                self._inferences, client, requests, context, write_all, self._stall_s
            )


def _ending_of_inference(error: Exception, call: Any) -> Ending:
    """The status of a call whose inference failed with this."""
    if isinstance(error, RequestRefused):
        return ending_of(error.error)
    if not isinstance(error, ShmserveError):
        logger.error("an inference failed", exc_info=error)
        return INTERNAL
    if (left_s := call.time_remaining()) is not None and left_s < _OVER_S:
        # The scheduler kept the call's own deadline, and was faster than the client.
        return OVER
    return ending_of(error)
