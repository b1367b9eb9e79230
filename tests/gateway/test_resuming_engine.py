"""An engine that breaks away: what it was generating goes on, and is in the end what it would have been."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from inflight.client.errors import ServerUnreachable, from_wire
from inflight.errors import InflightError, QueueFull, ShuttingDown
from inflight.gateway import resuming
from tests.gateway.support.answers import CHAT, COMPLETIONS, MODEL, ask, chunks, first_tokens, joined, without_names
from tests.gateway.support.drawn import Drawn, resuming_engine
from tests.gateway.support.gateways import Inside, until
from tests.gateway.test_whole_and_streamed import CALL, CHATS, COMPLETED, DRAWN, OPTIONS, tokens_of
from tests.support.properties import examples

Served = tuple[Inside, Drawn]
HI: dict[str, Any] = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 60, "temperature": 1, "seed": 0}
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
TEXT = tokens_of("Grüße, 世界 👋🏽! The end of it all.")
DEAD_STAGE = "in ensemble, Stub process 'tensorrt_llm_0_0' is not healthy."


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with pytest.MonkeyPatch.context() as patch, resuming_engine() as running:
        patch.setattr(resuming, "_PAUSE_S", 0.0)
        yield running


def outcomes(running: Inside) -> dict[str, float]:
    """Return what came of the breaks so far."""
    with running.client() as client:
        lines = client.get("/metrics").text.splitlines()
    name = "inflight_gateway_resumed_total"
    found = [line.removeprefix(f'{name}{{outcome="').partition('"} ') for line in lines if line.startswith(f"{name}{{")]
    return {outcome: float(count) for outcome, _, count in found if float(count)}


def unbroken_and_broken(served: Served, drawn: Drawn, path: str, body: dict[str, Any], breaks: list[int]) -> list[Any]:
    """Return the answer of an engine that stays, and those of one that breaks away: whole, and streamed."""
    running, current = served
    answers = []
    with running.client() as client:
        for stream, given in ((False, []), (False, breaks), (True, breaks)):
            vars(current).update(vars(drawn) | {"breaks": list(given), "requests": []})
            if stream:
                answers.append(joined(path, chunks(client, path, **body, stream_options=OPTIONS)))
            else:
                answers.append(ask(client, path, **body))
    return [without_names(answer) for answer in answers]


BREAKS = st.lists(st.integers(0, 12), min_size=1, max_size=2)


@pytest.mark.proof
@settings(max_examples=examples(1))
@given(drawn=DRAWN, body=CHATS, breaks=BREAKS)
def test_a_broken_chat_is_the_unbroken_one(
    served: Served, drawn: Drawn, body: dict[str, Any], breaks: list[int]
) -> None:
    unbroken, *broken = unbroken_and_broken(served, drawn, CHAT, HI | body, breaks)
    assert broken == [unbroken] * 2


@pytest.mark.proof
@settings(max_examples=examples(1))
@given(drawn=DRAWN, body=COMPLETED, breaks=BREAKS)
def test_a_broken_completion_is_the_unbroken_one(
    served: Served, drawn: Drawn, body: dict[str, Any], breaks: list[int]
) -> None:
    body |= {"temperature": 1, "seed": 0}
    unbroken, *broken = unbroken_and_broken(served, drawn, COMPLETIONS, body, breaks)
    assert broken == [unbroken] * 2


@pytest.mark.proof
def test_it_may_break_behind_every_token(served: Served) -> None:
    outputs = [tokens_of(f"<think>\nHm, é?\n</think>\n\n{CALL}"), tokens_of("No 👋🏽, the end.")]
    body = HI | {"n": 2, "tools": [TOOL], "logprobs": True, "top_logprobs": 2, "stop": [" end"]}
    running, drawn = served
    before, places = outcomes(running).get("resumed", 0), 0
    vars(drawn).update(vars(Drawn(outputs, seed=5)))
    with running.client() as client:
        unbroken = without_names(joined(CHAT, chunks(client, CHAT, **body, stream_options=OPTIONS)))
        while not drawn.breaks:
            vars(drawn).update(vars(Drawn(outputs, seed=5, breaks=[places])))
            assert without_names(joined(CHAT, chunks(client, CHAT, **body, stream_options=OPTIONS))) == unbroken
            places += 1
    assert places > 10
    assert outcomes(running)["resumed"] == before + places - 2, "but for the first and the last one"


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/responses", {"input": "Hi", "max_output_tokens": 60, "temperature": 1}),
        ("/v1/messages", {"messages": HI["messages"], "max_tokens": 60, "temperature": 1}),
    ],
)
def test_other_forms_of_chats_go_on_too(served: Served, path: str, body: dict[str, Any]) -> None:
    running, drawn = served
    texts = []
    with running.client() as client:
        for breaks in ([], [1], [3, 2]):
            vars(drawn).update(vars(Drawn([TEXT], seed=3, breaks=breaks)))
            with client.stream("POST", path, json={"model": MODEL, **body, "stream": True}) as response:
                events = [json.loads(line[6:]) for line in response.iter_lines() if line.startswith("data: {")]
            deltas = [event["delta"] for event in events if event["type"].endswith(("text.delta", "block_delta"))]
            texts.append("".join(delta if isinstance(delta, str) else delta["text"] for delta in deltas))
            assert not drawn.breaks
    assert texts == ["Grüße, 世界 👋🏽! The end of it all."] * 3


def test_what_samples_without_a_seed_keeps_the_one_that_the_gateway_chose(served: Served) -> None:
    running, drawn = served
    body = {name: value for name, value in HI.items() if name != "seed"}
    vars(drawn).update(vars(Drawn([TEXT], breaks=[2, 2])))
    with running.client() as client:
        chunks(client, CHAT, **body)
        first, *others = drawn.requests
        assert [one.seed for one in others] == [first.seed] * 2
        assert first.seed is not None
        assert len({one.request_id for one in drawn.requests}) == 3, "an engine that lives still knows the first one"
        chunks(client, CHAT, **body)
        assert drawn.requests[-1].seed != first.seed
        ask(client, CHAT, **body | {"temperature": 0})
        assert drawn.requests[-1].seed is None


def start_again(running: Inside) -> None:
    """Have the gateway see that the engine has started again."""
    running.gateway.readiness.show(False)
    running.gateway.readiness.show(True)


def test_what_crashes_end_again_and_again_ends_with_an_error_of_its_own(served: Served) -> None:
    running, drawn = served
    before = outcomes(running).get("crashed_again", 0)
    at_break = partial(start_again, running)
    vars(drawn).update(vars(Drawn([TEXT], breaks=[0, 0, 0, 0], at_break=at_break)))
    with running.client() as client:
        whole = client.post(CHAT, json={"model": MODEL, **HI})
        assert len(drawn.requests) == 3
        vars(drawn).update(vars(Drawn([TEXT], seed=1, breaks=[3, 3, 3, 3])))
        with client.stream("POST", CHAT, json={"model": MODEL, **HI, "stream": True}) as response:
            *_, last = [line for line in response.iter_lines() if line]
    assert (whole.status_code, whole.headers["x-should-retry"]) == (500, "false"), "nobody is to send it again"
    assert whole.json()["error"]["code"] == json.loads(last.removeprefix("data: "))["error"]["code"] == "engine_crashed"
    assert outcomes(running)["crashed_again"] == before + 2
    assert len(drawn.requests) == 4, "what had tokens met one crash more than what had none"


@pytest.mark.parametrize("words", ["failed to connect to all addresses; recvmsg: Reset", "the model is not ready"])
def test_an_engine_that_was_away_each_time_has_not_crashed(served: Served, words: str) -> None:
    error, at_break = from_wire(words, "UNAVAILABLE"), partial(start_again, served[0])
    drawn = Drawn([TEXT], seed=2, error=error, breaks=[0] * 4, at_break=at_break)
    unbroken, *broken = unbroken_and_broken(served, drawn, CHAT, HI, [0] * 4)
    assert broken == [unbroken] * 2


@pytest.mark.parametrize("error", [from_wire(DEAD_STAGE), from_wire("Request for unknown model: 'tensorrt_llm'")])
def test_an_engine_of_which_a_stage_died_is_asked_until_it_is_back(served: Served, error: InflightError) -> None:
    breaks = [3, *[0] * 8]  # one crash, and then an engine that is not whole
    unbroken, *broken = unbroken_and_broken(served, Drawn([TEXT], seed=2, error=error), CHAT, HI, breaks)
    assert broken == [unbroken] * 2
    assert not served[1].breaks


def test_a_full_queue_does_not_end_what_goes_on(served: Served) -> None:
    running, drawn = served
    vars(drawn).update(vars(Drawn([TEXT], seed=2, breaks=[3])))
    refusals = iter([ServerUnreachable("Socket closed"), QueueFull("the queue is full"), QueueFull("still")])
    with pytest.MonkeyPatch.context() as patch, running.client() as client:
        drawn.breaks = [3, 0, 0]
        patch.setattr(Drawn, "error", property(lambda _: next(refusals), lambda *_: None), raising=False)
        text = joined(CHAT, chunks(client, CHAT, **HI))["choices"][0]["message"]["content"]
    assert text == "Grüße, 世界 👋🏽! The end of it all."


def test_a_server_that_stops_is_not_waited_for(served: Served) -> None:
    running, drawn = served
    vars(drawn).update(vars(Drawn([TEXT], breaks=[0], error=ShuttingDown("the server is stopping"))))
    with running.client() as client:
        reply = client.post(CHAT, json={"model": MODEL, **HI})
    assert (reply.status_code, len(drawn.requests)) == (503, 1)


def test_an_engine_that_cannot_go_on_behind_tokens_repeats_what_has_none() -> None:
    with resuming_engine(behind_tokens=False) as (running, drawn), running.client() as client:
        vars(drawn).update(vars(Drawn([TEXT], seed=2, breaks=[0])))
        assert ask(client, CHAT, **HI)["choices"][0]["message"]["content"]
        drawn.breaks = [4]
        with client.stream("POST", CHAT, json={"model": MODEL, **HI, "stream": True}) as response:
            *_, last = [line for line in response.iter_lines() if line]
        assert json.loads(last.removeprefix("data: "))["error"]["code"] == "server_unavailable"
        assert outcomes(running) == {"repeated": 1, "unsupported": 1}


def test_embeddings_and_scores_are_asked_for_again(served: Served) -> None:
    running, drawn = served
    vars(drawn).update(vars(Drawn([TEXT], breaks=[0])))
    body = {"model": MODEL, "query": "a", "items": ["b"], "label_token_ids": [5, 6]}
    with running.client() as client:
        client.post("/v1/score", json=body)
    first, second = drawn.requests
    assert (first.prompt, first.log_prob_token_ids) == (second.prompt, second.log_prob_token_ids)


@pytest.fixture
def away() -> Iterator[Served]:
    """An engine that was there, and is away."""
    with pytest.MonkeyPatch.context() as patch, resuming_engine() as running:
        patch.setattr(resuming, "_PAUSE_S", 0.0)
        running[0].gateway.readiness.show(False)
        yield running


def come(running: Inside) -> None:
    """Have the engine come back."""
    running.loop.call_soon_threadsafe(running.gateway.readiness.show, True)


def has_ended(running: Inside, reply: Future[Any], seconds: float) -> bool:
    """Have so much time pass, and return whether the reply is there."""
    running.advance(seconds)
    return reply.done()


def waiting(running: Inside, monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Return what is set once a request waits for the engine: its body has come, which would be late too."""
    waits, comes = threading.Event(), running.gateway.readiness.comes

    async def come_later(timeout_s: float) -> bool:
        waits.set()
        return await comes(timeout_s)

    monkeypatch.setattr(running.gateway.readiness, "comes", come_later)
    return waits


