"""Which tensor of a Hugging Face checkpoint each tensor of a GGUF model is, and how it is made of it again.

llama.cpp's conversion renames tensors and changes some: the rows of Llama's queries and keys lie in another order, and
Gemma's norms have one added to them. Rows are whole in every type, so that a quantized tensor's rows are reordered as
they are.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from inflight.errors import DeploymentError
from inflight.gguf.reader import Bytes, GgufModel, GgufTensor

EMBEDDING, HEAD = "token_embd.weight", "output.weight"
ROPE_FACTORS, ROPE_LONG, ROPE_SHORT = "rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight"
"""What frequencies are divided by; no weights of the checkpoint, and read with its configuration."""
_OUTER = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_INNER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_qkv": "self_attn.qkv_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_gate_inp": "mlp.gate",
}
_OTHERWISE = {
    "gemma3": {
        "post_attention_norm": "post_attention_layernorm",
        "ffn_norm": "pre_feedforward_layernorm",
        "post_ffw_norm": "post_feedforward_layernorm",
    },
    "phi3": {"ffn_up": "mlp.gate_up_proj"},
}
"""What other architectures call them."""
_LAYER = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")
_OF_EXPERTS = re.compile(r"ffn_(gate|up|down)_exps")


@dataclass(frozen=True)
class Source:
    """What a tensor of a checkpoint is made of."""

    tensor: GgufTensor
    heads: int = 0
    """Whose rows are reordered; 0: none are."""
    offset: float = 0.0
    """What is added to the values."""
    expert: int | None = None
    """The one whose tensor it is, of a tensor that has all experts'; None: it is the whole."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the checkpoint's tensor."""
        return self.tensor.shape if self.expert is None else self.tensor.shape[1:]

    def rows(self) -> Bytes:
        """Return the rows as they are stored ``[rows, bytes of a row]``, in the checkpoint's order."""
        data = self.tensor.data
        if self.expert is not None:
            count = len(data) // self.tensor.shape[0]
            data = data[self.expert * count : (self.expert + 1) * count]
        if not self.heads:
            return data
        if len(self.tensor.shape) == 1:  # a bias, whose values are rows
            data = data.reshape(self.tensor.shape[0], -1)
        # llama.cpp rotates each even row of a head with the odd one after it, transformers both halves with each other.
        pairs = data.reshape(self.heads, len(data) // self.heads // 2, 2, -1)
        return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(self.tensor.data.shape)


def checkpoint_tensors(model: GgufModel, config: dict[str, Any]) -> dict[str, Source]:
    """Return the tensors of the checkpoint by their names there; one that is not known keeps its name.

    Args:
        model: the model.
        config: its ``config.json``.

    Raises:
        DeploymentError: one has rows that are not those of its heads.
    """
    architecture = model.metadata["general.architecture"]
    tensors = dict[str, Source]()
    for name, tensor in model.tensors.items():
        if name in (ROPE_FACTORS, ROPE_LONG, ROPE_SHORT):
            continue
        for ours, expert in _names(name, architecture, tensor):
            heads = 0
            if architecture == "llama" and ours.rpartition(".")[0].endswith(("q_proj", "k_proj")):
                heads = config["num_attention_heads" if ".q_proj." in ours else "num_key_value_heads"]
                size, rows = config["head_dim"], tensor.shape[0]
                if rows != heads * size or size % 2:
                    raise DeploymentError(
                        f"{model.path}: tensor {name!r} has {rows} rows; {heads} heads have {size} each"
                    )
            offset = -1.0 if architecture == "gemma3" and ours.endswith("norm.weight") else 0.0
            tensors[ours] = Source(tensor, heads, offset, expert)
    return tensors


def _names(name: str, architecture: str, tensor: GgufTensor) -> Iterator[tuple[str, int | None]]:
    """Yield the names in a checkpoint of what a tensor holds; of each expert, with its number."""
    match = _LAYER.fullmatch(name)
    if match is None:
        module, _, kind = name.rpartition(".")
        yield f"{_OUTER[module]}.{kind}" if module in _OUTER else name, None
        return
    layer, module, kind = match.groups()
    if (experts := _OF_EXPERTS.fullmatch(module)) and len(tensor.shape) == 3:
        for expert in range(tensor.shape[0]):
            yield f"model.layers.{layer}.mlp.experts.{expert}.{experts[1]}_proj.{kind}", expert
        return
    ours = (_INNER | _OTHERWISE.get(architecture, {})).get(module)
    yield f"model.layers.{layer}.{ours}.{kind}" if ours else name, None
