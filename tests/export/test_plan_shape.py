"""Parameters, weights and KV cache, from ``config.json`` alone."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest
import torch

from inflight.engine.models.build import build_model
from inflight.engine.models.config import ModelConfig
from inflight.engine.models.decoder import DecoderModel
from inflight.engine.models.naming import CheckpointNames
from inflight.engine.models.reading import read_model_config
from inflight.errors import DeploymentError
from inflight.export.plan.gpus import find_gpu
from inflight.export.plan.memory import FREE_MEMORY_FRACTION, MemoryPlanner
from inflight.export.plan.precision import PRECISIONS
from inflight.export.plan.shape import Parallel, Shape, count_parameters, grouped, linears, split_excluded
from tests.engine.support.published import FAMILIES, config_of, is_served
from tests.export.support.planning import GIB, SHAPES, shape

MODELS = sorted(path.name for path in SHAPES.iterdir())


@pytest.mark.parametrize("name", MODELS)
def test_parameters_are_those_of_the_model_itself(name: str) -> None:
    config = shape(name)
    model = build_model(config, served_length=128)
    tensors = {key: tensor for key, tensor in model.named_parameters() if key.startswith(("model.", "lm_head"))}
    if config.tie_word_embeddings:
        del tensors["lm_head.weight"]
    assert count_parameters(config).total == sum(tensor.numel() for tensor in tensors.values())


@pytest.mark.proof
@pytest.mark.sweep(most=8)
@pytest.mark.parametrize("family", [family for family in FAMILIES if is_served(family)])
def test_parameters_of_published_models_are_those_of_the_model_itself(family: str) -> None:
    config = read_model_config(config_of(family))
    model = build_model(config, served_length=128)
    tensors = dict(model.named_parameters())
    if config.tie_word_embeddings:
        del tensors["lm_head.weight"]
    assert count_parameters(config).total == sum(tensor.numel() for tensor in tensors.values())
    assert {one.name for one in linears(config)} <= set(_checkpoint_linears(model))


def _checkpoint_linears(model: DecoderModel) -> Iterator[str]:
    """Yield the names of a model's linears in checkpoints, those of the parts of fused ones."""
    naming = CheckpointNames(model.config, ())
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear):
            above = name.rpartition(".")[0]
            parts = model.fused_rows.get(name, {})
            yield from (naming.of(f"{above}.{part}") for part in parts)
            yield naming.of(name)


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("llama-3.1-8b", 8.03),
        ("llama-3.1-70b", 70.55),
        ("llama-2-7b", 6.74),
        ("mistral-7b-v0.1", 7.24),
        ("qwen3-8b", 8.19),
        ("gemma-3-1b", 1.00),
        ("qwen3.6-27b", 26.90),  # without the images' part and the prediction of several tokens
    ],
)
def test_parameters_are_the_published_ones(name: str, billions: float) -> None:
    assert round(count_parameters(shape(name)).total / 1e9, 2) == billions


def test_parameters_by_kind_of_llama_8b() -> None:
    parameters = count_parameters(shape("llama-3.1-8b"))
    assert parameters.embedding == parameters.lm_head == 128_256 * 4096
    assert parameters.attention == 32 * (2 * 4096 * 4096 + 2 * 4096 * 1024)
    assert parameters.mlp == 32 * 3 * 4096 * 14_336
    assert parameters.norms == 65 * 4096
    assert count_parameters(shape("gemma-3-1b")).lm_head == 0


def _kv_bytes(name: str, length: int, number_bytes: int = 2, free_windows: bool = False) -> float:
    """Return what the planner counts for a sequence on one GPU."""
    model = Shape(shape(name), PRECISIONS["bf16"], "bf16", number_bytes, free_windows=free_windows)
    (stage,) = model.stages(Parallel())
    return stage.kv_bytes(length)


def test_a_hybrid_has_keys_and_values_in_its_layers_with_attention_and_a_state_in_the_others() -> None:
    model = Shape(shape("qwen3.6-27b"), PRECISIONS["bf16"], "bf16", 2)
    (stage,) = model.stages(Parallel())
    assert stage.kv_token_bytes == 64 * 2**10
    assert stage.state_bytes == 144 * 2**20 + 48 * 2 * 10_240 * 3
    assert stage.attended_bytes(1000) == 1000 * stage.kv_token_bytes + 2 * stage.state_bytes
    two, _ = model.stages(Parallel(tensor=4, pipeline=2))
    assert 8 * two.state_bytes == stage.state_bytes
    assert model.tensor_parallel_sizes(8) == [1, 2, 4]


