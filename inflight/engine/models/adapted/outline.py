"""The dry run: a model of transformers is called once without weights, and what its layers ask for becomes a config."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from inflight.engine.models.adapted import attention
from inflight.engine.models.adapted.attention import LayerShape, Probe
from inflight.engine.models.config import AttentionConfig, LayerConfig, ModelConfig
from inflight.errors import DeploymentError

_TOKENS = 8209
"""Tokens of the dry run, a prime, as no size of a model is; enough that layers which group tokens do so."""


@dataclass(frozen=True)
class Outline:
    """What a dry run has found."""

    config: ModelConfig
    shapes: list[LayerShape]
    """Of the layers, in the order in which they attend."""
    backbone: str
    """The name of the module that returns hidden states; the head is applied to them."""


def outline(model: Any, architecture: str, is_text_part: bool, dtype: str) -> Outline:
    """Call a model on the meta device once.

    Raises:
        DeploymentError: it asks for what is not supported; what, and where.
    """
    length = _served(model)
    noting = Probe({module: name for name, module in model.named_modules()}, length)
    counted, calls = _Counted(), _Calls(model)
    ids = torch.zeros(1, _TOKENS, dtype=torch.long, device="meta")

    def run() -> Any:
        with torch.no_grad(), counted:
            return model(input_ids=ids, position_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False).logits

    try:
        logits = attention.probe(model, noting, run)
    except DeploymentError as error:
        raise DeploymentError(f"{architecture}: {error}") from None
    except Exception as error:  # of whatever kind: the code is not ours
        if "is not on the expected device" in str(error):  # what stands for masks is on another one
            raise DeploymentError(f"{architecture}: it has attention of its own, which is not supported") from None
        raise DeploymentError(
            f"{architecture}: a dry run fails: {type(error).__name__}: {' '.join(str(error).split())[:200]}"
        ) from None
    finally:
        calls.remove()
    _check(model, architecture, noting, counted)
    if calls.backbone is None or logits.shape[:2] != (1, _TOKENS):
        raise DeploymentError(f"{architecture}: it has no module that returns hidden states for a head")
    name, hidden_size = calls.backbone
    layers = tuple(LayerConfig(_layer(shape), 0) for shape in noting.shapes)
    head = model.get_output_embeddings()
    config = ModelConfig(
        architecture=architecture,
        vocab_size=logits.shape[-1],
        hidden_size=hidden_size,
        layers=layers,
        max_position_embeddings=length,
        rms_norm_eps=0.0,
        activation="",
        tie_word_embeddings=head is not None and head.weight is model.get_input_embeddings().weight,
        mlp_bias=False,
        dtype=dtype,
        is_text_part=is_text_part,
        modeling="transformers",
    )
    return Outline(config, noting.shapes, name)


def _served(model: Any) -> int:
    """Return the longest sequence of a model, by its configuration."""
    length = getattr(model.config, "max_position_embeddings", None)
    if not isinstance(length, int) or length < 1:
        raise DeploymentError(
            f"config.json: max_position_embeddings is {length!r}; with transformers' code it must be a positive integer"
        )
    return length


def _check(model: Any, architecture: str, noting: Probe, counted: _Counted) -> None:
    count, attending = getattr(model.config, "num_hidden_layers", len(noting.shapes)), len(noting.shapes)
    if attending != count:
        raise DeploymentError(
            f"{architecture}: {attending} of {count} layers attend by transformers' attention interface; models whose "
            "layers do not (recurrent layers, and attention of their own) are not supported"
        )
    if counted.places:
        raise DeploymentError(
            f"{architecture}: it counts the positions of tokens itself ({counted.places[0]}); it is not supported"
        )


def _layer(shape: LayerShape) -> AttentionConfig:
    return AttentionConfig(
        num_heads=shape.heads,
        num_kv_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        scale=shape.scale,
        window=shape.window,
        softcap=shape.softcap,
        sinks=shape.sinks,
    )


class _Counted(TorchFunctionMode):
    """Notes where a model counts the step's tokens: their positions are given to it, and start anywhere."""

    def __init__(self) -> None:
        super().__init__()
        self.places: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call ``func``."""
        if func is torch.arange and _TOKENS in args:
            import sys

            frame = sys._getframe(1)
            while frame is not None and "transformers" not in frame.f_code.co_filename:
                frame = frame.f_back
            where = frame.f_code.co_qualname if frame is not None else "?"
            self.places.append(where)
        return func(*args, **(kwargs or {}))


class _Calls:
    """Finds the backbone of a model: the first module that it calls."""

    def __init__(self, model: nn.Module) -> None:
        self.backbone: tuple[str, int] | None = None
        """Its name, and the size of the hidden states that it returns."""
        self._first: str | None = None
        self._handles = [
            handle
            for name, module in model.named_modules()
            if name
            for handle in (
                module.register_forward_pre_hook(self._entering(name)),
                module.register_forward_hook(self._leaving(name)),
            )
        ]

    def remove(self) -> None:
        """Stop looking."""
        for handle in self._handles:
            handle.remove()

    def _entering(self, name: str) -> Any:
        def hook(module: nn.Module, args: Any) -> None:
            self._first = self._first or name

        return hook

    def _leaving(self, name: str) -> Any:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            hidden = getattr(output, "last_hidden_state", None)
            if name == self._first and hidden is not None and hidden.shape[:2] == (1, _TOKENS):
                self.backbone = (name, hidden.shape[-1])

        return hook
