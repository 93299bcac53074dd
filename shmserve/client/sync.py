"""The client for threads: `infer` blocks the calling thread."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any

from shmserve.client.connection import ServerConnection
from shmserve.client.memory.region import Region, Specs
from shmserve.client.request.results import Result
from shmserve.client.request.waiting import ResponseStream, SharedChannel, ThreadChannel, Waiting
from shmserve.client.session import Session, Tensors, call_of, model_path, takes
from shmserve.errors import ShmserveError, TimedOut, Unavailable
from shmserve.ipc.endpoints import MOST_LINKS

_MOST_CHANNELS = MOST_LINKS - 1  # one link is the connection's own
_INTERRUPTED = "this thread waits for a response: a signal handler cannot use the client meanwhile"


class Server:
    """A server as used by programs on its host; thread-safe."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._channels: dict[threading.Thread, ThreadChannel] = {}
        self._former: list[ThreadChannel] = []  # channels to a predecessor that still answers them
        self._lock = threading.Lock()

    @takes(call_of)
    def infer(self, /, *given: Any, **named: Any) -> Result:
        """Run a model and wait for its response.

        Inputs are given by keyword, as a mapping, or as a region. An input is a numpy array, a
        torch tensor, a DLPack tensor, or lists of numbers. Its shape includes the batch dimension
        if the model has one.

        Options, all by keyword:

            outputs        names, or where to write outputs: a region, or {name: array of a region}
            version        by default the latest
            timeout        in seconds
            priority       a priority level of the model; 1 is the highest
            parameters     parameters for the model. With `explain: True` the result's
                           `parameters` have an `explanation` of the time spent
            request_id     the name of the request in the server's errors
            sequence       the id of the request's sequence, for a stateful model
            start, end     whether the request is the first or the last one of its sequence
            traceparent    the W3C trace context of the request

        Inputs that have the name of an option are given as a mapping: infer("m", {"timeout": x}).

        Raises:
            ShmserveError: The server's error, with its code.
            TimedOut: The timeout expired.
            Disconnected: There is no server.
            Unavailable: In a callback of `infer_async`, if other threads use all channels.
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
        """Yield the results for many inputs, in order, with up to `in_flight` concurrent requests.

        The first error is raised, and the other requests are cancelled.
        """
        waiting: deque[Any] = deque()
        waiter = self._waiting()
        few = max(1, in_flight // 4)  # several per message, and the server always has work
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
        """Run a model that sends any number of responses, and iterate over them as they arrive.

        The arguments are those of `infer`; `timeout` applies to all responses together. A program
        that does not read stops only this request. Outputs in a region hold one response until the
        next one is requested. Closing the iterator cancels the request:

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
        """Run a model in the background; see `infer`. Cancelling the future cancels the request."""
        call, connection = call_of(*given, **named), self._session.connection()
        future = SharedChannel(connection).submit(self._session.built(connection, *call))
        # The client must not be collected, and thus closed, before the future completes.
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
        """Allocate memory for tensors, {name: (shape, datatype)}, that the server uses in place.

        Args:
            tensors: Shape and datatype of each tensor.
            device: "cpu", or "cuda:0" for the server's device 0, which must have the same number
                here.
            pin: Workers on CUDA devices pin the host memory, for faster copies.
            huge_pages: The host memory is taken from reserved huge pages.

        Raises:
            InvalidArgument: An argument is invalid.
            Unavailable: There is not enough memory.
        """
        return self._session.allocate(tensors, device=device, pin=pin, huge_pages=huge_pages)

    def attach(
        self, memory: Any, tensors: Specs | None = None, *, offset: int = 0, pin: bool = False
    ) -> Region:
        """Return a region over memory that another process has made; nothing is copied.

        The maker of the memory owns it: `release` unmaps the memory here, and never unlinks it.

        Args:
            memory: A name in /dev/shm, an open descriptor (of a memfd, for instance), a
                `multiprocessing.shared_memory.SharedMemory`, or a region of another process.
            tensors: Shape and datatype of each tensor, {name: (shape, datatype)}, at multiples of
                64 bytes from `offset` on. By default a region has its own tensors, and other
                memory one UINT8 tensor "data".
            offset: The position of the first tensor in the memory, in bytes.
            pin: Workers on CUDA devices pin the memory.

        Raises:
            InvalidArgument: An argument is no such memory, or the memory is too small.
            NotFound: There is no memory of this name.
            PermissionDenied: This user may not read and write the memory.
        """
        return self._session.attach(memory, tensors, offset=offset, pin=pin)

    def models(self) -> list[tuple[str, str]]:
        """Return name and version of every model that is available."""
        return self._session.connection().models.names()

    def ready(self, model: str = "", version: str = "") -> bool:
        """Check whether the server is ready, or a model, or one version of it."""
        return self._session.ready(model, version)

    def load(self, model: str, config: Mapping[str, Any] | None = None) -> None:
        """Load a model, or load it again, and wait until it is ready.

        This method, `unload`, `ready`, `metadata` and `statistics` use the server's HTTP listener.

        Args:
            model: A model of the repositories.
            config: A configuration, as JSON has it, that replaces the configuration of the model.

        Raises:
            ShmserveError: The load failed, or --model-control-mode is not explicit.
            Unavailable: The server does not listen for HTTP.
        """
        self._session.load_model(model, config)

    def unload(self, model: str) -> None:
        """Unload a model and wait until it is unloaded."""
        self._session.unload_model(model)

    def metadata(self, model: str, version: str = "") -> dict[str, Any]:
        """Return the inputs and outputs of a model, as `GET /v2/models/NAME`."""
        found: dict[str, Any] = self._session.control("GET", model_path(model, version))
        return found

    def statistics(self, model: str = "", version: str = "") -> list[dict[str, Any]]:
        """Return the statistics of each version of one model or of all, as `GET .../stats`."""
        return self._session.statistics(model, version)

    def _waiting(self) -> Waiting:
        connection = self._session.connection()
        thread = threading.current_thread()
        waiter = self._channels.get(thread)
        if waiter is not None and waiter.lock.locked():
            raise Unavailable(_INTERRUPTED)
        if waiter is None or waiter.connection is not connection:
            return self._new_channel(thread, connection)
        return waiter

    def _new_channel(self, thread: threading.Thread, connection: ServerConnection) -> Waiting:
        with self._lock:
            for other, waiter in list(self._channels.items()):
                ended = waiter.connection is not connection and not other.is_alive()
                if ended or other is thread:
                    self._former.append(self._channels.pop(other))
            self._close_former()
            # The channel of an ended thread is reused rather than closed: workers may still use the
            # memory of its requests, and a generator of `map` may await them.
            for other, waiter in self._channels.items():
                if not other.is_alive() and not waiter.lock.locked():
                    self._channels[thread] = self._channels.pop(other)
                    return waiter
            if len(self._channels) >= _MOST_CHANNELS:
                return _shared(connection)
            try:
                waiter = self._channels[thread] = ThreadChannel(connection)
            except OSError:  # no free descriptor for another channel
                return _shared(connection)
            return waiter

    def close(self) -> None:
        """Disconnect; the server frees all resources of this client. This method is idempotent.

        Raises:
            Unavailable: A signal handler calls this while its thread waits for a response.
        """
        waiter = self._channels.get(threading.current_thread())
        if waiter is not None and waiter.lock.locked():
            raise Unavailable(_INTERRUPTED)
        self._session.close()
        if self._session.inherited:
            return
        with self._lock:
            for waiter in self._channels.values():
                waiter.close()
            self._channels.clear()
            for waiter in self._former:
                waiter.close()
            self._former.clear()

    def _close_former(self) -> None:
        for waiter in self._former[:]:
            if not (
                waiter.connection.draining and waiter.connection.alive and waiter.channel.waiting
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
    """Do nothing: the callback keeps a reference to the client until the future completes."""


def _shared(connection: ServerConnection) -> SharedChannel:
    """Return the channel for threads without one of their own; raise Unavailable."""
    shared = SharedChannel(connection)
    shared.check_may_wait()
    return shared
