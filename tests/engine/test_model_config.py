"""Configurations in old spellings and new, and checkpoints that cannot be served: named, in one line."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from inflight.engine.checkpoint import resolve_dtype
from inflight.engine.models.architectures import ARCHITECTURES as SUPPORTED
from inflight.engine.models.config import ModelConfig
from inflight.engine.models.reading import read_model_config
from inflight.errors import DeploymentError
from tests.engine.support.checkpoints import ARCHITECTURES, checkpoint, greedy, reference
from tests.engine.support.driving import ask, load, run
from tests.engine.support.native import SETS
from tests.support.tables import each_row

Json = dict[str, Any]
PROMPT = (5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16)


def _read(name: str) -> Json:
    data: Json = json.loads((checkpoint(name) / "config.json").read_text())
    return data


def _ropes(config: ModelConfig) -> list[Json]:
    return [dict(one.rope) for one in config.attention.values() if one.rope]


def _copy(directory: Path, name: str = "llama") -> Path:
    return Path(shutil.copytree(checkpoint(name), directory / "model"))


def _rewrite(directory: Path, change: Callable[[Json], Json]) -> Path:
    path = directory / "config.json"
    path.write_text(json.dumps(change(json.loads(path.read_text()))))
    return directory


def _old(data: Json) -> Json:
    """Spell a configuration as transformers 4 did."""
    has_pattern = data["architectures"] == ["Gemma3ForCausalLM"]
    new = {"rope_parameters", "dtype"} | ({"layer_types"} if has_pattern else set())
    old = {name: value for name, value in data.items() if name not in new}
    old["torch_dtype"] = data["dtype"]
    ropes = data["rope_parameters"]
    if "full_attention" in ropes:
        old["rope_local_base_freq"] = ropes["sliding_attention"]["rope_theta"]
        full = next(place for place, kind in enumerate(data["layer_types"]) if kind == "full_attention")
        old["sliding_window_pattern"] = full + 1
        ropes = ropes["full_attention"]
    scaling = {name: value for name, value in ropes.items() if name not in ("rope_theta", "partial_rotary_factor")}
    old["rope_theta"] = ropes["rope_theta"]
    old["partial_rotary_factor"] = ropes.get("partial_rotary_factor", 1.0)
    old["rope_scaling"] = None if scaling["rope_type"] == "default" else scaling
    return old


@pytest.mark.sweep
@pytest.mark.parametrize("name", [one for one in ARCHITECTURES if "gemma4" not in one and "images" not in one])
def test_the_old_spelling_means_the_same(name: str, tmp_path: Path) -> None:
    new = read_model_config(_read(name))
    old = read_model_config(_old(_read(name)))
    assert old == new
    directory = _rewrite(_copy(tmp_path, name), _old)
    tokens = run(load(directory), [ask(PROMPT, 8)]).popitem()[1].tokens
    assert tokens == greedy(name, PROMPT, 8)


@pytest.mark.parametrize("spelling", ["su", "yarn", "longrope"])
def test_phi3s_own_names_of_longrope(spelling: str) -> None:
    data = _old(_read("phi3, longrope"))
    scaling = data["rope_scaling"]
    factors = {name: scaling[name] for name in ("short_factor", "long_factor")}
    data |= {"rope_scaling": {"type": spelling} | factors, "original_max_position_embeddings": 128}
    [rope] = {str(rope): rope for rope in _ropes(read_model_config(data))}.values()
    assert (rope["rope_type"], rope["original_max_position_embeddings"]) == ("longrope", 128)


def test_what_an_old_gemma_leaves_out() -> None:
    """Gemma 3's first files say little: every sixth layer is global, and local layers have a base of their own."""
    data = _old(_read("gemma3")) | {"num_hidden_layers": 12}
    for name in ("sliding_window_pattern", "rope_theta", "rope_local_base_freq", "tie_word_embeddings"):
        data.pop(name, None)
    config = read_model_config(data | {"rope_scaling": {"rope_type": "linear", "factor": 8.0}})
    assert [layer for layer, window in enumerate(config.windows) if window is None] == [5, 11]
    ropes = _ropes(config)
    assert (ropes[0]["rope_type"], ropes[0]["rope_theta"]) == ("default", 10_000.0)
    assert (ropes[5]["rope_type"], ropes[5]["rope_theta"]) == ("linear", 1_000_000.0)
    assert config.tie_word_embeddings


