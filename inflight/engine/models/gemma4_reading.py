"""What Gemma 4's ``config.json`` says of single layers: heads of their own, and keys and values that are shared."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from inflight.engine.models.config import AttentionConfig, LayerConfig
from inflight.engine.models.fields import COUNT, FLAG, INDEX, SIZE, Fields
from inflight.errors import DeploymentError

_FULL = "full_attention"


def gemma4_layers(fields: Fields, kinds: Sequence[str], layers: Sequence[LayerConfig]) -> tuple[LayerConfig, ...]:
    """Return ``layers``, which are read as those of other architectures, as Gemma 4 has them; ``kinds``: of each."""
    first_shared = len(layers) - fields.given("num_kv_shared_layers", 0, INDEX)
    wide = fields.given("use_double_wide_mlp", False, FLAG)
    found: list[LayerConfig] = []
    for index, (kind, layer) in enumerate(zip(kinds, layers, strict=True)):
        donor = _donor(kinds, first_shared, index)
        assert layer.attention is not None
        size = layer.intermediate_size * (2 if wide and donor is not None else 1)
        attention = _attention(fields, kind, index, replace(layer.attention, kv_donor=donor))
        if donor is not None:
            own = found[donor].attention
            assert own is not None
            if (own.num_kv_heads, own.head_dim) != (attention.num_kv_heads, attention.head_dim):
                raise DeploymentError(
                    f"config.json: layer {index} shares the keys and values of layer {donor}, whose heads are others"
                )
        found.append(replace(layer, attention=attention, intermediate_size=size))
    return tuple(found)


def _donor(kinds: Sequence[str], first_shared: int, index: int) -> int | None:
    """Return the last layer of the same kind that has keys and values of its own; None: this one has."""
    if index < first_shared:
        return None
    donors = [other for other in range(max(0, first_shared)) if kinds[other] == kinds[index]]
    if not donors:
        raise DeploymentError(
            f"config.json: num_kv_shared_layers is {len(kinds) - first_shared}; no layer before those has "
            f"{kinds[index]}"
        )
    return donors[-1]


def _attention(fields: Fields, kind: str, index: int, attention: AttentionConfig) -> AttentionConfig:
    attention = replace(attention, unit_values=attention.kv_donor is None)
    same = kind == _FULL and fields.given("attention_k_eq_v", False, FLAG)
    own = _own_fields(fields, kind, index, same)
    kv_heads = own.given("num_key_value_heads", attention.num_kv_heads, COUNT)
    head_dim = own.given("head_dim", attention.head_dim, SIZE)
    if attention.num_heads % kv_heads or head_dim % 2:
        raise DeploymentError(
            f"config.json: layer {index} has num_key_value_heads {kv_heads} and head_dim {head_dim}; the first must "
            f"divide num_attention_heads, {attention.num_heads}, and the second must be even"
        )
    return replace(
        attention,
        head_dim=head_dim,
        num_kv_heads=kv_heads,
        values_are_keys=same and attention.kv_donor is None,
    )


def _own_fields(fields: Fields, kind: str, index: int, same: bool) -> Fields:
    """Return what one layer has of its own, by either way of saying it: transformers writes another than it reads."""
    overrides = fields.data.get("per_layer_config")
    if overrides is not None:
        own = _of_layer(overrides, index) if isinstance(overrides, Mapping) else None
        if not isinstance(own, Mapping) or not {"head_dim", "num_key_value_heads"}.issuperset(own):
            raise DeploymentError(
                f"config.json: per_layer_config is {overrides!r}; by the numbers of layers it may have head_dim and "
                "num_key_value_heads"
            )
        return Fields(own)
    if kind != _FULL:
        return Fields({})
    kv_heads = fields.given("num_global_key_value_heads", None, COUNT) if same else None
    return Fields({"head_dim": fields.given("global_head_dim", 512, SIZE), "num_key_value_heads": kv_heads})


def _of_layer(overrides: Mapping[str, Any], index: int) -> Any:
    """Return what is said of a layer, whose number may have zeros in front: transformers 5.23 writes them."""
    return next((own for number, own in overrides.items() if number.lstrip("0") == str(index or "")), {})
