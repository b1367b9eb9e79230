"""Chats and completions on a real engine: streamed and whole are one answer, and it is the ensemble's."""

from __future__ import annotations

import codecs
import random
import time
from string import ascii_lowercase
from typing import Any

import pytest

from inflight.client import Client, GenerateOptions
from inflight.resources import DEMO
from inflight.settings.deployment import load_deployment
from tests.gateway.support.answers import (
    CHAT,
    COMPLETIONS,
    MODEL,
    ask,
    chunks,
    first_tokens,
    joined,
    random_sampling,
    refusal,
    without_names,
)
from tests.gateway.support.gateways import Beside

QUESTIONS = ("What is in-flight batching?", "Who are you?", "Nenne die Teile 👋", "Repeat: héé 👋🏽 日本")
PROMPTS = ("In-flight batching", "The engine", "日本 👋", [10, 11, 12], ["One", "Two two"], [[5, 6], [7]])


@pytest.mark.parametrize("seed", range(24))
def test_a_streamed_chat_adds_up_to_the_whole_one(gateway: Beside, seed: int) -> None:
    draw = random.Random(seed)
    body: dict[str, Any] = {
        "messages": [{"role": "user", "content": draw.choice(QUESTIONS)}],
        "max_tokens": draw.choice([1, 2, 24]),
        **random_sampling(draw),
        **({"logprobs": True, "top_logprobs": draw.choice([0, 3])} if draw.random() < 0.5 else {}),
    }
    if body["max_tokens"] < body.get("min_tokens", 0):
        del body["min_tokens"]
    options = {"stream_options": {"include_usage": True}}
    with gateway.client() as client:
        ask(client, CHAT, **body)  # the last bits of log-probs depend on how much of the prompt is cached
        whole = ask(client, CHAT, **body)
        stream = joined(CHAT, chunks(client, CHAT, **body, **options))
    assert without_names(stream) == without_names(whole), body


@pytest.mark.parametrize("seed", range(24))
def test_a_streamed_completion_adds_up_to_the_whole_one(gateway: Beside, seed: int) -> None:
    draw = random.Random(seed)
    echo = draw.random() < 0.5
    body: dict[str, Any] = {
        "prompt": draw.choice(PROMPTS),
        "max_tokens": draw.choice([0, 1, 24] if echo else [1, 2, 24]),
        **random_sampling(draw),
        "echo": echo,
        **({"logprobs": draw.choice([0, 3])} if draw.random() < 0.6 else {}),
    }
    if body["max_tokens"] < body.get("min_tokens", 0):
        del body["min_tokens"]
    options = {"stream_options": {"include_usage": True}}
    with gateway.client() as client:
        ask(client, COMPLETIONS, **body)
        whole = ask(client, COMPLETIONS, **body)
        stream = joined(COMPLETIONS, chunks(client, COMPLETIONS, **body, **options))
    assert without_names(stream) == without_names(whole), body


@pytest.mark.parametrize("stop", [None, [" the"]])
@pytest.mark.parametrize("temperature", [0.0, 1.3])
def test_a_chat_is_what_the_ensemble_answers(gateway: Beside, temperature: float, stop: list[str] | None) -> None:
    messages = [{"role": "user", "content": QUESTIONS[0]}]
    options = GenerateOptions(
        max_tokens=40, seed=5, temperature=temperature, top_p=1.0, stop_words=stop, return_num_output_tokens=True
    )
    with Client(gateway.triton.grpc) as client:
        expected = client.generate(messages, options)
    with gateway.client() as http:
        answer = ask(http, CHAT, messages=messages, max_tokens=40, seed=5, temperature=temperature, stop=stop)
    [choice] = answer["choices"]
    assert choice["message"]["content"] == expected.text
    assert choice["finish_reason"] == expected.finish_reason
    assert answer["usage"]["completion_tokens"] == expected.usage.output_tokens


def test_a_completion_is_what_the_ensemble_answers(gateway: Beside) -> None:
    with Client(gateway.triton.grpc) as client:
        expected = client.generate(PROMPTS[0], GenerateOptions(max_tokens=30, return_log_probs=True))
    with gateway.client() as http:
        answer = ask(http, COMPLETIONS, prompt=PROMPTS[0], max_tokens=30, temperature=0, logprobs=1)
    [choice] = answer["choices"]
    assert choice["text"] == expected.text
    assert choice["logprobs"]["token_logprobs"] == list(expected.log_probs)


def test_without_a_temperature_the_checkpoints_defaults_hold(gateway: Beside) -> None:
    messages = [{"role": "user", "content": "Tell me something"}]
    with gateway.client() as client:  # the demo's generation_config.json says do_sample: false
        greedy = [ask(client, CHAT, messages=messages, max_tokens=20) for _ in range(3)]
        drawn = [ask(client, CHAT, messages=messages, max_tokens=20, temperature=2) for _ in range(4)]
    assert len({one["choices"][0]["message"]["content"] for one in greedy}) == 1
    assert len({one["choices"][0]["message"]["content"] for one in drawn}) > 1


