"""What a step launches on a GPU that is not there: its kernels are compiled for one, counted, and never run.

``python -m benchmarks.contact.launches OUTPUT`` writes JSON: of each kind of step the launches of a layer and of
what comes once, and of each kernel of our own its programs, and the registers and memory that the assembler gave it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

os.environ["TRITON_INTERPRET"] = "0"

import torch
import triton
from torch.utils._python_dispatch import TorchDispatchMode
from triton.backends.compiler import GPUTarget
from triton.runtime import JITFunction, driver

from benchmarks.checkpoints import VOCAB, Shape
from benchmarks.contact.sizes import FULL, LARGE
from benchmarks.random_weights import RandomShards, write_config
from inflight.engine.attention import plan
from inflight.engine.attention.torch_backend import QueryRange
from inflight.engine.attention.triton_backend import StepLayout
from inflight.engine.checkpoint import load_config, load_model, outline_model
from inflight.engine.cuda.forward import CudaForward
from inflight.engine.cuda.fp8 import use_scaled_mm
from inflight.engine.cuda.layers import fuse_layers
from inflight.engine.transfer import TokenIds
from inflight.report.provenance import provenance

CPU = torch.device("cpu")
CAPABILITY = 90
_PROCESSORS = 132
_BLOCK_SIZE = 16
_POOL_TOKENS = 65_536
_SERVED_LENGTH = 33_024
_MAX_BATCH = 256
_NO_KERNEL = {
    "alias", "as_strided", "chunk", "detach", "empty", "empty_like", "empty_strided", "expand", "new_empty",
    "permute", "reshape", "_reshape_alias", "select", "slice", "split", "split_with_sizes", "squeeze", "t", "transpose",
    "unbind", "unsqueeze", "_unsafe_view", "view", "lift_fresh", "_to_copy_view",
}  # fmt: skip
"""Operators of PyTorch that only look at a tensor in another way, or take memory."""


@dataclass(frozen=True)
class Kernel:
    """One of our own, as it was compiled."""

    name: str
    programs: int
    """The programs of one launch."""
    warps: int
    registers: int
    """The registers of a thread."""
    spilled_bytes: int
    shared_bytes: int

    @property
    def resident(self) -> int:
        """Programs that a multiprocessor of compute capability 9.0 holds at once (CUDA C++ programming guide)."""
        threads = 32 * self.warps
        registers = threads * -(-max(self.registers, 1) // 8) * 8
        by_shared = 228 * 1024 // (self.shared_bytes + 1024)
        return max(1, min(32, 2048 // threads, 65_536 // registers, by_shared))


@dataclass(frozen=True)
class Step:
    """What one kind of step launches."""

    name: str
    per_layer: dict[str, int]
    """Launches by kernel: ours by their names, PyTorch's by their operators'."""
    once: dict[str, int]
    """What does not grow with the layers; the head and sampling come on top."""
    kernels: list[Kernel]


class _Absent:
    """In place of Triton's driver: says which GPU is to be compiled for."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", CAPABILITY, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


class _Counting(TorchDispatchMode):
    """Counts the operators of PyTorch that launch a kernel; products are not computed."""

    def __init__(self, counts: Counter[str]) -> None:
        super().__init__()
        self._counts = counts

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = function.overloadpacket.__name__
        if name not in _NO_KERNEL:
            self._counts[name] += 1
        if name == "linear":
            return args[0].new_empty(*args[0].shape[:-1], len(args[1]))
        if name == "_scaled_mm":
            return args[0].new_empty(len(args[0]), args[1].shape[1], dtype=torch.bfloat16)
        return function(*args, **(kwargs or {}))


def steps(shape: Shape = LARGE) -> list[Step]:
    """Return what the kinds of steps of a model of this shape launch; its layers are as large as they are there."""
    driver.set_active(_Absent())
    found, in_fp8 = _Models(shape, fp8=False), _Models(shape, fp8=True)
    return [
        *(found.step(f"decode {batch.name}", _decode(batch.streams, batch.context)) for batch in FULL.batches),
        found.step("mixed 8 x 512 + 100", _mixed(8, 576, 100)),
        found.step(f"prefill {FULL.prefill}", _mixed(0, 0, FULL.prefill)),
        *(in_fp8.step(f"decode {one.name}, FP8", _decode(one.streams, one.context)) for one in FULL.fp8_batches),
    ]


