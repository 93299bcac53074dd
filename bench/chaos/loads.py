"""Clients of each transport and each kind of scheduler, which check the responses.

A load is a context manager that yields `send()`, which performs one request, one sequence or one
stream. `send` raises WrongResponse for an incorrect response, and the exception of its client
library for an error.
"""

from __future__ import annotations

import contextlib
import http.client
import itertools
import json
import queue
import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, NamedTuple

import numpy as np
import tritonclient.grpc as triton
from tritonclient.utils import InferenceServerException

import shmserve.client
from bench.chaos.ledger import Ledger
from shmserve.client import ShmserveError
from tests.support.regions import SharedObject
from tests.support.servers import Server
from tests.support.wire.raw_http import Reply, in_region, json_input, raw_connection, shm_input

# Maximum seconds of a request; a later response counts as lost.
REQUEST_TIMEOUT_S = 60.0
_MAX_PAUSE_S = 0.1

SendRequest = Callable[[], None]
OpenLoad = Callable[[Server, random.Random], AbstractContextManager[SendRequest]]
# Arguments: the model, its inputs, options of a sequence; returns the outputs by name.
Infer = Callable[..., Any]

_ids = itertools.count(1)


class WrongResponse(Exception):
    """An incorrect response."""


class ErrorResponse(Exception):
    """An HTTP error response, as text."""


def expect(actual: Any, expected_value: Any) -> None:
    """Compare a response with the expected values. Raises WrongResponse if they differ."""
    if not np.array_equal(actual, expected_value):
        raise WrongResponse(f"got {actual!r:.300}, expected {expected_value!r:.300}")


def _ok(reply: Reply) -> Reply:
    if reply.status != 200:
        raise ErrorResponse(f"{reply.status}: {reply.error}")
    return reply


# --- the transports: functions that run a model


@contextmanager
def _open_json_client(server: Server) -> Iterator[Infer]:
    def infer(model: str, arrays: dict[str, Any], **sequence: Any) -> Any:
        parameters = {f"sequence_{key}": value for key, value in sequence.items()}
        body: dict[str, Any] = {"inputs": [json_input(*item) for item in arrays.items()]}
        body |= {"id": (request_id := str(next(_ids))), "parameters": parameters}
        reply = _ok(connection.infer(model, body))
        expect(reply.json()["id"], request_id)
        return reply.tensors()

    with server.http(REQUEST_TIMEOUT_S) as connection:
        yield infer


@contextmanager
def _open_binary_client(server: Server) -> Iterator[Infer]:
    kinds = {"int32": "INT32", "float32": "FP32"}

    def infer(model: str, arrays: dict[str, Any]) -> Any:
        inputs = [(n, kinds[a.dtype.name], a.shape, a.tobytes()) for n, a in arrays.items()]
        options = {"parameters": {"binary_data_output": True}}
        return _ok(connection.infer_binary(model, inputs, **options)).tensors()

    with server.http(REQUEST_TIMEOUT_S) as connection:
        yield infer


@contextmanager
def _open_grpc_client(server: Server) -> Iterator[Infer]:
    def infer(model: str, arrays: dict[str, Any], id: int = 0, **flags: Any) -> Any:  # noqa: A002
        request_id = str(next(_ids))
        options = {f"sequence_{key}": value for key, value in flags.items()}
        result = client.infer(
            model,
            [_grpc_input(*item) for item in arrays.items()],
            request_id=request_id,
            sequence_id=id,
            client_timeout=REQUEST_TIMEOUT_S,
            **options,
        )
        response = result.get_response()
        expect(response.id, request_id)
        return {output.name: result.as_numpy(output.name) for output in response.outputs}

    with _grpc_client(server) as client:
        yield infer


def _grpc_client(server: Server) -> triton.InferenceServerClient:
    options = [("grpc.use_local_subchannel_pool", 1), ("grpc.max_reconnect_backoff_ms", 100)]
    options.append(("grpc.initial_reconnect_backoff_ms", 20))
    return triton.InferenceServerClient(server.grpc_url, channel_args=options)


def _grpc_input(name: str, array: Any) -> Any:
    tensor = triton.InferInput(name, array.shape, triton.np_to_triton_dtype(array.dtype))
    return tensor.set_data_from_numpy(array)


@contextmanager
def _open_native_client(server: Server) -> Iterator[Infer]:
    def infer(model: str, arrays: dict[str, Any], id: int = 0, **flags: Any) -> Any:  # noqa: A002
        result = client.infer(model, arrays, timeout=REQUEST_TIMEOUT_S, sequence=id, **flags)
        return {name: np.array(result[name]) for name in result}

    with shmserve.client.connect(server.run_dir) as client:
        yield infer


