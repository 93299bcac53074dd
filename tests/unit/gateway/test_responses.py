"""The Responses API: requests as chats, and the events of a response."""

import asyncio
import json
from typing import Any, get_args

import orjson
import pytest
from openai.types.responses import Tool

from shmserve.errors import InvalidArgument, Unavailable
from shmserve.gateway.http.json import large_bodies
from shmserve.gateway.http.openai import responses, responses_request
from shmserve.gateway.http.openai.bodies import as_fragment
from shmserve.gateway.http.openai.choices import Delta
from shmserve.gateway.http.openai.responses import ResponseObject
from shmserve.gateway.http.routes import ROUTES

USAGE = {"prompt_tokens": 3, "completion_tokens": 4, "reasoning_tokens": 2, "cached_tokens": 1}
FUNCTION = {"type": "function", "name": "f", "parameters": {"type": "object"}}
CALL_ITEM = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}


def convert_chat(**body: Any) -> dict[str, Any]:
    """Return the chat body for a Responses request, without absent fields."""
    chat_body = responses_request._chat_body({"model": "m", "input": "hi", **body})
    return {name: value for name, value in chat_body.items() if value is not None}


def parse_large(body: dict[str, Any]) -> Any:
    raw, convert = json.dumps(body).encode(), responses_request.convert_large
    return asyncio.run(large_bodies.parse_large([raw], {}, ["messages"], convert=convert))


def events(response: ResponseObject, deltas: list[Delta]) -> list[dict[str, Any]]:
    frames = response.encode_frames([[response.add(0, d)] for d in deltas]) + response.encode_end(
        shows_usage=False
    )
    events = []
    for frame in frames:
        name, data = frame.decode().rstrip("\n").split("\n")
        events.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {events[-1]['type']}"
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    return events


def test_a_text_is_a_message_of_the_user() -> None:
    user_message = {"role": "user", "content": "hi"}
    assert convert_chat() == {"model": "m", "messages": [user_message]}
    assert convert_chat(instructions="x", max_output_tokens=5, store=True) == {
        "model": "m",
        "messages": [{"role": "system", "content": "x"}, user_message],
        "max_completion_tokens": 5,
    }
    assert convert_chat(input="")["messages"] == [{"role": "user", "content": ""}]


@pytest.mark.parametrize("instructions", [None, "x"])
@pytest.mark.parametrize(
    "items", ["hi", [{"role": "user", "content": [{"type": "input_text", "text": "h"}]}, CALL_ITEM]]
)
def test_a_process_converts_a_large_body_to_a_chat(items: Any, instructions: Any) -> None:
    tools = [{"type": "function", "name": f"f{n}", "description": "x" * 99} for n in range(999)]
    body = {"model": "m", "input": items, "instructions": instructions, "tools": tools}
    parsed = parse_large({**body, "include": ["reasoning.encrypted_content"] * 9999})
    assert parsed["include"] == ["reasoning.encrypted_content"]
    chat = {name: value for name, value in parsed["input"].items() if value is not None}
    packed = {name: chat[name].value() for name in ("messages", "tools")}
    assert {**chat, **packed} == convert_chat(**body)
    assert parsed["tools"].value() == tools


def test_warnings_of_the_process_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    parse_large({"input": "hi", "tools": [FUNCTION, {"type": "tool_search"}]})
    assert "a tool of /v1/responses is ignored: 'tool_search' is not 'function', " in caplog.text


def test_a_response_repeats_large_fields_as_they_were_received() -> None:
    large_format = {"type": "json_schema", "schema": {"enum": ["x"] * 20_000}}
    body = {"input": "hi", "text": {"format": large_format}, "metadata": {"a": "b" * 70_000}}
    parsed = parse_large(body)
    fragments = {name: as_fragment(parsed[name]) for name in ("text", "metadata")}
    response = json.loads(orjson.dumps(ResponseObject({**parsed, **fragments}).whole_response()))
    assert (response["text"], response["metadata"]) == (body["text"], body["metadata"])


def test_the_gateway_converts_an_input_with_references() -> None:
    body = {"input": [{"role": "user"}, {"type": "item_reference", "id": "x"}]}
    assert parse_large(body) == body
    with pytest.raises(InvalidArgument, match=r"input\[0\]: 5 is not an object"):
        parse_large({"input": [5]})


