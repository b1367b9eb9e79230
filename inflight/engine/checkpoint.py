"""Loads a Hugging Face checkpoint directory, quantized or not, or a GGUF file into a model."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeAlias

import torch
from torch import Tensor, nn

from inflight.engine.device import BFLOAT16
from inflight.engine.expert_stacks import ExpertStack, expert_stacks
from inflight.engine.gguf_shards import GgufShards, named_in_errors
from inflight.engine.kvcache.memory_pool import Fp8KvPool, Int8KvPool, KvPool, KvScales
from inflight.engine.kvcache.state_pool import StatePool
from inflight.engine.models.adapted.model import AdaptedModel, read_adapted_config
from inflight.engine.models.build import build_model
from inflight.engine.models.config import ModelConfig
from inflight.engine.models.decoder import DecoderModel
from inflight.engine.models.naming import CheckpointNames
from inflight.engine.models.reading import architecture_name, is_known, read_model_config, require_usual_files
from inflight.engine.models.served import ServedModel
from inflight.engine.ordered_rows import OrderedRows, ordered_rows
from inflight.engine.quant.config import Quantization
from inflight.engine.quant.convert import LinearParts, convert_linears
from inflight.engine.quant.readers.methods import load_quantization
from inflight.engine.quant.relay import RelaidTensors, Tensors
from inflight.engine.shards import Shards
from inflight.errors import DeploymentError
from inflight.gguf.files import is_gguf
from inflight.precedence import overruled
from inflight.text.files import read_json

log = logging.getLogger(__name__)

_SCALES = (
    ".weight_scale",
    ".weight_scale_2",
    ".weight_divisor",
    ".input_scale",
    ".pre_quant_scale",
    ".k_scale",
    ".v_scale",
)
_QUANTIZED_TYPES = {torch.float8_e4m3fn, torch.float8_e5m2, torch.int8, torch.uint8}

Weights = Shards | GgufShards
"""What holds the weights of a checkpoint."""


def open_weights(model: Path) -> Weights:
    """Return what holds the weights of a checkpoint directory, or of a GGUF file. Raises DeploymentError."""
    return GgufShards(model) if is_gguf(model) else Shards(model)


@dataclass(frozen=True)
class LoadedModel:
    """A model with its weights, and what else its checkpoint holds."""

    model: ServedModel
    shards: Tensors
    """The checkpoint's files; of other formats, laid out anew."""
    quantization: Quantization | None
    kv_dtype: torch.dtype
    """Of stored keys and values."""
    kv_scales: KvScales | None
    """None: the KV cache is not in FP8."""
    exact: bool
    """Whether sums may not depend on how a step is composed (see ``quant.linears``)."""

    @property
    def naming(self) -> CheckpointNames:
        """How the checkpoint names what the model has."""
        return CheckpointNames(self.model.config, self.shards.names)

    @property
    def calibrated(self) -> bool:
        """Whether the checkpoint is meant for a KV cache in FP8."""
        return self.quantization is not None and self.quantization.fp8_kv_cache

    @property
    def nbytes(self) -> int:
        """Memory of the weights."""
        return sum(parameter.nbytes for parameter in self.model.parameters())

    @property
    def scheme(self) -> str:
        """The names of the schemes that weights are quantized in."""
        return ", ".join(self.quantization.schemes if self.quantization else ()) or "none"

    def make_kv_pool(self, num_blocks: int, block_size: int) -> KvPool:
        """Return the KV cache's memory, in its type."""
        config, stored = self.model.config, self.kv_dtype
        dtype, device = self.model.dtype, self.model.device
        if self.kv_scales is not None:
            return Fp8KvPool(config, num_blocks, block_size, dtype, device, self.kv_scales)
        if stored is torch.int8:
            return Int8KvPool(config, num_blocks, block_size, dtype, device)
        return KvPool(config, num_blocks, block_size, dtype, device, stored, self.exact)

    def make_state_pool(self, slots: int) -> StatePool:
        """Return the memory of recurrent layers' states."""
        return StatePool(self.model.config, slots, self.model.dtype, self.model.device)


