"""What the portable engine counts, against numbers worked out by hand; metrics show it."""

from __future__ import annotations

from inflight.contract import ENGINE
from inflight.engine.engine import Engine
from inflight.engine.stats import EngineStats, Histogram
from inflight.errors import EngineFailure
from inflight.metrics import FAMILIES
from tests.engine.support.checkpoints import checkpoint
from tests.engine.support.driving import ask, load, run

PROMPT = [5, 9, 12, 7, 3, 8]


def _engine(**settings: object) -> Engine:
    return load(checkpoint("llama"), **settings)


def test_a_histogram_puts_a_value_on_a_bound_below_it() -> None:
    histogram = Histogram((1.0, 2.0))
    for value in (0.5, 1.0, 1.5, 2.0, 9.0):
        histogram.observe(value)
    assert histogram.cumulative == [2, 4, 5]
    assert (histogram.cumulative[-1], histogram.sum) == (5, 14.0)


def test_tokens_steps_and_times_of_two_requests() -> None:
    """Both prompts in the first step, one token each; then 3 steps for both and 2 for the longer alone."""
    engine = _engine()
    run(engine, [ask(PROMPT, 4, ignore_eos=True), ask(PROMPT[::-1], 6, ignore_eos=True)])
    stats = engine.stats
    assert (stats.prompt_tokens, stats.generated_tokens, stats.steps) == (12, 10, 6)
    assert stats.step_tokens == {"prefill": 12, "decode": 3 * 2 + 2}
    assert stats.step_sequences == 2 + 3 * 2 + 2
    assert stats.step.cumulative[-1] == 6
    assert 0 < sum(stats.step_part.values()) <= stats.step.sum * 1.001
    assert stats.inter_token.cumulative[-1] == 10 - 2
    for one in (stats.request_queue, stats.request_prefill, stats.time_to_first_token, stats.request_decode):
        assert one.cumulative[-1] == 2
    assert abs(stats.request_queue.sum + stats.request_prefill.sum - stats.time_to_first_token.sum) < 1e-6
    assert abs(stats.inter_token.sum - stats.request_decode.sum) < 1e-6
    assert stats.time_to_first_token.sum + stats.request_decode.sum <= stats.request_duration.sum
    assert stats.input_token_len["total_input_tokens"].cumulative == [2] * 6
    assert stats.output_token_len["total_output_tokens"].sum == 10
    assert (stats.preemptions, stats.recomputed_tokens, stats.kv_cache_evictions) == (0, 0, 0)
    assert (stats.state().active, stats.running_requests, stats.waiting_requests) == (0, 0, 0)


def test_a_prompt_in_chunks_is_prefill_to_its_end() -> None:
    engine = _engine(max_tokens_per_step=4)
    run(engine, [ask(PROMPT, 3, ignore_eos=True)])
    assert (engine.stats.step_tokens, engine.stats.steps) == ({"prefill": 6, "decode": 2}, 4)
    assert engine.stats.prompt_tokens == 6


def test_cached_tokens_are_counted_once_at_admission() -> None:
    engine = _engine()
    run(engine, [ask(PROMPT, 2, ignore_eos=True)])
    assert engine.stats.cached_tokens == 0
    [output] = run(engine, [ask(PROMPT, 2, ignore_eos=True)]).values()
    assert output.metrics is not None
    assert engine.stats.cached_tokens == output.metrics.cached_tokens == 4, "one full block"
    assert engine.stats.prompt_tokens == 12
    assert engine.stats.step_tokens["prefill"] == 6 + 2


def test_prompt_tokens_written_to_the_prefix_cache_are_whole_blocks_that_are_new() -> None:
    engine = _engine()

    def counted(prompt: list[int], max_tokens: int = 2) -> tuple[int, int | None]:
        [output] = run(engine, [ask(prompt, max_tokens, ignore_eos=True)]).values()
        assert output.metrics is not None
        return output.metrics.cached_tokens, output.metrics.written_tokens

    assert counted(PROMPT) == (0, 4)
    assert counted(PROMPT) == (4, 0)
    assert counted(PROMPT, 12) == (4, 0), "the blocks of the answer are no prompt's"
    assert counted([*PROMPT, 1, 2, 3]) == (6, 2), "two tokens of the second block come from another one"
    both = run(engine, [ask([1, *PROMPT], 2, ignore_eos=True), ask([1, *PROMPT], 2, ignore_eos=True)]).values()
    assert sum(one.metrics.written_tokens or 0 for one in both if one.metrics) == 4, (
        "one block, which both have computed"
    )
    without = _engine(prefix_reuse=False)
    [output] = run(without, [ask(PROMPT, 2, ignore_eos=True)]).values()
    assert output.metrics is not None
    assert output.metrics.written_tokens == 0


