"""The generated dashboards, as Grafana reads them."""

from __future__ import annotations

import json
from typing import Any

from monitoring.generate.boards.all import dashboard_files

COLUMNS = 24
"""Columns of Grafana's grid."""
BOARDS: list[dict[str, Any]] = [json.loads(text) for text in dashboard_files().values()]


def rows(board: dict[str, Any]) -> dict[str, list[dict[str, Any]]]:
    """Return the panels of a dashboard by the titles of its rows."""
    found: dict[str, list[dict[str, Any]]] = {}
    for panel in board["panels"]:
        if panel["type"] == "row":
            within = found[panel["title"]] = []
        else:
            within.append(panel)
    return found


def panels(board: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the panels of a dashboard in order."""
    return [panel for within in rows(board).values() for panel in within]


def expressions(panel: dict[str, Any]) -> list[str]:
    """Return the expressions that a panel asks for."""
    return [target["expr"] for target in panel["targets"]]


def alerts_of(panel: dict[str, Any]) -> set[str]:
    """Return the alerts whose runbooks a panel links to."""
    return {link["title"].removeprefix("Runbook: ") for link in panel["links"]}
