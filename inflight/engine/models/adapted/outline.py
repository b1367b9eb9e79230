"""The dry run: a model of transformers is called once without weights, and what its layers ask for becomes a config."""

from __future__ import annotations

import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from inflight.engine.models.adapted import attention
from inflight.engine.models.adapted.attention import LayerShape, Probe
from inflight.engine.models.adapted.weights import outlined_weights
from inflight.engine.models.config import AttentionConfig, LayerConfig, ModelConfig
from inflight.engine.models.fields import MOST_LENGTH
from inflight.errors import DeploymentError

_FEW, _MANY = 37, 8209
"""Tokens of the two dry runs: primes, as no size of a model is. What takes time for each token, as a recurrent layer in
plain Python, is found with few; with many, layers which group tokens do so."""


@dataclass(frozen=True)
class Outline:
    """What a dry run has found."""

    config: ModelConfig
    shapes: list[LayerShape]
    """Of the layers, in the order in which they attend."""
    backbone: str
    """The name of the module that returns hidden states; the head is applied to them."""


def outline(model: Any, architecture: str, is_text_part: bool, dtype: str) -> Outline:
    """Call a model on the meta device, with few tokens and with many.

    Raises:
        DeploymentError: it asks for what is not supported; what, and where.
    """
    try:
        length = _served(model)
        run, again = _DryRun(model, _FEW, length), _DryRun(model, _MANY, length)
        if run.shapes != again.shapes:
            raise DeploymentError("what its layers ask for depends on the number of tokens; it is not supported")
    except DeploymentError as error:
        raise DeploymentError(f"{architecture}: {error}") from None
    head = model.get_output_embeddings()
    config = ModelConfig(
        architecture=architecture,
        vocab_size=run.vocab_size,
        hidden_size=run.hidden_size,
        layers=tuple(LayerConfig(_layer(shape), 0) for shape in run.shapes),
        max_position_embeddings=length,
        rms_norm_eps=0.0,
        activation="",
        tie_word_embeddings=head is not None and head.weight is model.get_input_embeddings().weight,
        mlp_bias=False,
        dtype=dtype,
        is_text_part=is_text_part,
        modeling="transformers",
        outlined=outlined_weights(model),
        published_as=architecture,
    )
    return Outline(config, run.shapes, run.backbone)


class _DryRun:
    """One call of a model on the meta device."""

    def __init__(self, model: Any, tokens: int, length: int) -> None:
        """``tokens``: how many it gets; ``length``: the longest sequence that may be served.

        Raises:
            DeploymentError: the model fails, or asks for what is not supported.
        """
        noting = Probe({module: name for name, module in model.named_modules()}, length)
        counted, calls = _Counted(tokens), _Calls(model, tokens)
        ids = torch.zeros(1, tokens, dtype=torch.long, device="meta")

        def call() -> Any:
            with torch.no_grad(), counted:
                return model(
                    input_ids=ids, position_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False
                ).logits

        try:
            logits = attention.probe(model, noting, call)
        except DeploymentError:
            raise
        except Exception as error:  # of whatever kind: the code is not ours
            raise DeploymentError(_reason(error)) from None
        finally:
            calls.remove()
        self.shapes = noting.shapes
        _check(model, self.shapes, counted)
        if calls.backbone is None or logits.shape[:2] != (1, tokens):
            raise DeploymentError("it has no module that returns hidden states for a head")
        self.vocab_size = logits.shape[-1]
        self.backbone, self.hidden_size = calls.backbone


def _reason(error: Exception) -> str:
    """Return why a dry run has failed."""
    if "is not on the expected device" in str(error):  # what stands for masks is on another one
        return "it has attention of its own, which is not supported"
    line = " ".join(str(error).split()).partition(". ")[0]
    return f"a dry run of it fails: {type(error).__name__}: {line[:200]}"


def _served(model: Any) -> int:
    """Return the longest sequence of a model, by its configuration."""
    length = getattr(model.config, "max_position_embeddings", None)
    if not isinstance(length, int) or length < 1:
        raise DeploymentError(
            f"max_position_embeddings of its config.json is {length!r}; it must be a positive integer"
        )
    if length > MOST_LENGTH:  # each layer's mask is looked at over the whole of it
        raise DeploymentError(
            f"max_position_embeddings of its config.json is {length}; {MOST_LENGTH} is the largest that is supported"
        )
    return length


def _check(model: Any, shapes: list[LayerShape], counted: _Counted) -> None:
    count = getattr(model.config, "num_hidden_layers", len(shapes))
    if len(shapes) != count:
        raise DeploymentError(
            f"{len(shapes)} of {count} layers attend by transformers' attention interface; models whose layers do not "
            "(recurrent layers, and attention of their own) are not supported"
        )
    if counted.places:
        raise DeploymentError(f"it counts the positions of tokens itself ({counted.places[0]}); it is not supported")


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

    def __init__(self, tokens: int) -> None:
        """``tokens``: of the step."""
        super().__init__()
        self.places: list[str] = []
        self._tokens = tokens

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call ``func``."""
        if func is torch.arange and self._tokens in args:
            frames = (frame for frame, _ in traceback.walk_stack(None) if frame.f_code.co_filename != __file__)
            caller = next((frame for frame in frames if "torch" not in Path(frame.f_code.co_filename).parts), None)
            self.places.append("?" if caller is None else caller.f_code.co_qualname)
        return func(*args, **(kwargs or {}))


class _Calls:
    """Finds the backbone of a model: the first module that it calls."""

    def __init__(self, model: nn.Module, tokens: int) -> None:
        """``tokens``: of the step."""
        self._tokens = tokens
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
            if name == self._first and hidden is not None and hidden.shape[:2] == (1, self._tokens):
                self.backbone = (name, hidden.shape[-1])

        return hook
