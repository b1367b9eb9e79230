"""What a build writes means the same to transformers 4.57, on which TensorRT-LLM 1.2 stands, and to ours."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from inflight.engine.checkpoint import load_config
from inflight.engine.models.limits import unknown_to_quantization
from inflight.export.data import Example
from inflight.export.quantize.config_file import has_older_rope, with_older_rope, write_config
from inflight.export.quantize.modelopt import QuantizedModel, Recipe
from tests.engine.support.checkpoints import ARCHITECTURES, checkpoint
from tests.export.support.older_transformers import read, start
from tests.export.support.read_checkpoints import Found
from tests.support.progress import silent

THETA = 500_000.0
SCALING = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
_CUSTOM: dict[str, tuple[str, dict[str, Any]]] = {
    "llama 3.1": ("llama", {"rope_theta": THETA, **SCALING}),
    "qwen3": ("qwen3", {"rope_type": "default", "rope_theta": 1e6}),
    "mistral": ("mistral", {"rope_type": "default", "rope_theta": 1e6}),
    "gemma3": (
        "gemma3, tied, linear",
        {
            "full_attention": {"rope_type": "linear", "rope_theta": 2e6, "factor": 8.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 2e4},
        },
    ),
}
"""Models whose rotary embedding is not the default: that of the tests' models is, in many."""


def pairs(directory: Path) -> dict[str, tuple[Path, Path]]:
    """Return checkpoints as transformers 5 writes them, and beside each the same as a build writes it."""
    built = [name for name in ARCHITECTURES if not unknown_to_quantization(load_config(checkpoint(name)))]
    sources: dict[str, tuple[Path, dict[str, Any]]] = {name: (checkpoint(name), {}) for name in built}
    sources |= {f"{n} custom": (checkpoint(base), {"rope_parameters": r}) for n, (base, r) in _CUSTOM.items()}
    made = {}
    for name, (source, changes) in sources.items():
        before, after = directory / name / "before", directory / name / "after"
        for target in (before, after):
            shutil.copytree(source, target)
            config = json.loads((target / "config.json").read_text()) | changes
            (target / "config.json").write_text(json.dumps(config))
        write_config(before, after)
        made[name] = (before, after)
    return made


def llama_31(directory: Path, older_form: bool) -> Path:
    """Write a small Llama with the rotary embedding of Llama 3.1, by transformers 5 or as Meta published it."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(5)
    config = LlamaConfig(
        vocab_size=320,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=512,
        initializer_range=0.15,
        rope_parameters={"rope_theta": THETA, **SCALING},
    )
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(directory)
    path = directory / "config.json"
    data = json.loads(path.read_text()) | {"a key of its own": [1, 2]}
    if older_form:
        del data["rope_parameters"]
        data |= {"rope_theta": THETA, "rope_scaling": SCALING}
    path.write_text(json.dumps(data))
    return directory


def decode(quantized: Path) -> None:
    """Write the weights of an FP8 checkpoint as they count, beside it."""
    stored = load_file(quantized / "model.safetensors")
    scales = {name: tensor for name, tensor in stored.items() if name.endswith("_scale")}
    weights = {}
    for name, tensor in stored.items():
        if name not in scales:
            scale = scales.get(f"{name}_scale")
            weights[name] = tensor.float() if scale is None else tensor.float() * scale.float()
    save_file(weights, quantized / "decoded.safetensors")


def quantized(original: Path) -> Path:
    """Quantize a checkpoint to FP8, as a build does."""
    example = Example((), tuple(range(1, 65)), chat=False)
    target = original.with_name(f"{original.name}-fp8")
    QuantizedModel(original, Recipe("fp8", fp8_kv_cache=True), [example], "cpu", silent).save(target)
    decode(target)
    return target


@dataclass(frozen=True)
class Read:
    """Checkpoints, and what both lines of transformers make of them."""

    pairs: dict[str, tuple[Path, Path]]
    llamas: dict[Path, Path]
    """Originals in the older form and in the newer, and what became of them."""
    ours: Found
    theirs: Found

    def same(self, one: Path, other: Path) -> bool:
        """Whether the older line says to ``one`` what ours says to ``other``, bit by bit."""
        return torch.equal(self.theirs[str(one)]["logits"], self.ours[str(other)]["logits"])  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> Read:
    """Make and read all of them at once: a program that loads PyTorch is started once, and does so meanwhile."""
    directory = tmp_path_factory.mktemp("both")
    output = directory / "read.pt"
    with start(output) as program:
        originals = [llama_31(directory / name, name == "older") for name in ("older", "newer")]
        llamas = {original: quantized(original) for original in originals}
        made = pairs(directory)
        every = [*(one for pair in made.values() for one in pair), *llamas, *llamas.values()]
        return Read(made, llamas, *read(program, every, output))


@pytest.mark.release
def test_every_architecture(both: Read) -> None:
    changed = set()
    for name, (before, after) in both.pairs.items():
        assert torch.equal(both.ours[str(after)]["logits"], both.ours[str(before)]["logits"]), name  # type: ignore[arg-type]
        assert both.same(after, before), f"{name}: {both.theirs[str(after)]}"
        if not both.same(before, before):
            changed.add(name)
    assert changed >= {"llama 3.1", "phi3, longrope", "llama 3.1 custom", "qwen3 custom", "gemma3 custom"}


@pytest.mark.release
def test_a_quantized_llama_3_1(both: Read) -> None:
    """Theta of 500,000 and llama3's scaling survive the export, and so do all other keys of the original."""
    expected = next(iter(both.llamas.values()))
    for original, made in both.llamas.items():
        before, after = (json.loads((one / "config.json").read_text()) for one in (original, made))
        assert after.pop("quantization_config")["quant_algo"] == "FP8"
        assert after == with_older_rope(before)
        assert has_older_rope(after)
        assert before["a key of its own"] == after["a key of its own"]
        assert both.theirs[str(made)]["rope_theta"] == str(THETA)
        assert both.same(made, expected)
        assert both.same(made, made)


@pytest.mark.release
def test_without_the_older_form_the_older_line_computes_something_else(both: Read) -> None:
    """What the export of ModelOpt leaves by itself: the reason for all of this, and the proof that the tests see it."""
    _, newer = both.llamas
    assert both.theirs[str(newer)]["rope_theta"] == "10000.0"
    assert both.theirs[str(newer)]["rope_scaling"] == "None"
    logits = [torch.as_tensor(found[str(newer)]["logits"]) for found in (both.ours, both.theirs)]
    assert (logits[0] - logits[1]).abs().max() > 1


def test_a_base_beside_a_scaling_in_the_newer_form_alone_is_not_enough() -> None:
    config = {"model_type": "llama", "rope_theta": THETA, "rope_parameters": {"rope_theta": THETA, **SCALING}}
    assert not has_older_rope(config)
    written = with_older_rope(config)
    assert written == config | {"rope_scaling": SCALING}
    assert has_older_rope(written)


@pytest.mark.parametrize("kind", ["llama", "phi3"])
def test_what_the_older_form_has_no_words_for_is_left(kind: str) -> None:
    """Nobody takes it for read: ``has_older_rope`` says no."""
    ropes = {"full_attention": {"rope_theta": 1e6}, "sliding_attention": {"rope_theta": 1e4}}
    config = {"model_type": kind, "rope_parameters": ropes}
    assert with_older_rope(config) == config
    assert not has_older_rope(config)
