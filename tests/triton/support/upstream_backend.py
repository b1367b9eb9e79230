"""Upstream's C++ backend in the tests: a deployment of an engine for it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from inflight.resources import DEMO
from tests.triton.support.servers import write_engine


def write_deployment(directory: Path, **settings: Any) -> Path:
    """Write a deployment of the demo model's engine for upstream's backend."""
    write_engine(directory / "engine")
    base = {"model": str(DEMO / "model"), "engine": {"kind": "tensorrtllm"}, "tensorrt_llm": {"engine_dir": "engine"}}
    (directory / "deployment.yaml").write_text(yaml.safe_dump(base | settings))
    return directory
