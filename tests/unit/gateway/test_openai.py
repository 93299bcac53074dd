"""OpenAI's interface: responses of a model as choices, whole and in chunks; errors."""

import asyncio
import gzip
import json
import math
import threading
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock, MagicMock, Mock

import numpy as np
import orjson
import pytest
from multidict import CIMultiDict

from shmserve.errors import (
    Internal,
    InvalidArgument,
    NotFound,
    PermissionDenied,
    QueueFull,
    ShmserveError,
    Unauthenticated,
    Unavailable,
    Unknown,
    Unsupported,
)
from shmserve.gateway.http.json.large_bodies import Packed, parse_large
from shmserve.gateway.http.messages import WholeBody
from shmserve.gateway.http.openai import bodies, generation, model_names, models
from shmserve.gateway.http.openai.bodies import (
    RequestTooLarge,
    TooManyRequests,
    UnsupportedMediaType,
    encode_openai_error,
)
from shmserve.gateway.http.openai.choices import CHAT_FORMAT, COMPLETION_FORMAT, Choices, Delta
from shmserve.gateway.http.routing import MethodNotAllowed, NoRoute
from shmserve.gateway.inference.body_arrival import BodyBudget, MallocTrim
from shmserve.gateway.listener import MisdirectedHost
from shmserve.gateway.settings import GatewaySettings
from shmserve.ipc.engine_settings import PROMPT_TOO_LONG
from tests.support.waiting import run_and_count_turns

USAGE = {"prompt_tokens": 3, "completion_tokens": 2, "cached_tokens": 1}
TOKEN = {
    "token": "ab",
    "token_id": 7,
    "logprob": -0.5,
    "bytes": [97, 98],
    "top_logprobs": [{"token": "ab", "logprob": -0.5}, {"token": "c", "logprob": -2.0}],
}


def test_a_completion_in_chunks_and_whole() -> None:
    choices = Choices(COMPLETION_FORMAT, "m", 1)
    first = choices.add(0, Delta(0, "ab", "", {"content": [TOKEN]}))
    last_chunk = choices.add(0, Delta(0, "ab", "stop", {"content": [TOKEN]}, USAGE))
    assert (first["text"], first["finish_reason"]) == ("ab", None)
    assert last_chunk["finish_reason"] == "stop"
    assert last_chunk["logprobs"]["text_offset"] == [2]
    completion = choices.whole_response()
    (choice,) = completion["choices"]
    assert (completion["object"], choice["text"]) == ("text_completion", "abab")
    assert choice["logprobs"] == {
        "tokens": ["ab", "ab"],
        "token_logprobs": [-0.5, -0.5],
        "top_logprobs": [{"ab": -0.5, "c": -2.0}] * 2,
        "text_offset": [0, 2],
    }
    assert completion["usage"] == {
        "prompt_tokens": 3,
        "completion_tokens": 2,
        "total_tokens": 5,
        "prompt_tokens_details": {"cached_tokens": 1},
    }
    chunk = json.loads(choices.encode_chunk([first]))
    assert (chunk["id"], chunk["choices"]) == (completion["id"], [first])
    usage, done_event = choices.encode_end(shows_usage=True)
    assert json.loads(usage.removeprefix(b"data: "))["choices"] == []
    assert [done_event] == choices.encode_end(shows_usage=False) == [b"data: [DONE]\n\n"]
    assert "usage" not in chunk
    chunk = Choices(COMPLETION_FORMAT, "m", 1, shows_usage=True).encode_chunk([first])
    assert json.loads(chunk)["usage"] is None


@pytest.mark.parametrize("choices_format", [COMPLETION_FORMAT, CHAT_FORMAT])
def test_chunks_count_the_tokens_of_their_sample(choices_format: Any) -> None:
    """With continuous_usage_stats, as in vLLM."""
    choices = Choices(
        choices_format, "m", 2, shows_usage=True, shows_running_usage=True, shows_tokens=False
    )
    usages = []
    for sample, tokens, more in (
        (0, [1, 2], {"prompt_token_ids": [7, 8, 9]}),
        (1, [3], {}),
        (0, [4], {}),
    ):
        choice = choices.add(0, Delta(sample, "a", extra_members={"token_ids": tokens, **more}))
        assert not choice.keys() & {"token_ids", "prompt_token_ids"}
        chunk = json.loads(choices.encode_chunk([choice]))
        assert "prompt_token_ids" not in chunk
        usages.append(chunk["usage"])
    counts = [(usage["prompt_tokens"], usage["completion_tokens"]) for usage in usages]
    assert counts == [(3, 2), (3, 1), (3, 3)]
    assert usages[0]["total_tokens"] == 5


