"""The runbooks, and the queries in them."""

from __future__ import annotations

import re
import textwrap
from pathlib import Path

RUNBOOKS = sorted((Path(__file__).parents[3] / "docs/runbooks").glob("*.md"))


def queries(path: Path) -> list[str]:
    """Return the expressions of a runbook; each line of a block is one."""
    blocks = re.findall(r"^ *```promql\n(.*?)^ *```", path.read_text(), re.M | re.S)
    return [line for block in blocks for line in textwrap.dedent(block).splitlines()]
