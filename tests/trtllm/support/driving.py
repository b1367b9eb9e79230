"""Deployments on the fake TensorRT-LLM, and requests that an engine runs to their ends."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from inflight.engine.request import Output, Request
from inflight.resources import DEMO
from inflight.sampling import SamplingParams
from inflight.settings.deployment import Deployment, resolve

Settings = dict[str, Any]


def deployment(directory: Path = DEMO, **settings: Any) -> Deployment:
    """Return the demo deployment on TensorRT-LLM, with more settings; their paths are relative to ``directory``."""
    data = {"model": str(DEMO / "model"), "engine": {"kind": "trtllm", "dtype": "float32"}}
    return resolve(data | settings, directory, "test")


def checkpoint(directory: Path, **config: Any) -> Deployment:
    """Return a deployment of the demo model with other values in its ``config.json``; None: without the key."""
    read = json.loads((DEMO / "model/config.json").read_text()) | config
    for file in (DEMO / "model").iterdir():
        if file.name != "config.json":
            (directory / file.name).symlink_to(file)
    (directory / "config.json").write_text(json.dumps({key: one for key, one in read.items() if one is not None}))
    return deployment(directory, model=str(directory))


def ask(prompt: list[int], **sampling: Any) -> Request:
    """Return a request; ``max_tokens`` is 16 unless given."""
    return Request(prompt, SamplingParams(**{"max_tokens": 16} | sampling))


def run(engine: Any, *requests: Request) -> list[Output]:
    """Run requests to their ends; return one whole output of each, in order."""
    whole = {request.key: Output(request.key) for request in requests}
    for request in requests:
        engine.validate(request)
        engine.submit(request)
    while engine.busy:
        for output in engine.step():
            whole[output.key].extend(output)
    return list(whole.values())
