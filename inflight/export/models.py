"""``inflight models``: which models are here, and whether this machine can serve them, by the planner's word."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, TypeGuard

import psutil
import typer
from rich.console import Console

from inflight.errors import DeploymentError
from inflight.export.model_shape import read_shape, stored_weights
from inflight.export.plan.gpus import Gpu, find_gpu, gpu_here
from inflight.export.plan.plan import Plan, PlanRequest
from inflight.export.plan.planner import DoesNotFit, make_plan
from inflight.gguf.checkpoint import cpu_bytes, open_gguf, require_types
from inflight.gguf.files import is_gguf
from inflight.hub.model_manifest import ModelManifest
from inflight.hub.names import parse_model_name
from inflight.hub.staging import in_units
from inflight.hub.store import StoredModel, find_entries, models_folder, remove_entry, stored_models
from inflight.hub.verdict import why_not_served
from inflight.report.failures import missing, one_line_errors
from inflight.report.table import print_table
from inflight.text.files import read_json

_errors = Console(stderr=True, highlight=False)
_PROMPT, _ANSWER = 1024, 256
"""Tokens of the request that is planned for, where the model is not shorter."""

models = typer.Typer(
    help="The models that were pulled, and whether this machine can serve them.",
    invoke_without_command=True,
)


@models.callback()
def _list(context: typer.Context) -> None:
    """List the models that were pulled, and whether this machine can serve them."""
    if context.invoked_subcommand is not None:
        return
    with one_line_errors(_errors):
        found = stored_models()
        if not found:
            typer.echo(f"no model is in {models_folder()}; `inflight pull org/name` gets one")
            return
        machine = _this_machine()
        print_table(f"Models in {models_folder()}", [_row(model, machine) for model in found])


@models.command("rm")
def remove(
    model: Annotated[
        str, typer.Argument(help="org/name: all of it; or with @commit or :file.gguf, as the list has it.")
    ],
) -> None:
    """Remove models, interrupted pulls too."""
    with one_line_errors(_errors):
        for entry in find_entries(parse_model_name(model)):
            remove_entry(entry)
            typer.echo(f"removed {entry.name}")


def _row(model: StoredModel, machine: Gpu | str) -> dict[str, object]:
    manifest = model.manifest
    return {
        "model": model.name,
        "size": in_units(manifest.nbytes if manifest else _bytes_in(model.directory)),
        "architecture": (manifest and manifest.architecture) or "",
        "format": manifest.format if manifest else "",
        "licence": (manifest and manifest.license) or "",
        "on this machine": _problem(model) or (manifest and judge(manifest, model.directory, machine)) or "",
    }


def _problem(model: StoredModel) -> str | None:
    return model.problem and model.problem.replace(f"{model.directory}/", "")


def _bytes_in(directory: Path) -> int:
    return sum(path.stat().st_size for path in directory.rglob("*") if path.is_file())


def _this_machine() -> Gpu | str:
    """Return what this machine computes with; or why that is not known."""
    try:
        with _errors.status("measuring this machine"):
            return find_gpu(gpu_here())
    except DeploymentError as error:
        return str(error)


def judge(manifest: ModelManifest, directory: Path, machine: Gpu | str) -> str:
    """Return in words whether ``machine`` can serve a model: memory, and the speed of one request where it is planned.

    A machine that is not known is the reason why.
    """
    model = manifest.weights_path(directory)
    try:
        config = read_json(model / "config.json")
        in_blocks = _bytes_in_blocks(model, machine) if is_gguf(model) else None
    except DeploymentError as error:
        return f"not served: {error}".replace(f"{directory}/", "")
    if (problem := why_not_served(config)) is not None:
        return f"not served: {problem}"
    if in_blocks is not None:
        return _by_size(in_blocks, machine)
    try:
        shape = read_shape(model)
        stored = stored_weights(model, shape)
    except DeploymentError as error:
        return f"not served: {error}"
    except ModuleNotFoundError as error:
        return f"not planned: {missing(error)}"
    if isinstance(machine, str):
        return f"not planned: {machine}"
    longest = shape.max_position_embeddings
    request = PlanRequest(
        precision="bf16" if machine.is_cpu and shape.dtype == "bfloat16" and stored is None else "auto",
        input_tokens=max(1, min(_PROMPT, longest // 2)),
        output_tokens=max(1, min(_ANSWER, longest // 4)),
    )
    try:
        plan = make_plan(shape, machine, request, stored=stored)
    except DeploymentError as error:
        word = "too large" if isinstance(error, DoesNotFit) else "not planned"
        return f"{word}: {str(error).removeprefix(f'{machine.name}: ')}"
    return _planned(plan)


def _planned(plan: Plan) -> str:
    memory = plan.memory
    needed = (memory.total - memory.free - memory.reserve) * plan.gpus_per_replica
    where = f"{plan.gpus_per_replica} x {plan.gpu.name} needed" if plan.gpus_per_replica > 1 else "fits"
    speed = f"about {plan.unloaded.tokens_per_second:.3g} tokens/s alone"
    if plan.unpredicted is not None:
        speed = f"speed is not predicted: {plan.unpredicted}"
    return f"{where}: {in_units(needed)} of {in_units(memory.total * plan.gpus_per_replica)}, {speed}"


def _bytes_in_blocks(model: Path, machine: Gpu | str) -> int | None:
    """Return the memory that a GGUF model's weights take on a machine, in bytes; None: none of them are in blocks.

    Raises:
        DeploymentError: the file is not what it should be, or not served.
    """
    checkpoint = open_gguf(model)
    require_types(checkpoint.model)
    if not checkpoint.blocks:
        return None
    if not _is_gpu(machine):
        return cpu_bytes(checkpoint.model)
    return sum(tensor.nbytes for tensor in checkpoint.model.tensors.values())


def _by_size(needed: int, machine: Gpu | str) -> str:
    """Return what is known of a GGUF model in blocks, which is not planned: the memory of its weights."""
    there, where = psutil.virtual_memory().available, "of memory free"
    if _is_gpu(machine):
        there, where = machine.memory_bytes, f"on {machine.name}"
    fits = "fits" if needed < there else "too large"
    return f"{fits}: {in_units(needed)} of weights, {in_units(there)} {where}; speed is not planned (GGUF)"


def _is_gpu(machine: Gpu | str) -> TypeGuard[Gpu]:
    return isinstance(machine, Gpu) and not machine.is_cpu
