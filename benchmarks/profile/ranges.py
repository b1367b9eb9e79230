"""Names the phases of an engine's step for the profiler, from outside.

While ``named`` lasts, the functions that do a phase's work run inside a ``record_function`` of the phase's name. Before
and after, the engine is as it was: what is not profiled costs nothing and has no flags.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import wraps
from importlib.util import find_spec
from typing import Any
from unittest import mock

from torch.profiler import record_function

from inflight.engine.attention.torch_backend import TorchAttention
from inflight.engine.engine import Engine
from inflight.engine.model_runner import ModelRunner
from inflight.engine.models.decoder import DecoderModel
from inflight.engine.models.layers import Attention, GatedMlp, RmsNorm
from inflight.engine.models.rope import RotaryEmbedding
from inflight.engine.native.model import NativeModel
from inflight.engine.sampler import PendingSample
from inflight.engine.scheduler import Scheduler
from inflight.engine.speculate.speculator import Speculator

PHASES = {
    "schedule": "choosing the step's tokens, and blocks for them",
    "draft": "guessing what comes next, with speculation",
    "prepare": "token ids, positions, block tables and slots as tensors; block copies",
    "native": "the call of the native step, beside what it computes",
    "embed": "token ids to hidden states",
    "rope": "cosines and sines of the positions",
    "norm": "the norms before and after each part",
    "projections": "attention's query, key, value and output, with the rotation",
    "attention": "writing and reading the KV cache, and attending",
    "mlp": "the feed-forward parts",
    "residual": "adding the parts up, layer by layer",
    "logits": "hidden states to logits",
    "sample": "logits to tokens; on a GPU, also waiting for them",
    "finish": "booking the tokens, committing blocks, ending sequences",
    "other": "the rest of the step",
}
"""Each phase, without those that run within it."""


_DRAFT = "draft"

Target = tuple[Any, str, str]
"""A class or a module, the name of its function, and the phase that the function does the work of."""


@contextmanager
def named() -> Iterator[None]:
    """Have the phases of all engines' steps recorded by name."""
    targets = [
        (Engine, "step", "other"),
        (Scheduler, "schedule", "schedule"),
        (Speculator, "add_drafts", _DRAFT),
        (ModelRunner, "run", "prepare"),
        (NativeModel, "__call__", "native"),
        *_of_classes(DecoderModel, "embed", "embed"),
        *_of_classes(RotaryEmbedding, "__call__", "rope"),
        *_of_classes(RmsNorm, "forward", "norm"),
        (Attention, "forward", "projections"),
        (TorchAttention, "__call__", "attention"),
        (GatedMlp, "forward", "mlp"),
        (DecoderModel, "forward", "residual"),
        (DecoderModel, "logits", "logits"),
        (ModelRunner, "sample", "sample"),
        (PendingSample, "wait", "sample"),
        (Engine, "_finish", "finish"),  # the last of a step's verbs, which no public name has
        *(_of_kernels() if find_spec("triton") else ()),
    ]
    open_phases: list[str] = []
    with ExitStack() as stack:
        for owner, attribute, phase in targets:
            replacement = _recorded(vars(owner)[attribute], phase, open_phases)
            stack.enter_context(mock.patch.object(owner, attribute, replacement))
        yield


def _of_classes(base: type, attribute: str, phase: str) -> list[Target]:
    """Return a class and those of its subclasses that have a function of their own."""
    return [(kind, attribute, phase) for kind in (base, *base.__subclasses__()) if attribute in vars(kind)]


def _of_kernels() -> list[Target]:
    """Return what does the phases' work on a GPU; one kernel rotates and stores, which counts as attention."""
    from inflight.engine.attention.triton_backend import TritonAttention
    from inflight.engine.cuda import layers
    from inflight.engine.cuda.elementwise import FusedRmsNorm

    return [
        (TritonAttention, "attend", "attention"),
        (layers, "rotate_and_store", "attention"),
        (layers.RotaryTable, "__call__", "rope"),
        (FusedRmsNorm, "forward", "norm"),
        (layers.FusedAttention, "forward", "projections"),
        (layers.FusedMlp, "forward", "mlp"),
    ]


def _recorded(function: Callable[..., Any], phase: str, open_phases: list[str]) -> Callable[..., Any]:
    """Return the function within a range; what a draft model computes is all of the phase ``draft``."""

    @wraps(function)
    def call(*arguments: Any, **named_arguments: Any) -> Any:
        if _DRAFT in open_phases:
            return function(*arguments, **named_arguments)
        open_phases.append(phase)
        try:
            with record_function(phase):
                return function(*arguments, **named_arguments)
        finally:
            open_phases.pop()

    return call