@pytest.mark.parametrize(
    ("wanted", "own", "expected", "on_gpu"),
    [
        ("auto", "bfloat16", torch.bfloat16, torch.bfloat16),
        ("auto", "float16", torch.float32, torch.bfloat16),
        ("auto", "float32", torch.float32, torch.float32),
        ("float32", "float16", torch.float32, torch.float32),
        ("float32", "bfloat16", torch.float32, torch.float32),
        ("bfloat16", "float32", torch.bfloat16, torch.bfloat16),
    ],
)
def test_the_type_of_weights(
    wanted: str,
    own: str,
    expected: torch.dtype,
    on_gpu: torch.dtype,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO")
    config = read_model_config(_read("llama") | {"dtype": own})
    assert resolve_dtype(wanted, config, torch.device("cpu")) is expected
    assert not caplog.text
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    assert resolve_dtype(wanted, config, torch.device("cuda", 0)) is on_gpu
    assert ("it is computed in bfloat16" in caplog.text) == ((wanted, own) == ("auto", "float16"))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    assert resolve_dtype(wanted, config, torch.device("cuda", 0)) is expected


@pytest.mark.parametrize("architectures", [["LlamaForCasualLM"], ["GPT2LMHeadModel"], [], None])
def test_an_unknown_architecture_is_refused_by_name_with_the_list(architectures: list[str] | None) -> None:
    with pytest.raises(DeploymentError) as caught:
        read_model_config(_read("llama") | {"architectures": architectures})
    message = str(caught.value)
    assert (architectures or ["none"])[0] in message
    assert all(name in message for name in SUPPORTED)
    assert ("did you mean 'LlamaForCausalLM'" in message) == (architectures == ["LlamaForCasualLM"])


@pytest.mark.parametrize(
    ("of", "name", "value"),
    [
        ("llama", "use_bidirectional_attention", True),
        ("llama", "is_causal", False),
        ("llama", "final_logit_softcapping", 30.0),
        ("olmoe", "clip_qkv", 8.0),
        ("olmoe", "clip_qkv", 0),
    ],
)
def test_an_option_that_would_change_the_output_is_refused_by_name(of: str, name: str, value: float) -> None:
    data = _read(of)
    with pytest.raises(DeploymentError, match=f"{name} is {value}; it is not supported"):
        read_model_config(data | {name: value})
    assert read_model_config(data | {name: None}) == read_model_config(data)


WRONG: list[tuple[str, Json, str]] = [
    ("llama", {"architectures": {"a": 1}}, "architecture {'a': 1} is not supported"),
    ("llama", {"architectures": [["x"]]}, "architecture ['x'] is not supported"),
    ("llama", {"hidden_act": ["silu"]}, "activation ['silu'] is not one of"),
    ("llama", {"head_dim": "16"}, "head_dim is '16'; it must be a positive integer"),
    ("llama", {"head_dim": 16.0}, "head_dim is 16.0; it must be a positive integer"),
    ("llama", {"head_dim": 15}, "must divide the first"),
    ("llama", {"head_dim": None, "hidden_size": 2}, "must divide the first"),
    ("llama", {"num_key_value_heads": 3}, "must divide the first"),
    ("llama", {"num_key_value_heads": -1}, "num_key_value_heads is -1; it must be a positive integer"),
    ("llama", {"num_hidden_layers": True}, "num_hidden_layers is True; it must be a positive integer"),
    ("llama", {"rms_norm_eps": "1e-5"}, "rms_norm_eps is '1e-5'; it must be a number above 0"),
    ("llama", {"rms_norm_eps": float("nan")}, "rms_norm_eps is nan; it must be a number above 0"),
    ("llama", {"tie_word_embeddings": "false"}, "tie_word_embeddings is 'false'; it must be true or false"),
    ("llama", {"hidden_size": 2**31}, "hidden_size is 2147483648; it must be a positive integer up to 2^20"),
    ("llama", {"rms_norm_eps": 10**400}, "it must be a number above 0"),
    ("llama", {"rope_parameters": "linear"}, "the parameters of RoPE are 'linear'"),
    ("llama", {"rope_parameters": {"factor": "8"}}, "factor is '8'; it must be a number above 0"),
    ("llama", {"rope_parameters": {"beta_fast": -1}}, "beta_fast is -1; it must be 0 or a number above 0"),
    ("llama", {"rope_parameters": {"long_factor": [1.0, "x"]}}, "it must be a list of numbers above 0"),
    ("llama", {"rope_parameters": {"original_max_position_embeddings": -8}}, "it must be a number above 0"),
    ("llama", {"rope_parameters": {"partial_rotary_factor": 2.0}}, "the first must be at most 1"),
    ("llama", {"partial_rotary_factor": 0.01}, "their product an even number"),
    ("llama", {"rope_parameters": {"rope_theta": "x"}}, "rope_theta is 'x'; it must be a number above 0"),
    (
        "llama",
        {"num_hidden_layers": 10**9},
        "num_hidden_layers is 1000000000; it must be a positive integer up to 1000",
    ),
    ("llama", {"vocab_size": 2**40}, "vocab_size is 1099511627776; it must be a positive integer up to 2^20"),
    (
        "llama",
        {"rope_parameters": {"factor": 1e308}},
        "factor is 1e+308; it must be a number above 0 that float32 holds",
    ),
    ("llama", {"rope_parameters": 0}, "the parameters of RoPE are 0; an object is expected"),
    ("llama", {"layer_types": []}, "layer_types is []; it must be a list of 3"),
    ("llama", {"hidden_act": ""}, "activation '' is not one of"),
    ("llama", {"dtype": "int8"}, "dtype is 'int8'; it must be float32, bfloat16 or float16"),
    ("llama", {"architectures": ["a\n\x1b[2J"]}, "architecture a\\n\\x1b[2J is not supported"),
    ("llama", {"hidden_act": "x" * 10**6}, "x ... x"),
    (
        "qwen2",
        {"layer_types": None, "use_sliding_window": "false"},
        "use_sliding_window is 'false'; it must be true or",
    ),
    ("qwen3moe", {"num_experts": 10**7}, "num_experts is 10000000; it must be a positive integer up to 8192"),
    ("qwen3moe", {"mlp_only_layers": [0] * 10**6}, "it must be a list of layers, up to 4096"),
    ("deepseek3", {"scoring_func": "softmax"}, "scoring_func is 'softmax'; only 'sigmoid' is supported here"),
    ("deepseek3", {"topk_method": "greedy"}, "topk_method is 'greedy'; only 'noaux_tc' is supported here"),
    ("deepseek2", {"norm_topk_prob": True}, "norm_topk_prob is True; only False is supported here"),
    ("deepseek2", {"scoring_func": "sigmoid"}, "scoring_func is 'sigmoid'; only 'softmax' is supported here"),
    ("mistral4", {"scoring_func": "sigmoid"}, "scoring_func is 'sigmoid'; only 'softmax' is supported here"),
    ("qwen3.5moe", {"norm_topk_prob": False}, "norm_topk_prob is False; only True is supported here"),
    ("qwen3.5", {"hidden_act": "gelu_pytorch_tanh"}, "activation 'gelu_pytorch_tanh' is not one of ['silu']"),
    ("mistral", {"sliding_window": 0}, "sliding_window is 0; it must be a positive integer"),
    ("mistral", {"sliding_window": -4}, "sliding_window is -4; it must be a positive integer"),
    ("qwen2, windows", {"layer_types": None, "max_window_layers": "2"}, "max_window_layers is '2'"),
    ("qwen2, windows", {"use_sliding_window": False}, "use_sliding_window is false, but layer_types has"),
    ("mistral", {"layer_types": ["full_attention"] * 3}, "it must be a list of 3, each of ['sliding_attention']"),
    ("llama", {"layer_types": ["sliding_attention"] * 3}, "it must be a list of 3, each of ['full_attention']"),
    ("olmo3", {"layer_types": None, "sliding_window_pattern": 3}, "sliding_window_pattern is 3; without layer_types"),
    ("gemma3", {"query_pre_attn_scalar": 0}, "query_pre_attn_scalar is 0; it must be a number above 0"),
    (
        "gemma3",
        {"layer_types": None, "sliding_window_pattern": 0},
        "sliding_window_pattern is 0; it must be a positive",
    ),
]


@each_row(("name", "change", "problem"), WRONG)
def test_values_of_another_kind_are_refused_by_name(name: str, change: Json, problem: str) -> None:
    with pytest.raises(DeploymentError) as caught:
        read_model_config(_read(name) | change)
    assert problem in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.skipif(not SETS, reason="the native step was not built")
@pytest.mark.parametrize("window", [2**32 - 1, 2**32 - 1024, 2**80])
def test_a_window_longer_than_any_context_is_none(window: int, tmp_path: Path) -> None:
    """Some files mean no window by the largest number that they can have; a 32-bit integer would make it negative."""
    directory = _rewrite(_copy(tmp_path, "mistral"), lambda data: data | {"sliding_window": window})
    whole = _rewrite(_copy(tmp_path / "whole", "mistral"), lambda data: data | {"sliding_window": 1000})
    tokens, expected = (
        run(load(one, cpu_step="auto"), [ask(PROMPT, 8)]).popitem()[1].tokens for one in (directory, whole)
    )
    assert tokens == expected


def test_llama4s_first_files_say_by_a_number_that_queries_are_scaled() -> None:
    data = _read("llama4")
    readings = {value: read_model_config(data | {"attn_temperature_tuning": value}) for value in (0, 4)}
    for value, config in readings.items():
        assert config == read_model_config(data | {"attn_temperature_tuning": bool(value)})
    assert readings[0] != readings[4]
    with pytest.raises(DeploymentError, match="attn_temperature_tuning is -4; it must be true, false, or an integer"):
        read_model_config(data | {"attn_temperature_tuning": -4})


def test_what_is_null_is_left_out() -> None:
    data = _read("llama") | dict.fromkeys(("rms_norm_eps", "tie_word_embeddings", "num_key_value_heads", "mlp_bias"))
    config = read_model_config(data)
    assert (config.rms_norm_eps, config.tie_word_embeddings) == (1e-6, False)
    assert config.num_kv_heads == config.num_heads


@each_row(
    "kinds", [["chunked_attention"] * 3, ["full_attention"], ["full_attention"] * 99, "full_attention", [None] * 3]
)
def test_layer_types_that_are_not_those_of_the_layers_are_refused(kinds: object) -> None:
    with pytest.raises(DeploymentError, match="layer_types is .*; it must be a list of"):
        read_model_config(_read("llama") | {"layer_types": kinds})


def _without(*names: str) -> Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]:
    return lambda tensors: {name: tensor for name, tensor in tensors.items() if name not in names}


