"""What is known of a quantized checkpoint: which linears are held in which scheme, and the KV cache's type."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

from inflight.engine.quant.grouped import LINEARS
from inflight.engine.quant.linears import Layout
from inflight.engine.quant.relay import Relay


@dataclass(frozen=True)
class LayerQuantization:
    """How one linear is held."""

    quant_algo: str
    """A key of ``grouped.LINEARS``."""
    group_size: int
    """Inputs that share a scale, where the scheme has groups; 0: all."""
    layout: Layout = field(default_factory=Layout)


@dataclass(frozen=True)
class Quantization:
    """How a checkpoint is quantized."""

    default: LayerQuantization | None
    """Of every linear that is not excluded; None: each has an entry of its own."""
    excluded: tuple[str, ...]
    """Names of modules, with wildcards."""
    layers: Mapping[str, LayerQuantization]
    """By the linear's name, where the configuration names each; the model must have it."""
    fp8_kv_cache: bool
    found: Mapping[str, LayerQuantization] = field(default_factory=dict)
    """By the linear's name, where the tensors of the checkpoint say which linears are quantized."""
    relays: Mapping[str, Relay] = field(default_factory=dict)
    """What becomes of the checkpoint's tensors that are not named and laid out as the schemes have them."""

    def of(self, name: str) -> LayerQuantization | None:
        """Return how the linear called ``name`` in the checkpoint is held; None: not quantized."""
        if any(fnmatchcase(name, pattern) for pattern in self.excluded):
            return None
        return self.layers.get(name) or self.found.get(name) or self.default

    @property
    def schemes(self) -> tuple[str, ...]:
        """The schemes' names."""
        kinds = (self.default, *self.layers.values(), *self.found.values())
        return tuple(sorted({kind.quant_algo for kind in kinds if kind}))

    @property
    def rounds_inputs(self) -> bool:
        """Whether any scheme rounds the inputs of its linears."""
        return any(LINEARS[name].rounds_inputs() for name in self.schemes)
