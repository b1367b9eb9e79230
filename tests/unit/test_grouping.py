"""Tests that share servers or engines run in one process (`tests/conftest.py`)."""

from __future__ import annotations

import pytest


def test_pytest_xdist_reads_the_groups(request: pytest.FixtureRequest) -> None:
    """It appends them to the ids of tests; pytest 9.2 does not let it, and every test would start servers anew."""
    if not getattr(request.config.option, "loadgroup", False):
        pytest.skip("a run without --dist loadgroup has no groups")
    assert request.node.nodeid.endswith("@test_grouping")
