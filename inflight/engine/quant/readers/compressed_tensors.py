"""Reads checkpoints of compressed-tensors, as llm-compressor writes them.

``config_groups`` of the configuration say how weights and inputs are quantized, of the modules that are their targets
and not in ``ignore`` (``compressed_names``). ``format`` says how weights are stored (``compressed_layers``),
``kv_cache_scheme`` whether keys and values are E4M3.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from inflight.engine.quant.config import LayerQuantization, Quantization
from inflight.engine.quant.readers import compressed_args, compressed_layers
from inflight.engine.quant.readers.compressed_args import Args
from inflight.engine.quant.readers.compressed_names import ByName, read_names
from inflight.engine.quant.readers.fields import SOURCE, chosen, modules, unused, wrong
from inflight.engine.quant.readers.modelopt import FLOAT_8
from inflight.engine.quant.relay import Relay
from inflight.errors import DeploymentError

_MIXED = "mixed-precision"
"""The format of a checkpoint whose groups have formats of their own."""


@dataclass(frozen=True)
class _Group:
    """A way to quantize some modules."""

    name: str
    """In the configuration."""
    weights: Args
    inputs: Args | None
    format: str

    def layer(self, ordered: bool) -> LayerQuantization:
        """Return how a linear is held; ``ordered``: the file says of each input which group it belongs to."""
        try:
            return compressed_layers.layer(self.weights, self.inputs, self.format, ordered)
        except ValueError as error:
            raise DeploymentError(f"{SOURCE}.config_groups.{self.name}: {error}") from None


def read(data: Mapping[str, Any], names: frozenset[str]) -> Quantization:
    """Read a checkpoint; see ``methods.load_quantization``."""
    unused(data, ("transform_config",))
    sparsity = data.get("sparsity_config") or {}
    if sparsity and (not isinstance(sparsity, dict) or sparsity.get("format") != "dense"):
        raise wrong("sparsity_config", sparsity, "left out: weights that are stored sparse are not supported")
    chosen(data, "quantization_status", ("compressed",), "compressed")
    found, relays = dict[str, LayerQuantization](), _kv_scales(data.get("kv_cache_scheme"), names)
    stored = _quantized_modules(names)
    targets, ignored = _by_name(data, stored)
    for module in stored:
        group = targets.of(module)
        if group is None or ignored.of(module):
            raise DeploymentError(
                f"checkpoint: {module} is stored quantized, and {SOURCE} has no target that it matches, or ignores it"
            )
        layer = group.layer(f"{module}.weight_g_idx" in names)
        found[module] = layer
        for kind, (name, convert) in compressed_layers.relays(group.weights, group.format, layer).items():
            relays[f"{module}.{kind}"] = Relay(name and f"{module}.{name}", convert)
    return Quantization(None, (), {}, data.get("kv_cache_scheme") is not None, found, relays)


def expected(data: Mapping[str, Any], linears: Collection[str]) -> list[str]:
    """Return those of a model's linears that a configuration, which ``read`` has let pass, says are quantized.

    Raises:
        DeploymentError: its patterns may take for ever.
    """
    targets, ignored = _by_name(data, linears)
    return [name for name in linears if targets.of(name) is not None and not ignored.of(name)]


def _quantized_modules(names: frozenset[str]) -> list[str]:
    """Return the modules that are stored quantized. Raises DeploymentError: one lacks a tensor."""
    packed = modules(names, "weight_packed", ("weight_scale",))
    return packed + [module for module in modules(names, "weight_scale", ()) if f"{module}.weight" in names]


def _by_name(data: Mapping[str, Any], stored: Collection[str]) -> tuple[ByName[_Group], ByName[bool]]:
    """Return the groups, and what is ignored; ``stored``: the modules to look for. Raises DeploymentError."""
    ignored = read_names(data.get("ignore") or [], "ignore")
    return ByName(_targets(data), stored), ByName(dict.fromkeys(ignored, True), stored)


def _targets(data: Mapping[str, Any]) -> dict[str, _Group]:
    """Return the groups by their targets."""
    default = chosen(data, "format", (*compressed_layers.FORMATS, _MIXED))
    groups = data.get("config_groups")
    if not isinstance(groups, dict) or not groups:
        raise wrong("config_groups", groups, "an object with a group at least")
    targets = dict[str, _Group]()
    for name, group in groups.items():
        place = f"config_groups.{name}"
        if not isinstance(group, dict):
            raise wrong(place, group, "an object with targets and weights")
        if group.get("output_activations") is not None:
            raise wrong(f"{place}.output_activations", group["output_activations"], "null")
        stored = chosen({f"{place}.format": group.get("format")}, f"{place}.format", compressed_layers.FORMATS, default)
        weights = compressed_args.read(group.get("weights"), f"{place}.weights")
        if weights is None:
            raise wrong(f"{place}.weights", None, "an object: only linears are quantized")
        inputs = compressed_args.read(group.get("input_activations"), f"{place}.input_activations")
        made = _Group(name, weights, inputs, stored)
        targets |= dict.fromkeys(read_names(group.get("targets"), f"{place}.targets"), made)
    return targets


def _kv_scales(scheme: Any, names: Iterable[str]) -> dict[str, Relay]:
    """Return what becomes of the scales of keys and values, which lie at the attention here. Raises DeploymentError."""
    if scheme is None:
        return {}
    static = {"strategy": "tensor", "dynamic": False, "symmetric": True}
    if not isinstance(scheme, dict) or (static | scheme) != (scheme | static | FLOAT_8):
        raise wrong("kv_cache_scheme", scheme, f"null, or {FLOAT_8 | static}")
    relays = dict[str, Relay]()
    for name in names:
        module, _, kind = name.rpartition(".")
        if kind in ("k_scale", "v_scale") and module.endswith("attn"):
            relays[name] = Relay(f"{module}.{kind[0]}_proj.{kind}", lambda scale: scale)
    return relays
