"""The commands that compile an engine: the right tool, the recorded flags, and refusals by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, get_args

import pytest

from inflight.errors import DeploymentError
from inflight.export.compile.flags import BuildFlags, make_flags
from inflight.export.compile.flows import PRECISIONS
from inflight.export.compile.steps import compile_steps
from inflight.speculation import SpeculationSettings, draft_length
from tests.export.compiling import ADA, AMPERE, BLACKWELL, HOPPER, request, write_checkpoint

FACTS = json.loads((Path(__file__).parents[1] / "facts/build_tools.json").read_text())
TABLE = {flag["flag"][2:]: flag for kind in ("flags", "plugin_flags") for flag in FACTS["trtllm_build"][kind]}


def drafts(method: str, heads: Path | None = None, **settings: Any) -> SpeculationSettings:
    given = settings if heads is None else settings | {"draft_model": heads}
    return SpeculationSettings.model_validate({"method": method} | given)


def words_of(argv: tuple[str, ...]) -> dict[str, str]:
    """Return a command line's flags with their (first) values."""
    pairs = zip(argv, (*argv[1:], "--"), strict=True)
    return {word[2:]: "" if value.startswith("--") else value for word, value in pairs if word.startswith("--")}


def choices(name: str) -> set[str]:
    """Return the texts that a field of BuildFlags takes, from its type."""

    def texts(kind: Any) -> set[str]:
        found = {one for one in get_args(kind) if isinstance(one, str)}
        return (
            found.union(*(texts(one) for one in get_args(kind) if not isinstance(one, str)))
            if found or get_args(kind)
            else set()
        )

    return texts(BuildFlags.model_fields[name].annotation)


@pytest.mark.parametrize("name", BuildFlags.model_fields)
def test_every_flag_is_upstreams(name: str) -> None:
    recorded = TABLE[name]
    if isinstance(recorded.get("choices"), list):
        assert choices(name) == set(recorded["choices"])
    kind = str(BuildFlags.model_fields[name].annotation)
    words = {"int": "int", "flag": "bool", "path": "Path", "paths+": "tuple", "list": "tuple"}
    assert words.get(recorded["type"], "Literal") in kind


def test_flags_that_are_left_out_are_so_for_a_reason() -> None:
    reasons = {
        "model_config": "an engine without weights",
        "build_config": "replaces the flags",
        "model_cls_file": "code of a model",
        "model_cls_name": "code of a model",
        "max_input_len": "ignored with padding removal and context FMHA",
        "max_encoder_input_len": "encoders",
        "paged_kv_cache": "deprecated",
        "gather_generation_logits": "deprecated",
        "gather_all_token_logits": "both of the above",
        "visualize_network": "debugging",
        "dry_run": "builds nothing",
        "streamingllm": "refused by the tool",
    }
    assert set(TABLE) - set(BuildFlags.model_fields) == set(reasons)


def test_a_plain_checkpoint_is_converted_and_built(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "hf")
    convert, build = compile_steps(request(tmp_path, tensor_parallel_size=2, pipeline_parallel_size=2, workers=4))
    assert convert.argv[:2] == ("python3", str(tmp_path / "examples/models/core/llama/convert_checkpoint.py"))
    flags = words_of(convert.argv)
    assert (flags["dtype"], flags["tp_size"], flags["pp_size"]) == ("bfloat16", "2", "2")
    assert [path.name for path in convert.produces] == ["config.json", *(f"rank{r}.safetensors" for r in range(4))]
    flags = words_of(build.argv)
    assert build.argv[0] == "trtllm-build"
    assert flags["checkpoint_dir"] == words_of(convert.argv)["output_dir"]
    assert (flags["max_batch_size"], flags["max_num_tokens"], flags["max_seq_len"]) == ("16", "1024", "512")
    assert flags["reduce_fusion"] == "enable"
    assert (flags["gemm_plugin"], flags["use_fp8_context_fmha"]) == ("auto", "disable")
    assert flags["kv_cache_type"] == "paged"
    assert flags["use_paged_context_fmha"] == flags["multiple_profiles"] == flags["remove_input_padding"] == "enable"
    assert [path.name for path in build.produces] == ["config.json", *(f"rank{r}.engine" for r in range(4))]


