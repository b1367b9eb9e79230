"""Models of transformers that nobody wrote code for here: what is served is what transformers generates, or refused."""

from __future__ import annotations

import importlib.metadata
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from inflight.engine.checkpoint import load_config
from inflight.engine.kvcache.memory_pool import KvPool
from inflight.engine.models.adapted.attention import read_options
from inflight.engine.models.adapted.check import check
from inflight.engine.models.adapted.known import require_sizes_read
from inflight.engine.models.adapted.model import AdaptedModel, read_adapted_config
from inflight.engine.models.limits import check_invariant
from inflight.engine.request import Output
from inflight.errors import DeploymentError
from tests.engine.support.adapted import COUNT, FACTS, all_types, judge, likeliest, small_checkpoint, small_reference
from tests.engine.support.checkpoints import PROMPTS, checkpoint, reference
from tests.engine.support.driving import ask, load, run

EVERY_TIME = [
    "gpt2", "opt", "gpt_neox", "phi", "stablelm", "starcoder2", "cohere2", "granite", "granitemoe", "nemotron",
    "exaone4", "seed_oss", "hunyuan_v1_moe", "ernie4_5_moe", "apertus", "minimax_m2", "deepseek_v2", "gemma3n_text",
]  # fmt: skip
"""Dense and with experts, with learned positions and without any, windows, latent attention, and layers that share."""
TYPES = all_types()
_LONGROPE = {
    "rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 32, "short_factor": [1.0] * 8,
    "long_factor": [4.0] * 8,
}  # fmt: skip


@pytest.mark.proof
@pytest.mark.sweep(most=6)
@pytest.mark.parametrize("kind", EVERY_TIME)
def test_what_transformers_generates(kind: str) -> None:
    assert judge(kind).served


@pytest.mark.proof
@pytest.mark.sweep(most=12)
@pytest.mark.parametrize("kind", [kind for kind in TYPES if kind not in EVERY_TIME])
def test_every_class_is_served_or_refused_as_the_facts_say(kind: str) -> None:
    fact = json.loads(FACTS.read_text())[TYPES[kind]]
    assert (fact["served"], fact["why"]) == judge(kind)


def test_the_facts_name_every_class_and_docs_name_those_served() -> None:
    facts = json.loads(FACTS.read_text())
    assert facts.pop("transformers") == importlib.metadata.version("transformers")
    assert {name: fact["type"] for name, fact in facts.items()} == {name: kind for kind, name in TYPES.items()}
    assert all(fact["served"] == (not fact["why"]) for fact in facts.values())
    served = [name for name, fact in facts.items() if fact["served"]]
    page = (Path(__file__).parents[2] / "docs" / "adapter.md").read_text()
    assert f"{len(served)} of {len(facts)} classes" in page
    assert [name for name in served if f"`{name}`" not in page] == []


def _outputs(directory: Path, prompts: list[list[int]], **settings: Any) -> list[Output]:
    requests = [ask(prompt, COUNT, generation_logits=True, ignore_eos=True) for prompt in prompts]
    outputs = run(load(directory, **settings), requests)
    return [outputs[request.key] for request in requests]


@pytest.mark.sweep
@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma3", "gpt-oss", "phi3, longrope"])
def test_our_own_code_generates_the_same(name: str) -> None:
    both = [
        _outputs(checkpoint(name), PROMPTS[:6], modeling=modeling, cpu_step="pytorch")
        for modeling in ("native", "transformers")
    ]
    for own, adapted in zip(*both, strict=True):
        assert own.tokens == adapted.tokens
        torch.testing.assert_close(_logits(adapted), _logits(own), atol=2e-3, rtol=1e-4)


def _logits(output: Output) -> Tensor:
    assert output.generation_logits is not None
    return torch.stack([torch.as_tensor(row) for row in output.generation_logits])


