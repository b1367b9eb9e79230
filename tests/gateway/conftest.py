"""``gateway``: a real gateway beside a real server with the demo, which tests share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.gateway.support.gateways import Beside, Inside, beside, inside


@pytest.fixture(scope="session")
def gateway() -> Iterator[Beside]:
    """The gateway's process beside the portable engine with the demo model."""
    with beside() as running:
        yield running


@pytest.fixture(scope="module")
def alone() -> Iterator[Inside]:
    """A gateway whose engine is away, with the default settings."""
    with inside() as running:
        yield running
