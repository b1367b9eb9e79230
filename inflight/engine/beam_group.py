"""The sequences of one beam search: one for each live beam, sharing blocks until one of them is written into.

The prompt is computed once, by the leader; then every live beam is a sequence of its own, which runs, waits and counts
as any other. The search takes a step when all of them have their candidates, in however many steps of the engine.
Preempted, they go together, and come back as the leader with the prompt, which forks again.
"""

from __future__ import annotations

import time

import numpy as np

from inflight.engine.beam import BeamSearch, Candidates, num_enders
from inflight.engine.config import EngineConfig
from inflight.engine.kv.blocks import BlockTable
from inflight.engine.kv.forking import ForkingKvCache
from inflight.engine.request import FinishReason, Output, Request
from inflight.engine.sampler import Sampled, no_token
from inflight.engine.sequence import Sequence, longest
from inflight.engine.stats import EngineStats
from inflight.errors import InvalidRequest, UnsupportedFeature
from inflight.sampling import SamplingParams


class BeamGroup:
    """One request's search and its sequences."""

    def __init__(self, leader: Sequence) -> None:
        """
        Args:
            leader: the request's sequence, which holds its metrics; its prompt must be shorter than its limit.
        """
        request = leader.request
        self._longest = leader.longest
        self._candidates: dict[Sequence, Candidates] = {}
        self.search = BeamSearch(request.sampling, self._longest - len(request.prompt))
        self.leader = leader
        self.members = [leader]
        """Those that run: the leader until it forks, then one for each live beam, in their order."""
        self.stale = False
        """Whether the members are to fork: other beams live than they are."""

    @property
    def forked(self) -> bool:
        """Whether the live beams have their sequences."""
        return len(self.members) > 1

    @property
    def places(self) -> int:
        """Places in the batch that each member takes: the leader takes those of all until it forks."""
        return 1 if self.forked else self.search.width

    def blocks_needed(self, block_size: int) -> int:
        """Return the blocks that all members together may hold at most."""
        return blocks_needed(self.leader.request, self._longest, block_size)

    def advance(self, member: Sequence, sampled: Sampled, stats: EngineStats) -> Output | None:
        """Take what a member that is computed can go on with; return the last output if it ends the search.

        Where it lets the search go on, ``stale`` is true: the live beams are others than the members.
        """
        if sampled.token < 0:
            return Output(self.leader.request.key, error=no_token(sampled.token))
        self.stale = self.search.started and not self.forked  # it has come back after a preemption
        if self.stale:
            return None
        self._candidates[member] = sampled.candidates
        if len(self._candidates) < len(self.members):
            return None
        self.search.advance([self._candidates[one] for one in self.members])
        self._candidates.clear()
        self._note_step(stats)
        self.stale = not self.search.done
        return None if self.stale else Output(self.leader.request.key, finish_reason=FinishReason.LENGTH)

    def fork(self, cache: ForkingKvCache, reserve: bool) -> list[Sequence]:
        """Give every live beam the blocks of the one that it continues; return the members that are new.

        Args:
            cache: theirs.
            reserve: whether to reserve the blocks that the members may still need.
        """
        held = {member: member.table for member in self.members}
        parents = [self.members[beam.parent if self.forked else 0] for beam in self.search.live]
        heirs: list[tuple[BlockTable, list[int], int]] = []
        free = dict(held)
        for parent in parents:
            table, tokens = held[parent], parent.tokens
            assert table is not None
            if not free.pop(parent, None):  # another one goes on with the parent's own
                table, tokens = cache.fork(table, parent.computed), list(tokens)
            heirs.append((table, tokens, parent.computed))
        for table in free.values():
            assert table is not None
            self.leader.metrics.new_blocks += table.new_blocks
            cache.close(table)
        new = [self._new_member() for _ in range(len(heirs) - len(self.members))]
        self.members += new
        prompt = len(self.leader.request.prompt)
        for member, beam, (table, tokens, computed) in zip(self.members, self.search.live, heirs, strict=True):
            tokens += [one.token for one in beam.last(prompt + beam.length - len(tokens))]
            member.table, member.tokens, member.computed = table, tokens, computed
            if reserve:  # one more: a shared block may have to be copied
                cache.reserve(table, cache.blocks_for(self._longest) - len(table.blocks) + 1)
        self.stale = False
        return new

    def collapse(self) -> None:
        """Go back to the leader and the prompt; all members have given their blocks back. The search goes on later."""
        self._candidates.clear()
        self.members = [self.leader]
        self.leader.tokens = list(self.leader.request.prompt)

    def finish(self, output: Output, stats: EngineStats) -> None:
        """Put the beams into the request's last output, if it is not an error; they are as good as they are by then."""
        if output.finish_reason is None:
            return
        output.beams = self.search.results(output.finish_reason)
        if self.search.done:
            output.finish_reason = output.beams[0].finish_reason
        leader = self.leader
        leader.metrics.generated_tokens = output.num_tokens
        stats.generated_tokens += output.num_tokens
        if leader.context_logits and self.search.started:
            output.context_logits = np.concatenate(leader.context_logits)

    def _new_member(self) -> Sequence:
        leader = self.leader
        member = Sequence(leader.request, leader.order, leader.seed, leader.max_length, None)
        member.group, member.rank, member.counted = self, leader.rank, True
        member.computed_before = leader.computed_before
        return member

    def _note_step(self, stats: EngineStats) -> None:
        metrics = self.leader.metrics
        previous_ns, metrics.last_token_ns = metrics.last_token_ns, time.time_ns()
        if not previous_ns:
            metrics.first_token_ns, metrics.prefill_steps = metrics.last_token_ns, metrics.steps
        metrics.generated_tokens = max((beam.length for beam in self.search.live), default=0)
        stats.count_sampled(metrics, 0, previous_ns)  # which of the tokens are given out is known at the end


