"""OpenAI's Agents SDK: an agent with a function as its tool, over the Responses API and over chats."""

from __future__ import annotations

from typing import Any, Literal

from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    RunConfig,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from harness import Gateway, main
from openai import AsyncOpenAI
from pydantic import BaseModel, Field

set_tracing_disabled(True)
asked: list[str] = []


@function_tool
def weather(city: Literal["Paris", "Rome"]) -> str:
    """Look up the weather of a city."""
    asked.append(city)
    return f"It is clear in {city}."


class Plan(BaseModel):
    """What an engine does."""

    kind: Literal["static", "in-flight"]
    steps: int = Field(ge=1, le=9)


def agents_of(gateway: Gateway, **options: Any) -> list[Agent]:
    """Return an agent that speaks by Responses, and one by chats."""
    client = AsyncOpenAI(
        base_url=gateway.v1, api_key=gateway.key, max_retries=0, _strict_response_validation=True, timeout=120
    )
    models = (OpenAIResponsesModel(gateway.model, client), OpenAIChatCompletionsModel(gateway.model, client))
    return [Agent(name="assistant", instructions="Be brief.", model=model, **options) for model in models]


async def check_an_agent_answers(gateway: Gateway) -> None:
    """One turn, streamed and not."""
    settings = ModelSettings(temperature=0, max_tokens=160)
    for agent in agents_of(gateway, model_settings=settings):
        answer = await Runner.run(agent, "What is in-flight batching?")
        assert answer.final_output
        streamed = Runner.run_streamed(agent, "What is in-flight batching?")
        async for _ in streamed.stream_events():
            pass
        assert streamed.final_output == answer.final_output


async def check_an_agent_calls_its_function(gateway: Gateway) -> None:
    """The model has to call in the first turn, the function is run, and the second turn answers."""
    settings = ModelSettings(temperature=0, max_tokens=200, tool_choice="required", parallel_tool_calls=False)
    for agent in agents_of(gateway, tools=[weather], model_settings=settings):
        asked.clear()
        answer = await Runner.run(agent, "What is the weather in Rome?", max_turns=4, run_config=RunConfig())
        assert asked
        assert answer.final_output is not None
        asked.clear()
        streamed = Runner.run_streamed(agent, "What is the weather in Rome?", max_turns=4)
        async for _ in streamed.stream_events():
            pass
        assert asked


async def check_an_agents_output_has_its_type(gateway: Gateway) -> None:
    """By a strict schema."""
    for agent in agents_of(gateway, output_type=Plan, model_settings=ModelSettings(temperature=0, max_tokens=200)):
        answer = await Runner.run(agent, "How does it work?")
        assert isinstance(answer.final_output, Plan)


if __name__ == "__main__":
    main(globals())
