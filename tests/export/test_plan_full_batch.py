"""A full batch in a closed loop: the plan's simulation does what the scheduler does."""

from __future__ import annotations

import random
from dataclasses import dataclass

import numpy as np
import pytest

from inflight.engine.sequence import Sequence
from inflight.export.plan.full_batch import SPREAD, FullBatch
from inflight.export.plan.gpus import find_gpu
from inflight.export.plan.plan import PlanRequest, Point
from inflight.export.plan.planner import make_plan
from inflight.export.plan.roofline import Roofline, Step, StepTime
from tests.engine.support.books import Books
from tests.export.support.planning import cpu, shape

PROMPT, ANSWER = 60, 24


@dataclass(frozen=True)
class _Machine(Roofline):
    """Steps that take a second, and more for each token of a prompt."""

    token_s: float = 0.0

    def time(self, step: Step) -> StepTime:
        assert step.decodes + step.prefill_tokens > 0, "a step has work"
        return StepTime(1.0, 0.0, self.token_s * step.prefill_tokens, 0.0)


def _machine(token_s: float = 0.0) -> _Machine:
    one = make_plan(shape("llama-3.1-8b"), cpu(), PlanRequest())
    return _Machine((), one.gpu, None, one.efficiency, token_s)  # type: ignore[arg-type]


def _planned(streams: int, step_tokens: int, chunk: int | None, token_s: float = 0.0) -> Point:
    request = PlanRequest(input_tokens=PROMPT, output_tokens=ANSWER)
    return FullBatch(_machine(token_s), request, streams, step_tokens, chunk).measure()


def _scheduled(streams: int, step_tokens: int, chunk: int | None) -> tuple[float, float]:
    """Return the mean steps to the first token, and between tokens, of the real scheduler in a closed loop."""
    books = Books(
        blocks=40 * streams,
        max_batch_size=streams,
        max_tokens_per_step=step_tokens,
        prefill_chunk_tokens=chunk,
        prefix_reuse=False,
    )
    drawn, ended = random.Random(7), 0
    asked, first = dict[int, int](), dict[int, int]()
    waits, gaps = [], []

    def ask(step: int) -> None:
        prompt, answer = (round(mean * drawn.uniform(*SPREAD)) for mean in (PROMPT, ANSWER))
        asked[books.add(prompt, answer).order] = step

    for number in range(streams):
        ask(number)
    gone = list[Sequence]()
    for step in range(1500):
        chunks = books.step()
        for _ in gone:  # they come once the next step has begun
            ask(step - 1)
        for chunk in chunks:
            if chunk.sequence.generated:
                first.setdefault(chunk.sequence.order, step)
        gone = books.ended[ended:]
        ended = len(books.ended)
        if step > 300:
            waits += [first[one.order] - asked[one.order] for one in gone]
            gaps += [(step - first[one.order]) / (one.generated - 1) for one in gone]
    return float(np.mean(waits)), float(np.mean(gaps))


@pytest.mark.parametrize(("streams", "step_tokens", "chunk"), [(8, 64, None), (8, 64, 32), (8, 64, 24), (16, 64, 48)])
def test_waits_and_gaps_are_those_of_the_scheduler(streams: int, step_tokens: int, chunk: int | None) -> None:
    """In steps that take a second, whatever is in them: also where prompts fill them up, so that they wait."""
    point = _planned(streams, step_tokens, chunk)
    waits, gaps = _scheduled(streams, step_tokens, chunk)
    assert point.ttft_ms / 1000 == pytest.approx(waits, rel=0.12)
    assert point.itl_ms / 1000 == pytest.approx(gaps, rel=0.02)


def test_a_batch_obeys_little_s_law_and_prompts_hold_the_others_up() -> None:
    quick, slow = _planned(8, 64, None), _planned(8, 64, None, token_s=0.1)
    for point in (quick, slow):
        asking = point.requests_per_second * (point.ttft_ms + point.itl_ms * (ANSWER - 1)) / 1000
        assert asking == pytest.approx(8, rel=0.03)
    assert slow.itl_ms > 1.3 * quick.itl_ms


def test_a_plan_for_a_cpu_has_it_and_one_for_a_gpu_has_not() -> None:
    config, request = shape("llama-3.1-8b"), PlanRequest(input_tokens=128, output_tokens=16)
    plan = make_plan(config, cpu(), request)
    assert plan.full is not None
    assert plan.unloaded.itl_ms < plan.full.itl_ms
    assert plan == make_plan(config, cpu(), request), "it is no other each time"
    assert make_plan(config, find_gpu("h100"), request).full is None
