"""Attention as transformers' models call it, given to ``Attend``.

A model of transformers calls whatever is registered under the name in its configuration. Two names are registered here:
``PROBING`` for the dry run, which notes what each layer asks for, and ``SERVING``, which attends over the KV cache.
What a layer may ask for is listed; anything else is refused, never swallowed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from inflight.engine.models.layers import Attend, AttentionOptions
from inflight.errors import DeploymentError

PROBING, SERVING = "inflight_probing", "inflight"
"""The names of attention in a model's configuration, in the dry run and when it serves."""
_LINK = "_inflight_link"
"""The attribute of a module that attends: its ``Link``, or the ``Probe``."""
_HARMLESS = {
    "dropout", "position_ids", "position_embeddings", "use_cache", "output_attentions", "output_hidden_states",
    "output_router_logits", "return_dict", "training", "layer_idx",
}  # fmt: skip
"""Arguments that change nothing here: dropout is 0 in a model that serves, and positions are in queries and keys."""
_MEANT = {"scaling", "sliding_window", "softcap", "s_aux", "is_causal"}
"""Arguments that have a meaning here."""
_ROWS = (0, 1, 2, 3, 5, 8, 13, 21, 34, 55, 89, 144, 233, 377)
"""Positions at which a mask is looked at, besides those around its window and the last ones."""


@dataclass(frozen=True)
class LayerShape:
    """What one layer's attention is called with, as the dry run has seen it."""

    module: str
    """The name of the module that attends."""
    heads: int
    kv_heads: int
    key_dim: int
    value_dim: int
    scale: float
    window: int | None
    softcap: float | None
    sinks: bool

    @property
    def head_dim(self) -> int:
        """The size of heads in the cache: shorter keys or values are padded."""
        return max(self.key_dim, self.value_dim)


@dataclass
class Step:
    """Who attends in the step that is being computed."""

    attend: Attend | None = None


@dataclass(frozen=True)
class Link:
    """What a module that attends knows of the engine."""

    layer: int
    shape: LayerShape
    step: Step


@dataclass
class Probe:
    """Notes what each layer asks for in a dry run."""

    names: Mapping[nn.Module, str]
    """Of the modules of the model."""
    length: int
    """The longest sequence that may be served."""
    shapes: list[LayerShape] = field(default_factory=list)
    masks: list[Callable[..., Any]] = field(default_factory=list)
    """The functions that say which key a query sees, in the order in which masks were made of them."""

    def mask(self, mask_function: Callable[..., Any], q_length: int, kv_length: int) -> Tensor:
        """Return a tensor in place of a mask by which attention finds the function: it is full of its number."""
        self.masks.append(mask_function)
        return torch.full((1, 1, 1, 1), float(len(self.masks)), device="cpu").expand(1, 1, q_length, kv_length)

    def note(self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Any, given: Any) -> Tensor:
        """Note a layer. Raises DeploymentError: it asks for what is not supported."""
        name = self.names.get(module, type(module).__name__)
        if any(shape.module == name for shape in self.shapes):
            raise DeploymentError(f"{name} attends more than once in a step; it is not supported")
        if len(query) != 1 or query.dim() != 4 or query.shape[2] != key.shape[2]:
            raise DeploymentError(f"{name} attends from {list(query.shape)} to {list(key.shape)}; it is not supported")
        options = read_options(name, query, given)
        window = _window(name, self._mask_function(name, mask), self.length)
        if options.window is not None and options.window < self.length and options.window != window:
            raise DeploymentError(f"{name} has a sliding window of {options.window}, and its mask one of {window}")
        self.shapes.append(
            LayerShape(
                name, query.shape[1], key.shape[1], key.shape[3], value.shape[3], options.scale, window,
                options.softcap, options.sinks is not None,
            )
        )  # fmt: skip
        return value.new_empty(1, query.shape[2], query.shape[1], value.shape[3])

    def _mask_function(self, name: str, mask: Any) -> Callable[..., Any]:
        if mask is None:
            raise DeploymentError(f"{name} attends without a causal mask; only causal attention is supported")
        known = isinstance(mask, Tensor) and not mask.is_meta and not any(mask.stride()[-2:])
        code = int(mask[(0,) * mask.dim()]) if known else 0
        if not 1 <= code <= len(self.masks):
            raise DeploymentError(f"{name} makes or changes its attention mask itself; it is not supported")
        return self.masks[code - 1]


def register() -> None:
    """Make both kinds of attention known to transformers."""
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(PROBING, _probe)
    AttentionInterface.register(SERVING, _attend)
    AttentionMaskInterface.register(PROBING, _probe_mask)