def test_a_preemption_and_what_is_computed_again() -> None:
    """8 blocks of 2 for two sequences of 4 + 8 tokens: the later one gives way once, and is computed again."""
    engine = _engine(block_size=2, num_blocks=8, policy="max_utilization", prefix_reuse=False)
    first, second = ask([5, 9, 12, 7], 8, ignore_eos=True), ask([8, 3, 6, 4], 8, ignore_eos=True)
    outputs = run(engine, [first, second])
    metrics = outputs[second.key].metrics
    assert metrics is not None
    stats = engine.stats
    assert (stats.preemptions, metrics.preemptions) == (1, 1)
    # Both hold 4 blocks, full, after 8 tokens: 4 of the prompt and 4 generated; the fifth is sampled, not yet computed.
    assert stats.recomputed_tokens == 8
    assert stats.step_tokens == {"prefill": 4 + 4 + 9, "decode": 7 + 6}, "the fifth comes with the eight"
    assert stats.generated_tokens == 16
    assert stats.prompt_tokens == 8, "a sequence that comes back is not admitted anew"
    assert stats.request_queue.cumulative[-1] == 2
    assert stats.inter_token.cumulative[-1] == 14, "the wait for its blocks is a wait for its next token"


def test_evictions() -> None:
    """5 blocks of 2: the first leaves 4 cached and 1 free; the second, which shares nothing, needs 3."""
    engine = _engine(block_size=2, num_blocks=5)
    run(engine, [ask([5, 9, 12, 7, 3, 8, 2], 2, ignore_eos=True)])
    assert (engine.stats.kv_cache_evictions, engine.stats.state().kv_blocks_cached) == (0, 4)
    run(engine, [ask([30, 31, 32, 33], 2, ignore_eos=True)])
    assert engine.stats.kv_cache_evictions == 2


def test_every_end_is_in_the_duration_and_only_what_ran_elsewhere() -> None:
    engine = _engine(max_batch_size=1)
    running, waiting = ask(PROMPT, 50, ignore_eos=True), ask(PROMPT, 50)
    for request in (running, waiting):
        engine.submit(request)
    engine.step()
    stats = engine.stats
    assert (stats.running_requests, stats.waiting_requests) == (1, 1)
    engine.cancel(waiting.key)
    assert [output.key for output in engine.step() if output.finished] == [waiting.key]
    before = stats.generated_tokens
    assert all(output.metrics is not None for output in engine.fail_all(EngineFailure("told to")))
    assert stats.request_duration.cumulative[-1] == 2
    assert (
        stats.request_queue.cumulative[-1],
        stats.time_to_first_token.cumulative[-1],
        stats.request_decode.cumulative[-1],
    ) == (1, 1, 1)
    assert (stats.prompt_tokens, stats.generated_tokens) == (6, before)


def test_what_is_promised_and_not_taken_is_counted_until_the_end() -> None:
    engine = _engine(block_size=2, num_blocks=8)
    engine.submit(ask([5, 9, 12], 9, ignore_eos=True))
    engine.step()
    # 12 tokens are six blocks; the prompt takes two.
    assert (engine.stats.state().kv_blocks_used, engine.stats.kv_cache_reserved_blocks) == (2, 4)
    while engine.stats.state().active:
        engine.step()
    assert (engine.stats.state().kv_blocks_used, engine.stats.kv_cache_reserved_blocks) == (0, 0)


def test_counters_outlive_a_failure() -> None:
    engine = _engine(block_size=2, num_blocks=5)
    for prompt in ([5, 9, 12, 7, 3, 8, 2], [30, 31, 32, 33]):
        run(engine, [ask(prompt, 2, ignore_eos=True)])
    engine.fail_all(EngineFailure("told to"))
    assert engine.stats.kv_cache_evictions == 2


def test_an_end_at_once_has_a_first_token_and_generates_none() -> None:
    engine = _engine()
    [first] = run(engine, [ask(PROMPT, 1, ignore_eos=True)]).values()
    run(engine, [ask(PROMPT, 5, end_ids=frozenset(first.tokens))])
    assert engine.stats.generated_tokens == 1
    assert engine.stats.time_to_first_token.cumulative[-1] == 2
    assert engine.stats.inter_token.cumulative[-1] == 0


def test_the_warm_up_is_not_counted() -> None:
    engine = _engine()
    engine.warm_up()
    stats = engine.stats
    assert (stats.steps, stats.prompt_tokens, stats.generated_tokens, stats.request_duration.cumulative[-1]) == (
        0,
        0,
        0,
        0,
    )
    assert set(stats.start_phases) == {"weights", "kv_cache", "warm_up"}
    assert min(stats.start_phases.values()) > 0
    run(engine, [ask(PROMPT, 2, ignore_eos=True)])
    assert stats.steps == 2


def test_the_process_has_memory() -> None:
    memory = _engine().stats.runtime_memory_metrics
    assert memory["cpu"] > 10 * 2**20
    assert (memory["gpu"], memory["pinned"]) == (0, 0)


def test_bounds_are_those_of_the_table() -> None:
    stats = EngineStats()
    for family in FAMILIES.values():
        if family.kind == "histogram" and family.stages == (ENGINE,):
            value = getattr(stats, family.source.removeprefix("engine."))
            for histogram in value.values() if family.labels else [value]:
                assert histogram.bounds == family.buckets, family.name


def test_reuse_counts_whatever_the_end() -> None:
    engine = _engine(block_size=2)
    run(engine, [ask(PROMPT, 2, ignore_eos=True)])
    assert engine.stats.kv_blocks_reused == 0
    engine.submit(ask(PROMPT, 9, ignore_eos=True))
    engine.step()
    [output] = engine.fail_all(EngineFailure("told to"))[-1:]
    assert output.metrics is not None
    assert engine.stats.kv_blocks_reused == output.metrics.reused_blocks > 0
