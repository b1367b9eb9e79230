"""Dry runs for public models on GPUs that are not here: equal to the committed documents, and right by hand.

python -m tests.export.test_dry_run      writes the documents anew; look at what changed
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml
from typer import Typer
from typer.testing import CliRunner

from inflight.export.build.commands import build

ROOT = Path(__file__).parents[2]
GOLDEN = Path(__file__).parent / "golden"
DRY_RUNS = {
    "llama-3.1-8b-l4-fp8": "--model llama-3.1-8b --gpu l4 --precision fp8",
    "llama-3.1-8b-a100-80-int8": "--model llama-3.1-8b --gpu a100-80 --precision int8",
    "llama-3.1-8b-h100-fp8": "--model llama-3.1-8b --gpu h100 --precision fp8 --engine tensorrtllm",
    "llama-3.1-8b-b200-nvfp4": "--model llama-3.1-8b --gpu b200 --precision nvfp4",
    "llama-3.1-70b-4xh100-fp8": (
        "--model llama-3.1-70b --gpu h100 --gpus 4 --tensor-parallel 4 --precision fp8 --flow tensorrt --rate 2"
    ),
}
LAYERS_8B, LAYERS_70B = 32, 80
LINEARS_8B = LAYERS_8B * (2 * 4096 * 4096 + 2 * 4096 * 1024 + 3 * 4096 * 14336)
LINEARS_70B = LAYERS_70B * (2 * 8192 * 8192 + 2 * 8192 * 1024 + 3 * 8192 * 28672)
EMBEDDINGS_8B, EMBEDDINGS_70B = 2 * 128256 * 4096, 2 * 128256 * 8192
NORMS_8B, NORMS_70B = (2 * LAYERS_8B + 1) * 4096, (2 * LAYERS_70B + 1) * 8192


def dry_run(options: str, *more: str) -> str:
    """Return what the command prints; to be run in the repository's root."""
    app = Typer()
    app.command()(build)
    words = options.replace("--model ", "--model tests/export/shapes/").split()
    done = CliRunner().invoke(app, [*words, "--dry-run", "--output", "deployments/example", *more])
    assert done.exit_code == 0, done.output
    return done.stdout