def check_beams(request: Request, config: EngineConfig, vocab_size: int, max_length: int) -> None:
    """Check that a beam search can be done as it is asked for, and that it fits into the engine.

    Args:
        request: to check; one without a search passes.
        config: of the engine.
        vocab_size: of the model.
        max_length: tokens of prompt and output together.

    Raises:
        UnsupportedFeature: naming what does not go with it.
        InvalidRequest: naming the limit that it does not fit into.
    """
    sampling = request.sampling
    if sampling.beam_width == 1:
        return
    for name, asked in _unserved(sampling).items():
        if asked:
            raise UnsupportedFeature(f"{name} is not supported with beam_width above 1")
    vocabulary = vocab_size - num_enders(sampling)
    limit = min(config.max_batch_size, vocabulary)
    if sampling.beam_width > limit:
        raise InvalidRequest(f"beam_width is {sampling.beam_width}; it must be at most {limit}")
    needed = blocks_needed(request, longest(request, max_length), config.block_size)
    if needed > config.num_blocks:
        raise InvalidRequest(
            f"beam_width is {sampling.beam_width}; so many beams of {longest(request, max_length)} tokens may need "
            f"{needed} blocks of the KV cache, which has {config.num_blocks}"
        )


def _unserved(sampling: SamplingParams) -> dict[str, bool]:
    """Return what does not go with a search, by tensor, with whether it is asked for."""
    return {
        "sampling (temperature, top_k, top_p, min_p, seed)": not sampling.greedy,
        "stop_strings (the ensemble's stop_words)": bool(sampling.stop_strings),
        "num_top_log_probs": sampling.top_log_probs > 0,
        "return_generation_logits": sampling.generation_logits,
    }


def blocks_needed(request: Request, length: int, block_size: int) -> int:
    """Return the blocks that a search may hold at most: full ones of the prompt once, all others once per beam.

    One more per beam is for the copy of a block that several are about to write into.

    Args:
        request: that is to be searched for.
        length: tokens of prompt and output together, at most.
        block_size: tokens per block.
    """
    shared = len(request.prompt) // block_size
    return shared + request.sampling.beam_width * (-(-length // block_size) - shared + 1)
