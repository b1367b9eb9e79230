"""What the shape of attention alone says; the rest of a model is in ``shape``."""

from __future__ import annotations

from inflight.engine.models.config import AttentionConfig


def projections(config: AttentionConfig, hidden: int, fused: bool) -> list[tuple[str, int, int, bool]]:
    """Return the linears of attention: name, inputs, outputs, and whether there is a bias."""
    heads, bias, latent = config.num_heads, config.qkv_bias, config.latent
    if latent is None:
        output, key = heads * config.head_dim, config.num_kv_heads * config.head_dim
        query = output * (1 + config.output_gate)
        own = [] if config.kv_donor is not None else ["k_proj"] if config.values_are_keys else ["k_proj", "v_proj"]
        rows = {"qkv_proj": query + 2 * key} if fused else {"q_proj": query} | dict.fromkeys(own, key)
        found = [(name, hidden, size, bias) for name, size in rows.items()]
        return [*found, ("o_proj", output, hidden, config.output_bias)]
    query = heads * (latent.nope_dim + latent.rope_dim)
    if latent.query_rank is None:
        found = [("q_proj", hidden, query, False)]
    else:
        found = [("q_a_proj", hidden, latent.query_rank, bias), ("q_b_proj", latent.query_rank, query, False)]
    return [
        *found,
        ("kv_a_proj_with_mqa", hidden, latent.rank + latent.rope_dim, bias),
        ("kv_b_proj", latent.rank, heads * (latent.nope_dim + latent.value_dim), False),
        ("o_proj", heads * latent.value_dim, hidden, config.output_bias),
    ]


def vectors(one: AttentionConfig) -> int:
    """Return the parameters of attention that are no matrices."""
    count = one.sinks * one.num_heads
    if one.qk_norm == "head":
        count += (2 if one.kv_donor is None else 1) * one.head_dim
    elif one.qk_norm == "width":
        count += (one.num_heads + one.num_kv_heads) * one.head_dim
    if one.latent is not None:
        count += one.latent.rank + (one.latent.query_rank or 0)
    return count