def test_the_first_chunk_has_the_role_and_the_first_token(gateway: Beside) -> None:
    with gateway.client() as client:
        parts = chunks(client, CHAT, messages=[{"role": "user", "content": QUESTIONS[0]}], max_tokens=4)
    first, *others = parts
    assert first["choices"][0]["delta"]["role"] == "assistant"
    assert first["choices"][0]["delta"]["content"]
    assert all("role" not in part["choices"][0]["delta"] for part in others)
    assert all(part["choices"] for part in parts), "counts of tokens come only where they are asked for"
    assert parts[-1]["choices"][0]["finish_reason"] == "length"


def test_an_answer_without_a_token_has_a_role_and_empty_content(gateway: Beside) -> None:
    body = {"messages": [{"role": "user", "content": "Hi"}], "logit_bias": {"2": 100}}  # 2 ends the answer
    with gateway.client() as client:
        first, last = chunks(client, CHAT, **body)
        whole = ask(client, CHAT, **body)
    assert first["choices"][0]["delta"] == {"role": "assistant", "content": None}
    assert last["choices"][0]["delta"] == {"content": ""}
    assert last["choices"][0]["finish_reason"] == "stop"
    assert whole["choices"][0]["message"]["content"] == ""
    assert whole["usage"]["completion_tokens"] == 0


def test_usage_counts_what_was_written_to_the_prefix_cache(gateway: Beside) -> None:
    """Whole blocks of the prompt that the cache did not have: on the first call all of them, on the second none."""
    text = f"Count what is written, {time.time_ns()}. " * 20
    body = {"max_tokens": 40, "messages": [{"role": "user", "content": text}]}
    asked = {"max_output_tokens": 40, "input": [{"role": "user", "content": f"And what not: {text}"}]}
    with gateway.client() as client:
        first, second = (ask(client, "/v1/messages", **body)["usage"] for _ in range(2))
        third, fourth = (ask(client, "/v1/responses", **asked)["usage"] for _ in range(2))
    names = ("input_tokens", "cache_creation_input_tokens", "cache_read_input_tokens")
    prompt = sum(first[name] for name in names)
    assert prompt == sum(second[name] for name in names)
    assert first["input_tokens"] == prompt % load_deployment(DEMO).kv_cache.block_size
    assert first["cache_creation_input_tokens"] > 0
    assert second["cache_creation_input_tokens"] == 0
    assert third["input_tokens_details"]["cache_write_tokens"] > 0
    assert fourth["input_tokens_details"]["cache_write_tokens"] == 0


def test_usage_counts_cached_tokens_and_comes_with_each_chunk_if_asked(gateway: Beside) -> None:
    body = {"messages": [{"role": "user", "content": "Count me. " * 40}], "max_tokens": 3}
    options = {"stream_options": {"include_usage": True, "continuous_usage_stats": True}}
    with gateway.client() as client:
        first, second = (ask(client, CHAT, **body)["usage"] for _ in range(2))
        parts = chunks(client, CHAT, **body, **options)
    assert first["prompt_tokens_details"]["cached_tokens"] < second["prompt_tokens_details"]["cached_tokens"]
    assert second["prompt_tokens_details"]["cached_tokens"] < second["prompt_tokens"]
    assert [part["usage"]["completion_tokens"] for part in parts][-1] == 3
    assert parts[-1]["choices"] == []
    assert parts[-1]["usage"] == second


def test_the_first_token_of_a_whole_answer_is_counted(gateway: Beside) -> None:
    messages = [{"role": "user", "content": QUESTIONS[0]}]
    with gateway.client() as client:
        before, began = first_tokens(client, CHAT), time.perf_counter()
        ask(client, CHAT, messages=messages, max_tokens=40)
        after, ended = first_tokens(client, CHAT), time.perf_counter()
    assert after[0] == before[0] + 1
    assert 0 < after[1] - before[1] < ended - began


def test_lm_evals_request_has_one_generated_slot_even_for_an_end_id(gateway: Beside) -> None:
    ids = [10, 11, 12]
    body = {"prompt": [ids], "echo": True, "max_tokens": 1, "logprobs": 1, "temperature": 0, "seed": 1234}
    with gateway.client() as client:
        plain = ask(client, COMPLETIONS, **body)["choices"][0]
        ended = ask(client, COMPLETIONS, **body, logit_bias={"2": 100})["choices"][0]
    for choice in (plain, ended):
        scores = choice["logprobs"]
        assert {len(values) for values in scores.values()} == {len(ids) + 1}
        assert scores["token_logprobs"][0] is scores["top_logprobs"][0] is None
    assert ended["logprobs"]["tokens"][-1] == "<|im_end|>"
    assert plain["logprobs"]["token_logprobs"][:-1] == ended["logprobs"]["token_logprobs"][:-1]
    assert plain["logprobs"]["token_logprobs"][-1] == max(plain["logprobs"]["top_logprobs"][-1].values())


