"""Chats with the OpenAI SDK, which checks every answer against its types, strictly."""

from __future__ import annotations

import asyncio
from typing import Any

from harness import Gateway, main, raised
from openai import AsyncOpenAI, BadRequestError, NotFoundError, OpenAI

QUESTION: Any = [{"role": "user", "content": "What is in-flight batching?"}]
GREEDY: dict[str, Any] = {"temperature": 0, "max_completion_tokens": 24}


def client_of(gateway: Gateway, **options: Any) -> OpenAI:
    """Return a client that refuses answers that are not of the API's types, and asks once."""
    options = {"max_retries": 0, "timeout": 120, "api_key": gateway.key} | options
    return OpenAI(base_url=gateway.v1, _strict_response_validation=True, **options)


def check_models_are_listed_and_retrieved(gateway: Gateway) -> None:
    """The list's first model is found by its name, and another one is not found."""
    client = client_of(gateway)
    first = client.models.list().data[0]
    assert client.models.retrieve(first.id) == first
    error = raised(NotFoundError, lambda: client.models.retrieve("no-such-model"))
    assert error.code == "model_not_found", error.body


def check_an_answer_has_all_its_parts(gateway: Gateway) -> None:
    """Text, reason of the end, usage that adds up."""
    answer = client_of(gateway).chat.completions.create(model=gateway.model, messages=QUESTION, **GREEDY)
    [choice] = answer.choices
    assert choice.message.role == "assistant"
    assert choice.message.content
    assert choice.finish_reason in ("stop", "length")
    assert answer.object == "chat.completion"
    assert answer.model == gateway.model
    assert answer.usage
    assert answer.usage.prompt_tokens + answer.usage.completion_tokens == answer.usage.total_tokens
    assert answer.usage.completion_tokens <= 24


def check_a_request_id_comes_back(gateway: Gateway) -> None:
    """The SDK shows the id of the request, which a client may choose."""
    client = client_of(gateway)
    answer = client.chat.completions.create(model=gateway.model, messages=QUESTION, max_completion_tokens=1)
    assert answer._request_id
    chosen = client.chat.completions.create(
        model=gateway.model, messages=QUESTION, max_completion_tokens=1, extra_headers={"X-Request-Id": "chosen-here"}
    )
    assert chosen._request_id == "chosen-here"


def check_a_stream_tells_what_the_answer_tells(gateway: Gateway) -> None:
    """Text, reason, usage: the same; the role once; usage in a chunk without choices, which is the last."""
    client = client_of(gateway)
    answer = client.chat.completions.create(model=gateway.model, messages=QUESTION, **GREEDY)
    chunks = list(
        client.chat.completions.create(
            model=gateway.model, messages=QUESTION, stream=True, stream_options={"include_usage": True}, **GREEDY
        )
    )
    assert chunks[-1].choices == []
    assert chunks[-1].usage == answer.usage or _without_cache(chunks[-1].usage) == _without_cache(answer.usage)
    deltas = [chunk.choices[0] for chunk in chunks[:-1]]
    assert "".join(one.delta.content or "" for one in deltas) == answer.choices[0].message.content
    assert [one.delta.role for one in deltas if one.delta.role] == ["assistant"]
    reasons = [one.finish_reason for one in deltas if one.finish_reason]
    assert reasons == [answer.choices[0].finish_reason]
    assert len({chunk.id for chunk in chunks}) == 1


def _without_cache(usage: Any) -> dict[str, Any]:
    """Return a usage without what depends on the requests before."""
    return {key: value for key, value in usage.to_dict().items() if key != "prompt_tokens_details"}


def check_usage_comes_only_when_it_is_asked_for(gateway: Gateway) -> None:
    """Without ``stream_options`` every chunk has a choice, for clients that read ``choices[0]``."""
    chunks = list(
        client_of(gateway).chat.completions.create(model=gateway.model, messages=QUESTION, stream=True, **GREEDY)
    )
    assert all(chunk.choices for chunk in chunks)
    assert all(chunk.usage is None for chunk in chunks)


def check_the_stream_helper_puts_the_answer_together(gateway: Gateway) -> None:
    """It concatenates whatever is a string in a delta: what is sent twice would be seen twice."""
    client, whole = client_of(gateway), GREEDY | {"max_completion_tokens": 160}  # the helper raises where it is cut
    answer = client.chat.completions.create(model=gateway.model, messages=QUESTION, **whole)
    with client.chat.completions.stream(model=gateway.model, messages=QUESTION, **whole) as stream:
        for _ in stream:
            pass
        final = stream.get_final_completion()
    assert final.choices[0].message.content == answer.choices[0].message.content
    assert final.choices[0].message.role == "assistant"


