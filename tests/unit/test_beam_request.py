"""What a request says of beams, as the engine's stage reads it, and who refuses it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from inflight.errors import InvalidRequest, UnsupportedFeature
from inflight.sampling import SamplingParams
from inflight.settings.deployment import LimitSettings
from inflight.triton.request_reader import read_request


def read(engine: str = "pytorch", rows: int = 1, **more: Any) -> list[SamplingParams]:
    scalars = {"request_output_len": 4} | more
    arrays = {
        name: np.array(value).reshape(-1, 1).repeat(1 if np.ndim(value) else rows, 0) for name, value in scalars.items()
    }
    arrays["input_ids"] = np.ones((rows, 3), np.int32)
    _, parts = read_request(arrays, "", LimitSettings(), 100, True, engine, max_sequences=256)
    return [part.request.sampling for part in parts]


def test_the_defaults_are_upstreams() -> None:
    [sampling] = read(beam_width=3)
    assert (sampling.beam_width, sampling.length_penalty, sampling.early_stopping) == (3, 0.0, True)


def test_what_is_given_is_read() -> None:
    [sampling] = read(beam_width=3, len_penalty=0.5, early_stopping=False)
    assert (sampling.length_penalty, sampling.early_stopping) == (0.5, False)


@pytest.mark.parametrize("penalty", [0.0, 1.0])
def test_one_beam_with_what_old_clients_send_beside_it_is_no_search(penalty: float) -> None:
    [sampling] = read(beam_width=1, len_penalty=penalty, early_stopping=True)
    assert sampling.beam_width == 1


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"beam_width": -1}, "beam_width is -1; it must be at least 1"),
        ({"beam_width": 2, "len_penalty": np.inf}, "length_penalty is inf"),
        ({"beam_width": 2, "len_penalty": -1000.0}, "length_penalty is -1000.0; it must be within ±50"),
        ({"beam_width": 1, "len_penalty": 0.5}, "length_penalty is 0.5"),
        ({"beam_width": 2, "num_return_sequences": 2}, "num_return_sequences"),
        ({"beam_width": [2, 3], "rows": 2}, "beam_width differs between the rows"),
    ],
)
def test_what_makes_no_sense_is_refused(more: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        read(**more)


@pytest.mark.parametrize("engine", ["replay", "trtllm"])
@pytest.mark.parametrize("more", [{"beam_width": 2}, {"len_penalty": 0.5}, {"early_stopping": True}])
def test_other_engines_refuse_it_by_name(engine: str, more: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedFeature, match=next(iter(more))):
        read(engine, **more)


def test_the_diversity_rate_is_refused() -> None:
    with pytest.raises(UnsupportedFeature, match="beam_search_diversity_rate"):
        read(beam_width=2, beam_search_diversity_rate=0.5)