def test_a_prompt_can_be_scored_alone(gateway: Beside) -> None:
    with gateway.client() as client:
        answer = ask(client, COMPLETIONS, prompt="Hello there", echo=True, max_tokens=0, logprobs=2)
    [choice] = answer["choices"]
    scores = choice["logprobs"]
    assert choice["text"] == "Hello there" == "".join(scores["tokens"])
    assert scores["text_offset"] == [choice["text"].index(token) for token in scores["tokens"]]
    assert answer["usage"]["completion_tokens"] == 0


@pytest.mark.parametrize("count", [0, 2])
def test_log_probs_of_a_prompt_are_those_that_echo_has(gateway: Beside, count: int) -> None:
    with gateway.client() as client:
        chat = ask(client, CHAT, messages=[{"role": "user", "content": "Hi"}], max_tokens=1, prompt_logprobs=count)
        ids = ask(client, CHAT, messages=[{"role": "user", "content": "Hi"}], max_tokens=1, return_token_ids=True)
        body = {"prompt": [ids["prompt_token_ids"]], "max_tokens": 1, "prompt_logprobs": count}
        [completed] = ask(client, COMPLETIONS, **body)["choices"]
        [echoed] = ask(client, COMPLETIONS, **body, echo=True, logprobs=1)["choices"]
    first, *others = chat["prompt_logprobs"]
    assert first is None
    values = [one[str(token)]["logprob"] for token, one in zip(ids["prompt_token_ids"][1:], others, strict=True)]
    assert values == pytest.approx(echoed["logprobs"]["token_logprobs"][1 : len(values) + 1], abs=1e-5)
    assert {len(one) for one in others} <= {max(count, 1), count + 1}
    for one in others:
        ranked = sorted((entry for entry in one.values() if entry["rank"]), key=lambda entry: entry["rank"])
        assert [entry["rank"] for entry in ranked] == list(range(1, count + 1))
        assert ranked == sorted(ranked, key=lambda entry: -entry["logprob"])
    assert [one and set(one) for one in completed["prompt_logprobs"]] == [one and set(one) for one in [None, *others]]
    assert len(echoed["logprobs"]["top_logprobs"][1]) <= 2


def test_log_probs_of_a_prompt_of_one_token_are_none(gateway: Beside) -> None:
    with gateway.client() as client:
        [choice] = ask(client, COMPLETIONS, prompt=[[5]], max_tokens=1, prompt_logprobs=1)["choices"]
    assert choice["prompt_logprobs"] == [None]


def test_bytes_of_log_probs_join_to_the_text_with_half_characters(gateway: Beside) -> None:
    body = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 60, "temperature": 2, "top_k": 0, "seed": 3}
    with gateway.client() as client:
        for stop in (None, ["e"], ["a", "\ufffd"]):
            [choice] = ask(client, CHAT, **body, logprobs=True, stop=stop)["choices"]
            raw = b"".join(bytes(entry["bytes"]) for entry in choice["logprobs"]["content"])
            # The bytes of an unfinished character at the end are in no text.
            assert codecs.getincrementaldecoder("utf-8")("replace").decode(raw) == choice["message"]["content"]


def test_a_context_that_is_too_long_is_refused_in_the_words_that_clients_look_for(gateway: Beside) -> None:
    long = "word " * 3000
    with gateway.client() as client:
        for error in (
            refusal(client, CHAT, messages=[{"role": "user", "content": long}]),
            refusal(client, CHAT, messages=[{"role": "user", "content": "Hi"}], max_tokens=4000),
            refusal(client, COMPLETIONS, prompt=long),
        ):
            assert error["code"] == "context_length_exceeded"
            assert error["message"].startswith("This model's maximum context length is 2048 tokens. However, ")


def test_the_engines_errors_name_the_requests_fields(gateway: Beside) -> None:
    messages = [{"role": "user", "content": "Hi"}]
    schema = {"type": "object", "properties": {"a": {"type": "string", "pattern": "(?=a)b"}}}
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    with gateway.client() as client:
        error = refusal(client, CHAT, messages=messages, response_format=form)
        assert error["param"].startswith("response_format")
        assert "guided_decoding" not in error["message"]
        words = refusal(client, CHAT, messages=messages, stop=["x"] * 300)
        assert words["param"] == "stop"
        # So long a prompt takes several steps, each of which looks at the deadline.
        unread = [{"role": "user", "content": "".join(random.choices(ascii_lowercase, k=1500))}]
        late = client.post(CHAT, json={"model": MODEL, "messages": unread, "deadline_ms": 1})
    assert late.status_code == 504
    assert late.headers["x-should-retry"] == "false"


def test_an_answer_in_a_form_is_valid(gateway: Beside) -> None:
    body = {"messages": [{"role": "user", "content": "Yes or no?"}], "guided_choice": ["yes", "no"]}
    with gateway.client() as client:
        assert ask(client, CHAT, **body)["choices"][0]["message"]["content"] in ("yes", "no")
        digits = ask(client, COMPLETIONS, prompt="Count:", guided_regex="[0-9]{3}", max_tokens=20)
    assert digits["choices"][0]["text"].isdigit()
