"""A build: plan, quantize, compile, verify, write. Each stage finds what an earlier run has finished."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from inflight.errors import DeploymentError
from inflight.export.build import steps
from inflight.export.build.blueprint import draw
from inflight.export.build.request import BuildRequest
from inflight.export.build.write import Parts, require_replaceable, write_deployment
from inflight.export.checkpoint import fingerprint, inspect
from inflight.export.compile.run import require_tools
from inflight.export.data import DEFAULT_DESCRIPTION, DataSet
from inflight.export.interpreters import detect_machine
from inflight.export.plan.detect import cpu_threads
from inflight.export.plan.gpus import CPU, Gpu, find_gpu
from inflight.export.progress import Progress
from inflight.export.quantize.sensitivity import choose_kept, read_sensitivities
from inflight.export.stages import Stages, require_writable
from inflight.manifest import record_files
from inflight.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class Built:
    """Where the deployment is, and which stages ran."""

    directory: Path
    ran: tuple[str, ...]


class Build:
    """One build; ``run`` carries it out."""

    def __init__(self, request: BuildRequest, show: Callable[[str, str], object], progress: Progress) -> None:
        """
        Args:
            request: what is asked for.
            show: told each stage's name and one line about it.
            progress: told how far a stage is.

        Raises:
            DeploymentError: it cannot be built, by name; nothing has run yet.
        """
        self._show, self._progress = show, progress
        torch.set_num_threads(cpu_threads())  # a thread that waits for a busy core would stall every layer
        self._stages = Stages(request.work, show)
        self._source = inspect(request.model)
        self._source.require_weights()
        for directory in (request.work, request.output.absolute().parent):
            require_writable(directory)
        self._gpu = self._find_gpu(request.gpu)
        self._blueprint = draw(request, self._source, self._gpu)
        self._machine = detect_machine(self._blueprint.tools)
        self._require_compiler()
        require_replaceable(request.output)
        tokenizer = Tokenizer.from_checkpoint(self._source.directory)
        data = request.data
        calibration = DataSet(data.calibration, data.calibration_rows)
        held_out = DataSet(data.held_out, data.held_out_rows)
        self._materials = steps.Materials(tokenizer, calibration, held_out, data, _device(request.device))
        for reason in self._blueprint.reasons:
            show("plan", reason)
        if self._blueprint.flow == "tensorrt":
            show("plan", f"{sys.executable} quantizes and verifies; {self._blueprint.python} compiles")
        if data.is_default and self._blueprint.quantizes:
            show("plan", f"calibrating and measuring with {DEFAULT_DESCRIPTION}")

    def run(self) -> Built:
        """Run the stages that have not been run, and return the deployment.

        Raises:
            DeploymentError: a stage failed, the quality falls short, or there is no room; nothing half-made is left.
        """
        files = sorted(path for path in self._source.directory.iterdir() if path.is_file())
        known = self._blueprint.request.work / "fingerprints.json"
        versions = self._machine.versions
        self._inputs: dict[str, Any] = {
            "versions": {"inflight": versions.inflight, "torch": versions.torch},
            "checkpoint": fingerprint(files, known, self._progress),
        }
        try:
            return self._run_stages()
        except (MemoryError, torch.OutOfMemoryError):
            device = self._materials.device
            raise DeploymentError(f"out of memory on {device}; give the build more, or use --device cpu") from None

    def _run_stages(self) -> Built:
        self._choose_kept()
        planned = self._plan()
        quantized = self._quantize()
        compiled = self._compile()
        verified = self._verify(quantized)
        parts = Parts(planned, quantized, compiled, verified)
        directory, line = write_deployment(self._blueprint, parts, self._inputs, self._materials)
        self._show("write", line)
        return Built(directory, tuple(self._stages.ran))

    def _require_compiler(self) -> None:
        """Look for what will compile, before hours of work: the tools, and the GPU that the engine is for."""
        needed = steps.commands(self._blueprint, Path("OUTPUT"))
        for command in needed:
            require_tools(command)
        here = self._machine.compute_capabilities
        if needed and self._gpu.capability not in here[:1]:
            chip = ".".join(map(str, here[0])) if here else "no GPU"
            raise DeploymentError(
                f"an engine is compiled on the GPU that it is for, {self._gpu.name} ({self._gpu.compute_capability}); "
                f"here is {chip}. --flow pytorch needs no engine"
            )

    def _find_gpu(self, name: str) -> Gpu:
        """Return what to build for. A CPU is measured once: the next build must find the same figures."""
        if name != CPU:
            return find_gpu(name)
        return steps.read_machine(self._stages.run("machine", steps.machine_inputs(), steps.measure_machine))

    def _choose_kept(self) -> None:
        """With a budget: measure what each layer loses, and draw the plan again with those that hurt in 16 bit."""
        request, recipe = self._blueprint.request, self._blueprint.recipe
        if request.kl_budget is None:
            return
        inputs = self._calibrated({"recipe": asdict(recipe), "probes": steps.PROBES})
        found = self._stages.run(
            "sensitivity",
            inputs,
            lambda out: steps.measure_layers(self._blueprint, self._materials, out, self._progress),
        )
        sensitivities = read_sensitivities(found)
        kept = choose_kept(sensitivities, request.kl_budget)
        self._show("sensitivity", f"{len(kept)} linears stay in 16 bit, for a budget of {request.kl_budget:g} nats")
        if len(kept) == sum(len(one.linears) for one in sensitivities):
            raise DeploymentError(
                f"--kl-budget {request.kl_budget:g}: every layer loses more; nothing is left to quantize"
            )
        self._blueprint = draw(replace(request, keep=(*request.keep, *kept)), self._source, self._gpu)

    def _plan(self) -> Path:
        plan = self._blueprint.plan
        return self._stages.run("plan", {"plan": plan.as_dict()}, lambda out: steps.write_plan(plan, out))

    def _quantize(self) -> Path:
        blueprint = self._blueprint
        written = {"config.json": "with both forms of the rotary embedding"}  # results of before had the newer alone
        inputs = self._inputs | written
        if blueprint.quantizes:
            inputs = self._calibrated({"recipe": asdict(blueprint.recipe)} | written)
        return self._stages.run(
            "quantize",
            inputs,
            lambda out: steps.quantize(blueprint, self._materials, out, self._progress),
            needed_bytes=self._source.size,
        )

    def _compile(self) -> Path | None:
        blueprint = self._blueprint
        if blueprint.flow != "tensorrt":
            why = "the portable engine runs" if blueprint.flow == "portable" else "TensorRT-LLM's PyTorch flow runs"
            self._show("compile", f"nothing to do: {why} the checkpoint as it is")
            return None
        inputs = self._calibrated(
            {
                "commands": [str(command) for command in steps.commands(blueprint, Path("OUTPUT"))],
                "machine": asdict(self._machine) | {"versions": self._machine.versions.model_dump()},
                "drafts and adapters": [
                    {name: record.sha256 for name, record in record_files(path).items()}
                    for path in blueprint.companions
                ],
            }
        )
        return self._stages.run(
            "compile",
            inputs,
            lambda out: steps.compile_engine(blueprint, self._materials, out, self._progress),
            needed_bytes=2 * self._source.size,
        )

    def _verify(self, quantized: Path) -> Path | None:
        blueprint, materials = self._blueprint, self._materials
        if not blueprint.quantizes:
            self._show("verify", "nothing to do: nothing was quantized")
            return None
        inputs = {
            "quantized": quantized.name,
            "held out": materials.held_out.sha256,
            "recall prompts": materials.request.recall_prompts,
            "max length": materials.request.max_length,
            "dtype": blueprint.deployment.engine.dtype,
            "kv cache": blueprint.deployment.kv_cache.dtype,
        }
        measured = self._stages.run(
            "verify", inputs, lambda out: steps.verify(blueprint, materials, quantized, out, self._progress)
        )
        steps.require_quality(blueprint, materials, quantized, measured)
        return measured

    def _calibrated(self, more: dict[str, Any]) -> dict[str, Any]:
        """Return the inputs of a stage that uses the calibration data."""
        data = self._materials
        length, modelopt = data.request.calibration_length, self._machine.versions.modelopt
        own = {"calibration": data.calibration.sha256, "length": length, "modelopt": modelopt}
        return self._inputs | own | more


def known_cpu(work: Path) -> Gpu | None:
    """Return what an earlier build in ``work`` measured of this machine, if one did."""
    measured = Stages(work, lambda *_: None).directory("machine", steps.machine_inputs())
    return steps.read_machine(measured) if measured.is_dir() else None


def _device(name: str) -> str:
    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda" and not torch.cuda.is_available():
        raise DeploymentError("--device cuda: PyTorch finds no CUDA device")
    return name
