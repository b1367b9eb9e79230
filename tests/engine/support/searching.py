"""What transformers' beam search finds, for tests to hold ours to."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from inflight.engine.request import Beam, Output, Request
from inflight.sampling import SamplingParams
from tests.engine.support.checkpoints import VOCAB, reference

Found = list[tuple[tuple[int, ...], float]]
"""Tokens and score of each beam, the best first."""


_KNOWN: dict[str, Found] = {}


def assert_found(name: str, request: Request, output: Output) -> None:
    """Check that a request's output has the beams that transformers finds for it."""
    known = repr((name, request.prompt, request.sampling))
    if known not in _KNOWN:
        _KNOWN[known] = beams_of(name, request.prompt, request.sampling)
    assert output.error is None
    assert output.beams is not None
    assert close(output.beams, _KNOWN[known]), (output.beams, _KNOWN[known])


def beams_of(name: str, prompt: Sequence[int], sampling: SamplingParams, **more: object) -> Found:
    """Return the beams that transformers finds for one prompt; ``more``: of its ``generate``."""
    ends = sorted(sampling.end_ids)
    with torch.inference_mode():
        found = reference(name).generate(
            torch.tensor([list(prompt)]),
            attention_mask=torch.ones(1, len(prompt)),
            max_new_tokens=sampling.max_tokens,
            num_beams=sampling.beam_width,
            num_return_sequences=sampling.beam_width,
            length_penalty=sampling.length_penalty,
            early_stopping=sampling.early_stopping,
            eos_token_id=ends or None,
            pad_token_id=VOCAB,  # no token of the model's: what is padding is known
            do_sample=False,
            output_scores=True,
            return_dict_in_generate=True,
            **more,
        )
    rows = [row[len(prompt) :].tolist() for row in found.sequences]
    return [(_shown(row, ends), score) for row, score in zip(rows, found.sequences_scores.tolist(), strict=True)]


def close(beams: Sequence[Beam], found: Found) -> bool:
    """Return whether beams are those, token by token, with the same scores."""
    return [beam.tokens for beam in beams] == [tokens for tokens, _ in found] and all(
        abs(beam.score - score) < 1e-4 for beam, (_, score) in zip(beams, found, strict=True)
    )


def some_ends(name: str, prompt: Sequence[int], count: int) -> frozenset[int]:
    """Return end ids that a search comes across: the likeliest but the first few after the prompt."""
    with torch.inference_mode():
        order = reference(name)(torch.tensor([list(prompt)])).logits[0, -1].argsort(descending=True)
    return frozenset(order[4 : 4 + count].tolist())


def _shown(row: list[int], ends: list[int]) -> tuple[int, ...]:
    """Cut the padding and the end id that ended the beam."""
    length = next((place for place, token in enumerate(row) if token in (VOCAB, -1)), len(row))  # -1: without end ids
    if length and row[length - 1] in ends:
        length -= 1
    return tuple(row[:length])