def test_chunks_count_the_tokens_of_reasoning() -> None:
    choices = Choices(CHAT_FORMAT, "m", 1, shows_usage=True, shows_running_usage=True)
    for text, count in (("hm", 1), ("", 2)):
        message = {"reasoning": text, "reasoning_tokens": count}
        choice = choices.add(0, Delta(0, "", message=message, extra_members={"token_ids": [1]}))
        usage = json.loads(choices.encode_chunk([choice]))["usage"]
        assert usage["completion_tokens_details"] == {"reasoning_tokens": count}


def test_zero_logprobs_are_requested() -> None:
    """Completions have the number of alternatives, which may be 0; chats have true."""
    request_bodies: list[dict[str, Any]] = [{"logprobs": 0}, {"logprobs": 2}, {"logprobs": True}]
    not_requested: list[dict[str, Any]] = [{}, {"logprobs": None}, {"logprobs": False}]
    assert all(map(bodies.wants_logprobs, request_bodies))
    assert not any(map(bodies.wants_logprobs, not_requested))


def test_stop_reasons_of_choices() -> None:
    """As in vLLM, chunks of chats have it only at the end of a sample."""
    completion, chat = Choices(COMPLETION_FORMAT, "m", 1), Choices(CHAT_FORMAT, "m", 1)
    deltas = Delta(0, "a"), Delta(0, "b", "stop", stop_reason="END")
    deltas_out = [[reader.add(0, delta) for delta in deltas] for reader in (completion, chat)]
    assert [reader.get("stop_reason", "absent") for reader in deltas_out[0]] == [None, "END"]
    assert [reader.get("stop_reason", "absent") for reader in deltas_out[1]] == ["absent", "END"]
    for reader in (completion, chat):
        assert reader.whole_response()["choices"][0]["stop_reason"] == "END"
    assert chat.add(0, Delta(0, "", "length"))["stop_reason"] is None


def test_the_role_is_only_in_the_first_chunk() -> None:
    choices = Choices(CHAT_FORMAT, "m", 2)
    deltas = [
        choices.add(0, Delta(sample, text, reason))["delta"]
        for sample, text, reason in ((0, "a", ""), (1, "b", ""), (0, "c", ""), (0, "", "length"))
    ]
    assert deltas == [
        {"role": "assistant", "content": "a"},
        {"role": "assistant", "content": "b"},
        {"content": "c"},
        {},
    ]
    sent = [choice["message"] for choice in choices.whole_response()["choices"]]
    assert sent == [{"role": "assistant", "content": "ac"}, {"role": "assistant", "content": "b"}]


def test_choices_of_several_prompts_are_numbered_one_after_the_other() -> None:
    choices = Choices(COMPLETION_FORMAT, "m", 3)
    choices.add(1, Delta(0, "x", "stop", None, USAGE))
    choices.add(0, Delta(2, "y", "stop", None, USAGE))
    assert [choice["index"] for choice in choices.whole_response()["choices"]] == [2, 3]
    assert choices.usage()["total_tokens"] == 10


