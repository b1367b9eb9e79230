"""Writes the deployment: checkpoint or engine, deployment.yaml, manifest.json, plan, quality; all of it or nothing."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import yaml

from inflight.deployment import FILE_NAME, load_deployment
from inflight.errors import DeploymentError
from inflight.export.build import steps
from inflight.export.build.blueprint import Blueprint
from inflight.export.build.settings import ENGINE, MODEL
from inflight.export.interpreters import detect_machine
from inflight.export.stages import fresh_directory, require_space
from inflight.export.verify.checks import check
from inflight.manifest import FILE_NAME as MANIFEST
from inflight.manifest import Inputs, Manifest, read_manifest, record_files, require_files, write_manifest


@dataclass(frozen=True)
class Parts:
    """The stages' directories; None: the stage had nothing to do."""

    planned: Path
    quantized: Path
    compiled: Path | None
    verified: Path | None


def write_deployment(
    blueprint: Blueprint, parts: Parts, inputs: Mapping[str, Any], materials: steps.Materials
) -> tuple[Path, str]:
    """Put the deployment together, unless it is there already.

    Returns:
        Its directory, and a line about it.

    Raises:
        DeploymentError: something else is in its place, or the disk is full; what was there before is still there.
    """
    output = blueprint.request.output.absolute()
    settings = _digest([blueprint.settings, [part and part.name for part in vars(parts).values()]])
    if _is_current(output, settings):
        return output, f"nothing to do: {output} is up to date"
    model = sorted(path for path in (parts.quantized / MODEL).iterdir() if path.is_file())
    engine = sorted((parts.compiled / ENGINE).iterdir()) if parts.compiled is not None else []
    output.parent.mkdir(parents=True, exist_ok=True)
    device = output.parent.stat().st_dev
    require_space(output, sum(path.stat().st_size for path in model + engine if not steps.is_linked(path, device)))
    with fresh_directory(output) as partial:
        steps.link_files(model, partial / MODEL)
        if engine:
            steps.link_files(engine, partial / ENGINE)
        shutil.copyfile(parts.planned / steps.PLAN, partial / steps.PLAN)
        if parts.verified is not None:
            for name in (steps.QUALITY, steps.PAGE):
                shutil.copyfile(parts.verified / name, partial / name)
        (partial / FILE_NAME).write_text(_yaml(blueprint), encoding="utf-8")
        load_deployment(partial)
        write_manifest(_manifest(blueprint, parts, inputs, materials, settings, partial), partial)
    return output, f"{output}; serve it with: inflight serve {blueprint.request.output}"


def require_replaceable(output: Path) -> bool:
    """Return whether there is something at ``output``.

    Raises:
        DeploymentError: it is not a build's; that is never replaced.
    """
    if not output.exists() or (output.is_dir() and not any(output.iterdir())):
        return False
    if not (output / MANIFEST).is_file():
        raise DeploymentError(f"{output} is there and was not made by a build; choose another --output")
    return True


def _is_current(output: Path, settings: str) -> bool:
    """Return whether ``output`` is what would be written."""
    if not require_replaceable(output):
        return False
    manifest = read_manifest(output)
    if manifest.inputs.settings != settings:
        return False
    try:
        require_files(manifest, output)
    except DeploymentError:
        return False
    return True


def _yaml(blueprint: Blueprint) -> str:
    what = f"{blueprint.checkpoint.name} in {blueprint.plan.precision} for {blueprint.gpu.name}"
    head = f"# {what}; written by:\n#   {blueprint.request.command}\n"
    return head + yaml.safe_dump(dict(blueprint.settings), sort_keys=False)


def _manifest(
    blueprint: Blueprint,
    parts: Parts,
    inputs: Mapping[str, Any],
    materials: steps.Materials,
    settings: str,
    directory: Path,
) -> Manifest:
    machine, plan, compiled = detect_machine(blueprint.tools), blueprint.plan, blueprint.flow == "tensorrt"
    return Manifest(
        created=datetime.now(UTC).replace(microsecond=0),
        command=blueprint.request.command,
        engine=blueprint.engine,
        flow=blueprint.flow,
        model=blueprint.checkpoint.name,
        precision=plan.precision,
        inputs=Inputs(
            checkpoint=_digest(inputs["checkpoint"]),
            calibration=materials.calibration.sha256 if blueprint.quantizes else None,
            settings=settings,
        ),
        versions=machine.versions,
        gpu=blueprint.gpu.name,
        compute_capability=blueprint.gpu.capability if compiled else None,
        gpu_count=0 if blueprint.gpu.is_cpu else plan.tensor_parallel_size * plan.pipeline_parallel_size,
        plan=plan.as_dict(),
        quality=_measured(blueprint, parts),
        files=record_files(directory),
    )


def _measured(blueprint: Blueprint, parts: Parts) -> dict[str, float]:
    if parts.verified is None:
        return {}
    quality, costs, _ = steps.read_quality(parts.verified)
    return {one.name: one.value for one in check(quality, costs, blueprint.quality) if one.value is not None}


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()
