"""The client for ordinary programs and for threads: `infer` waits in the thread that calls it."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any

from shmserve.client.connection import ServerConnection
from shmserve.client.errors import TimedOut
from shmserve.client.inflight.streaming import ResponseStream
from shmserve.client.inflight.waiting import SharedChannel, ThreadChannel, Waiting
from shmserve.client.memory.region import Region, Specs
from shmserve.client.request.results import Result
from shmserve.client.session import Session, Tensors, call_of, takes
from shmserve.errors import ShmserveError
from shmserve.ipc.endpoints import MOST_LINKS

_MOST_CHANNELS = MOST_LINKS - 1  # one is the connection's own


class Server:
    """A server as programs on its host use it. For any number of threads."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._channels: dict[threading.Thread, ThreadChannel] = {}
        self._former: list[ThreadChannel] = []  # whose server ends once it has answered these
        self._lock = threading.Lock()

    @takes(call_of)
    def infer(self, /, *given: Any, **named: Any) -> Result:
        """Run a model and wait: inputs by keyword, or as a mapping or a region.

        An input is a numpy array, a torch tensor, anything with DLPack, or lists of numbers; its
        shape has the batch dimension if the model has one. `outputs` names those wanted, or says
        where they go: a region, or {name: array of a region}. `version` is the latest without one.
        `timeout` is in seconds, `priority` a level of the model's (1 is the first), `parameters`
        are what the model gets beside its inputs, and `request_id` names the request in the
        server's errors. For a model that keeps state `sequence` is the id of the request's
        sequence, whose first has `start`, and whose last `end`. `traceparent` (W3C) is the trace
        that the request is part of. The parameter `explain: True` gives the result's `parameters`
        an `explanation`: where its time went.

        Raises the server's error (ShmserveError, with its code), TimedOut or Disconnected. In the
        callback of a future of `infer_async`, Unavailable when other threads have every channel.
        """
        call = call_of(*given, **named)
        waiter, built = self._waiting(), None
        try:
            built = self._session.built(waiter.connection, *call)
            return waiter.wait(waiter.submit(built))
        except TimedOut:
            raise
        except ShmserveError:
            if not self._session.is_repeated(waiter.connection, call[4], built):
                raise
        waiter = self._waiting()
        return waiter.wait(waiter.submit(self._session.built(waiter.connection, *call)))

    def map(
        self,
        model: str,
        inputs: Iterable[Tensors],
        /,
        *,
        in_flight: int = 16,
        outputs: Sequence[str] | None = None,
        version: str = "",
        timeout: float | None = None,
    ) -> Iterator[Result]:
        """The results for many inputs, in their order, with up to `in_flight` requests at a time.

        Raises at the first that fails; the others are cancelled.
        """
        waiting: deque[Any] = deque()
        waiter = self._waiting()
        few = max(1, in_flight // 4)  # several a message, and the server is never without any
        try:
            for given in inputs:
                call = call_of(model, given, outputs=outputs, version=version, timeout=timeout)
                built = self._session.built(waiter.connection, *call)
                waiting.append(waiter.submit(built))
                waiter.send(at_least=few)
                if len(waiting) >= in_flight:
                    yield waiter.wait(waiting.popleft())
            while waiting:
                yield waiter.wait(waiting.popleft())
        finally:
            waiter.cancel(waiting)

    @takes(call_of)
    def stream(self, /, *given: Any, **named: Any) -> ResponseStream:
        """Run a model that gives any number of responses, and iterate over them as they come.

        What it takes is what `infer` takes. Who does not read stops the model, and nobody else.
        Outputs that go to a region are written there once for each response: it holds one until the
        next is asked for. `timeout` is for all of the responses. Leaving the iterator cancels:

        >>> with server.stream("words", text=[b"..."]) as responses:  # doctest: +SKIP
        ...     for response in responses:
        ...         print(response["output"])
        """
        call = call_of(*given, **named)
        way = self._waiting()
        built = self._session.built(way.connection, *call, stream=True)
        return ResponseStream(way, way.open(built), self)

    @takes(call_of)
    def infer_async(self, /, *given: Any, **named: Any) -> Future[Result]:
        """`infer`, in the background. Cancelling the future cancels the request."""
        call, connection = call_of(*given, **named), self._session.connection()
        future = SharedChannel(connection).submit(self._session.built(connection, *call))
        # The client is not closed before that, though nobody else may have it.
        future.add_done_callback(partial(_keep, self))
        return future

    def allocate(
        self,
        tensors: Specs,
        *,
        device: str = "cpu",
        pin: bool = False,
        huge_pages: bool = False,
    ) -> Region:
        """Memory for tensors, {name: (shape, datatype)}, that the server uses in place.

        `device`: "cuda:0" for memory on the server's device 0, which this program must see by the
        same number. For host memory, `pin` has workers on CUDA devices lock it, for faster copies,
        and `huge_pages` takes it from the pages that the host has reserved. Raises InvalidArgument,
        or Unavailable where there is none.
        """
        return self._session.allocate(tensors, device=device, pin=pin, huge_pages=huge_pages)

    def models(self) -> list[tuple[str, str]]:
        """Name and version of every model that may be called now."""
        return self._session.connection().models.names()

    def _waiting(self) -> Waiting:
        connection = self._session.connection()
        thread = threading.current_thread()
        waiter = self._channels.get(thread)
        if waiter is not None and waiter.lock.locked():
            return _shared(connection)  # a signal's handler, which this thread's wait runs
        if waiter is None or waiter.connection is not connection:
            return self._new_channel(thread, connection)
        return waiter

    def _new_channel(self, thread: threading.Thread, connection: ServerConnection) -> Waiting:
        with self._lock:
            for other, waiter in list(self._channels.items()):
                over = waiter.connection is not connection and not other.is_alive()
                if over or other is thread:
                    self._former.append(self._channels.pop(other))
            self._close_former()
            # That of a thread which has ended is taken over, and not closed: its requests may be on
            # their way yet, workers use their memory, and a generator of `map` may wait for them.
            for other, waiter in self._channels.items():
                if not other.is_alive() and not waiter.lock.locked():
                    self._channels[thread] = self._channels.pop(other)
                    return waiter
            if len(self._channels) >= _MOST_CHANNELS:
                return _shared(connection)
            try:
                waiter = self._channels[thread] = ThreadChannel(connection)
            except OSError:  # no descriptor is left for one of its own
                return _shared(connection)
            return waiter

    def close(self) -> None:
        """Leave the server, which frees all that this client had there. A second time is fine."""
        self._session.close()
        if self._session.inherited:
            return
        with self._lock:
            for thread, waiter in self._channels.items():
                if thread is threading.current_thread() and waiter.lock.locked():
                    waiter.leaving = True  # this is a signal's handler, which its wait runs
                else:
                    waiter.close()
            self._channels.clear()
            for waiter in self._former:
                waiter.close()
            self._former.clear()

    def _close_former(self) -> None:
        for waiter in self._former[:]:
            if not (
                waiter.connection.leaving and waiter.connection.alive and waiter.channel.waiting
            ):
                self._former.remove(waiter)
                waiter.close()

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def __del__(self) -> None:
        self._session.close_later(self.close)


def _keep(server: Server, ended: Future[Result]) -> None:
    """A future's callback that refers to its client until then."""


def _shared(connection: ServerConnection) -> SharedChannel:
    """The channel of threads without one of their own, to wait by; raises Unavailable."""
    shared = SharedChannel(connection)
    shared.check_may_wait()
    return shared