def test_errors_have_a_type_and_the_field() -> None:
    def decode_error(error: Any) -> dict[str, Any]:
        error_body: dict[str, Any] = json.loads(encode_openai_error(error))["error"]
        return error_body

    api_error = decode_error(InvalidArgument("[request id: 7] temperature: -1 is not a number"))
    assert (api_error["type"], api_error["param"]) == ("invalid_request_error", "temperature")
    assert api_error["message"] == "temperature: -1 is not a number"
    long = decode_error(InvalidArgument(f"[request id: 7] text_input: {PROMPT_TOO_LONG} 9"))
    assert (long["param"], long["code"]) == ("prompt", "context_length_exceeded")
    assert long["message"] == f"prompt: {PROMPT_TOO_LONG} 9"
    assert decode_error(InvalidArgument("the body is a list"))["param"] is None
    assert decode_error(NotFound("x: no"))["code"] == "model_not_found"
    assert decode_error(TooManyRequests("full"))["code"] == "rate_limit_exceeded"
    assert decode_error(Unavailable("gone"))["type"] == "server_error"
    assert decode_error(Unknown("x"))["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    ("error", "kind", "code"),
    [
        (Unauthenticated("x"), "authentication_error", "invalid_api_key"),
        (PermissionDenied("x"), "permission_error", None),
        (NoRoute("x"), "invalid_request_error", "unknown_url"),
        (MethodNotAllowed("x"), "invalid_request_error", "method_not_allowed"),
        (RequestTooLarge("x"), "invalid_request_error", "request_too_large"),
        (UnsupportedMediaType("x"), "invalid_request_error", "unsupported_media_type"),
        (MisdirectedHost("x"), "invalid_request_error", "misdirected_request"),
        (TooManyRequests("x"), "rate_limit_error", "rate_limit_exceeded"),
        (QueueFull("x"), "rate_limit_error", "rate_limit_exceeded"),
        (Unsupported("x"), "invalid_request_error", "unsupported"),
        (Internal("x"), "server_error", None),
    ],
)
def test_the_type_of_an_error_is_that_of_its_status(
    error: ShmserveError, kind: str, code: str | None
) -> None:
    error_body = json.loads(encode_openai_error(error))["error"]
    assert error_body == {"message": "x", "type": kind, "param": None, "code": code}


def test_many_log_probabilities_are_parsed_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = [{"token": '"},\n[', "top_logprobs": [{"token": "a"}]}] * 2000
    members = {"content": [*tokens, None], "prompt": [None, *tokens]}
    loads = Mock(side_effect=orjson.loads)
    monkeypatch.setattr(generation, "orjson", SimpleNamespace(loads=loads))
    content, prompt = (b",\n".join(map(orjson.dumps, tokens)) for tokens in members.values())
    text = b'{"content":[\n%b\n],"prompt":[\n%b\n]}' % (content, prompt)
    assert generation._parse_logprobs(text) == members
    assert max(len(call.args[0]) for call in loads.call_args_list) < 100  # each call holds the GIL
    assert generation._parse_logprobs(orjson.dumps(members)) == members


CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "Hi"}]}


def text_gateway(*outputs: str, may_reason: bool = False) -> Any:
    io = SimpleNamespace(
        inputs={model_names.PARAMETERS_INPUT: None},
        outputs=dict.fromkeys((model_names.TEXT_OUTPUT, *outputs)),
    )
    model = SimpleNamespace(name="m", signature=io, may_reason=may_reason, adapters=["french", "m"])
    model_table = MagicMock(on_demand=(), resolve_alias=str)
    model_table.__contains__.return_value = True
    model_table.resolve.return_value = model
    settings = GatewaySettings(max_input_size=1 << 20, arena_byte_size=1 << 20)
    budget = BodyBudget(1 << 20, MallocTrim())
    return SimpleNamespace(models=model_table, settings=settings, body_budget=budget)


def read_body(raw: bytes, prompts: Sequence[str] = (), **headers: str) -> dict[str, Any]:
    headers = {name.replace("_", "-"): value for name, value in headers.items()}
    request: Any = SimpleNamespace(content=WholeBody(raw), headers=CIMultiDict(headers))
    return asyncio.run(bodies.read_body(text_gateway(), request, prompts))


@pytest.mark.parametrize(
    ("given", "max_tokens"),
    [
        ({}, 1 << 24),
        ({"max_tokens": None}, 1 << 24),
        ({"max_tokens": None, "max_completion_tokens": None}, 1 << 24),
        ({"max_tokens": None, "max_completion_tokens": 5}, 5),
        ({"max_completion_tokens": 0}, 0),
        ({"max_tokens": 7, "max_completion_tokens": 5}, 5),
        ({"max_new_tokens": 5}, 5),
        ({"max_new_tokens": 5, "max_tokens": 7}, 7),
    ],
)
def test_a_chat_without_a_limit_of_tokens_has_that_of_its_model(
    given: dict[str, Any], max_tokens: int
) -> None:
    parsed = asyncio.run(bodies.parse_chat(text_gateway(), {"model": "m", **CHAT, **given}))
    limits = ("max_completion_tokens", "max_tokens", "max_new_tokens")
    assert [parsed.parameters[name] for name in limits if name in parsed.parameters] == [max_tokens]


