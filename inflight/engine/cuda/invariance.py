"""``engine.batch_invariant``: matrix products that add a row up in one order, however many rows there are beside it.

Kernels of our own do so anyway. cuBLAS may split a row's sum among programs where rows are few; without workspace it
cannot. On compute capability 9.0 nothing else in it depends on the number of rows, as vLLM has found
(https://github.com/vllm-project/vllm/issues/27660); on 8.9 more does, so the setting is refused elsewhere.
"""

from __future__ import annotations

import logging
import os

import torch

from inflight.engine.cuda.compiler import has_compiler
from inflight.errors import DeploymentError

log = logging.getLogger(__name__)

_WORKSPACES = {"CUBLAS_WORKSPACE_CONFIG": ":16:8", "CUBLASLT_WORKSPACE_SIZE": "1"}
"""Variables that PyTorch and cuBLAS read at their first product, and the least that each takes."""
_HOLDS_ON = (9, 0)


def require_invariance(device: torch.device, candidates: int) -> None:
    """Have a GPU's products add up in one order; before the first of them.

    Args:
        device: the GPU.
        candidates: ``speculation.candidates``; more than one make trees of guesses, which no kernel attends to.

    Raises:
        DeploymentError: the environment says otherwise, or it would not hold on this device.
    """
    for name, value in _WORKSPACES.items():
        if os.environ.setdefault(name, value) != value:
            raise DeploymentError(
                f"engine.batch_invariant needs {name}={value}; the environment says {os.environ[name]}"
            )
    capability = torch.cuda.get_device_capability(device)
    if capability != _HOLDS_ON:
        raise DeploymentError(
            "engine.batch_invariant holds on GPUs of compute capability {}.{}; {} has {}.{}".format(
                *_HOLDS_ON, device, *capability
            )
        )
    if candidates > 1:
        raise DeploymentError(
            f"speculation.candidates is {candidates}; with engine.batch_invariant on a GPU it must be 1: trees of "
            "guesses are attended to in another order"
        )
    if not has_compiler():
        raise DeploymentError("engine.batch_invariant needs Triton's compiler: it is attention's kernels that hold it")
    products = torch.backends.cuda.matmul
    # Sums in float32, and not split: whether they are rounded in between, and whether they are split at all.
    products.allow_bf16_reduced_precision_reduction = (False, False)
    products.allow_fp16_reduced_precision_reduction = (False, False)
    log.info("matrix products do not depend on the number of rows: cuBLAS has no workspace to split sums in")
