"""Holds, for each fact that a checkpoint may say twice, the place that wins and the line that tells of the other."""

from __future__ import annotations

import copy
import json
import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from gguf import GGUFValueType, GGUFWriter
from safetensors.torch import load_file, save_file

from inflight.engine.checkpoint import LoadedModel, load_config, load_model, outline_model
from inflight.engine.models.reading import read_model_config
from inflight.engine.quant.readers.methods import load_quantization
from inflight.errors import DeploymentError
from inflight.precedence import FACTS
from inflight.resources import DEMO
from inflight.text.chat import chat_template_of
from inflight.text.tokenizer import Tokenizer
from tests.engine.support.checkpoints import SMALL, VOCAB, make_checkpoint
from tests.engine.support.gguf_files import add_tokens, write_gguf

Case = Callable[[Path], str]
"""Builds a checkpoint that contradicts itself, holds what wins, and returns what the log must name of the loser."""
TOOLS = [{"type": "function", "function": {"name": "get_weather", "parameters": {"type": "object", "properties": {}}}}]
PLAIN = "{% for m in messages %}{{ m.content }}{% endfor %}"
WITH_TOOLS = "{% for t in tools or [] %}{{ t.function.name }}{% endfor %}" + PLAIN


def _demo(directory: Path, **changes: dict[str, Any]) -> Path:
    """Return a copy of the demo's model with other values in its files of JSON, by their names without ``.json``."""
    model = directory / "model"
    shutil.copytree(DEMO / "model", model)
    for name, values in changes.items():
        file = model / f"{name}.json"
        held = json.loads(file.read_text()) if file.exists() else {}
        file.write_text(json.dumps({key: value for key, value in (held | values).items() if value != "absent"}))
    return model


def _load(model: Path) -> LoadedModel:
    outlined = outline_model(model, load_config(model), torch.float32, torch.device("cpu"), 512, "auto")
    return load_model(outlined, torch.device("cpu"))


def _config(**changes: Any) -> Any:
    """Return what is read of a config.json of Llama's."""
    return read_model_config(SMALL | {"architectures": ["LlamaForCausalLM"]} | changes)


def _head(directory: Path) -> str:
    model = _demo(directory, config={"tie_word_embeddings": True})
    tensors = load_file(model / "model.safetensors")
    moved = tensors["model.embed_tokens.weight"].roll(1, 0).contiguous()
    save_file(tensors | {"lm_head.weight": moved}, model / "model.safetensors", metadata={"format": "pt"})
    theirs = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    ours = _load(model).model
    assert torch.equal(ours.lm_head.weight, moved.float())
    assert torch.equal(ours.lm_head.weight, theirs.lm_head.weight)
    return "tie_word_embeddings"


def _names(directory: Path) -> str:
    shape = {**SMALL, "eos_token_id": 2, "num_hidden_layers": 2, "head_dim": 16}
    for name, kind in (("Qwen3ForCausalLM", "Qwen3"), ("Qwen3Model", "Qwen3"), ("MistralModel", "Mistral")):
        made = getattr(transformers, f"{kind}Model")(getattr(transformers, f"{kind}Config")(**shape))
        model = directory / name
        made.save_pretrained(model)
        config = json.loads((model / "config.json").read_text())
        headless = name != "Qwen3ForCausalLM"
        (model / "config.json").write_text(
            json.dumps(config | {"architectures": [name], "tie_word_embeddings": not headless})
        )
        loaded = _load(model)
        assert torch.equal(loaded.model.model.embed_tokens.weight, made.embed_tokens.weight)
        assert loaded.model.config.has_head is not headless
    (model / "config.json").write_text(json.dumps(config | {"architectures": ["MistralForCausalLM"]}))
    with pytest.raises(DeploymentError, match=r"no tensor for lm_head\.weight"):  # of a model that has a head
        _load(model)
    return ""


def _architecture(directory: Path) -> str:
    config = _config(model_type="mistral", sliding_window=8)
    assert (config.architecture, config.windows[0]) == ("MistralForCausalLM", 8)
    return "LlamaForCausalLM"


def _dtype(directory: Path) -> str:
    assert _config(dtype="float32", torch_dtype="bfloat16").dtype == "float32"
    return "bfloat16"


