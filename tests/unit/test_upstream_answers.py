"""The detokenizer stage after upstream's C++ backend, in arrays: stop strings, and why a request ended."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from inflight.contract import EXPECTATION
from inflight.errors import InvalidRequest
from inflight.text import upstream_answers
from inflight.text.tokenizer import Tokenizer
from inflight.text.upstream import ANNOUNCEMENT, Announcement, Expected
from inflight.text.upstream_answers import Expectations, UpstreamPostprocessor
from tests.support.tables import each_row
from tests.support.tokenizers import FAMILIES, make_tokenizer
from tests.support.upstream_stages import LENGTH, PROMPT, Stages, encode, reason_of, response, text_of, with_ends

TEXT = "naïve 😀 done"


@pytest.fixture
def tokenizer() -> Tokenizer:
    return with_ends(make_tokenizer("byte level"), 2)


@each_row("family", FAMILIES)
def test_streams_of_one_id_join_to_their_texts(family: str) -> None:
    """Token by token, in turns: rows, sequences and arrival times keep the streams apart; nothing held back is lost."""
    tokenizer = with_ends(make_tokenizer(family))
    stages = Stages(tokenizer)
    asked = stages.preprocess("same", stream=True, max_tokens=40, return_num_output_tokens=True)
    ids = encode(tokenizer, TEXT)
    streams = [{"arrival": 1}, {"arrival": 2}, {"arrival": 1, "sequence_index": 1}]
    texts = [""] * len(streams)
    for position, token in enumerate(ids):
        for index, stream in enumerate(streams):
            last = position == len(ids) - 1
            outputs = stages.answer(response(asked, [token], last, **stream), "same")
            texts[index] += text_of(outputs)
            assert outputs is not None
            assert outputs["num_output_tokens"].tolist() == [[position + 1]]
            assert ("finish_reason" in outputs) is last
            assert "arrival_time_ns" not in outputs, "the client has not asked for it"
    assert texts == [tokenizer.decode(ids)] * len(streams)
    assert len(stages.postprocessor) == 0


def test_an_end_without_a_token_drops_an_unfinished_character(tokenizer: Tokenizer) -> None:
    ids = encode(tokenizer, "😀")
    stages = Stages(tokenizer)
    asked = stages.preprocess("a", stream=True)
    assert text_of(stages.answer(response(asked, ids[:-1]), "a")) == ""
    outputs = stages.answer(response(asked, [], last=True), "a")
    assert (text_of(outputs), reason_of(outputs)) == ("", "stop")


@each_row(
    ("ids", "asked", "last", "reason"),
    [
        ([50, 51], {"max_tokens": 2}, True, "length"),
        ([50, 51], {"max_tokens": 3}, True, "stop"),
        ([], {"max_tokens": 3}, True, "stop"),
        ([50, 7], {"max_tokens": 3}, False, "stop"),
        ([50, 7], {"max_tokens": 2}, True, "stop"),
        ([50, 51], {"max_tokens": 3, "end_id": -1}, True, "cancelled"),
        ([], {"max_tokens": 3}, False, "cancelled"),
        ([50], {"max_tokens": 3}, False, None),
    ],
)
def test_why_a_stream_ended_is_found_out(
    tokenizer: Tokenizer, ids: list[int], asked: dict[str, Any], last: bool, reason: str | None
) -> None:
    """Upstream leaves out the first end id, 2; the second, 7, is a stop word to it, which it sends."""
    stages = Stages(with_ends(tokenizer, 2, 7))
    outputs = stages.answer(response(stages.preprocess("a", stream=True, **asked), ids, last), "a")
    assert reason_of(outputs) == reason
    if 7 in ids:
        assert text_of(outputs) == tokenizer.decode(ids[:1]), "an end id has no text"


def test_the_contexts_limit_is_a_length(tokenizer: Tokenizer) -> None:
    stages = Stages(tokenizer)
    asked = stages.preprocess(max_tokens=1000)
    room = LENGTH - asked["input_lengths"].item()
    assert reason_of(stages.answer(response(asked, [50] * room))) == "length"
    asked = stages.preprocess(max_tokens=1000)
    assert reason_of(stages.answer(response(asked, [50] * (room - 1)))) == "stop"


@each_row("family", FAMILIES)
@each_row("step", [1, 2, 5])
def test_stop_strings_are_found_across_tokens_and_never_shown(family: str, step: int) -> None:
    """Every part of a text, tokenized in any context: nothing of it is shown, and the engine is stopped once."""
    tokenizer = with_ends(make_tokenizer(family))
    text = "He said: the lazy dog's fox jumps, naïve 😀 done."
    ids = encode(tokenizer, text)
    whole = tokenizer.decode(ids)
    for start in range(0, len(whole) - 4, 3):
        stop = whole[start : start + 4]
        stages = Stages(tokenizer)
        asked = stages.preprocess("a", stream=True, max_tokens=60, stop_words=[stop, "never in it"])
        shown, reasons = "", []
        for place in range(0, len(ids), step):  # the engine goes on for a while after it was stopped
            outputs = stages.answer(response(asked, ids[place : place + step]), "a")
            if outputs is not None:
                shown += text_of(outputs)
                reasons += [one for one in [reason_of(outputs)] if one]
        assert stages.answer(response(asked, []), "a") is None
        assert shown == whole[: whole.index(stop)]
        assert reasons == ["stop"]
        assert stages.stops == 1
        assert len(stages.postprocessor) == 0


def test_stop_strings_count_from_min_tokens_on(tokenizer: Tokenizer) -> None:
    ids = encode(tokenizer, "fox and fox and fox")
    stages = Stages(tokenizer)
    asked = stages.preprocess("a", stream=True, max_tokens=60, min_tokens=2, stop_words=["fox"])
    text = "".join(text_of(outputs) for token in ids if (outputs := stages.answer(response(asked, [token]), "a")))
    assert text.startswith("fox and ")
    assert text.count("fox") == 1


def test_a_whole_answer_is_cut_before_its_stop_string(tokenizer: Tokenizer) -> None:
    ids = encode(tokenizer, " jumps over the lazy dog")
    stages = Stages(tokenizer)
    for echo in (True, False):
        asked = stages.preprocess(stop_words=["y d"], exclude_input_in_output=not echo, return_num_output_tokens=True)
        outputs = stages.answer(response(asked, ids))
        assert text_of(outputs) == (PROMPT if echo else "") + " jumps over the laz"
        assert reason_of(outputs) == "stop"
        assert outputs is not None
        assert outputs["num_output_tokens"].item() <= len(ids)
        assert "num_input_tokens" not in outputs
    assert stages.stops == 0, "the engine has ended it"


def test_an_id_that_two_requests_share_stops_neither(tokenizer: Tokenizer) -> None:
    """Upstream's stop ends the newest request of an id, which may be the other."""
    ids = encode(tokenizer, "fox")
    stages = Stages(tokenizer)
    asked = [stages.preprocess("same", stream=True, stop_words=["fox"]) for _ in range(2)]
    assert reason_of(stages.answer(response(asked[0], ids, arrival=1), "same")) == "stop"
    assert stages.stops == 0
    assert stages.answer(response(asked[0], [], last=True, arrival=1), "same") is None
    assert reason_of(stages.answer(response(asked[1], ids, arrival=2), "same")) == "stop"
    assert stages.stops == 1, "it is alone by now"


