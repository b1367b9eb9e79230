"""Attention with other tiles, warps and stages than it chooses, and PyTorch's own; what is faster is for next time."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import product
from typing import Any
from unittest import mock

import torch

from benchmarks.contact.kernels import REAL, SMALL, Scale
from benchmarks.contact.stage import Contact
from benchmarks.contact.steps import BLOCK_SIZE, AttentionStep
from benchmarks.contact.timing import graph_seconds_of
from inflight.engine.attention import plan, triton_kernels

_KEYS, _ROWS, _WARPS, _STAGES = (32, 64, 128), (64, 128), (4, 8), (2, 3, 4)
_SHOWN = 3


def attention(contact: Contact, _case: str) -> None:
    """Sweep decoding and prefill, and measure ``varlen_attn`` where PyTorch has it."""
    scale = SMALL if contact.dry else REAL
    for name, lengths, rows in (
        ("decode", scale.decode, (None,)),
        ("one long", scale.long, (None,)),
        ("chunks", scale.chunks, _ROWS),
        ("late chunk", scale.late_chunk, _ROWS),
    ):
        with contact.recorder.attempt(name):
            step = AttentionStep.make(scale.shape, lengths, "", scale.dtype, contact.device)
            _sweep(contact, name, step, rows[:1] if contact.dry else rows)
    with contact.recorder.attempt("varlen_attn"):
        _varlen(contact, scale)


def _sweep(contact: Contact, name: str, step: AttentionStep, tiles: tuple[int | None, ...]) -> None:
    chosen = graph_seconds_of(contact, step.planned())
    contact.recorder.add(f"{name}, as chosen", round(1e6 * chosen, 1), "us")
    found = []
    for keys, rows, warps, stages in product(_KEYS, tiles, _WARPS, _STAGES):
        label = f"KEYS {keys}, ROWS {rows or 'chosen'}, {warps} warps, {stages} stages"
        try:
            with _chosen(keys, rows, warps, stages):
                micros = 1e6 * graph_seconds_of(contact, step.planned())
        except Exception as error:  # what does not fit into the device's memory is no finding
            contact.recorder.add(f"{name}, {label}", "refused", note=str(error).partition("\n")[0][:80], detail=True)
            continue
        found.append((micros, label))
        contact.recorder.add(f"{name}, {label}", round(micros, 1), "us", detail=True)
        if contact.dry:
            break
    for place, (micros, label) in enumerate(sorted(found)[:_SHOWN]):
        contact.recorder.add(f"{name}, best {place + 1}", round(micros, 1), "us", note=label)


class _Kernel:
    """A kernel that is launched with other settings than it is asked to."""

    def __init__(self, kernel: Any, settings: dict[str, int]) -> None:
        self._kernel, self._settings = kernel, settings

    def __getitem__(self, grid: Any) -> Any:
        return lambda *args, **given: self._kernel[grid](*args, **(given | self._settings))


@contextmanager
def _chosen(keys: int, rows: int | None, warps: int, stages: int) -> Iterator[None]:
    settings, long_tile = {"num_warps": warps, "num_stages": stages}, plan.long_tile
    kernel = _Kernel(triton_kernels._attend_kernel, settings)
    with (
        mock.patch.object(plan, "_keys", return_value=keys),
        mock.patch.object(triton_kernels, "_attend_kernel", kernel),
        mock.patch.object(plan, "long_tile", lambda *of: replace(long_tile(*of), rows=rows or long_tile(*of).rows)),
    ):
        yield


def _varlen(contact: Contact, scale: Scale) -> None:
    """PyTorch's attention over pages, if this PyTorch has it (2.13 does), for the chunks of a step."""
    try:
        varlen = importlib.import_module("torch.nn.attention.varlen").varlen_attn
    except (ImportError, AttributeError):
        contact.recorder.add("varlen_attn", "not in this PyTorch")
        return
    if contact.dry:
        contact.recorder.add("varlen_attn", "not on a CPU")
        return
    step = AttentionStep.make(scale.shape, scale.chunks, "", scale.dtype, contact.device)
    counts = (
        torch.tensor([0, *(query_range.count for query_range in step.ranges)], device=contact.device).cumsum(0).int()
    )
    longest = max(query_range.count for query_range in step.ranges)

    known = inspect.signature(varlen).parameters  # they differ between versions
    wanted = {"window_size": (-1, 0), "is_causal": True, "enable_gqa": True}
    settings = {name: value for name, value in wanted.items() if name in known}

    def attend() -> object:
        return varlen(step.query, step.key, step.value, counts, counts, longest, longest, **settings)

    note = f"the chunks' own keys, no pages of {BLOCK_SIZE}"
    contact.recorder.add("varlen_attn, chunks", round(1e6 * graph_seconds_of(contact, attend), 1), "us", note=note)
