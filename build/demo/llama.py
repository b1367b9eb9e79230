"""A Llama in plain torch, only as large as training the demo model needs.

Weight names and arithmetic are those of the Hugging Face `LlamaForCausalLM`, so that every engine can load the result.
It does not know how the text was made, and it has no KV cache: serving is the package's work.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F


@dataclass(frozen=True)
class LlamaConfig:
    """Sizes of the demo model; widths are multiples of 128 so that group-wise INT4 quantization applies."""

    vocab_size: int = 4096
    hidden_size: int = 256
    intermediate_size: int = 768
    num_hidden_layers: int = 4
    num_attention_heads: int = 4
    num_key_value_heads: int = 2
    head_dim: int = 64
    max_position_embeddings: int = 2048
    rope_theta: float = 10000.0
    rms_norm_eps: float = 1e-5

    def to_hf(self, eos_token_id: list[int], pad_token_id: int) -> dict[str, Any]:
        """Return the content of `config.json`."""
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            **self.__dict__,
            "attention_bias": False,
            "attention_dropout": 0.0,
            "bos_token_id": None,
            "eos_token_id": eos_token_id,
            "hidden_act": "silu",
            "initializer_range": 0.02,
            "mlp_bias": False,
            "pad_token_id": pad_token_id,
            "pretraining_tp": 1,
            "rope_scaling": None,
            "tie_word_embeddings": True,
            "torch_dtype": "bfloat16",
            "use_cache": True,
        }


def rotary_tables(config: LlamaConfig, length: int) -> tuple[Tensor, Tensor]:
    """Return cos and sin, each [length, head_dim], of rotary position embeddings (arXiv:2104.09864)."""
    exponents = torch.arange(0, config.head_dim, 2).float() / config.head_dim
    angles = torch.outer(torch.arange(length).float(), config.rope_theta**-exponents)
    angles = torch.cat([angles, angles], dim=-1)
    return angles.cos(), angles.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate x [..., length, head_dim] by position; halves are paired, as Hugging Face checkpoints have it."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-second, first], dim=-1) * sin


class RMSNorm(nn.Module):
    """Scale to unit root mean square (arXiv:1910.07467)."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """Return x [..., size], normalised."""
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)


class Attention(nn.Module):
    """Grouped-query self-attention."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.config = config
        width, kv_width = (config.head_dim * n for n in (config.num_attention_heads, config.num_key_value_heads))
        self.q_proj = nn.Linear(config.hidden_size, width, bias=False)
        self.k_proj = nn.Linear(config.hidden_size, kv_width, bias=False)
        self.v_proj = nn.Linear(config.hidden_size, kv_width, bias=False)
        self.o_proj = nn.Linear(width, config.hidden_size, bias=False)

    def forward(self, x: Tensor, rope: tuple[Tensor, Tensor], mask: Tensor) -> Tensor:
        """Return [batch, length, hidden]; mask [batch, 1, length, length] is True where a token may look."""
        batch, length, _ = x.shape
        q, k, v = (
            p(x).view(batch, length, -1, self.config.head_dim).transpose(1, 2)
            for p in (self.q_proj, self.k_proj, self.v_proj)
        )
        repeats = self.config.num_attention_heads // self.config.num_key_value_heads
        k, v = rotate(k, *rope).repeat_interleave(repeats, 1), v.repeat_interleave(repeats, 1)
        out = F.scaled_dot_product_attention(rotate(q, *rope), k, v, attn_mask=mask)
        return self.o_proj(out.transpose(1, 2).reshape(batch, length, -1))


class MLP(nn.Module):
    """SwiGLU feed-forward (arXiv:2002.05202)."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return [..., hidden]."""
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    """One pre-norm transformer layer."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.self_attn = Attention(config)
        self.mlp = MLP(config)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, x: Tensor, rope: tuple[Tensor, Tensor], mask: Tensor) -> Tensor:
        """Return [batch, length, hidden]."""
        x = x + self.self_attn(self.input_layernorm(x), rope, mask)
        return x + self.mlp(self.post_attention_layernorm(x))


class Llama(nn.Module):
    """The whole model; input and output embeddings are one matrix."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.config = config
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        for weight in (p for p in self.parameters() if p.dim() == 2):
            nn.init.normal_(weight, std=0.02)

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        """Return the last hidden state [batch, length, hidden] of ids [batch, length]."""
        rope = rotary_tables(self.config, ids.shape[1])
        x = self.embed_tokens(ids)
        for layer in self.layers:
            x = layer(x, rope, mask)
        return self.norm(x)

    def logits(self, hidden: Tensor) -> Tensor:
        """Return the logits [..., vocab] of hidden [..., hidden]."""
        return F.linear(hidden, self.embed_tokens.weight)

    def hf_state(self) -> dict[str, Tensor]:
        """Return the weights in bfloat16 under their Hugging Face names."""
        return {f"model.{name}": w.detach().to(torch.bfloat16).contiguous() for name, w in self.state_dict().items()}