def load_config(directory: Path, modeling: str = "native") -> ModelConfig:
    """Read the model's shape; ``modeling``: ``engine.modeling`` of the deployment.

    Raises:
        DeploymentError: ``config.json`` is missing or not supported.
    """
    data = read_json(directory / "config.json")
    with named_in_errors(directory):
        require_usual_files(data)
        if modeling == "native" or (modeling == "auto" and is_known(data)):
            return read_model_config(data)
        why = "engine.modeling is transformers" if modeling == "transformers" else "Inflight has none of its own for it"
        log.info("transformers' code computes %s: %s", architecture_name(data), why)
        return read_adapted_config(directory, data)


def resolve_dtype(wanted: str, config: ModelConfig, device: torch.device) -> torch.dtype:
    """Return the type to compute in: the one asked for, or the checkpoint's own.

    Nothing computes in float16, whose range is too small for the activations of some models. Its weights become
    bfloat16 on a GPU that has it, and lose three of their eleven bits, since products of 16 bits are several times as
    fast there; elsewhere float32.
    """
    name = config.dtype if wanted == "auto" else wanted
    if name == "float16" and device.type == "cuda" and torch.cuda.get_device_capability(device) >= BFLOAT16:
        log.info("the checkpoint is in float16; it is computed in bfloat16 (`engine.dtype: float32` loses nothing)")
        return torch.bfloat16
    return torch.bfloat16 if name == "bfloat16" else torch.float32


def load_model(outline: LoadedModel, device: torch.device) -> LoadedModel:
    """Fill what ``outline_model`` has built for ``device``, and return it.

    Raises:
        DeploymentError: there is no memory for it; a file or tensor is missing, unexpected, or of the wrong shape.
    """
    model, shards, kv_scales = outline.model, outline.shards, outline.kv_scales
    if isinstance(model, AdaptedModel):
        model.load(device)
        return outline
    assert isinstance(model, DecoderModel)
    naming, tied = outline.naming, model.config.tie_word_embeddings
    head, embedding = (naming.of(f"{name}.weight") for name in ("lm_head", "model.embed_tokens"))
    # As Module.to_empty does, which asks the meta device for tensors, and so loads a solver of equations first.
    try:
        held = {name: torch.empty(one.shape, dtype=one.dtype, device=device) for name, one in model.named_parameters()}
    except RuntimeError as error:  # of memory, whatever the device
        reason = next(iter(str(error).splitlines()), "no reason is given")
        raise DeploymentError(f"checkpoint: weights of {outline.nbytes} bytes cannot be held: {reason}") from None
    model.load_state_dict(held, assign=True)
    for rope in model.ropes:
        rope.to(device)
    if tied:
        model.lm_head.weight = model.model.embed_tokens.weight
    targets = _targets(model, shards.names, naming)
    if tied and embedding not in shards.names and head in shards.names:
        targets[head] = targets.pop(embedding)  # either of the two may stand for both
    # A cache meant for FP8 has scales for all layers with attention, or none, and then they are one.
    scales = kv_scales or KvScales.ones(model.config.num_layers, device)
    named = scales.named(model.config.attention)
    of_scales: dict[str, Target] = {naming.of(name): scale for name, scale in named.items()}
    if outline.calibrated and kv_scales is not None and shards.names & of_scales.keys():
        targets |= of_scales
    ignored = {head} - targets.keys() if tied else set()
    if outline.calibrated and kv_scales is None:
        ignored |= of_scales.keys()
    ignored |= {name for name in shards.names if naming.is_other_part(name)}
    with named_in_errors(shards.path if isinstance(shards, GgufShards) else None):
        _fill(targets, shards, ignored)
    model.eval().requires_grad_(False)
    return outline


