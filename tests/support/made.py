"""Environments of others' programs, made when the first test needs them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from benchmarks.environments import Environments, Home
from inflight.errors import InflightError


def made(environments: Environments, name: str, folder: Path | None = None) -> Home:
    """Return an environment, made if need be; without packages the test is skipped, but not in CI."""
    try:
        return environments.make(name, folder)
    except InflightError as error:
        if os.environ.get("CI"):
            raise
        pytest.skip(str(error))
