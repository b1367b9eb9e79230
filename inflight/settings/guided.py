"""Guided decoding in the portable engine: what a guide may cost, and how many compiled guides are kept."""

from __future__ import annotations

from pydantic import Field

from inflight.settings.section import PORTABLE_ONLY, Section

MOST_GUIDE_BYTES = 4 << 20
"""Most bytes of a guide in UTF-8, where the engine has no smaller limit."""


class GuidedDecodingSettings(Section):
    """Guided decoding in the portable engine. A guide that passes a limit is refused, and its request alone ends."""

    read_by = (PORTABLE_ONLY,)

    max_guide_bytes: int = Field(
        65_536,
        ge=1,
        le=4 << 20,
        description="bytes of one request's guided_decoding_guide, in UTF-8; the time to compile one can grow with the "
        "square of it",
    )
    compile_timeout_s: float = Field(
        10,
        gt=0,
        le=600,
        allow_inf_nan=False,
        description="seconds of CPU time that the check of one guide may take; five times as many and ten more by the "
        "clock",
    )
    compile_threads: int = Field(
        2,
        ge=1,
        le=64,
        description="threads that compile guides, each with a process that checks a guide first; one that hangs or "
        "crashes it ends its request alone",
    )
    compile_queue: int = Field(
        64, ge=1, description="guides that may wait to be compiled; a request with one more may be sent again later"
    )
    cached_guides: int = Field(256, ge=0, description="compiled guides that are kept for later requests; 0: none")
    cached_bytes: int = Field(
        512 << 20,
        ge=0,
        description="bytes of memory that the guides that are kept may take, as estimated; the least recently used go "
        "first",
    )
    max_grammar_size: int = Field(
        200_000, ge=1, description="symbols of a guide's grammar; a larger grammar takes longer to compile"
    )
    max_lexer_states: int = Field(
        50_000, ge=1, description="states of a guide's lexer, each of up to 1 KiB; sequences of one guide share them"
    )
    max_mask_ms: float = Field(
        10,
        gt=0,
        le=60_000,
        allow_inf_nan=False,
        description="milliseconds of CPU time that a mask of one sequence may take on average; a sequence whose last "
        "hundred masks take more ends with an error",
    )
