"""Hypothesis's profiles: ``dev`` for `make test`, ``full`` for `make check`, ``soak`` for `make release`.

HYPOTHESIS_PROFILE names one. No profile has a deadline or a check of speed: how fast an example is depends on what else
the machine does. ``dev`` tries the same examples each time, and so does ``full`` where the environment has CI: what is
tried there depends on the code alone. Elsewhere ``full`` and ``soak`` draw new examples.
"""

from __future__ import annotations

import os

from hypothesis import HealthCheck, settings

_SPEED = [HealthCheck.too_slow, HealthCheck.data_too_large]
settings.register_profile("dev", max_examples=20, deadline=None, suppress_health_check=_SPEED, derandomize=True)
settings.register_profile(
    "full",
    max_examples=50,
    deadline=None,
    suppress_health_check=_SPEED,
    print_blob=True,
    derandomize="CI" in os.environ,
)
settings.register_profile("soak", settings.get_profile("full"), max_examples=1000, derandomize=False)


def load_profile() -> None:
    """Load the profile that the environment names, before the first property is defined."""
    settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "dev"))


def examples(ratio: float) -> int:
    """Return ``ratio`` times the profile's number of examples, for a property that costs less or more."""
    return max(1, round(ratio * settings().max_examples))