def outline_model(
    directory: Path,
    config: ModelConfig,
    dtype: torch.dtype,
    device: torch.device,
    served_length: int,
    kv_cache_dtype: str,
    separate: bool = False,
    open_shards: Callable[[Path], Weights] = open_weights,
) -> LoadedModel:
    """Build the model without memory for its weights: it tells how much they, and a KV cache, will take.

    Args:
        directory, config: the checkpoint's.
        dtype: of the computation, and of weights that are not quantized.
        device: where the weights are to go.
        served_length: the longest sequence that will be served.
        kv_cache_dtype: ``kv_cache.dtype`` of the deployment.
        separate: give every part of a fused projection a linear of its own.
        open_shards: returns what holds the weights; a measurement draws them instead of reading files.

    Raises:
        DeploymentError: a file is missing, or says what is not supported.
    """
    shards: Tensors = open_shards(directory)
    is_ours = config.modeling == "native"
    quantization = load_quantization(directory, shards.names) if is_ours else None
    if quantization is not None and quantization.relays:
        shards = RelaidTensors(shards, quantization.relays)
    if kv_cache_dtype == "auto":
        kv_dtype = torch.float8_e4m3fn if quantization is not None and quantization.fp8_kv_cache else dtype
    else:
        kv_dtype = torch.float8_e4m3fn if kv_cache_dtype == "fp8" else getattr(torch, kv_cache_dtype)
    rounds = kv_dtype.itemsize < dtype.itemsize or (quantization is not None and quantization.rounds_inputs)
    exact = rounds and device.type != "cuda"  # a GPU's tensor cores add up in float32, and are what it is there for
    kv_scales = KvScales.ones(config.num_layers, device) if kv_dtype is torch.float8_e4m3fn else None
    if not is_ours:
        adapted = AdaptedModel(directory, read_json(directory / "config.json"), dtype, served_length)
        return LoadedModel(adapted, shards, None, kv_dtype, kv_scales, exact)
    config = _with_head_of(config, shards)
    with named_in_errors(directory):
        _require_layers(config, shards.names)
        try:
            model = build_model(config, served_length).to(dtype)
        except RuntimeError as error:
            raise DeploymentError(f"config.json: a model of its sizes cannot be built: {error}") from None
        convert_linears(model, quantization, shards.names, exact, separate)
    return LoadedModel(model, shards, quantization, kv_dtype, kv_scales, exact)


def _with_head_of(config: ModelConfig, shards: Tensors) -> ModelConfig:
    """Return the configuration with the head that the checkpoint's tensors give the model.

    A head in the file is the model's, whatever ``tie_word_embeddings`` says, unless it equals the embedding: a head
    that training has moved is another one. The rule is that of transformers' ``tie_weights``.
    """
    naming = CheckpointNames(config, shards.names)
    head, embedding = naming.of("lm_head.weight"), naming.of("model.embed_tokens.weight")
    held = {name for name in shards.names if name.startswith(head.removesuffix("weight"))}
    if not held and not config.tie_word_embeddings and config.is_base:
        log.warning("this checkpoint has no output head (lm_head): it gives embeddings, and no text")
        return replace(config, tie_word_embeddings=True, has_head=False)
    if not held or not config.tie_word_embeddings or embedding not in shards.names:
        return config
    if held == {head} and _are_equal(shards, head, embedding):
        return config
    if not config.is_text_part:  # whose configuration often does not say: the default of its class is in its place
        overruled("output head", f"tensor {head}", "`tie_word_embeddings` of config.json", True)
    return replace(config, tie_word_embeddings=False)


def _are_equal(shards: Tensors, *names: str) -> bool:
    found = dict[str, Tensor]()
    shards.load(names, found.__setitem__)
    one, other = (found[name] for name in names)
    return one.dtype == other.dtype and torch.equal(one, other)


def _require_layers(config: ModelConfig, names: Collection[str]) -> None:
    """Require a tensor for each layer at least: layers and experts without weights take time to build, and memory."""
    if config.num_layers > len(names):
        raise DeploymentError(f"config.json: num_hidden_layers is {config.num_layers}; there are {len(names)} tensors")


