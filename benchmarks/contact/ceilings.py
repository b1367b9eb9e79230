"""What the device reaches without us: copies, reads, matrix products; and whether their rows depend on their number."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from benchmarks.checkpoints import Shape
from benchmarks.contact.stage import Contact
from benchmarks.contact.timing import graph_seconds_of, seconds_of

_SPLIT_ROWS = (1, 2, 3, 4, 8, 16, 17, 32, 64, 100, 128, 256)


def products(shape: Shape) -> dict[str, tuple[int, int]]:
    """Return the matrix products of a model of this shape: rows and columns of the weight."""
    hidden, kv = shape.hidden, shape.hidden // shape.heads * shape.kv_heads
    return {
        "qkv": (hidden + 2 * kv, hidden),
        "o": (hidden, hidden),
        "gate_up": (2 * shape.intermediate, hidden),
        "down": (hidden, shape.intermediate),
        "head": (shape.vocab, hidden),
    }


@torch.inference_mode()
def ceilings(contact: Contact, _case: str) -> None:
    """Measure bandwidth and products."""
    _bandwidth(contact)
    for rows in contact.sizes.rows:
        for name, (out, columns) in products(contact.sizes.shape).items():
            if rows > 256 and name == "head":
                continue  # only the last token of each sequence goes there
            with contact.recorder.attempt(f"bf16 {name}, {rows} rows"):
                _bf16(contact, name, rows, out, columns)
            with contact.recorder.attempt(f"FP8 {name}, {rows} rows"):
                _fp8(contact, name, rows, out, columns)


def _bandwidth(contact: Contact) -> None:
    size = contact.sizes.copy_bytes
    source = torch.ones(size // 4, dtype=torch.float32, device=contact.device)
    target = torch.empty_like(source)
    contact.recorder.add("copy", _tera(2 * size / seconds_of(contact, lambda: target.copy_(source))), "TB/s")
    contact.recorder.add("read", _tera(size / seconds_of(contact, source.sum)), "TB/s")


def _bf16(contact: Contact, name: str, rows: int, out: int, columns: int) -> None:
    weight = torch.randn(out, columns, device=contact.device).bfloat16()
    x = torch.randn(rows, columns, device=contact.device).bfloat16()
    _add(contact, f"bf16 {name}, {rows} rows", graph_seconds_of(contact, lambda: x @ weight.t()), rows, weight)


def _fp8(contact: Contact, name: str, rows: int, out: int, columns: int) -> None:
    if name == "head":
        return  # it stays in bfloat16
    one = torch.ones((), device=contact.device)
    weight = torch.randn(out, columns, device=contact.device).to(torch.float8_e4m3fn)
    x = torch.randn(rows, columns, device=contact.device).to(torch.float8_e4m3fn)
    for fast in (False, True):

        def multiply(fast: bool = fast) -> Tensor:
            return torch._scaled_mm(x, weight.t(), one, one, out_dtype=torch.bfloat16, use_fast_accum=fast)

        label = f"FP8{' fast' if fast else ''} {name}, {rows} rows"
        _add(contact, label, graph_seconds_of(contact, multiply), rows, weight)


def _add(contact: Contact, name: str, seconds: float, rows: int, weight: Tensor) -> None:
    told = f"{_tera(weight.nbytes / seconds):.2f} TB/s, {_tera(2 * rows * weight.numel() / seconds):.0f} TFLOP/s"
    brief = rows in (1, 64, 8192) and ("gate_up" in name or "head" in name)
    contact.recorder.add(name, round(1e6 * seconds, 2), "us", note=told, detail=not brief)


@torch.inference_mode()
def rows(contact: Contact, _case: str) -> None:
    """Report, for each cuBLAS product, with how many rows the first row differs from what it is alone."""
    for name, (out, columns) in products(contact.sizes.shape).items():
        with contact.recorder.attempt(name):
            weight, x = _operands(contact, out, columns, max(_SPLIT_ROWS))
            where = _differing(functools.partial(functional.linear, weight=weight), x)
            contact.recorder.add(f"{name}, first row differs", where, note=f"of {len(_SPLIT_ROWS)} numbers of rows")


@torch.inference_mode()
def invariant_rows(contact: Contact, _case: str) -> None:
    """Hold the products of ``engine.batch_invariant`` to their promise, and measure what they cost."""
    from inflight.engine.cuda.invariant import product

    if contact.refuses_batch_invariance():
        return
    for name, (out, columns) in products(contact.sizes.shape).items():
        with contact.recorder.attempt(name):
            weight, x = _operands(contact, out, columns, max(contact.sizes.rows))
            where = _differing(functools.partial(product, weight=weight), x)
            contact.recorder.add(f"{name}, first row differs", where, good=where == "never")
            for count in contact.sizes.rows:
                if count <= 256 or name != "head":
                    seconds = graph_seconds_of(contact, functools.partial(product, x[:count], weight))
                    _add(contact, f"invariant {name}, {count} rows", seconds, count, weight)


def _operands(contact: Contact, out: int, columns: int, rows: int) -> tuple[Tensor, Tensor]:
    made = (torch.randn(count, columns, device=contact.device) for count in (out, rows))
    weight, x = (one.to(torch.float32 if contact.dry else torch.bfloat16) for one in made)
    return weight, x


def _differing(multiply: Callable[[Tensor], Tensor], x: Tensor) -> str:
    """Return with how many rows the first row of a product is not what it is alone."""
    alone, counts = multiply(x[:1])[0], [count for count in _SPLIT_ROWS if count <= len(x)]
    differ = [count for count in counts if not torch.equal(multiply(x[:count])[0], alone)]
    return f"with {', '.join(map(str, differ))} rows" if differ else "never"


def _tera(value: float) -> float:
    return round(value / 1e12, 3)
