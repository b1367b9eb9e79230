"""Llama and Gemma 3 in numpy, from a GGUF file: shares no code with Inflight.

The package ``gguf`` reads the file and decodes its blocks. A whole sequence is computed at once, in float32, without a
cache.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf.quants import dequantize

Array = np.ndarray[Any, np.dtype[np.float32]]
_QUERIES = 256
"""Rows of attention, and of logits, that are computed at a time."""


class Reference:
    """A model whose log-probabilities others are held to."""

    def __init__(self, path: Path) -> None:
        reader = gguf.GGUFReader(path)
        self._weights: dict[str, Array] = {
            tensor.name: dequantize(tensor.data, tensor.tensor_type).astype(np.float32, copy=False)
            for tensor in reader.tensors
        }
        self._fields = {name: field.contents() for name, field in reader.fields.items() if "ggml.tok" not in name}
        self._is_gemma = self._fields["general.architecture"] == "gemma3"

    def _said(self, name: str) -> Any:
        return self._fields[f"{self._fields['general.architecture']}.{name}"]

    @cached_property
    def _heads(self) -> tuple[int, int, int]:
        """Heads of queries, heads of keys and values, and the size of one."""
        queries = self._said("attention.head_count")
        size = self._said("attention.key_length") if self._is_gemma else self._said("embedding_length") // queries
        return queries, self._said("attention.head_count_kv"), size

    def log_probs(self, tokens: Sequence[int], first: int = 0) -> Array:
        """Return ``[len(tokens) - first, vocab]``: row ``i`` is of the token behind ``tokens[: first + i + 1]``."""
        return self._head(self._hidden(tokens)[first:])

    def scores(self, tokens: Sequence[int]) -> Array:
        """Return the log-prob of each token but the first."""
        hidden, scores = self._hidden(tokens[:-1]), []
        for begin in range(0, len(hidden), _QUERIES):  # a row of Gemma's is a megabyte
            rows = self._head(hidden[begin : begin + _QUERIES])
            scores.append(rows[range(len(rows)), tokens[begin + 1 : begin + 1 + len(rows)]])
        return np.concatenate(scores)

    def _head(self, hidden: Array) -> Array:
        """Return log-probs; both models tie their head to the embedding."""
        logits = hidden @ self._weights["token_embd.weight"].T
        logits -= logits.max(-1, keepdims=True)
        logits -= np.log(np.exp(logits).sum(-1, keepdims=True, dtype=np.float64)).astype(np.float32)
        return logits

    def _hidden(self, tokens: Sequence[int]) -> Array:
        x = self._weights["token_embd.weight"][list(tokens)]
        if self._is_gemma:
            x = x * np.float32(np.sqrt(x.shape[1]))
        for layer in range(self._said("block_count")):
            x = self._gemma_layer(x, layer) if self._is_gemma else self._llama_layer(x, layer)
        return self._norm(x, "output_norm.weight")

    def _llama_layer(self, x: Array, layer: int) -> Array:
        weight = self._of_layer(layer)
        x = x + self._attend(self._norm(x, f"blk.{layer}.attn_norm.weight"), layer, self._said("rope.freq_base"), None)
        h = self._norm(x, f"blk.{layer}.ffn_norm.weight")
        gate = h @ weight("ffn_gate").T
        return x + (gate / (1 + np.exp(-gate)) * (h @ weight("ffn_up").T)) @ weight("ffn_down").T

    def _gemma_layer(self, x: Array, layer: int) -> Array:
        """Five layers with a window and a base of 10,000 precede each layer that sees all."""
        weight, sees_all = self._of_layer(layer), layer % 6 == 5
        base = self._said("rope.freq_base") if sees_all else 10_000.0
        window = None if sees_all else self._said("attention.sliding_window")
        attended = self._attend(self._norm(x, f"blk.{layer}.attn_norm.weight"), layer, base, window)
        x = x + self._norm(attended, f"blk.{layer}.post_attention_norm.weight")
        h = self._norm(x, f"blk.{layer}.ffn_norm.weight")
        made = (_gelu(h @ weight("ffn_gate").T) * (h @ weight("ffn_up").T)) @ weight("ffn_down").T
        return x + self._norm(made, f"blk.{layer}.post_ffw_norm.weight")

    def _of_layer(self, layer: int) -> Callable[[str], Array]:
        return lambda name: self._weights[f"blk.{layer}.{name}.weight"]

    def _norm(self, x: Array, name: str) -> Array:
        epsilon = np.float32(self._said("attention.layer_norm_rms_epsilon"))
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + epsilon) * self._weights[name]

    def _attend(self, x: Array, layer: int, base: float, window: int | None) -> Array:
        """Return attention's output for ``[tokens, hidden]``; a token sees ``window`` tokens, itself among them."""
        heads, kv_heads, size = self._heads
        weight, count = self._of_layer(layer), len(x)
        query = (x @ weight("attn_q").T).reshape(count, heads, size)
        key = (x @ weight("attn_k").T).reshape(count, kv_heads, size)
        value = (x @ weight("attn_v").T).reshape(count, kv_heads, size).transpose(1, 0, 2)
        if self._is_gemma:
            query = self._norm(query, f"blk.{layer}.attn_q_norm.weight")
            key = self._norm(key, f"blk.{layer}.attn_k_norm.weight")
        query, key = (self._rotate(one, base).transpose(1, 0, 2) for one in (query, key))
        query = query.reshape(kv_heads, heads // kv_heads, count, size) / np.float32(np.sqrt(size))
        out = np.empty((count, heads * size), np.float32)
        for begin in range(0, count, _QUERIES):
            end = min(begin + _QUERIES, count)
            least = 0 if window is None else max(0, begin - window + 1)
            scores = query[:, :, begin:end] @ key[:, None, least:end].transpose(0, 1, 3, 2)
            distance = np.arange(begin, end)[:, None] - np.arange(least, end)
            scores[..., (distance < 0) | (distance >= (window or count))] = -np.inf
            scores = np.exp(scores - scores.max(-1, keepdims=True))
            seen = scores / scores.sum(-1, keepdims=True) @ value[:, None, least:end]
            out[begin:end] = seen.reshape(heads, end - begin, size).transpose(1, 0, 2).reshape(end - begin, -1)
        return out @ weight("attn_output").T

    def _rotate(self, x: Array, base: float) -> Array:
        """Rotate ``[tokens, heads, size]``: llama.cpp stores Llama's pairs as neighbours, Gemma's as halves."""
        size = x.shape[-1]
        angles = np.arange(len(x))[:, None] * base ** (-np.arange(0, size, 2) / size)
        cos, sin = (function(angles).astype(np.float32)[:, None] for function in (np.cos, np.sin))
        if self._is_gemma:
            a, b = x[..., : size // 2], x[..., size // 2 :]
            return np.concatenate((a * cos - b * sin, b * cos + a * sin), -1)
        a, b = x[..., ::2], x[..., 1::2]
        return np.stack((a * cos - b * sin, b * cos + a * sin), -1).reshape(x.shape)


def _gelu(x: Array) -> Array:
    """Return GELU by its approximation with a tangent."""
    return np.float32(0.5) * x * (1 + np.tanh(np.float32(np.sqrt(2 / np.pi)) * (x + np.float32(0.044715) * x**3)))
