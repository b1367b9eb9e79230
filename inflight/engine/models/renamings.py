"""How the checkpoints of architectures name their tensors: what is put in place of parts of the names here."""

from __future__ import annotations

Renaming = tuple[str, str]
"""A regular expression for a part of a name here, and what the checkpoint has in its place."""

BEFORE: tuple[Renaming, ...] = (
    (r"\.attention_norm\b", ".input_layernorm"),
    (r"\.mlp_norm\b", ".post_attention_layernorm"),
)
AROUND: tuple[Renaming, ...] = (
    (r"\.attention_norm\b", ".input_layernorm"),
    (r"\.attention_output_norm\b", ".post_attention_layernorm"),
    (r"\.mlp_norm\b", ".pre_feedforward_layernorm"),
    (r"\.mlp_output_norm\b", ".post_feedforward_layernorm"),
)
GLM4: tuple[Renaming, ...] = (
    *BEFORE,
    (r"\.attention_output_norm\b", ".post_self_attn_layernorm"),
    (r"\.mlp_output_norm\b", ".post_mlp_layernorm"),
)
OLMO: tuple[Renaming, ...] = (
    (r"\.attention_output_norm\b", ".post_attention_layernorm"),
    (r"\.mlp_output_norm\b", ".post_feedforward_layernorm"),
)
MIXTRAL: tuple[Renaming, ...] = (
    (r"\.mlp\.", ".block_sparse_moe."),
    (r"(\.experts\.\d+)\.gate_proj\b", r"\1.w1"),
    (r"(\.experts\.\d+)\.up_proj\b", r"\1.w3"),
    (r"(\.experts\.\d+)\.down_proj\b", r"\1.w2"),
)
SHARED_EXPERTS: tuple[Renaming, ...] = ((r"\.shared_expert\.", ".shared_experts."),)
GLM4_MOE: tuple[Renaming, ...] = (
    *SHARED_EXPERTS,
    (r"\.mlp\.correction\b", ".mlp.gate.e_score_correction_bias"),
)
GEMMA4: tuple[Renaming, ...] = (
    (r"\.moe\.gate\b", ".router.proj"),
    (r"\.moe\.scale\b", ".router.scale"),
    (r"\.moe\.per_expert_scale\b", ".router.per_expert_scale"),
    (r"\.moe\.experts\b", ".experts"),
    (r"\.moe\.mlp_norm\b", ".post_feedforward_layernorm_1"),
    (r"\.moe\.output_norm\b", ".post_feedforward_layernorm_2"),
    (r"\.moe\.input_norm\b", ".pre_feedforward_layernorm_2"),
)
GPT_OSS: tuple[Renaming, ...] = ((r"\.mlp\.gate\b", ".mlp.router"),)
LLAMA4: tuple[Renaming, ...] = (
    (r"\.mlp\.gate\b", ".feed_forward.router"),
    (r"\.mlp\.", ".feed_forward."),
)
