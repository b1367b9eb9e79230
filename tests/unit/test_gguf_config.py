"""What a GGUF model's metadata say of its shape, and which tensors its tensors are, in the words of a checkpoint."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from inflight.errors import DeploymentError
from inflight.gguf.checkpoint import GgufCheckpoint, open_gguf
from inflight.gguf.families import FAMILIES
from inflight.gguf.types import SERVED
from inflight.gguf.words import WORDS
from inflight.resources import ROOT
from inflight.text.files import read_json

SHAPE: dict[str, Any] = {
    "context_length": 64,
    "embedding_length": 8,
    "block_count": 1,
    "feed_forward_length": 12,
    "attention.head_count": 2,
    "attention.layer_norm_rms_epsilon": 1e-5,
}
_EMBEDDING = {"token_embd.weight": np.zeros((7, 8), np.float32)}


def _write(path: Path, architecture: str, tensors: dict[str, np.ndarray] | None = None, **metadata: Any) -> Path:
    """Write a file; in ``metadata``, names have two underlines for a dot, and None leaves a key of SHAPE out."""
    writer = gguf.GGUFWriter(path, architecture)
    given = {name.replace("__", "."): value for name, value in metadata.items()}
    for name, value in (SHAPE | given).items():
        key = f"{architecture}.{name}"
        if isinstance(value, list):
            writer.add_array(key, value)
        elif value is not None:
            kinds = {bool: gguf.GGUFValueType.BOOL, int: gguf.GGUFValueType.UINT32, str: gguf.GGUFValueType.STRING}
            writer.add_key_value(key, value, kinds.get(type(value), gguf.GGUFValueType.FLOAT32))
    for name, tensor in (_EMBEDDING | (tensors or {})).items():
        raw = gguf.GGMLQuantizationType.Q8_0 if tensor.dtype == np.uint8 else None
        writer.add_tensor(name, tensor, raw_dtype=raw)
    for step in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file, writer.close):
        step()
    return path


def test_a_llama(tmp_path: Path) -> None:
    path = _write(tmp_path / "m.gguf", "llama", rope__freq_base=5e5, attention__head_count_kv=1)
    assert read_json(path / "config.json") == {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": 7,
        "hidden_size": 8,
        "intermediate_size": 12,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 4,
        "max_position_embeddings": 64,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": True,
        "attention_bias": False,
        "mlp_bias": False,
        "dtype": "float32",
        "sliding_window": None,
        "rope_parameters": {"rope_type": "default", "rope_theta": 5e5},
    }
    assert read_json(path / "hf_quant_config.json", optional=True) == {}
    with pytest.raises(DeploymentError, match=r"m\.gguf/adapter_config\.json: missing"):
        read_json(path / "adapter_config.json")


def test_a_model_is_read_once_while_it_is_held(tmp_path: Path) -> None:
    path = _write(tmp_path / "m.gguf", "llama")
    held = open_gguf(path)
    assert open_gguf(path) is held


def test_a_mixture_of_experts(tmp_path: Path) -> None:
    experts = np.arange(3 * 12 * 8, dtype=np.float32).reshape(3, 12, 8)
    path = _write(
        tmp_path / "m.gguf", "qwen3moe", {"blk.0.ffn_up_exps.weight": experts, "blk.0.ffn_gate_inp.weight": experts[0]},
        expert_count=3, expert_used_count=2, expert_feed_forward_length=12,
    )  # fmt: skip
    checkpoint = GgufCheckpoint(path)
    wanted = {"num_experts": 3, "num_experts_per_tok": 2, "moe_intermediate_size": 12, "norm_topk_prob": True}
    assert wanted.items() <= checkpoint.config.items()
    assert "model.layers.0.mlp.gate.weight" in checkpoint.tensors
    for number, expert in enumerate(experts):
        source = checkpoint.tensors[f"model.layers.0.mlp.experts.{number}.up_proj.weight"]
        assert source.shape == (12, 8)
        assert (source.rows().view(np.float32) == expert).all()


def test_gemmas_layers(tmp_path: Path) -> None:
    tensors = {f"t{number}": np.zeros(1, np.float32) for number in range(61)}
    short = GgufCheckpoint(_write(tmp_path / "a.gguf", "gemma3", tensors, block_count=7, attention__sliding_window=4))
    assert short.config["layer_types"] == [*["sliding_attention"] * 5, "full_attention", "sliding_attention"]
    assert short.config["query_pre_attn_scalar"] == 4
    large = _write(
        tmp_path / "b.gguf", "gemma3", tensors, block_count=62, attention__sliding_window=4,
        attention__sliding_window_pattern=2, attention__key_length=16,
    )  # fmt: skip
    config = GgufCheckpoint(large).config
    assert config["layer_types"] == ["sliding_attention", "full_attention"] * 31
    assert (config["head_dim"], config["query_pre_attn_scalar"]) == (16, 4)  # the 27B's scale is not its heads' size


def test_a_mistral_has_a_window(tmp_path: Path) -> None:
    config = GgufCheckpoint(_write(tmp_path / "m.gguf", "llama", attention__sliding_window=9)).config
    assert (config["architectures"], config["sliding_window"]) == (["MistralForCausalLM"], 9)


def test_the_window_where_the_file_does_not_say(tmp_path: Path) -> None:
    experts = {"expert_count": 4, "expert_used_count": 2, "expert_feed_forward_length": 1}
    for architecture, window, more in (("gemma2", 4096, {}), ("gpt-oss", 128, experts), ("gemma3", None, {})):
        path = _write(tmp_path / "m.gguf", architecture, _FOUR if more else {}, **more)
        config = GgufCheckpoint(path).config
        kind = "sliding_attention" if window else "full_attention"
        assert (config.get("sliding_window"), config["layer_types"]) == (window, [kind])
    config = GgufCheckpoint(_write(tmp_path / "n.gguf", "gemma2", attention__sliding_window=0)).config
    assert (config["sliding_window"], config["layer_types"]) == (None, ["full_attention"])


def test_what_else_an_architecture_may_be(tmp_path: Path) -> None:
    yarn: dict[str, Any] = {"rope__scaling__type": "yarn", "rope__scaling__factor": 4.0}
    ministral = _write(
        tmp_path / "m.gguf",
        "mistral3",
        attention__temperature_scale=0.5,
        rope__scaling__yarn_log_multiplier=1.0,
        **yarn,
    )
    config = GgufCheckpoint(ministral).config
    assert config["architectures"] == ["Ministral3ForCausalLM"]
    scales = {"llama_4_scaling_beta": 0.5, "mscale": 1.0, "mscale_all_dim": 1.0}
    assert scales.items() <= config["rope_parameters"].items()
    with pytest.raises(DeploymentError, match=r"mistral3\.rope\.scaling\.yarn_log_multiplier is 1\.0; it must be 0"):
        _ = GgufCheckpoint(
            _write(tmp_path / "n.gguf", "mistral3", rope__scaling__yarn_log_multiplier=1.0, **yarn)
        ).config
    mixtral = GgufCheckpoint(_write(tmp_path / "x.gguf", "llama", _FOUR, expert_count=4, expert_used_count=2))
    assert mixtral.config["architectures"] == ["MixtralForCausalLM"]
    assert "model.layers.0.block_sparse_moe.experts.3.w3.weight" in mixtral.tensors
    olmo = GgufCheckpoint(_write(tmp_path / "o.gguf", "olmo2", attention__sliding_window=9)).config
    assert (olmo["architectures"], olmo["layer_types"]) == (["Olmo3ForCausalLM"], ["sliding_attention"])


def test_the_last_layers_of_glm_predict_ahead_and_are_left_out(tmp_path: Path) -> None:
    names = ["blk.0.attn_norm.weight", "blk.1.attn_norm.weight", "blk.1.nextn.enorm.weight", "blk.0.ffn_up_exps.weight"]
    tensors = {name: np.zeros((4, 1, 1) if "exps" in name else 8, np.float32) for name in names}
    checkpoint = GgufCheckpoint(
        _write(
            tmp_path / "m.gguf", "glm4moe", tensors, block_count=2, nextn_predict_layers=1, expert_count=4,
            expert_used_count=2, expert_feed_forward_length=1, leading_dense_block_count=0,
        )
    )  # fmt: skip
    assert checkpoint.config["num_hidden_layers"] == 1
    assert not any(name.startswith(("blk.1", "model.layers.1")) for name in checkpoint.tensors)


def test_the_older_name_of_linear_scaling(tmp_path: Path) -> None:
    rope = GgufCheckpoint(_write(tmp_path / "m.gguf", "llama", rope__scale_linear=2.0)).config["rope_parameters"]
    assert rope == {"rope_type": "linear", "rope_theta": 10_000.0, "factor": 2.0}


@pytest.mark.parametrize(
    ("metadata", "factor"),
    [
        ({"rope__scaling__factor": 4.0}, 4.0),
        ({"rope__scaling__factor": 4.0, "rope__scale_linear": 2.0}, 4.0),
        ({"rope__scaling__type": "linear", "rope__scale_linear": 2.0}, 2.0),
        ({"rope__scaling__type": "linear"}, None),
        ({"rope__scaling__type": "linear", "rope__scaling__factor": 1.0}, None),
        ({"rope__scaling__factor": 0.0}, None),
        ({"rope__scaling__type": "none", "rope__scaling__factor": 4.0}, None),
    ],
)
def test_scaling_is_linear_where_the_file_does_not_say(
    tmp_path: Path, metadata: dict[str, Any], factor: float | None
) -> None:
    rope = GgufCheckpoint(_write(tmp_path / "m.gguf", "llama", **metadata)).config["rope_parameters"]
    assert (rope["rope_type"], rope.get("factor")) == ("linear" if factor else "default", factor)


def test_values_by_layer_that_are_all_the_same(tmp_path: Path) -> None:
    config = GgufCheckpoint(_write(tmp_path / "m.gguf", "llama", feed_forward_length=[9, 9], block_count=1)).config
    assert config["intermediate_size"] == 9


_FACTORS = {"rope_freqs.weight": np.ones(2, np.float32)}
_FOUR = {"blk.0.ffn_up_exps.weight": np.zeros((4, 1, 1), np.float32)}
_LONG = {"rope_factors_long.weight": np.ones(2, np.float32)}
_Case = tuple[Callable[[Path], Path], str]


@pytest.mark.parametrize(
    ("write", "message"),
    [
        (lambda path: _write(path, "bloom"), "architecture 'bloom' is not supported; supported: llama, mistral3"),
        (lambda path: _write(path, "qwen"), "did you mean 'qwen"),
        (lambda path: _write(path, "llama", {"token_embd.weight": np.zeros((7, 9), np.float32)}), "with rows of 8"),
        (lambda path: _write(path, "llama", block_count=1 << 31), "block_count is 2147483648; it must be at most 1"),
        (lambda path: _write(path, "llama", context_length=None), "llama.context_length is None; it must be a pos"),
        (lambda path: _write(path, "llama", embedding_length="8"), "length is '8'; it must be a finite number"),
        (lambda path: _write(path, "llama", attention__head_count=[2, 4]), r"is \[2, 4\]; it must be the same for all"),
        (lambda path: _write(path, "llama", attention__head_count=16), "key_length and value_length is '0 and None'"),
        (lambda path: _write(path, "llama", attention__value_length=6), "key_length and value_length is '4 and 6'"),
        (lambda path: _write(path, "llama", attention__layer_norm_rms_epsilon=None), "it must be there"),
        (lambda path: _write(path, "llama", expert_count=8, expert_used_count=2), "as its tensors have: those of"),
        (lambda path: _write(path, "llama", _FOUR, expert_count=3, expert_used_count=2), "as its tensors have: 4"),
        (
            lambda path: _write(path, "glm4moe", _FOUR, expert_count=4, expert_used_count=2, expert_gating_func=1),
            "expert_gating_func is 1; it must be 2, a sigmoid",
        ),
        (lambda path: _write(path, "glm4moe", nextn_predict_layers=1), "nextn_predict_layers is 1; it must be a num"),
        (lambda path: _write(path, "qwen3", attention__key_length=1 << 20), "one positive integer, at most 4096"),
        (lambda path: _write(path, "llama", rope__dimension_count=2), "rope.dimension_count is 2; it must be the size"),
        (lambda path: _write(path, "llama", rope__scaling__type="su"), "rope.scaling.type is 'su'; it must be none, l"),
        (lambda path: _write(path, "llama", rope__scaling__attn_factor=1.5), "attn_factor is 1.5; it must be 1.0 with"),
        (
            lambda path: _write(path, "llama", rope__scaling__type="yarn", rope__scaling__yarn_ext_factor=0.5),
            "yarn_ext_factor is 0.5; it must be 1.0, or left out",
        ),
        (
            lambda path: _write(path, "llama", _FACTORS, rope__scaling__type="linear", rope__scaling__factor=2.0),
            "it has both rope_freqs.weight and rope.scaling.type linear; only one of them can be applied",
        ),
        (
            lambda path: _write(path, "phi3", _LONG, rope__scaling__type="linear", rope__scaling__factor=2.0),
            "phi3.rope.scaling.type is 'linear'; it must be none or longrope beside rope_factors_long.weight",
        ),
        (
            lambda path: _write(path, "phi3", _LONG, rope__scaling__type="longrope", rope__scaling__factor=2.0),
            "phi3.rope.scaling.factor is 2.0; it must be 1.0, or left out, beside rope_factors_long.weight",
        ),
        (
            lambda path: _write(path, "phi3", _LONG | _FACTORS),
            "it has both rope_freqs.weight and rope_factors_long.weight; only one of them can be applied",
        ),
        (lambda path: _write(path, "phi3", _LONG), "rope_factors_short.weight is 'missing'; it must be a row of F32"),
        (
            lambda path: _write(
                path, "gemma3", attention__sliding_window=4, attention__sliding_window_pattern=[True, False]
            ),
            "sliding_window_pattern is .*; it must be a positive integer, or a list of 1",
        ),
    ],
)  # fmt: skip
def test_what_is_refused(tmp_path: Path, write: Callable[[Path], Path], message: str) -> None:
    path = write(tmp_path / "m.gguf")
    with pytest.raises(DeploymentError, match=message) as error:
        read_json(path / "config.json")
    assert "\n" not in str(error.value)
    assert str(path) in str(error.value)


def test_the_page_names_what_is_served() -> None:
    cells = [line.strip("|").split("|") for line in (ROOT / "docs/gguf.md").read_text().splitlines() if line[:1] == "|"]
    named = {row[0].strip(): set(re.findall(r"`([^`]+)`", row[1])) for row in cells if len(row) == 2}
    assert named["`general.architecture`"] == set(FAMILIES)
    assert named["types of tensors"] == set(SERVED)
    assert named["`tokenizer.ggml.pre`, of `gpt2`"] == set(WORDS)


def test_heads_that_rows_do_not_fit(tmp_path: Path) -> None:
    path = _write(tmp_path / "m.gguf", "llama", {"blk.0.attn_q.weight": np.zeros((6, 8), np.float32)})
    with pytest.raises(DeploymentError, match="tensor 'blk.0.attn_q.weight' has 6 rows; 2 heads have 4 each"):
        _ = GgufCheckpoint(path).tensors


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (
            ("model.norm.weight", "output_norm.weight"),
            "'model.norm.weight' and 'output_norm.weight' are both model.norm",
        ),
        (
            ("blk.0.ffn_norm.weight", "blk.0.post_attention_norm.weight"),
            "are both model.layers.0.post_attention_layernorm.weight; only one of them can be taken",
        ),
    ],
)
def test_tensors_that_are_one_in_the_checkpoint(tmp_path: Path, names: tuple[str, str], message: str) -> None:
    experts = {"expert_count": 4, "expert_used_count": 2, "expert_feed_forward_length": 1}
    tensors = _FOUR | {name: np.zeros(8, np.float32) for name in names}
    path = _write(tmp_path / "m.gguf", "gpt-oss", tensors, **experts)
    with pytest.raises(DeploymentError, match=message) as error:
        _ = GgufCheckpoint(path).tensors
    assert str(error.value).startswith(f"{path}: tensors ")


def test_a_head_by_the_checkpoints_name_beside_an_embedding_in_blocks(tmp_path: Path) -> None:
    """The embedding is the head there."""
    blocks = gguf.quants.quantize(np.zeros((7, 32), np.float32), gguf.GGMLQuantizationType.Q8_0)
    tensors = {"token_embd.weight": blocks, "lm_head.weight": np.zeros((7, 32), np.float32)}
    path = _write(tmp_path / "m.gguf", "llama", tensors, embedding_length=32)
    with pytest.raises(DeploymentError, match=r"'lm_head\.weight' and 'token_embd\.weight' are both lm_head\.weight"):
        _ = GgufCheckpoint(path).tensors


def test_a_tensor_that_is_not_known_keeps_its_name(tmp_path: Path) -> None:
    """So the engine refuses the model by it: nothing is left out."""
    extra = {name: np.zeros(4, np.float32) for name in ("blk.0.attn_sinks.weight", "blk.0.ffn_up.3.weight", "cls.bias")}
    assert GgufCheckpoint(_write(tmp_path / "m.gguf", "llama", extra)).tensors.keys() >= extra.keys()