OpenClient = Callable[[Server], AbstractContextManager[Infer]]


# --- the loads


def open_sums(open_client: OpenClient, model: str = "simple") -> OpenLoad:
    """Return a load that requests INPUT0 + INPUT1 and INPUT0 - INPUT1, in batches."""

    @contextmanager
    def load(server: Server, rng: random.Random) -> Iterator[SendRequest]:
        def send() -> None:
            rows = rng.randint(1, 4)
            first_input = _numbers(rng, np.int32, rows, 16)
            second_input = _numbers(rng, np.int32, rows, 16)
            outputs = infer(model, {"INPUT0": first_input, "INPUT1": second_input})
            expect(outputs["OUTPUT0"], first_input + second_input)
            expect(outputs["OUTPUT1"], first_input - second_input)

        with open_client(server) as infer:
            yield send

    return load


def _numbers(rng: random.Random, dtype: Any, *shape: int) -> Any:
    return np.random.default_rng(rng.getrandbits(32)).integers(0, 1 << 20, shape).astype(dtype)


def open_function(
    open_client: OpenClient,
    model: str,
    expected_of: Callable[[Any], Any],
    names: str = "X Y",
    **options: int,
) -> OpenLoad:
    """Return a load that sends an array, and checks that the response is a function of it.

    Args:
        open_client: Connects a client of a transport.
        model: The model.
        expected_of: The function.
        names: The names of the input and of the output.
        **options: `different`, the number of distinct inputs; `most`, their maximum length.
    """

    @contextmanager
    def load(server: Server, rng: random.Random) -> Iterator[SendRequest]:
        input_name, output_name = names.split()

        def send() -> None:
            array = _numbers(rng, np.float32, rng.randint(1, options.get("most", 2000)))
            if "different" in options:
                array = np.arange(100, dtype=np.float32) + rng.randrange(options["different"])
            expect(infer(model, {input_name: array})[output_name], expected_of(array))

        with open_client(server) as infer:
            yield send

    return load


def open_sequences(open_client: OpenClient, model: str) -> OpenLoad:
    """Return a load that sends a complete sequence, and checks the sum in each response."""

    @contextmanager
    def load(server: Server, rng: random.Random) -> Iterator[SendRequest]:
        def send() -> None:
            sequence_id, values = next(_ids), _numbers(rng, np.int32, rng.randint(2, 8))
            for index, value in enumerate(values):
                flags = {"start": index == 0, "end": index == len(values) - 1}
                outputs = infer(model, {"INPUT0": np.full((1, 1), value)}, id=sequence_id, **flags)
                expect(outputs["OUTPUT0"], [[values[: index + 1].sum(dtype=np.int32)]])

        with open_client(server) as infer:
            yield send

    return load


def _repeated(rng: random.Random) -> dict[str, Any]:
    count = rng.randint(1, 60)
    delays = np.full(count, rng.choice([0, 0, 1]), np.uint32)
    return {"IN": _numbers(rng, np.int32, count), "DELAY": delays, "WAIT": np.zeros(1, np.uint32)}


@contextmanager
def open_native_stream(server: Server, rng: random.Random) -> Iterator[SendRequest]:
    """Yield a function that reads all responses of a decoupled model in order."""

    def send() -> None:
        inputs = _repeated(rng)
        with client.stream("repeat", inputs, timeout=REQUEST_TIMEOUT_S) as responses:
            received = [
                (int(response["OUT"][0]), int(response["IDX"][0])) for response in responses
            ]
        expect(received, [(value, index) for index, value in enumerate(inputs["IN"])])

    with shmserve.client.connect(server.run_dir) as client:
        yield send


@contextmanager
def open_grpc_stream(server: Server, rng: random.Random) -> Iterator[SendRequest]:
    """Yield a function that reads the responses to a request on one gRPC stream."""
    results: queue.Queue[Any] = queue.Queue()

    def response() -> Any:
        result, error = results.get(timeout=REQUEST_TIMEOUT_S)
        if error is not None:
            raise error
        return result

    def send() -> None:
        inputs, request_id = _repeated(rng), str(next(_ids))
        client.async_stream_infer(
            "repeat",
            [_grpc_input(*item) for item in inputs.items()],
            request_id=request_id,
            enable_empty_final_response=True,
        )
        for index, value in enumerate(inputs["IN"]):
            reply = response()
            outputs = [str(reply.as_numpy(name)) for name in ("OUT", "IDX")]
            received = (reply.get_response().id, outputs)
            expected_response = (request_id, [f"[{value}]", f"[{index}]"])
            if received != expected_response:
                raise WrongResponse(f"got {received}, expected {expected_response}")
        final = response().get_response()
        expect((final.id, len(final.outputs)), (request_id, 0))

    with _grpc_client(server) as client:
        client.start_stream(lambda result, error: results.put((result, error)))
        try:
            yield send
        finally:
            client.stop_stream(cancel_requests=True)


