"""Loads a Hugging Face checkpoint directory (safetensors, sharded or not) into a model."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from inflight.engine.models.config import ModelConfig, read_model_config
from inflight.engine.models.decoder import DecoderModel, make_model
from inflight.errors import DeploymentError
from inflight.text.checkpoint import read_json

log = logging.getLogger(__name__)

_FUSED = {
    "q_proj": ("qkv_proj", 0),
    "k_proj": ("qkv_proj", 1),
    "v_proj": ("qkv_proj", 2),
    "gate_proj": ("gate_up_proj", 0),
    "up_proj": ("gate_up_proj", 1),
}
"""Projections that share an input are one matrix here: name in the checkpoint -> (ours, place among its rows)."""


def load_config(directory: Path) -> ModelConfig:
    """Read the model's shape.

    Raises:
        DeploymentError: ``config.json`` is missing or not supported.
    """
    return read_model_config(read_json(directory / "config.json"))


def resolve_dtype(wanted: str, config: ModelConfig) -> torch.dtype:
    """Return the type to hold weights in: the one asked for, or the checkpoint's own; float16 becomes float32."""
    name = config.dtype if wanted == "auto" else wanted
    return torch.bfloat16 if name == "bfloat16" else torch.float32


def load_model(
    directory: Path, config: ModelConfig, dtype: torch.dtype, device: torch.device, served_length: int
) -> DecoderModel:
    """Build the model and fill it.

    Raises:
        DeploymentError: a file or tensor is missing, unexpected, or of the wrong shape; it is named.
    """
    model = make_model(config, served_length).to(dtype).to_empty(device=device)
    for rope in model.ropes:
        rope.to(device)
    if config.tie_word_embeddings:
        model.lm_head.weight = model.model.embed_tokens.weight
    loader = _Loader(model, config)
    for name, tensor in _tensors(directory):
        loader.load(name, tensor)
    loader.finish()
    return model.eval().requires_grad_(False)


class _Loader:
    """Copies tensors into a model's parameters and keeps count of what is still empty."""

    def __init__(self, model: nn.Module, config: ModelConfig) -> None:
        self._parameters = dict(model.named_parameters())
        kv_rows = config.num_kv_heads * config.head_dim
        self._rows = {
            "qkv_proj": (config.num_heads * config.head_dim, kv_rows, kv_rows),
            "gate_up_proj": (config.intermediate_size, config.intermediate_size),
        }
        self._missing = {(name, part) for name in self._parameters for part in self._parts(name)}
        self._tied = config.tie_word_embeddings

    def load(self, name: str, tensor: Tensor) -> None:
        """Copy one tensor of the checkpoint to its place."""
        if name.endswith("rotary_emb.inv_freq") or (name == "lm_head.weight" and self._tied):
            return
        ours, part = self._place(name)
        parameter = self._parameters.get(ours)
        if parameter is None:
            raise DeploymentError(f"checkpoint: tensor {name} has no place in this architecture")
        target = parameter.data if part is None else parameter.data.split(self._target_rows(ours))[part]
        if target.shape != tensor.shape:
            raise DeploymentError(f"checkpoint: tensor {name} is {list(tensor.shape)}; expected {list(target.shape)}")
        target.copy_(tensor)
        self._missing.difference_update((ours, one) for one in (self._parts(ours) if part is None else (part,)))

    def finish(self) -> None:
        """Check that every parameter has been filled."""
        missing = sorted({name for name, _ in self._missing})
        if missing:
            raise DeploymentError(f"checkpoint: no tensor for {', '.join(missing[:5])} ({len(missing)} in all)")

    def _place(self, name: str) -> tuple[str, int | None]:
        module, _, kind = name.rpartition(".")
        above, _, last = module.rpartition(".")
        if last not in _FUSED:
            return name, None
        fused, part = _FUSED[last]
        return f"{above}.{fused}.{kind}", part

    def _parts(self, name: str) -> range:
        return range(len(self._target_rows(name)))

    def _target_rows(self, name: str) -> tuple[int, ...]:
        return self._rows.get(name.split(".")[-2], (0,))


def _tensors(directory: Path) -> Iterator[tuple[str, Tensor]]:
    """Yield every tensor of the checkpoint by name, one in memory at a time."""
    for file in _files(directory):
        log.info("loading %s", file.name)
        try:
            with safe_open(file, framework="pt") as shard:
                for name in shard.keys():  # noqa: SIM118 (not a mapping)
                    yield name, shard.get_tensor(name)
        except (OSError, SafetensorError) as error:
            raise DeploymentError(f"{file}: cannot be read: {error}") from None


def _files(directory: Path) -> list[Path]:
    index = directory / "model.safetensors.index.json"
    if index.is_file():
        places = read_json(index).get("weight_map")
        if not isinstance(places, dict):
            raise DeploymentError(f"{index}: weight_map is {places!r}; it must say which file holds which tensor")
        return [directory / name for name in sorted(set(map(str, places.values())))]
    file = directory / "model.safetensors"
    if not file.is_file():
        raise DeploymentError(f"{directory}: no model.safetensors and no model.safetensors.index.json")
    return [file]
