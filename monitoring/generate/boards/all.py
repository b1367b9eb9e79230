"""Every dashboard, and the files that Grafana reads them from."""

from __future__ import annotations

import json

from grafana_foundation_sdk.cog.encoder import JSONEncoder

from monitoring.generate.boards.engine import ENGINE_BOARD
from monitoring.generate.boards.gateway import GATEWAY_BOARD
from monitoring.generate.boards.latency import LATENCY
from monitoring.generate.boards.overview import OVERVIEW
from monitoring.generate.boards.startup import STARTUP
from monitoring.generate.rule import RUNBOOKS_PATH

DASHBOARDS = (OVERVIEW, ENGINE_BOARD, LATENCY, GATEWAY_BOARD, STARTUP)


def dashboard_files(runbooks: str = RUNBOOKS_PATH) -> dict[str, str]:
    """Return the JSON of each dashboard by its file's name; ``runbooks`` is the URL of the folder of runbooks."""
    found = {}
    for board in DASHBOARDS:
        text = json.dumps(board, cls=JSONEncoder, indent=1, sort_keys=True) + "\n"
        found[f"{board.uid}.json"] = text.replace(f'"{RUNBOOKS_PATH}/', f'"{runbooks.rstrip("/")}/')
    return found
