"""LiteLLM: its providers for servers of OpenAI's API, and its bridges from Anthropic's messages and to Responses."""

from __future__ import annotations

import json
from typing import Any

import litellm
from harness import Gateway, main, raised

QUESTION: Any = [{"role": "user", "content": "What is in-flight batching?"}]
TOOL: Any = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {"type": "object", "properties": {"city": {"enum": ["Paris", "Rome"]}}, "required": ["city"]},
    },
}
PROVIDERS = ("hosted_vllm", "openai")
litellm.telemetry = False
litellm.suppress_debug_info = True


def ask(gateway: Gateway, provider: str, **options: Any) -> Any:
    """Ask a provider."""
    settings: dict[str, Any] = {"messages": QUESTION, "temperature": 0, "max_tokens": 32, "num_retries": 0} | options
    return litellm.completion(f"{provider}/{gateway.model}", api_base=gateway.v1, api_key=gateway.key, **settings)


def check_a_chat_and_its_stream_agree(gateway: Gateway) -> None:
    """With both providers."""
    for provider in PROVIDERS:
        answer = ask(gateway, provider)
        chunks = list(ask(gateway, provider, stream=True, stream_options={"include_usage": True}))
        text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
        assert text == answer.choices[0].message.content
        assert chunks[-1].usage.completion_tokens == answer.usage.completion_tokens > 0


def check_tools(gateway: Gateway) -> None:
    """With both providers, streamed and not."""
    for provider in PROVIDERS:
        wanted: dict[str, Any] = {
            "tools": [TOOL],
            "tool_choice": "required",
            "parallel_tool_calls": False,
            "max_tokens": 200,
        }
        answer = ask(gateway, provider, **wanted)
        assert answer.choices[0].message.tool_calls
        for call in answer.choices[0].message.tool_calls:
            assert json.loads(call.function.arguments)["city"] in ("Paris", "Rome")
        built: Any = litellm.stream_chunk_builder(list(ask(gateway, provider, stream=True, **wanted)))
        told, streamed = answer.choices[0].message.tool_calls, built.choices[0].message.tool_calls
        assert [one.function.arguments for one in streamed] == [one.function.arguments for one in told]


def check_structured_outputs(gateway: Gateway) -> None:
    """A schema is passed on."""
    schema = {
        "type": "object",
        "properties": {"yes": {"type": "boolean"}},
        "required": ["yes"],
        "additionalProperties": False,
    }
    format_ = {"type": "json_schema", "json_schema": {"name": "x", "strict": True, "schema": schema}}
    for provider in PROVIDERS:
        answer = ask(gateway, provider, response_format=format_, max_tokens=100)
        assert isinstance(json.loads(answer.choices[0].message.content)["yes"], bool)


def check_errors_become_its_classes(gateway: Gateway) -> None:
    """An overflow is recognized by its words; an unknown model and a wrong key have classes of their own."""
    long: Any = [{"role": "user", "content": "word " * 20_000}]
    for provider in PROVIDERS:
        raised(litellm.ContextWindowExceededError, lambda provider=provider: ask(gateway, provider, messages=long))
        raised(litellm.BadRequestError, lambda provider=provider: ask(gateway, provider, temperature=-1))
        call: Any = lambda provider=provider: litellm.completion(  # noqa: E731
            f"{provider}/{gateway.model}", api_base=gateway.v1, api_key="wrong", messages=QUESTION
        )
        raised(litellm.AuthenticationError, call)
    raised(
        litellm.NotFoundError,
        lambda: litellm.completion("openai/nobody", api_base=gateway.v1, api_key=gateway.key, messages=QUESTION),
    )


def check_completions_and_embeddings(gateway: Gateway) -> None:
    """Text completions and embeddings of the provider."""
    answer: Any = litellm.text_completion(
        model=f"text-completion-openai/{gateway.model}",
        api_base=gateway.v1,
        api_key=gateway.key,
        prompt="In-flight batching",
        max_tokens=5,
    )
    assert answer.choices[0].text
    found: Any = litellm.embedding(
        f"openai/{gateway.model}", input=["a", "b"], api_base=gateway.v1, api_key=gateway.key
    )
    assert len(found.data) == 2


async def check_anthropic_messages_are_bridged(gateway: Gateway) -> None:
    """Anthropic's messages, which LiteLLM turns into a chat, streamed and not."""
    options: dict[str, Any] = {
        "model": f"hosted_vllm/{gateway.model}",
        "api_base": gateway.v1,
        "api_key": gateway.key,
        "messages": QUESTION,
        "max_tokens": 32,
        "temperature": 0,
    }
    answer: Any = await litellm.anthropic.messages.acreate(**options)
    assert answer["content"][0]["text"]
    stream: Any = await litellm.anthropic.messages.acreate(stream=True, **options)
    events = b"".join([chunk if isinstance(chunk, bytes) else str(chunk).encode() async for chunk in stream])
    assert b"message_stop" in events


def check_responses(gateway: Gateway) -> None:
    """LiteLLM sends every unset field as null."""
    answer: Any = litellm.responses(
        model=f"openai/{gateway.model}",
        api_base=gateway.v1,
        api_key=gateway.key,
        input="What is Triton?",
        max_output_tokens=32,
    )
    assert answer.output[0].content[0].text
    events = list(
        litellm.responses(
            model=f"openai/{gateway.model}",
            api_base=gateway.v1,
            api_key=gateway.key,
            input="What is Triton?",
            max_output_tokens=32,
            stream=True,
        )
    )
    assert str(events[-1].type).endswith(("completed", "COMPLETED", "incomplete", "INCOMPLETE"))


if __name__ == "__main__":
    main(globals())
