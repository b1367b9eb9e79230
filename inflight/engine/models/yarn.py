"""What yarn (arXiv:2309.00071) does to attention; reading a configuration needs it without PyTorch."""

from __future__ import annotations

import math


def yarn_sharpening(factor: float, weight: float) -> float:
    """Return what yarn multiplies queries and keys by, which sharpens attention over a context that is longer."""
    return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0