@pytest.fixture
def kept() -> Iterator[Served]:
    """An engine that is waited for until it is given up."""
    with pytest.MonkeyPatch.context() as patch, resuming_engine(kept=True) as running:
        patch.setattr(resuming, "_PAUSE_S", 0.0)
        yield running


@pytest.mark.parametrize("breaks", [[], [3, 0]], ids=["a new request", "a stream that goes on"])
def test_a_kept_engine_is_waited_for_however_long_it_starts(
    kept: Served, breaks: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What its queue refuses when it is back has its time yet: that of the start does not count."""
    running, drawn = kept
    errors = iter([ServerUnreachable("Socket closed", broke=True), QueueFull("the queue is full")])
    monkeypatch.setattr(Drawn, "error", property(lambda _: next(errors), lambda *_: None), raising=False)
    drawn.outputs, drawn.seed, drawn.breaks = [TEXT], 2, breaks
    running.gateway.readiness.show(bool(breaks))
    waits = waiting(running, monkeypatch)

    drawn.at_break = lambda: (waits.clear(), running.gateway.readiness.show(not breaks))
    with running.client() as client, ThreadPoolExecutor() as pool:
        reply = pool.submit(chunks, client, CHAT, **HI)
        until(lambda: waits.is_set() and not running.gateway.readiness.ready)
        running.advance(100_000)
        come(running)
        said = joined(CHAT, reply.result())["choices"][0]["message"]
        assert said["content"] == "Grüße, 世界 👋🏽! The end of it all."
    assert not breaks


def test_a_kept_engine_that_is_there_and_takes_nothing_is_not_asked_for_ever(kept: Served) -> None:
    running, drawn = kept

    def pass_time() -> None:
        clock = running.loop.time
        running.loop.time = lambda: clock() + 250  # type: ignore[method-assign]

    error = ServerUnreachable("the model is not ready")
    vars(drawn).update(vars(Drawn([TEXT], breaks=[0] * 100, error=error, at_break=pass_time)))
    with running.client() as client:
        reply = client.post(CHAT, json={"model": MODEL, **HI})
    assert (reply.status_code, reply.headers["retry-after"]) == (503, "1")
    assert len(drawn.requests) == 4, "it was tried for 600 s"


def test_a_request_waits_for_an_engine_that_starts_again(away: Served) -> None:
    running, drawn = away
    drawn.outputs = [TEXT]
    with running.client() as client, ThreadPoolExecutor() as pool:
        replies = [pool.submit(ask, client, CHAT, **HI) for _ in range(3)]
        until(lambda: running.gateway.load.running == 3)
        assert not drawn.requests
        come(running)
        assert {reply.result()["choices"][0]["finish_reason"] for reply in replies} == {"stop"}


def test_a_request_that_waits_too_long_is_refused(away: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    running, drawn = away
    waits = waiting(running, monkeypatch)
    with running.client() as client, ThreadPoolExecutor() as pool:
        reply = pool.submit(client.post, CHAT, json={"model": MODEL, **HI})
        assert waits.wait(60)
        until(lambda: has_ended(running, reply, 601))
        assert (reply.result().status_code, reply.result().headers["retry-after"]) == (503, "1")
    assert not drawn.requests


async def leave(running: Inside, body: dict[str, Any]) -> None:
    """Send a request, and close its connection as soon as it waits."""
    async with httpx.AsyncClient(base_url=running.url, timeout=60, trust_env=False) as client:
        call = asyncio.create_task(client.post(CHAT, json=body))
        await asyncio.to_thread(until, lambda: running.gateway.load.running == 1)
        call.cancel()
        await asyncio.wait([call])


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_while_it_waits_leaves_nothing(away: Served, stream: bool) -> None:
    running, drawn = away
    asyncio.run(leave(running, {"model": MODEL, **HI, "stream": stream}))
    until(lambda: running.gateway.load.running == 0)
    come(running)
    with running.client() as client:
        ask(client, CHAT, **HI)
    assert len(drawn.requests) == 1


def test_nobody_waits_for_an_engine_of_a_gateway_that_stops(away: Served) -> None:
    running, _ = away
    with running.client() as client, ThreadPoolExecutor() as pool:
        reply = pool.submit(client.post, CHAT, json={"model": MODEL, **HI})
        until(lambda: running.gateway.load.running == 1)
        running.loop.call_soon_threadsafe(running.server.drain)
        assert reply.result().status_code == 503
        until(lambda: running.server.should_exit)


@pytest.mark.parametrize("breaks", [[0], [4]])
def test_a_deadline_counts_while_the_engine_is_away(away: Served, breaks: list[int]) -> None:
    running, drawn = away
    come(running)
    drawn.outputs, drawn.breaks, drawn.seed = [TEXT], list(breaks), 1
    drawn.at_break = lambda: running.gateway.readiness.show(False)
    body = {"model": MODEL, **HI, "stream": True, "stop": ["never"], "deadline_ms": 300_000}
    with running.client() as client, ThreadPoolExecutor() as pool:
        reply = pool.submit(client.post, CHAT, json=body)
        until(lambda: not drawn.breaks)
        until(lambda: has_ended(running, reply, 301))
        answer = reply.result()
    if breaks == [0]:
        assert (answer.status_code, answer.json()["error"]["code"]) == (504, "deadline_exceeded")
        return
    *_, last, done = [line for line in answer.text.splitlines() if line]
    [choice] = json.loads(last.removeprefix("data: "))["choices"]
    assert (choice["finish_reason"], choice["stop_reason"], done) == ("length", "deadline", "data: [DONE]")


def test_the_rest_has_the_rest_of_the_time(away: Served) -> None:
    running, drawn = away
    come(running)
    drawn.outputs, drawn.breaks, drawn.seed = [TEXT], [3], 1
    drawn.at_break = lambda: running.gateway.readiness.show(False)
    with running.client() as client, ThreadPoolExecutor() as pool:
        reply = pool.submit(chunks, client, CHAT, **HI, deadline_ms=500_000)
        until(lambda: not drawn.breaks)
        running.advance(100)
        come(running)
        reply.result()
    first, second = drawn.requests
    assert first.deadline_ms is not None
    assert second.deadline_ms is not None
    assert second.deadline_ms <= first.deadline_ms - 100_000


def test_the_first_token_of_what_is_repeated_counts_from_the_first_call(away: Served) -> None:
    running, drawn = away
    come(running)
    drawn.outputs, drawn.breaks = [TEXT], [0]
    drawn.at_break = lambda: running.gateway.readiness.show(False)
    with running.client() as client, ThreadPoolExecutor() as pool:
        _, before = first_tokens(client, CHAT)
        reply = pool.submit(ask, client, CHAT, **HI)
        until(lambda: not drawn.breaks)
        running.advance(100)
        come(running)
        reply.result()
        assert first_tokens(client, CHAT)[1] - before >= 100
