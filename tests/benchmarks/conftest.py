"""The checkpoints of the benches, made once per session."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.setting import Setting


@pytest.fixture(scope="session")
def setting(tmp_path_factory: pytest.TempPathFactory) -> Setting:
    """Return the setting of a quick run."""
    return Setting(tmp_path_factory.mktemp("bench"), lambda _: None, quick=True, threads=1)


@pytest.fixture(scope="session")
def folder(setting: Setting) -> Path:
    """Return where the checkpoints are."""
    return setting.folder