def _quantization(directory: Path) -> str:
    own = {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "FP8"}}
    foreign = {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}
    model = _demo(directory, config={"quantization_config": foreign}, hf_quant_config=own)
    found = load_quantization(model, frozenset())
    assert found is not None
    assert found.schemes != ("FP8",)
    return "quant_algo"


def _rope(directory: Path) -> str:
    config = _config(
        rope_scaling={"rope_type": "linear", "factor": 4.0}, rope_parameters={"rope_type": "linear", "factor": 2.0}
    )
    theirs = transformers.LlamaConfig(
        **SMALL,
        rope_scaling={"rope_type": "linear", "factor": 4.0},
        rope_parameters={"rope_type": "linear", "factor": 2.0},
    )
    assert config.layers[0].attention.rope["factor"] == theirs.rope_parameters["factor"] == 4.0
    return "2.0"


def _theta(directory: Path) -> str:
    given = {"rope_theta": 5e5, "rope_parameters": {"rope_type": "default", "rope_theta": 2e4}}
    theirs = transformers.LlamaConfig(**SMALL, **copy.deepcopy(given))
    assert _config(**given).layers[0].attention.rope["rope_theta"] == theirs.rope_parameters["rope_theta"] == 2e4
    return "500000.0"


def _rope_type(directory: Path) -> str:
    given = {"rope_parameters": {"rope_type": "linear", "type": "dynamic", "factor": 2.0}}
    theirs = transformers.LlamaConfig(**SMALL, **copy.deepcopy(given))
    assert _config(**given).layers[0].attention.rope["rope_type"] == theirs.rope_parameters["rope_type"] == "linear"
    return "dynamic"


def _length(directory: Path) -> str:
    given = {
        "original_max_position_embeddings": 64,
        "rope_parameters": {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 128},
    }
    theirs = transformers.LlamaConfig(**SMALL, **copy.deepcopy(given))
    theirs.standardize_rope_params()  # as each computation of frequencies does
    found = _config(**given).layers[0].attention.rope["original_max_position_embeddings"]
    assert found == theirs.rope_parameters["original_max_position_embeddings"] == 64
    return "128"


def _longest(directory: Path) -> str:
    model = _demo(directory, tokenizer_config={"model_max_length": 77})
    assert Tokenizer.from_checkpoint(model).config.max_length == 2048
    return "77"


def _ends(directory: Path) -> str:
    stale = _demo(directory, config={"eos_token_id": [0, 300]}, generation_config={"eos_token_id": 0})
    assert Tokenizer.from_checkpoint(stale).config.end_ids == {0, 2}  # 2 is the tokenizer's eos_token
    unsaid = _demo(directory / "unsaid", config={"eos_token_id": 0}, generation_config={"eos_token_id": None})
    for name in ("tokenizer_config", "special_tokens_map"):
        (unsaid / f"{name}.json").unlink(missing_ok=True)
    assert Tokenizer.from_checkpoint(unsaid).config.end_ids == {0, 2}  # by its name, <|im_end|>
    return "300"  # an ordinary token


def _padding(directory: Path) -> str:
    model = _demo(directory, config={"pad_token_id": 1}, generation_config={"pad_token_id": 3})
    assert Tokenizer.from_checkpoint(model).config.pad_id == 3
    return "1"


def _special(directory: Path) -> str:
    model = _demo(
        directory,
        tokenizer_config={"unk_token": "<|endoftext|>", "added_tokens_decoder": "absent"},
        special_tokens_map={"unk_token": "<|im_end|>"},
    )
    theirs = transformers.AutoTokenizer.from_pretrained(model)
    assert Tokenizer.from_checkpoint(model).config.special_tokens["unk_token"] == theirs.unk_token == "<|im_end|>"
    return "<|endoftext|>"


def _beginning(directory: Path) -> str:
    model = _demo(directory, tokenizer_config={"add_bos_token": True, "bos_token": "<|im_start|>"})
    theirs = transformers.AutoTokenizer.from_pretrained(model)
    ours = Tokenizer.from_checkpoint(model)
    assert ours.encode_batch(["a"], add_special_tokens=True)[0] == theirs("a")["input_ids"]
    return "add_bos_token"


