"""Finds the files that belong to Inflight and are not its code, e.g. the model repository and the demo.

In a checkout they are where the repository has them. A wheel holds the same tree in ``inflight/_data``
(``tool.hatch.build`` in pyproject.toml says what of it). They are only read: the folder of an installed package may not
be writable.
"""

from __future__ import annotations

from pathlib import Path

VERSION = "0.1.0"
_PACKAGE = Path(__file__).resolve().parent
_IN_WHEEL = _PACKAGE / "_data"
CHECKOUT = None if _IN_WHEEL.is_dir() else _PACKAGE.parent
"""The repository's root; None: Inflight was installed from a wheel."""

ROOT = CHECKOUT or _IN_WHEEL
BACKENDS = ROOT / "backends"
MODEL_REPOSITORY = ROOT / "model_repository"
DEMO = ROOT / "deployments/demo"
SCENARIOS = ROOT / "loadtest/scenarios"
"""The committed scenarios of load tests."""
UPSTREAM_PREPROCESSING = ROOT / "loadtest/baseline/preprocessing"
"""The upstream ensemble's tokenizer model, rebuilt to measure ours beside it."""
GPUS = ROOT / "build/gpus.toml"
"""The table of GPUs."""
CALIBRATION_DATA, HELD_OUT_DATA = ROOT / "build/data/calibration.jsonl", ROOT / "build/data/held_out.jsonl"
CALIBRATION_PROSE = ROOT / "build/data/calibration_prose.jsonl"
HELD_OUT_PROSE = ROOT / "build/data/held_out_prose.jsonl"


def bundled(path: Path) -> Path:
    """Return ``path``; where there is none, the file or folder that Inflight brings along under that name, if any.

    So ``deployments/demo`` names the demo wherever a command is typed.
    """
    own = ROOT / path
    return own if not path.exists() and own.exists() else path


def how_to_install(*extras: str) -> str:
    """Return the command that adds optional dependencies to what runs here."""
    names = ",".join(extras)
    return f"make setup EXTRAS={names}" if CHECKOUT else f"pip install 'inflight[{names}]'"
