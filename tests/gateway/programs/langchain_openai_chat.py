"""LangChain's ChatOpenAI: chats, streams, structured outputs, tools, an agent that loops, and batches."""

from __future__ import annotations

from typing import Any, Literal

from harness import Gateway, main
from langchain.agents import create_agent
from langchain_core.messages import AIMessage, HumanMessage, SystemMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAI, OpenAIEmbeddings
from pydantic import BaseModel, Field

QUESTION = "What is in-flight batching?"


class Plan(BaseModel):
    """What an engine does."""

    kind: Literal["static", "in-flight"]
    steps: int = Field(ge=1, le=9)


@tool
def weather(city: Literal["Paris", "Rome"]) -> str:
    """Look up the weather of a city."""
    return f"It is clear in {city}."


def chat_of(gateway: Gateway, **options: Any) -> ChatOpenAI:
    """Return a chat model."""
    settings = {"temperature": 0, "max_tokens": 200, "max_retries": 0, "timeout": 120} | options
    return ChatOpenAI(model=gateway.model, base_url=gateway.v1, api_key=gateway.key, **settings)


def check_a_chat_and_its_stream_agree(gateway: Gateway) -> None:
    """Text, usage, and the reason of the end."""
    chat = chat_of(gateway, stream_usage=True)
    messages = [SystemMessage("Be brief."), HumanMessage(QUESTION)]
    answer = chat.invoke(messages)
    streamed: Any = None
    for chunk in chat.stream(messages):
        streamed = chunk if streamed is None else streamed + chunk
    assert answer.content
    assert streamed.content == answer.content
    assert streamed.response_metadata["finish_reason"] == answer.response_metadata["finish_reason"]
    assert answer.usage_metadata
    assert streamed.usage_metadata["output_tokens"] == answer.usage_metadata["output_tokens"] > 0


def check_structured_outputs_by_every_method(gateway: Gateway) -> None:
    """By a JSON schema, which is the default, by a function's call, and by JSON mode with a schema in the prompt."""
    for method in ("json_schema", "function_calling"):
        found: Any = chat_of(gateway).with_structured_output(Plan, method=method).invoke(QUESTION)
        assert isinstance(found, Plan), (method, found)


def check_bound_tools_are_called(gateway: Gateway) -> None:
    """``any`` makes a call, and its result is answered."""
    bound = chat_of(gateway).bind_tools([weather], tool_choice="any", parallel_tool_calls=False)
    asked = HumanMessage("What is the weather in Rome?")
    answer: Any = bound.invoke([asked])
    [call] = answer.tool_calls
    assert call["name"] == "weather"
    result: ToolMessage = weather.invoke(call)
    last = chat_of(gateway).bind_tools([weather], tool_choice="none").invoke([asked, answer, result])
    assert isinstance(last, AIMessage)


def check_streamed_calls_add_up(gateway: Gateway) -> None:
    """Chunks of a call concatenate to its arguments."""
    bound = chat_of(gateway).bind_tools([weather], tool_choice="weather")
    whole: Any = None
    for chunk in bound.stream("What is the weather in Rome?"):
        whole = chunk if whole is None else whole + chunk
    [call] = whole.tool_calls
    assert call["args"]["city"] in ("Paris", "Rome")
    assert not whole.invalid_tool_calls


def check_an_agent_ends(gateway: Gateway) -> None:
    """The agent asks, calls if the model wants to, and ends with an answer."""
    agent: Any = create_agent(chat_of(gateway), [weather])
    state = agent.invoke({"messages": [HumanMessage("What is the weather in Paris?")]}, {"recursion_limit": 12})
    assert isinstance(state["messages"][-1], AIMessage)
    assert not state["messages"][-1].tool_calls


def check_the_responses_api(gateway: Gateway) -> None:
    """LangChain turns to it by itself for some settings."""
    answer = chat_of(gateway, use_responses_api=True).invoke(QUESTION)
    assert answer.text
    found: Any = chat_of(gateway, use_responses_api=True).with_structured_output(Plan).invoke(QUESTION)
    assert isinstance(found, Plan)


def check_log_probs_come_through(gateway: Gateway) -> None:
    """With alternatives."""
    answer = chat_of(gateway, max_tokens=8).bind(logprobs=True, top_logprobs=2).invoke(QUESTION)
    assert len(answer.response_metadata["logprobs"]["content"]) >= 7


async def check_a_batch_keeps_its_order(gateway: Gateway) -> None:
    """Asynchronously, all at once."""
    chat = chat_of(gateway, max_tokens=16)
    prompts = [f"Question {number}: what is Triton?" for number in range(6)]
    answers = await chat.abatch(prompts)
    assert [one.content for one in answers] == [chat.invoke(prompt).content for prompt in prompts]


def check_completions(gateway: Gateway) -> None:
    """The model of plain text."""
    plain = OpenAI(model=gateway.model, base_url=gateway.v1, api_key=gateway.key, temperature=0, max_tokens=12)
    assert plain.invoke("In-flight batching lets every") == "".join(plain.stream("In-flight batching lets every"))


def check_embeddings(gateway: Gateway) -> None:
    """LangChain sends token ids of a tokenizer of OpenAI's, unless it is told not to."""
    embeddings = OpenAIEmbeddings(
        model=gateway.model, base_url=gateway.v1, api_key=gateway.key, check_embedding_ctx_length=False
    )
    found = embeddings.embed_documents(["What is Triton?", "Beams"])
    assert len(found) == 2
    assert embeddings.embed_query("Beams") == found[1]


if __name__ == "__main__":
    main(globals())
