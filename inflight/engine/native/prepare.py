"""Chooses what computes the steps on a CPU: the native library, for all steps or for none, and says why."""

from __future__ import annotations

import logging

import torch

from inflight.engine.models.decoder import DecoderModel
from inflight.engine.models.limits import why_not_native
from inflight.engine.models.served import ServedModel
from inflight.engine.native.bindings import NativeError, bf16_gain, instruction_sets
from inflight.engine.native.model import NativeModel
from inflight.errors import DeploymentError

log = logging.getLogger(__name__)


def native_model(
    model: ServedModel, device: torch.device, wanted: str, threads: int, weights: str = "checkpoint"
) -> NativeModel | None:
    """Return a loaded model as the library computes it, with its weights; None: PyTorch computes it.

    ``wanted`` and ``weights`` are ``engine.cpu_step`` and ``engine.weights`` of the deployment.

    Raises:
        DeploymentError: they name an instruction set, or a type of weights, and the library cannot compute the model
            with that; or the library refuses a weight when it has taken others.
    """
    try:
        return _load(model, device, wanted, threads, weights)
    except (NativeError, OSError) as error:
        if weights != "checkpoint":
            raise DeploymentError(f"engine.weights is {weights}: {error}") from None
        if wanted not in ("auto", "pytorch"):
            raise DeploymentError(f"engine.cpu_step is {wanted}: {error}") from None
        if device.type == "cpu":
            if wanted == "pytorch":
                log.info("PyTorch computes the steps: %s", error)
            else:
                log.warning("PyTorch computes the steps: %s; Inflight's own kernels are several times as fast", error)
        return None


def _load(model: ServedModel, device: torch.device, wanted: str, threads: int, weights: str) -> NativeModel:
    """Return the model as the library computes it; what it raises says why it cannot."""
    if device.type != "cpu":
        raise NativeError(f"the engine runs on {device}")
    if wanted == "pytorch":
        raise NativeError("engine.cpu_step is pytorch")
    if not isinstance(model, DecoderModel):
        raise NativeError(str(why_not_native(model.config)))
    there = instruction_sets()
    chosen = wanted if wanted != "auto" else next(iter(there), "avx2")
    if chosen not in there:
        raise NativeError(f"this processor has no {chosen}")
    native = NativeModel(model, chosen, threads, weights)
    types = native.schemes + ["INT8"] * (weights == "int8")
    held = f", from weights in {', '.join(types)}" if types else ""
    why = ""
    if wanted == "auto" and "avx512_bf16" in there and chosen != "avx512_bf16":
        why = f"; this processor's products of bfloat16 are {bf16_gain():.2f} times as fast as those of float32"
    log.info("kernels for %s compute the steps, with %d threads%s%s", chosen, threads, held, why)
    return native
