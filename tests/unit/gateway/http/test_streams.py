"""Any number of responses to one HTTP request: generate, generate_stream, infer."""

import asyncio
import itertools
import json
import socket
from collections.abc import Iterator
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import pytest

from shmserve.gateway.http.messages import drain_or_abort
from shmserve.gateway.inference.body_arrival import SLOWEST_RATE
from shmserve.ipc.credit import FIRST_CREDIT
from shmserve.ipc.memory.arena import Arena
from shmserve.ipc.messages import inference as m
from shmserve.ipc.tensors.descriptors import TensorRef
from shmserve.ipc.tensors.schemas import Inferred, pack_inferred
from tests.rigs.gateway_rig import (
    Rig,
    Scheduler,
    accepts_connections,
    echo,
    end,
    error,
    identity_config,
    model_config,
    rig,
)
from tests.rigs.gateway_rig import tensor_config as tensor
from tests.support.messages import inference_of
from tests.support.waiting import until
from tests.support.wire.raw_http import Http, Reply, join_bytes, read_reply

REPEAT_MODEL = {
    **model_config(
        "repeat",
        0,
        [tensor("IN", "INT32", [-1])],
        [tensor("OUT", "INT32", [-1]), tensor("EXTRA", "BYTES", [1])],
    ),
    "model_transaction_policy": {"decoupled": True},
}
EVENT_STREAM = "text/event-stream"
LINES = "application/x-ndjson"
NOT_ONE = (
    "generate expects model to produce exactly 1 response, use generate stream for model that "
    "generates various number of responses"
)


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    with rig(tmp_path_factory.mktemp("run"), body_timeout_s=3.0) as model_rig:
        model_rig.open()
        until("it listens", lambda: accepts_connections(model_rig.port))
        yield model_rig


@pytest.fixture
def scheduler(gateway: Rig) -> Scheduler:
    scheduler = gateway.scheduler(echo)
    scheduler.holds_responses = True
    gateway.publish(REPEAT_MODEL, scheduler)
    return scheduler


def response(number: int, *values: int, final: bool = False, extra: str = "") -> m.Responded:
    data = np.array(values, np.int32).tobytes()
    outputs = [TensorRef("OUT", "INT32", (len(values),), data)]
    if extra:
        outputs.append(TensorRef("EXTRA", "BYTES", (1,), join_bytes([extra.encode()])))
    return m.Responded(number, "", "", *pack_inferred(Inferred(tuple(outputs))), final)


class SentRequest:
    """A sent request, and the responses that the test sends to it as the model."""

    def __init__(
        self,
        gateway: Rig,
        scheduler: Scheduler,
        verb: str,
        body: Any,
        accept: str = "",
        version: str = "1.1",
    ) -> None:
        self.connection = socket.create_connection(("127.0.0.1", gateway.port), timeout=20)
        raw = json.dumps(body).encode()
        path = verb if verb.startswith("/") else f"/v2/models/repeat/{verb}"
        head = f"POST {path} HTTP/{version}\r\nHost: localhost\r\n"
        head += f"Content-Length: {len(raw)}\r\n" + (f"Accept: {accept}\r\n" if accept else "")
        waiting_before = len(scheduler.unanswered_submits)
        self.connection.sendall(head.encode() + b"\r\n" + raw)
        until("it is there", lambda: len(scheduler.unanswered_submits) > waiting_before)
        self._peer, submit = scheduler.unanswered_submits[-1]
        self._scheduler = scheduler
        self.number = submit.id
        self.inference = inference_of(submit)

    def respond(self, *messages: m.Responded | m.Failed) -> None:
        self._scheduler.send(self._peer, *messages)

    def reply(self) -> Reply:
        return read_reply(self.connection)

    def raw(self) -> bytes:
        stream = b""
        while piece := self.connection.recv(65536):
            stream += piece
        return stream

    @property
    def cancelled(self) -> bool:
        return any(
            isinstance(message, m.Cancel) and message.id == self.number
            for message in self._scheduler.notifications
        )

    @property
    def granted(self) -> int:
        """Return how many responses the model may send beyond the first credit."""
        return sum(
            message.responses
            for message in self._scheduler.notifications
            if isinstance(message, m.Credit) and message.id == self.number
        )


