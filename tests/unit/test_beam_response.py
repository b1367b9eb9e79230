"""From the engine's beams to what a client gets: one row of ids, scores and text per beam."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from inflight.engine.request import Beam, FinishReason, Output, Request
from inflight.sampling import SamplingParams
from inflight.text.postprocess import Postprocessor
from inflight.text.tokenizer import Tokenizer
from inflight.triton.request_reader import OutputOptions, SubRequest
from inflight.triton.response_writer import Arrays, stack, to_arrays
from tests.support.tokenizers import FAMILIES, make_tokenizer

TEXTS = ("a quick brown fox", "naïve 😀", "")


@pytest.fixture(params=FAMILIES)
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    return make_tokenizer(request.param)


def respond(tokenizer: Tokenizer, key: int = 0, texts: tuple[str, ...] = TEXTS, **options: Any) -> Arrays:
    """Return the engine's response with a beam for each text."""
    usual = dict.fromkeys(OutputOptions.__slots__, False) | {
        "pad_id": 7,
        "vocab_size": 16,
        "batch_size": 1,
        "sequences": 1,
    }
    beams = []
    for place, text in enumerate(texts):
        [ids] = tokenizer.encode_batch([text], False) if text else [[]]
        log_probs = tuple(-0.5 for _ in ids)
        beams.append(Beam(tuple(ids), log_probs, sum(log_probs) - 0.25, -float(place), FinishReason.STOP))
    [prompt] = tokenizer.encode_batch(["say a"], True)
    output = Output(key, beams=beams, finish_reason=FinishReason.STOP)
    subrequest = SubRequest(Request(prompt, SamplingParams(8, beam_width=len(texts))), key, 0)
    return to_arrays(output, subrequest, OutputOptions(**(usual | options)), output.num_tokens, 0.0)


def texts_of(tokenizer: Tokenizer, arrays: Arrays) -> list[str]:
    """Return `text_output`, which upstream's clients read as a flat list of bytes."""
    assembled = Postprocessor(tokenizer).postprocess(arrays)
    assert assembled is not None
    return [text.decode() for text in assembled["text_output"]]


def whole(tokenizer: Tokenizer, arrays: Arrays, beam: int) -> str:
    return tokenizer.decode(arrays["output_ids"][0, beam, : arrays["sequence_length"][0, beam]].tolist())


@pytest.mark.parametrize("streaming", [True, False])
def test_every_beam_has_its_text(tokenizer: Tokenizer, streaming: bool) -> None:
    arrays = respond(tokenizer, streaming=streaming, exclude_input_in_output=True)
    assert texts_of(tokenizer, arrays) == [whole(tokenizer, arrays, beam) for beam in range(3)]
    assert arrays["sequence_length"].shape == (1, 3)
    assert arrays["sequence_length"][0, 2] == 0


def test_each_beam_begins_with_the_prompt_where_that_comes_back(tokenizer: Tokenizer) -> None:
    arrays = respond(tokenizer)
    assert texts_of(tokenizer, arrays) == [whole(tokenizer, arrays, beam) for beam in range(3)]
    assert arrays["sequence_length"][0, 2] == arrays["echo_length"].item()


def test_an_unfinished_character_is_dropped_behind_the_prompt_too(tokenizer: Tokenizer) -> None:
    arrays = respond(tokenizer, texts=("ok🐧",))
    if "🐧" not in whole(tokenizer, arrays, 0):
        pytest.skip("it has no tokens of bytes")
    arrays["sequence_length"] -= 1
    [text] = texts_of(tokenizer, arrays)
    assert text.startswith(tokenizer.decode(tokenizer.encode_batch(["say a"], True)[0]))
    assert text.endswith("ok")


def test_short_beams_are_padded_with_minus_one(tokenizer: Tokenizer) -> None:
    arrays = respond(tokenizer, exclude_input_in_output=True, return_log_probs=True, return_num_output_tokens=True)
    lengths = arrays["sequence_length"][0].tolist()
    for name, fill in (("output_ids", -1), ("output_log_probs", -1.0)):
        assert arrays[name].shape == (1, 3, max(lengths))
        assert all((arrays[name][0, beam, length:] == fill).all() for beam, length in enumerate(lengths))
    assert arrays["num_output_tokens"].item() == sum(lengths)
    np.testing.assert_allclose(arrays["cum_log_probs"], [[-0.5 * length - 0.25 for length in lengths]])


def test_rows_of_a_batch_keep_their_beams(tokenizer: Tokenizer) -> None:
    rows = [
        respond(tokenizer, 1, TEXTS, exclude_input_in_output=True),
        respond(tokenizer, 2, TEXTS[::-1], exclude_input_in_output=True),
    ]
    texts = texts_of(tokenizer, stack(rows, 7))
    assert texts[:3] == texts[:2:-1] == [whole(tokenizer, rows[0], beam) for beam in range(3)]