@pytest.mark.sweep(most=3)
@pytest.mark.parametrize("kind", ["gpt2", "stablelm", "deepseek_v2", "granitemoe", "qwen3_moe", "gpt_oss"])
def test_neighbours_change_no_bit(kind: str) -> None:
    """The first alone, and among others: the same products, whatever rows lie beside and whoever shares an expert."""
    (alone,) = _outputs(small_checkpoint(kind), PROMPTS[:1], modeling="transformers")
    among = _outputs(small_checkpoint(kind), PROMPTS[:9], modeling="transformers", prefix_reuse=False)
    assert torch.equal(_logits(alone), _logits(among[0]))


@pytest.mark.proof
@pytest.mark.sweep
@pytest.mark.parametrize("rope", [
    {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0},
    _LONGROPE,
], ids=lambda rope: rope["rope_type"])  # fmt: skip
def test_a_long_neighbour_does_not_change_the_frequencies_of_all(tmp_path: Path, rope: dict[str, Any]) -> None:
    """transformers takes them by the longest sequence of a step; here the longest that is served settles them."""
    shutil.copytree(checkpoint("llama"), tmp_path, dirs_exist_ok=True)
    _edit(tmp_path, rope_parameters=rope, max_position_embeddings=48)
    short, long = PROMPTS[0][:20], PROMPTS[-4][:36]
    (alone,) = _outputs(tmp_path, [short], modeling="transformers")
    among, _ = _outputs(tmp_path, [short, long], modeling="transformers")
    (own,) = _outputs(tmp_path, [short], modeling="native", cpu_step="pytorch")
    assert torch.equal(_logits(alone), _logits(among))
    torch.testing.assert_close(_logits(alone), _logits(own), atol=2e-3, rtol=1e-4)


@pytest.mark.proof
@pytest.mark.parametrize("name", ["gemma3, with images", "mistral, with images"])
def test_the_text_part_of_models_with_images(name: str) -> None:
    prompts = PROMPTS[:4]
    for prompt, output in zip(prompts, _outputs(checkpoint(name), prompts, modeling="transformers"), strict=True):
        assert output.tokens == likeliest(reference(name), prompt, output.tokens)[0]


@pytest.mark.parametrize("outside", ["dtype", "torch_dtype"])
def test_both_ways_of_reading_take_the_type_of_weights_from_the_same_place(outside: str, tmp_path: Path) -> None:
    """What stands outside wins over what a text part says."""
    shutil.copytree(checkpoint("gemma3, with images"), tmp_path, dirs_exist_ok=True)
    text = json.loads((tmp_path / "config.json").read_text())["text_config"]
    _edit(tmp_path, **{"dtype": None, "text_config": text | {"dtype": "float32"}, outside: "bfloat16"})
    assert {load_config(tmp_path, modeling).dtype for modeling in ("native", "transformers")} == {"bfloat16"}


@pytest.mark.proof
def test_bfloat16_and_a_cache_of_int8() -> None:
    request = ask(PROMPTS[2], COUNT)
    model = small_reference("stablelm")
    for settings in ({"dtype": "bfloat16"}, {"kv_cache_dtype": "int8"}):
        output = run(load(small_checkpoint("stablelm"), modeling="transformers", **settings), [request])[request.key]
        _, log_probs = likeliest(model, request.prompt, output.tokens)
        chosen = log_probs.gather(-1, torch.tensor(output.tokens)[:, None])
        assert (log_probs > chosen).sum(-1).max() < 5
        request = ask(PROMPTS[2], COUNT)


@pytest.mark.proof
def test_drafts_of_another_model_and_trees_of_guesses() -> None:
    from inflight.settings.speculation import SpeculationSettings

    plain = [output.tokens for output in _outputs(small_checkpoint("gpt_neox"), PROMPTS[:4], modeling="transformers")]
    drafting = SpeculationSettings(
        method="draft_target", draft_model=small_checkpoint("stablelm"), max_draft_tokens=3, candidates=2
    )
    requests = [ask(prompt, COUNT, ignore_eos=True) for prompt in PROMPTS[:4]]
    outputs = run(load(small_checkpoint("gpt_neox"), modeling="transformers", speculation=drafting), requests)
    assert [outputs[request.key].tokens for request in requests] == plain


