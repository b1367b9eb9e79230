"""Writes the deployment: checkpoint or engine, deployment.yaml, manifest.json, plan, quality; all of it or nothing."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path

import yaml

from inflight.errors import DeploymentError
from inflight.export.build.blueprint import ENGINE, MODEL, Blueprint
from inflight.export.stages import fresh_directory, is_linked, link_files, require_space
from inflight.export.verify.verifier import QUALITY
from inflight.manifest import FILE_NAME as MANIFEST
from inflight.manifest import Manifest, read_manifest, record_files, require_files, write_manifest
from inflight.settings.deployment import FILE_NAME, load_deployment

PLAN, PAGE = "plan.json", "quality.html"
"""Names within stages and deployments."""


def write_deployment(blueprint: Blueprint, results: Mapping[str, Path], manifest: Manifest) -> str:
    """Put the deployment together, unless it is there already, and return a line about it.

    Args:
        blueprint: what was built.
        results: the stages' directories, but of those that had nothing to do.
        manifest: all of the deployment's, but for the files.

    Raises:
        DeploymentError: something else is in its place, or the disk is full; what was there before is still there.
    """
    output = blueprint.request.output.absolute()
    if _is_current(output, manifest.inputs.settings):
        return f"nothing to do: {output} is up to date"
    model = sorted(path for path in (results["quantize"] / MODEL).iterdir() if path.is_file())
    engine = sorted((results["compile"] / ENGINE).iterdir()) if "compile" in results else []
    output.parent.mkdir(parents=True, exist_ok=True)
    device = output.parent.stat().st_dev
    require_space(output, sum(path.stat().st_size for path in model + engine if not is_linked(path, device)))
    what = f"{manifest.model} in {manifest.precision} for {manifest.gpu}"
    settings = yaml.safe_dump(dict(blueprint.settings), sort_keys=False)
    with fresh_directory(output) as partial:
        link_files(model, partial / MODEL)
        if engine:
            link_files(engine, partial / ENGINE)
        shutil.copyfile(results["plan"] / PLAN, partial / PLAN)
        if "verify" in results:
            for name in (QUALITY, PAGE):
                shutil.copyfile(results["verify"] / name, partial / name)
        text = f"# {what}; written by:\n#   {manifest.command}\n{settings}"
        (partial / FILE_NAME).write_text(text, encoding="utf-8")
        load_deployment(partial)
        write_manifest(manifest.model_copy(update={"files": record_files(partial)}), partial)
    return f"{output}; serve it with: inflight serve {blueprint.request.output}"


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
    """Return whether ``output`` is what would be written: its settings have this digest, and its files are whole."""
    if not require_replaceable(output):
        return False
    manifest = read_manifest(output)
    try:
        require_files(manifest, output)
    except DeploymentError:
        return False
    return manifest.inputs.settings == settings
