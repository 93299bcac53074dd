"""OpenAI's own client: tools in both APIs, complete and streamed."""

import json
import sys
from typing import Any

from openai import OpenAI
from pydantic import BaseModel


class get_weather(BaseModel):
    """The weather in a city."""

    city: str


SCHEMA: dict[str, Any] = {**get_weather.model_json_schema(), "additionalProperties": False}
TOOL: Any = {"type": "function", "function": {"name": "get_weather", "parameters": SCHEMA}}
FLAT_TOOL: Any = {"type": "function", "name": "get_weather", "parameters": SCHEMA, "strict": True}

with OpenAI(base_url=sys.argv[1], api_key="none", max_retries=0) as client:
    messages: list[Any] = [{"role": "user", "content": "Weather?"}]
    chat: dict[str, Any] = {"model": "scripted", "tools": [TOOL]}
    unary = client.chat.completions.create(messages=messages, **chat)
    (choice,) = unary.choices
    assert choice.finish_reason == "tool_calls", choice
    assert choice.message.content == "Look: " and choice.message.tool_calls
    assert choice.message.to_dict()["reasoning_content"] == "hm so"
    (call,) = choice.message.tool_calls
    assert call.type == "function" and json.loads(call.function.arguments) == {"city": "Paris"}
    messages += [choice.message, {"role": "tool", "tool_call_id": call.id, "content": "sunny"}]
    answer = client.chat.completions.create(messages=messages, **chat)
    assert answer.choices[0].message.content == "It is sunny.", answer

    with client.chat.completions.stream(messages=messages[:1], **chat) as stream:
        final = stream.get_final_completion()
    (streamed_call,) = final.choices[0].message.tool_calls or []
    assert streamed_call.function.arguments == call.function.arguments

    named_tool: Any = {"type": "function", "function": {"name": "get_weather"}}
    other_tool: Any = {"type": "function", "function": {"name": "other", "parameters": SCHEMA}}
    allowed = {
        "type": "allowed_tools",
        "allowed_tools": {"mode": "required", "tools": [named_tool]},
    }
    for choosing in ("required", named_tool, allowed):
        forced_completion = client.chat.completions.create(
            model="direct",
            messages=messages[:1],
            tools=[TOOL] if choosing == "required" else [other_tool, TOOL],
            tool_choice=choosing,
            parallel_tool_calls=False,
        )
        (tool_call,) = forced_completion.choices[0].message.tool_calls or []
        assert tool_call.type == "function" and tool_call.function.name == "get_weather"
        assert json.loads(tool_call.function.arguments).keys() == {"city"}

    response = client.responses.create(
        model="scripted", instructions="Be brief.", input="Weather?", tools=[FLAT_TOOL]
    )
    assert [item.type for item in response.output] == ["reasoning", "message", "function_call"]
    assert response.usage and response.usage.output_tokens_details.reasoning_tokens >= 3
    last = response.output[-1]
    assert last.type == "function_call" and json.loads(last.arguments) == {"city": "Paris"}
    result = {"type": "function_call_output", "call_id": last.call_id, "output": "sunny"}
    history: Any = [{"role": "user", "content": "Weather?"}, *response.output, result]
    second_response = client.responses.create(model="scripted", input=history, tools=[FLAT_TOOL])
    assert second_response.output_text == "It is sunny.", second_response

    flat = {"type": "allowed_tools", "mode": "required", "tools": [{**FLAT_TOOL}]}
    single_response = client.responses.create(
        model="direct",
        input="Weather?",
        tools=[FLAT_TOOL],
        tool_choice=flat,
        parallel_tool_calls=False,
    )
    assert single_response.output[-1].type == "function_call", single_response

    with client.responses.stream(model="scripted", input="Weather?", tools=[FLAT_TOOL]) as events:
        kinds = [event.type for event in events]
        final_response = events.get_final_response()
    assert kinds[:2] == ["response.created", "response.in_progress"], kinds
    assert kinds[-1] == "response.completed" and final_response.output[-1].type == "function_call"
print("all is right")
