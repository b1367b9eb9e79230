"""Tokenizers as GGUF files have them, written by the ``gguf`` package as llama.cpp's conversion does."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from inflight.resources import DEMO, bundled

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6


def add_byte_level(writer: gguf.GGUFWriter, tokenizer: Mapping[str, Any], pre: str, vocab_size: int = 0) -> None:
    """Add what a byte-level ``tokenizer.json`` says, filled up to ``vocab_size`` tokens."""
    added = {token["content"]: token for token in tokenizer["added_tokens"]}
    ids = {number: token for token, number in tokenizer["model"]["vocab"].items()}
    ids |= {token["id"]: content for content, token in added.items()}
    count = max(vocab_size, max(ids) + 1)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list([ids.get(number, f"[PAD{number}]") for number in range(count)])
    kinds = {token: CONTROL if entry["special"] else USER_DEFINED for token, entry in added.items()}
    writer.add_token_types([kinds.get(ids[number], NORMAL) if number in ids else UNUSED for number in range(count)])
    merges = tokenizer["model"]["merges"]
    writer.add_token_merges([merge if isinstance(merge, str) else " ".join(merge) for merge in merges])


def add_demo(writer: gguf.GGUFWriter, vocab_size: int = 4100) -> None:
    """Add the demo model's tokenizer, filled up to ``vocab_size`` tokens."""
    model = bundled(DEMO) / "model"
    add_byte_level(writer, read_tokenizer(model / "tokenizer.json"), "llama-bpe", vocab_size)
    writer.add_chat_template(read_tokenizer(model / "tokenizer_config.json")["chat_template"])
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(3)
    writer.add_add_bos_token(False)


def add_sentencepiece(writer: gguf.GGUFWriter, tokenizer: Mapping[str, Any]) -> dict[str, float]:
    """Add the tokens of a ``tokenizer.json`` with byte fallback, the earlier the likelier; return their scores."""
    special = {token["content"] for token in tokenizer["added_tokens"]}
    tokens = sorted(tokenizer["model"]["vocab"], key=tokenizer["model"]["vocab"].__getitem__)
    scores = {token: 0.0 if token in special else -float(number) for number, token in enumerate(tokens)}
    writer.add_tokenizer_model("llama")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(tokens)
    writer.add_token_scores(list(scores.values()))
    writer.add_token_types([
        UNKNOWN if token == "<unk>" else CONTROL if token in special else BYTE if token.startswith("<0x") else NORMAL
        for token in tokens
    ])  # fmt: skip
    writer.add_add_space_prefix(tokenizer["normalizer"]["normalizers"][0]["type"] == "Prepend")
    for name, add in (("<s>", writer.add_bos_token_id), ("</s>", writer.add_eos_token_id)):
        add(tokens.index(name))
    writer.add_unk_token_id(tokens.index("<unk>"))
    return scores


def write_vocabulary(path: Path, add: Callable[[gguf.GGUFWriter], object], architecture: str = "llama") -> Path:
    """Write a file that has a tokenizer, and of the model so much that its configuration can be read."""
    writer = gguf.GGUFWriter(path, architecture)
    add(writer)
    writer.add_context_length(64)
    writer.add_embedding_length(8)
    writer.add_block_count(1)
    writer.add_feed_forward_length(8)
    writer.add_head_count(2)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tensor("token_embd.weight", np.zeros((7, 8), np.float32))
    for step in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file, writer.close):
        step()
    return path


def read_tokenizer(path: Path) -> dict[str, Any]:
    """Read a ``tokenizer.json``."""
    data: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return data
