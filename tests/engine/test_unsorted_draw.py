"""Drawing without a sort gives the tokens of the draw that sorts: ties, masks, infinities, all cuts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from inflight.engine import sampler
from inflight.engine.cuda import draw as unsorted
from inflight.engine.sampler import draw_sorted
from tests.engine.support.draws import KINDS, LARGEST, make_case, plain, ties
from tests.engine.support.fake_card import FakeCard


def _sums(logits: Tensor, temperature: Tensor, peak: Tensor) -> Tensor:
    return (logits.clamp(max=LARGEST).double() / temperature - peak).exp().sum(-1, keepdim=True)


class _Unsure:
    """In place of the kernel that looks for tokens: counts the rows that need it."""

    rows: Tensor

    def __getitem__(self, grid: tuple[int]) -> Callable[..., None]:
        def launch(logits: Tensor, sure: Tensor, *_: Any, **__: Any) -> None:
            self.rows = ~sure[:, 0]

        return launch


@pytest.mark.sweep
@pytest.mark.parametrize("kind", KINDS)
def test_where_the_candidates_suffice_the_tokens_are_those_of_the_sort(
    kind: Callable[[Tensor, torch.Generator], Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(unsorted, "CANDIDATES", 8)
    monkeypatch.setattr(unsorted, "_total", _sums)
    monkeypatch.setattr(unsorted, "_find_kernel", kernel := _Unsure())
    case = make_case(40_000, 40, kind, torch.Generator().manual_seed(7))
    drawn, expected = unsorted.draw(*case), draw_sorted(*case)
    assert torch.equal(drawn[~kernel.rows], expected[~kernel.rows])
    # So many at least: a token that is surely one of the first was never looked for.
    certain = (case[2] < 8) & (case[0].sort(-1, descending=True)[0][:, 6:7] > case[0].topk(8)[0][:, 7:])
    assert not kernel.rows[certain[:, 0]].any()
    assert 0.01 < kernel.rows.float().mean() < 0.6


@pytest.mark.proof
@pytest.mark.sweep
@pytest.mark.parametrize("kind", KINDS)
def test_what_is_not_among_the_candidates_is_found(
    kind: Callable[[Tensor, torch.Generator], Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the kernels themselves, interpreted; rows that the candidates decide are left out, but for a few."""
    monkeypatch.setattr(unsorted, "CANDIDATES", 4)
    monkeypatch.setattr(unsorted, "_BLOCK", 32)
    monkeypatch.setattr(unsorted, "_CHUNK", 32)
    case = make_case(400, 40, kind, torch.Generator().manual_seed(11))
    with monkeypatch.context() as patch:
        patch.setattr(unsorted, "_total", _sums)
        patch.setattr(unsorted, "_find_kernel", kernel := _Unsure())
        unsorted.draw(*case)
    rows = torch.cat((kernel.rows.nonzero()[:3, 0], (~kernel.rows).nonzero()[:1, 0]))
    assert len(rows) == 4
    few = [part[rows] for part in case]
    assert torch.equal(unsorted.draw(*few), draw_sorted(*few))


def test_a_row_of_no_numbers_gets_some_token(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which ``sample_async`` then marks; it must be one that there is."""
    monkeypatch.setattr(unsorted, "CANDIDATES", 4)
    monkeypatch.setattr(unsorted, "_BLOCK", 32)
    monkeypatch.setattr(unsorted, "_CHUNK", 32)
    case = make_case(2, 40, plain, torch.Generator().manual_seed(1))
    case[0][0], case[0][1] = torch.nan, -torch.inf
    drawn = unsorted.draw(*case)
    assert ((drawn >= 0) & (drawn < 40)).all()


def test_a_small_vocabulary_needs_no_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unsorted, "_total", None)
    monkeypatch.setattr(unsorted, "_find_kernel", None)
    case = make_case(20_000, 40, ties, torch.Generator().manual_seed(3))
    assert torch.equal(unsorted.draw(*case), draw_sorted(*case))


def test_the_sampler_takes_it_where_there_are_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Tensor] = []
    monkeypatch.setattr(sampler, "_has_kernels", lambda _: True)
    monkeypatch.setattr(unsorted, "draw", lambda logits, *_: seen.append(logits) or torch.zeros(len(logits)).long())
    from tests.engine.support.sequences import LOGITS, make_sequence, sample

    rows = sample(LOGITS.repeat(2, 1), [make_sequence(temperature=1.0), make_sequence()])
    assert [row.token for row in rows] == [0, 0]
    assert len(seen[0]) == 1, "the greedy one is not drawn"


def _defined(logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, u: Tensor) -> Tensor:
    """Return what is drawn by the plainest means: all of it in float64, from the first operation on."""
    scaled, ids = (logits.double().clamp(max=LARGEST) / temperature).sort(dim=-1, descending=True, stable=True)
    probabilities = scaled.masked_fill(torch.arange(logits.shape[-1]) >= top_k, -torch.inf).softmax(dim=-1)
    before = probabilities.cumsum(dim=-1) - probabilities
    kept = (before < top_p) & (probabilities >= min_p * probabilities[:, :1])
    kept[:, 0] = True
    mass = (probabilities * kept).cumsum(dim=-1)
    return ids.gather(-1, torch.searchsorted(mass, u * mass[:, -1:], right=True))[:, 0]


@pytest.mark.parametrize("kind", KINDS)
def test_the_sort_is_of_float32_and_loses_nothing(kind: Callable[[Tensor, torch.Generator], Tensor]) -> None:
    case = make_case(20_000, 40, kind, torch.Generator().manual_seed(5))
    assert torch.equal(draw_sorted(*case), _defined(*case))


def test_it_takes_a_part_of_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unsorted, "_find_kernel", _Unsure())
    monkeypatch.setattr(unsorted, "_total", lambda logits, *_: torch.ones(len(logits), 1, dtype=torch.float64))
    case = make_case(4, 16_000, plain, torch.Generator().manual_seed(5))
    with FakeCard(1 << 30) as card:
        taken = {by: card.peak_of(lambda by=by: by(*case)) for by in (unsorted.draw, draw_sorted, _defined)}  # type: ignore[misc]
    assert 8 * taken[unsorted.draw] < 2 * taken[draw_sorted] < 2 * taken[_defined]