def test_room_for_states_is_kept_beside_keys_and_values() -> None:
    """A sequence's own, and a snapshot for each."""
    model = Shape(shape("qwen3.6-27b"), PRECISIONS["bf16"], "bf16", 2)
    planner = MemoryPlanner(model, find_gpu("h200"), Parallel(), block_size=16)
    (stage,) = planner.stages
    alone, many = planner.layout(2048, None, 1), planner.layout(2048, None, 65)
    lost = (alone.kv_tokens - many.kv_tokens) * stage.kv_token_bytes
    assert abs(lost - 64 * 2 * stage.state_bytes) <= 16 * stage.kv_token_bytes
    assert planner.sequences(1024, 2048) == int(alone.kv_cache // (1024 * stage.kv_token_bytes + 2 * stage.state_bytes))


def test_a_stage_may_have_recurrent_layers_alone() -> None:
    model = Shape(shape("qwen3.6-27b"), PRECISIONS["bf16"], "bf16", 2)
    planner = MemoryPlanner(model, find_gpu("h200"), Parallel(pipeline=64), block_size=16)
    assert planner.layout(2048, None, 8).kv_tokens > 0
    assert planner.sequences(1024, 2048) > 8


def test_the_kv_cache_fits_beside_the_weights_of_every_stage() -> None:
    """The first of three stages has the embedding and 11 of the 32 layers, so it has room for the fewest tokens."""
    model = Shape(shape("llama-3.1-8b"), PRECISIONS["bf16"], "bf16", 2)
    planner = MemoryPlanner(model, find_gpu("h200"), Parallel(pipeline=3), block_size=16)
    assert len({one.kv_token_bytes for one in planner.stages}) > 1
    memory = planner.layout(2048, None, 8)
    left = memory.total - memory.activations - memory.runtime
    used = [memory.kv_tokens * one.kv_token_bytes / (left - one.weight_bytes) for one in planner.stages]
    assert max(used) == pytest.approx(FREE_MEMORY_FRACTION, rel=1e-3)


def test_kv_cache_of_known_models_at_4096_tokens() -> None:
    assert _kv_bytes("llama-3-8b", 4096) == 512 * 2**20
    assert _kv_bytes("llama-3.1-70b", 4096) == 1.25 * GIB  # grouped: 8 of 64 heads
    assert _kv_bytes("llama-2-7b", 4096) == 2 * GIB  # every head has its own
    assert _kv_bytes("llama-3-8b", 1, number_bytes=1) == 64 * 1024
    # Shared by GPUs and stages, it is the same in all.
    split = Shape(shape("llama-3.1-70b"), PRECISIONS["bf16"], "bf16", 2).stages(Parallel(tensor=4, pipeline=3))
    assert 4 * sum(stage.kv_bytes(4096) for stage in split) == 1.25 * GIB


def test_a_window_caps_the_kv_cache_of_an_engine_that_frees_it() -> None:
    assert _kv_bytes("mistral-7b-v0.1", 4096, free_windows=True) == 512 * 2**20
    assert _kv_bytes("mistral-7b-v0.1", 32_768, free_windows=True) == 512 * 2**20
    # 22 layers with windows of 512, 4 that see everything; one KV head of 256.
    assert _kv_bytes("gemma-3-1b", 8192, free_windows=True) == 2 * 256 * 2 * (22 * 512 + 4 * 8192)


def test_an_engine_that_frees_nothing_keeps_what_has_left_a_window() -> None:
    assert _kv_bytes("mistral-7b-v0.1", 32_768) == 4 * GIB
    assert _kv_bytes("gemma-3-1b", 8192) == 2 * 256 * 2 * 26 * 8192


def _weights(config: ModelConfig, precision: str, excluded: tuple[str, ...] = ()) -> int:
    stage = Shape(config, PRECISIONS[precision], "bf16", 2, excluded).stages(Parallel())[0]
    return stage.weight_bytes


def test_weights_of_llama_8b_by_precision() -> None:
    config = shape("llama-3.1-8b")
    quantized = 32 * (2 * 4096 * 4096 + 2 * 4096 * 1024 + 3 * 4096 * 14_336)
    rest = 2 * (2 * 128_256 * 4096 + 65 * 4096)
    inputs = 32 * (3 * 4096 + 4096 + 2 * 4096 + 14_336)
    assert _weights(config, "bf16") == 2 * quantized + rest == 16_060_522_496
    assert _weights(config, "fp8") == quantized + rest + 32 * 7 * 8
    assert _weights(config, "int4-awq") == quantized // 2 + quantized // 128 * 2 + 2 * inputs + rest
    assert _weights(config, "w4a8-awq") == _weights(config, "int4-awq") + 32 * 7 * 8
    assert _weights(config, "nvfp4") == quantized // 2 + quantized // 16 + 32 * 7 * 8 + rest
    assert _weights(config, "int8") == quantized + quantized // 64 * 2 + rest
    assert _weights(config, "float32") == 2 * _weights(config, "bf16")


def test_layers_that_are_left_out_stay_at_16_bits() -> None:
    config = shape("llama-3.1-8b")
    more = _weights(config, "fp8", ("*.down_proj",)) - _weights(config, "fp8")
    assert more == 32 * (4096 * 14_336 - 8)
    quantized, kept = split_excluded(config, ("model.layers.0.*", "*.o_proj"))
    assert (len(quantized), len(kept)) == (32 * 7 - 7 - 31, 7 + 31)
    with pytest.raises(
        DeploymentError, match=r"exclude '\*.experts' matches no linear layer; they are named like model"
    ):
        split_excluded(config, ("*.experts",))


def test_phi3_s_fused_layers_have_the_names_of_its_checkpoints() -> None:
    config = shape("llama-3.1-8b")
    phi = ModelConfig(**{**vars(config), "architecture": "Phi3ForCausalLM"})
    assert {one.name.rsplit(".", 1)[1] for one in linears(phi)} == {"qkv_proj", "o_proj", "gate_up_proj", "down_proj"}
    assert count_parameters(phi) == count_parameters(config)


def test_parallel_parts_add_up() -> None:
    shape_of = Shape(shape("llama-3.1-70b"), PRECISIONS["bf16"], "bf16", 2)
    whole = shape_of.stages(Parallel())[0]
    halves = shape_of.stages(Parallel(tensor=2))[0]
    norms = (2 * 80 + 1) * 8192 * 2
    assert 2 * halves.weight_bytes == whole.weight_bytes + norms  # norms are on every GPU
    stages = shape_of.stages(Parallel(pipeline=3))
    assert [len(stage.layers) for stage in stages] == [27, 27, 26]
    assert sum(stage.weight_bytes for stage in stages) == whole.weight_bytes
    assert [stage.head_bytes > 0 for stage in stages] == [False, False, True]


def test_tensor_parallelism_divides_heads_channels_and_groups() -> None:
    def sizes(name: str, precision: str) -> list[int]:
        return Shape(shape(name), PRECISIONS[precision], "bf16", 2).tensor_parallel_sizes(8)

    assert sizes("llama-3.1-8b", "bf16") == [1, 2, 4, 8]
    assert sizes("gemma-3-1b", "bf16") == [1]  # one KV head
    assert sizes("llama-2-7b", "bf16") == [1, 2, 4, 8]
    assert sizes("llama-2-7b", "int4-awq") == [1, 2]  # 11,008 / 4 channels are no whole groups of 128


def test_groups_divide_the_inputs_of_every_linear_that_is_quantized() -> None:
    config = shape("llama-3.1-8b")
    data = json.loads((SHAPES / "llama-3.1-8b/config.json").read_text()) | {
        "hidden_size": 576,
        "num_attention_heads": 9,
    }
    data |= {"num_key_value_heads": 3, "head_dim": 64}
    assert grouped(PRECISIONS["int4-awq"], config).group == 128
    assert grouped(PRECISIONS["fp8"], config).group == 0
    odd = read_model_config(data | {"intermediate_size": 1536})
    assert grouped(PRECISIONS["int4-awq"], odd).group == 64
    assert grouped(PRECISIONS["int8"], odd).group == 64
    assert grouped(PRECISIONS["nvfp4"], odd).group == 16
    odd = read_model_config(data | {"intermediate_size": 1544})
    with pytest.raises(
        DeploymentError, match=r"int4-awq: model\.layers\.0\.mlp\.down_proj has 1544 inputs, and groups"
    ):
        grouped(PRECISIONS["int4-awq"], odd)
    assert grouped(PRECISIONS["int4-awq"], odd, ("*.down_proj",)).group == 64