@pytest.mark.parametrize(
    ("precision", "qformat", "chip"),
    [
        ("fp8", "fp8", ADA),
        ("int8", "int8_sq", AMPERE),
        ("int4-awq", "int4_awq", AMPERE),
        ("w4a8-awq", "w4a8_awq", HOPPER),
        ("nvfp4", "nvfp4", BLACKWELL),
    ],
)
def test_a_precision_is_quantized_by_upstreams_script(
    tmp_path: Path, precision: str, qformat: str, chip: tuple[int, int]
) -> None:
    write_checkpoint(tmp_path / "hf")
    data = tmp_path / "data/train.jsonl"
    wanted = request(tmp_path, precision=precision, compute_capability=chip, kv_dtype="fp8", calibration=data)
    quantize, build = compile_steps(wanted)
    flags = words_of(quantize.argv)
    assert (flags["qformat"], flags["kv_cache_dtype"], flags["calib_dataset"]) == (qformat, "fp8", str(data.parent))
    assert quantize.environment["HF_HUB_OFFLINE"] == "1"
    flags = words_of(build.argv)
    assert flags["use_fp8_context_fmha"] == "enable"
    assert flags["gemm_plugin"] == (precision if precision in ("fp8", "nvfp4") else "auto")
    assert flags["reduce_fusion"] == "disable", "one GPU has nothing to reduce"


def test_flags_of_every_command_are_in_the_recorded_tables(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "hf")
    eagle = drafts("eagle", tmp_path / "eagle", max_draft_tokens=63)
    medusa = drafts("medusa", tmp_path / "medusa")
    requests = [
        request(tmp_path, kv_dtype="fp8"),
        request(tmp_path, speculation=eagle),
        request(tmp_path, speculation=medusa, precision="fp8", kv_dtype="fp8", tensor_parallel_size=2),
        request(tmp_path, speculation=drafts("lookahead")),
        request(tmp_path, speculation=drafts("draft_target", tmp_path / "small")),
    ]
    tables = {
        "llama": FACTS["convert_checkpoint_llama"]["flags"],
        "eagle": FACTS["convert_checkpoint_eagle"]["flags"],
        "quantization": FACTS["quantize_py"]["flags"],
    }
    for one in requests:
        convert, build = compile_steps(one)
        known = {flag["flag"][2:] for flag in tables[Path(convert.argv[1]).parent.name]}
        assert set(words_of(convert.argv)) <= known
        assert set(words_of(build.argv)) <= set(TABLE)


def test_drafts_set_mode_and_length(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "hf")
    eagle = drafts("eagle", tmp_path / "eagle", max_draft_tokens=63)
    convert, build = compile_steps(request(tmp_path, speculation=eagle, tensor_parallel_size=2))
    flags = words_of(convert.argv)
    assert (flags["max_draft_len"], flags["num_eagle_layers"], flags["max_non_leaves_per_layer"]) == ("63", "4", "10")
    flags = words_of(build.argv)
    assert (flags["speculative_decoding_mode"], flags["max_draft_len"]) == ("eagle", "63")
    assert flags["reduce_fusion"] == "disable", "EAGLE's network is not Llama's"
    medusa = drafts("medusa", tmp_path / "medusa", max_draft_tokens=3)
    convert, build = compile_steps(request(tmp_path, speculation=medusa))
    flags = words_of(convert.argv)
    assert (flags["qformat"], flags["num_medusa_heads"], flags["max_draft_len"]) == ("full_prec", "4", "3")
    _, build = compile_steps(request(tmp_path, speculation=drafts("draft_target", tmp_path, max_draft_tokens=5)))
    assert words_of(build.argv)["speculative_decoding_mode"] == "draft_tokens_external"


def test_length_of_lookahead_drafts() -> None:
    """The example of TensorRT-LLM's documentation: a window, n-grams and candidates of 7 each need 83."""
    sizes = {"window_size": 7, "max_ngram_size": 7, "verification_set_size": 7}
    assert draft_length(drafts("lookahead", **sizes)) == 83


def test_the_pytorch_flow_compiles_nothing(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "hf", quantization_config={"quant_method": "modelopt"})
    assert compile_steps(request(tmp_path, precision="fp8", flow=None)) == []


