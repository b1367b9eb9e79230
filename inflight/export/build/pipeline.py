"""A build: plan, quantize, compile, verify, write. Each stage finds what an earlier run has finished."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import asdict, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import psutil
import torch

from inflight.errors import DeploymentError
from inflight.export.build.blueprint import ENGINE, MODEL, READABLE, make_blueprint, own_engine
from inflight.export.build.request import BuildRequest
from inflight.export.build.write import PAGE, PLAN, require_replaceable, write_deployment
from inflight.export.checkpoint import fingerprint, inspect
from inflight.export.compile.run import require_tools, run_commands
from inflight.export.data import DEFAULT_DESCRIPTION, DataSet, Example
from inflight.export.interpreters import detect_machine
from inflight.export.plan.gpus import CPU, Gpu, find_gpu, measure_cpu, native_step
from inflight.export.quantize import modelopt
from inflight.export.quantize.config_file import write_config
from inflight.export.quantize.rounding import round_checkpoint
from inflight.export.stages import Progress, Stages, digest, link_files, link_or_copy, require_writable
from inflight.export.verify.report import Check, check, dearest, quality_page, shortfalls
from inflight.export.verify.verifier import Verifier
from inflight.manifest import Inputs, Manifest, dotted, record_files
from inflight.report.provenance import cpu_model
from inflight.settings.threads import cpu_threads
from inflight.text.tokenizer import Tokenizer

_MACHINE, _SENSITIVITIES = "machine.json", "sensitivity.json"


class Build:
    """One build; ``run`` carries it out."""

    def __init__(self, request: BuildRequest, show: Callable[[str, str], object], progress: Progress) -> None:
        """Prepare it; ``show`` is told each stage's name and one line about it.

        Raises:
            DeploymentError: it cannot be built, by name; nothing has run yet.
        """
        self._request, self._show, self._progress = request, show, progress
        torch.set_num_threads(cpu_threads(native=True))  # no server runs beside a build
        self._stages = Stages(request.work, show)
        self._source = inspect(request.model)
        self._source.require_weights()
        for directory in (request.work, request.output.absolute().parent):
            require_writable(directory)
        self._gpu = self._measure_machine() if request.gpu == CPU else find_gpu(request.gpu)
        self._blueprint = make_blueprint(request, self._source, self._gpu)
        self._machine = detect_machine(self._blueprint.tools)
        self._require_compiler()
        require_replaceable(request.output)
        self._tokenizer = Tokenizer.from_checkpoint(self._source.directory)
        self._data = data = request.data
        self._calibration = DataSet(data.calibration, data.calibration_rows)
        self._held_out = DataSet(data.held_out, data.held_out_rows)
        self._device = _device(request.device)
        for reason in self._blueprint.reasons:
            show("plan", reason)
        if self._blueprint.flow == "tensorrt":
            show("plan", f"{sys.executable} quantizes and verifies; {self._blueprint.python} compiles")
        if data.is_default and self._blueprint.quantizes:
            calibrating = "calibrating and " * self._blueprint.calibrates
            show("plan", f"{calibrating}measuring with {DEFAULT_DESCRIPTION}")

    def run(self) -> tuple[str, ...]:
        """Run the stages that have not been run, write the deployment, and return which stages ran.

        Raises:
            DeploymentError: a stage failed, the quality falls short, or there is no room; nothing half-made is left.
        """
        files = sorted(path for path in self._source.directory.iterdir() if path.is_file())
        versions = self._machine.versions
        self._inputs: dict[str, Any] = {
            "versions": {"inflight": versions.inflight, "torch": versions.torch},
            "checkpoint": fingerprint(files, self._request.work / "fingerprints.json", self._progress),
        }
        try:
            self._choose_kept()
            self._plan()
            quantized = self._quantize()
            self._compile()
            checks = self._verify(quantized)
        except (MemoryError, torch.OutOfMemoryError):
            raise DeploymentError(
                f"out of memory on {self._device}; give the build more, or use --device cpu"
            ) from None
        self._show("write", write_deployment(self._blueprint, self._stages.results, self._manifest(checks)))
        return tuple(self._stages.ran)

    def _measure_machine(self) -> Gpu:
        """Return this machine as a GPU. It is measured once: the next build must find the same figures."""

        def work(out: Path) -> str:
            gpu = measure_for(self._request, self._progress)
            (out / _MACHINE).write_text(gpu.model_dump_json(indent=1) + "\n")
            return f"{gpu.title}: {gpu.memory_mib / 1024:.1f} GiB free, {gpu.bandwidth_gb_s:.1f} GB/s"

        measured = self._stages.run("machine", _machine_inputs(self._request), work)
        return Gpu.model_validate_json((measured / _MACHINE).read_text())

    def _require_compiler(self) -> None:
        """Look for what will compile, before hours of work: the tools, and the GPU that the engine is for."""
        needed = self._blueprint.commands(Path("OUTPUT"))
        for command in needed:
            require_tools(command)
        here = self._machine.compute_capabilities
        if needed and self._gpu.capability not in here[:1]:
            chip = dotted(here[0]) if here else "no GPU"
            raise DeploymentError(
                f"an engine is compiled on the GPU that it is for, {self._gpu.name} ({self._gpu.compute_capability}); "
                f"here is {chip}. --flow pytorch needs no engine"
            )

    def _choose_kept(self) -> None:
        """With a budget: measure what each layer loses, and plan again with the most sensitive ones in 16 bit."""
        request, recipe = self._request, self._blueprint.recipe
        if request.kl_budget is None:
            return

        probes = f"{modelopt.PROBES} of {modelopt.PROBE_TOKENS} tokens, apart from those that calibrate"
        inputs = self._calibrated({"recipe": asdict(recipe), "probes": probes})
        journal = self._stages.journal("sensitivity", inputs)

        def work(out: Path) -> str:
            with modelopt.quiet(out / "modelopt.log"):
                found = modelopt.measure_sensitivity(
                    self._source.directory, recipe, self._examples(), self._device, self._progress, journal
                )
            (out / _SENSITIVITIES).write_text(json.dumps([asdict(one) for one in found], indent=1) + "\n")
            return f"{len(found)} groups of linears; the most sensitive is {found[0].linears[0]}"

        rows = json.loads((self._stages.run("sensitivity", inputs, work) / _SENSITIVITIES).read_text())
        sensitivities = [modelopt.Sensitivity(tuple(row["linears"]), row["kl_divergence"]) for row in rows]
        kept = modelopt.choose_kept(sensitivities, request.kl_budget)
        self._show("sensitivity", f"{len(kept)} linears stay in 16 bit, for a budget of {request.kl_budget:g} nats")
        if len(kept) == sum(len(one.linears) for one in sensitivities):
            raise DeploymentError(
                f"--kl-budget {request.kl_budget:g}: every layer loses more; nothing is left to quantize"
            )
        self._blueprint = make_blueprint(replace(request, keep=(*request.keep, *kept)), self._source, self._gpu)

    def _plan(self) -> None:
        plan = self._blueprint.plan

        def work(out: Path) -> str:
            (out / PLAN).write_text(json.dumps(plan.as_dict(), indent=1) + "\n")
            gpus = f"{plan.gpus_per_replica} x {plan.gpu.name}"
            return f"{plan.precision} on {gpus}, KV cache {plan.kv_cache}, batches of {plan.max_batch_size}"

        self._stages.run("plan", {"plan": plan.as_dict()}, work)

    def _quantize(self) -> Path:
        """Quantize, or take the checkpoint as it is."""
        source, blueprint = self._source, self._blueprint

        def work(out: Path) -> str:
            target = out / MODEL
            target.mkdir()
            recipe = blueprint.recipe
            if recipe.precision == "int8" and recipe.group:
                round_checkpoint(source, recipe, target, self._progress)
            elif blueprint.quantizes:
                with modelopt.quiet(out / "modelopt.log"):
                    model = modelopt.QuantizedModel(
                        source.directory, recipe, self._examples(), self._device, self._progress
                    )
                    self._progress("writing the quantized checkpoint", 0, 0)
                    model.save(target)
            if blueprint.quantizes:
                sizes = f"{_megabytes(source.size)} to {_megabytes(weight_bytes(target))}"
                return f"{sizes}, {self._shown}"
            modelopt.copy_text_files(source.directory, target)
            for file in (*source.weights, *source.directory.glob("*.json")):
                if not (target / file.name).exists():
                    link_or_copy(file, target / file.name)
            write_config(source.directory, target)
            return f"the checkpoint as it is, {_megabytes(source.size)}"

        written = {"config.json": "with both forms of the rotary embedding"}  # results of before had the newer alone
        inputs = self._inputs | written
        if blueprint.quantizes:
            inputs |= {"recipe": asdict(blueprint.recipe)}
        if blueprint.calibrates:
            inputs = self._calibrated(inputs)
        return self._stages.run("quantize", inputs, work, needed_bytes=source.size)

    def _compile(self) -> None:
        """Compile the engine with upstream's tools, where the flow has one."""
        source, blueprint = self._source, self._blueprint
        if blueprint.flow != "tensorrt":
            why = "the portable engine runs" if blueprint.flow == "portable" else "TensorRT-LLM's PyTorch flow runs"
            self._show("compile", f"nothing to do: {why} the checkpoint as it is")
            return

        def work(out: Path) -> str:
            texts = (self._tokenizer.decode(example.tokens) for example in self._examples())
            rows = "".join(json.dumps({"text": text}) + "\n" for text in texts)
            (out / "calibration").mkdir()
            (out / "calibration" / "calibration.jsonl").write_text(rows)
            if not blueprint.is_readable:
                link_files(sorted(path for path in source.directory.iterdir() if path.is_file()), out / READABLE)
                write_config(source.directory, out / READABLE)
            run_commands(blueprint.commands(out), out / "logs", lambda line: self._progress(line, 0, 0))
            size = sum(file.stat().st_size for file in (out / ENGINE).iterdir())
            return f"{_megabytes(size)} for compute capability {self._gpu.compute_capability}"

        draft, adapters = blueprint.deployment.speculation.draft_model, blueprint.deployment.tensorrt_llm.lora.values()
        inputs = {
            "commands": [str(command) for command in blueprint.commands(Path("OUTPUT"))],
            "machine": asdict(self._machine) | {"versions": self._machine.versions.model_dump()},
            "drafts and adapters": [
                {name: record.sha256 for name, record in record_files(path).items()}
                for path in (*([draft] if draft else []), *adapters)
            ],
        }
        self._stages.run("compile", self._calibrated(inputs), work, needed_bytes=2 * source.size)

    def _verify(self, quantized: Path) -> list[Check]:
        """Measure the quantized checkpoint beside the original, on the portable engine, and hold it to the thresholds.

        Raises:
            DeploymentError: what falls short, the layers that cost most, and where the report is.
        """
        if not self._blueprint.quantizes:
            self._show("verify", "nothing to do: nothing was quantized")
            return []
        model, recipe = quantized / MODEL, self._blueprint.recipe
        sizes = {"original": self._source.size, "quantized": weight_bytes(model)}
        verifier = Verifier(
            self._source.directory,
            model,
            self._blueprint.deployment,
            self._tokenizer,
            self._held_out,
            self._data.recall_prompts,
            self._data.max_length,
            self._device,
            self._stages,
            self._progress,
            {"command": self._request.command, "precision": recipe.precision, "bytes": sizes},
        )
        measured = verifier.measure()
        checks = check(measured.quality, measured.errors, self._blueprint.deployment.quality)
        short = shortfalls(checks)
        for line in [*short, self._blueprint.remedy] if short else ():
            self._show("verify", line)
        wanted = self._request.layer_costs or bool(short)
        costs = verifier.layer_costs() if wanted or verifier.knows_costs else {}
        for line in dearest(measured.errors, costs):
            self._show("costs", line)
        page = quality_page(
            f"{self._source.name} in {recipe.precision}",
            {
                "held-out data": self._held_out.describe(),
                "calibration data": self._shown,
                "KV cache": self._blueprint.plan.kv_cache,
                "kept in 16 bit": ", ".join(recipe.keep) or "embedding, norms and lm_head alone",
                "computed in": f"{self._blueprint.deployment.engine.dtype}, by the portable engine",
            },
            {"original": sizes["original"], recipe.precision: sizes["quantized"]},
            measured,
            checks,
            costs,
        )
        (measured.directory / PAGE).write_text(page, encoding="utf-8")
        if short:
            raise DeploymentError(
                f"the quantized checkpoint falls short: {'; '.join(short)}. {self._blueprint.remedy}. The report: "
                f"{measured.directory / PAGE}"
            )
        return checks

    def _manifest(self, checks: list[Check]) -> Manifest:
        """Return what was built, but for the files."""
        blueprint, plan = self._blueprint, self._blueprint.plan
        results = [self._stages.results.get(stage) for stage in ("plan", "quantize", "compile", "verify", "costs")]
        return Manifest(
            created=datetime.now(UTC).replace(microsecond=0),
            command=self._request.command,
            engine=blueprint.engine,
            flow=blueprint.flow,
            model=self._source.name,
            precision=plan.precision,
            inputs=Inputs(
                checkpoint=digest(self._inputs["checkpoint"]),
                calibration=self._calibration.sha256 if blueprint.calibrates else None,
                settings=digest([blueprint.settings, [result and result.name for result in results]]),
            ),
            versions=self._machine.versions,
            gpu=self._gpu.name,
            compute_capability=self._gpu.capability if blueprint.flow == "tensorrt" else None,
            gpu_count=0 if self._gpu.is_cpu else plan.gpus_per_replica,
            plan=plan.as_dict(),
            quality={one.name: one.value for one in checks if one.value is not None},
        )

    @property
    def _shown(self) -> str:
        """The data that the model was shown to find its scales, in words."""
        if not self._blueprint.calibrates:
            return "not calibrated: weights alone are rounded"
        return f"calibrated with {self._calibration.describe()}"

    def _examples(self) -> list[Example]:
        return self._calibration.examples(self._tokenizer, self._data.calibration_length)

    def _calibrated(self, more: dict[str, Any]) -> dict[str, Any]:
        """Return the inputs of a stage that uses the calibration data."""
        own = {
            "calibration": self._calibration.sha256,
            "length": self._data.calibration_length,
            "rows": "joined",
            "computed on": [self._device, self._device != "cpu" or modelopt.has_bfloat16()],
            "modelopt": self._machine.versions.modelopt,
        }
        return self._inputs | own | more