def test_requests_without_an_id_that_end_otherwise_are_told_apart(tokenizer: Tokenizer) -> None:
    """The same prompt at the same time: each answer has the end of its own request, in whichever order they come."""
    stages = Stages(tokenizer)
    asked = {most: stages.preprocess(max_tokens=most) for most in (2, 3, 4)}
    with pytest.raises(InvalidRequest, match="give each an id of its own"):
        stages.preprocess(max_tokens=6)
    for most in (4, 2, 3):
        assert reason_of(stages.answer(response(asked[most], [50] * most))) == "length"
        assert reason_of(stages.answer(response(stages.preprocess(max_tokens=9), [50] * most))) == "stop"
    assert [stages.preprocess(max_tokens=2)["return_perf_metrics"].item() for _ in range(9)] == [False] * 9, "all alike"


def test_a_request_of_which_nothing_was_told_has_no_known_end(tokenizer: Tokenizer) -> None:
    asked = Stages(tokenizer).preprocess("a", stream=True)
    outputs = Stages(tokenizer).answer(response(asked, [50], last=True), "a")
    assert reason_of(outputs) == "unknown"


SOUND = Expected(5, 0, (), (), 3, True, 1, ())


def test_an_expectation_that_is_none_is_refused(tokenizer: Tokenizer) -> None:
    odd = [
        replace(SOUND, sequences=0),
        replace(SOUND, sequences=-3),
        replace(SOUND, max_tokens=-1),
        replace(SOUND, min_tokens=-1),
        replace(SOUND, prompt_tokens=-1),
        replace(SOUND, stops=("",)),
    ]
    told = [ANNOUNCEMENT.dump_json(Announcement("a", ("3",), (one,), (2,))) for one in odd]
    told.append(ANNOUNCEMENT.dump_json(Announcement("a", ("3", "4"), (SOUND,), (2,))))
    for data in (b"", b"[1]", b'{"request_id": "a"}', b"\xff", *told):
        with pytest.raises(InvalidRequest, match="expectation is not what"):
            UpstreamPostprocessor(tokenizer).postprocess({EXPECTATION: np.array([[data]], object)})
    sound = ANNOUNCEMENT.dump_json(Announcement("a", ("3",), (SOUND,), (2,)))
    for count in (0, 2):
        with pytest.raises(InvalidRequest, match="expectation is not what"):
            UpstreamPostprocessor(tokenizer).postprocess({EXPECTATION: np.array([[sound] * count], object)})


