"""Says what a Python lacks for `make gpu-test`, and how it gets there without a network. Needs nothing itself."""

from __future__ import annotations

import importlib.util
import sys

NEEDED = {
    "torch": "torch",
    "triton": "triton",
    "transformers": "transformers",
    "numpy": "numpy",
    "safetensors": "safetensors",
    "tokenizers": "tokenizers",
    "pydantic": "pydantic",
    "yaml": "PyYAML",
    "jinja2": "Jinja2",
    "psutil": "psutil",
    "pytest": "pytest",
    "xdist": "pytest-xdist",
}
"""Modules, and the packages that they are in."""


def main() -> int:
    """Return 0 if nothing is missing."""
    missing = [package for module, package in NEEDED.items() if importlib.util.find_spec(module) is None]
    if not missing:
        return 0
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    print(
        f"{sys.executable} lacks {', '.join(missing)}. With a network: {sys.executable} -m pip install -c "
        f"constraints.txt {' '.join(missing)}. Without one: run `make gpu-wheels WHEELS_PYTHON={version}` where there "
        "is a network (it has pydantic; name others in PACKAGES), bring artifacts/gpu-wheels along, and run "
        f"{sys.executable} -m pip install --no-index --find-links artifacts/gpu-wheels {' '.join(missing)}",
        file=sys.stderr,
    )
    return 1


if __name__ == "__main__":
    sys.exit(main())