def test_a_token_without_text_has_no_event_of_its_own() -> None:
    entries = [{"token": token, "logprob": -1.0} for token in ("h", "\ufffd", "\ufffd", "")]
    content = [{"content": [entry]} for entry in entries]
    deltas = [
        Delta(0, "", logprobs=content[0], message={"reasoning": "h"}),
        Delta(0, "", logprobs=content[1]),
        Delta(0, "é", logprobs=content[2]),
        Delta(0, "", "stop", content[3]),
    ]
    all_events = events(ResponseObject({}), deltas)
    delta_events = [event for event in all_events if event["type"] == "response.output_text.delta"]
    assert [(event["delta"], event["logprobs"]) for event in delta_events] == [("é", entries[1:3])]
    message = all_events[-1]["response"]["output"][-1]
    assert message["content"][0]["logprobs"] == entries[1:]


def test_a_whole_response_has_the_logprobs_of_its_content() -> None:
    pieces = ["<think>", "k", "m", "</", "th", "\n\n", "m", " k", "<call>", "m", "<end>"]
    entries = [{"token": each, "bytes": list(each.encode()), "logprob": -1.0} for each in pieces]
    stream = ResponseObject({})
    parts = {
        1: {"reasoning": "k"},
        2: {"reasoning": "m"},
        6: {"content": "m"},
        7: {"content": " k"},
    }
    for index, entry in enumerate([*entries[:8], entries[-1]]):
        logprobs = {"content": [entry]}
        stream.add(0, Delta(0, "", "", logprobs, message=parts.get(index, {"content": ""})))
    streamed = stream.whole_response()["output"][1]["content"][0]["logprobs"]
    assert streamed == [*entries[5:8], entries[-1]]
    call = {"index": 0, "id": "c", "name": "f", "arguments": "m"}
    cases: list[tuple[dict[str, Any], int]] = [({}, 11), ({"tool_calls": [call]}, 8)]
    for members, count in cases:
        message = {"reasoning": "km", "content": "m k", **members}
        response_object = ResponseObject({})
        response_object.add(0, Delta(0, "", "stop", {"content": entries}, message=message))
        _, item, *_ = response_object.whole_response()["output"]
        assert item["content"][0]["logprobs"] == entries[5:count]


def test_items_are_messages_with_calls_and_results() -> None:
    items = [
        {"type": None, "role": "user", "content": [{"type": "input_text", "text": "hi"}]},
        {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "a"}]},
        CALL_ITEM,
        {**CALL_ITEM, "call_id": "d"},
        {"type": "function_call_output", "call_id": "c", "output": "1"},
        {
            "type": "function_call_output",
            "call_id": "d",
            "output": [{"type": "input_text", "text": "2"}],
        },
        {"role": "assistant", "content": "b"},
        {"role": "assistant", "content": "c"},
    ]
    function = {"name": "f", "arguments": "{}"}
    calls = [{"id": name, "type": "function", "function": function} for name in "cd"]
    message = {"role": "assistant", "content": "a", "reasoning_content": "hm", "tool_calls": calls}
    assert convert_chat(input=items)["messages"] == [
        {"role": "user", "content": "hi"},
        message,
        {"role": "tool", "tool_call_id": "c", "content": "1"},
        {"role": "tool", "tool_call_id": "d", "content": "2"},
        {"role": "assistant", "content": "b"},
        {"role": "assistant", "content": "c"},
    ]


@pytest.mark.parametrize("status", ["incomplete", "in_progress", "completed", None])
def test_an_unfinished_message_is_continued(status: str | None) -> None:
    user_message = {"role": "user", "content": "hi", "status": "incomplete"}
    message = {"type": "message", "role": "assistant", "status": status, "content": "The a"}
    chat = convert_chat(input=[user_message, message])
    assert chat.get("continue_final_message", False) == (status in ("incomplete", "in_progress"))
    # vLLM refuses both a continued message and a generation prompt, which is its default.
    assert chat.get("add_generation_prompt", True) == (status in ("completed", None))
    for last_item in (user_message, {**CALL_ITEM, "status": "incomplete"}):
        assert "continue_final_message" not in convert_chat(input=[message, last_item])