_TEXTS: dict[tuple[str, int], str] = {}  # the first complete text by prompt and length
_PROMPTS = ("the quick brown", "it was the best", "naïve café", "1 2 3")


def open_texts(stream: bool) -> OpenLoad:
    """Return a load that generates text greedily. A prompt must have the same text each time."""

    @contextmanager
    def load(server: Server, rng: random.Random) -> Iterator[SendRequest]:
        def send() -> None:
            prompt, tokens = rng.choice(_PROMPTS), rng.choice((3, 8))
            body = {"model": "tiny", "prompt": prompt, "max_tokens": tokens, "temperature": 0}
            reply = connection.post(
                "/v1/completions", body | {"ignore_eos": True, "stream": stream}
            )
            if reply.status != 200:
                raise ErrorResponse(f"{reply.status}: {reply.body.decode()}")
            generated_text = _streamed_text(reply) if stream else reply.json()["choices"][0]["text"]
            expect(generated_text, _TEXTS.setdefault((prompt, tokens), generated_text))

        with server.http(REQUEST_TIMEOUT_S) as connection:
            yield send

    return load


def _streamed_text(reply: Reply) -> str:
    events = [line[6:] for line in reply.body.decode().splitlines() if line.startswith("data: ")]
    events_json = [json.loads(event) for event in events if event != "[DONE]"]
    for event in events_json:
        if "error" in event:
            raise ErrorResponse(f"in the stream: {event['error']['message']}")
    if events[-1:] != ["[DONE]"]:
        raise WrongResponse(f"the stream ends with {events[-1:]}, expected ['[DONE]']")
    return "".join(choice["text"] for event in events_json for choice in event["choices"])


# Regions of clients that a fault truncates and unlinks.
REGIONS: dict[str, SharedObject] = {}


def open_in_region(may_be_truncated: bool) -> OpenLoad:
    """Return a load of requests whose input and output are in one registered region.

    With `may_be_truncated`, a fault may truncate the region. Only the region's client may then lose
    a response.
    """

    @contextmanager
    def load(server: Server, rng: random.Random) -> Iterator[SendRequest]:
        count, size = 4096, 4096 * 4

        def send() -> None:
            values = _numbers(rng, np.float32, count)
            shm_tensor = shm_input("INPUT0", "FP32", [count], shared_object.name, size)
            output = {"name": "OUTPUT0", "parameters": in_region(shared_object.name, size, size)}
            with _truncated_region():
                shared_object.write(values)
            _ok(connection.infer("identity", {"inputs": [shm_tensor], "outputs": [output]}))
            with _truncated_region():
                expect(shared_object.read(np.float32, count, size), values)

        with server.http(REQUEST_TIMEOUT_S) as connection, SharedObject(2 * size) as shared_object:
            _ok(connection.register(shared_object.name, shared_object.key, 2 * size))
            if may_be_truncated:
                REGIONS[shared_object.name] = shared_object
            try:
                yield send
            finally:
                REGIONS.pop(shared_object.name, None)
                with contextlib.suppress(OSError, http.client.HTTPException):
                    connection.unregister(shared_object.name)

    return load


@contextmanager
def _truncated_region() -> Iterator[None]:
    """Convert the failed access to a region that a fault has truncated to the client's error."""
    try:
        yield
    except ValueError as error:
        raise ErrorResponse(f"INVALID: {error}") from None


@contextmanager
def open_in_place(server: Server, rng: random.Random) -> Iterator[SendRequest]:
    """Yield a function that sends a request whose tensors are in regions of the native client."""

    def send() -> None:
        input_region["INPUT0"][:] = values = _numbers(rng, np.float32, 4096)
        output_region["OUTPUT0"][:] = 0
        client.infer("identity", input_region, outputs=output_region, timeout=REQUEST_TIMEOUT_S)
        expect(output_region["OUTPUT0"], values)

    spec = ((4096,), "FP32")
    with shmserve.client.connect(server.run_dir) as client:
        input_region = client.allocate({"INPUT0": spec})
        output_region = client.allocate({"OUTPUT0": spec})
        yield send


@contextmanager
def open_disconnecting(server: Server, rng: random.Random) -> Iterator[SendRequest]:
    """Yield a function that disconnects in the middle of a request, or before its response."""
    body = json.dumps(
        {"inputs": [json_input(f"INPUT{n}", np.ones((1, 16), np.int32)) for n in (0, 1)]}
    )
    head = "POST /v2/models/simple/infer HTTP/1.1\r\nHost: localhost\r\n"
    request = f"{head}Content-Length: {len(body)}\r\n\r\n{body}".encode()

    def send() -> None:
        with raw_connection(server.http_port) as connection:
            connection.sendall(request[: rng.choice([rng.randrange(len(request)), len(request)])])

    yield send


