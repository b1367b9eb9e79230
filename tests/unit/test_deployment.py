"""deployment.yaml: an engine refuses the keys that it does not read; relative paths begin at the deployment."""

from __future__ import annotations

from pathlib import Path
from typing import Any, get_args

import pytest
import yaml

from inflight.errors import DeploymentError
from inflight.settings.deployment import Deployment, load_deployment, model_name, validate
from inflight.settings.section import EngineKind, ReadBy, Section

DEMO_MODEL = Path(__file__).parents[2] / "deployments/demo/model"
VALUES: dict[str, Any] = {
    "engine.replay_queue_ms": 1,
    "engine.replay_prefill_ms": 1,
    "engine.replay_step_ms": 1,
    "kv_cache.dtype": "int8",
    "observability.trace_endpoint": "http://127.0.0.1:4318/v1/traces",
    "observability.log_requests": "info",
    "tensorrt_llm.engine_dir": "engine",
}
"""Values of the keys whose defaults every engine accepts."""


def _marked_keys() -> dict[str, set[str]]:
    """Return the keys that not every engine reads, each with the engines that do.

    Those of ``speculation`` are left out: which of them may be given depends on its method too.
    """
    found: dict[str, set[str]] = {}
    for name, field in Deployment.model_fields.items():
        section = field.annotation
        if name == "speculation" or not (isinstance(section, type) and issubclass(section, Section)):
            continue
        for key, one in section.model_fields.items():
            marks = [*section.read_by, *(mark for mark in one.metadata if isinstance(mark, ReadBy))]
            if marks:
                found[f"{name}.{key}"] = set.intersection(*(set(mark.engines) for mark in marks))
    return found


def _refusal(key: str, kind: str) -> str:
    """Return the error of a deployment that gives this key beside this kind of engine; empty: it is accepted."""
    section, name = key.split(".")
    default = getattr(getattr(Deployment(model=Path("m")), section), name)
    value = {} if isinstance(default, Section) else VALUES.get(key, default)
    data: dict[str, Any] = {"model": "m", "engine": {"kind": kind}}
    data.setdefault(section, {})[name] = value
    try:
        validate(data, "deployment.yaml")
    except DeploymentError as error:
        return str(error)
    return ""


def test_a_key_is_refused_by_each_engine_that_does_not_read_it() -> None:
    wrong = []
    keys = _marked_keys()
    assert {"batching.fairness", "kv_cache.offload", "tensorrt_llm.lora"} <= set(keys)
    for key, engines in keys.items():
        for kind in get_args(EngineKind):
            refusal = _refusal(key, kind)
            if kind in engines and "`engine.kind" in refusal:
                wrong.append(f"{key} is refused by {kind}, which reads it: {refusal}")
            if kind not in engines and f"`{key}" not in refusal:
                wrong.append(f"{key} is accepted by {kind}, which does not read it: {refusal}")
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(
    ("kind", "section", "refusal"),
    [
        ("trtllm", {"tensorrt_llm": {"engine_dir": "x"}}, "`tensorrt_llm.engine_dir` needs another kind than trtllm"),
        ("trtllm", {"tensorrt_llm": {"parameters": {}}}, "`tensorrt_llm.parameters` needs `engine.kind:` tensorrtllm"),
        ("pytorch", {"tensorrt_llm": {"lora": {}}}, "`tensorrt_llm.lora` needs `engine.kind:` trtllm or tensorrtllm;"),
        (
            "trtllm",
            {"kv_cache": {"dtype": "int8"}},
            "`kv_cache.dtype: int8` needs `engine.kind:` pytorch; it is trtllm",
        ),
        ("replay", {"engine": {"dtype": "float32"}}, "`engine.dtype` needs an engine with a model; `engine.kind` is"),
        ("replay", {"engine": {"threads": 2}}, "`engine.threads` needs `engine.kind:` pytorch; it is replay"),
        ("replay", {"kv_cache": {"tokens": 64}}, "`kv_cache.tokens` needs an engine with a model;"),
        ("replay", {"batching": {"policy": "max_utilization"}}, "`batching.policy` needs an engine with a model;"),
        ("replay", {"batching": {"max_tokens_per_step": 64}}, "`batching.max_tokens_per_step` needs an engine with"),
        ("replay", {"limits": {"max_sequence_length": 64}}, "`limits.max_sequence_length` needs an engine with a"),
        ("replay", {"engine": {"batch_invariant": True}}, "`engine.batch_invariant` needs an engine with a model;"),
        ("trtllm", {"engine": {"batch_invariant": True}}, "`engine.batch_invariant` needs `engine.kind:` pytorch;"),
        ("tensorrtllm", {"engine": {"dtype": "auto"}}, "`engine.dtype` needs the PyTorch flow; a compiled engine has"),
        ("trtllm", {"engine": {"device": "cpu"}}, "`engine.device` needs `engine.kind:` pytorch; it is trtllm"),
        ("trtllm", {"tensorrt_llm": {"max_lora_rank": 8}}, "`tensorrt_llm.max_lora_rank` needs adapters in"),
    ],
)
def test_a_refusal_says_what_the_key_needs(kind: str, section: dict[str, dict[str, Any]], refusal: str) -> None:
    data = {"model": "m", **section, "engine": {"kind": kind, **section.get("engine", {})}}
    with pytest.raises(DeploymentError) as error:
        validate(data, "deployment.yaml")
    assert refusal in str(error.value)


