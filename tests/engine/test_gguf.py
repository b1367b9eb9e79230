"""GGUF files, written by the package of their makers, give the tokens of transformers on the decoded weights."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest
import torch

from inflight.engine.checkpoint import load_config, load_model, outline_model
from inflight.engine.quant.convert import decoding_cost
from inflight.engine.quant.gguf_blocks import FORMATS, decode
from inflight.engine.scoring import Scorer
from inflight.errors import DeploymentError
from inflight.gguf.types import QUANTIZED
from tests.engine.support.checkpoints import PROMPTS, TOKENS
from tests.engine.support.driving import ask, load, run
from tests.engine.support.gguf_files import NAMES, GgufFile, draw_blocks, gguf_file, wide_gguf_file
from tests.engine.support.native import CPU, SETS

COUNT = 12
steps = pytest.mark.parametrize("cpu_step", ["pytorch", *SETS[:1]])
"""PyTorch, and one set of kernels: ``test_native_gguf`` has the others."""
MIXED = (("v_proj", "Q6_K"), ("down_proj", "Q6_K"), ("embed_tokens", "Q6_K"), ("lm_head", "Q6_K"))
"""What llama.cpp stores otherwise in a file that it calls Q4_K_M."""


def _check(file: GgufFile, **settings: object) -> None:
    requests = [ask(prompt, COUNT) for prompt in PROMPTS[:8]]
    outputs = run(load(file.path, num_blocks=512, **settings), requests)
    made = [(request.prompt, outputs[request.key].tokens) for request in requests]
    assert [tokens for _, tokens in made] == file.likeliest(made)


@pytest.mark.sweep(most=4)
@steps
@pytest.mark.parametrize("name", NAMES)
def test_architectures(name: str, cpu_step: str) -> None:
    _check(gguf_file(name), cpu_step=cpu_step)


@steps
def test_experts_in_mxfp4(cpu_step: str) -> None:
    """As gpt-oss is published."""
    _check(gguf_file("gpt-oss", "F32", ((".experts.", "MXFP4"),)), cpu_step=cpu_step)


@pytest.mark.sweep(most=2)
@steps
@pytest.mark.parametrize("kind", ["F32", "Q8_0", "Q4_K"])
def test_experts(kind: str, cpu_step: str) -> None:
    _check(wide_gguf_file(kind, experts=True), cpu_step=cpu_step)


@pytest.mark.sweep(most=8)
@steps
@pytest.mark.parametrize("kind", ["F16", "BF16", *FORMATS])
def test_types(kind: str, cpu_step: str) -> None:
    _check(wide_gguf_file(kind), cpu_step=cpu_step)


@pytest.mark.parametrize("kind", FORMATS)
def test_logits_are_those_of_the_decoded_weights(kind: str) -> None:
    file = wide_gguf_file(kind)
    made, expected = (Scorer(path, "float32", device="cpu").logits(TOKENS) for path in (file.path, file.plain))
    assert torch.equal(made, expected)


@steps
@pytest.mark.parametrize("tied", [False, True])
def test_types_are_mixed(tied: bool, cpu_step: str) -> None:
    _check(wide_gguf_file("Q4_K", MIXED, tied), cpu_step=cpu_step)


@pytest.mark.parametrize("kind", FORMATS)
def test_blocks_are_decoded_as_the_package_decodes_them(kind: str) -> None:
    """Bit for bit, of any bytes: NaN and infinity too."""
    type = gguf.GGMLQuantizationType[kind]
    any_bytes = np.random.default_rng(1).integers(0, 256, (40, 3 * gguf.GGML_QUANT_SIZES[type][1]), dtype=np.uint8)
    for blocks in (any_bytes, draw_blocks(kind, 9, 768)):
        with np.errstate(all="ignore"):
            expected = torch.from_numpy(gguf.quants.dequantize(blocks, type))
        made = decode(torch.from_numpy(blocks), kind)
        assert torch.equal(made.isnan(), expected.isnan())
        assert torch.equal(made.nan_to_num(0.0).view(torch.int32), expected.nan_to_num(0.0).view(torch.int32))


def test_each_type_that_is_served_is_decoded() -> None:
    assert set(FORMATS) == set(QUANTIZED)


def test_weights_stay_in_blocks_in_memory() -> None:
    path = wide_gguf_file("Q4_K").path
    outline = outline_model(path, load_config(path), torch.float32, CPU, 64, "auto")
    model = load_model(outline, CPU).model
    assert outline.scheme == "Q4_K"
    layer = model.model.layers[0].self_attn.o_proj
    assert (layer.weight.dtype, layer.weight.nbytes) == (torch.uint8, 256 * 144)
    rows, linears = 2 * (5 * 256 + 2 * 128) + 320, 2 * 7 + 1
    assert decoding_cost(model, torch.float32) == (linears, rows * (256 * 4 - 144))


def test_the_checkpoints_type_is_that_of_most_weights() -> None:
    types = {"F32": "float32", "F16": "float16", "BF16": "bfloat16", "Q8_0": "float16"}
    assert {kind: load_config(wide_gguf_file(kind).path).dtype for kind in types} == types


def _with(path: Path, tensor: str, kind: str) -> Path:
    """Write a Llama that has one more tensor."""
    writer = gguf.GGUFWriter(path, "llama")
    for add, value in (
        (writer.add_context_length, 64), (writer.add_embedding_length, 256), (writer.add_block_count, 1),
        (writer.add_feed_forward_length, 256), (writer.add_head_count, 4), (writer.add_layer_norm_rms_eps, 1e-5),
    ):  # fmt: skip
        add(value)
    writer.add_tensor("token_embd.weight", np.zeros((7, 256), np.float32))
    type = gguf.GGMLQuantizationType[kind]
    blocks = np.zeros((256, gguf.GGML_QUANT_SIZES[type][1]), np.uint8)
    writer.add_tensor(tensor, blocks if kind != "F32" else np.zeros(256, np.float32), raw_dtype=type)
    for step in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file, writer.close):
        step()
    return path


@pytest.mark.parametrize(
    ("tensor", "kind", "message"),
    [
        (
            "blk.0.attn_q.weight",
            "IQ2_XXS",
            r"tensor 'blk\.0\.attn_q\.weight' is in IQ2_XXS; supported: F32, ",
        ),
        ("blk.0.attn_sinks.weight", "F32", "tensor blk.0.attn_sinks.weight has no place in this architecture"),
        ("blk.0.attn_k.weight", "Q4_K", r"no tensor for .*input_layernorm"),
    ],
)
def test_what_the_engine_refuses(tmp_path: Path, tensor: str, kind: str, message: str) -> None:
    path = _with(tmp_path / "m.gguf", tensor, kind)
    with pytest.raises(DeploymentError, match=message) as error:
        load(path)
    assert "\n" not in str(error.value)
    assert str(error.value).count(str(path)) == 1