@pytest.mark.parametrize(
    ("backend", "name"), [("llm", "max_completion_tokens"), ("vllm", "max_tokens")]
)
def test_a_completion_may_have_the_limit_of_chats(backend: str, name: str) -> None:
    """A backend that knows it reports errors by the client's name."""
    body = {"model": "m", "prompt": "x", "max_tokens": 7, "max_completion_tokens": 5}
    gateway = text_gateway()
    gateway.models.resolve("m").backend = backend
    parameters = asyncio.run(bodies.parse_completion(gateway, body)).parameters
    assert {key: parameters[key] for key in parameters if key.startswith("max_")} == {name: 5}


def test_the_name_of_an_adapter_stands_for_its_model_with_the_adapter() -> None:
    for parse, prompt in ((bodies.parse_completion, {"prompt": "x"}), (bodies.parse_chat, CHAT)):
        parsed = asyncio.run(parse(text_gateway(), {"model": "french", **prompt}))
        assert (parsed.name, parsed.parameters["lora_name"]) == ("french", "french")
        parsed = asyncio.run(parse(text_gateway(), {"model": "m", **prompt, "lora_name": "french"}))
        assert (parsed.name, parsed.parameters["lora_name"]) == ("m", "french")
        parsed = asyncio.run(parse(text_gateway(), {"model": "m", **prompt}))
        assert (parsed.name, "lora_name" in parsed.parameters) == ("m", False)
    body = {"model": "french", "prompt": "x", "lora_name": "german"}
    with pytest.raises(InvalidArgument, match="lora_name: 'german' contradicts the model 'french'"):
        asyncio.run(bodies.parse_completion(text_gateway(), body))


def test_zero_likeliest_tokens_request_no_log_probabilities() -> None:
    body = {"model": "m", **CHAT, "top_logprobs": 0}
    parameters = asyncio.run(bodies.parse_chat(text_gateway(), body)).parameters
    assert "top_logprobs" not in parameters


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"logprobs": 3}, "logprobs: 3 is not true or false"),
        ({"top_logprobs": "x"}, "top_logprobs: 'x' is not an integer"),
        ({"logprobs": False, "top_logprobs": 2}, "top_logprobs: requires logprobs: true"),
        ({"max_tokens": "zz", "max_completion_tokens": 5}, "max_tokens: 'zz' is not an integer"),
    ],
)
def test_fields_of_a_chat_have_their_types(given: dict[str, Any], message: str) -> None:
    body = {"model": "m", **CHAT, **given}
    with pytest.raises(InvalidArgument, match=message):
        asyncio.run(bodies.parse_chat(text_gateway(), body))


@pytest.mark.parametrize("may_reason", [False, True])
@pytest.mark.parametrize("shown", [False, True])
def test_tokens_do_not_show_hidden_reasoning(shown: bool, may_reason: bool) -> None:
    gateway = text_gateway(bodies.MESSAGE_OUTPUT, may_reason=may_reason)
    tokens = {"logprobs": True, "top_logprobs": 2, "return_token_ids": True}
    body = {"model": "m", "messages": [{"role": "user"}], "include_reasoning": shown, **tokens}
    parsed = asyncio.run(bodies.parse_chat(gateway, body))
    assert (tokens.keys() <= parsed.parameters.keys()) == (shown or not may_reason)
    assert bodies.wants_logprobs(parsed.parameters) == (shown or not may_reason)


def test_an_error_of_a_later_prompt_determines_the_status(monkeypatch: pytest.MonkeyPatch) -> None:
    error = InvalidArgument("prompt: it is empty")
    queues = [MagicMock(wait=AsyncMock(), first_response=found) for found in (None, error)]
    monkeypatch.setattr(generation, "ResponseQueue", MagicMock(side_effect=queues))
    monkeypatch.setattr(generation, "build_in_pieces", AsyncMock())
    for name, replacement in (("find_error", lambda response: response), ("log_failure", print)):
        monkeypatch.setattr(generation, name, replacement)
    body = {"model": "m", "prompt": "a", "stream": True}
    parsed = asyncio.run(bodies.parse_completion(text_gateway(), body))
    parsed = parsed._replace(prompts=parsed.prompts * 2)
    with pytest.raises(InvalidArgument, match="it is empty"):
        asyncio.run(generation.respond(MagicMock(), MagicMock(), parsed, MagicMock()))