Target: TypeAlias = Tensor | ExpertStack | OrderedRows
"""Where a tensor of the checkpoint goes."""


def _fill(targets: dict[str, Target], shards: Tensors, ignored: set[str]) -> None:
    """Copy every tensor of the checkpoint to its target."""
    names = {name for name in shards.names - ignored if not name.endswith("rotary_emb.inv_freq")}
    homeless, missing = sorted(names - targets.keys()), sorted(targets.keys() - names)
    if homeless:
        raise DeploymentError(f"checkpoint: tensor {homeless[0]} has no place in this architecture")
    shards.load(names, lambda name, tensor: _copy(name, tensor, targets[name]))  # a wrong shape says more, and first
    if missing:
        raise DeploymentError(f"checkpoint: no tensor for {', '.join(missing[:5])} ({len(missing)} in all)")


def _copy(name: str, tensor: Tensor, target: Target) -> None:
    if isinstance(target, ExpertStack):
        tensor = target.oriented(tensor)
    is_number = isinstance(target, Tensor) and tensor.numel() == target.numel() == 1
    if tensor.shape != target.shape and not is_number:
        raise DeploymentError(f"checkpoint: tensor {name} is {list(tensor.shape)}; expected {list(target.shape)}")
    is_rounded = {tensor.dtype, target.dtype} & _QUANTIZED_TYPES or not tensor.dtype.is_floating_point
    if tensor.dtype != target.dtype and is_rounded:
        raise DeploymentError(
            f"checkpoint: tensor {name} is {tensor.dtype}; by the checkpoint's quantization it should be {target.dtype}"
        )
    if isinstance(target, ExpertStack | OrderedRows):
        target.fill(name, tensor)
        return
    if name.endswith(_SCALES):
        _check_scale(name, tensor.reshape(target.shape))
    target.copy_(tensor.reshape(target.shape))


def _check_scale(name: str, scale: Tensor) -> None:
    smallest, largest = (value.item() for value in scale.float().aminmax())  # NaN is both
    if not scale.dim() and not 0 < smallest < math.inf:
        raise DeploymentError(f"checkpoint: tensor {name} is {smallest}; a scale must be a positive number")
    # Those of rows, groups and channels only multiply: a part of the weight that is zero may have zero.
    if not 0 <= smallest <= largest < math.inf:
        wrong = largest if smallest >= 0 else smallest
        raise DeploymentError(f"checkpoint: tensor {name} has {wrong}; its scales must be finite and not negative")


def _targets(model: DecoderModel, names: frozenset[str], naming: CheckpointNames) -> dict[str, Target]:
    """Return where each tensor of the checkpoint goes, by its name there: a parameter, or some rows of one."""
    stacks, stacked = expert_stacks(model, naming)
    targets: dict[str, Target] = dict(stacks)
    for ours, parameter in model.named_parameters():  # a tied lm_head comes once, as the embedding
        if ours in stacked:
            continue
        module, _, kind = ours.rpartition(".")
        plain = plain_name(model, module)
        rows = model.fused_rows.get(module)
        if rows is None or naming.of(f"{plain}.weight") in names:
            targets[naming.of(f"{plain}.{kind}")] = parameter.data
        else:
            above = module.rpartition(".")[0]
            views = parameter.data.split(list(rows.values()))
            targets |= {naming.of(f"{above}.{part}.{kind}"): view for part, view in zip(rows, views, strict=True)}
    return targets | ordered_rows(model, naming, targets)


def plain_name(model: nn.Module, module_name: str) -> str:
    """Return a module's name without the container of a fused projection's parts, which no checkpoint has."""
    above, _, last = module_name.rpartition(".")
    if isinstance(model.get_submodule(above), LinearParts):
        above = above.rpartition(".")[0]
    return f"{above}.{last}" if above else last
