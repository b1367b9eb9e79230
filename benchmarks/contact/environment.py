"""The machine, its versions and its tools; and whether all packages are there."""

from __future__ import annotations

import importlib
import os
import platform
import shutil
import subprocess
from importlib import metadata
from pathlib import Path

from benchmarks.contact.stage import Contact

PACKAGES = (
    "torch",
    "triton",
    "transformers",
    "numpy",
    "pydantic",
    "tokenizers",
    "safetensors",
    "pytest",
    "pytest-xdist",
)
MODULES = (
    "inflight.engine.engine",
    "inflight.settings.deployment",
    "inflight.engine.attention.triton_backend",
    "inflight.engine.cuda.forward",
    "inflight.engine.cuda.fp8",
    "inflight.engine.cuda.invariant",
    "benchmarks.contact.kernels",
    "benchmarks.contact.ceilings",
    "benchmarks.contact.loads",
    "benchmarks.contact.profiles",
    "benchmarks.contact.sweeps",
    "tests.engine.support.checkpoints",
    "tests.engine.support.driving",
)
"""What the stages and the tests import."""
_TOOLS = ("nvidia-smi", "ncu", "compute-sanitizer", "ptxas", "nvcc")
_SMI = "name,driver_version,memory.total,clocks.max.sm,clocks.max.mem,power.limit,mig.mode.current"
_GIB = 2**30


def environment(contact: Contact, _case: str) -> None:
    """Write what the machine is."""
    add = contact.recorder.add
    add("Python", platform.python_version(), note=platform.platform())
    for name in PACKAGES:
        add(name, _version(name), detail=name not in ("torch", "triton", "transformers"))
    add("cores", len(os.sched_getaffinity(0)), note=f"{_memory_gib():.0f} GiB of memory")
    add("free disk", round(shutil.disk_usage(contact.folder).free / _GIB, 1), "GiB")
    for tool in _TOOLS:
        add(tool, "yes" if shutil.which(tool) else "no", detail=tool not in ("ncu", "compute-sanitizer"))
    if shutil.which("nvidia-smi"):
        add("nvidia-smi", _told("nvidia-smi", f"--query-gpu={_SMI}", "--format=csv,noheader"))
    with contact.recorder.attempt("GPU"):
        _gpu(contact)


def _gpu(contact: Contact) -> None:
    import torch

    add = contact.recorder.add
    # A graph that is freed then clears the cuBLAS workspace of the stream it was captured on, which others may hold.
    headers = (Path(torch.__file__).parent / "include" / "ATen" / "cuda").glob("*.h")
    clears = any("clearCublasWorkspacesForStream" in header.read_text(errors="ignore") for header in headers)
    add("a freed graph clears its stream's workspace", "yes" if clears else "no")
    if contact.dry:
        return
    device = contact.device
    free, total = torch.cuda.mem_get_info(device)
    found = torch.cuda.get_device_properties(device)
    capability = f"{found.major}.{found.minor}"
    note = f"{found.multi_processor_count} multiprocessors, {free / _GIB:.1f} of {total / _GIB:.1f} GiB free"
    add("GPU", found.name, f"compute capability {capability}", note=note)


def imports(contact: Contact, _case: str) -> None:
    """Import all that the stages need."""
    for name in MODULES:
        with contact.recorder.attempt(name):
            importlib.import_module(name)
            contact.recorder.add(name, "yes", detail=True)
    contact.recorder.add("modules imported", len(MODULES) - contact.recorder.failures)


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "missing"


def _memory_gib() -> float:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / _GIB


def _told(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=15, check=False)
    return (done.stdout or done.stderr).strip()[:300]
