"""A request that gets any number of responses: a state machine with credit-based flow control.

    opened ──> response* ──> the last one: a final `Responded`, or a `Failed`
       └──> cancelled, at the scheduler too: what comes after that is discarded

The scheduler may send a response only for credit. When one has gone on to the client its credit is
given back, for several small ones at a time.
"""

from __future__ import annotations

from collections.abc import Callable

from shmserve.errors import ShmserveError, from_code
from shmserve.gateway.context import Gateway
from shmserve.gateway.inference.builder import BuiltRequest
from shmserve.gateway.inference.response import unpack
from shmserve.gateway.inference.submit import failure, log_failure
from shmserve.gateway.links import GatewayRequest
from shmserve.gateway.model_table import GatewayModel
from shmserve.ipc.credit import ReadWindow
from shmserve.ipc.inflight import Response
from shmserve.ipc.messages import inference as m
from shmserve.ipc.tensors.inference import Inferred

Message = m.Responded | m.Failed


class StreamingRequest:
    """`on_response(request, message)` is called for each response, the last included, in the
    event loop.

    Each that has gone on to the client is to be followed by a `credit`. Where the client is gone,
    those whose outputs are not released are to be discarded, and the request cancelled.
    """

    def __init__(
        self,
        gateway: Gateway,
        model: GatewayModel,
        built: BuiltRequest,
        submit: m.Submit,
        on_response: Callable[[StreamingRequest, Message], None],
    ) -> None:
        self._dispatcher = gateway.dispatcher
        # Each response goes over the one before it where they have places: they come one by one.
        placed = any(output.place is not None for output in built.infer_request.outputs)
        self._window = ReadWindow(placed)
        self.model = model
        self.infer_request = built.infer_request
        self.trace = built.trace
        self.over = False  # the last response is here, or it is cancelled
        self._here = 0  # responses that have not gone on yet

        def responded(message: Response) -> None:
            if not self.over:
                if isinstance(message, m.Finished):
                    message = m.Responded(
                        message.id, "", "", message.body, True, spans=message.spans
                    )
                self.over = is_last(message)
                self._here += 1
                if self.over and self.trace is not None:
                    self.trace.answered(message)
                on_response(self, message)

        self._pending: GatewayRequest = self._dispatcher.submit(
            model.scheduler, submit, built.release, responded
        )

    def outputs(self, message: Message) -> Inferred | None:
        """The outputs of a response; None for one that only says that it was the last, and explains
        nothing. Their memory is in use until the `release`.

        Raises the error that the response is.
        """
        try:
            if (error := error_of(message)) is not None:
                raise error
            body = b"" if isinstance(message, m.Failed) else message.body
            inferred = unpack(body) if body else None
            if self.trace is not None and self.trace.explained and is_last(message):
                inferred = self.trace.explain(inferred or Inferred(()))
            return inferred
        except ShmserveError as error:
            log_failure(self.model, self.infer_request.id, error, self.trace)
            raise

    def release(self, inferred: Inferred | None) -> None:
        """The memory of these outputs is free: they are copied."""
        if inferred is not None:
            self._pending.scheduler.release_outputs(inferred)

    def credit(self, inferred: Inferred | None) -> None:
        """The response with these outputs has gone on to the client, which takes another."""
        self._here -= 1
        if self.over and not self._here and self.trace is not None:
            self.trace.finish()
        if not self.over:
            credit = self._window.read(_byte_size(inferred))
            if credit:
                self._dispatcher.credit(self._pending, credit)

    def discard(self, message: Message) -> None:
        """The client does not get this response."""
        if isinstance(message, m.Responded):
            self._pending.scheduler.discard(message)

    def cancel(self) -> None:
        """Cancel it: no more responses are waited for."""
        if not self.over:
            self.over = True
            self._dispatcher.cancel(self._pending)
        if self.trace is not None:
            self.trace.gone()


def error_of(message: Message) -> ShmserveError | None:
    """The error that a response is, None for one that is none."""
    if isinstance(message, m.Failed):
        return failure(message)
    return from_code(message.code, message.message) if message.code else None


def is_last(message: Message) -> bool:
    """Whether nothing comes after it."""
    return isinstance(message, m.Failed) or message.final


def _byte_size(inferred: Inferred | None) -> int:
    datas = () if inferred is None else (tensor.data for tensor in inferred.outputs)
    return sum(len(data) if isinstance(data, bytes) else data.byte_size for data in datas)
