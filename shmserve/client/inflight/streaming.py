"""Requests with any number of responses: flow control by credit, and the iterator over them.

    submit ──> response* ──> the end, or an error
       └──> closed, collected, timed out: cancelled at the scheduler, what comes yet is discarded

`FIRST_CREDIT` responses come unasked, others for what was read; small ones are credited together.
Responses that are written to one place in a region come one at a time: the next is credited when
the reader asks for it, so that nothing goes over what is being read.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, Protocol

from shmserve.client.inflight.channel import ClientRequest, RequestChannel
from shmserve.client.memory.views import nothing
from shmserve.client.request.prepare import PackedRequest
from shmserve.client.request.results import Result, read_one_of_many
from shmserve.errors import Internal, ShmserveError
from shmserve.ipc.credit import ReadWindow
from shmserve.ipc.messages.inference import Responded, Response
from shmserve.ipc.tensors.inference import RequestSchema, byte_size_of
from shmserve.ipc.transport.records import MalformedMessage


class ClientStream(ClientRequest):
    """A request with any number of responses. `items` are those that have come and were not read;
    `on_item` hears of each, and of the end; `over`: no more will come."""

    def __init__(
        self, channel: RequestChannel, built: PackedRequest, on_item: Callable[[], None] = nothing
    ) -> None:
        super().__init__(channel, built, None)
        self.items: deque[tuple[Result | ShmserveError, int]] = deque()
        self.on_item = on_item
        self.over = False
        self._taken = -1  # bytes of the response that the reader has; -1: it has none
        self._window = ReadWindow(placed=_is_placed(built))

    def ready(self) -> bool:
        return bool(self.items) or self.over or self.abandoned

    def respond(self, message: Response) -> None:
        if type(message) is not Responded:
            super().respond(message)
        elif self.abandoned or self.over:
            self.discard(message)
        else:
            if message.code:
                self.items.append((self.error(message.code, message.message), 0))
            elif message.schema:
                self._read(message)
            elif message.spans and self.explained:
                self.items.append((Result({}, {}, None), 0))  # of nothing but the explanation
            if message.spans and self.explained and isinstance(self.items[-1][0], Result):
                self.explain(self.items[-1][0], message.spans)
            self.over = self.over or message.final
            self.on_item()

    def _read(self, message: Responded) -> None:
        item: Result | ShmserveError
        try:
            item = read_one_of_many(self, message)
        except ShmserveError as error:
            item = error
        except MalformedMessage:
            item = Internal("the response cannot be read")
        self.items.append((item, byte_size_of(message.data)))
        if not isinstance(item, Result):
            self.over = True
            self.channel.cancel(self)

    def done(self, outcome: Result | ShmserveError) -> None:
        if not self.abandoned and not self.over:
            self.items.append((outcome, 0))
            self.over = True
            self.on_item()

    def read(self) -> int:
        """The reader is done with the response that it took last, if any, and asks for another: how
        many are to be credited now."""
        if self._taken < 0:
            return 0
        credit = self._window.read(self._taken)
        self._taken = -1
        return 0 if self.over else credit

    def take(self) -> Result:
        """The next response that has come; raises the error that it is."""
        item, self._taken = self.items.popleft()
        if isinstance(item, Result):
            return item
        try:
            raise self.traced(item)
        finally:
            del item  # no cycle of it and its traceback

    def leave(self) -> None:
        """Drop the responses that have come, and those that may come yet."""
        self.abandoned = True
        self.items.clear()


class Attending(Protocol):
    """A thread's way to wait for what is in flight."""

    def attend(self, pending: Any) -> None:
        """Wait until it is `ready`; raises TimedOut, for which it is cancelled."""

    def credit(self, pending: Any, responses: int) -> None:
        """Grant credit for so many more responses."""

    def cancel(self, left: Iterable[Any]) -> None:
        """Cancel these; at any moment, in any thread."""


class ResponseStream:
    """The responses to one request, each when it comes. For one thread at a time.

    `next` raises the error that a response is (others may follow), or that the request ended with.
    `close`, or the end of a `with`, or of this object, cancels what has not ended.
    """

    def __init__(self, way: Attending, pending: ClientStream, owner: object) -> None:
        self._way = way
        self._pending = pending
        self._owner = owner  # the client is not closed meanwhile, though nobody else may have it

    def __iter__(self) -> ResponseStream:
        return self

    def __next__(self) -> Result:
        pending = self._pending
        responses = pending.read()
        if responses:
            self._way.credit(pending, responses)
        if not pending.items:
            self._way.attend(pending)
            if not pending.items:
                raise StopIteration
        return pending.take()

    def close(self) -> None:
        """Read no more. A second time is fine."""
        pending = self._pending
        if not pending.over and not pending.abandoned:
            self._way.cancel((pending,))
        pending.leave()

    def __enter__(self) -> ResponseStream:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def __del__(self) -> None:
        self.close()


def _is_placed(built: PackedRequest) -> bool:
    """Whether outputs go to places of the client's: each response to the same."""
    if not built.segments:
        return False
    return any(output.placed for output in RequestSchema(built.schema).outputs)
