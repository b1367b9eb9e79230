"""One choice of /v1/completions: its text and its log-probs in the older form, with the prompt before it if asked."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import Any

from inflight.gateway.fields import Fields
from inflight.gateway.generation import ChoiceDelta, Job, PromptScores
from inflight.gateway.log_probs import Likeliest, LogProbStream, TokenLogProb, TokenNames, number
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
        self._begun = self._taken = False
        self._text = ""
        self._entries: list[TokenLogProb] = []
        self._token_ids: list[int] = []
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._offset = 0
        """Where the next token's text begins in the text, in characters."""
        self._finish_reason: str | None = None
        self._stop_reason: str | None = None

    @property
    def has_news(self) -> bool:
        """Whether there is anything to send."""
        return bool(self._text or self._entries or self._finish_reason)

    def add(self, delta: ChoiceDelta) -> None:
        """Take what is new."""
        if not self._begun:
            self._begin(delta)
        if not self._nothing:
            self._text += "".join(event.text for event in delta.events if isinstance(event, ContentDelta))
            self._entries += delta.log_probs
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
            choice |= {} if self._taken else {"prompt_token_ids": list(self._job.request.prompt)}
        self._taken = True
        self._text, self._entries, self._token_ids = "", [], []
        return choice

    def _begin(self, delta: ChoiceDelta) -> None:
        """Put the prompt before the answer."""
        self._begun = True
        if not self._echoes:
            return
        prompt, ids = self._prompt, self._job.request.prompt
        self._text = prompt.text if len(ids) == len(prompt.ids) else self._tokenizer.decode(ids)
        if self._job.request.log_probs:
            self._entries = self._prompt_entries(delta)

    def _prompt_entries(self, delta: ChoiceDelta) -> list[TokenLogProb]:
        ids = self._job.request.prompt
        scores = delta.prompt_scores or PromptScores([], [])
        nothing: Likeliest = ()
        top: Sequence[Likeliest] = scores.top or [nothing] * len(scores.log_probs)
        stream = LogProbStream(self._tokenizer, self._job.show_special)
        stream.push(ids, [None, *scores.log_probs], [nothing, *top])
        return stream.finish(len(self._prompt.text) + len(ids))

    def _log_probs(self) -> dict[str, Any]:
        offsets = []
        for entry in self._entries:
            offsets.append(self._offset)
            self._offset += len(self._utf8.decode(entry.bytes))
        return {
            "text_offset": offsets,
            "token_logprobs": [None if one.log_prob is None else number(one.log_prob) for one in self._entries],
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
            named[name] = max(number(value), named.get(name, number(value)))
        return named