def test_a_client_that_goes_away_stops_no_other_of_its_id(tokenizer: Tokenizer) -> None:
    """Upstream's stop ends the newest request of an id: the sequences of one request, but not those of two."""
    stages = Stages(tokenizer)
    several = stages.preprocess("same", rows=2, stream=True, num_return_sequences=2)
    first = response(several, [50], sequence_index=1)
    stages.answer(first, "same")
    assert len(stages.postprocessor.cancel_requests(first)) == 1, "all that runs is its own"
    other = stages.preprocess("same", stream=True, max_tokens=7, text="Another prompt")
    stages.answer(first, "same")
    assert not stages.postprocessor.cancel_requests(first), "it would end the other"
    stages.answer(response(other, [], last=True, arrival=2), "same")
    stages.answer(first, "same")
    assert len(stages.postprocessor.cancel_requests(first)) == 1
    stages.preprocess("same", rows=2, stream=True, num_return_sequences=2)
    stages.answer(first, "same")
    assert not stages.postprocessor.cancel_requests(first), "it would end the other, which is alike"


def test_what_runs_for_long_keeps_its_end_while_marks_are_left(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A whole answer gives no sign while it runs; a stream does."""
    stages = Stages(tokenizer)
    ids = encode(tokenizer, " jumps over the lazy dog")
    whole = stages.preprocess(max_tokens=30, exclude_input_in_output=True)
    stream = stages.preprocess("a", stream=True, max_tokens=30)
    now = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: now + 100)
    stages.answer(response(stream, ids[:1]), "a")
    monkeypatch.setattr(time, "monotonic", lambda: now + 200)
    stages.preprocess(max_tokens=29, stop_words=["jumps"])
    assert text_of(stages.answer(response(whole, ids))) == " jumps over the lazy dog"
    with pytest.raises(InvalidRequest, match="give each an id of its own"):
        stages.preprocess("a", stream=True, max_tokens=29)
    monkeypatch.setattr(time, "monotonic", lambda: now + 221)
    stages.preprocess("a", stream=True, max_tokens=29)


def test_a_request_that_failed_unseen_does_not_keep_its_id_from_being_stopped(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    stages = Stages(tokenizer)
    stages.preprocess("a", stream=True, text="It fails in the engine")
    now = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: now + 130)
    asked = stages.preprocess("a", stream=True, stop_words=["fox"])
    assert reason_of(stages.answer(response(asked, encode(tokenizer, "fox")), "a")) == "stop"
    assert stages.stops == 1


def test_what_never_ends_gives_its_place_to_what_is_newer(tokenizer: Tokenizer, monkeypatch: Any) -> None:
    monkeypatch.setattr(upstream_answers, "_MOST", 3)
    known = Expectations()
    one = SOUND
    for index in range(9):
        assert known.announce(Announcement(str(index), ("3",), (one,), (2,))) == 2
    assert len(known) == 3
    assert known.find(("8", 0, "3", 2)) == one
    assert known.alone(("8", 0, "3", 2))
    assert not known.alone(("0", 0, "3", 2))


def test_what_never_ends_takes_little_memory(monkeypatch: Any) -> None:
    monkeypatch.setattr(upstream_answers, "_MOST_CHARACTERS", 1000)
    known = Expectations()
    for index in range(20):
        one = replace(SOUND, stops=("x" * 300,), asked=("y" * 10,))
        assert known.announce(Announcement(f"{index:05}", ("3",), (one,), (2,))) == 2
    assert len(known) == 3
    for _ in range(9):
        known.announce(Announcement("00019", ("3",), (one,), (2,)))
    assert len(known) == 3, "it is kept once"
    known.announce(Announcement("big", ("3",), (replace(SOUND, stops=("x" * 3000,)),), (2,)))
    assert len(known) == 1
    assert known.find(("big", 0, "3", 2)) is not None


def test_a_stop_has_what_upstream_requires_of_every_request(tokenizer: Tokenizer) -> None:
    stages = Stages(tokenizer)
    for request_id in ("", "a"):
        answered = response(stages.preprocess(request_id, stream=True), [1])
        stages.answer(answered, request_id)
        stops = stages.postprocessor.cancel_requests(answered)
        assert len(stops) == bool(request_id), "without an id upstream calls it an error"
    [stop] = stops
    assert set(stop) == {"stop", "input_lengths", "request_output_len"}
    assert stop["stop"].all()


def test_a_stream_has_the_log_probs_and_the_logits_of_its_new_tokens(tokenizer: Tokenizer) -> None:
    """Upstream sends the log-probs of all tokens so far each time, and the beams of a stream's logits behind tokens."""
    stages = Stages(tokenizer)
    asked = stages.preprocess("a", stream=True, return_log_probs=True, return_generation_logits=True)
    scores = -np.arange(6, dtype=np.float32)
    logits = np.arange(6 * 3, dtype=np.float32).reshape(6, 3)
    seen: dict[str, list[np.ndarray]] = {"output_log_probs": [], "generation_logits": []}
    for start, end in ((0, 1), (1, 3), (3, 6), (6, 6)):
        arrays = response(asked, [50] * (end - start))  # the last one, of a stream that was stopped, has no token
        arrays["output_log_probs"] = scores[None, None, :end]
        arrays["generation_logits"] = logits[None, start:end, None]
        outputs = stages.answer(arrays, "a")
        assert outputs is not None
        for name, parts in seen.items():
            parts.append(outputs[name])
    assert np.array_equal(np.concatenate(seen["output_log_probs"], axis=2), scores[None, None])
    assert np.array_equal(np.concatenate(seen["generation_logits"], axis=2), logits[None, None])


def test_a_whole_answer_has_logits_for_its_own_tokens_alone(tokenizer: Tokenizer) -> None:
    """Upstream's have a row for each of ``max_tokens``."""
    stages = Stages(tokenizer)
    asked = stages.preprocess("a", max_tokens=5, return_generation_logits=True)
    logits = np.arange(5 * 3, dtype=np.float32).reshape(1, 1, 5, 3)
    outputs = stages.answer(response(asked, [50, 51]) | {"generation_logits": logits}, "a")
    assert outputs is not None
    assert np.array_equal(outputs["generation_logits"], logits[:, :, :2])


@each_row(("asked", "reason"), [({"return_perf_metrics": True}, "cancelled"), ({}, "stop")])
def test_a_whole_answer_that_was_stopped_is_known_by_its_times_alone(
    tokenizer: Tokenizer, asked: dict[str, Any], reason: str
) -> None:
    stages = Stages(tokenizer)
    arrays = response(stages.preprocess("a", max_tokens=9, **asked), [50, 51])
    if "last_token_time_ns" in arrays:
        arrays["last_token_time_ns"] = np.array([[0]], np.int64)  # upstream has not set it
    assert reason_of(stages.answer(arrays, "a")) == reason