def test_a_model_may_be_a_gguf_file(tmp_path: Path) -> None:
    def load(model: str, **settings: object) -> Deployment:
        (tmp_path / "deployment.yaml").write_text(yaml.safe_dump({"model": model, **settings}))
        return load_deployment(tmp_path)

    file = tmp_path.resolve() / "models" / "Tiny-Q4_K_M.gguf"
    file.parent.mkdir()
    with pytest.raises(DeploymentError, match="models is not a checkpoint directory .* and no GGUF file"):
        load("models")
    file.write_bytes(b"GGUF")
    assert load("models").model == load("models/Tiny-Q4_K_M.gguf").model == file
    assert model_name(file) == "Tiny-Q4_K_M"
    drafts = {"method": "draft_target", "draft_model": "models"}
    assert load("models", speculation=drafts).speculation.draft_model == file
    with pytest.raises(DeploymentError, match=r"is a GGUF file, which engine\.kind trtllm does not read; engine\.kind"):
        load("models", engine={"kind": "trtllm"})
    with pytest.raises(DeploymentError, match=r"none\.gguf is not a checkpoint directory"):
        load("none.gguf")


def test_relative_paths_begin_at_the_deployment(tmp_path: Path) -> None:
    def load(**settings: object) -> Deployment:
        (tmp_path / "deployment.yaml").write_text(yaml.safe_dump({"model": str(DEMO_MODEL), **settings}))
        return load_deployment(tmp_path)

    offload = {"to": "file", "directory": "cache"}
    assert load(kv_cache={"offload": offload}).kv_cache.offload.directory == tmp_path.resolve() / "cache"
    assert load(kv_cache={"offload": {"to": "file"}}).kv_cache.offload.directory is None
    drafts = {"method": "draft_target", "draft_model": "draft"}
    assert load(speculation=drafts).speculation.draft_model == tmp_path.resolve() / "draft"
    served = load(engine={"kind": "trtllm"}, tensorrt_llm={"lora": {"poet": "adapters/poet"}})
    assert served.tensorrt_llm.lora == {"poet": tmp_path.resolve() / "adapters/poet"}
    compiled = load(engine={"kind": "tensorrtllm"}, tensorrt_llm={"engine_dir": "engine"})
    assert compiled.tensorrt_llm.engine_dir == tmp_path.resolve() / "engine"
