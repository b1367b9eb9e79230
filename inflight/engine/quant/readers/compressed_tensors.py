"""Reads checkpoints of compressed-tensors, as llm-compressor writes them.

``config_groups`` of the configuration say how weights and inputs are quantized, of the modules that are their targets
and not in ``ignore``: full names, ``re:`` and a pattern that the beginning of a name matches, or ``Linear`` for any.
``format`` says how weights are stored (``compressed_layers``), ``kv_cache_scheme`` whether keys and values are E4M3.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from inflight.engine.quant.config import LayerQuantization, Quantization
from inflight.engine.quant.readers import compressed_args, compressed_layers
from inflight.engine.quant.readers.compressed_args import Args
from inflight.engine.quant.readers.fields import SOURCE, chosen, modules, unused, wrong
from inflight.engine.quant.readers.modelopt import FLOAT_8
from inflight.engine.quant.relay import Relay
from inflight.errors import DeploymentError

_MIXED = "mixed-precision"
"""The format of a checkpoint whose groups have formats of their own."""
_ANY_LINEAR = "Linear"
_SYNTAX = re.compile(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]|\(\??|[)|*+?]|\{\d*,?\d*\}", re.DOTALL)
"""What decides in how many ways a regular expression can match; and, to be passed over, escapes and sets."""
_LONGEST_NAME, _MOST_WAYS = 128, 3e8
"""Characters of a module's name that patterns are tried on. Four ``.*`` are allowed, and take milliseconds."""


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
    targets, ignored = _targets(data), read_names(data.get("ignore") or [], "ignore")
    found, relays = dict[str, LayerQuantization](), _kv_scales(data.get("kv_cache_scheme"), names)
    for module in _quantized_modules(names):
        group = next((group for target, group in targets if matches(module, target)), None)
        if group is None or any(matches(module, name) for name in ignored):
            raise DeploymentError(
                f"checkpoint: {module} is stored quantized, and {SOURCE} has no target that it matches, or ignores it"
            )
        layer = group.layer(f"{module}.weight_g_idx" in names)
        found[module] = layer
        for kind, (name, convert) in compressed_layers.relays(group.weights, group.format, layer).items():
            relays[f"{module}.{kind}"] = Relay(name and f"{module}.{name}", convert)
    return Quantization(None, (), {}, data.get("kv_cache_scheme") is not None, found, relays)


def _quantized_modules(names: frozenset[str]) -> Iterator[str]:
    """Yield the modules that are stored quantized. Raises DeploymentError: one lacks a tensor."""
    packed = modules(names, "weight_packed", ("weight_scale",))
    yield from packed
    yield from (module for module in modules(names, "weight_scale", ()) if f"{module}.weight" in names)


def _targets(data: Mapping[str, Any]) -> list[tuple[str, _Group]]:
    """Return targets and their groups, those first that decide: full names, patterns, then what matches any."""
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
    return sorted(targets.items(), key=lambda one: (one[0] == _ANY_LINEAR, "re:" in one[0], one[0]))


def read_names(value: Any, field: str) -> list[str]:
    """Return a list of names and patterns. Raises DeploymentError: it is none, or a pattern may take for ever."""
    if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
        raise wrong(field, value, "a list of names")
    for name in value:
        if name.startswith("re:"):
            try:
                re.compile(name.removeprefix("re:"))
            except (re.error, OverflowError, RecursionError) as error:
                raise wrong(field, name, f"a regular expression ({error})") from None
            if _ways(name.removeprefix("re:")) > _MOST_WAYS:
                raise wrong(field, name, "simpler: it may take for ever to find that it does not match")
    return value


def _ways(pattern: str) -> float:
    """Return in how many ways a regular expression can match a name at the most, as it tries them one after another."""
    ways, choices, closed = 1.0, [1], -1
    for token in _SYNTAX.finditer(pattern):
        kind = token[0]
        if kind[0] in "*+{":
            ways *= math.inf if token.start() == closed else _LONGEST_NAME
        elif kind == "?":
            ways *= 2
        elif kind == "|":
            choices[-1] += 1
        elif kind[0] == "(":
            choices.append(1)
        elif kind == ")":
            ways, closed = ways * choices.pop(), token.end()
    return ways * choices[0]


def matches(module: str, target: str) -> bool:
    """Return whether a target or an ignored name, which ``read_names`` has let pass, is that of a module."""
    if target.startswith("re:"):
        return len(module) < _LONGEST_NAME and re.match(target.removeprefix("re:"), module) is not None
    return target in (module, _ANY_LINEAR)


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