def check_several_choices_are_told_apart(gateway: Gateway) -> None:
    """``n`` choices come in order, streamed or not, and the same seed makes the same ones."""
    client = client_of(gateway)
    wanted: dict[str, Any] = {"n": 3, "seed": 5, "temperature": 2, "max_completion_tokens": 12}
    answer = client.chat.completions.create(model=gateway.model, messages=QUESTION, **wanted)
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    texts = [choice.message.content for choice in answer.choices]
    assert len(set(texts)) > 1, "three draws at this temperature differ"
    streamed = ["", "", ""]
    for chunk in client.chat.completions.create(model=gateway.model, messages=QUESTION, stream=True, **wanted):
        for choice in chunk.choices:
            streamed[choice.index] += choice.delta.content or ""
    assert streamed == texts


def check_log_probs_have_the_bytes_of_the_text(gateway: Gateway) -> None:
    """Each token has its alternatives; of a greedy answer each token is the first of them, streamed or not."""
    client = client_of(gateway)
    wanted: dict[str, Any] = {"logprobs": True, "top_logprobs": 3, **GREEDY}
    answer = client.chat.completions.create(model=gateway.model, messages=QUESTION, **wanted)
    [choice] = answer.choices
    assert choice.logprobs
    entries = choice.logprobs.content or []
    assert answer.usage
    text = b"".join(bytes(entry.bytes or []) for entry in entries).decode()
    assert choice.message.content
    assert text.removesuffix("<|im_end|>") == choice.message.content
    assert all(len(entry.top_logprobs) == 3 for entry in entries)
    assert all(entry.logprob == entry.top_logprobs[0].logprob <= 0 for entry in entries)
    streamed: list[Any] = []
    for chunk in client.chat.completions.create(model=gateway.model, messages=QUESTION, stream=True, **wanted):
        for one in chunk.choices:
            streamed += (one.logprobs.content or []) if one.logprobs else []
    assert [one.to_dict() for one in streamed] == [one.to_dict() for one in entries]


def check_a_stop_string_ends_an_answer(gateway: Gateway) -> None:
    """It is not a part of the text."""
    client = client_of(gateway)
    whole = client.chat.completions.create(model=gateway.model, messages=QUESTION, **GREEDY).choices[0].message.content
    assert whole
    word = whole.split()[3]
    cut = client.chat.completions.create(model=gateway.model, messages=QUESTION, stop=[word], **GREEDY).choices[0]
    assert cut.finish_reason == "stop"
    assert cut.message.content == whole[: whole.index(word)]


def check_a_limit_ends_an_answer(gateway: Gateway) -> None:
    """Both names of the limit are known."""
    client = client_of(gateway)
    for name in ("max_tokens", "max_completion_tokens"):
        limit: dict[str, Any] = {name: 2}
        answer = client.chat.completions.create(model=gateway.model, messages=QUESTION, temperature=0, **limit)
        assert answer.choices[0].finish_reason == "length"
        assert answer.usage
        assert answer.usage.completion_tokens == 2


def check_messages_of_all_roles_and_parts(gateway: Gateway) -> None:
    """A developer's and a system's message, a name, content as parts of text, an assistant's turn."""
    messages: Any = [
        {"role": "developer", "content": "Answer in one sentence."},
        {
            "role": "user",
            "name": "ann",
            "content": [{"type": "text", "text": "What is "}, {"type": "text", "text": "Triton?"}],
        },
        {"role": "assistant", "content": "A server."},
        {"role": "user", "content": "And in-flight batching?"},
    ]
    answer = client_of(gateway).chat.completions.create(model=gateway.model, messages=messages, **GREEDY)
    assert answer.choices[0].message.content


def check_every_decoration_of_the_sdk_is_served_or_refused_by_name(gateway: Gateway) -> None:
    """Fields that decorate are let through; a field that changes the answer is never dropped in silence."""
    client = client_of(gateway)
    decorations: dict[str, Any] = {
        "user": "ann",
        "metadata": {"a": "b"},
        "store": False,
        "service_tier": "auto",
        "prompt_cache_key": "key",
        "safety_identifier": "someone",
    }
    answer = client.chat.completions.create(model=gateway.model, messages=QUESTION, **decorations, **GREEDY)
    assert answer.choices[0].message.content
    answer = client.chat.completions.create(
        model=gateway.model, messages=QUESTION, extra_body={"an_unknown_field": {"x": 1}}, **GREEDY
    )
    assert answer.choices[0].message.content
    error = raised(
        BadRequestError,
        lambda: client.chat.completions.create(
            model=gateway.model,
            messages=QUESTION,
            modalities=["text", "audio"],
            audio={"voice": "alloy", "format": "wav"},
        ),
    )
    assert error.param in ("modalities", "audio"), error.body


async def check_many_at_once_answer_as_one_by_one(gateway: Gateway) -> None:
    """Eight requests of an asynchronous client at once get what each gets alone."""
    async with AsyncOpenAI(base_url=gateway.v1, api_key=gateway.key, max_retries=0) as client:

        async def ask(number: int) -> str | None:
            messages: Any = [{"role": "user", "content": f"Question {number}: what is Triton?"}]
            answer = await client.chat.completions.create(model=gateway.model, messages=messages, **GREEDY)
            return answer.choices[0].message.content

        alone = [await ask(number) for number in range(8)]
        assert await asyncio.gather(*(ask(number) for number in range(8))) == alone


if __name__ == "__main__":
    main(globals())
