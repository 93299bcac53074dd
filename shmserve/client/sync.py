"""The client for threads: `infer` blocks the calling thread."""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any

from shmserve.client.connection import ServerConnection
from shmserve.client.memory.region import Region, Specs
from shmserve.client.request.results import Result
from shmserve.client.request.waiting import Channel, ResponseStream, SharedChannel, ThreadChannel
from shmserve.client.session import Session, Tensors, call_of, check_in_flight, signature_of
from shmserve.errors import ShmserveError, TimedOut, Unavailable
from shmserve.ipc.endpoints import MAX_LINKS

_MAX_CHANNELS = MAX_LINKS - 1  # the connection itself needs one of the client's links
_THREAD_WAITS = "this thread waits for a response: a signal handler cannot use the client meanwhile"


class Server:
    """A client of one server, for threads. All methods are thread-safe.

    `connect` returns it. It reconnects automatically after a restart of the server. Use it in a
    `with` block, or `close` it.
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        self._channels: dict[threading.Thread, ThreadChannel] = {}
        # Channels to previous servers, kept while their requests are in flight.
        self._former_channels: list[ThreadChannel] = []
        self._lock = threading.Lock()

    @signature_of(call_of)
    def infer(self, /, *args: Any, **kwargs: Any) -> Result:
        """Run a model and wait for its response.

            image = np.zeros((1, 512, 512), np.float32)
            server.infer("blur", image=image)["output"].shape
            # (1, 512, 512)

        Args:
            model: The model's name.
            inputs: The inputs: a mapping {name: tensor}, or a region of `allocate`. Needed only for
                a region, and for an input that has the name of an option.
            **tensors: The inputs by keyword, instead of `inputs`. A tensor is a numpy array, a
                torch tensor on the CPU, a DLPack tensor, or nested lists. Its shape includes the
                batch dimension if the model has one. The datatype of an array must be that of the
                model's input. Lists are converted to it. For a BF16 input, pass an array of
                ml_dtypes.bfloat16, or a uint16 array with the bits of the elements. For a BYTES
                input, pass an array of bytes or str objects.
            outputs: The names of the outputs to return, by default all. Or the memory to write
                outputs to: a region, or {name: array of a region}.
            version: The model's version, by default the latest.
            timeout: The maximum duration of the call in seconds, by default unlimited.
            priority: A priority level of the model: 1 is the highest, 0 the model's default.
            request_id: The name of the request in the server's errors.
            parameters: Parameters for the model: {name: bool, int, float or str}. With
                `explain: True`, the result's `parameters` have an `explanation` of the time spent.
                `deadline_us` and `priority` have the effects of `timeout` and `priority`, too.
            sequence: The id of the request's sequence (int or str), for a stateful model.
            start: Whether the request is the first one of its sequence.
            end: Whether the request is the last one of its sequence.
            traceparent: The W3C trace context of the request.

        Returns:
            The outputs by name: torch tensors if an input was one, otherwise numpy arrays.

        Raises:
            InvalidArgument: An input or an option is invalid.
            NotFound: The server has no such model or version.
            QueueFull: The model's queue is full.
            TimedOut: The timeout expired. The request is cancelled.
            Disconnected: There is no server, or it exited before it responded.
            Unsupported: The model sends any number of responses: use `stream`.
            Unavailable: The caller is a callback of `infer_async`, and 15 other threads use this
                client, or no file descriptor is free. Or the caller is a signal handler, and its
                thread waits for a response.
            ShmserveError: The server's or the model's error, with its code.
        """
        call = call_of(*args, **kwargs)
        channel, packed_request = self._get_thread_channel(), None
        try:
            packed_request = self._session.pack(channel.connection, call)
            return channel.wait(channel.submit(packed_request))
        except TimedOut:
            raise
        except ShmserveError:
            if not self._session.should_retry(channel.connection, call, packed_request):
                raise
        channel = self._get_thread_channel()
        return channel.wait(channel.submit(self._session.pack(channel.connection, call)))

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
        """Yield the results for many inputs, in order, with several requests in flight.

            for result in server.map("blur", ({"image": x} for x in images)):
                print(result["output"].mean())

        The first error is raised, and the other requests are cancelled.

        Args:
            model: The model's name.
            inputs: The inputs of each request, as for `infer`: mappings or regions. The iterable is
                read only as far as requests can be sent, so it may be infinite.
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
        pending_requests: deque[Any] = deque()
        channel = self._get_thread_channel()
        # Requests are sent in groups, so that the thread wakes up once for several responses. The
        # requests in flight keep the server busy.
        min_messages = max(1, in_flight // 4)
        try:
            for request_inputs in inputs:
                call = call_of(
                    model, request_inputs, outputs=outputs, version=version, timeout=timeout
                )
                try:
                    packed_request = self._session.pack(channel.connection, call)
                except ShmserveError:
                    while pending_requests:  # the results of the inputs before the invalid one
                        yield channel.wait(pending_requests.popleft())
                    raise
                pending_requests.append(channel.submit(packed_request))
                channel.send(min_messages=min_messages)
                if len(pending_requests) >= in_flight:
                    yield channel.wait(pending_requests.popleft())
            while pending_requests:
                yield channel.wait(pending_requests.popleft())
        finally:
            channel.cancel(pending_requests)

    @signature_of(call_of)
    def stream(self, /, *args: Any, **kwargs: Any) -> ResponseStream:
        """Run a model that sends any number of responses, and iterate over them as they arrive.

            with server.stream("words", text=[b"..."]) as responses:
                for response in responses:
                    print(response["output"])

        The arguments are those of `infer`, except that `timeout` applies to all responses together.
        If the program stops reading, the server stops sending (flow control); other requests
        continue. Outputs in a region are overwritten once the next response is requested.

        Returns:
            The iterator over the responses. Its `close`, or the end of a `with` block, cancels the
            request.

        Raises:
            ShmserveError: The request cannot be sent, as for `infer`. Later errors are raised by
                the iterator.
        """
        call = call_of(*args, **kwargs)
        channel = self._get_thread_channel()
        packed_request = self._session.pack(channel.connection, call, stream=True)
        return ResponseStream(channel, channel.open(packed_request), self)

    @signature_of(call_of)
    def infer_async(self, /, *args: Any, **kwargs: Any) -> Future[Result]:
        """Run a model in the background.

            future = server.infer_async("blur", image=image)
            future.result()["output"].shape
            # (1, 512, 512)

        The arguments are those of `infer`.

        Returns:
            The future of the result. Its callbacks run in the client's own thread. `cancel`
            cancels the request.

        Raises:
            ShmserveError: The request cannot be sent, as for `infer`. Later errors are those of
                the future.
        """
        call, connection = call_of(*args, **kwargs), self._session.connection()
        future = SharedChannel(connection).submit(self._session.pack(connection, call))
        # The client must not be collected, and thus closed, before the future completes.
        future.add_done_callback(partial(_keep_client, self))
        return future

    def allocate(
        self, tensors: Specs, *, device: str = "cpu", pin: bool = False, huge_pages: bool = False
    ) -> Region:
        """Allocate memory for tensors that the server reads and writes in place.

            shape = (1, 512, 512)
            region = server.allocate({"image": (shape, "FP32"), "output": (shape, "FP32")})
            region["image"][:] = 0.5
            server.infer("blur", region)
            region["output"][0, 5, 5]
            # 0.5

        Args:
            tensors: Shape and datatype of each tensor: {name: (shape, datatype)}. A datatype is
                "FP32", "INT64" and so on, or a type of numpy such as `numpy.float32` or "float32".
                BYTES is not possible.
            device: "cpu", or "cuda:0" for the server's device 0, which must have the same number
                in this process.
            pin: Whether workers on CUDA devices pin the host memory, for faster copies.
            huge_pages: Whether the host memory is taken from reserved huge pages.

        Returns:
            The region, whose tensors are not initialised.

        Raises:
            InvalidArgument: An argument is invalid.
            Unavailable: There is not enough memory.
        """
        return self._session.allocate(tensors, device=device, pin=pin, huge_pages=huge_pages)

    def attach(
        self, memory: Any, tensors: Specs | None = None, *, offset: int = 0, pin: bool = False
    ) -> Region:
        """Return a region over memory that another process has made; nothing is copied.

            frames = server.attach("/frames", {"image": ((1, 512, 512), "FP32")})
            server.infer("blur", frames)["output"].shape
            # (1, 512, 512)

        The maker of the memory owns it: `release` unmaps it in this process, and never unlinks it.

        Args:
            memory: A name in /dev/shm, an open descriptor (of a memfd, for instance), a
                `multiprocessing.shared_memory.SharedMemory`, or a region of another process.
            tensors: Shape and datatype of each tensor: {name: (shape, datatype)}. The first tensor
                begins at `offset`, the others at the next multiple of 64 bytes. By default the
                tensors of a region, or for other memory one UINT8 tensor "data" of all bytes.
            offset: The position of the first tensor in the memory, in bytes.
            pin: Whether workers on CUDA devices pin the memory.

        Returns:
            The region, over the same bytes.

        Raises:
            InvalidArgument: `memory` is not shared memory, or it is too small for the tensors.
            NotFound: There is no memory of this name.
            PermissionDenied: This user may not read and write the memory.
        """
        return self._session.attach(memory, tensors, offset=offset, pin=pin)

    def models(self) -> list[tuple[str, str]]:
        """Return the name and version of every available model.

            server.models()
            # [('blur', '1')]

        Raises:
            Disconnected: There is no server.
        """
        return self._session.connection().models.names()

    def ready(self, model: str = "", version: str = "") -> bool:
        """Check whether the server is ready, or a model, or one version of it.

            server.ready("blur")
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
        return self._session.ready(model, version)

    def load(self, model: str, config: Mapping[str, Any] | None = None) -> None:
        """Load a model, or load it again, and wait until it is ready.

            server.load("blur")
            server.load("blur", {"backend": "native", "max_batch_size": 8})

        This method, `unload`, `ready`, `metadata` and `statistics` use the server's HTTP listener.

        Args:
            model: The name of a model in the server's repositories.
            config: The fields of a config.pbtxt as JSON. They replace the whole config.pbtxt of the
                model, so that `backend` is needed unless the names of the model's files imply it.

        Raises:
            ShmserveError: The load failed, or --model-control-mode is not explicit.
            Unavailable: The server does not listen for HTTP.
        """
        self._session.load_model(model, config)

    def unload(self, model: str) -> None:
        """Unload a model and wait until it is unloaded.

            server.unload("blur")

        Args:
            model: The model's name.

        Raises:
            ShmserveError: There is no such model, or --model-control-mode is not explicit.
            Unavailable: The server does not listen for HTTP.
        """
        self._session.unload_model(model)

    def metadata(self, model: str, version: str = "") -> dict[str, Any]:
        """Return the inputs and outputs of a model.

            server.metadata("blur")["inputs"]
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
        return self._session.metadata(model, version)

    def statistics(self, model: str = "", version: str = "") -> list[dict[str, Any]]:
        """Return the statistics of each version of one model, or of all models.

            server.statistics("blur")[0]["inference_count"]
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
        return self._session.statistics(model, version)

    def _get_thread_channel(self) -> Channel:
        connection = self._session.connection()
        thread = threading.current_thread()
        channel = self._channels.get(thread)
        if channel is not None and channel.lock.locked():
            raise Unavailable(_THREAD_WAITS)
        if channel is None or channel.connection is not connection:
            return self._new_channel(thread, connection)
        return channel

    def _new_channel(self, thread: threading.Thread, connection: ServerConnection) -> Channel:
        """Return the channel of a thread, or the connection's channel if there are too many.

        Raises:
            Unavailable: There are too many channels, and the caller is the connection's thread.
        """
        with self._lock:
            for owner, channel in list(self._channels.items()):
                is_obsolete = channel.connection is not connection and not owner.is_alive()
                if is_obsolete or owner is thread:
                    self._former_channels.append(self._channels.pop(owner))
            self._close_former_channels()
            # The channel of an ended thread is reused rather than closed: workers may still use the
            # memory of its requests, and a generator of `map` may still wait for these requests.
            for owner, channel in self._channels.items():
                if not owner.is_alive() and not channel.lock.locked():
                    self._channels[thread] = self._channels.pop(owner)
                    return channel
            if len(self._channels) < _MAX_CHANNELS:
                with contextlib.suppress(OSError):  # no free descriptor for another channel
                    channel = self._channels[thread] = ThreadChannel(connection)
                    return channel
        shared_channel = SharedChannel(connection)
        shared_channel.check_may_wait()
        return shared_channel

    def close(self) -> None:
        """Disconnect; the server frees all resources of this client. This method is idempotent.

        Raises:
            Unavailable: A signal handler calls this while its thread waits for a response.
        """
        channel = self._channels.get(threading.current_thread())
        if channel is not None and channel.lock.locked():
            raise Unavailable(_THREAD_WAITS)
        self._session.close()
        if self._session.is_inherited:
            return
        with self._lock:
            for channel in self._channels.values():
                channel.close()
            self._channels.clear()
            for channel in self._former_channels:
                channel.close()
            self._former_channels.clear()

    def _close_former_channels(self) -> None:
        for channel in self._former_channels[:]:
            connection = channel.connection
            if not (connection.is_draining and connection.alive and channel.requests.pending_ids):
                self._former_channels.remove(channel)
                channel.close()

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def __reduce__(self) -> Any:
        return self._session.__reduce__()  # raises TypeError

    def __del__(self) -> None:
        self._session.close_later(self.close)


def _keep_client(server: Server, future: Future[Result]) -> None:
    """Do nothing. As a callback, it keeps a reference to `server` until the future completes."""
