"""Stop strings of a chat whose model may think: they end the answer, and never the reasoning."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inflight.gateway.shown_stops import ShownStops
from inflight.text.output.events import CallStart, ContentDelta, OutputEvent, ReasoningDelta
from tests.gateway.support.answers import ask, chunks
from tests.gateway.support.gateways import Beside

ASKED: dict[str, Any] = {"temperature": 0, "chat_template_kwargs": {"enable_thinking": True}}
QUESTION = [{"role": "user", "content": "What is TTFT?"}]
TEXT = st.text("ab#", max_size=12)


def _text(events: list[OutputEvent]) -> str:
    return "".join(event.text for event in events if isinstance(event, ContentDelta))


@given(
    parts=st.lists(TEXT.filter(bool), max_size=8),
    stops=st.lists(st.text("ab#", min_size=1, max_size=4), min_size=1, max_size=3),
    show=st.booleans(),
)
def test_the_first_match_ends_a_text_however_it_is_cut(parts: list[str], stops: list[str], show: bool) -> None:
    text, shown = "".join(parts), ""
    search = ShownStops(stops, show)
    for number, part in enumerate(parts):
        shown += _text(
            search.take(
                [ReasoningDelta("".join(stops)), ContentDelta(part)] if not number else [ContentDelta(part)],
                ends=number == len(parts) - 1,
            )
        )
    ends = [(place + len(stop), place, stop) for stop in stops if (place := text.find(stop)) >= 0]
    if not ends:
        assert (shown, search.found) == (text, None)
        assert not parts or search.held == 0
        return
    first = min(end for end, _, _ in ends)
    start = min(place for end, place, _ in ends if end == first)
    stop = text[start:first]
    assert search.found in stops
    assert stop.startswith(search.found)
    assert shown == text[:start] + (search.found if show else "")
    assert text[: start + len(search.found)] == shown + ("" if show else search.found)


def test_before_min_tokens_nothing_stops() -> None:
    search = ShownStops(["."], show=False)
    assert _text(search.take([ContentDelta("Hi. ")], ends=False, may_stop=False)) == "Hi. "
    assert (_text(search.take([ContentDelta("So. ")], ends=False)), search.found) == ("So", ".")


def test_min_tokens_hold_where_a_model_thinks(gateway: Beside) -> None:
    with gateway.client() as client:
        body = ASKED | {"messages": QUESTION, "max_tokens": 200, "stop": ["e"], "n": 2, "seed": 1, "temperature": 0.1}
        answers = [ask(client, "/v1/chat/completions", **body, min_tokens=least) for least in (1, 60)]
    for least, answer in zip((1, 60), answers, strict=True):
        for choice in answer["choices"]:
            assert choice["message"]["reasoning"]
            assert choice["finish_reason"] in ("stop", "length")
        assert answer["usage"]["completion_tokens"] >= 2 * least
    assert max(len(choice["message"]["content"]) for choice in answers[0]["choices"]) < 20


def test_a_call_between_two_texts_parts_them() -> None:
    search = ShownStops(["##"], show=False)
    events = [ContentDelta("a#"), CallStart(0, "f"), ContentDelta("#b")]
    shown = search.take(events, ends=True)
    assert (_text(shown), search.found) == ("a##b", None)
    assert [type(event) for event in shown] == [ContentDelta, ContentDelta, CallStart, ContentDelta]


@pytest.mark.parametrize("show", [False, True])
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages", "/v1/responses"])
def test_a_stop_string_in_the_reasoning_ends_nothing(gateway: Beside, path: str, show: bool) -> None:
    with gateway.client() as client:
        model = client.get("/v1/models").json()["data"][0]["id"]
        chat = ASKED | {"model": model, "messages": QUESTION, "max_tokens": 200, "logprobs": True}
        whole = client.post("/v1/chat/completions", json=chat).json()["choices"][0]
        reasoning, answer = whole["message"]["reasoning"], whole["message"]["content"]
        both = next(word for word in reasoning.split() if len(word) > 2)
        stop = " ".join(answer.split()[3:5])
        assert both in reasoning
        assert stop not in reasoning
        if path == "/v1/chat/completions":
            body = chat | {"stop": [both + " ", stop], "include_stop_str_in_output": show}
            cut = client.post(path, json=body).json()
            choice = cut["choices"][0]
            expected = answer[: answer.index(stop)] + (stop if show else "")
            assert choice["message"]["content"] == expected
            assert choice["message"]["reasoning"] == reasoning
            assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", stop)
            spelt = b"".join(bytes(entry["bytes"]) for entry in choice["logprobs"]["content"]).decode()
            assert spelt.endswith(expected)
            assert cut["usage"]["completion_tokens"] < len(whole["logprobs"]["content"])
            parts = chunks(client, path, **{name: value for name, value in body.items() if name != "model"})
            deltas = [part["choices"][0]["delta"] for part in parts if part["choices"]]
            assert "".join(delta.get("content") or "" for delta in deltas) == expected
        elif path == "/v1/messages":
            body = {"model": model, "messages": QUESTION, "max_tokens": 200, "thinking": {"type": "adaptive"}}
            message = client.post(path, json=body | {"temperature": 0, "stop_sequences": [both + " ", stop]}).json()
            assert (message["stop_reason"], message["stop_sequence"]) == ("stop_sequence", stop)
            assert message["content"][-1]["text"] == answer[: answer.index(stop)]
        else:
            body = ASKED | {"model": model, "input": QUESTION, "max_output_tokens": 200, "stop": [both + " ", stop]}
            made = client.post(path, json=body).json()
            assert made["output"][-1]["content"][0]["text"] == answer[: answer.index(stop)]