def _refused(directory: Path, *words: str) -> None:
    with pytest.raises(DeploymentError) as caught:
        load(directory)
    message = str(caught.value)
    assert "\n" not in message
    assert all(word in message for word in words), message


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (_without("model.layers.1.self_attn.k_proj.weight"), ("no tensor for model.layers.1.self_attn.k_proj.weight",)),
        (_without("model.norm.weight", "lm_head.weight"), ("lm_head.weight, model.norm.weight (2 in all)",)),
        (lambda tensors: tensors | {"visual.weight": torch.ones(2)}, ("visual.weight has no place",)),
        (lambda tensors: tensors | {"model.layers.0.self_attn.q_proj.bias": torch.ones(64)}, ("has no place",)),
        (
            lambda tensors: tensors | {"model.norm.weight": torch.ones(64, dtype=torch.int32)},
            ("model.norm.weight is torch.int32; by the checkpoint's quantization it should be torch.float32",),
        ),
        (
            lambda tensors: tensors | {"model.norm.weight": torch.ones(65)},
            ("model.norm.weight is [65]; expected [64]",),
        ),
        (
            lambda tensors: tensors | {"model.layers.0.self_attn.k_proj.weight": torch.ones(64, 64)},
            ("k_proj.weight is [64, 64]; expected [32, 64]",),
        ),
    ],
)
def test_tensors_that_are_missing_or_wrong(tmp_path: Path, change: Any, words: tuple[str, ...]) -> None:
    directory = _copy(tmp_path)
    save_file(change(load_file(directory / "model.safetensors")), directory / "model.safetensors")
    _refused(directory, *words)


