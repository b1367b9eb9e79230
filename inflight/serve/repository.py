"""The model repository that a server is started on.

It is a link to the static one, wherever that lies: what names it to Triton's stages allows no space and no character
that is not ASCII. For upstream's C++ backend, whose parameters depend on the deployment, it is a folder of links, with
the engine's model written beside them.
"""

from __future__ import annotations

from pathlib import Path

from inflight.contract import ENGINE, TENSORRTLLM
from inflight.deployment import Deployment
from inflight.serve.cpp_backend import engine_pbtxt


def prepare_repository(static: Path, deployment: Deployment, directory: Path) -> Path:
    """Return the repository to serve; ``directory`` is where one may be made.

    Raises:
        DeploymentError: the engine's model cannot be written for this deployment.
    """
    if deployment.engine.kind != TENSORRTLLM:
        directory.symlink_to(static.resolve())
        return directory
    engine = directory / ENGINE
    (engine / "1").mkdir(parents=True)
    (engine / "config.pbtxt").write_text(engine_pbtxt(deployment), encoding="utf-8")
    for model in static.iterdir():
        if model.is_dir() and model.name != ENGINE:
            (directory / model.name).symlink_to(model.resolve())
    return directory
