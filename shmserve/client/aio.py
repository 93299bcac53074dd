"""The client for asyncio, with any number of concurrent requests.

    async with shmserve.client.aio.connect() as server:
        logits = (await server.infer("digits", image=x))["logits"]

The methods of `Server` have the arguments, results and errors of `shmserve.client.Server`'s.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections import deque
from collections.abc import (
    AsyncIterable,
    AsyncIterator,
    Awaitable,
    Callable,
    Generator,
    Iterable,
    Mapping,
    Sequence,
)
from typing import TYPE_CHECKING, Any

from shmserve.client.connection import ServerConnection
from shmserve.client.memory.region import Region, Specs
from shmserve.client.request.channel import (
    NO_DESCRIPTOR,
    NO_RESPONSE,
    ClientRequest,
    RequestChannel,
)
from shmserve.client.request.prepare import PackedRequest
from shmserve.client.request.results import Result
from shmserve.client.request.waiting import ClientStream
from shmserve.client.session import (
    Session,
    Tensors,
    call_of,
    check_in_flight,
    open_session,
    signature_of,
)
from shmserve.errors import InvalidArgument, ShmserveError, TimedOut, Unavailable


class _LoopChannel:
    """A request channel of an event loop, which sends the requests of an iteration together."""

    def __init__(self, connection: ServerConnection) -> None:
        self.connection = connection
        self.loop = asyncio.get_running_loop()
        self.requests = RequestChannel(connection, self._watch, self._unwatch)

    def _watch(self, fd: int) -> None:
        self.loop.add_reader(fd, lambda: self.requests.process_events((fd,)))

    def _unwatch(self, fd: int) -> None:
        if not self.loop.is_closed():
            self.loop.remove_reader(fd)

    def cancel(self, pending_request: ClientRequest) -> None:
        """Cancel a request at the end of this iteration of the loop."""
        self.requests.cancel(pending_request)
        self.requests.flush_soon(self.loop.call_soon)

    def close(self) -> None:
        """Stop watching descriptors and close the channel."""
        self.requests.close()

    def close_soon(self) -> None:
        """Call `close` in the loop; safe in any thread."""
        try:
            self.loop.call_soon_threadsafe(self.close)
        except RuntimeError:  # the event loop is closed
            self.close()


class ResponseStream:
    """An asynchronous iterator over the responses to one request, in order.

    `Server.stream` returns it. Each response is a `Result`. The iterator raises the error of a
    response (further responses may follow), or the error that the request failed with.
    `aclose`, the end of an `async with` block, or collection of this object cancels a request that
    has not ended.
    """

    def __init__(
        self, start: Callable[[Callable[[], None]], Awaitable[tuple[_LoopChannel, ClientStream]]]
    ) -> None:
        self._start: Callable[..., Awaitable[tuple[_LoopChannel, ClientStream]]] | None = start
        self._channel: _LoopChannel
        self._request: ClientStream | None = None
        self._arrived = asyncio.Event()

    async def _ensure_started(self) -> ClientStream | None:
        if self._start is not None:
            start, self._start = self._start, None
            self._channel, self._request = await start(self._arrived.set)
        return self._request

    def __aiter__(self) -> ResponseStream:
        return self

    async def __anext__(self) -> Result:
        pending_request = self._request or await self._ensure_started()
        if pending_request is None:
            raise StopAsyncIteration
        credit = pending_request.record_read()
        if credit:
            self._channel.requests.schedulers.credit(pending_request, credit)
            self._channel.requests.flush_soon(self._channel.loop.call_soon)
        if not pending_request.items:
            await self._wait_for_item(pending_request)
            if not pending_request.items:
                raise StopAsyncIteration
        return pending_request.take()

    async def _wait_for_item(self, pending_request: ClientStream) -> None:
        deadline_ns = pending_request.packed_request.options.deadline_ns
        remaining_s = (deadline_ns - time.monotonic_ns()) / 1e9 if deadline_ns else None
        try:
            async with asyncio.timeout(remaining_s):
                while not pending_request.is_ready():
                    self._arrived.clear()
                    await self._arrived.wait()
        except TimeoutError:
            self._cancel()
            raise TimedOut(NO_RESPONSE) from None
        except asyncio.CancelledError:
            self._cancel()
            raise

    def _cancel(self) -> None:
        pending_request = self._request
        if pending_request is not None:
            if not pending_request.has_finished and not pending_request.is_abandoned:
                self._channel.cancel(pending_request)
            pending_request.abandon()

    async def aclose(self) -> None:
        """Cancel the request. This method is idempotent."""
        self._start = None
        self._cancel()

    async def __aenter__(self) -> ResponseStream:
        await self._ensure_started()
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.aclose()

    def __del__(self) -> None:
        pending_request = self._request
        if pending_request is None or pending_request.has_finished or pending_request.is_abandoned:
            return
        with contextlib.suppress(RuntimeError):  # the event loop is closed
            self._channel.loop.call_soon_threadsafe(self._channel.cancel, pending_request)


class Server:
    """A client of one server, for asyncio. It is bound to the event loop that connected it.

    `connect` returns it. It reconnects automatically after a restart of the server. Use it in an
    `async with connect() as server` block, or `close` it.
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        self._channel: _LoopChannel | None = None
        # Channels to previous servers, kept while their requests are in flight.
        self._former_channels: list[_LoopChannel] = []

    @signature_of(call_of)
    async def infer(self, /, *args: Any, **kwargs: Any) -> Result:
        """Run a model and return its response.

            result = await server.infer("blur", image=image)
            result["output"].shape
            # (1, 512, 512)

        Cancelling the task cancels the request. The arguments, the result and the errors are those
        of `shmserve.client.Server.infer`.

        Returns:
            The outputs by name: torch tensors if an input was one, otherwise numpy arrays.

        Raises:
            TimedOut: The timeout expired. The request is cancelled.
            Disconnected: There is no server, or it exited before it responded.
            InvalidArgument: An argument is invalid, or this client belongs to another event loop.
            ShmserveError: The server's or the model's error, with its code.
        """
        call = call_of(*args, **kwargs)
        channel, packed_request = await self._get_channel(), None
        try:
            await self._load_on_demand(channel, *call)
            packed_request = self._session.pack(channel.connection, call)
            return await self._infer(channel, packed_request)
        except TimedOut:
            raise
        except ShmserveError:
            arguments = (channel.connection, call, packed_request)
            if not await asyncio.to_thread(self._session.should_retry, *arguments):
                raise
        channel = await self._get_channel()
        await self._load_on_demand(channel, *call)
        return await self._infer(channel, self._session.pack(channel.connection, call))

    async def _load_on_demand(self, channel: _LoopChannel, *call: Any) -> None:
        model, _, _, version, options, _ = call
        if channel.connection.models.needs_load(model, version):
            arguments = (channel.connection, model, version, options)
            await asyncio.to_thread(self._session.load, *arguments)

    async def _infer(self, channel: _LoopChannel, packed_request: PackedRequest) -> Result:
        deadline_ns = packed_request.options.deadline_ns
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        def on_done(_: ClientRequest) -> None:
            if not future.done():
                future.set_result(None)

        pending_request = channel.requests.submit(packed_request, on_done)
        channel.requests.flush_soon(channel.loop.call_soon)
        try:
            if deadline_ns:
                async with asyncio.timeout((deadline_ns - time.monotonic_ns()) / 1e9):
                    await future
            else:
                await future
        except TimeoutError:
            channel.cancel(pending_request)
            raise TimedOut(NO_RESPONSE) from None
        except asyncio.CancelledError:
            channel.cancel(pending_request)
            raise
        return pending_request.result()

    @signature_of(call_of)
    def stream(self, /, *args: Any, **kwargs: Any) -> ResponseStream:
        """Run a model that sends any number of responses, and iterate over them as they arrive.

            async with server.stream("words", text=[b"..."]) as responses:
                async for response in responses:
                    print(response["output"])

        The arguments are those of `infer`, except that `timeout` applies to all responses together.
        The request is sent when the iteration or the `async with` block begins. Cancelling a task
        that awaits a response cancels the request.

        Returns:
            The asynchronous iterator over the responses, which raises the request's errors.
        """
        call = call_of(*args, **kwargs)

        async def begin(on_item: Callable[[], None]) -> tuple[_LoopChannel, ClientStream]:
            channel = await self._get_channel()
            await self._load_on_demand(channel, *call)
            packed_request = self._session.pack(channel.connection, call, stream=True)
            stream = ClientStream(channel.requests, packed_request, on_item)
            channel.requests.start(stream)
            channel.requests.flush_soon(channel.loop.call_soon)
            return channel, stream

        return ResponseStream(begin)

    async def allocate(self, tensors: Specs, **options: Any) -> Region:
        """Allocate memory for tensors that the server reads and writes in place.

            region = await server.allocate({"image": ((1, 512, 512), "FP32")})

        Args:
            tensors: Shape and datatype of each tensor: {name: (shape, datatype)}.
            **options: `device`, `pin` and `huge_pages`, as for `shmserve.client.Server.allocate`.

        Returns:
            The region, whose tensors are not initialised.

        Raises:
            InvalidArgument: An argument is invalid.
            Unavailable: There is not enough memory.
        """
        return await asyncio.to_thread(self._session.allocate, tensors, **options)

    async def attach(self, memory: Any, tensors: Specs | None = None, **options: Any) -> Region:
        """Return a region over memory that another process has made; nothing is copied.

            frames = await server.attach("/frames", {"image": ((1, 512, 512), "FP32")})
            (await server.infer("blur", frames))["output"].shape
            # (1, 512, 512)

        The maker of the memory owns it: `release` unmaps it in this process, and never unlinks it.

        Args:
            memory: A name in /dev/shm, an open descriptor (of a memfd, for instance), a
                `multiprocessing.shared_memory.SharedMemory`, or a region of another process.
            tensors: Shape and datatype of each tensor: {name: (shape, datatype)}. By default the
                tensors of a region, or for other memory one UINT8 tensor "data" of all bytes.
            **options: `offset` in bytes and `pin`, as for `shmserve.client.Server.attach`.

        Returns:
            The region, over the same bytes.

        Raises:
            InvalidArgument: `memory` is not shared memory, or it is too small for the tensors.
            NotFound: There is no memory of this name.
            PermissionDenied: This user may not read and write the memory.
        """
        return await asyncio.to_thread(self._session.attach, memory, tensors, **options)

    async def models(self) -> list[tuple[str, str]]:
        """Return the name and version of every available model.

            await server.models()
            # [('blur', '1')]

        Raises:
            Disconnected: There is no server.
        """
        return (await self._get_channel()).connection.models.names()

    async def map(
        self,
        model: str,
        inputs: Iterable[Tensors] | AsyncIterable[Tensors],
        /,
        *,
        in_flight: int = 16,
        outputs: Sequence[str] | None = None,
        version: str = "",
        timeout: float | None = None,  # noqa: ASYNC109 - of each request
    ) -> AsyncIterator[Result]:
        """Yield the results for many inputs, in order, with several requests in flight.

            async for result in server.map("blur", ({"image": x} for x in images)):
                print(result["output"].mean())

        The first error is raised, and the other requests are cancelled.

        Args:
            model: The model's name.
            inputs: The inputs of each request, as for `infer`: an iterable or an asynchronous
                iterable.
            in_flight: The maximum number of concurrent requests.
            outputs: The names of the outputs to return, by default all.
            version: The model's version, by default the latest.
            timeout: The maximum duration of each request in seconds, by default unlimited.

        Yields:
            The result of each request, in the order of `inputs`.

        Raises:
            ShmserveError: The error of a request, as for `infer`.
        """
        check_in_flight(in_flight)
        input_iterator = _as_async(inputs)
        tasks: deque[asyncio.Task[Result]] = deque()
        try:
            async for tensors in input_iterator:
                call = self.infer(model, tensors, outputs=outputs, version=version, timeout=timeout)
                tasks.append(asyncio.ensure_future(call))
                if len(tasks) >= in_flight:
                    yield await tasks.popleft()
            while tasks:
                yield await tasks.popleft()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def ready(self, model: str = "", version: str = "") -> bool:
        """Check whether the server is ready, or a model, or one version of it.

            await server.ready("blur")
            # True

        Args:
            model: The model's name; by default the server as a whole.
            version: The model's version, by default the latest.

        Returns:
            Whether the server, the model or the version is ready; False also without HTTP.

        Raises:
            Disconnected: There is no server.
            PermissionDenied: The server's --http-restricted-api restricts health checks.
        """
        return await asyncio.to_thread(self._session.ready, model, version)

    async def load(self, model: str, config: Mapping[str, Any] | None = None) -> None:
        """Load a model, or load it again, and wait until it is ready.

            await server.load("blur")
            await server.load("blur", {"backend": "native", "max_batch_size": 8})

        Args:
            model: The name of a model in the server's repositories.
            config: The fields of a config.pbtxt as JSON. They replace the whole config.pbtxt of the
                model, so that `backend` is needed unless the names of the model's files imply it.

        Raises:
            ShmserveError: The load failed, or --model-control-mode is not explicit.
            Unavailable: The server does not listen for HTTP.
        """
        await asyncio.to_thread(self._session.load_model, model, config)

    async def unload(self, model: str) -> None:
        """Unload a model and wait until it is unloaded.

            await server.unload("blur")

        Args:
            model: The model's name.

        Raises:
            ShmserveError: There is no such model, or --model-control-mode is not explicit.
            Unavailable: The server does not listen for HTTP.
        """
        await asyncio.to_thread(self._session.unload_model, model)

    async def metadata(self, model: str, version: str = "") -> dict[str, Any]:
        """Return the inputs and outputs of a model.

            (await server.metadata("blur"))["inputs"]
            # [{'name': 'image', 'datatype': 'FP32', 'shape': [-1, -1, -1]}]

        Args:
            model: The model's name.
            version: The model's version, by default the latest.

        Returns:
            The body of `GET /v2/models/NAME`: `name`, `versions`, `platform`, and `inputs` and
            `outputs`, each with `name`, `datatype` and `shape` (-1: a dimension of any size).

        Raises:
            NotFound: The server has no such model or version.
            Unavailable: The server does not listen for HTTP.
        """
        return await asyncio.to_thread(self._session.metadata, model, version)

    async def statistics(self, model: str = "", version: str = "") -> list[dict[str, Any]]:
        """Return the statistics of each version of one model, or of all models.

            (await server.statistics("blur"))[0]["inference_count"]
            # 64

        Args:
            model: The model's name; by default all models.
            version: The model's version; by default all versions.

        Returns:
            The entries of `model_stats` of `GET /v2/models/NAME/stats`, which have Triton's fields.
            Times are in ns.

        Raises:
            InvalidArgument: The server has no such model or version.
            Unavailable: The server does not listen for HTTP.
        """
        return await asyncio.to_thread(self._session.statistics, model, version)

    async def _get_channel(self) -> _LoopChannel:
        channel = self._channel
        if channel is not None and channel.loop is not asyncio.get_running_loop():
            raise InvalidArgument("this client belongs to another event loop: connect in this one")
        if channel is not None and channel.connection.alive and not channel.connection.is_draining:
            return channel
        connection = await asyncio.to_thread(self._session.connection)
        if self._channel is channel:
            if channel is not None:
                self._former_channels.append(channel)
            for former in self._former_channels[:]:
                is_draining = former.connection.is_draining and former.connection.alive
                if not (is_draining and former.requests.pending_ids):
                    self._former_channels.remove(former)
                    former.close()
            try:
                self._channel = _LoopChannel(connection)
            except OSError as error:
                raise Unavailable(NO_DESCRIPTOR) from error
        assert self._channel is not None
        return self._channel

    async def close(self) -> None:
        """Disconnect; the server frees all resources of this client. This method is idempotent."""
        if self._session.is_inherited:
            return  # a forked child; the parent's event loop owns the connection
        if self._channel is not None:
            self._channel.close()
            self._channel = None
        for former in self._former_channels:
            former.close()
        self._former_channels.clear()
        await asyncio.to_thread(self._session.close)

    def __reduce__(self) -> Any:
        return self._session.__reduce__()  # raises TypeError

    def __del__(self) -> None:
        self._session.close_later(self._session.close)
        if self._channel is not None and not self._session.is_inherited:
            self._channel.close_soon()


