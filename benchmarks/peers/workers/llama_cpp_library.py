"""llama.cpp as a worker: its library, called as its own llama-batched-bench does.

As there, the tokens that are decoded are drawn at random and none is sampled: llama.cpp is spared that work.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from benchmarks.peers.workers.gguf_file import write_gguf
from benchmarks.peers.workers.work import Cell, Meter, Prompts, Settings, main

PACKAGES = ("llama-cpp-python",)
FILE = "model.gguf"
_BATCH = 2048
"""Tokens of a call, as llama-batched-bench has it; llama.cpp computes ``n_ubatch`` of them at a time."""
_TYPES = {"f32": 0, "f16": 1, "q8_0": 8, "bf16": 30}
"""ggml's numbers of the types of a KV cache."""
_FILE_TYPES = {"q4_0": 2, "q8_0": 7, "q4_K_M": 15, "mxfp4-q8_0": 38}
"""llama.cpp's numbers of the types of a file."""
_CONVERTED: Mapping[str, Literal["bf16", "f16"]] = {
    "bf16": "bf16",
    "f16": "f16",
    "mxfp4-bf16": "bf16",
    "mxfp4-f16": "f16",
}
"""The types of the files that are used as they are converted. Experts in MXFP4 stay so."""


class Batch:
    """Tokens of several sequences as llama.cpp takes them, in arrays of numpy."""

    def __init__(self, library: Any, tokens: Any, positions: Any, streams: Any, wanted: Any) -> None:
        """
        Args:
            library: the module ``llama_cpp``.
            tokens: ``[n]``.
            positions: ``[n]``, of each in its sequence.
            streams: ``[n]``, the sequence of each.
            wanted: ``[n]``, whether the logits after it are wanted.
        """
        self._arrays: list[Any] = [np.ascontiguousarray(one, np.int32) for one in (tokens, positions, streams)]
        count, ids = len(self._arrays[0]), self._arrays[2]
        ones, addresses = np.ones(count, np.int32), ids.ctypes.data + 4 * np.arange(count, dtype=np.uintp)
        flags = np.ascontiguousarray(wanted, np.int8)
        self._arrays += [ones, addresses, flags]
        given = library.llama_batch()
        given.n_tokens = count
        fields = {"token": self._arrays[0], "pos": self._arrays[1], "n_seq_id": ones, "seq_id": addresses}
        for name, array in (fields | {"logits": flags}).items():
            kind = dict(library.llama_batch._fields_)[name]
            setattr(given, name, ctypes.cast(ctypes.c_void_p(array.ctypes.data), kind))
        self.given = given


class Model:
    """The library's model, and a context for each number of streams: one divides its cache evenly among them."""

    def __init__(self, library: Any, contexts: Mapping[int, Any], vocab: int) -> None:
        self._library, self._contexts, self._vocab = library, contexts, vocab
        self._context: Any = None
        self._generator = np.random.default_rng(0)

    def run(self, prompts: Prompts, tokens: int, meter: Meter) -> None:
        """Answer each prompt; see ``work.Model``."""
        streams, length = len(prompts), len(prompts[0])
        self._begin(streams)
        ids, places = np.array(prompts).ravel(), np.tile(np.arange(length), streams)
        of = np.repeat(np.arange(streams), length)
        for begin in range(0, len(ids), _BATCH):
            part = slice(begin, begin + _BATCH)
            self._decode(ids[part], places[part], of[part], places[part] == length - 1)
        meter.came(dict.fromkeys(range(streams), 1))
        every = np.arange(streams)
        for step in range(tokens - 1):
            drawn = self._generator.integers(4, 4096, streams)
            self._decode(drawn, np.full(streams, length + step), every, np.ones(streams))
            meter.came(dict.fromkeys(range(streams), 1))

    def log_probs(self, prompt: list[int]) -> npt.NDArray[np.float32]:
        """Return the prompt's logits."""
        self._begin(1)
        count = len(prompt)
        self._decode(np.array(prompt), np.arange(count), np.zeros(count), np.ones(count))
        pointer = self._library.llama_get_logits(self._context)
        return np.ctypeslib.as_array(pointer, (count, self._vocab)).copy()

    def _decode(self, tokens: Any, positions: Any, streams: Any, wanted: Any) -> None:
        batch = Batch(self._library, tokens, positions, streams, wanted)
        if code := self._library.llama_decode(self._context, batch.given):
            raise RuntimeError(f"llama_decode returned {code}")
        self._library.llama_synchronize(self._context)

    def _begin(self, streams: int) -> None:
        self._context = self._contexts[streams]
        self._library.llama_memory_clear(self._library.llama_get_memory(self._context), False)


def prepare(source: Path, output: Path, settings: Settings) -> None:
    """Write the checkpoint as a GGUF file of the type ``settings["weights"]``."""
    kind = settings["weights"]
    if kind in _CONVERTED:
        write_gguf(source, output / FILE, _CONVERTED[kind])
        return
    import llama_cpp

    converted = output / "bf16.gguf"
    write_gguf(source, converted)
    chosen = llama_cpp.llama_model_quantize_default_params()
    chosen.ftype = _FILE_TYPES[kind]
    if code := llama_cpp.llama_model_quantize(bytes(converted), bytes(output / FILE), ctypes.byref(chosen)):
        raise RuntimeError(f"llama_model_quantize returned {code}")
    converted.unlink()


def load(model: Path, settings: Settings, threads: int, cells: Sequence[Cell]) -> Model:
    """Return the model with a context for the largest of the cells."""
    import llama_cpp

    llama_cpp.llama_backend_init()
    loaded = llama_cpp.llama_model_load_from_file(bytes(model / FILE), llama_cpp.llama_model_default_params())
    vocab = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(loaded))
    counts = {cell.streams for cell in cells}
    longest = {count: max(cell.prompt + cell.output for cell in cells if cell.streams == count) for count in counts}
    contexts = {count: _context(loaded, settings, threads, count, length + 32) for count, length in longest.items()}
    return Model(llama_cpp, contexts, vocab)


def _context(model: Any, settings: Settings, threads: int, streams: int, length: int) -> Any:
    import llama_cpp

    chosen = llama_cpp.llama_context_default_params()
    chosen.n_ctx, chosen.n_seq_max = streams * length, streams
    chosen.n_batch, chosen.n_ubatch = _BATCH, settings.get("ubatch", 512)
    chosen.n_threads = chosen.n_threads_batch = threads
    chosen.type_k = chosen.type_v = _TYPES[settings["kv"]]
    chosen.flash_attn_type = 1
    if not (context := llama_cpp.llama_init_from_model(model, chosen)):
        raise RuntimeError(f"llama.cpp made no context for {streams} streams of {length} tokens")
    return context


if __name__ == "__main__":
    main(sys.modules[__name__])  # type: ignore[arg-type]
