"""Compiles the products of ``engine.batch_invariant`` for GPUs that are not there, by every tile.

Run as a program, since a process either interprets kernels or compiles them. Its arguments are compute capabilities, as
90 for 9.0. Prints a line of JSON for each kernel.
"""

from __future__ import annotations

import json
import sys
from typing import Any

from tests.engine.support.compile_between import measured  # first: it has kernels compiled rather than interpreted  # isort: skip

import torch
from triton.runtime import JITFunction, driver

from inflight.engine.cuda.invariant import FEW_ROWS, MANY_ROWS, product
from tests.engine.support.compile_attention import multiplied
from tests.engine.support.compile_kernels import Absent


def main(capabilities: list[int]) -> None:
    launch = JITFunction.run

    def compile_only(self: Any, *args: Any, **settings: Any) -> Any:
        made = launch(self, *args, **(settings | {"warmup": True}))
        print(json.dumps({"kernel": self.__name__, **measured(made), **multiplied(made)}))
        return made

    JITFunction.run = compile_only
    x, weight = torch.zeros(4, 1024, dtype=torch.bfloat16), torch.zeros(2048, 1024, dtype=torch.bfloat16)
    for capability in capabilities:
        driver.set_active(Absent(capability))
        for tile in (FEW_ROWS, MANY_ROWS):
            product(x, weight, x[0], tile)


if __name__ == "__main__":
    main([int(capability) for capability in sys.argv[1:]])
