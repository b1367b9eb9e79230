"""The rate of responses, on a clock of its own; and the counter that two processes share."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from inflight.shared_counters import SharedCounter
from inflight.triton.send_limiter import MOST_UNANSWERED, RESPONSES_PER_SECOND, SendLimiter, responses_per_second

SLOT = 1 / RESPONSES_PER_SECOND


class Detokenizer:
    """Answers a response at a time, each in so many seconds; what it is sent meanwhile waits."""

    def __init__(self, seconds: float) -> None:
        self.seconds, self.now, self.free_at, self.ends = seconds, 0.0, 0.0, list[float]()

    def take(self) -> None:
        self.free_at = max(self.now, self.free_at) + self.seconds
        self.ends.append(self.free_at)

    @property
    def count(self) -> int:
        return sum(end <= self.now for end in self.ends)


def _run(seconds: float, detokenizer: Detokenizer, lost: int = 0) -> int:
    """Send whenever the limiter allows; return how many left. ``lost`` are sent first, and never answered."""
    limiter = SendLimiter(detokenizer)
    for _ in range(lost):
        limiter.sent()
    left = 0
    while detokenizer.now < seconds:
        if limiter.may_send(detokenizer.now):
            limiter.reserve(0, 1, detokenizer.now, streams=1)
            limiter.sent()
            detokenizer.take()
            left += 1
        detokenizer.now += SLOT / 4
    return left


def test_a_quick_detokenizer_gets_all_slots() -> None:
    assert _run(2.0, Detokenizer(SLOT / 10)) == pytest.approx(2 / SLOT, rel=0.05)


@pytest.mark.parametrize("slower", [2, 5])
def test_a_slow_one_gets_what_it_answers_and_few_wait_before_it(slower: int) -> None:
    detokenizer = Detokenizer(SLOT * slower)
    left = _run(2.0, detokenizer)
    assert left == pytest.approx(2 / SLOT / slower, rel=0.05)
    assert left - detokenizer.count <= MOST_UNANSWERED


def test_lost_responses_hold_the_others_back_for_a_moment_only() -> None:
    everything = _run(2.0, Detokenizer(SLOT / 10))
    assert 0.9 * everything < _run(2.0, Detokenizer(SLOT / 10), lost=50) < everything


def test_those_that_never_wait_push_the_others_back_by_a_bound() -> None:
    limiter = SendLimiter(Detokenizer(SLOT))
    limiter.reserve(1000, 0, 5.0, streams=1)
    assert not limiter.may_send(5.0)
    assert limiter.may_send(5.01)


@pytest.mark.parametrize(("cores", "most"), [(1, 600), (2, 1200), (4, 2400), (64, 2400)])
def test_few_streams_get_the_full_rate_on_any_machine(cores: int, most: int) -> None:
    assert [responses_per_second(streams, cores) for streams in range(9)] == [most] * 9


def test_many_streams_leave_the_cores_to_the_engine() -> None:
    on_two = [responses_per_second(streams, cores=2) for streams in (8, 16, 32, 64, 128)]
    assert on_two == pytest.approx([1200, 600, 300, 600, 1200], rel=0.01)
    on_sixteen = [responses_per_second(streams, cores=16) for streams in (8, 16, 32, 64, 128)]
    assert on_sixteen == [2400] * 5, "cores to spare are used"


@pytest.mark.parametrize("cores", [1, 2, 4, 8])
def test_a_stream_never_waits_for_longer_than_the_full_rate_needs_or_a_reader_notices(cores: int) -> None:
    for streams in range(1, 300):
        waits_s = streams / responses_per_second(streams, cores)
        assert waits_s <= max(0.11, streams / responses_per_second(1, cores))


def test_with_many_streams_the_next_response_leaves_later() -> None:
    limiter = SendLimiter(Detokenizer(SLOT))
    limiter.reserve(0, 1, 5.0, streams=32)
    wait_s = 1 / responses_per_second(32)
    assert not limiter.may_send(5.0 + 0.99 * wait_s)
    assert limiter.may_send(5.0 + 1.01 * wait_s)


def test_those_that_never_wait_leave_room_for_those_that_can() -> None:
    """Urgent responses at half of the full rate, and 32 streams: what can wait still leaves, now and then."""
    limiter, now, left = SendLimiter(Detokenizer(SLOT / 10)), 5.0, 0
    for _ in range(1000):
        now += 2 * SLOT
        waited = int(limiter.may_send(now))
        limiter.reserve(1, waited, now, streams=32)
        left += waited
    assert left > 100


def test_a_shared_counter_is_counted_in_one_process_and_read_in_another() -> None:
    ours = SharedCounter.create("test")
    count = f"""
import os
os.getppid = lambda: {os.getppid()}  # as if both were stages of one server
from inflight.shared_counters import SharedCounter
theirs = SharedCounter.open("test")
for _ in range(1000):
    theirs.add()
"""
    subprocess.run([sys.executable, "-c", count], check=True)
    assert ours.count == 1000
    assert SharedCounter.open("test") is None, "its name goes with the first who opens it"


def test_a_shared_counter_is_created_anew_and_its_name_can_be_removed() -> None:
    old = SharedCounter.create("test")
    old.add()
    new = SharedCounter.create("test")
    assert new.count == 0
    new.remove_name()
    assert SharedCounter.open("test") is None
    assert old.count == 1
