"""One choice of /v1/completions: its text and its log-probs in the older form, with the prompt before it if asked."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from inflight.gateway.fields import Fields
from inflight.gateway.generation import ChoiceDelta, Job, PromptScores
from inflight.gateway.log_probs import Likeliest, LogProbStream, TextOffsets, TokenLogProb, TokenNames, json_log_prob
from inflight.gateway.prompt_log_probs import prompt_log_probs
from inflight.gateway.prompts import Prompt
from inflight.text.output.events import ContentDelta
from inflight.text.tokenizer import Tokenizer


class CompletionChoice:
    """Collects a choice; ``take`` gives what has come since the last time."""

    def __init__(self, fields: Fields, tokenizer: Tokenizer, job: Job, prompt: Prompt, index: int) -> None:
        self._tokenizer, self._job, self._prompt, self._index = tokenizer, job, prompt, index
        self._echoes = fields.get("echo", False)
        self._nothing = fields.get("max_tokens") == 0
        self._returns_ids = fields.get("return_token_ids", False)
        self._names = TokenNames(tokenizer, "bytes:", fields.get("return_tokens_as_token_ids", False))
        self._pieces_each = 8 * (1 + max(job.request.top_log_probs, job.request.prompt_log_probs or 0))
        self._begun = self._taken = False
        self._scores: PromptScores | None = None
        """Log-probs of the prompt, where they were asked for."""
        self._prompt_top: int | None = fields.get("prompt_logprobs")
        """How many of the likeliest tokens ``prompt_logprobs`` has at each position; None: it is not asked for."""
        self._text = ""
        self._entries: list[TokenLogProb] = []
        self._places: list[int] = []
        """Where the text of each of them begins in the whole text, in characters."""
        self._token_ids: list[int] = []
        self._offsets = TextOffsets()
        self._finish_reason: str | None = None
        self._stop_reason: str | None = None

    @property
    def has_news(self) -> bool:
        """Whether there is anything to send."""
        return bool(self._text or self._entries or self._finish_reason)

    @property
    def pieces(self) -> int:
        """How much there is to send: characters, and what log-probs are written with."""
        of_prompt = None if self._taken or self._prompt_top is None else self._scores
        scores = () if of_prompt is None else of_prompt.log_probs
        return len(self._text) + (len(self._entries) + len(scores)) * self._pieces_each

    def pieces_of(self, delta: ChoiceDelta) -> int:
        """Return how much a delta adds; the log-probs of the prompt come with the first one."""
        scores = () if self._begun or delta.prompt_scores is None else delta.prompt_scores.log_probs
        return (len(delta.token_ids) + len(scores)) * self._pieces_each

    def add(self, delta: ChoiceDelta) -> None:
        """Take what is new."""
        if not self._begun:
            self._begin(delta)
        if not self._nothing:
            self._text += "".join(event.text for event in delta.events if isinstance(event, ContentDelta))
            self._score(delta.log_probs)
            self._token_ids += delta.token_ids
        self._finish_reason, self._stop_reason = delta.finish_reason, delta.stop_reason
        if self._nothing and delta.finish_reason:
            self._finish_reason, self._stop_reason = "length", None

    def take(self) -> dict[str, Any]:
        """Return the choice with what has come since the last time."""
        choice: dict[str, Any] = {
            "index": self._index,
            "text": self._text,
            "logprobs": self._log_probs() if self._job.request.log_probs else None,
            "finish_reason": self._finish_reason,
            "stop_reason": self._stop_reason,
        }
        if self._returns_ids:
            choice["token_ids"] = self._token_ids
        if not self._taken:
            choice |= self._of_prompt()
        self._taken = True
        self._text, self._entries, self._places, self._token_ids = "", [], [], []
        return choice

    def _of_prompt(self) -> dict[str, Any]:
        """Return what the choice, or its first part in a stream, says of the prompt."""
        prompt = self._job.request.prompt
        said: dict[str, Any] = {"prompt_token_ids": list(prompt)} if self._returns_ids else {}
        if self._prompt_top is not None and self._scores is not None:
            said["prompt_logprobs"] = prompt_log_probs(prompt, self._scores, self._prompt_top, self._names)
        return said

    def _begin(self, delta: ChoiceDelta) -> None:
        """Put the prompt before the answer."""
        self._begun, self._scores = True, delta.prompt_scores
        if not self._echoes:
            return
        prompt, ids = self._prompt, self._job.request.prompt
        given = prompt.text if len(ids) == len(prompt.ids) else None
        hides = not self._job.show_special
        self._text = self._tokenizer.decode(ids, skip_special_tokens=hides) if given is None else given
        if self._job.request.log_probs:
            self._score(self._prompt_entries())
        self._offsets = TextOffsets(len(self._text))

    def _prompt_entries(self) -> list[TokenLogProb]:
        """Return the prompt's tokens; a special token that stands in its text has its bytes."""
        ids = self._job.request.prompt
        scores = self._scores or PromptScores([], [])
        nothing: Likeliest = ()
        count = self._job.request.top_log_probs
        top: Sequence[Likeliest] = [row[:count] for row in scores.top] or [nothing] * len(scores.log_probs)
        stream, offsets = LogProbStream(self._tokenizer), TextOffsets()
        stream.push(ids, [None, *scores.log_probs], [nothing, *top])
        entries = []
        for entry in stream.finish(len(self._text) + len(ids)):
            if self._tokenizer.token_bytes[entry.token] is None:
                name = self._tokenizer.token_text(entry.token)
                entry = replace(entry, bytes=name.encode() if self._text.startswith(name, offsets.end) else b"")
            offsets.push(entry.bytes)
            entries.append(entry)
        return entries

    def _score(self, entries: Sequence[TokenLogProb]) -> None:
        """Take log-probs, which come in the order of their tokens."""
        self._entries += entries
        self._places += [self._offsets.push(entry.bytes) for entry in entries]

    def _log_probs(self) -> dict[str, Any]:
        return {
            "text_offset": self._places,
            "token_logprobs": [None if one.log_prob is None else json_log_prob(one.log_prob) for one in self._entries],
            "tokens": [self._names.name(one.token, one.bytes) for one in self._entries],
            "top_logprobs": [self._top(one) for one in self._entries],
        }

    def _top(self, entry: TokenLogProb) -> dict[str, float] | None:
        """Return the likeliest tokens by name, and the token itself; of equal names the likelier one counts."""
        if entry.log_prob is None:
            return None
        named: dict[str, float] = {}
        pairs: Sequence[tuple[str, float]] = [(self._names.name(token), value) for token, value in entry.top]
        for name, value in [*pairs, (self._names.name(entry.token, entry.bytes), entry.log_prob)]:
            named[name] = max(json_log_prob(value), named.get(name, json_log_prob(value)))
        return named
