"""litellm: a tool call, complete and streamed, and the tool's result."""

import contextlib
import json
import sys
from typing import Any

import litellm

SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
settings: dict[str, Any] = {
    "model": "openai/scripted",
    "api_base": sys.argv[1],
    "api_key": "none",
    "tools": [{"type": "function", "function": {"name": "get_weather", "parameters": SCHEMA}}],
}
messages: list[Any] = [{"role": "user", "content": "Weather?"}]
message = litellm.completion(messages=messages, **settings).choices[0].message
(call,) = message.tool_calls
assert json.loads(call.function.arguments) == {"city": "Paris"}, message
assert message.reasoning_content == "hm so", message
messages += [message, {"role": "tool", "tool_call_id": call.id, "content": "sunny"}]
answer = litellm.completion(messages=messages, **settings)
assert answer.choices[0].message.content == "It is sunny.", answer
chunks = list(litellm.completion(messages=messages[:1], stream=True, **settings))
built = litellm.stream_chunk_builder(chunks)
assert built.choices[0].message.tool_calls[0].function.arguments == call.function.arguments
response = litellm.responses(
    model="openai/scripted", input="Weather?", api_base=sys.argv[1], api_key="none"
)
assert response.status == "completed", response
with contextlib.suppress(litellm.ContextWindowExceededError):
    litellm.completion(messages=[{"role": "user", "content": "x" * 9_000}], **settings)
    raise AssertionError("a prompt that is too long was accepted")
print("all is right")