def _decode(count: int, context: int) -> list[QueryRange]:
    width = -(-context // _BLOCK_SIZE)
    most = _POOL_TOKENS // _BLOCK_SIZE
    return [
        QueryRange(row, context - 1, 1, [(row * width + block) % most for block in range(width)])
        for row in range(count)
    ]


def _mixed(decoding: int, context: int, chunk: int) -> list[QueryRange]:
    blocks = list(range(-(-chunk // _BLOCK_SIZE)))
    return [*_decode(decoding, context), QueryRange(decoding, 0, chunk, blocks)]


class _Models:
    """Models of one layer and of two: what the second has more is what a layer launches."""

    def __init__(self, shape: Shape, fp8: bool) -> None:
        self._forwards = [_forward(replace(shape, layers=layers, vocab=VOCAB), fp8) for layers in (1, 2)]

    @torch.inference_mode()
    def step(self, name: str, ranges: Sequence[QueryRange]) -> Step:
        """Return what a step of these query ranges launches."""
        kernels: dict[str, Kernel] = {}
        first, second = (_launched(forward, ranges, kernels) for forward in self._forwards)
        layer = {kernel: second[kernel] - first[kernel] for kernel in sorted(second)}
        once = {kernel: first[kernel] - layer[kernel] for kernel in sorted(first)}
        ours = sorted(kernels.values(), key=lambda kernel: kernel.name)
        return Step(name, _some(layer), _some(once), ours)


def _some(counts: dict[str, int]) -> dict[str, int]:
    return {name: count for name, count in counts.items() if count}


def _forward(shape: Shape, fp8: bool) -> CudaForward:
    with tempfile.TemporaryDirectory() as folder:
        directory = write_config(shape, Path(folder), fp8)
        config, shards = load_config(directory), RandomShards(shape, fp8, CPU)
        outline = outline_model(
            directory, config, torch.bfloat16, CPU, _SERVED_LENGTH, "auto", open_shards=lambda _: shards
        )
        loaded = load_model(outline, CPU)
    if fp8:
        use_scaled_mm(loaded.model)
    fuse_layers(loaded.model)
    tensors = loaded.make_kv_pool(_POOL_TOKENS // _BLOCK_SIZE, _BLOCK_SIZE)
    return CudaForward(loaded.model, tensors, _BLOCK_SIZE, _MAX_BATCH, _SERVED_LENGTH)


def _launched(forward: CudaForward, ranges: Sequence[QueryRange], kernels: dict[str, Kernel]) -> Counter[str]:
    counts: Counter[str] = Counter()
    tokens, layout = StepLayout.of(TokenIds([1] * (ranges[-1].first + ranges[-1].count)), ranges, forward.tables)
    card = mock.patch.object(plan, "card_of", return_value=plan.Card(CAPABILITY, _PROCESSORS))
    with card, _compiled_only(counts, kernels), _Counting(counts):
        forward.run(tokens, layout)
    return counts


@contextmanager
def _compiled_only(counts: Counter[str], kernels: dict[str, Kernel]) -> Iterator[None]:
    """Have kernels in the Triton language compiled and noted in place of launched."""
    launch = JITFunction.run

    def note(self: Any, *args: Any, grid: Any, **settings: Any) -> Any:
        made = launch(self, *args, grid=grid, **(settings | {"warmup": True}))
        name = self.__name__.strip("_").removesuffix("_kernel")
        counts[name] += 1
        programs = 1
        for size in grid(settings) if callable(grid) else grid:
            programs *= int(size)
        if name not in kernels or programs > kernels[name].programs:
            kernels[name] = _compiled(name, programs, made)
        return made

    JITFunction.run = note
    try:
        yield
    finally:
        JITFunction.run = launch


def _compiled(name: str, programs: int, made: Any) -> Kernel:
    program = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(made.asm["cubin"])
        file.flush()
        told = subprocess.run([program, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    found = dict(word.split(":")[:2] for word in told.split() if ":" in word and word.split(":")[1].isdigit())
    metadata = made.metadata
    return Kernel(name, programs, metadata.num_warps, int(found["REG"]), int(found["LOCAL"]), metadata.shared)


def main(output: Path) -> None:
    """Write to ``output`` what steps launch."""
    output.parent.mkdir(parents=True, exist_ok=True)
    record = {"command": "make gpu-predictions", **provenance(), "steps": [asdict(step) for step in steps()]}
    output.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
