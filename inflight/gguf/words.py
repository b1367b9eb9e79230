"""How byte-level tokenizers split text into words before merging, by ``tokenizer.ggml.pre``.

A GGUF file has only a name for it, which llama.cpp gives to what a published tokenizer does (``llama-vocab.cpp``).
Here are the rules of those tokenizers themselves, as their ``tokenizer.json`` has them: llama.cpp's are rewritten for
an engine of regular expressions that knows less.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

_ENDINGS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = rf"{_ENDINGS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_SPACES}"
_QWEN2 = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
_QWEN35 = rf"{_ENDINGS}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_SPACES}"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASED = rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+%s|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*%s"
_SIGNS = rf" ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}"
_TEKKEN = rf"{_CASED % ('', '')}|\p{{N}}|{_SIGNS}"
_GPT4O = rf"{_CASED % (f'{_ENDINGS}?', f'{_ENDINGS}?')}|\p{{N}}{{1,3}}|{_SIGNS}"
_DEEPSEEK3 = (
    r"\p{N}{1,3}",
    r"[一-龥぀-ゟ゠-ヿ]+",
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|"
    + _SPACES,
)


@dataclass(frozen=True)
class Words:
    """How text is split, and what else the name implies."""

    patterns: tuple[str, ...] = ()
    """Regular expressions, one after the other; none: GPT-2's rule, which the library has."""
    digits: bool = False
    """Whether each digit is a word, before that."""
    whole: bool = False
    """Whether a word that is a token is not merged of smaller ones."""
    normalizer: str | None = None
    begins: bool = False
    """Whether text begins with the token for it, where the file does not say."""

    def rules(self) -> dict[str, Any]:
        """Return the ``pre_tokenizer`` of ``tokenizer.json``."""
        steps: list[dict[str, Any]] = [{"type": "Digits", "individual_digits": True}] if self.digits else []
        steps += [
            {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
            for pattern in self.patterns
        ]
        bytes_only = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
        return {"type": "Sequence", "pretokenizers": [*steps, bytes_only | {"use_regex": not self.patterns}]}


_OF_LLAMA3 = Words((_LLAMA3,), whole=True, begins=True)
_OF_CODE = Words(digits=True)
WORDS: dict[str, Words] = {
    "gpt-2": Words(),
    "phi-2": Words(),
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "falcon3", "pixtral", "lfm2"), _OF_LLAMA3),
    **dict.fromkeys(("smaug-bpe", "dbrx"), Words((_LLAMA3,))),
    "glm4": Words((_LLAMA3,), whole=True),
    "qwen2": Words((_QWEN2,), normalizer="NFC"),
    "qwen35": Words((_QWEN35,), normalizer="NFC"),
    "deepseek-r1-qwen": Words((_QWEN2,)),
    "deepseek-v3": Words(_DEEPSEEK3),
    "tekken": Words((_TEKKEN,), whole=True, begins=True),
    "gpt-4o": Words((_GPT4O,)),
    "llama4": Words((_GPT4O,)),
    **dict.fromkeys(("smollm", "starcoder", "refact"), _OF_CODE),
}
"""By ``tokenizer.ggml.pre``."""
