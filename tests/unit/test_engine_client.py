"""The gateway's requests to the engine, as tensors."""

from __future__ import annotations

import numpy as np
import pytest

from inflight.gateway.engine_client import GenerateRequest, tensors_of
from inflight.inputs import Inputs, read_sampling

_FIELDS = {"temperature": "temperature", "top_p": "runtime_top_p", "top_k": "runtime_top_k", "seed": "seed"}


def sampled(request: GenerateRequest) -> bool:
    """Return whether the engine samples for a request, by its own reading of the tensors."""
    arrays = {name: np.array([value]) for name, value in tensors_of(request).items() if name in _FIELDS.values()}
    return bool(read_sampling(Inputs(arrays, (), rows=1), 0, _FIELDS).get("temperature"))


@pytest.mark.parametrize("seed", [None, 1234])
@pytest.mark.parametrize("temperature", [0.0, 0.5, 1.0])
def test_a_request_samples_where_its_temperature_is_above_zero(temperature: float, seed: int | None) -> None:
    request = GenerateRequest(prompt=[1], max_tokens=1, temperature=temperature, seed=seed)

    assert sampled(request) == (temperature > 0)


def test_what_asks_for_nothing_is_not_sent() -> None:
    assert set(tensors_of(GenerateRequest(prompt=[1], max_tokens=1))) == {
        "input_ids",
        "request_output_len",
        "streaming",
        "exclude_input_in_output",
        "return_num_output_tokens",
        "return_num_cached_tokens",
    }