def use(model: Any, name: str) -> None:
    """Have a model of transformers attend by ``PROBING`` or ``SERVING``."""
    for module in model.modules():
        config: Any = getattr(module, "config", None)
        if hasattr(config, "_attn_implementation"):
            config._attn_implementation = name


def probe(model: nn.Module, noting: Probe, run: Callable[[], Any]) -> Any:
    """Run a dry run that ``noting`` is to note; return what it returns."""
    global _probing
    _probing = noting
    use(model, PROBING)
    try:
        return run()
    finally:
        _probing = None
        use(model, SERVING)


_probing: Probe | None = None
"""Of the dry run that runs, if one does: masks are made without a module that could know it."""


def link(model: nn.Module, shapes: list[LayerShape], step: Step) -> None:
    """Tell the modules that attend who attends in each step."""
    for layer, shape in enumerate(shapes):
        setattr(model.get_submodule(shape.module), _LINK, Link(layer, shape, step))


def read_options(name: str, query: Tensor, given: Mapping[str, Any]) -> AttentionOptions:
    """Return what the keyword arguments of a call of attention ask for.

    Raises:
        DeploymentError: one is not known, or asks for what is not supported.
    """
    for argument, value in given.items():
        if argument not in _HARMLESS and argument not in _MEANT and value is not None:
            raise DeploymentError(f"{name} gives attention the argument {argument!r}, which is not supported")
    if given.get("is_causal") is False:
        raise DeploymentError(f"{name} attends to later tokens too; only causal attention is supported")
    scale, softcap, sinks = given.get("scaling"), given.get("softcap"), given.get("s_aux")
    if isinstance(scale, Tensor):
        raise DeploymentError(f"{name} scales the scores by a tensor; it is not supported")
    if sinks is not None and sinks.numel() != query.shape[1]:
        raise DeploymentError(f"{name} has sinks of {list(sinks.shape)} for {query.shape[1]} heads")
    return AttentionOptions(
        query.shape[-1] ** -0.5 if scale is None else float(scale),
        given.get("sliding_window") or None,
        softcap=softcap or None,
        sinks=None if sinks is None else sinks.flatten(),
    )


def _window(name: str, sees: Callable[..., Any], length: int) -> int | None:
    """Return the sliding window of a mask, looked at up to ``length``; None: a token sees all before it.

    Raises:
        DeploymentError: it is another mask.
    """
    last = torch.tensor(length - 1)
    seen = _seen(sees, last[None], torch.arange(length))[0]
    window = int(seen.sum())
    if not window:
        raise DeploymentError(f"{name} has an attention mask in which a token does not see itself; it is not supported")
    marks = {row for one in (0, window, length, length // 2) for row in range(one - 3, one + 4)} | set(_ROWS)
    rows = torch.tensor(sorted(row for row in marks if 0 <= row < length))
    expected = (rows <= rows[:, None]) & (rows > rows[:, None] - window)
    if not torch.equal(_seen(sees, rows, rows), expected) or not bool(seen[length - window :].all()):
        raise DeploymentError(
            f"{name} has an attention mask that is neither causal nor a sliding window; it is not supported"
        )
    return window if window < length else None


def _seen(sees: Callable[..., Any], rows: Tensor, columns: Tensor) -> Tensor:
    first = torch.tensor(0)
    seen = sees(first, first, rows[:, None], columns[None])
    return torch.as_tensor(seen, dtype=torch.bool).expand(len(rows), len(columns))


def _probe(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, scaling: Any = None, **given: Any
) -> tuple[Tensor, None]:
    assert _probing is not None
    return _probing.note(module, query, key, value, attention_mask, {"scaling": scaling, **given}), None


def _probe_mask(*, q_length: int, kv_length: int, mask_function: Callable[..., Any], **_: Any) -> Tensor:
    assert _probing is not None
    return _probing.mask(mask_function, q_length, kv_length)


def _attend(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, scaling: Any = None, **given: Any
) -> tuple[Tensor, None]:
    """Attend over the cache; all are ``[1, heads, tokens, head_dim]``, and what returns ``[1, tokens, heads, ...]``."""
    known: Link = getattr(module, _LINK)
    shape, attend = known.shape, known.step.attend
    assert attend is not None
    options = read_options(shape.module, query, {"scaling": scaling, **given})._replace(window=shape.window)
    heads, keys, values = (
        _padded(part[0].transpose(0, 1), shape.head_dim).to(value.dtype) for part in (query, key, value)
    )
    out = attend(known.layer, heads, keys, values, options)
    return out[None, ..., : shape.value_dim], None


def _padded(heads: Tensor, size: int) -> Tensor:
    """Return ``heads [tokens, heads, head_dim]`` with zeros behind, contiguous."""
    missing = size - heads.shape[-1]
    return (functional.pad(heads, (0, missing)) if missing else heads).contiguous()
