"""Whatever the engine generates, and however it cuts it: a stream adds up to the whole answer, field by field."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from inflight.resources import DEMO
from inflight.text.tokenizer import Tokenizer
from tests.gateway.support.answers import CHAT, COMPLETIONS, ask, chunks, first_tokens, joined, without_names
from tests.gateway.support.drawn import Drawn, drawn_engine
from tests.gateway.support.gateways import Inside
from tests.support.properties import examples

TOKENIZER = Tokenizer.from_checkpoint(DEMO / "model")
SPECIAL = {TOKENIZER.token_text(token) for token in TOKENIZER.special_tokens.values()}
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": [1, "é"]}}\n</tool_call>'
PARTS = [
    "Yes.",
    "Grüße, 世界 👋🏽!",
    CALL,
    "\n",
    "<think>\nHm?\n</think>\n\n",
    "<think>\n",
    "<tool_call>",
    " the end",
    "e",
]
OPTIONS = {"include_usage": True, "continuous_usage_stats": True}


def tokens_of(text: str) -> list[int]:
    return list(TOKENIZER.encode_batch([text], add_special_tokens=False)[0])


OUTPUTS = st.lists(
    st.one_of(
        st.sampled_from(PARTS).map(tokens_of),
        st.lists(st.integers(0, TOKENIZER.config.vocab_size - 1), max_size=4),  # half characters, special tokens
    ),
    max_size=5,
).map(lambda parts: [token for part in parts for token in part])
DRAWN = st.builds(
    Drawn, outputs=st.lists(OUTPUTS, min_size=1, max_size=3), seed=st.integers(0, 9999), cached=st.integers(0, 3)
)
SHARED: dict[str, Any] = {
    "n": st.integers(1, 3),
    "stop": st.sampled_from(["e", ["the", "👋"], ["\n"], "</", ["\ufffd"]]),
    "ignore_eos": st.just(True),
    "stop_token_ids": st.just([tokens_of("!")[-1]]),
    "include_stop_str_in_output": st.just(True),
    "skip_special_tokens": st.just(False),
    "return_token_ids": st.just(True),
    "return_tokens_as_token_ids": st.just(True),
    "prompt_logprobs": st.integers(0, 2),
}
CHATS = st.fixed_dictionaries(
    {"max_tokens": st.sampled_from([1, 5, 60])},
    optional=SHARED
    | {
        "tools": st.just([TOOL]),
        "tool_choice": st.sampled_from(["none", "auto"]),
        "include_reasoning": st.just(False),
        "logprobs": st.just(True),
        "chat_template_kwargs": st.just({"enable_thinking": False}),
    },
)
PROMPTS = ["Hi", "日本 👋", tokens_of("日本")[:1], ["One", "a<|im_end|>b"], [[5, 6], tokens_of("👋🏽")[:-1]]]
COMPLETED = st.fixed_dictionaries(
    {"prompt": st.sampled_from(PROMPTS), "max_tokens": st.sampled_from([1, 5, 60])},
    optional=SHARED | {"logprobs": st.integers(0, 2), "echo": st.just(True)},
)


@pytest.fixture(scope="module")
def served() -> Iterator[tuple[Inside, Drawn]]:
    with drawn_engine() as running:
        yield running


def both(served: tuple[Inside, Drawn], drawn: Drawn, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the whole answer, and what the stream adds up to."""
    running, current = served
    vars(current).update(vars(drawn))
    with running.client() as client:
        whole = ask(client, path, **body)
        stream = joined(path, chunks(client, path, **body, stream_options=OPTIONS))
    return [without_names(whole), without_names(stream)]


@pytest.mark.proof
@settings(max_examples=examples(2))
@given(drawn=DRAWN, body=CHATS)
@example(drawn=Drawn([tokens_of(CALL)], seed=1), body={"tools": [TOOL]})
@example(drawn=Drawn([tokens_of("<think>\nHm?")], seed=1), body={})
def test_a_streamed_chat_is_the_whole_one(served: tuple[Inside, Drawn], drawn: Drawn, body: dict[str, Any]) -> None:
    if body.get("logprobs") and len(drawn.outputs) > 1:
        body["top_logprobs"] = 2
    whole, stream = both(served, drawn, CHAT, body | {"messages": [{"role": "user", "content": "Hi"}]})
    assert stream == whole


