"""Every figure against records whose figures are known, worked out by hand."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from inflight.load.measurements import Arrival, Distribution, RequestRecord, measure
from inflight.load.report import FEW_SAMPLES, few_samples
from inflight.load.scenario import Slo

ONE = RequestRecord(
    session=0,
    turn=0,
    class_name="a",
    sent_s=1.0,
    ended_s=2.0,
    outcome="completed",
    arrivals=(Arrival(1.2, 1), Arrival(1.5, 3), Arrival(1.6, 0), Arrival(2.0, 4)),
    input_tokens=10,
    output_tokens=8,
    cached_tokens=4,
    queue_s=0.05,
    finish_reason="length",
)
"""Sent at 1.0; text at 1.2, 1.5, 1.6 and 2.0 with 1, 3, no and 4 tokens."""
WINDOW = (1.0, 3.0)


def test_one_request_by_hand() -> None:
    assert ONE.ttft_s == pytest.approx(0.2)
    assert ONE.e2e_s == pytest.approx(1.0)
    assert ONE.gaps_s == pytest.approx([0.3, 0.1, 0.4])
    assert ONE.itl_s == pytest.approx([0.1, 0.1, 0.1, 0.1, 0.1, 0.1, 0.1, 0.1])
    assert sum(ONE.itl_s) == pytest.approx(0.8), "from first to last text"
    assert ONE.mean_itl_s == pytest.approx(0.1)


def test_a_token_in_the_first_response_has_no_gap() -> None:
    single = replace(ONE, arrivals=(Arrival(1.2, 5),))
    assert single.itl_s == []
    assert single.mean_itl_s is None


def test_latency_counts_from_the_scheduled_time() -> None:
    late = replace(ONE, scheduled_s=0.7)
    assert late.ttft_s == pytest.approx(0.5)
    assert late.e2e_s == pytest.approx(1.3)
    figures = measure([late], (0.0, 3.0), {})
    assert figures.send_delay_ms is not None
    assert figures.send_delay_ms.max == pytest.approx(300)
    assert measure([ONE], WINDOW, {}).send_delay_ms is None, "a closed loop has no schedule"


def test_percentiles_interpolate_linearly() -> None:
    hundred = Distribution.of([float(value) for value in range(1, 102)])
    assert hundred == Distribution(count=101, mean=51, p50=51, p90=91, p95=96, p99=100, max=101)
    assert Distribution.of([0.0, 1.0], 1000) == Distribution(
        2, 500, 500, pytest.approx(900), pytest.approx(950), pytest.approx(990), 1000
    )
    assert Distribution.of([]) is None


def test_a_p99_of_few_samples_has_a_warning() -> None:
    few, many = Distribution.of([1.0] * (FEW_SAMPLES - 1)), Distribution.of([1.0] * FEW_SAMPLES)
    warning = few_samples({"TTFT": few, "ITL": many, "queue": None})
    assert warning == "p99 of fewer than 100 samples is about the largest of them: TTFT has 99"
    assert not few_samples({"ITL": many, "queue": None})


def test_figures_of_a_window() -> None:
    figures = measure([ONE, replace(ONE, session=1, queue_s=0.15)], WINDOW, {"a": Slo()})
    assert figures.requests == 2
    assert figures.requests_per_second == 1.0
    assert figures.output_tokens_per_second == 8.0
    assert figures.input_tokens_per_second == 10.0
    assert figures.total_tokens_per_second == 18.0
    assert figures.cached_share == 0.4
    assert figures.goodput is None
    assert figures.queue_ms is not None
    assert figures.queue_ms.mean == pytest.approx(100)
    assert figures.itl_ms is not None
    assert (figures.itl_ms.count, figures.itl_ms.p50) == (16, pytest.approx(100))
    assert figures.gap_ms is not None
    assert (figures.gap_ms.count, figures.gap_ms.p50) == (6, pytest.approx(300))


def test_tokens_of_a_request_on_the_edge_are_counted_by_their_arrival() -> None:
    begins = measure([ONE], (1.3, 3.3), {})  # started before it: its later tokens count, its latencies do not
    assert begins.output_tokens_per_second == pytest.approx(7 / 2)
    assert begins.input_tokens_per_second == 0
    assert begins.requests == 0
    assert begins.requests_per_second == pytest.approx(0.5)
    assert begins.ttft_ms is None
    ends = measure([ONE], (0.0, 1.55), {})  # ends after it: its latencies count whole, its later tokens do not
    assert ends.output_tokens_per_second == pytest.approx(4 / 1.55)
    assert ends.requests_per_second == 0
    assert ends.e2e_ms is not None
    assert ends.e2e_ms.max == pytest.approx(1000)


def test_the_end_of_a_window_is_not_in_it() -> None:
    assert measure([ONE], (0.0, 1.0), {}).requests == 0
    assert measure([ONE], (1.0, 2.0), {}).output_tokens_per_second == 4


def test_tokens_without_text_count_when_the_request_ends() -> None:
    assert measure([replace(ONE, output_tokens=9)], WINDOW, {}).output_tokens_per_second == 9 / 2


def test_only_completed_requests_have_latencies() -> None:
    records = [
        ONE,
        replace(ONE, outcome="cancelled", arrivals=ONE.arrivals[:1], output_tokens=1),
        replace(ONE, outcome="refused", arrivals=(), output_tokens=0, error="queue_full: too many: 9"),
        replace(ONE, outcome="failed", arrivals=(), output_tokens=0, error="internal: broken"),
        replace(ONE, outcome="failed", arrivals=(), output_tokens=0, error="internal: broken too"),
    ]
    figures = measure(records, WINDOW, {"a": Slo(ttft_ms=1000)})
    assert figures.outcomes == {"completed": 1, "cancelled": 1, "refused": 1, "failed": 2}
    assert figures.errors == {"queue_full": 1, "internal": 2}
    assert figures.ttft_ms is not None
    assert figures.ttft_ms.count == 1
    assert figures.output_tokens_per_second == 9 / 2, "what a cancelled request got was generated too"
    assert figures.goodput == 0.5
    assert figures.slo_attainment == 1 / 4, "a cancelled request is the client's own doing; an error is not"


@pytest.mark.parametrize(
    ("slo", "good"),
    [
        (Slo(ttft_ms=201, itl_ms=101, e2e_ms=1001), True),
        (Slo(ttft_ms=199), False),
        (Slo(itl_ms=99), False),
        (Slo(e2e_ms=999), False),
    ],
    ids=str,
)
def test_goodput(slo: Slo, good: bool) -> None:
    assert measure([ONE], WINDOW, {"a": slo}).goodput == good / 2
    mixed = measure([ONE, replace(ONE, class_name="b")], WINDOW, {"a": slo, "b": Slo()})
    assert mixed.goodput == (good + 1) / 2, "a class without limits only has to complete"


def test_records_survive_a_file() -> None:
    assert RequestRecord.from_json(json.loads(json.dumps(ONE.as_json()))) == ONE


def test_an_answer_without_text_has_kept_no_limit_of_the_first_text() -> None:
    silent = replace(ONE, arrivals=(), output_tokens=50)
    assert measure([silent], WINDOW, {"a": Slo(ttft_ms=5000)}).slo_attainment == 0
    assert measure([silent], WINDOW, {"a": Slo(itl_ms=1, e2e_ms=1001)}).slo_attainment == 1, "it has no ITL"


@pytest.mark.parametrize(
    ("slo", "judged"),
    [(Slo(ttft_ms=199), 1), (Slo(e2e_ms=999), 1), (Slo(itl_ms=99), 1), (Slo(ttft_ms=201, itl_ms=101), 0), (Slo(), 0)],
    ids=str,
)
def test_who_leaves_after_a_limit_has_passed_counts(slo: Slo, judged: int) -> None:
    left = replace(ONE, outcome="cancelled", finish_reason=None)
    figures = measure([left, replace(ONE, class_name="b")], WINDOW, {"a": slo, "b": Slo(e2e_ms=1001)})
    assert figures.judged == 1 + judged
    assert figures.slo_attainment == 1 / (1 + judged)


def test_clients_that_leave_do_not_hide_a_stuck_server() -> None:
    stuck = replace(ONE, outcome="cancelled", arrivals=(), output_tokens=0)
    assert measure([ONE, stuck], WINDOW, {"a": Slo(ttft_ms=500)}).slo_attainment == 0.5
    assert measure([ONE, stuck], WINDOW, {"a": Slo(ttft_ms=1001)}).slo_attainment == 1, "its limit had not passed"
