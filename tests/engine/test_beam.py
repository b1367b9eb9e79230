"""Beam search as such: step by step on logits of transformers, held to its ``generate``; and what it decides."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from inflight.engine.beam_search.search import BeamSearch, Candidates, LiveBeam, num_candidates
from inflight.engine.request import Beam, FinishReason
from inflight.sampling import SamplingParams
from tests.engine.support.checkpoints import reference
from tests.engine.support.searching import beams_of, close, some_ends


def search(name: str, prompt: list[int], sampling: SamplingParams) -> list[Beam]:
    """Search with a beam search that gets its log-probs from transformers, all anew in each step."""
    beams = BeamSearch(sampling, sampling.max_tokens)
    while not beams.done:
        beams.advance([likeliest(name, [*prompt, *tokens_of(beam)], num_candidates(sampling)) for beam in beams.live])
    return beams.results(FinishReason.CANCELLED)


def tokens_of(beam: LiveBeam) -> tuple[int, ...]:
    return tuple(one.token for one in beam.last(beam.length))


def likeliest(name: str, tokens: list[int], count: int) -> Candidates:
    with torch.inference_mode():
        log_probs = reference(name)(torch.tensor([tokens])).logits[0, -1].float().log_softmax(-1)
    values, ids = log_probs.topk(min(count, len(log_probs)))
    return list(zip(ids.tolist(), values.tolist(), strict=True))


@pytest.mark.sweep
@pytest.mark.parametrize("name", ["llama", "qwen3"])
@pytest.mark.parametrize("early_stopping", [True, False])
@pytest.mark.parametrize("penalty", [0.0, 1.0, 2.5, -0.5])
def test_it_is_that_of_transformers(name: str, early_stopping: bool, penalty: float) -> None:
    prompt = [5, 17, 80, 3, 44]
    for width, ends in ((2, frozenset()), (3, some_ends(name, prompt, 12)), (5, some_ends(name, prompt, 40))):
        sampling = SamplingParams(
            10, beam_width=width, length_penalty=penalty, early_stopping=early_stopping, end_ids=ends
        )
        assert close(search(name, prompt, sampling), beams_of(name, prompt, sampling))


def test_some_of_those_searches_end_before_their_limit() -> None:
    prompt = [5, 17, 80, 3, 44]
    sampling = SamplingParams(10, beam_width=3, end_ids=some_ends("llama", prompt, 12))
    reasons = {beam.finish_reason for beam in search("llama", prompt, sampling)}
    assert FinishReason.STOP in reasons


A, B, C, END = 0, 1, 2, 9


def stepped(steps: list[list[Candidates]], **more: Any) -> BeamSearch:
    search = BeamSearch(SamplingParams(8, beam_width=2, end_ids=frozenset({END}), **more), 8)
    for candidates in steps:
        search.advance(candidates)
    return search


def test_an_end_id_counts_in_the_score_and_is_not_shown() -> None:
    search = stepped([[[(A, -0.1), (B, -1.0), (C, -9.0)]], [[(END, -0.2), (B, -3.0), (C, -9.0)], [(A, -2.0)]]])
    [best, *_] = search.results(FinishReason.CANCELLED)
    assert best == Beam((A,), (-0.1,), -0.1 + -0.2, -0.1 + -0.2, FinishReason.STOP)


def test_an_end_among_the_worse_candidates_is_no_end() -> None:
    search = stepped([[[(A, -0.1), (B, -0.5), (END, -0.6)]]])
    assert [tokens_of(beam) for beam in search.live] == [(A,), (B,)]
    assert all(beam.finish_reason is FinishReason.CANCELLED for beam in search.results(FinishReason.CANCELLED))


def test_what_was_cut_short_has_the_finished_beams_and_the_best_of_the_others() -> None:
    search = stepped([[[(END, -0.1), (B, -0.5), (A, -0.6)]]])
    assert not search.done
    assert [(beam.tokens, beam.finish_reason) for beam in search.results(FinishReason.DEADLINE)] == [
        ((), FinishReason.STOP),
        ((B,), FinishReason.DEADLINE),
    ]


def test_a_stop_sequence_ends_a_beam_and_is_shown() -> None:
    search = stepped(
        [[[(A, -0.1), (B, -0.5), (C, -3.0)]], [[(B, -0.1), (A, -0.2), (C, -3.0)], [(C, -4.0)]]],
        stop_sequences=((A, B),),
    )
    [best, _] = search.results(FinishReason.CANCELLED)
    assert (best.tokens, best.finish_reason) == ((A, B), FinishReason.STOP)


def test_tokens_of_beams_that_end_are_collected_at_the_end_of_the_search_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Most of them make room for better ones; and in each step a client can have many end, however long they are."""
    steps: list[list[Candidates]] = [[[(A, -0.1), (B, -0.5), (C, -9.0)]]]
    steps += [[[(END, -0.2), (A, -0.3), (C, -9.0)], [(END, -0.2), (B, -0.4), (C, -9.0)]]] * 5
    with monkeypatch.context() as patch:
        patch.setattr(LiveBeam, "last", None)
        search = stepped(steps, early_stopping=False, length_penalty=5.0)
    [best, second] = search.results(FinishReason.CANCELLED)
    assert (len(best.tokens), len(second.tokens)) == (5, 6)
    assert (best.finish_reason, second.finish_reason) == (FinishReason.STOP, FinishReason.CANCELLED)


def test_early_stopping_ends_with_enough_beams_and_without_it_a_better_one_is_waited_for() -> None:
    steps: list[list[Candidates]] = [
        [[(A, -0.1), (B, -0.2), (C, -7.0)]],
        [[(END, -1.0), (B, -1.1), (C, -7.0)], [(A, -2.0), (C, -7.0)]],
        [[(C, -0.1), (END, -0.2), (A, -7.0)], [(C, -3.0), (A, -7.0)]],
    ]
    assert stepped(steps).done
    assert not stepped(steps, early_stopping=False).done
    worse: list[list[Candidates]] = [[[(A, -0.9), (B, -7.0)], [(A, -5.0), (C, -7.0)]]]
    assert stepped(steps + worse, early_stopping=False).done


def test_a_token_more_copies_nothing() -> None:
    """Siblings share what they continue, so that a search takes time linear in its length."""
    search = BeamSearch(SamplingParams(8, beam_width=2), 8)
    search.advance([[(A, -1.0), (B, -2.0)]])
    parent = search.live[0]
    search.advance([[(A, -0.1), (B, -0.2)], [(A, -3.0), (B, -4.0)]])
    assert [beam.before for beam in search.live] == [parent, parent]
    beam = LiveBeam()
    for token in range(50_000):
        beam = LiveBeam(beam, token, -1.0, beam.cum_log_prob - 1.0, beam.length + 1)
    assert tokens_of(beam) == tuple(range(50_000))
    assert [one.token for one in beam.last(2)] == [49_998, 49_999]


@pytest.mark.parametrize(("min_tokens", "ends"), [(2, True), (3, False)])
def test_a_stop_sequence_that_ends_at_exactly_min_tokens_ends_its_beam(min_tokens: int, ends: bool) -> None:
    steps: list[list[Candidates]] = [[[(A, -0.1), (C, -1.0)]], [[(B, -0.1), (C, -9.0)], [(A, -2.0), (C, -9.0)]]]
    search = stepped(steps, stop_sequences=((A, B),), min_tokens=min_tokens)
    [best, *_] = search.results(FinishReason.CANCELLED)
    assert best.tokens == (A, B)
    assert best.finish_reason is (FinishReason.STOP if ends else FinishReason.CANCELLED)