INFER = {"id": "i1", "inputs": [{"name": "IN", "datatype": "INT32", "shape": [1], "data": [1]}]}


@pytest.fixture
def send(gateway: Rig, scheduler: Scheduler) -> Iterator[Any]:
    sent_requests: list[SentRequest] = []

    def make(verb: str, body: Any = None, accept: str = "", version: str = "1.1") -> SentRequest:
        body = body or (INFER if verb == "infer" else {"IN": 1})
        sent_requests.append(SentRequest(gateway, scheduler, verb, body, accept, version))
        return sent_requests[-1]

    yield make
    for call in sent_requests:
        call.connection.close()


def events(reply: Reply) -> list[Any]:
    assert reply.headers["Content-Type"] == "text/event-stream; charset=utf-8"
    *events, tail = reply.body.decode().split("\n\n")
    assert tail == ""
    return [json.loads(event.removeprefix("data: ")) for event in events]


# --- generate


def test_one_response(send: Any) -> None:
    call = send("generate", {"IN": [1, 2], "id": "x1", "k": True})
    (tensor,) = call.inference.inputs
    assert (tensor.name, tensor.shape) == ("IN", (2,))
    assert call.inference.parameters == {"id": "x1", "k": True}
    call.respond(response(call.number, 7, extra="ü"), end(call.number))
    reply = call.reply().ok()
    assert reply.headers["Content-Type"] == "application/json"
    text = '{"EXTRA":"ü","OUT":7,"id":"x1","model_name":"repeat","model_version":"1"}'
    assert reply.body.decode() == text


@pytest.mark.parametrize(
    ("case", "status", "text"),
    [
        ("nothing", 200, NOT_ONE), ("two", 200, NOT_ONE), ("error", 404, "bad"),
        ("error and one", 404, NOT_ONE), ("one and error", 200, NOT_ONE), ("failed", 500, "bad"),
    ],
)  # fmt: skip
def test_several_or_no_responses_are_an_error(send: Any, case: str, status: int, text: str) -> None:
    call = send("generate")
    number = call.number
    success, failure = response(number, 1), error(number, "bad")
    messages: dict[str, list[Any]] = {
        "nothing": [end(number)],
        "two": [success, success, end(number)],
        "error": [failure, end(number)],
        "error and one": [failure, success, end(number)],
        "one and error": [success, failure, end(number)],
        "failed": [m.Failed(number, "INTERNAL", "bad", 0, early=False)],
    }
    call.respond(*messages[case])
    reply = call.reply()
    assert (reply.status, reply.json()) == (status, {"error": text})


def test_a_second_response_ends_the_request(send: Any) -> None:
    call = send("generate")
    call.respond(response(call.number, 1), response(call.number, 2))
    assert call.reply().json() == {"error": NOT_ONE}
    until("the model hears of it", lambda: call.cancelled)


def test_a_full_queue(send: Any) -> None:
    for verb in ("generate", "generate_stream"):
        call = send(verb)
        call.respond(m.Failed(call.number, "UNAVAILABLE", "full", 2, early=False))
        reply = call.reply()
        assert (reply.status, reply.error, reply.headers["Retry-After"]) == (503, "full", "2")


# --- generate_stream


def test_each_response_is_an_event_in_a_chunk(send: Any) -> None:
    call = send("generate_stream", {"IN": 1, "id": "x1"})
    call.respond(response(call.number, 7), response(call.number, 8, 9), end(call.number))
    raw = b""
    while not raw.endswith(b"0\r\n\r\n"):
        raw += call.connection.recv(65536)
    head, _, body = raw.partition(b"\r\n\r\n")
    assert b"Transfer-Encoding: chunked" in head and b"Content-Length" not in head
    first = b'data: {"OUT":7,"id":"x1","model_name":"repeat","model_version":"1"}\n\n'
    second = b'data: {"OUT":[8,9],"id":"x1","model_name":"repeat","model_version":"1"}\n\n'
    chunks = b"".join(b"%x\r\n%b\r\n" % (len(event), event) for event in (first, second))
    assert body == chunks + b"0\r\n\r\n"


