"""The demo model's tokenizer: byte-level BPE with ChatML turns, trained on the demo corpus alone.

It does not know the model; it writes `tokenizer.json` and `tokenizer_config.json` beside it.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable
from itertools import pairwise
from pathlib import Path

from demo.conversation import CHAT_TEMPLATE
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

END_OF_TEXT, TURN_START, TURN_END, PAD = SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|pad|>")

MARKERS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>")
"""Tokens that are text to whoever reads an answer: tool calls and reasoning are taken out of it by them."""
STRUCTURED = 860
"""How many entries of the vocabulary come from values of arguments and from JSON instead of prose."""

# Words with their leading space, up to three digits, runs of punctuation, runs of space: the usual split of Llama 3.
SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def train_tokenizer(
    prose: Iterable[str], structured: Iterable[str], whole: Iterable[str], vocab_size: int
) -> Tokenizer:
    """Return a byte-level BPE of `vocab_size` entries; any bytes round-trip.

    The special tokens come first, then what is merged in prose, then what makes each word of `whole` one token, then
    what is merged in `structured` text, then the markers.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - STRUCTURED - len(MARKERS),
        special_tokens=list(SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(prose, trainer)
    merges = _merges_of(_split(tokenizer, whole, every=1), STRUCTURED)
    tokenizer.model = _extended(tokenizer, merges)
    merges = _merges_of(_split(tokenizer, structured), STRUCTURED - len(merges))
    tokenizer.model = _extended(tokenizer, merges)
    tokenizer.add_tokens([AddedToken(marker, normalized=False, special=False) for marker in MARKERS])
    return tokenizer


def _split(tokenizer: Tokenizer, texts: Iterable[str], every: int | None = None) -> dict[tuple[str, ...], int]:
    """Return the words of `texts` as tuples of tokens, with their number, or `every` as their number."""
    counts = Counter(word for text in texts for word, _ in tokenizer.pre_tokenizer.pre_tokenize_str(text))
    return {tuple(t.value for t in tokenizer.model.tokenize(word)): every or n for word, n in counts.items()}


def _merges_of(words: dict[tuple[str, ...], int], most: int) -> list[tuple[str, str]]:
    """Return at most `most` merges of the most frequent pairs, one after the other."""
    merges: list[tuple[str, str]] = []
    while len(merges) < most:
        pairs: Counter[tuple[str, str]] = Counter()
        for word, count in words.items():
            for pair in pairwise(word):
                pairs[pair] += count
        if not pairs:
            break
        best = max(pairs, key=lambda pair: (pairs[pair], pair))
        merges.append(best)
        words = {tuple(_merge(word, best)): count for word, count in words.items()}
    return merges


def _extended(tokenizer: Tokenizer, merges: list[tuple[str, str]]) -> models.BPE:
    """Return the BPE with more merges after its own."""
    state = json.loads(tokenizer.to_str())["model"]
    vocab = state["vocab"]
    for pair in merges:
        vocab.setdefault("".join(pair), len(vocab))
    return models.BPE(vocab=vocab, merges=[*(tuple(pair) for pair in state["merges"]), *merges])


def _merge(tokens: Iterable[str], pair: tuple[str, str]) -> list[str]:
    """Return the tokens with each occurrence of `pair` as one."""
    merged: list[str] = []
    for token in tokens:
        if merged and (merged[-1], token) == pair:
            merged[-1] += token
        else:
            merged.append(token)
    return merged


def save_tokenizer(tokenizer: Tokenizer, folder: Path, max_length: int) -> None:
    """Write the two tokenizer files into `folder`."""
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "added_tokens_decoder": {
            str(tokenizer.token_to_id(token)): {
                "content": token,
                "lstrip": False,
                "normalized": False,
                "rstrip": False,
                "single_word": False,
                "special": token in SPECIAL,
            }
            for token in (*SPECIAL, *MARKERS)
        },
        "additional_special_tokens": [TURN_START],
        "bos_token": None,
        "chat_template": CHAT_TEMPLATE,
        "clean_up_tokenization_spaces": False,
        "eos_token": TURN_END,
        "model_max_length": max_length,
        "pad_token": PAD,
        "tokenizer_class": "PreTrainedTokenizerFast",
        "unk_token": None,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2, ensure_ascii=False) + "\n")
