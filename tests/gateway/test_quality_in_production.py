"""A share of the answers is scored again by a reference: what differs is counted, and no client notices."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError

from inflight.errors import InvalidRequest
from inflight.gateway.engine_client import EngineDelta, GenerateRequest
from inflight.gateway.quality import QualityMonitor, Sample, ServedAnswer, mode_of
from inflight.sampling import Guide
from inflight.settings.gateway_quality import GatewayQualitySettings
from tests.gateway.support.answers import CHAT, COMPLETIONS, MODEL, ask, chunks, joined, without_names
from tests.gateway.support.drawn import Drawn, DrawnEngine, drawn_engine
from tests.gateway.support.gateways import Inside, until
from tests.gateway.test_whole_and_streamed import tokens_of

HI: dict[str, Any] = {"messages": [{"role": "user", "content": "Hi secret"}], "max_tokens": 60, "temperature": 1}
TEXT = tokens_of("Grüße, 世界 👋🏽! The end of it all.")


class Reference(DrawnEngine):
    """Scores every token as the drawn engine does, or so much less."""

    less = 0.0
    error: Exception | None = None
    held: threading.Event | None = None
    likeliest: int | None = None

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[EngineDelta, None]:
        while self.held is not None and not self.held.is_set():
            await asyncio.sleep(0.01)
        if self.error is not None:
            raise self.error
        async for delta in super().generate(request):
            outputs = dict(delta.outputs)
            if "prompt_log_probs" in outputs:
                outputs["prompt_log_probs"] = outputs["prompt_log_probs"] - np.float32(self.less)
                outputs["prompt_top_log_prob_ids"] = np.array([[[token] for token in request.prompt[1:]]], np.int32)
                if self.likeliest is not None:
                    outputs["prompt_top_log_prob_ids"][:] = self.likeliest
            yield replace(delta, outputs=outputs)


@contextmanager
def monitored(
    sample_ratio: float = 1.0, draws: Sequence[float] = (), **settings: Any
) -> Iterator[tuple[Inside, Drawn, Reference]]:
    """Serve the demo with a drawn engine, whose answers a reference scores."""
    given = iter(draws)
    with drawn_engine() as (running, drawn):
        app: Any = running.server.config.app
        gateway = app.state.gateway
        reference = Reference(gateway.tokenizer, Drawn([[5]]))
        chosen = GatewayQualitySettings(sample_ratio=sample_ratio, reference="here:1", **settings)
        monitor = QualityMonitor(chosen, reference, gateway.metrics, gateway.max_model_len, lambda: next(given, 0.0))
        app.state.gateway = replace(gateway, quality=monitor)
        running.loop.call_soon_threadsafe(monitor.start)
        drawn.outputs = [TEXT]
        yield running, drawn, reference
        asyncio.run_coroutine_threadsafe(monitor.stop(), running.loop).result(60)


def counted(running: Inside) -> dict[str, float]:
    """Return what has been counted of quality, by series."""
    with running.client() as client:
        lines = client.get("/metrics").text.splitlines()
    found = [line.rpartition(" ") for line in lines if line.startswith("inflight_gateway_quality_")]
    return {name.removeprefix("inflight_gateway_quality_"): float(value) for name, _, value in found}


def answers(running: Inside, outcome: str) -> float:
    """Return how many answers have come to this."""
    return counted(running).get(f'answers_total{{outcome="{outcome}"}}', 0)


@pytest.mark.parametrize("stream", [False, True])
def test_equal_deployments_do_not_differ(stream: bool) -> None:
    with monitored() as (running, drawn, _), running.client() as client:
        for body in (HI, HI | {"temperature": 0}, HI | {"n": 2, "logprobs": True}):
            chunks(client, CHAT, **body) if stream else ask(client, CHAT, **body)
        until(lambda: answers(running, "compared") == 4)
        found = counted(running)
        assert all(request.log_probs for request in drawn.requests)
    for mode, count in (("plain", 3), ("greedy", 1)):
        assert found[f'tokens_total{{mode="{mode}"}}'] == len(TEXT) * count
        assert found[f'agreeing_tokens_total{{mode="{mode}"}}'] == len(TEXT) * count
        assert found[f'above_nats_total{{mode="{mode}"}}'] == 0
        assert found[f'below_nats_total{{mode="{mode}"}}'] == 0
        assert found[f'answer_difference_nats_bucket{{le="1e-06",mode="{mode}"}}'] == count


def test_what_differs_is_counted_with_its_sign() -> None:
    with monitored() as (running, _, reference), running.client() as client:
        for less, likeliest in ((0.5, 7), (-0.25, None)):
            reference.less, reference.likeliest = less, likeliest
            before = answers(running, "compared")
            ask(client, COMPLETIONS, prompt="Hi", max_tokens=60, temperature=0)
            until(lambda before=before: answers(running, "compared") == before + 1)
        found = counted(running)
    tokens = found['tokens_total{mode="greedy"}']
    assert tokens == 2 * len(TEXT)
    assert found['agreeing_tokens_total{mode="greedy"}'] == len(TEXT)
    assert found['above_nats_total{mode="greedy"}'] == pytest.approx(0.5 * len(TEXT))
    assert found['below_nats_total{mode="greedy"}'] == pytest.approx(0.25 * len(TEXT))
    assert found['answer_difference_nats_sum{mode="greedy"}'] == pytest.approx(0.75)


def test_the_reference_gets_the_prompt_with_the_answer() -> None:
    with monitored() as (running, drawn, reference), running.client() as client:
        ask(client, CHAT, **HI)
        until(lambda: answers(running, "compared") == 1)
        [sent], [scored] = drawn.requests, reference._drawn.requests
    assert scored.prompt == [*sent.prompt, *TEXT]
    assert (scored.prompt_log_probs, scored.max_tokens) == (1, 1)


def test_an_answer_is_the_same_whether_it_is_scored_or_not() -> None:
    bodies = [HI, HI | {"logprobs": True, "top_logprobs": 2}, HI | {"n": 2, "stop": ["end"]}]
    with monitored() as (running, drawn, _), running.client() as client:
        scored = [without_names(joined(CHAT, chunks(client, CHAT, **body))) for body in bodies]
    with drawn_engine() as (running, drawn), running.client() as client:
        drawn.outputs = [TEXT]
        assert scored == [without_names(joined(CHAT, chunks(client, CHAT, **body))) for body in bodies]


def test_the_share_is_that_of_the_draws() -> None:
    with monitored(0.25, [0.1, 0.3, 0.24, 0.25]) as (running, drawn, _), running.client() as client:
        for _ in range(4):
            ask(client, CHAT, **HI)
        until(lambda: answers(running, "compared") == 2)
        assert [request.log_probs for request in drawn.requests] == [True, False, True, False]


def test_a_reference_that_stands_still_holds_nobody_up() -> None:
    with monitored(max_waiting=2) as (running, _, reference), running.client() as client:
        reference.held = threading.Event()
        for _ in range(8):
            ask(client, CHAT, **HI)
        dropped = answers(running, "dropped")
        assert dropped >= 5, "two wait, and one is under way"
        reference.held.set()
        until(lambda: answers(running, "compared") + dropped == 8)


def test_a_reference_that_fails_is_counted_and_no_prompt_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    with monitored() as (running, _, reference), running.client() as client, caplog.at_level(logging.DEBUG):
        reference.error = InvalidRequest("the prompt 'Hi secret' is bad")
        for _ in range(3):
            ask(client, CHAT, **HI)
        until(lambda: answers(running, "failed") == 3)
        reference.error = None
        ask(client, CHAT, **HI)
        until(lambda: answers(running, "compared") == 1)
    said = [record.getMessage() for record in caplog.records if record.name == "inflight.gateway.quality"]
    assert said == ["the reference does not score answers: InvalidRequest"]


def test_a_reference_that_takes_too_long_is_left() -> None:
    with monitored(timeout_s=600) as (running, _, reference), running.client() as client:
        reference.held = threading.Event()
        ask(client, CHAT, **HI)

        def has_failed() -> bool:
            running.advance(601)
            return answers(running, "failed") == 1

        until(has_failed)


def test_what_scores_no_answer_is_not_sampled() -> None:
    with monitored() as (running, drawn, reference), running.client() as client:
        body = {"model": MODEL, "query": "a", "items": ["b"], "label_token_ids": [5, 6]}
        client.post("/v1/score", json=body)
        ask(client, CHAT, **HI)
        until(lambda: answers(running, "compared") == 1)
        assert [request.log_probs for request in drawn.requests] == [False, True]
        assert len(reference._drawn.requests) == 1


@pytest.mark.parametrize(
    ("fields", "mode"),
    [
        ({"temperature": 0.0, "top_p": 0.5}, "greedy"),
        ({}, "plain"),
        ({"stop_strings": ["a"], "seed": 3, "top_log_probs": 2}, "plain"),
        ({"temperature": 0.7}, "shaped"),
        ({"top_p": 0.9}, "shaped"),
        ({"top_k": 3}, "shaped"),
        ({"frequency_penalty": 0.1}, "shaped"),
        ({"repetition_penalty": 1.1}, "shaped"),
        ({"bias": np.zeros(4, np.float32)}, "shaped"),
        ({"guide": Guide("regex", "a")}, "shaped"),
    ],
)
def test_the_mode_says_what_tokens_are_drawn_from(fields: dict[str, Any], mode: str) -> None:
    assert mode_of(replace(GenerateRequest(prompt=[5], max_tokens=1, temperature=1.0), **fields)) == mode


@pytest.mark.parametrize("wrong", [{"sample_ratio": 0.1}, {"reference": "http://here:1"}, {"reference": "here"}])
def test_a_share_needs_a_reference_by_its_address(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValidationError, match="reference"):
        GatewayQualitySettings(**wrong)


def test_an_answer_that_the_gateway_ends_is_scored_once() -> None:
    taken = list[ServedAnswer]()
    sample = Sample(GenerateRequest(prompt=[5], max_tokens=9), taken.append)
    sample.take(_engine_delta([1, 2]))
    sample.end(0)
    sample.take(_engine_delta([3], "stop"))
    assert [list(one.tokens) for one in taken] == [[1, 2]]


def _engine_delta(tokens: list[int], finish_reason: str | None = None) -> EngineDelta:
    return EngineDelta(
        index=0, tokens=tokens, log_probs=[-1.0] * len(tokens), top_log_probs=[], text_limit=None,
        finish_reason=finish_reason, output_tokens=0, cached_tokens=0, outputs={},
    )  # fmt: skip
