"""Small tokenizers of the families that checkpoints have, trained in the test session."""

from __future__ import annotations

import functools

from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, trainers
from tokenizers import Tokenizer as Backend

from inflight.text.checkpoint import TextConfig
from inflight.text.tokenizer import Tokenizer

TEXTS = [
    "The quick brown fox jumps over the lazy dog. She sells sea shells; how much wood?",
    "def main():\n    return {'a': 1}\n\n\nprint( main() )  # a comment",
    "Größe, naïve café, Ελληνικά, русский текст, עברית, العربية",
    "日本語のテキスト。中文字符，한국어 문장",
    "हिन्दी में लिखा हुआ, ภาษาไทย, emoji 😀👩‍👩‍👧‍👦🏳️‍🌈 done",
] * 3
SPECIAL = ["<unk>", "<s>", "</s>"]


LETTERS = {"a": 1, "b": 2, "c": 3, " ": 4}
"""The vocabulary of ``letters``."""


def letters() -> Tokenizer:
    """Return a tokenizer that has no token for what it does not know, and says so by an exception."""
    pieces = [("<s>", 0.0), *((letter, -1.0) for letter in LETTERS)]
    backend = Backend(models.Unigram(pieces))
    backend.normalizer = normalizers.Replace("-", "")
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    template = "{% for message in messages %}{{ message.content }}{% endfor %}"
    return Tokenizer(backend, TextConfig(len(pieces), frozenset({0}), None, {}, template))


def _byte_level() -> Backend:
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=420, special_tokens=SPECIAL, initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    backend.train_from_iterator(TEXTS, trainer)
    backend.add_tokens([AddedToken("«tool»", special=False)])
    return backend


def _byte_fallback(strip: bool) -> Backend:
    """Llama 2's way (``strip``) and Gemma's (without)."""
    backend = Backend(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    marks = [normalizers.Replace(" ", "▁")]
    backend.normalizer = normalizers.Sequence(([normalizers.Prepend("▁")] if strip else []) + marks)
    trainer = trainers.BpeTrainer(
        vocab_size=460,
        special_tokens=[*SPECIAL, *(f"<0x{byte:02X}>" for byte in range(256))],
        limit_alphabet=60,
        max_token_length=8,
    )
    backend.train_from_iterator(TEXTS, trainer)
    rules = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence(rules + ([decoders.Strip(" ", 1, 0)] if strip else []))
    return _only_special(backend)


def _only_special(backend: Backend) -> Backend:
    """Make the byte tokens ordinary: the trainer has made every token it was given a special one."""
    import json

    data = json.loads(backend.to_str())
    data["added_tokens"] = [token for token in data["added_tokens"] if token["content"] in SPECIAL]
    return Backend.from_str(json.dumps(data))


def _unigram() -> Backend:
    backend = Backend(models.Unigram())
    backend.normalizer = normalizers.Replace(Regex("\t"), " ")
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always", split=True)
    backend.decoder = decoders.Metaspace(prepend_scheme="always", split=True)
    trainer = trainers.UnigramTrainer(vocab_size=300, special_tokens=SPECIAL, unk_token="<unk>")
    backend.train_from_iterator(TEXTS, trainer)
    return backend


_MAKERS = {
    "byte level": _byte_level,
    "byte fallback, Llama 2": lambda: _byte_fallback(strip=True),
    "byte fallback, Gemma": lambda: _byte_fallback(strip=False),
    "unigram": _unigram,
}
FAMILIES = list(_MAKERS)


@functools.cache
def make_tokenizer(family: str) -> Tokenizer:
    """Return a tokenizer of this family; made once."""
    backend = _MAKERS[family]()
    tokens = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    return Tokenizer(backend, TextConfig(backend.get_vocab_size(), frozenset({2}), 0, tokens, None))


def shown_text(tokenizer: Tokenizer, tokens: list[int]) -> str:
    """Return the library's decoding of tokens without a last character that further bytes would make whole.

    The library has a replacement character in its place, which one to three bytes more make another character.
    """
    text = tokenizer.decode(tokens)
    of_bytes = {piece: token for token in range(tokenizer.config.vocab_size) if (piece := _one_byte(tokenizer, token))}
    for first in (b"\x80", b"\x90", b"\xa0"):
        for more in ((first,), (first, b"\x80"), (first, b"\x80", b"\x80")):
            if set(more) <= of_bytes.keys():
                completed = tokenizer.decode([*tokens, *(of_bytes[byte] for byte in more)])
                if completed[-1:] != "\ufffd" and len(completed.encode()) > len(more):
                    return completed[:-1]
    return text


def _one_byte(tokenizer: Tokenizer, token: int) -> bytes | None:
    piece = tokenizer.token_bytes[token]
    return piece if isinstance(piece, bytes) and len(piece) == 1 else None
