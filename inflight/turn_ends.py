"""Special tokens that end an answer by their names, whatever a checkpoint's files say of them.

Files name one or two of a model's, in a GGUF file as in a checkpoint: llama.cpp looks them up by name for that reason.
"""

from __future__ import annotations

from collections.abc import Mapping

_ENDS = (
    "<|eot_id|>", "<|eom_id|>", "<|end_of_text|>", "<|im_end|>", "<|endoftext|>", "<|end|>", "<|return|>", "<|call|>",
    "<end_of_turn>",
)  # fmt: skip
"""Names in the vocabularies of published models."""
_HARMONY = {"<|return|>", "<|call|>"}
"""Tokens beside which ``<|end|>`` ends a message within an answer, and not the answer."""


def turn_ends(special: Mapping[str, int]) -> set[int]:
    """Return those of the special tokens, given by name, that end an answer."""
    named = {token: special[token] for token in _ENDS if token in special}
    if named.keys() >= _HARMONY:
        named.pop("<|end|>", None)
    return set(named.values())
