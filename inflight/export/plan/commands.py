"""``inflight plan``: what a model needs, and what it does, on any GPU of the table or on this machine."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import Progress

from inflight.engine.models.config import ModelConfig
from inflight.engine.models.reading import read_model_config
from inflight.errors import DeploymentError
from inflight.export.model_shape import read_shape, stored_weights
from inflight.export.plan.calibration import Comparison, Measurement, compare, fit, read_measurement
from inflight.export.plan.gpus import CPU, Gpu, find_gpu, gpu_here
from inflight.export.plan.plan import PlanRequest
from inflight.export.plan.planner import make_plan, rank
from inflight.export.plan.precision import StoredWeights, resolve_precision
from inflight.export.plan.report import Answer, plan_page, show_plans
from inflight.export.plan.roofline import Efficiency
from inflight.gguf.files import whole_path
from inflight.report.failures import one_line_errors
from inflight.report.provenance import provenance
from inflight.resources import bundled
from inflight.text.files import read_json

_errors = Console(stderr=True, highlight=False)
_load = partial(typer.Option, rich_help_panel="Load and objectives")
_measuring = partial(typer.Option, rich_help_panel="Measuring")
_output = partial(typer.Option, rich_help_panel="Output")

Precision = Annotated[str, typer.Option(help="auto, float32, bf16, fp16, fp8, int8, int4-awq, w4a8-awq or nvfp4.")]
KvCache = Annotated[str, typer.Option(help="Type of the KV cache: auto, bf16 or fp8.")]
FreeWindows = Annotated[
    bool,
    typer.Option(
        "--free-windows", help="Plan for an engine that frees KV blocks beyond a sliding window; none here does."
    ),
]
Price = Annotated[float | None, _load(help="USD per hour of one of the GPUs named, in place of the table's.")]


def plan(
    model: Annotated[Path, typer.Argument(help="Checkpoint directory; weights are not read.")],
    gpu: Annotated[
        list[str] | None, typer.Option(help="A GPU of build/gpus.toml, cpu, or auto: the GPU of this machine; repeat.")
    ] = None,
    precision: Precision = "auto",
    kv_cache: KvCache = "auto",
    exclude: Annotated[
        list[str] | None, typer.Option(help="Pattern of linear layers that stay at 16 bits; repeat for several.")
    ] = None,
    gpus: Annotated[int | None, typer.Option(help="GPUs at hand; by default as many as needed.")] = None,
    tensor_parallel: Annotated[int | None, typer.Option(help="GPUs that share each layer; by default chosen.")] = None,
    free_windows: FreeWindows = False,
    input_tokens: Annotated[int, _load(help="Mean length of a prompt.")] = 1024,
    output_tokens: Annotated[int, _load(help="Mean length of an answer.")] = 256,
    p95_input: Annotated[int | None, _load(help="P95 length of a prompt; without it the plan is of the mean.")] = None,
    p95_output: Annotated[
        int | None, _load(help="P95 length of an answer; without it the plan is of the mean.")
    ] = None,
    rate: Annotated[float | None, _load(help="Requests per second.")] = None,
    cache_hit_rate: Annotated[float, _load(help="Share of prompt tokens in the prefix cache.")] = 0.0,
    slo_ttft_ms: Annotated[float | None, _load(help="Time to first token, at most.")] = None,
    slo_itl_ms: Annotated[float | None, _load(help="Mean time between tokens, at most.")] = None,
    price: Price = None,
    measure: Annotated[Path | None, _measuring(help="Measure the portable engine here, into this file.")] = None,
    rounds: Annotated[int, _measuring(min=1, help="Rounds of --measure.")] = 5,
    calibrate: Annotated[Path | None, _measuring(help="Fit the efficiencies to this measurement.")] = None,
    check: Annotated[Path | None, _measuring(help="Compare the plan with this measurement.")] = None,
    as_json: Annotated[str | None, _output("--json", help="FILE, or - for stdout.")] = None,
    html: Annotated[Path | None, _output(help="Write a page.")] = None,
) -> None:
    """Plan how to serve a model: what fits, how fast it is, what it costs."""
    model = bundled(model)
    with one_line_errors(_errors):
        request = PlanRequest(
            precision=precision,
            kv_cache=kv_cache,
            input_tokens=input_tokens,
            output_tokens=output_tokens,
            p95_input_tokens=p95_input,
            p95_output_tokens=p95_output,
            rate=rate,
            cache_hit_rate=cache_hit_rate,
            slo_ttft_ms=slo_ttft_ms,
            slo_itl_ms=slo_itl_ms,
            price=price,
            gpus=gpus,
            tensor_parallel_size=tensor_parallel,
            excluded=tuple(exclude or ()),
            free_windows=free_windows,
        )
        names = [gpu_here() if name == "auto" else name for name in gpu or ["auto"]]
        if measure is not None:
            _measure(model, names, precision, rounds, measure)
        _report(_answer(model, names, request, calibrate, check), as_json, html)


def _answer(
    model: Path, names: Sequence[str], request: PlanRequest, calibrate: Path | None, check: Path | None
) -> Answer:
    config = read_shape(model)
    stored = stored_weights(model, config)
    fitted, checked = (read_measurement(path) if path else None for path in (calibrate, check))
    measurements = [one for one in (fitted, checked) if one is not None]
    found = [_calibrated(name, fitted, config, request, stored) for name in names]
    for measurement in measurements:
        if measurement.gpu.name not in [gpu.name for gpu, _ in found]:
            raise DeploymentError(f"the measurement is of {measurement.gpu.name}; plan for it too, with --gpu")
    plans = [make_plan(config, gpu, request, efficiency, stored) for gpu, efficiency in found]
    comparisons: list[Comparison] = []
    if checked is not None:
        planned = next(plan for plan in plans if plan.gpu.name == checked.gpu.name)
        comparisons = compare(checked, planned.efficiency, planned.gpu)
    ranked, refused = rank(config, request, plans, stored)
    sources = [f"measured: {one.command} (commit {one.commit}, {one.machine}, {one.date})" for one in measurements]
    return Answer(_name(model), plans, ranked, refused, comparisons, "; ".join(sources))


def _calibrated(
    name: str,
    measurement: Measurement | None,
    config: ModelConfig,
    request: PlanRequest,
    stored: StoredWeights | None,
) -> tuple[Gpu, Efficiency | None]:
    """Return the GPU of a name, and its efficiencies where the measurement is of it."""
    with _errors.status("measuring this machine") if name == CPU else nullcontext():
        gpu = find_gpu(name)
    if measurement is None or measurement.gpu.name != gpu.name:
        return gpu, None
    precision = (stored.precision if stored else resolve_precision(request.precision, gpu, config.dtype)).name
    if measurement.precision != precision:
        raise DeploymentError(f"the measurement is in {measurement.precision}, and the plan in {precision}")
    # The shares refer to the peaks of their own day.
    peaks = {name: getattr(measurement.gpu, name) for name in ("bandwidth_gb_s", "dense_tflops", "native")}
    return gpu.model_copy(update=peaks), fit(measurement)


def _name(model: Path) -> str:
    """Return a checkpoint's name; that of a deployment too, where the directory is just called ``model``."""
    path = whole_path(model)
    return f"{path.parent.name}/{path.name}" if path.name == "model" else path.name


