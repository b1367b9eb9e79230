"""The next token's logits for whole sequences, computed as the engine computes them: to measure a checkpoint's quality.

Keys and values go through the same paged cache as in serving, so that a quantized cache is part of what is measured.
``StepScorer`` is as fast as the engine; ``Scorer`` has each linear for itself, which can be looked at and replaced.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Literal, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from inflight.engine.attention.torch_backend import QueryRange, TorchAttention
from inflight.engine.attention.torch_recurrence import StateRange, TorchRecurrence
from inflight.engine.checkpoint import (
    LoadedModel,
    load_config,
    load_model,
    outline_model,
    plain_name,
    resolve_dtype,
)
from inflight.engine.device import resolve_device
from inflight.engine.kvcache.memory_pool import KvPool
from inflight.engine.models.layers import Attend, AttentionOptions
from inflight.engine.native.bindings import NativeError
from inflight.engine.native.prepare import native_model
from inflight.engine.quant.linears import QuantizedLinear
from inflight.errors import DeploymentError
from inflight.settings.threads import cpu_threads

_BLOCK_SIZE = 64
Dtype = Literal["auto", "float32", "bfloat16", "float64"]
KvDtype = Literal["auto", "fp8", "int8", "bfloat16", "float32"]


class Logits(Protocol):
    """A model that is asked for the next token's distribution."""

    def logits(self, tokens: Sequence[int], first: int = 0) -> Tensor:
        """Return float32 ``[len(tokens) - first, vocab]``: row ``i`` is of the token after ``first + i + 1`` of them.

        Raises:
            ValueError: there are no tokens, or more than the model's longest sequence.
        """


class StepScorer:
    """A checkpoint, loaded to be scored by what serves it: on a CPU by the native step, if that computes the model."""

    def __init__(
        self,
        directory: Path,
        dtype: Dtype = "auto",
        kv_dtype: KvDtype = "auto",
        device: str = "auto",
        cpu_step: str = "auto",
        weights: str = "checkpoint",
    ) -> None:
        """Load it; ``cpu_step`` and ``weights`` are those of a deployment's engine, the rest is as for ``Scorer``.

        Raises:
            DeploymentError: the checkpoint or the device cannot be used, or not so.
        """
        self._loaded, self.max_length = _load(directory, dtype, kv_dtype, resolve_device(device), separate=False)
        model = self._loaded.model
        self._native = native_model(model, model.device, cpu_step, cpu_threads(native=True), weights)

    @torch.inference_mode()
    def logits(self, tokens: Sequence[int], first: int = 0) -> Tensor:
        """Return what ``Logits`` says.

        Raises:
            ValueError: as ``Logits`` says.
            DeploymentError: the native step does not compute with such a KV cache.
        """
        if self._native is None:
            return self._loaded.model.logits(_hidden(self._loaded, tokens, _attend(self._loaded, tokens))[first:])
        pool, blocks = _pool(self._loaded, tokens)
        try:
            self._native.use(pool, _BLOCK_SIZE)
        except NativeError as error:
            raise DeploymentError(error.refusal) from None
        rows = range(first, len(tokens))
        return self._native(np.array(tokens), [QueryRange(0, 0, len(tokens), blocks)], rows)


