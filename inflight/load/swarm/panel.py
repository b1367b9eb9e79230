"""A tab of locust's page with what locust itself cannot show: tokens per second, per-token latencies, CPU."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from typing import Any

from flask import Response, request
from locust.web import WebUI

from inflight.load.measurements import Distribution, RequestRecord
from inflight.load.swarm.gathering import Gathering

_KEY = "inflight"
_COLUMNS = {"figure": "Figure", "value": "Value", "p50": "p50", "p95": "p95", "p99": "p99", "samples": "Samples"}
Row = dict[str, object]


def add_panel(page: WebUI, gathering: Callable[[], Gathering | None]) -> None:
    """Add the tab to locust's page, and its figures to what the page asks for every two seconds.

    Args:
        page: locust's.
        gathering: returns that of the running or last test; None: there was none yet.
    """
    page.template_args |= {
        "extended_tabs": [{"title": "Inflight", "key": _KEY}],
        "extended_tables": [
            {"key": _KEY, "structure": [{"key": name, "title": title} for name, title in _COLUMNS.items()]}
        ],
    }

    @page.app.after_request
    def _extend(response: Response) -> Response:
        now = gathering()
        if request.path == "/stats/requests" and now is not None and response.is_json:
            stats = [{"key": _KEY, "data": rows(now)}]
            response.set_data(json.dumps(response.get_json() | {"extended_stats": stats}))
        return response


def rows(gathering: Gathering) -> list[Row]:
    """Return the rows of the tab."""
    lately = list(gathering.recent)
    done = [one for one in lately if one.outcome == "completed"]
    return [
        *_rate_rows(gathering),
        _row("TTFT, ms", (one.ttft_s for one in done if one.ttft_s is not None)),
        _row("ITL per token, ms", (sample for one in done for sample in one.itl_s)),
        _row("chunk gap, ms", (gap for one in done for gap in one.gaps_s)),
        _row("E2E, ms", (one.e2e_s for one in done)),
        _row("queue in the server, ms", (one.queue_s for one in done if one.queue_s is not None)),
        *_send_delay(lately),
        *({"figure": f"requests {name}", "value": count} for name, count in sorted(gathering.outcomes.items())),
    ]


def _rate_rows(gathering: Gathering) -> list[Row]:
    rates = gathering.rates()
    if rates is None:
        return [{"figure": "running requests", "value": gathering.running}]
    tokens, client, server = rates
    return [
        {"figure": "output tokens/s", "value": round(tokens, 1)},
        {"figure": "running requests", "value": gathering.running},
        {"figure": "client CPU, cores", "value": round(client, 2)},
        {"figure": "server CPU, cores", "value": "unknown" if server is None else round(server, 2)},
    ]


def _send_delay(records: Iterable[RequestRecord]) -> list[Row]:
    late = [one.sent_s - one.scheduled_s for one in records if one.scheduled_s is not None]
    return [_row("send delay of the client, ms", late)] if late else []


def _row(figure: str, seconds: Iterable[float]) -> dict[str, Any]:
    one = Distribution.of(list(seconds), 1000)
    if one is None:
        return {"figure": figure}
    return {
        "figure": figure,
        "p50": round(one.p50, 2),
        "p95": round(one.p95, 2),
        "p99": round(one.p99, 2),
        "samples": one.count,
    }
