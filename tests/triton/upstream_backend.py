"""Upstream's C++ backend in the tests: a deployment of an engine for it, and a Triton that has a stand-in."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml

from inflight.deployment import load_deployment
from inflight.resources import DEMO
from inflight.serve.command import override_server
from inflight.serve.installation import find_installation
from inflight.serve.server import TritonServer, free_ports
from tests.triton.conftest import Running

BACKEND = Path(__file__).parents[1] / "fakes/backends/tensorrtllm"


def write_engine(
    directory: Path,
    ranks: int = 1,
    heads: dict[str, int] | None = None,
    use_paged_context_fmha: bool = True,
    **build: Any,
) -> Path:
    """Write an engine's directory, as trtllm-build leaves it, without code; ``heads`` are those of its drafts."""
    directory.mkdir(parents=True, exist_ok=True)
    build_config = {"max_batch_size": 32, "max_num_tokens": 512, "max_seq_len": 1024, "max_draft_len": 0} | build
    build_config["plugin_config"] = {"use_paged_context_fmha": use_paged_context_fmha, "tokens_per_block": 32}
    pretrained = {"mapping": {"world_size": ranks, "tp_size": ranks, "pp_size": 1}, "quantization": {}} | (heads or {})
    config = {"version": "1.2.1", "pretrained_config": pretrained, "build_config": build_config}
    (directory / "config.json").write_text(json.dumps(config))
    for rank in range(ranks):
        (directory / f"rank{rank}.engine").write_bytes(b"engine")
    return directory


def write_deployment(directory: Path, **settings: Any) -> Path:
    """Write a deployment of the demo model's engine for upstream's backend."""
    write_engine(directory / "engine")
    base = {"model": str(DEMO / "model"), "engine": {"kind": "tensorrtllm"}, "tensorrt_llm": {"engine_dir": "engine"}}
    (directory / "deployment.yaml").write_text(yaml.safe_dump(base | settings))
    return directory


def serve(directory: Path, tmp_path: Path) -> Iterator[Running]:
    """Serve a deployment on a Triton that has the stand-in where NVIDIA's image has the backend."""
    found = find_installation()
    (tmp_path / "backends").mkdir()
    (tmp_path / "backends/python").symlink_to(found.python_backend)
    (tmp_path / "backends/tensorrtllm").symlink_to(BACKEND)
    ports = dict(zip(("http_port", "grpc_port", "metrics_port"), free_ports(3), strict=True))
    deployment = override_server(load_deployment(directory), {**ports, "exit_timeout_s": 10})
    server = TritonServer(directory, deployment, replace(found, python_backend=tmp_path / "backends/python"))
    with server:
        server.wait_ready(180)
        yield Running(*ports.values(), server)
