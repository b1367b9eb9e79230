"""Loads a Hugging Face checkpoint directory into a model, quantized by ModelOpt or not."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor, nn

from inflight.engine.attention.paged import KvTensors
from inflight.engine.models.config import ModelConfig, read_model_config
from inflight.engine.models.decoder import DecoderModel, make_model
from inflight.engine.quant.config import Quantization, load_quantization
from inflight.engine.quant.convert import LinearParts, convert_linears
from inflight.engine.quant.kv_cache import Fp8KvTensors, KvScales
from inflight.engine.shards import Shards
from inflight.errors import DeploymentError
from inflight.text.checkpoint import read_json

_SCALES = (".weight_scale", ".weight_scale_2", ".input_scale", ".pre_quant_scale", ".k_scale", ".v_scale")
_QUANTIZED_TYPES = {torch.float8_e4m3fn, torch.float8_e5m2, torch.int8, torch.uint8}


@dataclass(frozen=True)
class LoadedModel:
    """A model with its weights, and what else its checkpoint holds."""

    model: DecoderModel
    quantization: Quantization | None
    kv_scales: KvScales | None
    """None: the KV cache is not quantized."""
    exact: bool
    """Whether it adds up in float64."""

    @property
    def nbytes(self) -> int:
        """Memory of the weights."""
        return sum(parameter.nbytes for parameter in self.model.parameters())

    @property
    def scheme(self) -> str:
        """The names of the schemes that weights are quantized in."""
        return ", ".join(self.quantization.schemes if self.quantization else ()) or "none"

    def make_kv_tensors(self, num_blocks: int, block_size: int) -> KvTensors:
        """Return the KV cache's memory: FP8 or the type of the computation."""
        config, weight, scales = self.model.config, self.model.model.norm.weight, self.kv_scales
        if scales is not None:
            return Fp8KvTensors(config, num_blocks, block_size, weight.dtype, weight.device, scales)
        return KvTensors(config, num_blocks, block_size, weight.dtype, weight.device, self.exact)


def load_config(directory: Path) -> ModelConfig:
    """Read the model's shape.

    Raises:
        DeploymentError: ``config.json`` is missing or not supported.
    """
    return read_model_config(read_json(directory / "config.json"))


def resolve_dtype(wanted: str, config: ModelConfig) -> torch.dtype:
    """Return the type to compute in: the one asked for, or the checkpoint's own; float16 becomes float32."""
    name = config.dtype if wanted == "auto" else wanted
    return torch.bfloat16 if name == "bfloat16" else torch.float32


def load_model(
    directory: Path,
    config: ModelConfig,
    dtype: torch.dtype,
    device: torch.device,
    served_length: int,
    kv_cache_dtype: Literal["auto", "fp8"],
    separate: bool = False,
) -> LoadedModel:
    """Build the model and fill it.

    Args:
        directory: the checkpoint's.
        config: of the checkpoint.
        dtype: of the computation, and of weights that are not quantized.
        device: where the weights go.
        served_length: the longest sequence that will be served.
        kv_cache_dtype: auto: FP8 where the checkpoint is meant for it, else the type of the computation; fp8.
        separate: give every part of a fused projection a linear of its own.

    Raises:
        DeploymentError: a file or tensor is missing, unexpected, or of the wrong shape; it is named.
    """
    quantization, shards = load_quantization(directory), Shards(directory)
    calibrated = quantization is not None and quantization.fp8_kv_cache
    fp8_kv_cache = calibrated or kv_cache_dtype == "fp8"
    exact = fp8_kv_cache or (quantization is not None and quantization.rounds_inputs)
    model = make_model(config, served_length).to(dtype)
    convert_linears(model, quantization, shards.names, exact, separate)
    model.to_empty(device=device)
    for rope in model.ropes:
        rope.to(device)
    if config.tie_word_embeddings:
        model.lm_head.weight = model.model.embed_tokens.weight
    kv_scales = KvScales.ones(config.num_layers, device) if fp8_kv_cache else None
    targets = _targets(model, shards.names)
    # A cache meant for FP8 has scales for all layers, or none, and then they are one.
    if calibrated and kv_scales is not None and shards.names & kv_scales.named().keys():
        targets |= kv_scales.named()
    _fill(targets, shards, ignored={"lm_head.weight"} if config.tie_word_embeddings else set())
    return LoadedModel(model.eval().requires_grad_(False), quantization, kv_scales, exact)


def _fill(targets: dict[str, Tensor], shards: Shards, ignored: set[str]) -> None:
    """Copy every tensor of the checkpoint to its target."""
    for name, tensor in shards:
        if name in ignored or name.endswith("rotary_emb.inv_freq"):
            continue
        target = targets.pop(name, None)
        if target is None:
            raise DeploymentError(f"checkpoint: tensor {name} has no place in this architecture")
        _copy(name, tensor, target)
    if targets:
        raise DeploymentError(f"checkpoint: no tensor for {', '.join(sorted(targets)[:5])} ({len(targets)} in all)")


def _copy(name: str, tensor: Tensor, target: Tensor) -> None:
    if tensor.shape != target.shape and not tensor.numel() == target.numel() == 1:
        raise DeploymentError(f"checkpoint: tensor {name} is {list(tensor.shape)}; expected {list(target.shape)}")
    if tensor.dtype != target.dtype and {tensor.dtype, target.dtype} & _QUANTIZED_TYPES:
        raise DeploymentError(
            f"checkpoint: tensor {name} is {tensor.dtype}; by the checkpoint's quantization it should be {target.dtype}"
        )
    if name.endswith(_SCALES):
        _check_scale(name, tensor.reshape(target.shape))
    target.copy_(tensor.reshape(target.shape))


def _check_scale(name: str, scale: Tensor) -> None:
    smallest, largest = (value.item() for value in scale.float().aminmax())  # one that is no number is both
    if not scale.dim() and not 0 < smallest < math.inf:
        raise DeploymentError(f"checkpoint: tensor {name} is {smallest}; a scale must be a positive number")
    # Those of rows, groups and channels only multiply: a part of the weight that is zero may have zero.
    if not 0 <= smallest <= largest < math.inf:
        wrong = largest if smallest >= 0 else smallest
        raise DeploymentError(f"checkpoint: tensor {name} has {wrong}; its scales must be finite and not negative")


def _targets(model: DecoderModel, names: frozenset[str]) -> dict[str, Tensor]:
    """Return where each tensor of the checkpoint goes, by its name there: a parameter, or some rows of one."""
    targets: dict[str, Tensor] = {}
    for ours, parameter in model.named_parameters():  # a tied lm_head comes once, as the embedding
        module, _, kind = ours.rpartition(".")
        name = checkpoint_name(model, module)
        above, _, last = name.rpartition(".")
        rows = model.config.fused_rows.get(last)
        if rows is None or f"{name}.weight" in names:
            targets[f"{name}.{kind}"] = parameter.data
        else:
            views = parameter.data.split(list(rows.values()))
            targets |= {f"{above}.{part}.{kind}": view for part, view in zip(rows, views, strict=True)}
    return targets


def checkpoint_name(model: nn.Module, module_name: str) -> str:
    """Return the checkpoint's name for a module: the container of a fused projection's parts has none there."""
    above, _, last = module_name.rpartition(".")
    if isinstance(model.get_submodule(above), LinearParts):
        above = above.rpartition(".")[0]
    return f"{above}.{last}" if above else last
