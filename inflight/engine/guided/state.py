"""GuideState: how far one sequence's text has come in its guide, what may come next, and the time that this takes."""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np
from llguidance import LLMatcher

from inflight.engine.guided.compiler import CompiledGuide
from inflight.engine.guided.vocabulary import Vocabulary, clear_bit, has_bit, set_bit
from inflight.errors import InflightError, InvalidRequest
from inflight.sampling import SamplingParams

_AHEAD = 100
"""Masks whose time a sequence may take at once: lexers make their states as a text first comes to them."""


class MaskBudget:
    """The time that one sequence's masks may take: so much for each on average, of the last ``_AHEAD`` or so."""

    def __init__(self, mask_s: float) -> None:
        self._mask_s = mask_s
        self._left_s = _AHEAD * mask_s
        self.cost_s = 0.0
        """About what the next mask will take, with the token before it."""
        self.total_s = 0.0
        """Seconds that all masks have taken so far."""
        self._token_s = 0.0

    def charge(self, seconds: float) -> None:
        """Count the time of a mask."""
        self._left_s = min(self._left_s + self._mask_s - seconds, _AHEAD * self._mask_s)
        self.total_s += seconds
        self.cost_s, self._token_s = (self.cost_s + seconds + self._token_s) / 2, 0.0

    def count_token(self, seconds: float) -> None:
        """Count the time in which a token was taken over, which the mask behind it does not have."""
        self.total_s += seconds
        self._token_s += seconds

    @property
    def is_spent(self) -> bool:
        """Whether the masks have taken longer than they may."""
        return self._left_s < 0


