"""The gateway's dashboard: Prometheus understands its panels, and a gateway exports what they ask for."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from inflight.metrics import GATEWAY
from monitoring.generate.boards.gateway import GATEWAY_BOARD
from tests.monitoring.support.boards import BOARDS, expressions, panels
from tests.monitoring.support.names import names

EXPRESSIONS = [
    expr.replace("$__rate_interval", "1m").replace("$instance", ".*")
    for board in BOARDS
    if board["uid"] == GATEWAY_BOARD.uid
    for panel in panels(board)
    for expr in expressions(panel)
]


@pytest.mark.skipif(not shutil.which("promtool"), reason="promtool is not installed")
def test_prometheus_reads_every_panel(tmp_path: Path) -> None:
    rules = [{"record": f"panel:{place}", "expr": expr} for place, expr in enumerate(EXPRESSIONS)]
    path = tmp_path / "panels.yml"
    path.write_text(yaml.safe_dump({"groups": [{"name": "panels", "rules": rules}]}))
    done = subprocess.run(["promtool", "check", "rules", str(path)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_each_family_of_the_gateway_is_on_its_dashboard() -> None:
    shown = {name for expr in EXPRESSIONS for name in names(expr)}
    assert {family.name for family in GATEWAY} == {name.removesuffix("_bucket") for name in shown}, json.dumps([*shown])