@pytest.mark.parametrize("name", DRY_RUNS)
def test_dry_runs_are_the_committed_ones(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    assert dry_run(DRY_RUNS[name], "--verbose") == (GOLDEN / f"{name}.yaml").read_text(), (
        "python -m tests.export.test_dry_run"
    )


@pytest.mark.parametrize("name", DRY_RUNS)
def test_a_dry_run_is_a_screen_of_the_documents_figures(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    document = yaml.safe_load((GOLDEN / f"{name}.yaml").read_text())
    plan, screen = document["plan"], dry_run(DRY_RUNS[name])
    assert len(screen.splitlines()) < 24
    first, *_ = screen.splitlines()
    gpus = plan["tensor_parallel_size"] * plan["pipeline_parallel_size"]
    assert first == f"{document['build']['model']} for {gpus} x {document['build']['gpu']}"
    assert re.search(
        rf"^  KV cache +{plan['kv_cache']}, .* {plan['kv_cache_tokens']:,} tokens in ", screen, re.MULTILINE
    )
    for stage in ("quantize", "compile", "verify", "write"):
        assert re.search(rf"^  {stage} +\S", screen, re.MULTILINE)
    assert f"deployments/example, about {plan['weight_bytes'] / 1e9:.2f} GB\n" in screen
    assert "--verbose prints" in screen


@pytest.mark.parametrize(
    ("name", "weights", "kv_bytes_per_token", "gpus"),
    [
        # 1 byte per weight of a linear, two float32 scales for each of its 7 linears per layer; the rest in 2 bytes.
        ("llama-3.1-8b-l4-fp8", LINEARS_8B + 7 * LAYERS_8B * 8 + 2 * (EMBEDDINGS_8B + NORMS_8B), 2 * 8 * 128 * 32, 1),
        ("llama-3.1-8b-h100-fp8", LINEARS_8B + 7 * LAYERS_8B * 8 + 2 * (EMBEDDINGS_8B + NORMS_8B), 2 * 8 * 128 * 32, 1),
        # A 16-bit scale per 64 weights; KV in 2 bytes.
        (
            "llama-3.1-8b-a100-80-int8",
            LINEARS_8B + LINEARS_8B // 64 * 2 + 2 * (EMBEDDINGS_8B + NORMS_8B),
            2 * 2 * 8 * 128 * 32,
            1,
        ),
        # Half a byte per weight, an FP8 scale per 16 weights.
        (
            "llama-3.1-8b-b200-nvfp4",
            LINEARS_8B // 2 + LINEARS_8B // 16 + 7 * LAYERS_8B * 8 + 2 * (EMBEDDINGS_8B + NORMS_8B),
            2 * 8 * 128 * 32,
            1,
        ),
        ("llama-3.1-70b-4xh100-fp8", None, 2 * 8 * 128 * 80 // 4, 4),
    ],
)
def test_dry_runs_are_right_by_hand(name: str, weights: int | None, kv_bytes_per_token: int, gpus: int) -> None:
    document = yaml.safe_load((GOLDEN / f"{name}.yaml").read_text())
    plan = document["plan"]
    assert plan["memory"]["kv_bytes_per_token"] == kv_bytes_per_token
    assert plan["tensor_parallel_size"] * plan["pipeline_parallel_size"] == gpus
    if weights is not None:
        assert plan["weight_bytes"] == weights
    memory = plan["memory"]
    kinds = ("weights", "activations", "runtime", "kv_cache", "reserve", "free")
    assert sum(memory[kind] for kind in kinds) == memory["total"]
    # Nine tenths of what the weights and the runtime leave is for the cache, in whole blocks.
    left = memory["total"] - memory["weights"] - memory["activations"] - memory["runtime"]
    assert memory["kv_cache"] == pytest.approx(0.9 * left, rel=1e-6)
    assert plan["kv_cache_tokens"] == int(memory["kv_cache"] / kv_bytes_per_token / 16) * 16
    assert plan["fitting_sequences"] == int(memory["kv_cache"] / kv_bytes_per_token // 1280)


def test_70b_weights_are_right_by_hand() -> None:
    plan = yaml.safe_load((GOLDEN / "llama-3.1-70b-4xh100-fp8.yaml").read_text())["plan"]
    assert plan["parameters"]["total"] == LINEARS_70B + EMBEDDINGS_70B + NORMS_70B == 70_553_706_496
    # Linears and embeddings are divided by four; norms and scales are on every GPU.
    shared = LINEARS_70B + 2 * EMBEDDINGS_70B
    assert shared <= plan["weight_bytes"] <= shared + 4 * (2 * NORMS_70B + 7 * LAYERS_70B * 8)
    assert plan["memory"]["weights"] == pytest.approx(shared / 4, rel=1e-3)


def test_the_commands_have_the_plans_sizes() -> None:
    document = yaml.safe_load((GOLDEN / "llama-3.1-70b-4xh100-fp8.yaml").read_text())
    plan, (quantize, compile_) = document["plan"], document["compile"]["commands"]
    assert "--qformat fp8 --tp_size 4" in quantize["quantize to fp8"]
    line = compile_["compile the engine"]
    assert f"--max_batch_size {plan['max_batch_size']} --max_num_tokens {plan['max_tokens_per_step']}" in line
    llm = yaml.safe_load((GOLDEN / "llama-3.1-8b-b200-nvfp4.yaml").read_text())
    assert llm["compile"]["LLM"]["max_batch_size"] == llm["plan"]["max_batch_size"]


def test_beside_adapters_there_are_no_cuda_graphs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """TensorRT-LLM's PyTorch flow refuses both together."""
    monkeypatch.chdir(ROOT)
    (tmp_path / "adapter").mkdir()
    (tmp_path / "settings.yaml").write_text("tensorrt_llm: {lora: {a: adapter}}\n")
    options = f"{DRY_RUNS['llama-3.1-8b-b200-nvfp4']} --settings {tmp_path}/settings.yaml"
    document = yaml.safe_load(dry_run(options, "--verbose"))
    assert document["compile"]["LLM"]["cuda_graph_config"] is None
    assert "cuda_graph_batch_sizes" not in document["write"]["deployment.yaml"]["tensorrt_llm"]


if __name__ == "__main__":
    for name, options in DRY_RUNS.items():
        text = dry_run(options, "--verbose")
        (GOLDEN / f"{name}.yaml").write_text(text)
        print(f"{name}: {len(text.splitlines())} lines")
