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
DEFINITION_MERGES = 200
"""How many entries of the vocabulary come from definitions of tools instead of prose."""

# Words with their leading space, up to three digits, runs of punctuation, runs of space: the usual split of Llama 3.
SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def train_tokenizer(prose: Iterable[str], definitions: Iterable[str], vocab_size: int) -> Tokenizer:
    """Return a byte-level BPE of `vocab_size` entries; any bytes round-trip.

    The special tokens come first, then what is merged in prose, then in definitions of tools, then the markers.
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
        vocab_size=vocab_size - DEFINITION_MERGES - len(MARKERS),
        special_tokens=list(SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(prose, trainer)
    tokenizer.model = _merged_further(tokenizer, definitions)
    tokenizer.add_tokens([AddedToken(marker, normalized=False, special=False) for marker in MARKERS])
    return tokenizer


def _merged_further(tokenizer: Tokenizer, texts: Iterable[str]) -> models.BPE:
    """Return the BPE with `DEFINITION_MERGES` more merges, of pairs that are frequent in `texts`."""
    counts = Counter(word for text in texts for word, _ in tokenizer.pre_tokenizer.pre_tokenize_str(text))
    words = {word: [token.value for token in tokenizer.model.tokenize(word)] for word in counts}
    state = json.loads(tokenizer.to_str())["model"]
    vocab, merges = state["vocab"], [tuple(pair) for pair in state["merges"]]
    for _ in range(DEFINITION_MERGES):
        pairs: Counter[tuple[str, str]] = Counter()
        for word, tokens in words.items():
            for pair in pairwise(tokens):
                pairs[pair] += counts[word]
        best = max(pairs, key=lambda pair: (pairs[pair], pair))
        merges.append(best)
        vocab["".join(best)] = len(vocab)
        words = {word: _merge(tokens, best) for word, tokens in words.items()}
    return models.BPE(vocab=vocab, merges=merges)


def _merge(tokens: list[str], pair: tuple[str, str]) -> list[str]:
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
