"""Imports what takes seconds and most tests import, once, in the process that those of a run are forked from.

Nothing of Inflight is among it: what a test finds of that, it has imported itself.
"""

import os
import warnings
from pathlib import Path

if not Path("/dev/nvidiactl").exists():  # as in tests/conftest.py
    os.environ.setdefault("TRITON_INTERPRET", "1")

with warnings.catch_warnings(action="ignore"):
    import hypothesis
    import modelopt.torch.quantization
    import pytest
    import scipy.stats
    import torch
    import transformers.models.llama.modeling_llama

__all__ = ["hypothesis", "modelopt", "pytest", "scipy", "torch", "transformers"]