async def _as_async(inputs: Iterable[Tensors] | AsyncIterable[Tensors]) -> AsyncIterator[Tensors]:
    if isinstance(inputs, AsyncIterable):
        async for request_inputs in inputs:
            yield request_inputs
        return
    for request_inputs in inputs:
        yield request_inputs


class _PendingServer:
    """The result of `connect`, for `await` or `async with`."""

    def __init__(self, *arguments: Any) -> None:
        self._arguments = arguments
        self._server: Server | None = None

    async def _connect(self) -> Server:
        # `_open` creates the `Server` in the thread: after a cancelled `connect`, the object is
        # collected and thus closed.
        return await asyncio.to_thread(self._open)

    def _open(self) -> Server:
        return Server(open_session(*self._arguments))

    def __await__(self) -> Generator[Any, None, Server]:
        return self._connect().__await__()

    async def __aenter__(self) -> Server:
        self._server = await self._connect()
        return self._server

    async def __aexit__(self, *error: object) -> None:
        assert self._server is not None
        await self._server.close()

    if not TYPE_CHECKING:  # type checkers report such an attribute by themselves

        def __getattr__(self, name: str) -> None:
            raise AttributeError(f"await aio.connect(...) before the use of '{name}'")


def connect(
    run_dir: str | os.PathLike[str] | None = None,
    *,
    memory_limit: int = 1 << 30,
    timeout: float | None = None,
    token: str = "",
) -> _PendingServer:
    """Connect to a server on this host.

        async with shmserve.client.aio.connect() as server:
            result = await server.infer("blur", image=np.zeros((1, 512, 512), np.float32))

    Args:
        run_dir: The server's run directory (`--run-dir`), or the socket of systemd; by default
            $SHMSERVE_RUN_DIR, else the run directory of this user's server.
        memory_limit: The maximum shared memory of this client in bytes, by default 1 GiB.
        timeout: Seconds to wait for a server that has loaded its models. By default `connect` fails
            immediately without a server; at systemd's socket, it waits for 10 seconds.
        token: A token for `load`, `unload`, `metadata` and `statistics`, if the server has
            --auth-token-file.

    Returns:
        An object to `await`, or to use by `async with`: either gives the `Server`.

    Raises:
        Disconnected: There is no server. This and the other errors are raised by the `await`.
        InvalidArgument: Several servers of this user run, and `run_dir` selects none.
        Unavailable: This process has no free file descriptor, or the server still loads its models
            after the timeout.
    """
    return _PendingServer(run_dir, memory_limit, timeout, token)