def _template(directory: Path) -> str:
    named = [{"name": "default", "template": "the loser"}, {"name": "tool_use", "template": WITH_TOOLS}]
    model = _demo(directory, tokenizer_config={"chat_template": named})
    (model / "chat_template.jinja").write_text(PLAIN)
    ours = chat_template_of(Tokenizer.from_checkpoint(model).config)
    assert ours is not None
    chat = [{"role": "user", "content": "hi"}]
    assert ours.render(chat) == "hi"
    assert ours.render(chat, {"tools": TOOLS}) == "get_weatherhi"
    return "the loser"


def _sampling(directory: Path) -> str:
    model = _demo(directory, config={"top_p": 0.3}, generation_config={"do_sample": True, "top_k": 20})
    assert Tokenizer.from_checkpoint(model).config.sampling_defaults == {"temperature": 1.0, "top_k": 20}
    (model / "generation_config.json").unlink()
    assert Tokenizer.from_checkpoint(model).config.sampling_defaults == {"temperature": 1.0, "top_p": 0.3}
    return "0.3"


def _gguf(directory: Path, **metadata: Any) -> Path:
    """Return a GGUF file of a small Llama with further metadata, by their keys."""

    def add(writer: GGUFWriter, count: int) -> None:
        add_tokens(writer, count)
        for key, value in metadata.items():
            writer.add_key_value(key, value, GGUFValueType.get_type(value))

    return write_gguf(make_checkpoint("llama", "Llama", {}), directory, lambda _: "F32", add).path


def _gguf_tokenizer(directory: Path) -> str:
    model = _gguf(directory)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(DEMO / "model" / name, directory / name)
    assert Tokenizer.from_checkpoint(model).token_id("<|im_end|>") == 2
    return "tokenizer.ggml"


def _gguf_ends(directory: Path) -> str:
    numbers = {"tokenizer.ggml.eos_token_id": 4, "tokenizer.ggml.eot_token_id": 5, "tokenizer.ggml.eom_token_id": 6}
    assert Tokenizer.from_checkpoint(_gguf(directory, **numbers)).config.end_ids == {4, 5, 6}
    return ""


def _gguf_vocabulary(directory: Path) -> str:
    assert load_config(_gguf(directory, **{"llama.vocab_size": 7})).vocab_size == VOCAB
    return "7"


def _gguf_sampling(directory: Path) -> str:
    said = {"general.sampling.temp": 0.25, "general.sampling.top_k": 11, "general.sampling.penalty_repeat": 1.5}
    found = Tokenizer.from_checkpoint(_gguf(directory, **said)).config.sampling_defaults
    assert found == {"temperature": 0.25, "top_k": 11, "repetition_penalty": 1.5}
    return ""


CASES: dict[str, Case] = {
    "output head": _head,
    "names of tensors": _names,
    "architecture": _architecture,
    "type of the weights": _dtype,
    "quantization": _quantization,
    "rotary embedding": _rope,
    "base of the rotary embedding": _theta,
    "type of the rotary embedding": _rope_type,
    "length before scaling": _length,
    "longest sequence": _longest,
    "end ids": _ends,
    "padding": _padding,
    "special tokens": _special,
    "beginning and end of a text": _beginning,
    "chat template": _template,
    "sampling defaults": _sampling,
    "GGUF: tokenizer": _gguf_tokenizer,
    "GGUF: end ids": _gguf_ends,
    "GGUF: vocabulary": _gguf_vocabulary,
    "GGUF: sampling defaults": _gguf_sampling,
}


def test_each_fact_has_a_case() -> None:
    assert CASES.keys() == FACTS.keys()


@pytest.mark.parametrize("fact", FACTS)
def test_the_place_that_wins_is_taken_and_the_other_is_told(
    fact: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "inflight"):
        loser = CASES[fact](tmp_path)
    told = [record.message for record in caplog.records if record.message.startswith(f"{fact}: ")]
    assert bool(told) == bool(loser)
    if loser:
        assert any(loser in line for line in told), told


def test_places_that_agree_are_not_told(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "inflight"):
        Tokenizer.from_checkpoint(DEMO / "model")
        _load(DEMO / "model")
    assert [record.message for record in caplog.records if "docs/checkpoints.md" in record.message] == []