def test_no_response_is_an_empty_stream(send: Any) -> None:
    call = send("generate_stream")
    call.respond(end(call.number))
    reply = call.reply().ok()
    assert (events(reply), reply.body) == ([], b"")


def test_an_event_is_sent_before_the_next_response(send: Any) -> None:
    call = send("generate_stream")
    call.respond(response(call.number, 1))
    received = b""
    while not received.endswith(b"\n\n\r\n"):
        received += call.connection.recv(65536)
    call.respond(response(call.number, 2, final=True))
    remaining = b""
    while not remaining.endswith(b"0\r\n\r\n"):
        remaining += call.connection.recv(65536)
    assert b'"OUT":2' in remaining


def test_the_first_response_determines_the_status(send: Any) -> None:
    call = send("generate_stream")
    call.respond(error(call.number, "bad"), response(call.number, 1, final=True))
    reply = call.reply()
    assert reply.status == 404
    first_event, second_event = events(reply)
    assert (first_event, second_event["OUT"]) == ({"error": "bad"}, 1)


def test_an_error_after_the_first_is_an_event(send: Any) -> None:
    call = send("generate_stream")
    number = call.number
    call.respond(response(number, 1), error(number, "bad"), response(number, 2))
    call.respond(m.Failed(number, "INTERNAL", "gone", 0, early=False))
    first_event, bad_event, second_event, gone_event = events(call.reply().ok())
    assert (first_event["OUT"], second_event["OUT"]) == (1, 2)
    assert (bad_event, gone_event) == ({"error": "bad"}, {"error": "gone"})


TEXT_INPUTS = [
    {**tensor(name, "BYTES", [1]), "optional": True}
    for name in ("text_input", "messages", "sampling_parameters")
]
TEXT_OUTPUTS = [tensor(name, "BYTES", [1]) for name in ("text_output", "finish_reason", "usage")]


@pytest.mark.parametrize("api", ["completions", "chat/completions", "responses"])
def test_texts_before_an_error_are_sent_if_they_arrive_together(
    gateway: Rig, scheduler: Scheduler, send: Any, api: str
) -> None:
    config = model_config("text", 0, TEXT_INPUTS, TEXT_OUTPUTS)
    policy = {"model_transaction_policy": {"decoupled": True}}
    gateway.publish({**config, **policy}, scheduler)
    prompts = {"prompt": "x", "input": "x", "messages": [{"role": "user", "content": "x"}]}
    name = {"completions": "prompt", "responses": "input"}.get(api, "messages")
    call = send(f"/v1/{api}", {"model": "text", "stream": True, name: prompts[name]})
    responses = []
    for text in ("a", "b"):
        values = {"text_output": text, "finish_reason": "", "usage": ""}
        outputs = [
            TensorRef(output, "BYTES", (1,), join_bytes([value.encode()]))
            for output, value in values.items()
        ]
        packed = pack_inferred(Inferred(tuple(outputs)))
        responses.append(m.Responded(call.number, "", "", *packed, False))
    call.respond(*responses, m.Failed(call.number, "INTERNAL", "gone", 0, early=False))
    body = call.reply().ok().body
    places = [body.index(text) for text in (b'"a"', b'"b"', b'"gone"')]
    assert places == sorted(places)


@pytest.mark.parametrize("verb", ["generate", "generate_stream"])
def test_errors_before_the_submission(gateway: Rig, scheduler: Scheduler, verb: str) -> None:
    path = f"/v2/models/repeat/{verb}"
    http = Http(gateway.port)
    cases: list[tuple[int, str, Any, dict[str, str]]] = [
        (500, "attempt to get members for non-object", b"[]", {"Content-Encoding": "Identity"}),
        (500, "Unable to parse 'data': attempt to access JSON non-signed-integer as signed-integer "
         "(input 'IN' has \"x\")", {"IN": "x"}, {}),
        (400, "Unsupported content-encoding, only 'identity' is supported.", {"IN": 1},
         {"Content-Encoding": "gzip"}),
    ]  # fmt: skip
    for status, text, body, headers in cases:
        reply = http.post(path, body, headers)
        assert (reply.status, reply.error) == (status, text)
        assert reply.headers["Content-Type"] == "application/json"
    for body_text, prefix in (
        ('{"IN": 1, "IN": 1}', "[request id: <id_unknown>]"),
        ('{"parameters": {"IN": 1}, "IN": 1, "id": "a"}', "[request id: a]"),
        ('{"IN": 1, "parameters": {"IN": 1}}',
         "Converting keyword: 'parameters': [request id: <id_unknown>]"),
    ):  # fmt: skip
        reply = http.post(path, body_text.encode())
        expected_error = f"{prefix} input 'IN' already exists in request"
        assert (reply.status, reply.error) == (400, expected_error)
    unknown_reply = http.post(f"/v2/models/nope/{verb}", {"IN": 1})
    assert unknown_reply.status == 404
    assert unknown_reply.error == "Request for unknown model: 'nope' is not found"
    assert http.get(path).status == 405
    http.close()


