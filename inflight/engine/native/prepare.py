"""Chooses what computes the steps on a CPU: the native library, for all steps or for none, and says why."""

from __future__ import annotations

import logging

import torch

from inflight.engine.models.decoder import DecoderModel
from inflight.engine.native.bindings import NativeError, instruction_sets
from inflight.engine.native.model import NativeModel, unsupported
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
    reason, chosen = None, wanted
    try:
        there = instruction_sets()
        if wanted == "auto":
            chosen = there[0] if there else "avx2"
        if chosen not in there:
            reason = f"this processor has no {chosen}"
    except (NativeError, OSError) as error:
        reason = str(error)
    reason = reason or unsupported(model)
    if reason is None:
        try:
            native = NativeModel(model, chosen, threads)
        except NativeError as error:
            raise DeploymentError(f"engine.cpu_step: {error}; `engine.cpu_step: pytorch` computes it") from None
        log.info("kernels for %s compute the steps, with %d threads", chosen, threads)
        return native
    if wanted != "auto":
        raise DeploymentError(f"engine.cpu_step is {wanted}: {reason}")
    log.info("PyTorch computes the steps: %s", reason)
    return None
