"""agent-framework with the Responses API; it returns the encrypted content of reasoning."""

import asyncio
import sys

from agent_framework import Agent
from agent_framework.openai import OpenAIChatClient


def get_weather(city: str) -> str:
    """Return the weather in a city."""
    assert city == "Paris"
    return "sunny"


async def main() -> None:
    client = OpenAIChatClient(model="scripted", base_url=sys.argv[1], api_key="none")
    agent = Agent(client=client, tools=[get_weather], default_options={"store": False})
    result = await agent.run("Weather?")
    assert result.text.endswith("It is sunny."), result
    stream = agent.run("Weather?", stream=True)
    kinds = {content.type async for update in stream for content in update.contents}
    assert {"text_reasoning", "function_call", "text"} <= kinds, kinds
    assert (await stream.get_final_response()).text.endswith("It is sunny.")
    print("all is right")


asyncio.run(main())