@pytest.mark.parametrize(("encoding", "pack"), [("gzip", gzip.compress), ("identity", bytes)])
def test_a_body_may_be_compressed(encoding: str, pack: Any) -> None:
    raw = pack(b'{"model": "m"}')
    assert read_body(raw, Content_Encoding=encoding, Content_Length=str(len(raw))) == {"model": "m"}


@pytest.mark.parametrize("raw", [b"", b"{", b'["m"]'])
def test_a_body_is_a_json_object(raw: bytes) -> None:
    with pytest.raises(InvalidArgument, match="JSON"):
        read_body(raw, Content_Length=str(len(raw)))


def test_the_refusal_of_an_encoding_names_the_supported_ones() -> None:
    with pytest.raises(UnsupportedMediaType, match="use gzip, deflate or identity") as caught:
        read_body(b"{}", Content_Length="2", Content_Encoding="zstd")
    assert caught.value.status == 415  # OpenAI's clients retry requests after a status above 499


@pytest.mark.parametrize(("count", "is_packed"), [(4095, False), (4096, True)])
def test_a_process_parses_a_body_with_many_objects(count: int, is_packed: bool) -> None:
    message = {"role": "user", "content": '{"a": "{}"}' if not is_packed else ""}
    raw = json.dumps({"messages": [message] * count}).encode()
    messages = read_body(raw, ["messages"], Content_Length=str(len(raw)))["messages"]
    assert (type(messages) is Packed) == is_packed
    assert (messages.value() if is_packed else messages) == [message] * count


def test_requests_are_handled_while_texts_are_embedded(monkeypatch: pytest.MonkeyPatch) -> None:
    vector = np.array([0.1, -2.5, math.nan], np.float32)

    async def compute(*arguments: Any) -> list[Any]:
        return [vector] * len(arguments[-1])

    async def embed(count: int) -> Any:
        raw = json.dumps({"model": "m", "input": ["a"] * count}).encode()
        headers = CIMultiDict({"Content-Length": str(len(raw))})
        request: Any = SimpleNamespace(content=WholeBody(raw), headers=headers)
        response = await models.embeddings(text_gateway(), request)
        return json.loads(b"".join(response.pieces))

    monkeypatch.setattr(models, "_compute_vectors", compute)
    monkeypatch.setattr(models, "find_embedder", lambda model: models.Embedder("a", "b", (), 4))
    answer, turn_count = run_and_count_turns(embed(1000))
    assert turn_count >= 1250  # of 250 batches and 1000 vectors
    expected_values = [*vector[:2].tolist(), None]
    assert [entry["embedding"] for entry in answer["data"]] == [expected_values] * 1000
    assert [entry["index"] for entry in answer["data"]] == list(range(1000))
    assert {**answer, "data": 0} == {
        "object": "list",
        "data": 0,
        "model": "m",
        "usage": {"prompt_tokens": 0, "total_tokens": 0},
    }


def test_large_responses_are_converted_in_a_thread() -> None:
    for byte_size, in_thread in ((1 << 16, False), ((1 << 16) + 1, True)):
        thread = asyncio.run(generation._convert(byte_size, threading.get_ident))
        assert (thread != threading.get_ident()) == in_thread


def test_each_token_has_a_chunk() -> None:
    for choice_format, member in ((CHAT_FORMAT, "delta"), (COMPLETION_FORMAT, "text")):
        choices = Choices(choice_format, "m", 1)
        deltas = [Delta(0, ""), Delta(0, ""), Delta(0, "é"), Delta(0, "", "stop")]
        chunks = [choices.add(0, delta)[member] for delta in deltas]
        first_delta = {"role": "assistant", "content": ""}
        if member == "text":
            assert chunks == ["", "", "é", ""]
        else:
            assert chunks == [first_delta, {"content": ""}, {"content": "é"}, {}]


