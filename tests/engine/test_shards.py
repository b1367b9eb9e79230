"""The files of a checkpoint: what is said of those that cannot be read."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest

from inflight.engine.shards import Shards
from inflight.errors import DeploymentError


def test_weights_that_may_not_be_read_are_not_called_missing() -> None:
    """Root may read everything, so the test is somebody else meanwhile."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "model.safetensors"
        file.write_bytes(b"")
        file.chmod(0)
        Path(folder).chmod(0o755)
        user = os.geteuid()
        if user == 0:
            os.seteuid(65534)
        try:
            with pytest.raises(DeploymentError, match=r"model\.safetensors: cannot be read: Permission denied$"):
                Shards(Path(folder))
        finally:
            os.seteuid(user)
