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
from inflight.gguf.families import Family, family_of
from inflight.gguf.header import TensorInfo
from inflight.gguf.metadata import EMBEDDING, HEAD, ROPE_FACTORS, ROPE_LONG, ROPE_SHORT, Metadata
from inflight.gguf.reader import Bytes, GgufModel, GgufTensor
from inflight.gguf.types import FLOATS

_OUTER = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
INNER = {
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
    "ffn_gate_exps": "mlp.experts.{}.gate_proj",
    "ffn_up_exps": "mlp.experts.{}.up_proj",
    "ffn_down_exps": "mlp.experts.{}.down_proj",
}
"""What the tensors of a layer are; braces stand for an expert's number: the tensor has those of all experts."""
_OF_HEAD = "lm_head.weight"
_LAYER = re.compile(r"blk\.(\d{1,6})\.([\w.]+)\.(weight|bias)")
_MOST_OF_CHECKPOINT = 1 << 18
"""Tensors, with each expert's."""


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
    one_row: bool = False
    """Whether the checkpoint has a matrix of one row where the file has that row."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the checkpoint's tensor."""
        if self.one_row:
            return 1, self.tensor.shape[-1]
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
        DeploymentError: one has rows that are not those of its heads, two are the same, or there are too many.
    """
    family = family_of(Metadata(model))
    tensors = dict[str, Source]()
    for name, tensor in model.tensors.items():
        match = _LAYER.fullmatch(name)
        if name in (ROPE_FACTORS, ROPE_LONG, ROPE_SHORT) or (
            family.predicts_ahead and match is not None and int(match[1]) >= config["num_hidden_layers"]
        ):
            continue
        for ours, expert in _names(name, match, family, tensor):
            heads = 0
            if family.paired_rows and ours.rpartition(".")[0].endswith((".q_proj", ".k_proj")):
                heads = _heads(model, tensor, config, ours)
            offset = family.norm_offset if ours.endswith("norm.weight") else 0.0
            if ours in tensors:
                raise _same(model, ours, tensors[ours].tensor, tensor)
            tensors[ours] = Source(tensor, heads, offset, expert, ours.endswith("shared_expert_gate.weight"))
        if len(tensors) > _MOST_OF_CHECKPOINT:
            raise DeploymentError(f"{model.path}: it has more than {_MOST_OF_CHECKPOINT} tensors, with each expert's")
    if shares_blocks(model):
        embedding = model.tensors[EMBEDDING]
        if (held := tensors.setdefault(_OF_HEAD, Source(embedding))).tensor is not embedding:
            raise _same(model, _OF_HEAD, held.tensor, embedding)
    return tensors


def _same(model: GgufModel, ours: str, *tensors: TensorInfo) -> DeploymentError:
    """Return the error of tensors that are one in the checkpoint."""
    names = " and ".join(f"{tensor.name!r:.200}" for tensor in tensors)
    return DeploymentError(f"{model.path}: tensors {names} are both {ours:.200}; only one of them can be taken")


def shares_blocks(model: GgufModel) -> bool:
    """Return whether head and embedding are one tensor in blocks: the head keeps them, the embedding is decoded."""
    return HEAD not in model.tensors and model.tensors[EMBEDDING].type.name not in FLOATS


def _heads(model: GgufModel, tensor: TensorInfo, config: dict[str, Any], ours: str) -> int:
    """Return how many heads a tensor's rows are of."""
    heads = config["num_attention_heads" if ".q_proj." in ours else "num_key_value_heads"]
    size, rows = config["head_dim"], tensor.shape[0]
    if rows != heads * size or size % 2:
        raise DeploymentError(
            f"{model.path}: tensor {tensor.name!r:.200} has {rows} rows; {heads} heads have {size} each"
        )
    return int(heads)


def _names(
    name: str, match: re.Match[str] | None, family: Family, tensor: TensorInfo
) -> Iterator[tuple[str, int | None]]:
    """Yield the names in a checkpoint of what a tensor holds; of each expert, with its number."""
    if match is None:
        module, _, kind = name.rpartition(".")
        yield f"{_OUTER[module]}.{kind}" if module in _OUTER else name, None
        return
    layer, module, kind = match.groups()
    known = {**INNER, **family.names}
    ours = known.get(f"{module}.{kind}") or (f"{known[module]}.{kind}" if module in known else None)
    if ours is None:
        yield name, None
    elif "{}" not in ours:
        yield f"model.layers.{layer}.{ours}", None
    elif len(tensor.shape) == (3 if kind == "weight" else 2) and tensor.shape[0] <= _MOST_OF_CHECKPOINT:
        for expert in range(tensor.shape[0]):
            yield f"model.layers.{layer}.{ours.format(expert)}", expert
    else:
        yield name, None