@pytest.mark.proof
def test_the_log_says_whose_code_computes(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    load(small_checkpoint("phi"))
    assert "transformers' code computes PhiForCausalLM: Inflight has none of its own for it" in caplog.text
    assert "PyTorch computes the steps: transformers' code computes the model" in caplog.text
    caplog.clear()
    load(checkpoint("llama"), modeling="transformers")
    assert "transformers' code computes LlamaForCausalLM: engine.modeling is transformers" in caplog.text


def _edit(directory: Path, **fields: Any) -> None:
    file = directory / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))


@pytest.mark.sweep
@pytest.mark.parametrize(("kind", "fields", "said"), [
    ("phi", {"model_type": "own", "auto_map": {"AutoModel": "own.M"}}, "auto_map asks for code of the checkpoint"),
    ("phi", {"quantization_config": {"quant_method": "awq"}}, "quantization_config .'awq'. is not supported"),
    ("phi", {"quantization_config": "awq"}, "quantization_config .'awq'. is not supported"),
    ("phi", {"model_type": ["phi"]}, "neither Inflight nor transformers has code for the model_type"),
    ("phi", {"architectures": ["PhiForTokenClassification"]}, "PhiForTokenClassification is no causal language model"),
    ("phi", {"model_type": "phy"}, "neither Inflight nor transformers has code for the model_type 'phy'"),
    ("phi", {"hidden_size": "wide"}, "transformers cannot read it"),
    ("phi", {"num_hidden_layers": 10**9}, "num_hidden_layers is 1000000000; 1000 is the largest"),
    ("phi", {"num_key_value_heads": 10**9}, "num_key_value_heads is 1000000000; 1048576 is the largest"),
    ("xglm", {"num_layers": 10**9}, "num_layers is 1000000000; 1000 is the largest"),
    ("xglm", {"attention_heads": 10**9}, "attention_heads is 1000000000; 1048576 is the largest"),
    ("gemma4_text", {"per_layer_config": {"1": {"head_dim": 2**21}}}, "head_dim is 2097152; 1048576 is the largest"),
    ("trocr", {"decoder_layers": 10**9}, "decoder_layers is 1000000000; 1000 is the largest"),
    ("phi", {"max_position_embeddings": 2**24 + 1}, "is 16777217; 16777216 is the largest"),
    ("phi", {"transformers_weights": "other.safetensors"}, "transformers_weights is 'other.safetensors'; it is not"),
    ("phi", {"text_config": {"hidden_size": 64}}, "a model_type 'phi' has no text part, but the file has one"),
    ("phi", {"text_config": {}}, "a model_type 'phi' has no text part, but the file has one"),
    ("phi", {"generator": {"a": 1}}, "a model_type 'phi' has no text part, but the file has one"),
    ("phi", {"text_config": 5}, "config.json: "),
    ("phi", {"text_config": ["a"]}, "config.json: "),
    ("phi", {"text_config": {}, "decoder": {"a": 1}}, "transformers cannot read it"),
    ("mistral", {"sliding_window": 0}, "a token does not see itself"),
    ("llama", {"rope_parameters": _LONGROPE | {"long_factor": [1.0] * 3}}, "rope_type 'longrope' cannot be computed"),
    ("llama", {"rope_parameters": _LONGROPE | {"long_factor": "x" * 8}}, "rope_type 'longrope' cannot be computed"),
    ("llama", {"rope_parameters": _LONGROPE | {"long_factor": [1.0, "x"] * 4}}, "'longrope' cannot be computed"),
    ("phi", {"max_position_embeddings": 0}, "max_position_embeddings of its config.json is 0"),
    ("phi", {"is_encoder_decoder": True}, "is_encoder_decoder is true"),
    ("phi", {"num_hidden_layers": 4}, r"no tensor for model.layers.3"),
    ("phi", {"num_hidden_layers": 2}, "tensor model.layers.2.* has no place in this architecture"),
    ("phi", {"intermediate_size": 80}, r"tensor model.layers.0.mlp.fc1.bias is .96.; expected .80."),
    ("phi", {"intermediate_size": 10**8}, r"its files hold [\d,]+ numbers; config.json asks for 38,\d{3},\d{3},\d{3}"),
    ("qwen3", {"layer_types": ["full_attention", "chunked_attention", "full_attention"]}, "has 'chunked_attention'"),
])  # fmt: skip
def test_what_the_configuration_asks_for_is_refused_by_name(
    kind: str, fields: dict[str, Any], said: str, tmp_path: Path
) -> None:
    shutil.copytree(small_checkpoint(kind), tmp_path, dirs_exist_ok=True)
    _edit(tmp_path, **fields)
    with pytest.raises(DeploymentError, match=said) as refused:
        load(tmp_path, modeling="transformers")
    assert "\n" not in str(refused.value)


