"""An engine is served as it was built: build's commands, the engine that they leave, and how it is served."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from inflight.compiled_engine import agreed_engine
from inflight.errors import DeploymentError
from inflight.export.compile.run import run_commands
from inflight.export.compile.steps import compile_steps
from inflight.resources import DEMO
from inflight.serve.repository import parameters
from inflight.settings.deployment import Deployment, resolve
from inflight.settings.speculation import SpeculationSettings, draft_tree
from tests.export.support.compiling import install_tools, request, write_checkpoint

EAGLE, MEDUSA = {"method": "eagle"}, {"method": "medusa"}


@pytest.fixture
def workshop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory with the tools, a checkpoint and drafts' heads."""
    install_tools(tmp_path, monkeypatch)
    write_checkpoint(tmp_path / "hf")
    write_checkpoint(tmp_path / "heads")
    return tmp_path


def drafts(settings: dict[str, Any], directory: Path) -> dict[str, Any]:
    heads = {} if settings.get("method") in (None, "lookahead") else {"draft_model": str(directory / "heads")}
    return settings | heads


def build(directory: Path, speculation: dict[str, Any], **settings: Any) -> None:
    """Compile an engine with the stand-ins of upstream's tools."""
    drafted = SpeculationSettings.model_validate(drafts(speculation, directory))
    run_commands(
        compile_steps(request(directory, speculation=drafted, **settings)), directory / "logs", lambda line: None
    )


def served(directory: Path, speculation: dict[str, Any]) -> Deployment:
    """Return a deployment of that engine."""
    data = {"model": str(DEMO / "model"), "engine": {"kind": "tensorrtllm"}}
    settings = {"tensorrt_llm": {"engine_dir": "engine"}, "speculation": drafts(speculation, directory)}
    return resolve(data | settings, directory, "test")


def paths_of(choices: str | None) -> list[list[int]] | None:
    """Read a tree in the notation of upstream's parameters."""
    return choices and [list(map(int, one.split(","))) for one in re.findall(r"\{(.*?)\}", choices)]


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("speculation", "choices"),
    [
        (EAGLE | {"max_draft_tokens": 3}, [[0], [0, 0], [0, 0, 0]]),
        (EAGLE | {"max_draft_tokens": 63}, None),
        (MEDUSA | {"max_draft_tokens": 2, "medusa_heads": 3}, [[0], [0, 0]]),
        (MEDUSA | {"max_draft_tokens": 63}, None),
    ],
    ids=lambda value: "-".join(map(str, value.values())) if isinstance(value, dict) else "",
)
def test_trees(workshop: Path, speculation: dict[str, Any], choices: list[list[int]] | None) -> None:
    build(workshop, speculation)
    engine, values = agreed_engine(served(workshop, speculation)), parameters(served(workshop, speculation))
    method, tree = speculation["method"], draft_tree(SpeculationSettings.model_validate(drafts(speculation, workshop)))
    assert engine.build["max_draft_len"] == speculation["max_draft_tokens"]
    if method == "eagle":
        assert engine.checkpoint["num_eagle_layers"] == tree.depth
        assert engine.checkpoint["max_non_leaves_per_layer"] == tree.most_inner_nodes_of_a_layer
    else:
        assert engine.checkpoint["num_medusa_heads"] == speculation.get("medusa_heads", 4)
    assert paths_of(values.get(f"{method}_choices")) == choices
    assert values["decoding_mode"] == method


def test_lookahead(workshop: Path) -> None:
    speculation = {"method": "lookahead", "window_size": 3, "max_ngram_size": 2, "verification_set_size": 5}
    build(workshop, speculation)
    values = parameters(served(workshop, speculation))
    names = ("window_size", "ngram_size", "verification_set_size")
    assert [values[f"lookahead_{name}"] for name in names] == ["3", "2", "5"]
    # A window of 3, pairs and 5 candidates: by TensorRT-LLM's formula (2 - 2) + (3 - 1 + 5) (2 - 1).
    assert agreed_engine(served(workshop, speculation)).build["max_draft_len"] == 7


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("built", "asked", "reason"),
    [
        (EAGLE | {"max_draft_tokens": 4}, EAGLE | {"max_draft_tokens": 5}, "drafts 5 tokens; .* compiled for 4"),
        (EAGLE, {}, "speculation.method is null; the engine was compiled for eagle"),
        (MEDUSA, {"method": "lookahead"}, "speculation.method is lookahead; the engine was compiled for medusa"),
        (MEDUSA, EAGLE, "speculation.method is eagle; the engine was compiled for medusa"),
        (MEDUSA, MEDUSA | {"medusa_heads": 5}, "needs num_medusa_heads 5; the engine was compiled with 4"),
        ({}, MEDUSA, "speculation.method is medusa; the engine was compiled for none with heads"),
        ({"method": "lookahead"}, {"method": "lookahead", "window_size": 7}, "drafts 21 tokens; .* compiled for 15"),
    ],
    ids=lambda value: "-".join(map(str, value.values())) if isinstance(value, dict) else "",
)
def test_other_drafts_than_the_engines(
    workshop: Path, built: dict[str, Any], asked: dict[str, Any], reason: str
) -> None:
    build(workshop, built)
    with pytest.raises(DeploymentError, match=reason):
        parameters(served(workshop, asked))


def test_another_parallelism_than_the_engines(workshop: Path) -> None:
    build(workshop, {}, tensor_parallel_size=2)
    with pytest.raises(DeploymentError, match="tensor_parallel_size is 1; the engine was compiled for 2"):
        parameters(served(workshop, {}))
