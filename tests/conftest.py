"""What a parallel run (`make test`) needs to know: which tests share a process; and where kernels are interpreted."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

if not Path("/dev/nvidiactl").exists():  # Triton looks once, when whoever is first imports it
    os.environ.setdefault("TRITON_INTERPRET", "1")


@pytest.hookimpl(tryfirst=True)  # pytest-xdist reads the groups in this hook too
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Keep together what shares fixtures or caches: the tests of a module, and those with the servers of one engine.

    What waits for minutes begins first: all the others run meanwhile, and nobody waits for it at the end.
    """
    for item in items:
        item.add_marker(pytest.mark.xdist_group(_group(item)))
    items.sort(key=lambda item: item.get_closest_marker("waits") is None)


def _group(item: pytest.Item) -> str:
    call = getattr(item, "callspec", None)
    engine = call.params.get("engine") if call else None
    return f"servers-{engine}" if engine else item.path.stem
