"""pydantic-ai with its models for both of OpenAI's APIs, with a tool and with typed output."""

import asyncio
import sys
from collections.abc import AsyncIterable
from typing import Any

from pydantic import BaseModel
from pydantic_ai import Agent, ToolOutput
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider


class Weather(BaseModel):
    """The weather in a city."""

    city: str


get_weather_type = ToolOutput(Weather, name="get_weather")


def get_weather(city: str) -> str:
    """Return the weather in a city."""
    assert city == "Paris"
    return "sunny"


async def read_events(_: Any, events: AsyncIterable[Any]) -> None:
    """Handle events; with a handler, pydantic-ai streams its requests."""
    async for _event in events:
        pass


async def main() -> None:
    provider = OpenAIProvider(base_url=sys.argv[1], api_key="none")
    for kind in (OpenAIChatModel, OpenAIResponsesModel):
        agent = Agent(kind("scripted", provider=provider), tools=[get_weather])
        result = await agent.run("Weather?")
        assert result.output == "It is sunny.", result
        second_result = await agent.run("And?", message_history=result.all_messages())
        assert second_result.output == "It is sunny.", second_result
        stream_result = await agent.run("Weather?", event_stream_handler=read_events)
        assert stream_result.output == "It is sunny.", stream_result
        typed_agent = Agent(kind("direct", provider=provider), output_type=get_weather_type)
        assert (await typed_agent.run("Weather?")).output.city == "Paris"
    print("all is right")


asyncio.run(main())