# --- infer as a stream


def test_without_accept_a_decoupled_model_is_refused(gateway: Rig, scheduler: Scheduler) -> None:
    reply = gateway.http.infer("repeat", b"not json")
    text = "HTTP end point doesn't support models with decoupled transaction policy"
    assert (reply.status, reply.error) == (501, text)


def test_infer_as_events_and_as_lines(send: Any) -> None:
    expected = [
        {
            "id": "i1",
            "model_name": "repeat",
            "model_version": "1",
            "outputs": [{"name": "OUT", "datatype": "INT32", "shape": [len(data)], "data": data}],
        }
        for data in ([1], [2], [3], [4, 5])
    ]
    for accept in (EVENT_STREAM, LINES):
        call = send("infer", accept=accept)
        responses = [response(call.number, *entry["outputs"][0]["data"]) for entry in expected]  # type: ignore[index]
        call.respond(*responses, end(call.number))
        reply = call.reply().ok()
        if accept == LINES:
            assert reply.headers["Content-Type"] == LINES
            assert [json.loads(line) for line in reply.body.splitlines()] == expected
        else:
            assert events(reply) == expected


def test_infer_as_a_stream_has_no_binary_data(send: Any) -> None:
    body = {
        **INFER,
        "parameters": {"binary_data_output": True},
        "outputs": [{"name": "OUT", "parameters": {"binary_data": True}}],
    }
    call = send("infer", body, accept=LINES)
    call.respond(response(call.number, 1, final=True))
    (line,) = call.reply().ok().body.splitlines()
    assert json.loads(line)["outputs"][0]["data"] == [1]


def test_infer_as_a_stream_of_an_ordinary_model(gateway: Rig) -> None:
    gateway.serve(identity_config("plain", "INT32", [-1]), echo)
    (line,) = gateway.http.infer("plain", INFER, {"Accept": LINES}).ok().body.splitlines()
    assert json.loads(line)["outputs"][0]["data"] == [1]


def test_errors_of_infer_as_a_stream(send: Any) -> None:
    call = send("infer", accept=EVENT_STREAM)
    call.respond(error(call.number, "bad", final=True))
    reply = call.reply()
    assert (reply.status, reply.error) == (404, "bad")
    call = send("infer", accept=EVENT_STREAM)
    call.respond(response(call.number, 1), error(call.number, "bad", final=True))
    assert events(call.reply().ok())[1] == {"error": "bad"}


def test_an_http_1_0_client_receives_no_chunks(send: Any) -> None:
    call = send("infer", accept=LINES, version="1.0")
    call.respond(response(call.number, 1), response(call.number, 2, final=True))
    head, _, body = call.raw().partition(b"\r\n\r\n")
    assert b"Transfer-Encoding" not in head
    assert [json.loads(line)["outputs"][0]["data"] for line in body.splitlines()] == [[1], [2]]


def test_a_connection_is_reused_after_a_stream(gateway: Rig, send: Any) -> None:
    call = send("generate_stream")
    call.respond(response(call.number, 1, final=True))
    call.reply().ok()
    call.connection.sendall(b"GET /v2/health/ready HTTP/1.1\r\nHost: localhost\r\n\r\n")
    assert read_reply(call.connection).status == 200


# --- outputs in a worker's memory


