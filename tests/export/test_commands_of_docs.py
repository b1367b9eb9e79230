"""The commands of README.md and docs/building.md that plan and build, word for word but for the checkpoint."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SHAPE = "tests/export/shapes/llama-3.1-8b"
RESULTS = ROOT / "docs/results/quantization"


def commands(page: str, containing: str) -> list[str]:
    blocks = re.findall(r"^```sh\n(.*?)^```", (ROOT / page).read_text(), re.MULTILINE | re.DOTALL)
    return [line for block in blocks for line in block.splitlines() if containing in line]


@pytest.mark.proof
def test_plan(tmp_path: Path) -> None:
    [command] = commands("README.md", "inflight plan")
    command = command.replace("path/to/checkpoint", SHAPE).replace("plan.html", str(tmp_path / "plan.html"))
    done = subprocess.run(command, shell=True, cwd=ROOT, capture_output=True, text=True, check=True)
    assert "NVIDIA H100" in done.stdout
    assert "<svg" in (tmp_path / "plan.html").read_text()


@pytest.mark.proof
def test_dry_run() -> None:
    [command] = [line for line in commands("README.md", "make engine") if "--dry-run" in line]
    command = command.replace("path/to/checkpoint", SHAPE)
    done = subprocess.run(command, shell=True, cwd=ROOT, capture_output=True, text=True, check=True)
    assert "NVIDIA H100" in done.stdout
    assert "weights and activations in FP8" in done.stdout


@pytest.mark.parametrize("name", ["demo-fp8", "demo-int4-awq"])
@pytest.mark.parametrize("page", ["docs/performance.md", "docs/building.md"])
def test_the_figures_are_those_of_the_committed_measurement(page: str, name: str) -> None:
    record = json.loads((RESULTS / f"{name}.json").read_text())
    row = next(line for line in (ROOT / page).read_text().splitlines() if f"results/quantization/{name}.html" in line)
    assert f"{record['bytes']['quantized'] / 1e6:.2f} MB" in row
    assert f"{record['quality']['perplexity'][1]:.4f}" in row
    assert f"{record['quality']['kl_divergence']:.1g}" in row
    assert f"{record['quality']['exact'][1]} of {record['quality']['asked']}" in row
    assert f"{record['quality']['recalled'][1]} of {record['quality']['recall_asked']}" in row
