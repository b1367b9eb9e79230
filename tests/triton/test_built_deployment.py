"""The demo checkpoint, quantized by `make engine`, verified, and served through the ensemble."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from inflight.client import Client, GenerateOptions
from inflight.manifest import read_manifest
from inflight.resources import DEMO
from tests.triton.support.servers import Running, run

ROOT = Path(__file__).parents[2]
QUESTIONS = (
    "What is in-flight batching?",
    "What is a paged KV cache?",
    "What is chunked prefill?",
    "What is an ensemble?",
    "What does the tokenizer stage do?",
)
SMALL = "--held-out-rows 40 --recall-prompts 2 --max-length 384"
CALIBRATION_ROWS = {"fp8": 48, "int4-awq": 8}
"""For fp8 the ranges of the demo's inputs need as many; int4-awq takes a second for each."""

pytestmark = pytest.mark.proof


def answers(server: Running) -> list[str]:
    """Ask the questions, streamed, as chats."""
    options = GenerateOptions(max_tokens=160)
    with Client(server.grpc) as client:
        return [client.generate([{"role": "user", "content": text}], options).text for text in QUESTIONS]


@pytest.fixture(scope="module", params=["fp8", pytest.param("int4-awq", marks=pytest.mark.release)])
def deployment(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What ``make engine`` builds from the demo checkpoint."""
    directory = tmp_path_factory.mktemp(request.param)
    arguments = (
        f"--settings {DEMO / 'deployment.yaml'} --output {directory / 'out'} --work {directory / 'work'} {SMALL} "
        f"--calibration-rows {CALIBRATION_ROWS[request.param]} "
        "--calibration build/data/calibration.jsonl --held-out build/data/held_out.jsonl"
    )
    command = ["make", "engine", "GPU=cpu", f"PRECISION={request.param}", f"ARGS={arguments}"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    again = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert "nothing to do: every stage was done before" in again.stderr
    return directory / "out"


@pytest.fixture(scope="module")
def built(deployment: Path) -> Iterator[Running]:
    yield from run(deployment)


@pytest.fixture(scope="module")
def original() -> list[str]:
    """The answers of the demo deployment as it is."""
    running = run()
    texts = answers(next(running))
    running.close()
    return texts


def test_a_built_deployment_answers_like_the_original(built: Running, original: list[str]) -> None:
    same = [mine == theirs for mine, theirs in zip(answers(built), original, strict=True)]
    assert sum(same) >= len(QUESTIONS) - 1


def test_built_deployment_is_smaller_and_has_measured_quality(deployment: Path) -> None:
    manifest, record = read_manifest(deployment), json.loads((deployment / "quality.json").read_text())
    assert record["bytes"]["quantized"] < 0.65 * record["bytes"]["original"]
    assert manifest.quality["max_kl_divergence"] == record["quality"]["kl_divergence"] < 0.01
    assert abs(manifest.quality["max_perplexity_increase"]) < 0.02
    assert manifest.quality["min_exact_match"] >= 0.9
    fp8 = manifest.precision == "fp8"
    quantization = json.loads((deployment / "model/hf_quant_config.json").read_text())["quantization"]
    assert quantization["quant_algo"] == ("FP8" if fp8 else "W4A16_AWQ")
    assert quantization["kv_cache_quant_algo"] == ("FP8" if fp8 else None)


def test_log_names_the_built_deployment(built: Running, deployment: Path) -> None:
    fp8 = read_manifest(deployment).precision == "fp8"
    assert ("FP8" if fp8 else "W4A16_AWQ") in built.log
