"""A temperature of 0 is greedy, whatever else a request says of how to draw; silence is left to the checkpoint."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.gateway.support.gateways import Beside
from tests.gateway.support.scripted import scripted

QUESTION: dict[str, Any] = {
    "messages": [{"role": "user", "content": "What do you know about the generation phase?"}],
    "max_tokens": 32,
    "temperature": 0,
}


@pytest.mark.parametrize("beside", [{"seed": 1234}, {"top_k": 40}, {"min_p": 0.001}, {"top_p": 0.999, "seed": 7}])
def test_a_temperature_of_zero_draws_nothing(gateway: Beside, beside: dict[str, Any]) -> None:
    with gateway.client() as client:
        model = client.get("/v1/models").json()["data"][0]["id"]
        asked = [QUESTION, QUESTION | {"logprobs": True, "top_logprobs": 1} | beside]
        alone, other = [
            client.post("/v1/chat/completions", json=body | {"model": model}).json()["choices"][0] for body in asked
        ]
    assert other["message"]["content"] == alone["message"]["content"]
    assert all(entry["token"] == entry["top_logprobs"][0]["token"] for entry in other["logprobs"]["content"])


@pytest.mark.parametrize(
    ("defaults", "fields", "drawn"),
    [
        ({}, {}, (0, 1, 0)),  # a model whose makers say nothing, and a request that says nothing
        ({}, {"temperature": 1}, (1, 1, 0)),
        ({}, {"top_p": 0.5}, (1, 0.5, 0)),
        ({"repetition_penalty": 1.1}, {}, (0, 1, 0)),
        ({"temperature": 0.6, "top_k": 20}, {}, (0.6, 1, 20)),
        ({"temperature": 0.6, "top_k": 20}, {"temperature": 0.9}, (0.9, 1, 20)),
        ({"temperature": 0.6, "top_k": 20}, {"temperature": 0}, (0, 1, 20)),
    ],
)
def test_a_request_that_does_not_say_how_to_sample_goes_by_the_checkpoint(
    defaults: dict[str, float],
    fields: dict[str, float],
    drawn: tuple[float, float, int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with scripted(model_name="model") as (running, script), running.client() as client:
        script.text = "Yes."
        tokenizer = running.gateway.tokenizer
        monkeypatch.setattr(tokenizer, "config", replace(tokenizer.config, sampling_defaults=defaults))
        for path, body in (
            ("/v1/responses", {"input": "Hi"}),
            ("/v1/messages", QUESTION),
            ("/v1/chat/completions", QUESTION),
        ):
            asked = {name: value for name, value in body.items() if name != "temperature"} | {"model": "model"}
            assert client.post(path, json=asked | fields).status_code == 200
            request = script.request
            assert request is not None
            assert (request.temperature, request.top_p, request.top_k) == drawn