def test_tools_and_formats_have_the_form_of_chats() -> None:
    tool = {"type": "function", "name": "f", "parameters": {}, "strict": True}
    choice = {"type": "function", "name": "f"}
    text_format = {"type": "json_schema", "name": "x", "schema": {"type": "object"}}
    chat = convert_chat(
        tools=[tool], tool_choice=choice, text={"format": text_format}, reasoning={"effort": "low"}
    )
    assert chat["tools"] == [
        {"type": "function", "function": {"name": "f", "parameters": {}, "strict": True}}
    ]
    assert chat["tool_choice"] == {"type": "function", "function": {"name": "f"}}
    assert chat["response_format"] == {"type": "json_schema", "json_schema": text_format}
    assert chat["reasoning_effort"] == "low"
    assert convert_chat(include=["message.output_text.logprobs"])["logprobs"] is True
    assert "logprobs" not in convert_chat(include=["reasoning.encrypted_content"])


def test_defaults_are_left_out_of_chats() -> None:
    """Chats of vLLM refuse an empty list of tools, and a choice without tools."""
    assert convert_chat(tools=[], tool_choice="auto") == convert_chat()


WRONG_REQUESTS: dict[str, tuple[dict[str, Any], str]] = {
    "no input": ({"input": []}, "input: expected a string or a list"),
    "a number": ({"input": [3]}, r"input\[0\]: 3 is not an object"),
    "an image": ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]},
        r"input\[0\]: content of type 'input_image' is not a string"),
    "an item": ({"input": [{"type": "web_search_call"}]}, r"input\[0\]: items of type"),
    "no type": ({"input": [{"type": [], "role": "user"}]}, r"input\[0\]: items of type"),
    "a reference": ({"input": [{"type": "item_reference", "id": "x"}]}, r"input\[0\]: item 'x' is"),
    "no role": ({"input": [{"content": "x"}]}, r"input\[0\]: role None is not one of user, assis"),
    "an unknown role": ({"input": [{"role": "zz", "content": "x"}]}, r"role 'zz' is not one of"),
    "a summary": ({"reasoning": {"summary": "long"}}, "reasoning.summary: 'long' is not one of au"),
    "no text": ({"input": [{"role": "user", "content": [{"type": "input_text", "text": 3}]}]},
        r"input\[0\]: the text 3 is not a string"),
    "no list of members": ({"include": 3}, "include: 3 is not a list"),
    "an unknown member": ({"include": ["x"]}, "include: 'x' is not one of message.output_text.lo"),
    "a null member": ({"include": [None, 5]}, "include: None is not one of message.output_text.lo"),
    "no list of tools": ({"tools": 3}, "tools: 3 is not a list"),
    "no flag": ({"store": "yes"}, "store: 'yes' is not true or false"),
    "no number": ({"max_tool_calls": "x"}, "max_tool_calls: 'x' is not an integer"),
    "a tool": ({"tools": [{"type": "web_search"}]}, r"tools\[0\]: 'web_search' is not 'function'"),
    "an unknown tool": ({"tools": [FUNCTION, {"type": "local_shell"}]},
        r"tools\[1\]: 'local_shell' is not 'function'"),
    "a tool of a namespace": ({"tools": [{"type": "namespace", "name": "n",
        "tools": [{"type": "custom"}]}]}, r"tools\[0\].tools\[0\]: expected a 'function'"),
    "no name in a namespace": ({"tools": [{"type": "namespace", "name": "n",
        "tools": [{"type": "function", "name": ["f"]}]}]}, r"tools\[0\].tools\[0\]: expected"),
    "no namespace's name": ({"tools": [{"type": "namespace", "tools": [FUNCTION]}]},
        r"tools\[0\].name: None is not a string"),
    "the name of a tool": ({"tools": ["web_search", FUNCTION]}, r"tools\[0\]: 'web_search' is not"),
    "the type of a tool": ({"tools": ["function"]}, r"tools\[0\]: 'function' is not 'function'"),
    "a truncation": ({"truncation": "x"}, "truncation: 'x' is not 'auto' or 'disabled'"),
    "no tools of a namespace": ({"tools": [{"type": "namespace", "name": "n", "tools": 3}]},
        r"tools: 3 is not a list"),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG_REQUESTS)
