"""Every dashboard."""

from inflight.monitoring.boards.engine import ENGINE_BOARD
from inflight.monitoring.boards.latency import LATENCY
from inflight.monitoring.boards.overview import OVERVIEW
from inflight.monitoring.boards.startup import STARTUP

DASHBOARDS = (OVERVIEW, ENGINE_BOARD, LATENCY, STARTUP)