class GuideState:
    """The guide of one sequence. It begins behind the guide's start ids, if it has some.

    A sequence may end by itself only where its guide is complete. With ``ignore_eos`` it goes on there as long as the
    guide allows more.
    """

    def __init__(self, compiled: CompiledGuide, sampling: SamplingParams) -> None:
        guide = sampling.guide
        assert guide is not None
        self.vocabulary: Vocabulary = compiled.vocabulary
        self._compiled = compiled
        self._budget = MaskBudget(compiled.settings.max_mask_ms / 1e3)
        self._matcher: LLMatcher = compiled.matcher.deep_copy()
        self._start_ids = guide.start_ids
        self._recent: tuple[int, ...] = ()
        self._holds = not guide.start_ids
        self.had_turn = False
        """Whether a dear mask of it was made since its sequence was admitted; ``MaskTurns`` writes it."""
        size = self.vocabulary.size
        self._end_ids = [token for token in sorted(sampling.end_ids) if 0 <= token < size]
        self._ends = [] if sampling.ignore_eos else self._end_ids
        self._min_tokens = sampling.min_tokens

    def push(self, token: int) -> None:
        """Take over a token that was generated; it is none that has ended the sequence."""
        if self._holds:
            began = time.thread_time()
            self._matcher.consume_token(token)
            self._budget.count_token(time.thread_time() - began)
        else:
            self._look_for_start(token)

    def _look_for_start(self, token: int) -> None:
        self._recent = (*self._recent, token)[-len(self._start_ids) :]
        self._holds = self._recent == self._start_ids

    def follow(self, token: int) -> bool:
        """Take over a token that an earlier run has generated; return whether the guide allows it.

        Its time counts as that of the mask which was made for it then.
        """
        if self._holds and token in self._end_ids:
            return False
        began = time.thread_time()
        if self._holds:
            self._matcher.consume_token(token)
        else:
            self._look_for_start(token)
        self.charge(time.thread_time() - began)
        return not self._matcher.is_error()

    def is_over(self) -> bool:
        """Return whether the guide is complete and allows nothing more."""
        return self._holds and self._matcher.is_stopped() and not self._matcher.is_error()

    def failure(self, generated: int, *, ended: bool = False) -> InflightError | None:
        """Return the error of a guide that cannot be followed, or that is over before ``min_tokens``; or None.

        What its masks took is no error of a text that has ``ended``.
        """
        if self._matcher.is_error():
            self._compiled.failed = True
            reason = " ".join(self._matcher.get_error().split())[:200] or "a limit was passed"
            return InvalidRequest(f"guided_decoding_guide cannot be followed any further: {reason}")
        if not ended and (error := self.too_slow(generated)) is not None:
            return error
        return self._too_short(generated) if self.is_over() else None

    def too_slow(self, generated: int) -> InvalidRequest | None:
        """Return the error of a guide whose masks have taken more time than they may; or None."""
        if not self._budget.is_spent:
            return None
        return InvalidRequest(
            f"guided_decoding_guide cannot be followed any further: after {generated} tokens its masks take "
            f"more than {self._compiled.settings.max_mask_ms:g} ms of CPU time on average; it must be simpler"
        )

    def without_token(self, generated: int) -> InflightError | None:
        """Return the error of a sequence for which no token is left; None: its text ends by itself, as it may."""
        if (error := self.failure(generated)) is not None:
            return error
        if self._holds and self._matcher.is_accepting():
            return self._too_short(generated)
        if self._holds:
            self._matcher.compute_bitmask()  # the mask was that of a draft's copy, which may have passed a limit
        return self.failure(generated) or InvalidRequest(
            "guided_decoding_guide and embedding_bias, bad_words_list, min_tokens or the end ids leave no token that "
            "could come next; they must leave one"
        )

    def _too_short(self, generated: int) -> InflightError | None:
        if generated >= self._min_tokens:
            return None
        return InvalidRequest(
            f"min_tokens is {self._min_tokens}; guided_decoding_guide ends the text after {generated}"
        )

    def allowed_prefix(self, tokens: Sequence[int]) -> int:
        """Return how many of these tokens the guide allows in a row."""
        recent, holds = self._recent, self._holds
        for place, token in enumerate(tokens):
            if token in self._end_ids:
                return place
            if holds:
                ends = (index for index in range(place, len(tokens)) if tokens[index] in self._end_ids)
                return place + self._matcher.validate_tokens(list(tokens[place : next(ends, len(tokens))]))
            recent = (*recent, token)[-len(self._start_ids) :]
            holds = recent == self._start_ids
        return len(tokens)

    def ahead(self, tokens: Sequence[int]) -> GuideState:
        """Return the state as it would be behind these tokens, all of which it allows."""
        state = object.__new__(GuideState)
        state.__dict__ = self.__dict__ | {"_matcher": self._matcher.deep_copy()}
        for token in tokens:
            state.push(token)
        return state

    @property
    def matcher(self) -> LLMatcher | None:
        """What gives the mask of the next token; None: the guide does not hold yet."""
        return self._matcher if self._holds else None

    def charge(self, seconds: float) -> None:
        """Count the time that a mask of the matcher has taken."""
        self._budget.charge(seconds)
        self._compiled.masks_s += seconds

    @property
    def mask_s(self) -> float:
        """About the seconds that its next mask will take."""
        return self._budget.cost_s

    @property
    def total_s(self) -> float:
        """The seconds that its masks have taken so far."""
        return self._budget.total_s

    def complete_mask(self, mask: np.ndarray) -> None:
        """Say in a mask of the matcher, int32 ``[words]``, with which of the model's tokens the text may end.

        The ends of a text are not part of it. So an end id that has a text of its own is allowed only where the text is
        complete without it. Where the grammar names a special token that is an end id, that token ends the sequence,
        and is allowed only if the text is complete with it.
        """
        # A grammar can name the token of the end as well, by its number, where the text is not complete.
        ends = self._holds and has_bit(mask, self.vocabulary.end) and self._matcher.is_accepting()
        clear_bit(mask, self.vocabulary.end)
        if self._matcher.is_error() or self._budget.is_spent:
            mask[:] = 0
            return
        for token in self._end_ids:
            named = self._holds and has_bit(mask, token) and not self.vocabulary.has_text(token)
            if token in self._ends and (ends or (named and self._completes(token))):
                set_bit(mask, token)
            else:
                clear_bit(mask, token)

    def _completes(self, token: int) -> bool:
        """Return whether the text is complete with a token that the grammar names."""
        ahead = self._matcher.deep_copy()
        return bool(ahead.consume_token(token) and ahead.is_accepting())
