"""What a ``config.json`` leaves out, or says by null, is read as transformers' configuration class reads it."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Iterator
from typing import Any

import pytest

os.environ["HF_HUB_OFFLINE"] = "1"

from transformers import CONFIG_MAPPING, LlamaConfig, PreTrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from inflight.engine.models.architectures import ARCHITECTURES
from inflight.engine.models.config import ModelConfig
from inflight.engine.models.reading import read_model_config
from inflight.errors import DeploymentError

Json = dict[str, Any]
_OF_OTHERS = {"internlm3", "iquestcoder", "llama4", "qwen3_5", "qwen3_5_moe"}
"""Types for which transformers takes one of these classes, but which are others' or hold a text part."""
KINDS = {
    (name, kind)
    for kind, name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items()
    if name in ARCHITECTURES and kind not in _OF_OTHERS
} | {(name, kind) for name, row in ARCHITECTURES.items() for kind in row.text_types}
_REQUIRED = {
    "vocab_size", "hidden_size", "intermediate_size", "intermediate_size_mlp", "num_hidden_layers",
    "num_attention_heads", "max_position_embeddings", "num_experts", "num_local_experts", "n_routed_experts",
    "moe_intermediate_size", "num_experts_per_tok", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim",
    "v_head_dim", "is_causal",
}  # fmt: skip
"""What a file must have, if the class has it."""
_WITHOUT: dict[str, Json] = {"deepseek_v2": {"num_experts_per_tok": 6}, "glm4_moe": {"head_dim": 128}}
"""What a file must have, and the class has no default for, or one that does not fit."""
_IGNORED = {"pretraining_tp", "attention_dropout", *(field.name for field in dataclasses.fields(PreTrainedConfig))}
"""Fields that change nothing here."""
each = pytest.mark.parametrize(("name", "kind"), sorted(KINDS))


def _read(name: str, kind: str, fields: Json) -> ModelConfig:
    if kind.endswith("_text"):
        text = fields | {"model_type": kind, "tie_word_embeddings": None}  # the whole model's configuration says it
        return read_model_config({"architectures": ["ForConditionalGeneration"], "text_config": text})
    return read_model_config(fields | {"architectures": [name]})


def _made(kind: str, **fields: Any) -> Json:
    """Return all fields of transformers' configuration."""
    config = CONFIG_MAPPING[kind](**_WITHOUT.get(kind, {}), **fields)
    made: Json = json.loads(config.to_json_string(use_diff=False))
    return made


def _least(kind: str, whole: Json) -> Json:
    return {field: value for field, value in whole.items() if field in _REQUIRED or field in _WITHOUT.get(kind, {})}


@each
def test_what_is_left_out_is_as_in_transformers(name: str, kind: str) -> None:
    whole = _made(kind)
    assert _read(name, kind, _least(kind, whole)) == _read(name, kind, whole)


def _nulls() -> Iterator[tuple[str, str, str]]:
    """Yield the fields of each class that have a default and may be null, and mean something then."""
    for name, kind in sorted(KINDS):
        for field in dataclasses.fields(CONFIG_MAPPING[kind]):
            has_default = field.default not in (None, dataclasses.MISSING)
            if has_default and "None" in str(field.type) and field.name not in _IGNORED:
                yield name, kind, field.name


@pytest.mark.parametrize(("name", "kind", "field"), list(_nulls()))
def test_what_is_null_is_as_in_transformers(name: str, kind: str, field: str) -> None:
    """Or it is refused by name: with a null in some fields transformers makes a configuration, and fails later."""
    whole = _made(kind, **{field: None})
    try:
        read = _read(name, kind, _least(kind, whole) | {field: None})
    except DeploymentError as error:
        with pytest.raises(DeploymentError, match=field):
            _read(name, kind, whole)
        said = str(error)
    else:
        said = field
        assert read == _read(name, kind, whole)
    assert field in said


@each
@pytest.mark.parametrize("fields", [{}, {"sliding_window": 16}, {"sliding_window": 16, "max_window_layers": 5}])
def test_layers_that_have_a_window_are_those_of_transformers(name: str, kind: str, fields: Json) -> None:
    known = {field.name for field in dataclasses.fields(CONFIG_MAPPING[kind])}
    if "use_sliding_window" in known and known.issuperset(fields):
        used = {"use_sliding_window": True} | fields
        whole = _made(kind, **used)
        assert _read(name, kind, _least(kind, whole) | used) == _read(name, kind, whole)


def test_the_last_layer_of_a_gemma4_is_full() -> None:
    kinds = {"num_hidden_layers": 6, "layer_types": ["sliding_attention"] * 6}
    whole = _made("gemma4_text", **kinds)
    read = _read("Gemma4ForCausalLM", "gemma4_text", _least("gemma4_text", whole) | kinds)
    assert read == _read("Gemma4ForCausalLM", "gemma4_text", whole)
    assert read.windows == (512,) * 5 + (None,)


def test_deepseek2_is_interleaved_whatever_the_file_says() -> None:
    data = _made("deepseek_v2")
    read = _read("DeepseekV2ForCausalLM", "deepseek_v2", data | {"rope_interleave": False})
    assert read == _read("DeepseekV2ForCausalLM", "deepseek_v2", data)


def test_no_window_no_chunks_and_no_caps() -> None:
    """What null means; not what would stand there without it."""
    mistral, gemma = (_least(kind, _made(kind)) for kind in ("mistral", "gemma2"))
    assert set(_read("MistralForCausalLM", "", mistral | {"sliding_window": None}).windows) == {None}
    config = _read("Gemma2ForCausalLM", "", gemma | {"attn_logit_softcapping": None, "final_logit_softcapping": None})
    assert {one.softcap for one in config.attention.values()} == {config.logit_softcap} == {None}
    with pytest.raises(DeploymentError, match="sliding_window is null or missing; layers of 'sliding_attention' need"):
        _read("Gemma2ForCausalLM", "", gemma | {"sliding_window": None})
    with pytest.raises(DeploymentError, match="attention_chunk_size is null or missing; layers of 'chunked_attention'"):
        _read(
            "Llama4ForCausalLM",
            "llama4_text",
            _least("llama4_text", _made("llama4_text")) | {"attention_chunk_size": None},
        )


@pytest.mark.parametrize("within", [None, 64])
@pytest.mark.parametrize("beside", [None, 128])
@pytest.mark.parametrize("kind", ["llama3", "yarn", "longrope"])
def test_the_length_that_a_model_was_made_for_first(kind: str, beside: int | None, within: int | None) -> None:
    """Beside the rotary parameters it wins over the one within; without any it is max_position_embeddings."""
    lengths = {"factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    factors = {"short_factor": [1.0] * 64, "long_factor": [2.0] * 64}
    rope = {"rope_type": kind, "rope_theta": 1e4} | lengths | factors
    rope |= {"original_max_position_embeddings": within} if within else {}
    data = _made("llama") | {"rope_parameters": rope}
    data |= {"original_max_position_embeddings": beside} if beside else {}
    known = LlamaConfig(**json.loads(json.dumps(data)))
    known.standardize_rope_params()  # as each computation of frequencies does
    read = _read("LlamaForCausalLM", "llama", data).layers[0].attention
    assert read is not None
    assert read.rope is not None
    length = read.rope["original_max_position_embeddings"]
    assert length == known.rope_parameters["original_max_position_embeddings"]
    assert length == (beside or within or data["max_position_embeddings"])