def test_a_size_by_a_name_that_only_its_class_knows_is_found_when_it_was_read() -> None:
    class Odd(transformers.PreTrainedConfig):
        attribute_map: ClassVar = {"num_hidden_layers": "storeys"}

    with pytest.raises(DeploymentError, match="num_hidden_layers is 1001; 1000 is the largest"):
        require_sizes_read(Odd(storeys=1001))


@pytest.mark.sweep
@pytest.mark.parametrize(("kind", "said"), [
    ("bloom", "max_position_embeddings of its config.json is None"),
    ("falcon", "it has attention of its own"),
    ("rwkv", "0 of 3 layers attend by transformers' attention interface"),
    ("mamba", "layer_types has 'linear_attention'|is a Conv1d"),
    ("lfm2", "layer_types has 'conv'"),
    ("deepseek_v32", "layer_types has 'indexed_attention'"),
    ("diffllama", "attends more than once"),
    ("bart", "is_encoder_decoder is true"),
    ("roberta", "hidden states differ from those of transformers' code alone"),
    ("jetmoe", "a dry run of it fails: NotImplementedError"),
])  # fmt: skip
def test_a_model_that_does_not_fit_is_refused_by_name(kind: str, said: str) -> None:
    with pytest.raises(DeploymentError, match=said):
        load(small_checkpoint(kind), modeling="transformers")


@pytest.mark.parametrize(("given", "said"), [
    ({"position_bias": torch.ones(1)}, "gives attention the argument 'position_bias'"),
    ({"indices": torch.ones(1)}, "gives attention the argument 'indices'"),
    ({"is_causal": False}, "attends to later tokens too"),
    ({"scaling": torch.ones(1)}, "scales the scores by a tensor"),
    ({"s_aux": torch.ones(3)}, "has sinks of .3. for 2 heads"),
])  # fmt: skip
def test_what_attention_is_asked_for_and_does_not_know_is_refused(given: dict[str, Any], said: str) -> None:
    with pytest.raises(DeploymentError, match=f"layer: .*{said}|layer {said}"):
        read_options("layer", torch.ones(1, 2, 5, 4), given)
    assert read_options("layer", torch.ones(1, 2, 5, 4), {"position_bias": None, "dropout": 0.0}).scale == 0.5


def _mixing(_: nn.Module, x: Tensor) -> Tensor:
    return x + 0.1 * x.mean(-2, keepdim=True)


def _counting(_: nn.Module, x: Tensor) -> Tensor:
    return x + torch.arange(x.shape[-2], device=x.device)[:, None]


def _failing(_: nn.Module, x: Tensor) -> Tensor:
    if x.is_meta:
        return x
    raise KeyError("a table")


