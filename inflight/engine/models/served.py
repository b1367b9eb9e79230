"""What the engine asks of a model, whoever wrote its code."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor, nn

from inflight.engine.models.config import ModelConfig
from inflight.engine.models.layers import Attend


class ServedModel(nn.Module, ABC):
    """A language model that computes packed steps and leaves attention to ``Attend``."""

    config: ModelConfig

    @property
    @abstractmethod
    def dtype(self) -> torch.dtype:
        """Of the computation."""

    @property
    @abstractmethod
    def device(self) -> torch.device:
        """Where the weights are."""

    @abstractmethod
    def forward(self, token_ids: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """Return hidden states ``[tokens, hidden]`` of packed ``token_ids [tokens]`` at ``positions [tokens]``."""

    @abstractmethod
    def logits(self, hidden: Tensor) -> Tensor:
        """Return float32 ``[tokens, vocab]`` of ``hidden [tokens, hidden]``."""
