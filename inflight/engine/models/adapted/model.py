"""A decoder of transformers with the face of our own: its code computes all but attention."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from inflight.engine.models.adapted import attention, experts
from inflight.engine.models.adapted.building import build, prepare_transformers, read_config
from inflight.engine.models.adapted.loading import load_weights
from inflight.engine.models.adapted.outline import outline
from inflight.engine.models.adapted.products import pack_parameters, replace_conv1d
from inflight.engine.models.adapted.rotary import settle_frequencies
from inflight.engine.models.config import ModelConfig
from inflight.engine.models.layers import Attend
from inflight.engine.models.reading import architecture_name
from inflight.engine.models.served import ServedModel

log = logging.getLogger(__name__)


def read_adapted_config(directory: Path, data: Mapping[str, Any]) -> ModelConfig:
    """Return the shape of a model as a dry run of transformers' code finds it; ``data``: of ``config.json``.

    Raises:
        DeploymentError: transformers is not there, or the model asks for what is not supported.
    """
    return AdaptedModel(directory, data, torch.float32, 0).config


class AdaptedModel(ServedModel):
    """A language model whose code is transformers'."""

    def __init__(self, directory: Path, data: Mapping[str, Any], dtype: torch.dtype, served_length: int) -> None:
        """Build it without memory for its weights, and call it once.

        Args:
            directory: the checkpoint's.
            data: of its ``config.json``.
            dtype: of the computation.
            served_length: the longest sequence that will be served.

        Raises:
            DeploymentError: transformers is not there, or the model asks for what is not supported.
        """
        super().__init__()
        prepare_transformers(data)
        hugging = read_config(directory, data)
        model = build(hugging, dtype)
        settle_frequencies(model, served_length)
        given = data.get("text_config") or {}
        types = [one[name] for one in (given, data) for name in ("dtype", "torch_dtype") if one.get(name)]
        self._outline = outline(model, architecture_name(data), bool(given), str(next(iter(types), "float32")))
        self.config = self._outline.config
        self._size = sum(one.numel() for one in model.parameters())
        self._directory, self._hugging, self._served_length = directory, hugging, served_length
        self._step, self._dtype, self._device = attention.Step(), dtype, torch.device("meta")
        self._adopt(model)

    def load(self, device: torch.device) -> None:
        """Fill it with the checkpoint's weights, and make its products such that rows do not depend on each other.

        Raises:
            DeploymentError: a tensor is missing, unexpected, or of the wrong shape.
        """
        model = load_weights(
            type(self.whole), self._directory, self._hugging, self._dtype, self.config.is_text_part, self._size
        )
        replace_conv1d(model)
        experts.replace_experts(model)
        if settled := settle_frequencies(model, self._served_length):
            log.info("%d rotary embeddings are settled for sequences of %d tokens", settled, self._served_length)
        self._device = device
        model.to(device)
        pack_parameters(model)
        self._adopt(model)

    def _adopt(self, model: Any) -> None:
        """Take a model, with weights or without."""
        attention.use(model, attention.SERVING)
        attention.link(model, self._outline.shapes, self._step)
        self.backbone = model.get_submodule(self._outline.backbone)
        self._given = _Given()
        model.set_submodule(self._outline.backbone, self._given)
        self.whole = model

    @property
    def dtype(self) -> torch.dtype:
        """Of the computation."""
        return self._dtype

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return self._device

    def forward(self, token_ids: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """Return hidden states ``[tokens, hidden]`` of packed ``token_ids [tokens]`` at ``positions [tokens]``."""
        self._step.attend = attend
        try:
            return self.hidden(input_ids=token_ids[None], position_ids=positions[None])
        finally:
            self._step.attend = None

    def hidden(self, **inputs: Tensor) -> Tensor:
        """Return hidden states ``[tokens, hidden]`` of one text or step, by the attention that is set."""
        made = self.backbone(**inputs, use_cache=False)
        hidden: Tensor = made.last_hidden_state[0]
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        """Return float32 ``[tokens, vocab]``: what the model's own head, scales and caps make of ``hidden``."""
        self._given.hidden = hidden[None]
        try:
            ids = torch.zeros(1, len(hidden), dtype=torch.long, device=hidden.device)
            return self.whole(input_ids=ids, use_cache=False).logits[0].float()
        finally:
            self._given.hidden = None


class _Given(nn.Module):
    """In place of the backbone in the model that has the head: returns the hidden states that it is given."""

    hidden: Tensor | None = None

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return them as a backbone does."""
        assert self.hidden is not None
        return _BackboneOutput(self.hidden)


class _BackboneOutput:
    """What a head finds: hidden states, by name or as the first of several things, and nothing else."""

    def __init__(self, hidden: Tensor) -> None:
        self.last_hidden_state = hidden

    def __getitem__(self, index: Any) -> Any:
        """Return as a tuple does, of which the hidden states are all."""
        return (self.last_hidden_state,)[index]

    def __getattr__(self, name: str) -> Any:
        """Return None: what else a backbone may return is not asked for."""