class Scorer:
    """A checkpoint, loaded to be measured. Every linear is a module of its own, under its name in the checkpoint."""

    def __init__(
        self,
        directory: Path,
        dtype: Dtype = "auto",
        kv_dtype: KvDtype = "auto",
        device: str = "auto",
    ) -> None:
        """
        Args:
            directory: the checkpoint's.
            dtype: of the computation, as ``engine.dtype`` of a deployment; or float64, to hold one implementation of
                quantized arithmetic to another without the noise of sums.
            kv_dtype: as ``kv_cache.dtype`` of a deployment.
            device: as ``engine.device`` of a deployment.

        Raises:
            DeploymentError: the checkpoint or the device cannot be used.
        """
        self._device = resolve_device(device)
        self._loaded, self.max_length = _load(directory, dtype, kv_dtype, self._device, separate=True)
        self.model = self._loaded.model
        self.scheme, self.nbytes = self._loaded.scheme, self._loaded.nbytes
        """The names of the schemes that weights are quantized in, and the memory of the weights."""
        self.kv_scales = self._loaded.kv_scales
        """Of the FP8 KV cache; None: it is not quantized."""
        self._paths = {
            self._loaded.naming.of(plain_name(self.model, path)): path
            for path, module in self.model.named_modules()
            if isinstance(module, nn.Linear | QuantizedLinear)
        }

    @property
    def linears(self) -> Mapping[str, nn.Module]:
        """The linears by name, ``nn.Linear`` or ``QuantizedLinear``; ``lm_head`` and fused projections' parts too."""
        return {name: self.model.get_submodule(path) for name, path in self._paths.items()}

    @torch.inference_mode()
    def weight(self, name: str) -> Tensor:
        """Return float32 ``[rows, columns]``: a linear's weight, as it is computed with."""
        linear = self.linears[name]
        return linear.decode(torch.float32) if isinstance(linear, QuantizedLinear) else linear.weight.float()

    @torch.inference_mode()
    def logits(self, tokens: Sequence[int], first: int = 0) -> Tensor:
        """Return what ``Logits`` says."""
        return self.model.logits(_hidden(self._loaded, tokens, _attend(self._loaded, tokens))[first:])

    @torch.inference_mode()
    def kv_ranges(self, tokens: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Return the largest absolute key and value of each layer, float32 ``[layers]`` both.

        They are 0 where a layer has no attention. Raises as ``logits``.
        """
        attend = _attend(self._loaded, tokens)
        keys, values = torch.zeros(2, self.model.config.num_layers, device=self._device)

        def observe(
            layer: int, query: Tensor, key: Tensor | None, value: Tensor | None, options: AttentionOptions
        ) -> Tensor:
            if key is not None and value is not None:
                keys[layer], values[layer] = key.float().abs().max(), value.float().abs().max()
            return attend(layer, query, key, value, options)

        _hidden(self._loaded, tokens, observe)
        return keys, values

    @contextmanager
    def rescaled(self, layer: int, key_scale: Tensor, value_scale: Tensor) -> Iterator[None]:
        """Compute with other scales of one layer's KV cache for a while; without effect where it is not quantized."""
        scales = self.kv_scales
        tensors = (scales.keys, scales.values) if scales is not None else ()
        kept = [one[layer].clone() for one in tensors]
        try:
            for one, scale in zip(tensors, (key_scale, value_scale), strict=False):
                one[layer] = scale
            yield
        finally:
            for one, scale in zip(tensors, kept, strict=True):
                one[layer] = scale

    @contextmanager
    def replaced(self, modules: Mapping[str, nn.Module]) -> Iterator[None]:
        """Compute with other modules for a while, e.g. another checkpoint's, to see what each does to quality.

        Args:
            modules: by name; linears, or whole layers (``model.layers.3``). AWQ and SmoothQuant move scales between a
                norm and the linears behind it: of such checkpoints only whole layers can be taken.
        """
        paths = {self._paths.get(name, name): module for name, module in modules.items()}
        kept = {path: self.model.get_submodule(path) for path in paths}
        try:
            for path, module in paths.items():
                self.model.set_submodule(path, module)
            yield
        finally:
            for path, module in kept.items():
                self.model.set_submodule(path, module)


def _load(
    directory: Path, dtype: Dtype, kv_dtype: KvDtype, device: torch.device, separate: bool
) -> tuple[LoadedModel, int]:
    """Return a checkpoint and its longest sequence; ``separate``: every linear is a module of its own."""
    config = load_config(directory)
    longest = config.max_position_embeddings
    computed_in = torch.float64 if dtype == "float64" else resolve_dtype(dtype, config, device)
    outline = outline_model(directory, config, computed_in, device, longest, kv_dtype, separate=separate)
    return load_model(outline, device), longest


def _pool(loaded: LoadedModel, tokens: Sequence[int]) -> tuple[KvPool, range]:
    """Return an empty cache that has room for ``tokens``, and its blocks. Raises ValueError."""
    longest = loaded.model.config.max_position_embeddings
    if not 0 < len(tokens) <= longest:
        raise ValueError(f"{len(tokens)} tokens; there must be 1 to {longest}")
    blocks = range(-(-len(tokens) // _BLOCK_SIZE))
    return loaded.make_kv_pool(len(blocks), _BLOCK_SIZE), blocks


def _attend(loaded: LoadedModel, tokens: Sequence[int]) -> TorchAttention:
    """Return attention over an empty cache that has room for ``tokens``. Raises ValueError."""
    pool, blocks = _pool(loaded, tokens)
    return TorchAttention(pool, [QueryRange(0, 0, len(tokens), blocks)], _BLOCK_SIZE)


def _hidden(loaded: LoadedModel, tokens: Sequence[int], attend: Attend) -> Tensor:
    """Return the hidden states ``[tokens, hidden]`` of a sequence that begins with ``tokens``."""
    model, count = loaded.model, len(tokens)
    ids, positions = torch.tensor(tokens, device=model.device), torch.arange(count, device=model.device)
    if not model.config.recurrent:
        return model(ids, positions, attend)
    recur = TorchRecurrence(loaded.make_state_pool(1), [StateRange(0, 0, count, count, slot=0)])
    return model(ids, positions, attend, recur)