def known_cpu(request: BuildRequest) -> Gpu | None:
    """Return what an earlier build measured of this machine for the same engine, if one did."""
    measured = Stages(request.work, lambda *_: None).directory("machine", _machine_inputs(request)) / _MACHINE
    return Gpu.model_validate_json(measured.read_text()) if measured.is_file() else None


def measure_for(request: BuildRequest, progress: Progress) -> Gpu:
    """Measure this machine as the engine of a build's deployment will compute on it."""
    engine = own_engine(request)
    return measure_cpu(engine.cpu_step, engine.threads, progress)


def _machine_inputs(request: BuildRequest) -> dict[str, Any]:
    """Return what tells this machine, and how the engine computes on it, from another."""
    engine, memory = own_engine(request), round(psutil.virtual_memory().total / 2**30)
    step = native_step(engine.cpu_step)
    threads = engine.threads or cpu_threads(native=step is not None)
    return {"cpu": cpu_model(), "threads": threads, "GiB": memory, "kernels": step}


def weight_bytes(directory: Path) -> int:
    """Return the bytes of a checkpoint's safetensors files."""
    return sum(file.stat().st_size for file in directory.glob("*.safetensors"))


def _device(name: str) -> str:
    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda" and not torch.cuda.is_available():
        raise DeploymentError("--device cuda: PyTorch finds no CUDA device")
    return name


def _megabytes(size: int) -> str:
    return f"{size / 1e6:,.2f} MB"
