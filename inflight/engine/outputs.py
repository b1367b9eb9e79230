"""What a sequence gives out: from what was sampled for it to its tokens and its output."""

from __future__ import annotations

from collections.abc import Sequence as Rows

import numpy as np

from inflight.engine.request import Output
from inflight.engine.sampler import Sampled, no_token
from inflight.engine.sequence import Sequence
from inflight.engine.stats import EngineStats


def advance(sequence: Sequence, sampled: Rows[Sampled], stats: EngineStats) -> Output:
    """Add what a step sampled, up to the sequence's end, to the sequence and to the stats; return the output."""
    output = Output(sequence.request.key, metrics=sequence.metrics)
    for one in sampled:
        if one.token < 0:
            output.error = no_token(one.token)
        else:
            _append(output, sequence, one, stats)
        if output.finished:
            break
    if sequence.context_logits:
        output.context_logits = np.concatenate(sequence.context_logits)
        sequence.context_logits.clear()
    if sequence.stop_text is not None:
        output.text_limit = sequence.stop_text.limit
    return output


def _append(output: Output, sequence: Sequence, sampled: Sampled, stats: EngineStats) -> None:
    before, previous_ns = sequence.generated, sequence.metrics.last_token_ns
    output.finish_reason = sequence.append(sampled.token)
    generated = sequence.generated - before
    stats.count_sampled(sequence.metrics, generated, previous_ns)
    if generated:
        _report(output, sequence, sampled)


def _report(output: Output, sequence: Sequence, sampled: Sampled) -> None:
    """Put a new token, and what was asked about it, into the output."""
    sampling = sequence.request.sampling
    output.tokens.append(sampled.token)
    if sampling.log_probs:
        output.log_probs = [*(output.log_probs or ()), sampled.log_prob]
    if sampling.top_log_probs:
        output.top_log_probs = [*(output.top_log_probs or ()), sampled.top]
    if sampled.logits is not None:
        output.generation_logits = [*(output.generation_logits or ()), sampled.logits]
