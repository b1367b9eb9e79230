"""What lies between products, compiled to machine code for five kinds of GPU: accesses, registers, divisions."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from tests.engine.support.compiling import OTHER, compiled

triton = pytest.importorskip("triton")

CAPABILITIES = (80, 86, 89, 90, 100)
_REGISTERS = 64
"""Of a thread: with so many a multiprocessor still holds half of the threads that it has room for."""
Kernels = list[dict[str, Any]]


@pytest.fixture(scope="module")
def kernels() -> Kernels:
    """Return what each kernel was compiled to."""
    return [json.loads(line) for line in compiled("compile_between", *CAPABILITIES)]


def _none(kernels: Kernels) -> None:
    assert not kernels, kernels[:3]


@pytest.mark.proof
def test_all_are_compiled_for_all(kernels: Kernels) -> None:
    version = triton.__version__
    if folder := os.environ.get(OTHER):
        (metadata,) = Path(folder).glob("triton-*.dist-info")
        version = metadata.name.removeprefix("triton-").removesuffix(".dist-info")
    assert {kernel["triton"] for kernel in kernels} == {version}
    for capability in CAPABILITIES:
        names = sorted({kernel["kernel"] for kernel in kernels if kernel["capability"] == capability})
        quantize = ["_quantize_kernel"] if capability >= 89 else []
        assert names == ["_add_rms_norm_kernel", "_gate_kernel", *quantize, "_store_kernel"]
        stored = {kernel["stored"] for kernel in kernels if kernel["capability"] == capability}
        assert stored == {"bfloat16", "int8"} | ({"float8_e4m3fn"} if capability >= 89 else set())


@pytest.mark.proof
def test_threads_load_and_store_as_much_at_once_as_they_can(kernels: Kernels) -> None:
    # Four bytes: a slot, a position, or a scale of its own. What is narrower than 16 bits is stored eight at a time;
    # two bytes are an INT8 row's scale.
    _none([kernel for kernel in kernels if set(kernel["loads"]) - {4, 16} or kernel["loads"].count(4) > 4])
    narrow = [kernel for kernel in kernels if kernel["stored"] == "bfloat16" and set(kernel["stores"]) != {16}]
    _none(narrow)
    _none([kernel for kernel in kernels if set(kernel["stores"]) - {2, 8, 16}])
    _none([kernel for kernel in kernels if kernel["stores"].count(2) != (2 if kernel["stored"] == "int8" else 0)])


@pytest.mark.proof
def test_registers_suffice(kernels: Kernels) -> None:
    _none([kernel for kernel in kernels if kernel["spilled"] or kernel["registers"] > _REGISTERS])


@pytest.mark.proof
def test_what_is_quantized_is_divided_as_ieee_says(kernels: Kernels) -> None:
    # Triton's `/` is div.full, which may be off by two last bits; the gate's are those of its sigmoid.
    _none([kernel for kernel in kernels if kernel["inexact_divisions"] and kernel["kernel"] != "_gate_kernel"])
    quantizing = [kernel for kernel in kernels if kernel["stored"] != "bfloat16"]
    assert quantizing
    _none([kernel for kernel in quantizing if not kernel["ieee_divisions"]])
