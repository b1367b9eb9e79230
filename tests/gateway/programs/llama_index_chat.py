"""LlamaIndex's OpenAILike: chats, completions, streams, function calls, structured predictions.

LlamaIndex reads the annotations of functions, and does not look names up in their module: they are no strings here.
"""

import asyncio
from typing import Any, Literal

from harness import Gateway, main
from llama_index.core.llms import ChatMessage
from llama_index.core.prompts import PromptTemplate
from llama_index.core.tools import FunctionTool
from llama_index.llms.openai_like import OpenAILike
from pydantic import BaseModel, Field

QUESTION = [ChatMessage(role="system", content="Be brief."), ChatMessage(role="user", content="What is Triton?")]


class Plan(BaseModel):
    """What an engine does."""

    kind: Literal["static", "in-flight"]
    steps: int = Field(ge=1, le=9)


def weather(city: Literal["Paris", "Rome"]) -> str:
    """Look up the weather of a city."""
    return f"It is clear in {city}."


def model_of(gateway: Gateway, **options: Any) -> OpenAILike:
    """Return a model that chats and calls functions."""
    settings: dict[str, Any] = {
        "is_chat_model": True,
        "is_function_calling_model": True,
        "temperature": 0,
        "max_tokens": 160,
        "max_retries": 0,
        "context_window": 1024,
    }
    return OpenAILike(model=gateway.model, api_base=gateway.v1, api_key=gateway.key, **(settings | options))


def check_a_chat_and_its_stream_agree(gateway: Gateway) -> None:
    """The stream's last text is the answer's."""
    model = model_of(gateway)
    answer = model.chat(QUESTION)
    *_, last = model.stream_chat(QUESTION)
    assert answer.message.content
    assert last.message.content == answer.message.content


def check_a_completion_and_its_stream_agree(gateway: Gateway) -> None:
    """By the endpoint of completions, since this one is no chat model."""
    model = model_of(gateway, is_chat_model=False, max_tokens=12)
    answer = model.complete("In-flight batching lets every")
    *_, last = model.stream_complete("In-flight batching lets every")
    assert answer.text
    assert last.text == answer.text


def check_functions_are_called(gateway: Gateway) -> None:
    """The call is parsed, and the function can be run with it."""
    model, tool = model_of(gateway), FunctionTool.from_defaults(weather)
    answer = model.chat_with_tools([tool], "What is the weather in Rome?", tool_required=True)
    calls = model.get_tool_calls_from_response(answer)
    assert calls
    assert all(str(tool(**call.tool_kwargs)).startswith("It is clear") for call in calls)


def check_predictions_are_structured(gateway: Gateway) -> None:
    """By a function's call, as LlamaIndex does."""
    found = model_of(gateway).structured_predict(Plan, PromptTemplate("How does it work?"))
    assert isinstance(found, Plan)


def check_many_at_once(gateway: Gateway) -> None:
    """Asynchronous chats and streams."""
    model = model_of(gateway, max_tokens=16)

    async def ask() -> list[str]:
        answers = await asyncio.gather(*(model.achat(QUESTION) for _ in range(4)))
        stream = await model.astream_chat(QUESTION)
        texts = [one.message.content or "" async for one in stream]
        return [str(one.message.content) for one in answers] + [texts[-1]]

    assert len(set(asyncio.run(ask()))) == 1


if __name__ == "__main__":
    main(globals())
