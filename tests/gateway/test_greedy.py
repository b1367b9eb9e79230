"""A temperature of 0 is greedy, whatever else a request says of how to draw."""

from __future__ import annotations

from typing import Any

import pytest

from tests.gateway.support.gateways import Beside

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