@pytest.mark.proof
@settings(max_examples=examples(2))
@given(drawn=DRAWN, body=COMPLETED)
def test_a_streamed_completion_is_the_whole_one(
    served: tuple[Inside, Drawn], drawn: Drawn, body: dict[str, Any]
) -> None:
    whole, stream = both(served, drawn, COMPLETIONS, body)
    assert stream == whole
    if not body.get("return_tokens_as_token_ids"):
        for choice in whole["choices"]:
            check_offsets(choice["text"], choice["logprobs"] or {"tokens": [], "text_offset": []})


def check_offsets(text: str, scores: dict[str, Any]) -> None:
    """Hold each token to the place of its text; a special token that is hidden has the place of what follows it."""
    places = scores["text_offset"]
    for name, place, after in zip(scores["tokens"], places, [*places, len(text)][1:], strict=True):
        if name.startswith("bytes:"):
            raw = bytes.fromhex(name.removeprefix("bytes:").replace("\\x", ""))
            there = text[place : place + len(raw)]
            unfinished = place + len(there) == len(text) and raw.startswith(there.encode())
            assert raw in there.encode() or "\ufffd" in there or unfinished
        elif after > place or name not in SPECIAL:
            assert text.startswith(name, place), (name, place, text)


@pytest.mark.parametrize(
    ("prompt", "more"),
    [
        ("a<|im_end|>b", {}),
        ([tokens_of("a<|im_end|>b")], {"skip_special_tokens": False}),
        ([tokens_of("日")[:2]], {}),  # half a character, which the answer would go on with
        ([[*tokens_of("日")[:2], *tokens_of("a")]], {}),
    ],
)
def test_tokens_of_an_answer_begin_behind_the_prompt(
    served: tuple[Inside, Drawn], prompt: Any, more: dict[str, Any]
) -> None:
    drawn = Drawn([[*tokens_of("日")[2:], *tokens_of("Yes.")]])
    for whole in both(served, drawn, COMPLETIONS, {"prompt": prompt, "echo": True, "logprobs": 0, **more}):
        [choice] = whole["choices"]
        check_offsets(choice["text"], choice["logprobs"])
        assert choice["text"].endswith("Yes.")
        assert choice["logprobs"]["text_offset"][-1] == len(choice["text"]) - len(
            TOKENIZER.decode(tokens_of("Yes.")[-1:])
        )


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize(
    ("options", "ends", "in_each"),
    [
        ({}, False, False),
        ({"include_usage": True}, True, False),
        ({"continuous_usage_stats": True}, False, False),
        ({"continuous_usage_stats": True, "include_usage": False}, False, False),
        (OPTIONS, True, True),
    ],
)
def test_counts_come_where_they_are_asked_for(
    served: tuple[Inside, Drawn], path: str, options: dict[str, bool], ends: bool, in_each: bool
) -> None:
    running, current = served
    vars(current).update(vars(Drawn([tokens_of("Yes, it is.")])))
    asked = {"messages": [{"role": "user", "content": "Hi"}]} if path == CHAT else {"prompt": "Hi"}
    with running.client() as client:
        parts = chunks(client, path, **asked, stream_options=options)
    assert ("usage" in parts[-1], parts[-1]["choices"] == []) == (ends, ends)
    assert {"usage" in part for part in parts if part["choices"]} == {in_each}


@pytest.mark.parametrize(
    ("path", "asked"),
    [
        (CHAT, {"messages": [{"role": "user", "content": "Hi"}]}),
        (COMPLETIONS, {"prompt": "Hi"}),
        (COMPLETIONS, {"prompt": ["Hi", "You", "There"]}),
    ],
)
def test_the_first_token_counts_once_for_a_request_and_of_a_whole_answer_when_the_engine_made_it(
    served: tuple[Inside, Drawn], path: str, asked: dict[str, Any]
) -> None:
    running, current = served
    vars(current).update(vars(Drawn([tokens_of("Yes, it is.")], first_token_s=1000)))
    with running.client() as client:
        before, began = first_tokens(client, path), time.perf_counter()
        ask(client, path, **asked, n=2)
        between, answered = first_tokens(client, path), time.perf_counter()
        chunks(client, path, **asked, n=2)
        after, ended = first_tokens(client, path), time.perf_counter()
    assert [count for count, _ in (before, between, after)] == [before[0] + more for more in range(3)]
    assert 1000 <= between[1] - before[1] < 1000 + answered - began
    assert 0 < after[1] - between[1] < ended - answered
