"""The checkpoints of the benches, made once per session. All tests of the benches are proofs: they serve nobody."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.setting import Setting


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Make every test of the benches a proof."""
    for item in items:
        if item.path.is_relative_to(Path(__file__).parent):
            item.add_marker("proof")


@pytest.fixture(scope="session")
def setting(tmp_path_factory: pytest.TempPathFactory) -> Setting:
    """Return the setting of a quick run."""
    return Setting(tmp_path_factory.mktemp("bench"), lambda _: None, quick=True, threads=1)


@pytest.fixture(scope="session")
def folder(setting: Setting) -> Path:
    """Return where the checkpoints are."""
    return setting.folder
