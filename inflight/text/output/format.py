"""Chat formats: how a family of models writes calls of tools and reasoning, and how its output is read and guided."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Protocol

from inflight.errors import UnsupportedFeature
from inflight.sampling import Guide
from inflight.settings.guided import MOST_GUIDE_BYTES
from inflight.text.output.call_grammar import asked
from inflight.text.output.events import ContentDelta, OutputEvent
from inflight.text.output.markers import Piece
from inflight.text.output.tools import Tool, ToolChoice
from inflight.text.tokenizer import Tokenizer


class OutputParser(Protocol):
    """Reads one output as it comes. The events, joined, do not depend on how the output was cut into pieces."""

    def push(self, pieces: list[Piece]) -> list[OutputEvent]:
        """Take the next pieces; return what is settled by them."""

    def finish(self, cut: bool = False) -> list[OutputEvent]:
        """End the output; return what was still held back. Nothing comes after it.

        Of a call that was ``cut`` before its arguments began, by a limit of tokens, the name is told if it has come.
        """

    @property
    def has_open_call(self) -> bool:
        """Whether the arguments of a call that has begun are not complete; at the end they are no JSON then."""


class ChatFormat:
    """The format of models that know neither tools nor reasoning, and the base of all others."""

    name: ClassVar[str] = "plain"
    has_tools: bool = False
    has_reasoning: bool = False

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    @property
    def markers(self) -> frozenset[int]:
        """The special tokens that the parser needs to see: those of ``MarkedDetokenizer``."""
        return frozenset()

    @property
    def stop_token_ids(self) -> frozenset[int]:
        """The end ids that the format adds to the checkpoint's own."""
        return frozenset()

    def parser(self, tools: Sequence[Tool], *, reasoning_open: bool, has_form: bool = False) -> OutputParser:
        """Return the parser of one output; without ``tools`` nothing in it is a call.

        ``reasoning_open`` says that the prompt ends inside the reasoning (``opens_reasoning``), ``has_form`` that the
        guide has a form of the answer: an output that does not begin with a call is an answer, and has no calls in it.
        """
        return _PlainParser()

    def opens_reasoning(self, prompt: str) -> bool:
        """Return whether a rendered prompt ends inside a part of reasoning, so that the output begins in it."""
        return False

    def may_reason(self, prompt: str) -> bool:
        """Return whether an output may begin with reasoning: its prompt has neither opened nor closed it."""
        return False

    def has_thought(self, prompt: str) -> bool:
        """Return whether an output may have reasoning in it, which is no part of the answer."""
        return self.opens_reasoning(prompt) or self.may_reason(prompt)

    def takes(self, answer: Guide, *, beside_calls: bool) -> bool:
        """Return whether ``guide`` can be given an answer's form, beside calls of tools or without any."""
        return not beside_calls

    def guide(
        self,
        tools: Sequence[Tool],
        choice: ToolChoice,
        parallel: bool,
        *,
        answer: Guide | None = None,
        reasoning: bool = False,
        max_bytes: int = MOST_GUIDE_BYTES,
    ) -> Guide | None:
        """Return what an output must be, by the choice of tools and the form of the answer; None: it may be anything.

        Where the prompt has opened the reasoning (``opens_reasoning``), the guide holds from ``guide_start`` on.

        Args:
            tools: those of the request.
            choice: which of them must, may or must not be called. Where one must be, there is no answer.
            parallel: whether there may be several calls.
            answer: what an answer must be, one that the format ``takes``.
            reasoning: whether the output may begin with reasoning (``may_reason``), which stays free.
            max_bytes: the size in UTF-8 beyond which a grammar of calls is refused, before all of it is made.

        Raises:
            InvalidRequest: the choice names no tool, or a schema has what this format cannot enforce.
            UnsupportedFeature: the format has no tools.
        """
        if asked(tools, choice, parallel) is not None:
            raise no_tools()
        return answer

    def guide_start(self, tokenizer: Tokenizer) -> tuple[int, ...]:
        """Return the tokens that end the reasoning, from which on the guide holds; () where there are none."""
        return ()

    def answer_start(self, tokenizer: Tokenizer) -> tuple[int, ...]:
        """Return the tokens behind which the answer stands, where there is reasoning before it."""
        return self.guide_start(tokenizer)


class _PlainParser:
    """All text is content."""

    has_open_call = False

    def push(self, pieces: list[Piece]) -> list[OutputEvent]:
        return [ContentDelta(piece) for piece in pieces if isinstance(piece, str) and piece]

    def finish(self, cut: bool = False) -> list[OutputEvent]:
        return []


def no_tools() -> UnsupportedFeature:
    """Return the error of a request with tools to a model that knows none."""
    return UnsupportedFeature("tools: this model's chat format has no calls of tools, so they cannot be enforced")
