"""What a first contact with a GPU goes through: three calls of at most ten minutes, each a list of stages.

A stage is a process of its own, or one for each of its cases, with a time-out.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass

CALL_S = 570
"""Of one call: a machine that is lent takes commands of ten minutes."""


@dataclass(frozen=True)
class Stage:
    """One part of a call."""

    name: str
    seconds: int
    """Time-out, of each of its processes."""
    settles: str
    """What is known afterwards."""
    does: str = ""
    """What ``contact.stage`` runs; empty: what is called as the stage."""
    cases: tuple[str, ...] = ()
    """Each has a process of its own; none: the stage is one."""
    at_once: int = 1
    """Processes side by side."""
    within: tuple[str, ...] = ()
    """A program that the process runs under, and its arguments; where there is none, the stage is skipped."""
    command: tuple[str, ...] = ()
    """The program that runs in place of ``contact.stage``."""
    judges: bool = False
    """Whether the stages after it do without our kernels, where this one finds one wrong."""

    def program(self, case: str) -> list[str]:
        """Return what to run for a case; empty: the whole stage."""
        mine = self.command or (sys.executable, "-m", "benchmarks.contact.stage", self.does or self.name)
        return [*self.within, *mine, *filter(None, [case])]


KERNELS = (
    "store",
    "decode",
    "decode, one long",
    "decode, FP8 cache",
    "decode, INT8 cache",
    "chunks",
    "chunk, long context",
    "mixed",
    "split and chunk",
    "between products",
    "FP8 products",
    "sampling",
)
"""Cases of ``contact.kernels``, in the order of who needs whom."""
_FIRST = ("decode", "chunks", "between products")

A = (
    Stage("environment", 40, "the machine, the versions, and which tools can be used"),
    Stage("imports", 60, "whether all packages are there"),
    Stage("kernels", 120, "which kernels are wrong, each alone", cases=KERNELS, at_once=4, judges=True),
    Stage(
        "sanitizer", 60, "whether a kernel touches memory that is not its own", "small kernels",
        within=("compute-sanitizer", "--tool", "memcheck", "--error-exitcode", "9"),
    ),
    Stage("ceilings", 100, "what copies, reads and matrix products reach: no step can be faster"),
    Stage("rows", 40, "whether a row of a product depends on how many rows there are"),
    Stage("invariant rows", 60, "the same of the products of engine.batch_invariant, and what they cost"),
    Stage("tests", 240, "the verdict of tests/gpu"),
)  # fmt: skip
B = (
    Stage("check", 60, "whether the engine can use its kernels", "kernels", cases=_FIRST, at_once=3, judges=True),
    Stage("engine", 240, "the start, the memory, decoding and prefill in bfloat16"),
    Stage("modes", 70, "what graphs and steps ahead are worth"),
    Stage("batch invariance", 50, "what engine.batch_invariant costs"),
    Stage("profile", 70, "which kernels, and which part of the host, take the time"),
    Stage("sampling", 50, "what a temperature costs"),
    Stage("deployment", 50, "throughput with the defaults of a deployment"),
    Stage("arrivals", 50, "times between tokens while others' prompts come"),
)
C = (
    Stage("check", 60, "whether the engine can use its kernels", "kernels", cases=_FIRST, at_once=3, judges=True),
    Stage("FP8", 120, "what an FP8 checkpoint is worth"),
    Stage("expert products", 60, "whether experts by kernels are right, and what bounds them"),
    Stage("experts", 110, "what a model with experts decodes, by our kernels and by PyTorch alone"),
    Stage("attention", 150, "which tiles, warps and stages suit attention, and what PyTorch's own takes"),
    Stage(
        "counters", 60, "what bounds attention, rotating and storing, by the hardware's counters", "counted kernels",
        within=("ncu", "--clock-control", "none", "--set", "basic", "--kernel-name", "regex:attend|combine|store"),
    ),
    Stage("transformers", 90, "the same work by transformers' continuous batching; it may fail"),
)  # fmt: skip
CALLS = {"A": A, "B": B, "C": C}
