"""The next token's logits for whole sequences, computed as the engine computes them: to measure a checkpoint's quality.

Keys and values go through the same paged cache as in serving, so that a quantized cache is part of what is measured.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor, nn

from inflight.engine.attention.torch_backend import QueryRange, TorchAttention
from inflight.engine.attention.torch_recurrence import StateRange, TorchRecurrence
from inflight.engine.checkpoint import load_config, load_model, outline_model, plain_name, resolve_dtype
from inflight.engine.device import resolve_device
from inflight.engine.models.layers import Attend, AttentionOptions
from inflight.engine.quant.linears import QuantizedLinear

_BLOCK_SIZE = 64


class Scorer:
    """A checkpoint, loaded to be measured. Every linear is a module of its own, under its name in the checkpoint."""

    def __init__(
        self,
        directory: Path,
        dtype: Literal["auto", "float32", "bfloat16", "float64"] = "auto",
        kv_dtype: Literal["auto", "fp8", "int8", "bfloat16", "float32"] = "auto",
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
        config = load_config(directory)
        self._device = resolve_device(device)
        self.max_length = config.max_position_embeddings
        computed_in = torch.float64 if dtype == "float64" else resolve_dtype(dtype, config, self._device)
        outline = outline_model(directory, config, computed_in, self._device, self.max_length, kv_dtype, separate=True)
        self._loaded = load_model(outline, self._device)
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
    def logits(self, tokens: Sequence[int]) -> Tensor:
        """Return float32 ``[len(tokens), vocab]``: row ``i`` is of the token after ``tokens[: i + 1]``.

        Raises:
            ValueError: there are no tokens, or more than ``max_length``.
        """
        return self.model.logits(self._hidden(tokens, self._attend(tokens)))

    @torch.inference_mode()
    def kv_ranges(self, tokens: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Return the largest absolute key and value of each layer, float32 ``[layers]`` both.

        They are 0 where a layer has no attention. Raises as ``logits``.
        """
        attend = self._attend(tokens)
        keys, values = torch.zeros(2, self.model.config.num_layers, device=self._device)

        def observe(
            layer: int, query: Tensor, key: Tensor | None, value: Tensor | None, options: AttentionOptions
        ) -> Tensor:
            if key is not None and value is not None:
                keys[layer], values[layer] = key.float().abs().max(), value.float().abs().max()
            return attend(layer, query, key, value, options)

        self._hidden(tokens, observe)
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

    def _attend(self, tokens: Sequence[int]) -> TorchAttention:
        """Return attention over an empty cache that has room for ``tokens``."""
        if not 0 < len(tokens) <= self.max_length:
            raise ValueError(f"{len(tokens)} tokens; there must be 1 to {self.max_length}")
        blocks = range(-(-len(tokens) // _BLOCK_SIZE))
        kv = self._loaded.make_kv_pool(len(blocks), _BLOCK_SIZE)
        return TorchAttention(kv, [QueryRange(0, 0, len(tokens), blocks)], _BLOCK_SIZE)

    def _hidden(self, tokens: Sequence[int], attend: Attend) -> Tensor:
        device, count = self._device, len(tokens)
        ids, positions = torch.tensor(tokens, device=device), torch.arange(count, device=device)
        if not self.model.config.recurrent:
            return self.model(ids, positions, attend)
        recur = TorchRecurrence(self._loaded.make_state_pool(1), [StateRange(0, 0, count, count, slot=0)])
        return self.model(ids, positions, attend, recur)

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
