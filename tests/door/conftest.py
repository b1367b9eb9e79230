"""A door that the tests of a module share, where they do not change it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.door.support.doors import Door, door

pytest.importorskip("envoy")


@pytest.fixture(scope="module")
def plain() -> Iterator[Door]:
    """A door with small limits, and nothing else that is not a default."""
    with door(max_body_bytes=100_000, max_header_kib=8, max_headers=40) as running:
        yield running
