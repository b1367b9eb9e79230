"""A small model with the same vocabulary drafts for the large one (arXiv:2211.17192).

It has a runner and a KV cache of its own, and there a twin of each sequence: a sequence with the same tokens and the
same request, so that it follows penalties, temperature and seed as the target does. A twin's new tokens are computed
only when it is to draft, from the prefix cache where possible; a sequence without drafts costs the draft model nothing.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import NamedTuple

from torch import Tensor

from inflight.engine.checkpoint import load_config
from inflight.engine.chunk import Chunk
from inflight.engine.config import EngineConfig
from inflight.engine.kvcache.blocks import BlockTable
from inflight.engine.kvcache.manager import KvCacheManager
from inflight.engine.model_runner import ModelRunner
from inflight.engine.sampler import PendingSample, needs_tokens
from inflight.engine.sequence import Continuation, Sequence
from inflight.engine.transfer import ToHost
from inflight.errors import DeploymentError
from inflight.settings.speculation import SpeculationSettings

_FEW_TOKENS = 8
"""One pass computes so many at hardly more than the cost of one; after a few steps a twin lacks no more."""


class DraftModel:
    """Drafts by decoding, greedy or by the sequence's own random numbers (see ``verification``)."""

    def __init__(self, config: EngineConfig, target: ModelRunner) -> None:
        """``config`` and ``target`` belong to the model that is drafted for; the draft's KV cache has as many blocks.

        Raises:
            DeploymentError: the checkpoint cannot be used, there is no memory for it, or its vocabulary is another.
        """
        checkpoint = config.speculation.draft_model
        assert checkpoint is not None
        settings = dataclasses.replace(
            config, model=checkpoint, max_sequence_length=None, num_blocks=target.config.num_blocks,
            kv_cache_bytes=None, kv_cache_fraction=None, kv_cache_dtype="auto", offload_to="none",
            speculation=SpeculationSettings(), weights="checkpoint",
        )  # fmt: skip
        if load_config(checkpoint, config.modeling).recurrent:
            raise DeploymentError(
                f"speculation.draft_model: {checkpoint} has recurrent layers, whose states cannot go back to before "
                "drafts that are refused; choose a model without"
            )
        self._config, self._candidates = settings, min(config.speculation.candidates, target.vocab_size)
        try:
            self._runner = ModelRunner(settings)
        except DeploymentError as error:
            raise DeploymentError(f"speculation.draft_model: {error}") from None
        if self._runner.vocab_size != target.vocab_size:
            raise DeploymentError(
                f"speculation.draft_model: {checkpoint} has a vocabulary of {self._runner.vocab_size} tokens, "
                f"the model one of {target.vocab_size}; they must be the same"
            )
        self._runner.warm_up()
        self.reset()

    def prepare(self, wanted: Mapping[Sequence, int]) -> None:
        """Compute the tokens that the twins lack, at most as many as a step of the target may have."""
        for sequence in [one for one in self._twins if one.table is None]:
            self.forget(sequence)  # it was preempted: other twins may need the blocks of its twin
        for sequence in wanted:
            if len(sequence.tokens) < self._runner.max_length:
                self._sync(sequence)
        room, chunks = self._config.max_tokens_per_step, []
        for sequence, table in ((one.sequence, one.table) for one in map(self._twins.get, wanted) if one is not None):
            size = min(sequence.remaining - 1, room)
            # A few tokens are computed in the first pass of drafting instead, at no more cost.
            if size > _FEW_TOKENS and self._cache.grow(table, sequence.computed + size):
                chunks.append(Chunk(sequence, sequence.computed, size))
                room -= size
        if chunks:
            self._run(chunks)

    def draft(self, wanted: Mapping[Sequence, int]) -> dict[Sequence, list[list[int]]]:
        """Decode with the twins, each for as many steps as tokens are wanted.

        A pass takes the tokens of the one before it from the device, and the host waits once for all of them, unless
        sampling depends on earlier tokens (``needs_tokens``). The first guess has the decoded tokens; each of the
        others ends in another likely token at one of its positions.
        """
        others: dict[Sequence, list[list[int]]] = {one: [] for one in wanted if one in self._twins}
        active, passes = list(others), list[_Pass]()
        for depth in range(max(wanted.values())):
            active = [one for one in active if wanted[one] > depth and self._can_decode(one, len(passes))]
            if not active:
                break
            passes.append(self._decode(active, passes))
            if any(needs_tokens(one.request.sampling) for one in active):
                ended = self._read(passes, others)
                active, passes = [one for one in active if one not in ended], []
        self._read(passes, others)
        return {one: [drafted, *rest] for one, rest in others.items() if (drafted := self._drafted(one))}

    def forget(self, sequence: Sequence) -> None:
        """Free the twin's blocks; those with the sequence's own tokens stay in the prefix cache."""
        twin = self._twins.pop(sequence, None)
        if twin is not None:
            self._take_over(twin, sequence.tokens)
            self._cache.free(twin.table)

    def reset(self) -> None:
        """Forget all twins, and begin with an empty cache."""
        self._cache = KvCacheManager(self._config.num_blocks, self._config.block_size, self._config.prefix_reuse)
        self._twins: dict[Sequence, _Twin] = {}

    def check_idle(self) -> None:
        """Check that no block is used."""
        self._cache.check_counts()
        used = self._cache.num_used_blocks
        assert not used, f"{used} blocks of the draft model are used"

    def _sync(self, sequence: Sequence) -> None:
        """Give the twin the sequence's tokens; if there is no twin yet, make one if the cache has room."""
        twin = self._twins.get(sequence)
        if twin is None:
            # There must be room for all that may come: it is better that fewer sequences draft, each to its end.
            table = self._cache.allocate(sequence.tokens, min(sequence.longest, self._runner.max_length))
            if table is None:
                return
            twin = self._twins[sequence] = _Twin(_twin_of(sequence, table), table, 0)
        self._take_over(twin, sequence.tokens)

    def _take_over(self, twin: _Twin, tokens: list[int]) -> None:
        """Take over the target's tokens, and drop the drafts that were not accepted."""
        own = twin.sequence.tokens
        same, most = twin.agreed, min(len(tokens), len(own))
        while same < most and tokens[same] == own[same]:
            same += 1
        twin.sequence.replace_tail(same, tokens[same:])
        twin.agreed = len(tokens)
        # The last token is computed again where the twin had drafted it: the next pass begins with it.
        self._cache.commit(twin.table, own, min(twin.table.num_computed, same, len(own) - 1))

    def _can_decode(self, sequence: Sequence, unread: int) -> bool:
        """Return whether a twin can decode a token behind ``unread`` passes that were not read."""
        twin, most = self._twins[sequence], self._runner.max_length
        length = len(twin.sequence.tokens) + unread
        within = length < most and len(sequence.tokens) < most
        return within and length - twin.table.num_computed <= _FEW_TOKENS + 1 and self._cache.grow(twin.table, length)

    def _decode(self, drafted: list[Sequence], unread: list[_Pass]) -> _Pass:
        """Launch a pass that decodes a token with the twin of each, after passes whose results were not read."""
        twins, chosen = [self._twins[one].sequence for one in drafted], None
        if unread:
            last = {one: row for row, one in enumerate(unread[-1].drafted)}
            # The sampled token is negative where logits are NaN; `_read` drops what is decoded behind it.
            chosen = unread[-1].choice.of([last[one] for one in drafted]).clamp(min=0)
        chunks = [Chunk(twin, twin.computed, 1 if unread else twin.remaining, awaits=bool(unread)) for twin in twins]
        logits = self._run(chunks, chosen)
        rows = [Continuation(twin, (-1,) * len(unread)) if unread else twin for twin in twins]
        choice = self._runner.sample(logits, rows)
        likely = ToHost([logits.topk(self._candidates).indices]) if self._candidates > 1 else None
        return _Pass(drafted, choice, likely)

    def _drafted(self, sequence: Sequence) -> list[int]:
        """Return what the twin has decoded behind the sequence's tokens."""
        return self._twins[sequence].sequence.tokens[len(sequence.tokens) :]

    def _read(self, passes: list[_Pass], others: dict[Sequence, list[list[int]]]) -> set[Sequence]:
        """Wait for passes and append what they drafted; return the sequences whose logits are NaN."""
        ended = set[Sequence]()
        for drafted, choice, likely in passes:
            rows = [[]] * len(drafted) if likely is None else likely.wait()[0].tolist()
            for one, sampled, row in zip(drafted, choice.wait(), rows, strict=True):
                if sampled.token < 0:
                    ended.add(one)  # later passes decoded from a token that does not exist
                if one not in ended:
                    other = [token for token in row if token != sampled.token][: self._candidates - 1]
                    others[one] += [[*self._drafted(one), token] for token in other]
                    drafting = self._twins[one].sequence
                    drafting.replace_tail(len(drafting.tokens), [sampled.token])
        for twin in (self._twins[one] for one in ended):
            self._cache.mark_computed(twin.table, min(twin.table.num_computed, len(twin.sequence.tokens)))
        return ended

    def _run(self, chunks: list[Chunk], chosen: Tensor | None = None) -> Tensor:
        """Compute chunks of twins; return the logits ``[n, vocab]`` of those that sample."""
        logits, _ = self._runner.run(chunks, self._cache.take_copies(), chosen)
        for chunk in chunks:
            assert chunk.sequence.table is not None
            self._cache.mark_computed(chunk.sequence.table, chunk.start + chunk.size)
        return logits


class _Pass(NamedTuple):
    """A drafting pass, which the device may not have computed yet."""

    drafted: list[Sequence]
    choice: PendingSample
    likely: ToHost | None
    """The likeliest tokens ``[n, candidates]``, where others than the first are asked for."""


@dataclasses.dataclass(slots=True)
class _Twin:
    """A sequence as the draft model has it."""

    sequence: Sequence
    table: BlockTable
    agreed: int
    """How many of its first tokens are the target's; those behind them are drafted."""


def _twin_of(sequence: Sequence, table: BlockTable) -> Sequence:
    """Return a sequence of the same request, which returns tokens only: no log probabilities and no logits.

    It follows no guide either: what the guide forbids is taken out of the drafts.
    """
    plain = dataclasses.replace(
        sequence.request.sampling, log_probs=False, top_log_probs=0, log_prob_ids=(), prompt_log_probs=None,
        context_logits=False, generation_logits=False, guide=None,
    )  # fmt: skip
    request = dataclasses.replace(sequence.request, sampling=plain)
    twin = Sequence(request, sequence.order, sequence.seed, sequence.max_length, None)
    twin.continue_as(table, list(sequence.tokens))
    return twin
