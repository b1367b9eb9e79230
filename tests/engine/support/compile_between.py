"""Compiles what lies between a model's matrix products for GPUs that are not there, at the sizes of a model of 8B.

Run as a program, since a process either interprets kernels or compiles them. Its arguments are compute capabilities, as
90 for 9.0. Prints a line of JSON for each kernel.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from tests.engine.support.compile_kernels import Absent  # first: it has kernels compiled rather than interpreted  # isort: skip

import torch
import triton
from triton.runtime import JITFunction, driver

from inflight.engine.attention.store import HeadNorms, Turn, rotate_and_store, store
from inflight.engine.cuda import elementwise, fp8
from inflight.engine.cuda.elementwise import Residual
from inflight.engine.kvcache.memory_pool import StoredKv
from inflight.engine.models.layers import RmsNorm

_HEADS, _KV_HEADS, _DIM, _HIDDEN, _INNER = 32, 8, 128, 4096, 14_336
_ACCESS = re.compile(r"(ld|st)\.global[\w.:]*?(?:\.v(\d))?\.[bufs](\d+)\b")


def main(capabilities: list[int]) -> None:
    launch, told = JITFunction.run, dict[str, Any]()

    def compile_only(self: Any, *args: Any, **settings: Any) -> Any:
        made = launch(self, *args, **(settings | {"warmup": True}))
        print(json.dumps({"kernel": self.__name__, **told, **measured(made)}))
        return made

    JITFunction.run = compile_only
    for capability in capabilities:
        driver.set_active(Absent(capability))
        told.update(capability=capability, triton=triton.__version__)
        has_fp8 = capability >= 89
        for cache in (torch.bfloat16, torch.int8, torch.float8_e4m3fn)[: 3 if has_fp8 else 2]:
            told["stored"] = str(cache).removeprefix("torch.")
            _stored(cache)
        for scale in (None, torch.ones(()))[: 2 if has_fp8 else 1]:
            told["stored"] = "bfloat16" if scale is None else "float8_e4m3fn"
            _between(scale)


def _stored(cache: torch.dtype) -> None:
    keys = torch.zeros(_KV_HEADS, 64, _DIM, dtype=cache)
    scales = torch.ones(_KV_HEADS, 64, dtype=torch.bfloat16 if cache == torch.int8 else torch.float32)
    stored, slots = StoredKv(keys, keys, scales, scales), torch.zeros(4, dtype=torch.int32)
    heads, table = (torch.zeros(4, *size, _DIM, dtype=torch.bfloat16) for size in ([_HEADS + 2 * _KV_HEADS], []))
    for norms in (HeadNorms(), HeadNorms(table[0], table[0], 1e-6, form=1)):
        rotate_and_store(heads, Turn((table, slots)), slots, stored, norms)
    store(heads[:, :_KV_HEADS], heads[:, :_KV_HEADS], slots, stored)


def _between(scale: torch.Tensor | None) -> None:
    x, norm = torch.zeros(4, _HIDDEN, dtype=torch.bfloat16), RmsNorm(_HIDDEN, 1e-5).to(torch.bfloat16)
    for stream in (x, Residual(x, x, None), Residual(x, x, norm.weight)):
        elementwise.FusedRmsNorm(norm, scale)(stream)
        elementwise.FusedSum(norm, scale)(stream)
    elementwise.gate(torch.zeros(4, 2 * _INNER, dtype=torch.bfloat16), False, scale)
    if scale is not None:
        fp8.quantize(x, scale)


def measured(made: Any) -> dict[str, Any]:
    """Return what the compiler and the assembler made of a kernel: divisions, bytes of its accesses, registers."""
    ptx: str = made.asm["ptx"]
    sizes: dict[str, list[int]] = {"ld": [], "st": []}
    for kind, count, bits in _ACCESS.findall(ptx):
        sizes[kind].append(int(count or 1) * int(bits) // 8)
    program = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(made.asm["cubin"])
        file.flush()
        usage = subprocess.run([program, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    found = dict(re.findall(r"\b(REG|LOCAL|STACK):(\d+)", usage))
    return {
        "inexact_divisions": ptx.count("div.full"),
        "ieee_divisions": ptx.count("div.rn"),
        "loads": sorted(sizes["ld"]),
        "stores": sorted(sizes["st"]),
        "registers": int(found["REG"]),
        "spilled": int(found["LOCAL"]) + int(found["STACK"]),
        "shared": made.metadata.shared,
        "warps": made.metadata.num_warps,
    }


if __name__ == "__main__":
    main([int(capability) for capability in sys.argv[1:]])
