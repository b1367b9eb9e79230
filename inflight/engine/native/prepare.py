"""Chooses what computes the steps on a CPU: the native library, for all steps or for none, and says why."""

from __future__ import annotations

import logging

import torch

from inflight.engine.models.decoder import DecoderModel
from inflight.engine.native.bindings import INSTRUCTION_SETS, NativeError, instruction_sets
from inflight.engine.native.model import NativeModel
from inflight.errors import DeploymentError

log = logging.getLogger(__name__)


def native_model(model: DecoderModel, device: torch.device, wanted: str, threads: int) -> NativeModel | None:
    """Return a loaded model as the library computes it, with its weights; None: PyTorch computes it.

    ``wanted`` is ``engine.cpu_step`` of the deployment.

    Raises:
        DeploymentError: it names an instruction set, and the library cannot compute the model with that.
    """
    if device.type != "cpu":
        if wanted != "auto":
            raise DeploymentError(f"engine.cpu_step is {wanted}; the engine runs on {device}")
        return None
    if wanted == "pytorch":
        log.info("PyTorch computes the steps: engine.cpu_step says so")
        return None
    try:
        return _load(model, wanted, threads)
    except (NativeError, OSError) as error:
        if wanted != "auto":
            raise DeploymentError(f"engine.cpu_step is {wanted}: {error}") from None
        log.info("PyTorch computes the steps: %s", error)
        return None


def _load(model: DecoderModel, wanted: str, threads: int) -> NativeModel:
    """Return the model as the library computes it; what it raises says why it cannot."""
    there = instruction_sets()
    chosen = wanted if wanted != "auto" else next(iter(there), INSTRUCTION_SETS[-1])
    if chosen not in there:
        raise NativeError(f"this processor has no {chosen}")
    native = NativeModel(model, chosen, threads)
    log.info("kernels for %s compute the steps, with %d threads", chosen, threads)
    return native
