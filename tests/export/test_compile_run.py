"""Compiling with stand-ins of upstream's tools: what they write, and how their faults are told."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from inflight.errors import DeploymentError
from inflight.export.compile.run import Command, run_commands
from inflight.export.compile.steps import compile_steps
from inflight.settings.speculation import SpeculationSettings
from tests.export.support.compiling import install_tools, request, write_checkpoint
from tests.fakes.upstream_tool import FAULT, SM


@pytest.fixture
def workshop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory with the tools, calibration data, a checkpoint and drafts' heads."""
    install_tools(tmp_path, monkeypatch)
    write_checkpoint(tmp_path / "hf")
    write_checkpoint(tmp_path / "heads")
    return tmp_path


def drafts(workshop: Path, method: str, **settings: Any) -> SpeculationSettings:
    heads = {} if method == "lookahead" else {"draft_model": workshop / "heads"}
    return SpeculationSettings.model_validate({"method": method} | heads | settings)


def compiled(workshop: Path, **settings: Any) -> dict[str, Any]:
    """Compile, and return the engine's configuration."""
    said: list[str] = []
    run_commands(compile_steps(request(workshop, **settings)), workshop / "logs", said.append)
    assert any(re.fullmatch(r"2/2 compile the engine: .*rank 0", line) for line in said)
    return json.loads((workshop / "engine/config.json").read_text())


def test_an_engine_of_four_ranks(workshop: Path) -> None:
    config = compiled(workshop, tensor_parallel_size=2, pipeline_parallel_size=2)
    assert config["version"] == "1.2.1"
    assert config["pretrained_config"]["mapping"] == {"world_size": 4, "tp_size": 2, "pp_size": 2}
    assert config["build_config"]["plugin_config"]["reduce_fusion"] == "enable"
    assert {path.name for path in (workshop / "engine").iterdir()} == {
        "config.json",
        *(f"rank{rank}.engine" for rank in range(4)),
    }
    first = (workshop / "logs/1-convert_checkpoint.log").read_text().splitlines()[0]
    assert first.startswith("python3 ")
    assert (workshop / "logs/2-trtllm-build.log").is_file()


def test_quantized_with_our_own_data(workshop: Path) -> None:
    settings = {"precision": "fp8", "kv_dtype": "fp8"}
    config = compiled(workshop, **settings)["pretrained_config"]
    assert config["quantization"] == {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8"}


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("method", "settings", "architecture"),
    [
        ("eagle", {"max_draft_tokens": 63}, "EagleForCausalLM"),
        ("eagle", {"max_draft_tokens": 2}, "EagleForCausalLM"),
        ("medusa", {"max_draft_tokens": 4}, "MedusaForCausalLM"),
        ("lookahead", {}, "LlamaForCausalLM"),
    ],
)
def test_engines_with_drafts(workshop: Path, method: str, settings: dict[str, int], architecture: str) -> None:
    config = compiled(workshop, speculation=drafts(workshop, method, **settings))
    assert config["pretrained_config"]["architecture"] == architecture
    assert config["build_config"]["max_draft_len"] > 0


def test_on_blackwell(workshop: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SM, "100")
    config = compiled(workshop, precision="nvfp4")
    assert config["build_config"]["plugin_config"]["gemm_plugin"] == "nvfp4"


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        ("midway", "RuntimeError: CUDA error: an illegal memory access was encountered"),
        ("disk-full", "No space left on device"),
        ("missing-rank", r"rank1.safetensors was not written"),
        ("killed", "ended by SIGKILL, most likely for want of memory"),
        ("silent", "rank 0"),
    ],
)
def test_a_fault_is_one_line(workshop: Path, monkeypatch: pytest.MonkeyPatch, fault: str, reason: str) -> None:
    steps = compile_steps(request(workshop, tensor_parallel_size=2))
    run_commands(steps, workshop / "logs", lambda line: None)
    monkeypatch.setenv(FAULT, fault)
    with pytest.raises(DeploymentError, match=rf"could not convert the checkpoint: .*{reason}") as caught:
        run_commands(steps, workshop / "logs", lambda line: None)  # the first run's files must not pass for its own
    assert "\n" not in str(caught.value)
    log = re.search(r"its log is (\S+)$", str(caught.value))
    assert log
    assert Path(log[1]).is_file()


def test_what_the_tools_refuse_is_told(workshop: Path) -> None:
    steps = [Command("build", ("trtllm-build", "--max_batch", "3"), ())]
    with pytest.raises(DeploymentError, match="trtllm-build: error: unrecognized arguments: --max_batch 3"):
        run_commands(steps, workshop / "logs", lambda line: None)


def test_missing_tools_are_named_before_anything_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_checkpoint(tmp_path / "hf")
    steps = compile_steps(request(tmp_path))
    with pytest.raises(DeploymentError, match=r"convert_checkpoint.py is not here.*26.07-trtllm-python-py3 has it"):
        run_commands(steps, tmp_path / "logs", lambda line: None)
    install_tools(tmp_path, monkeypatch)
    monkeypatch.setenv("PATH", str(Path(sys.executable).parent))
    with pytest.raises(DeploymentError, match=r"trtllm-build is not here, to compile the engine"):
        run_commands(steps, tmp_path / "logs", lambda line: None)
    assert not (tmp_path / "logs").exists()


@pytest.mark.parametrize("place", ["{}/tools/", "tools/", ""])
def test_nothing_leads_a_tool_to_our_packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str) -> None:
    """Whether it is named by its path, by one from here, or found on the PATH."""
    tool = tmp_path / "tools/show"
    tool.parent.mkdir()
    tool.write_text('#!/bin/sh\necho "$PYTHONPATH,$PYTHONHOME,$VIRTUAL_ENV,$PATH"\n')
    tool.chmod(0o755)
    path = f"/usr/bin:/bin:{tool.parent}"
    ours = {"PYTHONPATH": "packages", "PYTHONHOME": "home", "VIRTUAL_ENV": ".venv", "PATH": path}
    for name, value in ours.items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(tmp_path)
    said: list[str] = []
    run_commands([Command("show", (f"{place.format(tmp_path)}show",), ())], tmp_path / "logs", said.append)
    assert said == [f"1/1 show: ,,,{tool.parent}:{path}" if place else f"1/1 show: ,,,{path}"]


def test_an_interrupt_takes_the_tool_along(tmp_path: Path) -> None:
    """Ctrl-C in the caller: the tool, which has a session of its own, must not run on."""
    program = (
        # A job in the background of a shell has SIGINT ignored, and its children with it.
        "import signal; signal.signal(signal.SIGINT, signal.default_int_handler); "
        "from inflight.export.compile.run import Command, run_commands; from pathlib import Path; "
        "run_commands([Command('wait', ('sh', '-c', 'echo $$; exec sleep 60'), ())], "
        f"Path({str(tmp_path)!r}), lambda line: print(line, flush=True))"
    )
    caller = subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    assert caller.stdout is not None
    tool = int(caller.stdout.readline().split()[-1])
    caller.send_signal(signal.SIGINT)
    caller.wait(60)
    deadline = time.monotonic() + 30
    while Path(f"/proc/{tool}").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    with pytest.raises(ProcessLookupError):
        os.kill(tool, 0)
