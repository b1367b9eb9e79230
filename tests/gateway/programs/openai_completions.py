"""Completions and embeddings with the OpenAI SDK: prompts as text and token ids, echo, log-probs."""

from __future__ import annotations

import math
from typing import Any

from harness import Gateway, main, raised
from openai import BadRequestError, OpenAI
from openai_chat import client_of

PROMPT = "In-flight batching lets every"
GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 12}


def lenient_client_of(gateway: Gateway) -> OpenAI:
    """Return a client that does not check types.

    The SDK's types of completions know neither a chunk without ``finish_reason`` nor a first token without a log-prob,
    which OpenAI's server and every other one send.
    """
    return OpenAI(base_url=gateway.v1, api_key=gateway.key, max_retries=0, timeout=120)


def check_a_stream_tells_what_the_answer_tells(gateway: Gateway) -> None:
    """Text, reason and usage."""
    client = lenient_client_of(gateway)
    answer = client.completions.create(model=gateway.model, prompt=PROMPT, **GREEDY)
    chunks = list(
        client.completions.create(
            model=gateway.model, prompt=PROMPT, stream=True, stream_options={"include_usage": True}, **GREEDY
        )
    )
    assert "".join(chunk.choices[0].text for chunk in chunks if chunk.choices) == answer.choices[0].text
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices][-1] == answer.choices[0].finish_reason
    assert answer.usage
    assert chunks[-1].usage
    assert chunks[-1].usage.total_tokens == answer.usage.total_tokens


def check_token_ids_are_the_text(gateway: Gateway) -> None:
    """A prompt of ids, several prompts, several prompts of ids: in order, ``n`` of each."""
    client = client_of(gateway)
    ids = gateway.post("/tokenize", {"model": gateway.model, "prompt": PROMPT, "add_special_tokens": False})["tokens"]
    alone = client.completions.create(model=gateway.model, prompt=PROMPT, **GREEDY).choices[0].text
    assert client.completions.create(model=gateway.model, prompt=ids, **GREEDY).choices[0].text == alone
    for prompt in ([PROMPT, "Triton"], [ids, [5, 6, 7]]):
        answer: Any = client.completions.create(model=gateway.model, prompt=prompt, n=2, **GREEDY)
        assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
        assert [choice.text for choice in answer.choices[:2]] == [alone, alone]


def check_echo_has_the_log_probs_of_the_prompt(gateway: Gateway) -> None:
    """The first token has none; offsets fit the text; a token that is the best one has the very value of the best."""
    answer = lenient_client_of(gateway).completions.create(
        model=gateway.model, prompt=PROMPT, echo=True, logprobs=2, temperature=0, max_tokens=1
    )
    [choice] = answer.choices
    found = choice.logprobs
    assert found
    assert found.tokens
    assert found.token_logprobs
    assert found.top_logprobs
    assert choice.text.startswith(PROMPT)
    assert answer.usage
    assert len(found.tokens) == len(found.token_logprobs) == answer.usage.prompt_tokens + 1
    assert found.token_logprobs[0] is None
    assert all(value is not None and value <= 0 for value in found.token_logprobs[1:])
    assert found.token_logprobs[-1] == max(found.top_logprobs[-1].values())


def check_echo_alone_needs_no_new_token(gateway: Gateway) -> None:
    """``max_tokens`` of 0 returns the prompt, scored."""
    answer = lenient_client_of(gateway).completions.create(
        model=gateway.model, prompt=PROMPT, echo=True, logprobs=1, max_tokens=0
    )
    assert answer.choices[0].text == PROMPT
    assert answer.usage
    assert answer.usage.completion_tokens == 0


def check_streamed_log_probs_are_those_of_the_answer(gateway: Gateway) -> None:
    """Tokens, values, offsets."""
    client = lenient_client_of(gateway)
    whole = client.completions.create(model=gateway.model, prompt=PROMPT, logprobs=2, **GREEDY).choices[0].logprobs
    assert whole
    parts: dict[str, list[Any]] = {"tokens": [], "token_logprobs": [], "text_offset": []}
    for chunk in client.completions.create(model=gateway.model, prompt=PROMPT, logprobs=2, stream=True, **GREEDY):
        if chunk.choices and chunk.choices[0].logprobs:
            for name, values in parts.items():
                values += getattr(chunk.choices[0].logprobs, name) or []
    assert parts == {name: getattr(whole, name) for name in parts}


def check_fields_that_are_not_served_are_refused(gateway: Gateway) -> None:
    """By name."""
    client = client_of(gateway)
    error = raised(
        BadRequestError, lambda: client.completions.create(model=gateway.model, prompt=PROMPT, suffix="the end")
    )
    assert error.param == "suffix", error.body


def check_embeddings_are_the_same_in_both_encodings(gateway: Gateway) -> None:
    """The SDK asks for base64, which its strict check does not know, and decodes it; vectors have length one."""
    client = client_of(gateway)
    texts = ["What is Triton?", "Beams"]
    decoded = lenient_client_of(gateway).embeddings.create(model=gateway.model, input=texts)
    floats = client.embeddings.create(model=gateway.model, input=texts, encoding_format="float")
    assert [one.index for one in decoded.data] == [0, 1]
    for one, other in zip(decoded.data, floats.data, strict=True):
        assert len(one.embedding) == len(other.embedding) > 1
        assert all(math.isclose(a, b, abs_tol=1e-6) for a, b in zip(one.embedding, other.embedding, strict=True))
        assert math.isclose(sum(value * value for value in one.embedding), 1, rel_tol=1e-4)
    assert decoded.data[0].embedding != decoded.data[1].embedding
    assert decoded.usage.prompt_tokens == decoded.usage.total_tokens > 0


if __name__ == "__main__":
    main(globals())
