"""The session of a client, sync or asyncio.

The connection is re-established after a restart of the server; the client's memory outlives it.
"""

from __future__ import annotations

import inspect
import os
import threading
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from numbers import Real
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar

import numpy as np

from shmserve.client import discovery
from shmserve.client.connection import ServerConnection
from shmserve.client.memory.cuda import DeviceSegment, device_number, open_exporter
from shmserve.client.memory.region import Region, Specs, attach_region
from shmserve.client.memory.segments import AnySegment, Memories, Segment
from shmserve.client.request.channel import DECOUPLED, NO_DESCRIPTOR
from shmserve.client.request.prepare import Options, PackedRequest, options_of, prepare
from shmserve.client.server_state import ClientModel
from shmserve.errors import (
    Disconnected,
    InvalidArgument,
    PermissionDenied,
    ShmserveError,
    TimedOut,
    Unauthenticated,
    Unavailable,
    Unsupported,
    from_status,
    suggestion,
)
from shmserve.ipc.memory.cuda_ipc import CudaExporter
from shmserve.ipc.tensors.schemas import runs_once

Tensors = Mapping[str, Any]
# The requested outputs: names, arrays of a region by name, or a region.
Outputs = Sequence[str] | Mapping[str, Any]
# A call: model, inputs, outputs, version, options, and the inputs given by keyword.
Call = tuple[str, Tensors | None, Outputs | None, str, Options, Tensors]

_REPOSITORY = "/v2/repository/models"  # the path of the models to load and unload
_DEFAULT_CONNECT_TIMEOUT_S = 10.0
_MIN_CONNECT_TIMEOUT_S = 0.1
_RETRY_PAUSE_S = 0.05  # seconds between two attempts to find a server
# The keywords of a call that are not inputs.
_OPTION_KEYWORDS = (
    *("outputs", "version", "timeout", "priority", "request_id", "parameters", "sequence"),
    *("start", "end", "traceparent"),
)

P = ParamSpec("P")
R = TypeVar("R")


def call_of(
    model: str,
    inputs: Tensors | None = None,
    /,
    *,
    outputs: Outputs | None = None,
    version: str = "",
    timeout: float | None = None,
    priority: int = 0,
    request_id: str = "",
    parameters: Mapping[str, Any] | None = None,
    sequence: int | str = 0,
    start: bool = False,
    end: bool = False,
    traceparent: str = "",
    **tensors: Any,
) -> Call:
    """Return the arguments of a call (see `sync.Server.infer`) with validated options.

    Raises:
        InvalidArgument: An option is invalid.
    """
    sequence_position = (sequence, start, end)
    options = options_of(request_id, parameters, priority, timeout, *sequence_position, traceparent)
    return model, inputs, outputs, version, options, tensors


call_of.__qualname__ = "infer"  # for the TypeError of a call that lacks the model


def check_in_flight(value: Any) -> None:
    """Raise InvalidArgument unless `value` is a possible number of requests in flight."""
    if not isinstance(value, int | np.integer) or value < 1:
        raise InvalidArgument(f"in_flight must be an integer >= 1, got {value!r:.80}")


def signature_of(
    source: Callable[P, Any],
) -> Callable[[Callable[..., R]], Callable[Concatenate[Any, P], R]]:
    """Return a decorator that gives a method the signature of `source`, for tools and help()."""

    def decorate(method: Callable[..., R]) -> Callable[Concatenate[Any, P], R]:
        self_parameter = inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)
        signature = inspect.signature(source)
        method.__signature__ = signature.replace(  # type: ignore[attr-defined]
            parameters=[self_parameter, *signature.parameters.values()],
            return_annotation=inspect.signature(method).return_annotation,
        )
        return method

    return decorate


def _check_names(model: ClientModel, inputs: Any, by_keyword: bool) -> None:
    """Raise InvalidArgument if an input is unknown; the message has the nearest name."""
    model_inputs = model.signature.inputs
    # A region contains outputs, too, so only a mapping is checked.
    is_mapping = isinstance(inputs, Mapping) and not isinstance(inputs, Region)
    for name in inputs if is_mapping else ():
        if name not in model_inputs:
            hint = suggestion(str(name), [*model_inputs, *(_OPTION_KEYWORDS if by_keyword else ())])
            raise InvalidArgument(
                f"unexpected inference input '{name}' for model '{model.name}'"
                + (hint or f", allowed are: {', '.join(model_inputs)}")
            )