def test_unsupported_fields_are_refused(case: str) -> None:
    body, message = WRONG_REQUESTS[case]
    with pytest.raises(InvalidArgument, match=message):
        convert_chat(**body)


def test_tools_of_openai_are_ignored_beside_functions(caplog: pytest.LogCaptureFixture) -> None:
    classes = get_args(get_args(Tool)[0])
    kinds = {kind for each in classes for kind in get_args(each.model_fields["type"].annotation)}
    kinds -= {"function", "custom", "namespace", *("local_shell", "shell", "apply_patch")}
    with_others = convert_chat(tools=[*({"type": kind} for kind in sorted(kinds)), FUNCTION])
    assert with_others == convert_chat(tools=[FUNCTION])
    assert "a tool of /v1/responses is ignored: 'web_search'" in caplog.text


@pytest.mark.parametrize("is_large", [False, True])
def test_functions_of_a_namespace_have_its_name(is_large: bool) -> None:
    namespace = {"type": "namespace", "name": "n", "description": "d", "tools": [FUNCTION]}
    tools = [FUNCTION, namespace]
    chat_tools = convert_chat(tools=tools)["tools"]
    assert [tool["function"]["name"] for tool in chat_tools] == ["f", "n__f"]
    assert chat_tools[1]["function"]["parameters"] == FUNCTION["parameters"]
    choice = {"type": "function", "name": "f"}
    for given_tools, name in (
        (tools, "f"),
        ([namespace], "n__f"),
        ([namespace, {**namespace, "name": "o"}], "f"),  # ambiguous, therefore refused later
    ):
        chat = convert_chat(tools=given_tools, tool_choice=choice)
        assert chat["tool_choice"]["function"]["name"] == name

    shown_tools = orjson.Fragment(orjson.dumps(tools)) if is_large else tools
    response_object = ResponseObject({"model": "m", "tools": shown_tools})
    calls = [{"index": i, "id": f"c{i}", "name": name, "arguments": "{}"}
             for i, name in enumerate(["f", "n__f"])]  # fmt: skip
    events_out = events(response_object, [Delta(0, "", "stop", message={"tool_calls": calls})])
    added = [event["item"] for event in events_out if event["type"].endswith("item.added")]
    assert [(item["name"], item.get("namespace")) for item in added] == [*[("f", None), ("f", "n")]]
    assert (
        response_object._items_by_call is response_object._items_by_call
    )  # large tools are parsed once
    (message,) = convert_chat(input=events_out[-1]["response"]["output"])["messages"]
    assert [call["function"]["name"] for call in message["tool_calls"]] == ["f", "n__f"]


@pytest.mark.parametrize("is_large", [False, True])
def test_an_error_has_the_position_of_a_tool_in_the_request(is_large: bool) -> None:
    namespace = {"type": "namespace", "name": "n", "tools": [FUNCTION, FUNCTION]}
    tools: Any = [{"type": "web_search"}, namespace, {"type": "custom", "name": "c"}]
    if is_large:
        tools = orjson.Fragment(orjson.dumps(tools))
    message = "tools[1].function.name: 3 is no tools[7]; tools[2].custom.name: wrong"
    with (
        pytest.raises(InvalidArgument) as caught,
        responses_request.with_client_positions({"tools": tools}),
    ):
        raise InvalidArgument(f"[request id: x] {message}")
    error = json.loads(responses.response_error(caught.value))["error"]
    assert error["message"] == "tools[1].tools[1].name: 3 is no tools[7]; tools[2].name: wrong"
    assert error["param"] == "tools[1].tools[1].name"


