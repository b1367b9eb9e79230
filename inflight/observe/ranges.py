"""Names the phases of an engine's step for the profiler, from outside.

While ``named`` lasts, the functions that do a phase's work run inside a ``record_function`` of the phase's name. Before
and after, the engine is as it was: what is not profiled costs nothing and has no flags.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import wraps
from typing import Any

from torch import nn
from torch.profiler import record_function

from inflight.engine import ahead as ahead_module
from inflight.engine import engine as engine_module
from inflight.engine.attention.paged import PagedAttention
from inflight.engine.engine import Engine
from inflight.engine.model_runner import ModelRunner
from inflight.engine.models.layers import Attention, GatedMlp, RmsNorm
from inflight.engine.models.rope import RotaryEmbedding
from inflight.engine.sampler import Choice

PHASES = {
    "schedule": "choosing the step's tokens, and blocks for them",
    "draft": "guessing what comes next, with speculation",
    "prepare": "token ids, positions, block tables and slots as tensors; block copies",
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


@contextmanager
def named(engine: Engine, runner: ModelRunner) -> Iterator[None]:
    """Have the phases of ``engine``'s steps recorded by name; ``runner`` is its own."""
    model = runner._model
    targets: list[tuple[Any, str, str]] = [
        (engine, "step", "other"),
        (engine._scheduler, "schedule", "schedule"),
        (engine._speculator, "extend", "draft"),
        (engine._scheduler, "schedule_after", "schedule"),
        (runner, "run", "prepare"),
        (model, "embed", "embed"),
        (RotaryEmbedding, "__call__", "rope"),
        (PagedAttention, "__call__", "attention"),
        (model, "forward", "residual"),
        (model, "logits", "logits"),
        (engine_module, "choose", "sample"),
        (ahead_module, "choose", "sample"),
        (Choice, "wait", "sample"),
        (engine, "_finish", "finish"),
    ]
    for kind, phase in ((RmsNorm, "norm"), (Attention, "projections"), (GatedMlp, "mlp")):
        targets += [(module, "forward", phase) for module in model.modules() if isinstance(module, kind)]
    if runner._kernels is not None:
        targets += _kernels_of(model)
    with ExitStack() as stack:
        for owner, attribute, phase in targets:
            stack.enter_context(_replaced(owner, attribute, phase))
        yield


def _kernels_of(model: nn.Module) -> list[tuple[Any, str, str]]:
    """Return what does the phases' work on a GPU; one kernel rotates and stores, which counts as attention."""
    from inflight.engine.attention.kernel_attention import KernelAttention  # needs Triton, as the others do
    from inflight.engine.cuda import layers
    from inflight.engine.cuda.elementwise import FusedRmsNorm

    phases = ((FusedRmsNorm, "norm"), (layers.FusedAttention, "projections"), (layers.FusedMlp, "mlp"))
    return [
        (KernelAttention, "attend", "attention"),
        (layers, "rotate_and_store", "attention"),
        (layers.RotaryTable, "__call__", "rope"),
        *(
            (module, "forward", phase)
            for kind, phase in phases
            for module in model.modules()
            if isinstance(module, kind)
        ),
    ]


@contextmanager
def _replaced(owner: Any, attribute: str, phase: str) -> Iterator[None]:
    """Put a recorded function in the place of ``owner.attribute``, and take it away again."""
    own = attribute in vars(owner)
    original = getattr(owner, attribute)
    setattr(owner, attribute, _recorded(original, phase))
    try:
        yield
    finally:
        if own:
            setattr(owner, attribute, original)
        else:
            delattr(owner, attribute)


def _recorded(function: Callable[..., Any], phase: str) -> Callable[..., Any]:
    @wraps(function)
    def call(*arguments: Any, **named_arguments: Any) -> Any:
        with record_function(phase):
            return function(*arguments, **named_arguments)

    return call
