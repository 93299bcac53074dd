"""openai-agents with its default, the Responses API, complete and streamed."""

import asyncio
import sys

from agents import Agent, Runner, function_tool, set_default_openai_client, set_tracing_disabled
from openai import AsyncOpenAI


@function_tool
def get_weather(city: str) -> str:
    """Return the weather in a city."""
    assert city == "Paris"
    return "sunny"


async def main() -> None:
    agent = Agent(name="a", instructions="Be brief.", model="scripted", tools=[get_weather])
    result = await Runner.run(agent, "Weather?")
    assert result.final_output == "It is sunny.", result
    second_result = await Runner.run(
        agent, [*result.to_input_list(), {"role": "user", "content": "And?"}]
    )
    assert second_result.final_output == "It is sunny.", second_result
    stream_result = Runner.run_streamed(agent, "Weather?")
    kinds = [event.type async for event in stream_result.stream_events()]
    assert stream_result.final_output == "It is sunny." and "raw_response_event" in kinds
    print("all is right")


set_tracing_disabled(True)
set_default_openai_client(AsyncOpenAI(base_url=sys.argv[1], api_key="none"), use_for_tracing=False)
asyncio.run(main())