@pytest.mark.parametrize(
    ("arguments", "text"), [('{"input": "*** é\\n"}', "*** é\n"), ('{"x": 1}', '{"x": 1}')]
)
def test_a_custom_tool_is_called_with_one_text(arguments: str, text: str) -> None:
    tools = [{"type": "custom", "name": "patch", "description": "d"}, FUNCTION]
    chat_body = convert_chat(tools=tools, tool_choice={"type": "custom", "name": "patch"})
    assert chat_body["tools"][0]["custom"] == {"name": "patch", "description": "d"}
    assert chat_body["tool_choice"] == {"type": "custom", "custom": {"name": "patch"}}

    begin = {"index": 0, "id": "c", "name": "patch", "arguments": arguments[:4]}
    calls = [begin, {"index": 0, "arguments": arguments[4:]}]
    call = {"index": 1, "id": "d", "name": "f", "arguments": "{}"}
    deltas = [Delta(0, "", message={"tool_calls": [each]}) for each in [*calls, call]]
    events_out = events(ResponseObject({"tools": tools}), [*deltas, Delta(0, "", "stop")])
    kinds = [event["type"].removeprefix("response.") for event in events_out]
    assert kinds[2:6] == [
        *("output_item.added", "custom_tool_call_input.delta", "custom_tool_call_input.done"),
        "output_item.done",
    ]
    assert events_out[3]["delta"] == events_out[4]["input"] == text
    items = events_out[-1]["response"]["output"]
    assert (items[0]["type"], items[0]["input"]) == ("custom_tool_call", text)
    assert items[1]["type"] == "function_call"
    result = {"type": "custom_tool_call_output", "call_id": "c", "output": "done"}
    message, tool_message = convert_chat(input=[*items, result])["messages"]
    assert message["tool_calls"][0]["custom"] == {"name": "patch", "input": text}
    assert tool_message == {"role": "tool", "tool_call_id": "c", "content": "done"}


def test_items_are_ordered_and_stored() -> None:
    response_object = ResponseObject({"model": "m", "store": True, "metadata": {"a": "b"}})
    rest = {"index": 0}
    call = {**rest, "id": "call_1", "name": "f", "arguments": '{"a'}
    events_out = events(
        response_object,
        [
            Delta(0, "", message={"reasoning": "hm"}),
            Delta(0, "", message={"content": "Loo"}),
            Delta(0, "", message={"content": "k", "tool_calls": [call]}),
            Delta(
                0,
                "",
                message={
                    "parts": [{"tool_calls": [{**rest, "arguments": '": 1}'}]}, {"content": "!"}]
                },
            ),
            Delta(0, "", "stop", usage=USAGE, message={}),
        ],
    )
    kinds = [event["type"].removeprefix("response.") for event in events_out]
    first_events = ["output_item.added", "content_part.added"]
    end_events = ["content_part.done", "output_item.done"]
    assert kinds == [
        *("created", "in_progress"),
        *(*first_events, "reasoning_text.delta", "reasoning_text.done", *end_events),
        *(*first_events, "output_text.delta", "output_text.delta", "output_text.done", *end_events),
        *("output_item.added", *["function_call_arguments.delta"] * 2),
        *("function_call_arguments.done", "output_item.done"),
        *(*first_events, "output_text.delta", "output_text.done", *end_events, "completed"),
    ]
    response = events_out[-1]["response"]
    reasoning, message, function, last_message = response["output"]
    assert last_message["content"][0]["text"] == "!"
    assert reasoning["content"] == [{"type": "reasoning_text", "text": "hm"}]
    assert message["content"][0]["text"] == "Look" and message["status"] == "completed"
    assert (function["call_id"], function["arguments"]) == ("call_1", '{"a": 1}')
    assert (response["status"], response["store"], response["metadata"]) == (
        *("completed", False),
        {"a": "b"},
    )
    assert response["usage"] == {
        "input_tokens": 3,
        "input_tokens_details": {"cached_tokens": 1, "cache_write_tokens": 0},
        "output_tokens": 4,
        "output_tokens_details": {"reasoning_tokens": 2},
        "total_tokens": 7,
    }
    reference = {"type": "item_reference", "id": message["id"]}
    assert convert_chat(input=[reference])["messages"] == [{"role": "assistant", "content": "Look"}]


