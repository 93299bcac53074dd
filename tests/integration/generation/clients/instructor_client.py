"""instructor with its default: a typed response is a call of a named tool."""

import sys

import instructor
from openai import OpenAI
from pydantic import BaseModel


class get_weather(BaseModel):
    """The weather in a city."""

    city: str


client = instructor.from_openai(OpenAI(base_url=sys.argv[1], api_key="none"))
completion = client.chat.completions.create(
    model="direct", messages=[{"role": "user", "content": "Weather?"}], response_model=get_weather
)
assert completion.city, completion
print("all is right")