@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_precision_goes_to_the_first_of_its_flows(tmp_path: Path, precision: str) -> None:
    flow = request(tmp_path, precision=precision, flow=None, compute_capability=BLACKWELL).flow
    assert flow == ("tensorrt" if precision == "int8" else "pytorch")


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"precision": "fp9"}, "precision 'fp9' is not one of TensorRT-LLM's: bf16, fp16, fp8.*did you mean 'fp8'"),
        ({"precision": "int8", "flow": "pytorch"}, "int8 is not served by the pytorch flow; use the tensorrt flow"),
        ({"precision": "fp8", "compute_capability": AMPERE}, "fp8 needs compute capability 8.9 or newer.*has 8.0"),
        ({"precision": "nvfp4"}, "nvfp4 needs compute capability 10.0 or newer.*has 9.0"),
        ({"speculation": drafts("ngram")}, "ngram needs the PyTorch flow"),
        ({"speculation": drafts("eagle", Path("e")), "pipeline_parallel_size": 2}, "excludes pipeline parallelism"),
        ({"speculation": drafts("eagle", Path("e")), "precision": "fp8"}, "bf16 or fp16 throughout"),
        (
            {"speculation": drafts("medusa", Path("m"), max_draft_tokens=9)},
            "Medusa heads it must be 4 at most, or 63",
        ),
        ({"build_flags": {"gemm_plugins": "fp8"}}, "no flag --gemm_plugins.*did you mean 'gemm_plugin'"),
        ({"build_flags": {"gemm_plugin": "fp9"}}, "--gemm_plugin is 'fp9'"),
        ({"build_flags": {"max_batch_size": "many"}}, "--max_batch_size is 'many'"),
        ({"build_flags": {"opt_num_tokens": "64"}}, "opt_num_tokens needs multiple_profiles disable"),
        ({"build_flags": {"user_buffer": "enable"}}, "user_buffer needs reduce_fusion"),
        ({"build_flags": {"reduce_fusion": "enable"}}, "reduce_fusion needs tensor parallelism"),
        ({"build_flags": {"norm_quant_fusion": "enable"}}, "norm_quant_fusion needs Llama in nvfp4"),
        ({"build_flags": {"pp_reduce_scatter": "enable"}}, "Mixtral only"),
        (
            {"build_flags": {"low_latency_gemm_plugin": "fp8"}, "compute_capability": BLACKWELL},
            "low_latency_gemm_plugin does not exist on SM100",
        ),
        (
            {"build_flags": {"gather_context_logits": "true"}, "speculation": drafts("lookahead")},
            "gather_context_logits excludes",
        ),
    ],
    ids=lambda value: str(value)[:60],
)
def test_refused_by_name(tmp_path: Path, settings: dict[str, Any], reason: str) -> None:
    write_checkpoint(tmp_path / "hf")
    with pytest.raises(DeploymentError, match=reason) as caught:
        compile_steps(request(tmp_path, **settings))
    assert "\n" not in str(caught.value)


def test_checkpoints_that_no_engine_is_compiled_from(tmp_path: Path) -> None:
    with pytest.raises(DeploymentError, match="config.json: missing"):
        compile_steps(request(tmp_path))
    write_checkpoint(tmp_path / "hf", quantization_config={"quant_method": "modelopt"})
    with pytest.raises(DeploymentError, match="compiled from the plain checkpoint"):
        compile_steps(request(tmp_path))
    write_checkpoint(tmp_path / "hf", "Qwen3ForCausalLM")
    with pytest.raises(DeploymentError, match="no FP8 KV cache"):
        compile_steps(request(tmp_path, kv_dtype="fp8"))
    with pytest.raises(DeploymentError, match="medusa is for Llama, not Qwen3ForCausalLM"):
        compile_steps(request(tmp_path, speculation=drafts("medusa", tmp_path)))
    write_checkpoint(tmp_path / "hf", "Gemma3ForCausalLM")
    assert "full_prec" in compile_steps(request(tmp_path))[0].argv


def test_flags_take_the_place_of_what_follows(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "hf")
    replaced = {"gemm_plugin": "disable", "multiple_profiles": "disable", "opt_num_tokens": "64", "fast_build": "true"}
    flags = words_of(compile_steps(request(tmp_path, build_flags=replaced))[1].argv)
    assert (flags["gemm_plugin"], flags["opt_num_tokens"], flags["fast_build"]) == ("disable", "64", "")
    assert make_flags(
        {"checkpoint_dir": "a", "output_dir": "b", "max_batch_size": 1, "max_num_tokens": 1, "max_seq_len": 2}
    ).arguments()[:4] == ["--checkpoint_dir", "a", "--output_dir", "b"]
