"""How a checkpoint names what the model has: prefixes differ, and so do the names of norms and experts."""

from __future__ import annotations

import re
from collections.abc import Collection

from inflight.engine.models.architectures import ARCHITECTURES
from inflight.engine.models.config import ModelConfig

_PREFIXES = (
    ("model.", "lm_head"),
    ("model.language_model.", "lm_head"),
    ("language_model.model.", "language_model.lm_head"),
    ("model.text_model.", "lm_head"),
    ("", "lm_head"),
)
"""What names of the backbone may begin with, the model's own first, and the head's name beside that."""
OTHER_PARTS = re.compile(
    r"(model\.|language_model\.)*(visual|vision_\w+|multi_modal_projector|audio_\w+|embed_vision|embed_audio|mtp)\."
)
"""Tensors of what is not served: images, sound, and the prediction of several tokens at once."""


class CheckpointNames:
    """The names of one checkpoint."""

    def __init__(self, config: ModelConfig, names: Collection[str]) -> None:
        """``config``: of the model; ``names``: the tensors in the checkpoint."""
        self._config, self._architecture, self._names = config, ARCHITECTURES[config.architecture], names
        found = (pair for pair in _PREFIXES if f"{pair[0]}embed_tokens.weight" in names)
        self._backbone, self._head = next(found, _PREFIXES[0])

    def of(self, ours: str) -> str:
        """Return the checkpoint's name for a module of the model, or for a tensor of one."""
        if ours.startswith("lm_head"):
            return self._head + ours.removeprefix("lm_head")
        name = ours
        for pattern, replacement in self._architecture.names:
            name = re.sub(pattern, replacement, name)
        return self._backbone + name.removeprefix("model.")

    def of_stack(self, ours: str) -> str | None:
        """Return the checkpoint's name for the tensors of all experts of a layer, where it has them in one.

        ``ours``: a linear of an expert. The tensors' names are that, or that with what they hold (``_bias``, and for
        MXFP4 ``_blocks`` and ``_scales``). None: the checkpoint has a tensor for each expert.
        """
        if ".experts." not in ours:
            return None
        stack = self.of(re.sub(r"\.experts\.\d+\.", ".experts.", ours))
        return stack if stack in self._names or f"{stack}_blocks" in self._names else None

    def is_other_part(self, name: str) -> bool:
        """Return whether a tensor of the checkpoint belongs to a part of the model that is not served."""
        if self._config.is_text_part and OTHER_PARTS.match(name):
            return True
        if self._architecture.predicts_ahead and name.startswith("mtp."):
            return True
        layer = re.match(r"layers\.(\d{1,9})\.(self_attn\.[kv]_(proj|norm)\.)?", name.removeprefix(self._backbone))
        if layer is None:
            return False
        if int(layer[1]) >= self._config.num_layers:
            return self._architecture.predicts_ahead
        attention = self._config.layers[int(layer[1])].attention
        return layer[2] is not None and attention is not None and attention.kv_donor is not None