def arena_response(arena: Arena, number: int, count: int, *, final: bool = False) -> m.Responded:
    data = np.arange(count, dtype=np.int32).tobytes()
    memory_range = arena.allocate(len(data))
    arena.view(memory_range)[:] = data
    answer = Inferred((TensorRef("OUT", "INT32", (count,), memory_range),))
    return m.Responded(number, "", "", *pack_inferred(answer), final)


def count_releases(scheduler: Scheduler) -> int:
    releases = [message for message in scheduler.notifications if isinstance(message, m.Release)]
    return sum(len(release.offsets) for release in releases)


@pytest.mark.parametrize("verb", ["generate_stream", "infer"])
def test_outputs_are_released_when_encoded(send: Any, scheduler: Scheduler, verb: str) -> None:
    arena = Arena(8 << 20)
    call = send(verb, accept=LINES)
    call.respond(*(arena_response(arena, call.number, 20_000) for _ in range(3)), end(call.number))
    lines = [line for line in call.reply().ok().body.splitlines() if line]
    for line in lines:
        event = json.loads(line.removeprefix(b"data: "))
        values = event["OUT"] if verb == "generate_stream" else event["outputs"][0]["data"]
        assert values == list(range(20_000))
    assert len(lines) == 3
    until("all are released", lambda: count_releases(scheduler) == 3)
    arena.close()


def test_unread_outputs_are_released(send: Any, scheduler: Scheduler) -> None:
    arena = Arena(8 << 20)
    call = send("generate")
    call.respond(*(arena_response(arena, call.number, 10_000) for _ in range(5)))
    assert call.reply().json() == {"error": NOT_ONE}
    until("all are released", lambda: count_releases(scheduler) == 5)
    arena.close()


# --- clients that leave, or do not read


@pytest.mark.parametrize("response_count", [0, 1])
@pytest.mark.parametrize("verb", ["generate", "generate_stream", "infer"])
def test_a_disconnect_cancels_the_request(send: Any, verb: str, response_count: int) -> None:
    """Before the first response, and after it."""
    call = send(verb, accept=EVENT_STREAM)
    for value in range(response_count):
        call.respond(response(call.number, value))
        if verb != "generate":
            assert call.connection.recv(65536)
    call.connection.close()
    until("the model hears of it", lambda: call.cancelled)


def test_credit_is_returned_for_responses_that_are_read(send: Any) -> None:
    call = send("generate_stream")
    sent_count = 0
    while sent_count < 500:
        count = FIRST_CREDIT + call.granted - sent_count
        call.respond(*(response(call.number, sent_count + k) for k in range(count)))
        sent_count += count
        unread = sent_count - FIRST_CREDIT
        until("there is credit", lambda unread=unread: call.granted > unread)  # type: ignore[misc]
    call.respond(end(call.number))
    assert [event["OUT"] for event in events(call.reply().ok())] == list(range(sent_count))


def test_a_client_that_does_not_read_receives_no_credit_and_is_disconnected(send: Any) -> None:
    """Unread responses use bounded memory, and the stall timeout disconnects."""
    call = send("infer", accept=LINES)
    sent_count = 0
    while not call.cancelled and sent_count < 10_000:
        count = FIRST_CREDIT + call.granted - sent_count
        call.respond(*(response(call.number, *range(4000)) for _ in range(count)))
        sent_count += count
    until("it is given up", lambda: call.cancelled)
    assert sent_count * 16_000 < 64 << 20


@pytest.mark.parametrize("is_slow", [False, True])
async def test_a_client_may_read_slowly(*, is_slow: bool) -> None:
    """Each time limit permits 64 KiB/s, however short it is."""
    unread_bytes = itertools.count(1_000_000, -SLOWEST_RATE // (8 if is_slow else 2))
    transport, channel = MagicMock(), MagicMock()
    transport.get_write_buffer_size.side_effect = unread_bytes
    deadline = asyncio.get_running_loop().time() + 0.3
    channel.drain = lambda: asyncio.sleep(deadline - asyncio.get_running_loop().time())
    if is_slow:
        with pytest.raises(ConnectionResetError):
            await drain_or_abort(channel, transport, 0.25)
    else:
        await drain_or_abort(channel, transport, 0.25)
    assert transport.abort.called is is_slow