def _model_path(
    model: str, version: str = "", *subpath: str, collection: str = "/v2/models"
) -> str:
    """Return the path of a model, or of one of its versions, in a collection of the HTTP API."""
    from urllib.parse import quote

    for name, value in (("model", model), ("version", version)):
        if not isinstance(value, str):
            raise InvalidArgument(f"{name} must be a string, got {value!r:.80}")
    path_segments = [model, *(("versions", version) if version else ()), *subpath]
    return "/".join([collection, *(quote(part, safe="") for part in path_segments)])


def check_number(name: str, value: Any) -> None:
    """Check that the argument `name` is a number.

    Raises:
        InvalidArgument: It has another type.
    """
    if not isinstance(value, Real):
        raise InvalidArgument(f"{name} must be a number, got {value!r:.80}")


def open_session(
    run_dir: str | os.PathLike[str] | None,
    memory_limit: int,
    timeout_s: float | None,
    token: str = "",
) -> Session:
    """Return a session; with a timeout, wait until there is a server that has loaded its models.

    Raises:
        InvalidArgument: An argument has a wrong type.
        Disconnected: There is no server, also after the timeout.
        Unavailable: The server still loads its models after the timeout.
    """
    check_number("memory_limit", memory_limit)
    check_number("timeout", timeout_s or 0)
    if timeout_s is None:
        return Session(run_dir, memory_limit, _DEFAULT_CONNECT_TIMEOUT_S, token)
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            remaining_s = max(_MIN_CONNECT_TIMEOUT_S, deadline - time.monotonic())
            session = Session(run_dir, memory_limit, remaining_s, token)
            try:
                session.wait_started(deadline)
                return session
            except BaseException:
                session.close()
                raise
        except Disconnected:
            if time.monotonic() + _RETRY_PAUSE_S >= deadline:
                raise
            time.sleep(_RETRY_PAUSE_S)


