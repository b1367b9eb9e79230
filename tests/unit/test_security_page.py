"""SECURITY.md: each threat names tests that there are, or says that it is not defended; and what no server may do."""

from __future__ import annotations

import ast
import re
from pathlib import Path

from tests.unit.support.sources import parsed

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "SECURITY.md").read_text()
OPEN = "not defended"
UNPICKLES = {"pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve", "joblib"}


def _threats() -> list[list[str]]:
    """Return the rows of the table: threat, defence, what the door adds, tests."""
    table = PAGE.partition("\n## Threats\n")[2].partition("\n#")[0]
    rows = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in table.splitlines() if line[:1] == "|"]
    return [row for row in rows[2:] if not row[0].startswith("**")]


def test_each_threat_is_defended_by_tests_that_there_are_or_is_said_not_to_be() -> None:
    rows = _threats()
    assert len(rows) > 30
    for threat, *_, tests in rows:
        names = re.findall(r"`(tests/[^`]+)::(\w+)`", tests)
        assert names or tests.strip(" |") == OPEN, threat
        for path, name in names:
            assert f"def {name}(" in (ROOT / path).read_text(), f"{threat}: there is no {path}::{name}"


def test_what_is_not_defended_says_so_in_words() -> None:
    for threat, defence, _, tests in _threats():
        assert (OPEN in tests) <= (OPEN in defence), threat


def test_nothing_of_others_is_unpickled() -> None:
    """The gateway's own processes send each other pickles, over socket pairs."""
    for path in (one for part in ("inflight", "backends", "model_repository") for one in (ROOT / part).rglob("*.py")):
        for node in ast.walk(parsed(path)):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [str(node.module)] if isinstance(node, ast.ImportFrom) else []
            own = path == ROOT / "inflight/gateway/fork_server.py"
            assert own or not {name.partition(".")[0] for name in names} & UNPICKLES, path
            is_load = isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "load"
            if is_load and ast.unparse(node.func) == "torch.load":
                assert "weights_only=True" in ast.unparse(node), path