class Load(NamedTuple):
    """An entry of the table of loads.

    Its name begins with the transport, by which the ledger allows errors.
    """

    name: str
    open: OpenLoad
    clients: int = 1


LOADS = (
    Load("http-json", open_sums(_open_json_client)),
    Load("http-binary", open_sums(_open_binary_client), 2),
    Load("grpc-batched", open_sums(_open_grpc_client)),
    Load("native-batched", open_sums(_open_native_client)),
    Load("http-swap", open_sums(_open_binary_client, "swap")),
    Load("native-swap", open_sums(_open_native_client, "swap")),
    Load(
        "http-ensemble",
        open_function(_open_binary_client, "pipeline", lambda x: (x + 1) * 2, "IN OUT"),
    ),
    Load(
        "native-ensemble",
        open_function(_open_native_client, "pipeline", lambda x: (x + 1) * 2, "IN OUT"),
    ),
    Load("http-cached", open_function(_open_json_client, "cached", lambda x: x + 1, different=50)),
    Load("grpc-limited", open_function(_open_grpc_client, "limited", lambda x: x * 3)),
    Load("native-rival", open_function(_open_native_client, "rival", lambda x: x * 3)),
    Load("http-sequence", open_sequences(_open_json_client, "sums_oldest")),
    Load("grpc-sequence", open_sequences(_open_grpc_client, "sums_direct")),
    Load("native-sequence", open_sequences(_open_native_client, "sums_direct")),
    Load("native-stream", open_native_stream),
    Load("grpc-stream", open_grpc_stream),
    Load("http-text", open_texts(stream=False)),
    Load("http-text-stream", open_texts(stream=True)),
    Load("http-region", open_in_region(may_be_truncated=False)),
    Load("http-cut-region", open_in_region(may_be_truncated=True)),
    Load("native-in-place", open_in_place),
    Load("http-vanishing", open_disconnecting),
)


def as_text(error: BaseException) -> str:
    """Return an error in the form of the ledger; raise an error that no client may receive."""
    match error:
        case WrongResponse():
            return f"wrong: {error}"
        case ErrorResponse():
            return str(error)
        case shmserve.client.Disconnected() | shmserve.client.TimedOut() | queue.Empty():
            return f"lost: {error!r}"
        case ShmserveError():
            return f"{error.code}: {error.message}"
        case InferenceServerException() if _is_connection_error(error):
            return f"lost: {error}"
        case InferenceServerException():
            return f"{error.status()}: {error.message()}"
        case OSError() | http.client.HTTPException():
            return f"lost: {error!r}"
    raise error


def _is_connection_error(error: InferenceServerException) -> bool:
    phrases = (
        "Socket closed",
        "connect",
        "Stream removed",
        "RST_STREAM",
        "Deadline",
        "GOAWAY",
        "EOF",
        "no longer in valid state",
    )
    return any(phrase in str(error.message()) for phrase in phrases)


class Clients:
    """Threads that send requests until they are stopped.

    Each thread has its own connection, and opens a new one after an error.
    """

    def __init__(self, server: Server, ledger: Ledger, seed: int, loads: tuple[Load, ...]) -> None:
        self._server, self._ledger = server, ledger
        self._stop = threading.Event()
        self._threads = []
        for load in loads:
            for number in range(load.clients):
                name = f"{load.name}.{number}"
                ledger.add_client(name)
                arguments = (load, name, random.Random(f"{seed} {name}"))
                self._threads.append(threading.Thread(target=self._run, args=arguments, name=name))

    def __enter__(self) -> Clients:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()

    def _run(self, load: Load, name: str, rng: random.Random) -> None:
        start_s = time.monotonic()
        while not self._stop.is_set():
            try:
                with load.open(self._server, rng) as send:
                    while not self._stop.is_set():
                        start_s = time.monotonic()
                        send()
                        self._ledger.record_response(load.name, name, start_s)
                        self._stop.wait(rng.random() * _MAX_PAUSE_S)
                        start_s = time.monotonic()
            except Exception as error:
                self._record_error(load, name, start_s, error)
            self._stop.wait(_MAX_PAUSE_S)

    def _record_error(self, load: Load, name: str, started_at: float, error: Exception) -> None:
        try:
            self._ledger.record_error(load.name, name, started_at, as_text(error))
        except Exception as unknown:
            self._ledger.fail(f"{name}: {unknown!r}")
            self._stop.set()
