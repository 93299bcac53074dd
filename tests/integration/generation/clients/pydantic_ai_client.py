"""pydantic-ai with both of its models of OpenAI's APIs, with a tool and with typed output."""

import asyncio
import sys

from pydantic import BaseModel
from pydantic_ai import Agent
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider


class Weather(BaseModel):
    """Weather."""

    city: str


def get_weather(city: str) -> str:
    """The weather in a city."""
    assert city == "Paris"
    return "sunny"


async def main() -> None:
    provider = OpenAIProvider(base_url=sys.argv[1], api_key="none")
    for kind in (OpenAIChatModel, OpenAIResponsesModel):
        agent = Agent(kind("scripted", provider=provider), tools=[get_weather])
        result = await agent.run("Weather?")
        assert result.output == "It is sunny.", result
        further = await agent.run("And?", message_history=result.all_messages())
        assert further.output == "It is sunny.", further
        async with agent.run_stream("Weather?") as stream:
            assert "sunny" in await stream.get_output()
    print("all is right")


asyncio.run(main())