class Session:
    """The connection of a client to its server, and the client's shared memory."""

    def __init__(
        self,
        run_dir: str | os.PathLike[str] | None,
        memory_limit: int,
        timeout_s: float,
        token: str = "",
    ) -> None:
        """Connect to the server; `token` is sent with the requests of `request_api`.

        Raises:
            Disconnected: There is no server.
            Unavailable: The process has no free descriptor.
        """
        self._run_dir = run_dir
        self._headers = {"Authorization": f"Bearer {token}"} if token else {}
        self._server_dir: Path | None = None
        self._timeout_s = timeout_s
        self._lock = threading.RLock()
        self._is_closed = False
        self._cuda: CudaExporter | None = None
        self.memories = Memories(memory_limit, self._share, self._withdraw, self._wake_connection)
        self._connection = self._connect()

    def _connect(self) -> ServerConnection:
        self._server_dir = discovery.find(self._run_dir, self._server_dir)
        try:
            return ServerConnection(
                self._server_dir, self._timeout_s, self.memories.free_recycled_if_unlocked
            )
        except Disconnected:
            raise
        except OSError as error:
            raise Unavailable(NO_DESCRIPTOR) from error

    def connection(self) -> ServerConnection:
        """Return the connection, re-established if the server has exited or is being replaced.

        Raises:
            Disconnected: There is no server.
        """
        connection = self._connection
        is_usable = connection.alive and not connection.is_draining
        if is_usable and connection.pid == os.getpid() and not self._is_closed:
            return connection
        return self._reconnect(connection)

    def wait_started(self, deadline: float) -> None:
        """Wait until the server has loaded the models that it loads at its start.

        Raises:
            Disconnected: The server has exited.
            Unavailable: The server still loads its models at the deadline.
        """
        while not (connection := self.connection()).models.started:
            remaining_s = min(deadline - time.monotonic(), threading.TIMEOUT_MAX)
            if not connection.start_ended.wait(remaining_s):
                raise Unavailable("the server still loads its models; wait longer")

    def should_retry(
        self, connection: ServerConnection, call: Call, packed_request: PackedRequest | None
    ) -> bool:
        """Return whether to retry a call that failed on `connection`.

        A request is retried if its on-demand model was unloaded before the request reached it, or
        if a successor has replaced the server. In the second case, the session connects to the
        successor. Requests of sequences, and requests that write an output over an input, are
        never retried.

        Raises:
            Disconnected: The session cannot connect to the successor.
        """
        _, _, _, _, options, _ = call
        if options.sequence or (
            packed_request is not None and runs_once(packed_request.schema, packed_request.data)
        ):
            return False
        if packed_request is not None and connection.models.needs_load(*packed_request.model.key):
            return True
        if not connection.has_successor():
            return False
        self._reconnect(connection)
        return True

    def _reconnect(self, old_connection: ServerConnection) -> ServerConnection:
        if old_connection.pid != os.getpid():
            text = "a forked process cannot use its parent's connection: call connect() there"
            raise InvalidArgument(text)
        with self._lock:
            if self._is_closed:
                raise Disconnected("this client is closed")
            if self._connection is not old_connection:
                return self._connection
            connection = self._connect()
            try:
                self.memories.share_again(connection.share)
            except BaseException:
                connection.close()
                raise
            # Stored only now, when this client's memory is registered there. The old connection
            # ends by itself; waiting for it could deadlock with a future's callback in its thread.
            self._connection = connection
            return connection

    def _share(self, segment: AnySegment) -> None:
        self.connection().share(segment)

    def _wake_connection(self) -> None:
        self._connection.wake_thread()

    def _withdraw(self, segment: AnySegment) -> None:
        self._connection.withdraw(segment)

    def pack(self, connection: ServerConnection, call: Call, stream: bool = False) -> PackedRequest:
        """Return a packed request for `connection`, after loading its model if necessary.

        Raises:
            Unsupported: The model is decoupled, and `stream` is false.
            ShmserveError: The model cannot be loaded, or the request does not fit the model.
        """
        model, inputs, outputs, version, options, tensors = call
        if connection.models.needs_load(model, version):
            self.load(connection, model, version, options)
        client_model = connection.models.resolve(model, version)
        if client_model.decoupled and not stream:
            raise Unsupported(DECOUPLED % client_model.name)
        if inputs is not None and tensors:
            hint = suggestion(next(iter(tensors)), _OPTION_KEYWORDS)
            raise InvalidArgument(f"inputs are given as a mapping or by keyword, not both{hint}")
        try:
            given_inputs = tensors if inputs is None else inputs
            return prepare(self.memories, client_model, given_inputs, outputs, options)
        except InvalidArgument:
            _check_names(client_model, tensors if inputs is None else inputs, inputs is None)
            raise

    def ready(self, model: str = "", version: str = "") -> bool:
        """Check whether the server, or a model, is ready.

        Raises:
            Disconnected: There is no server.
            Unauthenticated, PermissionDenied: The client's token does not permit health checks.
        """
        path = _model_path(model, version, "ready") if model else "/v2/health/ready"
        try:
            self.request_api("GET", path)
        except (Disconnected, Unauthenticated, PermissionDenied):
            raise
        except ShmserveError:
            return False
        return True

    def load_model(self, model: str, config: Mapping[str, Any] | None = None) -> None:
        """Load a model with a request to the server's HTTP API."""
        from json import dumps

        body = {"parameters": {"config": dumps(config)}} if config else {}
        self.request_api("POST", _model_path(model, "", "load", collection=_REPOSITORY), body)

    def unload_model(self, model: str) -> None:
        """Unload a model with a request to the server's HTTP API."""
        self.request_api("POST", _model_path(model, "", "unload", collection=_REPOSITORY), {})

    def metadata(self, model: str, version: str) -> dict[str, Any]:
        """Return the metadata of a model version; of the latest one if `version` is ""."""
        model_metadata: dict[str, Any] = self.request_api("GET", _model_path(model, version))
        return model_metadata

    def statistics(self, model: str, version: str) -> list[dict[str, Any]]:
        """Return the statistics of each version of a model; of all models if `model` is ""."""
        path = _model_path(model, version, "stats") if model else "/v2/models/stats"
        model_stats: list[dict[str, Any]] = self.request_api("GET", path)["model_stats"]
        return model_stats

    def request_api(self, method: str, path: str, body: Any = None) -> Any:
        """Send a request to the HTTP API of this server, and return the decoded body.

        Raises:
            Unavailable: The server has no HTTP listener, or does not respond.
            ShmserveError: The server's error.
        """
        import http.client
        import json
        from urllib.parse import urlsplit

        self.connection()
        assert self._server_dir is not None
        urls = [urlsplit(url) for url in discovery.addresses(self._server_dir)]
        url = next((url for url in urls if url.scheme in ("http", "https") and url.hostname), None)
        if url is None:
            raise Unavailable(f"the server of {self._server_dir} needs --allow-http for this call")
        kind = http.client.HTTPSConnection if url.scheme == "https" else http.client.HTTPConnection
        connection = kind(str(url.hostname), url.port)
        try:
            payload = None if body is None else json.dumps(body)
            connection.request(method, path, payload, self._headers)
            response = connection.getresponse()
            content = response.read()
        except (OSError, http.client.HTTPException) as error:
            raise Unavailable(f"{url.geturl()}: no response: {error}") from error
        finally:
            connection.close()
        try:
            decoded_body = json.loads(content) if content else None
        except ValueError:
            decoded_body = None
        if response.status >= http.client.BAD_REQUEST:
            text = decoded_body.get("error") if isinstance(decoded_body, dict) else None
            text = text or f"{response.status} {response.reason}"
            hint = " (connect(token=...))" if response.status == http.client.UNAUTHORIZED else ""
            raise from_status(response.status, f"{text}{hint}")
        return decoded_body

    def __reduce__(self) -> Any:
        raise TypeError("a client cannot be pickled or copied: call connect() in the other process")

    @staticmethod
    def load(connection: ServerConnection, model: str, version: str, options: Options) -> None:
        """Load an on-demand model, unless it is loaded, within the timeout of a request.

        Raises:
            TimedOut: The timeout expired.
            ShmserveError: The load failed.
        """
        while connection.models.needs_load(model, version):
            remaining_s = 0.0
            if options.deadline_ns:
                remaining_s = max(1e-6, (options.deadline_ns - time.monotonic_ns()) / 1e9)
            try:
                connection.load_on_demand(model, remaining_s)
            except Unavailable as error:
                if 0 < options.deadline_ns <= time.monotonic_ns():
                    raise TimedOut(error.message) from None
                raise
            if connection.models.has(model):
                break  # `resolve` then reports whether this version exists

    def allocate(
        self, tensors: Specs, *, device: str = "cpu", pin: bool = False, huge_pages: bool = False
    ) -> Region:
        """Allocate a region; see `sync.Server.allocate`."""
        self.connection()
        number = device_number(device)
        if number is None:
            if not pin and not huge_pages:
                return Region(self.memories, tensors)
            return Region(self.memories, tensors, partial(Segment, pin=pin, huge_pages=huge_pages))
        if pin or huge_pages:
            raise InvalidArgument("only host memory can be pinned or use huge pages")
        with self._lock:
            if self._cuda is None:
                self._cuda = open_exporter()
            cuda = self._cuda
        return Region(self.memories, tensors, partial(DeviceSegment, cuda, number))

    def attach(
        self, source: Any, tensors: Specs | None = None, *, offset: int = 0, pin: bool = False
    ) -> Region:
        """Return a region over memory that exists; see `sync.Server.attach`."""
        self.connection()
        return attach_region(self.memories, source, tensors, offset=offset, pin=pin)

    def close_later(self, close: Callable[[], None]) -> None:
        """Call `close` for a garbage-collected client in the connection's thread, and warn.

        The garbage collector may run in any thread and at any time, where closing is not safe.
        """
        if self._is_closed or self.is_inherited:
            return
        try:
            self._connection.call(lambda _: close())
        except Disconnected:
            close()
        warnings.warn("a client was not closed; call its close()", ResourceWarning, stacklevel=3)

    @property
    def is_inherited(self) -> bool:
        """Return whether this process was forked, so that its parent owns the connection."""
        return self._connection.pid != os.getpid()

    def close(self) -> None:
        """Disconnect; arrays keep their memory. A forked child does not affect its parent."""
        if self.is_inherited:
            return
        with self._lock:
            was_open = not self._is_closed
            self._is_closed = True
        if was_open:
            # Without the lock: this waits for the connection's thread, which may be in a callback
            # that requests the connection.
            self._connection.close()
            self.memories.close()