@pytest.mark.parametrize(("forward", "said"), [
    (_mixing, "hidden states differ from those of transformers' code alone by "),
    (_counting, "it counts the positions of tokens itself"),
    (_failing, "transformers' code fails here: KeyError"),
])  # fmt: skip
def test_code_that_mixes_tokens_or_fails_is_found_at_the_start(
    forward: Callable[..., Tensor], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers.models.arcee.modeling_arcee import ArceeMLP

    directory = small_checkpoint("arcee")
    monkeypatch.setattr(ArceeMLP, "forward", forward)
    with pytest.raises(DeploymentError, match=said):
        load(directory, modeling="transformers")


@pytest.mark.proof
def test_a_tensor_too_few_or_too_many(tmp_path: Path) -> None:
    shutil.copytree(small_checkpoint("arcee"), tmp_path, dirs_exist_ok=True)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    taken = tensors.pop("model.norm.weight")
    save_file(tensors, file, {"format": "pt"})
    with pytest.raises(DeploymentError, match="checkpoint: no tensor for model.norm.weight"):
        load(tmp_path, modeling="transformers")
    save_file(tensors | {"model.norm.weight": taken, "model.norm.bias": taken.clone()}, file, {"format": "pt"})
    with pytest.raises(DeploymentError, match="checkpoint: tensor model.norm.bias has no place"):
        load(tmp_path, modeling="transformers")
    save_file(tensors | {"model.norm.weight": taken.int()}, file, {"format": "pt"})
    with pytest.raises(DeploymentError, match="checkpoint: tensor model.norm.weight is I32; a float is expected"):
        load(tmp_path, modeling="transformers")


def test_the_files_that_are_counted_are_those_that_are_loaded(tmp_path: Path) -> None:
    shutil.copytree(small_checkpoint("arcee"), tmp_path, dirs_exist_ok=True)
    (tmp_path / "another.safetensors").write_bytes(b"no weights of this model")
    load(tmp_path, modeling="transformers")
    file = tmp_path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-9])
    with pytest.raises(DeploymentError, match=r"model\.safetensors: cannot be read") as refused:
        load(tmp_path, modeling="transformers")
    assert "\n" not in str(refused.value)


def test_without_transformers_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    real = importlib.metadata.version
    directory = small_checkpoint("arcee")

    def missing(name: str) -> str:
        if name == "transformers":
            raise importlib.metadata.PackageNotFoundError(name)
        return real(name)

    monkeypatch.setattr(importlib.metadata, "version", missing)
    with pytest.raises(DeploymentError, match="ArceeForCausalLM needs transformers 5.23, .* the extra `adapter`"):
        load(directory)
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "4.57.1" if name == "transformers" else real(name))
    with pytest.raises(DeploymentError, match="transformers is of version 4.57.1"):
        load(directory)


def test_our_code_alone_does_not_know_it() -> None:
    with pytest.raises(DeploymentError, match="architecture ArceeForCausalLM is not supported"):
        load(small_checkpoint("arcee"), modeling="native")


def test_what_only_our_own_code_has_is_refused_by_name() -> None:
    with pytest.raises(DeploymentError, match="engine.weights is int8: transformers' code computes the model"):
        load(small_checkpoint("arcee"), weights="int8")
    with pytest.raises(DeploymentError, match="engine.batch_invariant is not supported on a GPU where transformers'"):
        check_invariant(read_adapted_config(small_checkpoint("arcee"), _data("arcee")))


def _data(kind: str) -> dict[str, Any]:
    data: dict[str, Any] = json.loads((small_checkpoint(kind) / "config.json").read_text())
    return data


def test_the_check_at_the_start_leaves_the_model_as_it_was() -> None:
    model = AdaptedModel(small_checkpoint("arcee"), _data("arcee"), torch.float32, 64)
    model.load(torch.device("cpu"))
    check(model, lambda blocks, size: KvPool(model.config, blocks, size, torch.float32, torch.device("cpu")))
    assert {module.config._attn_implementation for module in model.modules() if hasattr(module, "config")
            and hasattr(module.config, "_attn_implementation")} == {"inflight"}  # fmt: skip