def _sharded(directory: Path) -> Path:
    reference("llama").save_pretrained(directory, max_shard_size="100KB")
    return directory / "model.safetensors.index.json"


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    _sharded(tmp_path)
    shard = sorted(tmp_path.glob("*.safetensors"))[1]
    shard.unlink()
    _refused(tmp_path, shard.name, "cannot be read")


@pytest.mark.parametrize(
    "content",
    [
        "{",
        "[]",
        "{}",
        '{"weight_map": 3}',
        "\udcff",
        "[" * 100_000,
        '{"weight_map": {"a": "../../etc/passwd"}}',
        '{"weight_map": {"a": "/dev/zero"}}',
        '{"weight_map": {"a": "../x.safetensors"}}',
        '{"weight_map": {"a": "/x.safetensors"}}',
        '{"weight_map": {"a": "x\\u0000.safetensors"}}',
    ],
    ids=lambda content: content[:50],
)
def test_a_broken_index_is_named(tmp_path: Path, content: str) -> None:
    index = _sharded(tmp_path)
    index.write_text(content, errors="surrogateescape")
    _refused(tmp_path, index.name)


def test_a_tensor_that_is_there_twice_does_not_stand_in_for_another(tmp_path: Path) -> None:
    """Two shards with the same part of a fused matrix, none with the next: that part would be random memory."""
    index = _sharded(tmp_path)
    shards = sorted(tmp_path.glob("*.safetensors"))
    where = json.loads(index.read_text())["weight_map"]
    query, key = (f"model.layers.0.self_attn.{kind}_proj.weight" for kind in "qk")
    twice = load_file(tmp_path / where[query])[query]
    for shard in shards:
        tensors = load_file(shard)
        if tensors.pop(key, None) is not None or shard == shards[-1]:
            save_file(tensors | {query: twice}, shard)
    _refused(tmp_path, "model.layers.0.self_attn.q_proj.weight is in more than one file")


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "linear"},
        {"rope_type": "llama3", "factor": 4.0},
        {"rope_type": "llama3", "factor": None},
        {"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 4.0, "high_freq_factor": 4.0},
        {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1.0},
        {"rope_type": "longrope", "short_factor": [1.0] * 8, "factor": 2.0},
        {"rope_type": "longrope", "short_factor": [1.0] * 8, "long_factor": [1.0] * 3},
    ],
    ids=str,
)
def test_rotary_parameters_that_are_missing_or_wrong(tmp_path: Path, rope: Json) -> None:
    def change(data: Json) -> Json:
        return data | {"rope_parameters": {"rope_theta": 1e4} | rope, "original_max_position_embeddings": 64}

    _refused(_rewrite(_copy(tmp_path), change), "config.json", rope["rope_type"])


def test_yarn_of_latent_attention_needs_its_factor() -> None:
    data = _read("deepseek3")
    data["rope_parameters"] = {"rope_theta": 1e4, "rope_type": "yarn", "mscale_all_dim": 1.0}
    with pytest.raises(DeploymentError, match="rope_type 'yarn' needs 'factor', which is not there"):
        read_model_config(data)


def test_a_gate_that_an_architecture_has_not_is_refused() -> None:
    with pytest.raises(DeploymentError, match="attn_output_gate is True; it is not supported"):
        read_model_config(_read("llama") | {"attn_output_gate": True})


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_missing_files_are_named(tmp_path: Path, name: str) -> None:
    directory = _copy(tmp_path)
    (directory / name).unlink()
    _refused(directory, name)
