"""Hypothesis's profiles: ``soak`` for `make release`, ``dev`` for all else.

HYPOTHESIS_PROFILE names one. No profile has a deadline or a check of speed: how fast an example is depends on what else
the machine does. ``dev`` tries the same examples each time, by the property alone; ``soak`` draws new ones.
"""

from __future__ import annotations

import os

from hypothesis import HealthCheck, settings
from hypothesis.internal.conjecture import providers
from hypothesis.internal.constants_ast import Constants

_SPEED = [HealthCheck.too_slow, HealthCheck.data_too_large]
settings.register_profile(
    "dev", max_examples=20, deadline=None, suppress_health_check=_SPEED, print_blob=True, derandomize=True
)
settings.register_profile("soak", settings.get_profile("dev"), max_examples=400, derandomize=False)


def load_profile() -> None:
    """Load the profile that the environment names, before the first property is defined."""
    profile = os.environ.get("HYPOTHESIS_PROFILE", "dev")
    settings.load_profile(profile)
    if profile != "soak":
        # Hypothesis also tries constants of all modules that are imported, so what else a process tests would decide.
        providers._get_local_constants = Constants


def examples(ratio: float) -> int:
    """Return ``ratio`` times the profile's number of examples, for a property that costs less or more."""
    return max(1, round(ratio * settings().max_examples))