def test_a_chat_with_reasoning_and_calls() -> None:
    choices = Choices(CHAT_FORMAT, "m", 1)
    head = {"index": 0, "id": "c", "name": "f", "arguments": "{"}
    messages: list[dict[str, Any]] = [
        {"reasoning": "hm"},
        {"tool_calls": [head]},
        {"tool_calls": [{"index": 0, "arguments": "}"}]},
    ]
    chunks = [choices.add(0, Delta(0, "", message=message)) for message in messages]
    usage = {"prompt_tokens": 3, "completion_tokens": 2, "reasoning_tokens": 1}
    chunks.append(choices.add(0, Delta(0, "", "stop", usage=usage, message={})))
    assert choices.usage()["completion_tokens_details"] == {"reasoning_tokens": 1}
    reasoning = {"reasoning_content": "hm", "reasoning": "hm"}
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{"}}
    assert [chunk["delta"] for chunk in chunks] == [
        {"role": "assistant", "content": "", **reasoning},
        {"tool_calls": [{"index": 0, **call}]},
        {"tool_calls": [{"index": 0, "function": {"arguments": "}"}}]},
        {},
    ]
    assert chunks[-1]["finish_reason"] == "tool_calls"
    (choice,) = choices.whole_response()["choices"]
    call["function"] = {"name": "f", "arguments": "{}"}
    assert choice["message"] == {
        "role": "assistant",
        "content": None,
        **reasoning,
        "tool_calls": [call],
    }


@pytest.mark.parametrize("arguments", ['{"input": "ab"}', '{"in'])
def test_a_custom_tool_is_called_with_one_text(arguments: str) -> None:
    """A chunk has the whole call, when the next call begins or the sample ends."""
    tools = [{"type": "custom", "custom": {"name": "patch"}}, {"type": "function"}]
    choices = Choices(CHAT_FORMAT, "m", 1, tools=tools)
    messages = [
        {"index": 0, "id": "a", "name": "patch", "arguments": arguments[:3]},
        {"index": 0, "arguments": arguments[3:]},
        {"index": 1, "id": "b", "name": "f", "arguments": "{}"},
        {"index": 2, "id": "c", "name": "patch", "arguments": arguments},
    ]
    deltas = [Delta(0, "", message={"tool_calls": [call]}) for call in messages]
    deltas.append(Delta(0, "", "stop", message={}))
    chunks = [choices.add(0, delta)["delta"].get("tool_calls", []) for delta in deltas]
    custom = {"name": "patch", "input": "ab" if arguments[-1] == "}" else arguments}
    calls = [
        {"id": "a", "type": "custom", "custom": custom},
        {"id": "b", "type": "function", "function": {"name": "f", "arguments": "{}"}},
        {"id": "c", "type": "custom", "custom": custom},
    ]
    first, second, third = ({"index": index, **call} for index, call in enumerate(calls))
    assert chunks == [[], [], [first, second], [], [third]]
    (choice,) = choices.whole_response()["choices"]
    assert choice["message"]["tool_calls"] == calls and choice["finish_reason"] == "tool_calls"


# Prompts with an element that is not a token, and the message about this element. JSON integers of
# more than 64 bits are floats.
WRONG_TOKENS: list[tuple[Any, str]] = [
    ([1 << 31], "prompt[0]: 2147483648 is not a token"),
    ([5, -(1 << 31)], "prompt[1]: -2147483648 is not a token"),
    ([5, 1 << 63], "prompt[1]: 9223372036854775808 is not a token"),
    ([5] * 2000 + [2.0**70], "prompt[2000]: 1.1805916207174113e+21 is not a token"),
    ([2.0**70, 5], "prompt[0]: 1.1805916207174113e+21 is not a token"),
    ([5, True], "prompt[1]: True is not a token"),
    ([5, "a"], "prompt[1]: 'a' is not a token"),
    (["a", [1, 1 << 33]], "prompt[1][1]: 8589934592 is not a token"),
]


@pytest.mark.parametrize(("prompt", "message"), WRONG_TOKENS)
def test_a_wrong_token_is_refused_by_position_in_any_body(prompt: Any, message: str) -> None:
    with pytest.raises(InvalidArgument) as fault:
        asyncio.run(bodies.parse_completion(text_gateway(), {"model": "m", "prompt": prompt}))
    assert fault.value.message == f"{message} (32-bit integer)"
    body = json.dumps({"prompt": prompt}).encode()
    with pytest.raises(InvalidArgument) as fault:
        asyncio.run(parse_large([body], {}, ["prompt"]))
    assert fault.value.message == f"{message} (32-bit integer)"


def test_an_integer_may_be_written_as_a_decimal() -> None:
    assert bodies.check_member({"n": 2.0}, "n", int, 1) == 2
    with pytest.raises(InvalidArgument, match=r"n: 2.5 is not an integer"):
        bodies.check_member({"n": 2.5}, "n", int, 1)
