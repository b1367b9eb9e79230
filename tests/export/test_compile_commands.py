"""The commands that compile an engine: the right tool, the recorded flags, and refusals by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from inflight.errors import DeploymentError
from inflight.export.compile.steps import PRECISIONS, choose_flow, compile_steps
from inflight.settings.speculation import SpeculationSettings, draft_length
from tests.export.support.compiling import request, write_checkpoint

FACTS = json.loads((Path(__file__).parents[1] / "facts/build_tools.json").read_text())
TABLE = {flag["flag"][2:]: flag for kind in ("flags", "plugin_flags") for flag in FACTS["trtllm_build"][kind]}


def drafts(method: str, heads: Path | None = None, **settings: Any) -> SpeculationSettings:
    given = settings if heads is None else settings | {"draft_model": heads}
    return SpeculationSettings.model_validate({"method": method} | given)


def words_of(argv: tuple[str, ...]) -> dict[str, str]:
    """Return a command line's flags with their (first) values."""
    pairs = zip(argv, (*argv[1:], "--"), strict=True)
    return {word[2:]: "" if value.startswith("--") else value for word, value in pairs if word.startswith("--")}


def test_a_plain_checkpoint_is_converted_and_built(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "hf")
    convert, build = compile_steps(request(tmp_path, tensor_parallel_size=2, pipeline_parallel_size=2))
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
    ("precision", "qformat"),
    [
        ("fp8", "fp8"),
        ("int8", "int8_wo"),
        ("int4-awq", "int4_awq"),
        ("w4a8-awq", "w4a8_awq"),
        ("nvfp4", "nvfp4"),
    ],
)
def test_a_precision_is_quantized_by_upstreams_script(tmp_path: Path, precision: str, qformat: str) -> None:
    write_checkpoint(tmp_path / "hf")
    quantize, build = compile_steps(request(tmp_path, precision=precision, kv_dtype="fp8"))
    flags = words_of(quantize.argv)
    assert (flags["qformat"], flags["kv_cache_dtype"], flags["calib_dataset"]) == (qformat, "fp8", f"{tmp_path}/data")
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
        for name, value in words_of(build.argv).items():
            assert name in TABLE
            if isinstance(allowed := TABLE[name].get("choices"), list):
                assert value in allowed, name


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


def test_length_of_lookahead_drafts() -> None:
    """The example of TensorRT-LLM's documentation: a window, n-grams and candidates of 7 each need 83."""
    sizes = {"window_size": 7, "max_ngram_size": 7, "verification_set_size": 7}
    assert draft_length(drafts("lookahead", **sizes)) == 83


@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_precision_goes_to_the_first_of_its_flows(precision: str) -> None:
    assert choose_flow(precision) == ("tensorrt" if precision == "int8" else "pytorch")


def test_a_flow_is_refused_by_name() -> None:
    with pytest.raises(DeploymentError, match="int8 is not served by the pytorch flow; use the tensorrt flow"):
        choose_flow("int8", "pytorch")


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"speculation": drafts("ngram")}, "ngram needs the PyTorch flow"),
        ({"speculation": drafts("eagle", Path("e")), "pipeline_parallel_size": 2}, "excludes pipeline parallelism"),
        ({"speculation": drafts("eagle", Path("e")), "precision": "fp8"}, "bf16 or fp16 throughout"),
        (
            {"speculation": drafts("medusa", Path("m"), max_draft_tokens=9)},
            "Medusa heads it must be 4 at most, or 63",
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
    write_checkpoint(tmp_path / "hf", "Qwen3ForCausalLM")
    with pytest.raises(DeploymentError, match="no FP8 KV cache"):
        compile_steps(request(tmp_path, kv_dtype="fp8"))
    with pytest.raises(DeploymentError, match="medusa is for Llama, not Qwen3ForCausalLM"):
        compile_steps(request(tmp_path, speculation=drafts("medusa", tmp_path)))
    write_checkpoint(tmp_path / "hf", "Gemma3ForCausalLM")
    assert "full_prec" in compile_steps(request(tmp_path))[0].argv
