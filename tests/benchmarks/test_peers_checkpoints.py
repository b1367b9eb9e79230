"""What the peers are given: the checkpoints and their tokenizer, and the GGUF file of a checkpoint."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer
from transformers import AutoConfig

from benchmarks.checkpoints import Experts, Shape
from benchmarks.peers import checkpoints
from benchmarks.peers.checkpoints import SHAPES, checkpoint, write_tokenizer
from benchmarks.peers.gpt_oss import gpt_oss_config, gpt_oss_sizes
from benchmarks.peers.workers.gguf_file import gguf_name, in_ggufs_order, stacked, stored, tensors
from benchmarks.peers.workers.gpt_oss_gguf import is_packed, packed_experts
from benchmarks.peers.workers.http_load import prompts
from benchmarks.random_weights import RandomShards
from benchmarks.transformers_peers import load_transformers
from inflight.text.tokenizer import Tokenizer as Ours

TINY = Shape("0.6M", 0.6e6, 32_000, 64, 128, 2, 2, 1)


@pytest.mark.parametrize("name", SHAPES)
def test_shapes_have_the_parameters_of_their_names(name: str) -> None:
    shape = SHAPES[name]
    if shape.experts and shape.experts.packed:  # a byte has two weights
        sizes = {name: size for name, size in gpt_oss_sizes(shape) if not name.endswith("_scales")}
        found = sum(math.prod(size) * (1 + name.endswith("_blocks")) for name, size in sizes.items())
    else:
        linears = RandomShards(shape, False, torch.device("meta"))._linears
        found = sum(rows * columns for rows, columns in linears.values()) + 2 * shape.vocab * shape.hidden
    assert found == pytest.approx(shape.parameters, rel=0.02)


def test_a_checkpoint_is_whole_in_several_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoints, "_SHARD_BYTES", 1 << 20)
    directory = checkpoint(TINY, tmp_path)
    assert len(list(directory.glob("*.safetensors"))) > 1
    model = load_transformers(directory, "cpu", torch.bfloat16)
    assert model.config.vocab_size == TINY.vocab
    written = dict(tensors(directory))
    for name, parameter in model.named_parameters():
        assert np.array_equal(written[name], parameter.detach().view(torch.uint16).numpy()), name
    tokenizer = Ours.from_checkpoint(directory)
    assert tokenizer.decode(tokenizer.encode_batch(["abc klm"])[0]) == "abc klm"


@pytest.mark.parametrize("vocab", [32_000, 128_256])
def test_every_id_is_text_and_a_word_of_the_prompts_is_one_token(vocab: int, tmp_path: Path) -> None:
    write_tokenizer(vocab, tmp_path)
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    assert tokenizer.get_vocab_size() == vocab
    [prompt] = prompts(1, 100, 3)
    encoded = tokenizer.encode(prompt)
    assert len(encoded.ids) == 100
    assert tokenizer.decode(encoded.ids) == prompt
    assert all(tokenizer.decode([number]).strip().isalpha() for number in range(300, vocab, 997))


@pytest.mark.proof
def test_a_vocabulary_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="a vocabulary of 2000000: only"):
        write_tokenizer(2_000_000, tmp_path)


def test_tensors_have_ggufs_names() -> None:
    assert gguf_name("model.embed_tokens.weight") == "token_embd.weight"
    assert gguf_name("model.layers.11.self_attn.k_proj.weight") == "blk.11.attn_k.weight"
    assert gguf_name("model.layers.0.post_attention_layernorm.weight") == "blk.0.ffn_norm.weight"


def test_the_experts_of_a_layer_are_one_tensor() -> None:
    given = {f"model.layers.3.mlp.experts.{number}.up_proj.weight": np.full((2, 4), number) for number in (1, 0, 10)}
    found = dict(stacked([("model.norm.weight", np.ones(4)), *given.items()]))  # type: ignore[list-item]
    assert found.keys() == {"model.norm.weight", "model.layers.3.mlp.experts.up_proj.weight"}
    assert gguf_name("model.layers.3.mlp.experts.up_proj.weight") == "blk.3.ffn_up_exps.weight"
    assert found["model.layers.3.mlp.experts.up_proj.weight"][:, 0, 0].tolist() == [0, 1, 10]


def test_rows_of_queries_and_keys_alternate_between_the_halves_of_a_head() -> None:
    rows = np.arange(8, dtype=np.uint16)[:, None]  # two heads of four rows
    assert in_ggufs_order("x.q_proj.weight", rows, 2, 1).ravel().tolist() == [0, 2, 1, 3, 4, 6, 5, 7]
    assert in_ggufs_order("x.k_proj.weight", rows, 2, 1).ravel().tolist() == [0, 4, 1, 5, 2, 6, 3, 7]
    assert in_ggufs_order("x.v_proj.weight", rows, 2, 1).ravel().tolist() == list(range(8))


def test_only_bfloat16_is_converted(tmp_path: Path) -> None:
    save_file({"a": torch.zeros(2, 2)}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"a is F32; only BF16 and U8 are converted"):
        list(tensors(tmp_path))


TINY_GPT_OSS = Shape("gpt-oss-tiny", 0.6e6, 4096, 64, 64, 2, 2, 1, Experts(4, 2, 64, packed=True))


def test_gpt_oss_is_what_transformers_reads_and_its_experts_stay_what_they_are_in_the_gguf_file(tmp_path: Path) -> None:
    directory = checkpoint(TINY_GPT_OSS, tmp_path)
    config = AutoConfig.from_pretrained(directory)
    assert (config.model_type, config.num_local_experts, config.layer_types[0]) == ("gpt_oss", 4, "sliding_attention")
    found = dict(stored(directory))
    ours = dict(packed_experts(found.items()))
    places, scales = (found[f"model.layers.1.mlp.experts.gate_up_proj_{kind}"] for kind in ("blocks", "scales"))
    weights = np.stack((places & 15, places >> 4), -1).reshape(4, 128, 64)
    for name, first in (("gate", 0), ("up", 1)):
        blocks = ours[f"blk.1.ffn_{name}_exps.weight"].reshape(4, 64, 2, 17)
        assert np.array_equal(blocks[..., 0], scales[:, first::2])
        halves = np.concatenate((blocks[..., 1:] & 15, blocks[..., 1:] >> 4), -1)
        assert np.array_equal(halves.reshape(4, 64, 64), weights[:, first::2])
    assert {name.partition(".ffn_")[2] for name in ours} == {
        f"{part}_exps.{kind}" for part in ("gate", "up", "down") for kind in ("weight", "bias")
    }
    assert not any(is_packed(name) for name, _ in tensors(directory))


def test_the_tensors_of_gpt_oss_have_ggufs_names() -> None:
    assert gguf_name("model.layers.0.self_attn.sinks", "gpt_oss") == "blk.0.attn_sinks.weight"
    assert gguf_name("model.layers.0.post_attention_layernorm.weight", "gpt_oss") == "blk.0.post_attention_norm.weight"
    assert gguf_name("model.layers.0.mlp.router.bias", "gpt_oss") == "blk.0.ffn_gate_inp.bias"
    assert gguf_name("model.layers.0.self_attn.q_proj.bias", "gpt_oss") == "blk.0.attn_q.bias"
    with pytest.raises(ValueError, match="TINY has no experts"):
        gpt_oss_config(replace(TINY, name="TINY"))