def _measure(model: Path, names: Sequence[str], precision: str, rounds: int, path: Path) -> None:
    """Measure the portable engine on this machine's CPU, with progress, and write the file."""
    if CPU not in names:
        raise DeploymentError("--measure runs the portable engine on this machine's processor: add --gpu cpu")
    gpu = find_gpu(CPU)  # says what is missing where PyTorch is
    from inflight.engine.quant.readers.methods import load_quantization
    from inflight.export.plan.measure import measure

    quantization = load_quantization(model, frozenset())
    if quantization is not None:
        schemes = ", ".join(quantization.schemes) or "by another library"
        raise DeploymentError(
            f"--measure: the checkpoint is quantized ({schemes}), and only float32 and bf16 are measured; use "
            "`make bench ARGS=engine`, or measure the original"
        )
    config = read_json(model / "config.json")
    resolved = resolve_precision(precision, gpu, read_model_config(config).dtype).name
    dtype = {"float32": "float32", "bf16": "bfloat16"}.get(resolved)
    if dtype is None:
        raise DeploymentError(f"--measure: precision {resolved}; only float32 and bf16 are measured")
    _write(path, "", mode="a")  # a path that cannot be written is better found now; what is in the file stays
    with Progress(console=_errors, transient=True) as bar:
        task = bar.add_task("measuring", total=None)
        rows = measure(model, dtype, rounds, lambda done, total: bar.update(task, completed=done, total=total))
    command = f"inflight plan {model} --gpu cpu --precision {resolved} --rounds {rounds} --measure {path}"
    measurement = Measurement.model_validate(
        {"command": command, **provenance(), "model": _name(model), "config": config}
        | {"precision": resolved, "gpu": gpu.model_dump(), "rows": rows}
    )
    _write(path, measurement.model_dump_json(indent=1) + "\n")


def _report(answer: Answer, as_json: str | None, html: Path | None) -> None:
    text = json.dumps(answer.as_dict(), indent=1) + "\n"
    if as_json == "-":
        sys.stdout.write(text)
    else:
        show_plans(answer)
        if as_json is not None:
            _write(Path(as_json), text)
    if html is not None:
        _write(html, plan_page(answer))


def _write(path: Path, text: str, mode: str = "w") -> None:
    try:
        with path.open(mode, encoding="utf-8") as file:
            file.write(text)
    except OSError as error:
        raise DeploymentError(f"{path}: cannot be written: {error.strerror}") from None