@pytest.mark.parametrize("returned", ["content", "encrypted_content"])
def test_reasoning_is_returned_by_either_member(returned: str) -> None:
    """Codex and agent-framework return only the encrypted content."""
    response_object = ResponseObject({"model": "m", "include": ["reasoning.encrypted_content"]})
    deltas = [Delta(0, "", message={"reasoning": "hm"}), Delta(0, "", "stop", message={})]
    (item,) = events(response_object, deltas)[-1]["response"]["output"]
    reduced_item = {name: item[name] for name in ("type", "id", "summary", returned)}
    expected_message = {"role": "assistant", "content": None, "reasoning_content": "hm"}
    assert convert_chat(input=[reduced_item])["messages"] == [expected_message]
    (message,) = convert_chat(input=[reduced_item, reduced_item])["messages"]
    assert message["reasoning_content"] == "hm\nhm"
    foreign_item = {"type": "reasoning", "summary": [], "encrypted_content": "gAAAA"}
    (message,) = convert_chat(input=[foreign_item])["messages"]
    assert "reasoning_content" not in message


def test_a_text_that_is_too_long_is_incomplete() -> None:
    response_object = ResponseObject({"model": "m"})
    response_object.add(0, Delta(0, "a b", "length", usage=USAGE))
    response = response_object.whole_response()
    assert (response["status"], response["incomplete_details"]) == (
        *("incomplete",),
        {"reason": "max_output_tokens"},
    )
    assert response["output"][0]["status"] == "incomplete"


def test_a_failed_stream_ends_with_an_error() -> None:
    response_object = ResponseObject({"model": "m"})
    response_object.add(0, Delta(0, "a"))
    error_event, failed_event = response_object.encode_failure(Unavailable("gone"))
    assert b"event: error\n" in error_event and b'"message":"gone"' in error_event
    assert b"event: response.failed\n" in failed_event and b'"status":"failed"' in failed_event


@pytest.mark.parametrize(
    ("message", "members"),
    [
        (
            {"content": "a"},
            {"content": [{"type": "output_text", "text": "a", "annotations": [], "logprobs": []}]},
        ),
        ({"reasoning": "a"}, {"content": [{"type": "reasoning_text", "text": "a"}]}),
        (
            {"tool_calls": [{"index": 0, "id": "c", "name": "f", "arguments": '{"a'}]},
            {"arguments": '{"a'},
        ),
    ],
)
def test_a_failed_stream_keeps_the_open_item_without_an_event_of_its_end(
    message: dict[str, Any], members: dict[str, Any]
) -> None:
    response_object = ResponseObject({"model": "m"})
    response_object.add(0, Delta(0, "", message=message))
    error_event, failed_event = response_object.encode_failure(Unavailable("gone"))
    assert error_event.startswith(b"event: error\n")
    event = json.loads(failed_event.partition(b"data: ")[2])
    (item,) = event["response"]["output"]
    assert {**item, **members, "status": "incomplete"} == item


@pytest.mark.parametrize(
    ("message", "param"),
    [
        ("messages: the prompt is too long", "input"),
        ("continue_final_message: the last message has no text", "input"),
        ("max_completion_tokens: -1 is not an integer", "max_output_tokens"),
        ("min_tokens: 1 is more than 0; max_completion_tokens: 0 is too few", "min_tokens"),
        ("response_format: cannot be compiled", "text.format"),
        ("reasoning_effort: the template does not use it", "reasoning.effort"),
        ("tool_choice: 'x' is wrong", "tool_choice"),
        ("tools[0].function.parameters: invalid JSON schema", "tools[0].parameters"),
        ("tools[0].custom.format: only the type 'text'", "tools[0].format"),
    ],
)
def test_an_error_names_the_field_as_the_client_does(message: str, param: str) -> None:
    error_body = json.loads(responses.response_error(InvalidArgument(message)))["error"]
    assert error_body["param"] == param and error_body["message"].startswith(f"{param}: ")
    assert "max_completion_tokens" not in error_body["message"]
    assert ROUTES.find("/v1/responses")[0].encode_error is responses.response_error  # type: ignore[index]


def test_a_truncated_prompt_keeps_its_end() -> None:
    assert convert_chat(truncation="auto")["truncate_prompt_tokens"] == -1
    assert ResponseObject({"truncation": "auto"}).whole_response()["truncation"] == "auto"


def test_verbosity_is_that_of_a_chat() -> None:
    assert convert_chat(text={"verbosity": "low"})["verbosity"] == "low"
