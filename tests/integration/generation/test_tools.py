"""Tool calls and reasoning of scripted models: each format, complete and streamed."""

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from tests.integration.generation.conftest import client_of
from tests.support.scripted_llm import ANSWER, ANSWERS, CALL, CALLED, TEMPLATE, write_scripted
from tests.support.servers import Server, running

PARAMETERS: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOLS: Any = [{"type": "function", "function": {"name": "get_weather", "parameters": PARAMETERS}}]
LONG_ANSWERS = tuple(f"{number:04x}" for number in range(240))
# Format -> the scripted text, the hint in the chat template, the special tokens, and the engine
# arguments.
SCRIPTS: dict[str, tuple[tuple[str, ...], str, tuple[str, ...], dict[str, Any]]] = {
    "hermes": (("<tool_call>", '{"name": "get_weather", "ar', 'guments": {"city": "a', 'b"}}',
        "</tool_call>"), *("<tool_call>", ("<tool_call>", "</tool_call>"), {"city": "ab"})),
    "qwen": (("<tool_call>\n<function=get", "_weather>\n<parameter=city>\nSão ",
        "Paulo\n</para"), *("<parameter=", (), {"city": "São Paulo", "days": 3})),
    "llama": (("<|python_tag|>", '{"name": "get_weather", "par', 'ameters": {"city": "a"',
        ', "days": 3}}'), *("<|python_tag|>", ("<|python_tag|>", ), {"city": "a", "days": 3})),
    "mistral": (("[TOOL_CALLS]", '[{"name": "get_weather", "argum', 'ents": {"city": "a', 'b"}}]'),
        *("[TOOL_CALLS]", ("[TOOL_CALLS]", ), {"city": "ab"})),
    "pythonic": (("[get_", "weather(city='a", "\"b', da", "ys=3)]"),
        *("[name(key=value)]", (), {"city": 'a"b', "days": 3})),
    "long": (('<tool_call>{"name": "get_weather", "arguments": {"city": "', *LONG_ANSWERS,
        '"}}</tool_call>'), *("<tool_call>", (), {"city": "".join(LONG_ANSWERS)})),
}  # fmt: skip
LAST_ANSWERS = ("meter>\n<parameter=days>\n", "3\n</parameter>\n</function>\n", "</tool_call>")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Yield a server with a model for each script, and one that reasons before JSON."""
    repository = tmp_path_factory.mktemp("tools") / "models"
    for name, (script, hint, special, _) in SCRIPTS.items():
        template = TEMPLATE.replace("<tool_call>", hint).replace("</tool_call>", "")
        answers = LAST_ANSWERS if name == "qwen" else ()
        write_scripted(repository / name / "1", {CALLED: (*script, *answers)}, template, special)
    thinks = ("<think>", "so", "</think>", '{"city": "', 'x"}')
    template = TEMPLATE.replace("<|called|>", "<|called|><think>\n")
    write_scripted(repository / "thinks" / "1", {CALLED: thinks}, special=("<think>", "</think>"))
    opened_script = {"<think>": ("hm", "</think>", "yes")}
    write_scripted(repository / "opened" / "1", opened_script, template, ("</think>",))
    write_scripted(repository / "loop" / "1", {CALLED: CALL, ANSWERS: ANSWER})
    with running(repository) as running_server:
        yield running_server


@pytest.fixture
def client(server: Server) -> Iterator[openai.OpenAI]:
    with client_of(server) as openai_client:
        yield openai_client


def chat_request(model: str, **more: Any) -> dict[str, Any]:
    return {
        "model": model,
        "messages": [{"role": "user", "content": "a"}],
        "temperature": 0,
        **more,
    }


def read_chat_stream(
    client: openai.OpenAI, body: dict[str, Any], kill: Server | None = None
) -> list[Any]:
    """Return the content, the reasoning, the arguments and the finish reason of a stream."""
    content = reasoning = arguments = reason = ""
    for index, chunk in enumerate(client.chat.completions.create(**body, stream=True)):
        (choice,) = chunk.choices
        content += choice.delta.content or ""
        reasoning += str(choice.delta.to_dict().get("reasoning_content") or "")
        for call in choice.delta.tool_calls or []:
            assert call.function is not None and bool(call.id) == bool(call.function.name)
            arguments += call.function.arguments or ""
        reason = choice.finish_reason or reason
        if kill is not None and index == 20:
            kill.find_one(f"worker {body['model']}").kill()
    return [content, reasoning, arguments, reason]


@pytest.mark.parametrize("model", SCRIPTS)
def test_calls_in_each_format(client: openai.OpenAI, model: str) -> None:
    body = chat_request(model, tools=TOOLS)
    (choice,) = client.chat.completions.create(**body).choices
    (call,) = choice.message.tool_calls or []
    assert call.type == "function" and call.function.name == "get_weather"
    assert json.loads(call.function.arguments) == SCRIPTS[model][3]
    assert (choice.message.content, choice.finish_reason) == (None, "tool_calls")
    assert read_chat_stream(client, body) == ["", "", call.function.arguments, "tool_calls"]


def test_a_custom_tool(client: openai.OpenAI) -> None:
    """Its input is all that the model has written if the arguments have no input."""
    tools: Any = [{"type": "custom", "custom": {"name": "get_weather"}}]
    body = chat_request("hermes", tools=tools)
    (choice,) = client.chat.completions.create(**body).choices
    (call,) = choice.message.tool_calls or []
    assert call.type == "custom" and call.custom.input == '{"city": "ab"}'
    chunks = [chunk.choices[0] for chunk in client.chat.completions.create(**body, stream=True)]
    calls = [call.to_dict() for chunk in chunks for call in chunk.delta.tool_calls or []]
    assert [each["custom"] for each in calls] == [call.custom.to_dict()]
    body["tool_choice"] = tools[0]
    (choice,) = client.chat.completions.create(**body, max_tokens=100).choices
    assert choice.message.tool_calls or choice.finish_reason == "length"


@pytest.mark.parametrize("model", ["hermes", "mistral", "llama", "qwen", "pythonic"])
@pytest.mark.parametrize("choice", ["required", "strict"])
def test_calls_by_a_grammar(client: openai.OpenAI, model: str, choice: str) -> None:
    tools: Any = [{**TOOLS[0], "function": {**TOOLS[0]["function"], "strict": choice == "strict"}}]
    more = {"tool_choice": "required"} if choice == "required" else {}
    body = chat_request(model, tools=tools, parallel_tool_calls=False, max_tokens=200, **more)
    (completion,) = client.chat.completions.create(**body).choices
    # The grammar prescribes another spelling than the scripted text.
    if completion.finish_reason == "length":
        return
    (call,) = completion.message.tool_calls or []
    assert call.type == "function" and json.loads(call.function.arguments)["city"]


def test_a_killed_worker_continues_a_call(client: openai.OpenAI, server: Server) -> None:
    answers = read_chat_stream(client, chat_request("long", tools=TOOLS), kill=server)
    assert (json.loads(answers[2]), answers[3]) == (SCRIPTS["long"][3], "tool_calls")


def test_reasoning_precedes_a_grammar(client: openai.OpenAI) -> None:
    response_format = {"type": "json_schema", "json_schema": {"name": "x", "schema": PARAMETERS}}
    for tool_fields in ({}, {"tools": TOOLS}):
        body = chat_request("thinks", response_format=response_format, max_tokens=60, **tool_fields)
        (choice,) = client.chat.completions.create(**body).choices
        assert choice.message.to_dict()["reasoning"] == "so"
        assert json.loads(choice.message.content or "") == {"city": "x"}
        assert read_chat_stream(client, body)[:2] == [choice.message.content, "so"]


def test_reasoning_that_the_template_has_begun(client: openai.OpenAI) -> None:
    unary = client.chat.completions.create(**chat_request("opened"))
    assert unary.choices[0].message.to_dict()["reasoning_content"] == "hm"
    assert unary.choices[0].message.content == "yes"
    assert read_chat_stream(client, chat_request("opened")) == ["yes", "hm", "", "stop"]
    hidden = client.chat.completions.create(
        **chat_request("opened"), extra_body={"include_reasoning": False}
    )
    assert "reasoning" not in hidden.choices[0].message.to_dict()


def test_no_tools_are_wanted(client: openai.OpenAI) -> None:
    free = client.chat.completions.create(**chat_request("hermes", tools=TOOLS, tool_choice="none"))
    assert free.choices[0].message.tool_calls is None
    named_tool = {"type": "function", "function": {"name": "f"}}
    body = chat_request("hermes", tools=TOOLS, tool_choice=named_tool)
    with pytest.raises(openai.BadRequestError, match="tool_choice: `tools` has no tool 'f'"):
        client.chat.completions.create(**body)
    no_schema = {"type": "x"}
    unsupported = {"properties": {"a": {"type": "array", "contains": {"type": "string"}}}}
    for schema, choice, param, message in (
        (no_schema, "auto", "tools[0].function.parameters", "invalid JSON schema: type: 'x'"),
        (unsupported, "required", "tools", "tools: cannot be compiled"),
    ):
        tool = {"type": "function", "function": {"name": "f", "parameters": schema}}
        body = chat_request("hermes", tools=[tool], tool_choice=choice)
        with pytest.raises(openai.BadRequestError, match=message) as error_info:
            client.chat.completions.create(**body)
        assert error_info.value.param == param


def test_errors_of_responses(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="responses are not stored") as error_info:
        client.responses.create(model="loop", input="a", previous_response_id="resp_1")
    assert error_info.value.param == "previous_response_id"
    with pytest.raises(openai.BadRequestError, match=r"use text\.format instead") as error_info:
        client.responses.create(
            model="loop", input="a", extra_body={"response_format": {"type": "json_object"}}
        )
    assert error_info.value.param == "response_format"
    completion = client.responses.create(model="loop", input="a", max_output_tokens=3, store=True)
    assert (completion.status, completion.to_dict()["store"]) == ("incomplete", False)
    wrong = {"type": "function", "name": "f", "parameters": {"type": "x"}}
    tools: Any = [{"type": "web_search"}, {"type": "namespace", "name": "n", "tools": [wrong]}]
    with pytest.raises(openai.BadRequestError, match="type: 'x'") as error_info:
        client.responses.create(model="hermes", input="a", tools=tools)
    assert error_info.value.param == "tools[1].tools[0].parameters"


def test_responses_have_the_logprobs_of_their_content(client: openai.OpenAI) -> None:
    body: dict[str, Any] = {"model": "thinks", "input": "a", "temperature": 0}
    body["include"] = ["message.output_text.logprobs"]
    stream: Any = client.responses.create(**body, stream=True)
    *_, end = stream
    responses: list[Any] = [client.responses.create(**body), end.response]
    for response in responses:
        part = response.output[-1].content[0]
        assert part.text == '{"city": "x"}'
        assert "".join(token.token for token in part.logprobs).startswith(part.text)
