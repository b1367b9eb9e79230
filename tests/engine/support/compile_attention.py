"""Compiles attention for GPUs that are not there, at the sizes of a model of 8B, by every tile that there is.

The kernels that deal its work out and combine its parts are compiled once for each GPU.

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

from tests.engine.support.compile_between import measured  # first: it has kernels compiled rather than interpreted  # isort: skip

import torch
import triton
from triton.runtime import JITFunction, driver

from inflight.engine.attention import triton_kernels
from inflight.engine.attention.plan import Card, Tile, common_tile, long_tile, plan, short_tile
from inflight.engine.kvcache.memory_pool import StoredKv
from tests.engine.support.compile_kernels import Absent

_KV_HEADS, _GROUP, _DIM = 8, 4, 128
_MULTIPLIES = {"wgmma": r"\bHGMMA", "mma": r"\bHMMA", "tcgen05": r"\bUTC\w*MMA"}


def main(capabilities: list[int]) -> None:
    launch, told = JITFunction.run, dict[str, Any]()
    once: set[tuple[int, str]] = set()

    def compile_only(self: Any, *args: Any, **settings: Any) -> Any:
        # From tile to tile, the kernels beside attention differ in nothing but what they count by.
        attends = self.__name__ == "_attend_kernel"
        if not attends and (told["capability"], self.__name__) in once:
            return None
        once.add((told["capability"], self.__name__))
        made = launch(self, *args, **(settings | {"warmup": True}))
        print(json.dumps({"kernel": self.__name__, **told, **measured(made), **(multiplied(made) if attends else {})}))
        return made

    JITFunction.run = compile_only
    for capability in capabilities:
        driver.set_active(Absent(capability))
        card = Card(capability, 132)
        for dtype, cache in (
            (torch.bfloat16, torch.bfloat16),
            (torch.bfloat16, torch.int8),
            *([(torch.bfloat16, torch.float8_e4m3fn)] if capability >= 89 else []),
            (torch.float32, torch.float32),
        ):
            told.update(capability=capability, dtype=str(dtype), stored=str(cache).removeprefix("torch."))
            short = ("short", short_tile(dtype, _DIM, _GROUP), 1, 9)
            long = ("long", long_tile(card, dtype, _DIM, _GROUP), 100, 0)
            common = ("common", common_tile(dtype, _DIM, _GROUP), 100, 9)
            for role, tile, longest, slots in (short, long, common)[: 3 if dtype == cache == torch.bfloat16 else 2]:
                told["role"] = role
                _attend(dtype, cache, tile, longest, slots)


def _attend(dtype: torch.dtype, cache: torch.dtype, tile: Tile, longest: int, slots: int) -> None:
    keys = torch.zeros(_KV_HEADS, 64, _DIM, dtype=cache)
    scales = torch.ones(_KV_HEADS, 64, dtype=torch.bfloat16 if cache == torch.int8 else torch.float32)
    query = torch.zeros(4, _KV_HEADS * _GROUP, _DIM, dtype=dtype)
    ranges, members = torch.zeros(2, 8, dtype=torch.int32), torch.zeros(2, dtype=torch.int32)
    dealt = plan(ranges, members, longest, tile, _GROUP, None, 30, slots)
    triton_kernels.attend(query, StoredKv(keys, keys, scales, scales), torch.empty_like(query), ranges, dealt, 16, 1.0)


def multiplied(made: Any) -> dict[str, int]:
    """Return how many instructions of tensor cores there are in a kernel's machine code."""
    program = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "nvdisasm"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(made.asm["cubin"])
        file.flush()
        # Its code alone: the rest is several times as much.
        code = subprocess.run([program, "-c", "-ndf", file.name], capture_output=True, text=True, check=True).stdout
    return {name: len(re.findall(pattern, code)) for name, pattern in _MULTIPLIES.items()}


if __name__ == "__main__":
    main([int(capability) for capability in sys.argv[1:]])
