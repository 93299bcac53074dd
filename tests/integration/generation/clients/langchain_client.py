"""langchain-openai: bound tools, results, streams, structured output, the Responses API."""

import sys

from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI


@tool
def get_weather(city: str) -> str:
    """Return the weather in a city."""
    return "sunny in " + city


for uses_it in (False, True):
    model = ChatOpenAI(
        model="scripted", base_url=sys.argv[1], api_key="none", use_responses_api=uses_it
    )
    bound = model.bind_tools([get_weather])
    question = HumanMessage("Weather?")
    reply = bound.invoke([question])
    (call,) = reply.tool_calls
    assert call["args"] == {"city": "Paris"}, reply
    result = ToolMessage(get_weather.invoke(call["args"]), tool_call_id=call["id"])
    assert bound.invoke([question, reply, result]).text == "It is sunny."
    parts = list(bound.stream([question]))
    whole_message = parts[0]
    for part in parts[1:]:
        whole_message += part
    assert whole_message.tool_calls[0]["args"] == {"city": "Paris"}, whole_message
    direct = ChatOpenAI(
        model="direct", base_url=sys.argv[1], api_key="none", use_responses_api=uses_it
    )
    forced_call = direct.bind_tools([get_weather], tool_choice="get_weather").invoke([question])
    assert forced_call.tool_calls[0]["name"] == "get_weather", forced_call
print("all is right")
