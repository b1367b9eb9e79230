"""One request's beam search while the engine runs it: which live beam each of its sequences is.

The prompt is computed once, by the leader; then every live beam is a sequence of its own, which runs, waits and counts
as any other, and shares blocks with the others until one of them is written into. The search takes a step when all of
them have their candidates, in however many steps of the engine. Preempted, they go together, and come back as the
leader with the prompt, which forks again.
"""

from __future__ import annotations

from inflight.engine.beam_search.search import BeamSearch, Candidates, num_enders
from inflight.engine.config import EngineConfig
from inflight.engine.kvcache.blocks import BlockTable
from inflight.engine.kvcache.manager import KvCacheManager
from inflight.engine.request import FinishReason, Output, Request, longest
from inflight.engine.scheduler import max_blocks
from inflight.engine.sequence import Sampled, Sequence
from inflight.engine.stats import EngineStats
from inflight.errors import InvalidRequest, UnsupportedFeature


class BeamGroup:
    """One request's search and its sequences."""

    def __init__(self, leader: Sequence) -> None:
        """``leader``: the request's sequence, which holds its metrics; its prompt must be shorter than its limit."""
        self._leader = leader
        self._candidates: dict[Sequence, Candidates] = {}
        self._search = BeamSearch(leader.request.sampling, leader.longest - len(leader.request.prompt))
        self.must_fork = False
        """Whether the sequences are to fork: other beams live than they are."""

    def advance(self, member: Sequence, sampled: Sampled, stats: EngineStats) -> Output | None:
        """Take what a member that is computed can go on with; return the last output if it ends the search.

        Where it lets the search go on, ``must_fork`` is true.
        """
        leader = self._leader
        if (error := sampled.error) is not None:
            return Output(leader.request.key, error=error)
        self.must_fork = self._search.started and not leader.forks  # it has come back after a preemption
        if self.must_fork:
            self._candidates.clear()
            return None
        self._candidates[member] = sampled.candidates
        members = leader.members
        if len(self._candidates) < len(members):
            return None
        self._search.advance([self._candidates[one] for one in members])
        self._candidates.clear()
        previous_ns = leader.stamp()
        leader.count_generated(max((beam.length for beam in self._search.live), default=0))
        stats.count_sampled(leader.metrics, 0, previous_ns)  # which of the tokens are given out is known at the end
        self.must_fork = not self._search.done
        return None if self.must_fork else Output(leader.request.key, finish_reason=FinishReason.LENGTH)

    def fork(self, cache: KvCacheManager, reserve: bool) -> list[Sequence]:
        """Give every live beam the blocks of the one that it continues; return the members that are new.

        ``reserve``: whether to reserve the blocks that the members may still need.
        """
        leader, members = self._leader, self._leader.members
        parents = [members[beam.parent if leader.forks else 0] for beam in self._search.live]
        unclaimed = {member: member.table for member in members}
        heirs: list[tuple[BlockTable, list[int]]] = []
        for parent in parents:
            assert parent.table is not None
            if unclaimed.pop(parent, None):
                heirs.append((parent.table, parent.tokens))
            else:  # another beam goes on with the parent's own blocks
                heirs.append((cache.fork(parent.table), parent.tokens.copy()))
        for table in unclaimed.values():
            assert table is not None
            leader.count_blocks(table)
            cache.free(table)
        new = [leader.fork() for _ in range(len(heirs) - len(members))]
        prompt = len(leader.request.prompt)
        for member, beam, (table, tokens) in zip(leader.members, self._search.live, heirs, strict=True):
            tokens += [one.token for one in beam.last(prompt + beam.length - len(tokens))]
            member.continue_as(table, tokens)
            if reserve:  # one more: a shared block may have to be copied
                cache.reserve(table, cache.blocks_for(leader.longest) - len(table.blocks) + 1)
        self.must_fork = False
        return new

    def finish(self, output: Output, stats: EngineStats) -> None:
        """Put the beams into the request's last output, if it is not an error; they are as good as they are by then."""
        if output.finish_reason is None:
            return
        leader = self._leader
        output.beams = self._search.results(output.finish_reason)
        if self._search.done:
            output.finish_reason = output.beams[0].finish_reason
        leader.count_generated(output.num_tokens)
        stats.generated_tokens += output.num_tokens
        if self._search.started:
            leader.prompt_record.fill(output)


def check_beams(request: Request, config: EngineConfig, vocab_size: int, max_length: int) -> None:
    """Check that a beam search can be done as it is asked for, and that it fits into the engine.

    A request without a search passes. ``max_length``: tokens of prompt and output together.

    Raises:
        UnsupportedFeature: naming what does not go with it.
        InvalidRequest: naming the limit that it does not fit into.
    """
    sampling = request.sampling
    if sampling.beam_width == 1:
        return
    unserved = {
        "sampling (temperature, top_k, top_p, min_p, seed)": not sampling.greedy,
        "stop_strings (the ensemble's stop_words)": bool(sampling.stop_strings),
        "num_top_log_probs": sampling.top_log_probs > 0,
        "log_prob_token_ids": bool(sampling.log_prob_ids),
        "return_generation_logits": sampling.generation_logits,
    }
    for name, asked in unserved.items():
        if asked:
            raise UnsupportedFeature(f"{name} is not supported with beam_width above 1")
    vocabulary = vocab_size - num_enders(sampling)
    limit = min(config.max_batch_size, vocabulary)
    if sampling.beam_width > limit:
        raise InvalidRequest(f"beam_width is {sampling.beam_width}; it must be at most {limit}")
    length = longest(request, max_length)
    needed = max_blocks(request, length, config.block_size)
    if needed > config.num_blocks:
        raise InvalidRequest(
            f"beam_width is {sampling.beam_width}; so many beams of {length} tokens may need "
            f"{needed} blocks of the KV cache, which has {config.num_blocks}"
        )
