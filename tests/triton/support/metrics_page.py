"""Reads a server's Prometheus page."""

from __future__ import annotations

import re
import time
import urllib.request


def read_page(url: str) -> str:
    """Return the page as it stands."""
    with urllib.request.urlopen(url, timeout=10) as response:
        return str(response.read().decode())


def read_metric(url: str, name: str, **labels: str) -> float:
    """Return the value of the one series of a live page that ``value_in`` finds."""
    return value_in(read_page(url), name, **labels)


def value_in(page: str, name: str, **labels: str) -> float:
    """Return the value of the one series with this name and these labels (others may be there); 0 if there is none."""
    values = [
        float(value)
        for found, text, value in re.findall(r"^(\w+)\{(.*)\} (\S+)$", page, re.MULTILINE)
        if found == name and all(f'{key}="{wanted}"' in text for key, wanted in labels.items())
    ]
    assert len(values) <= 1, f"{name} {labels} names {len(values)} series"
    return values[0] if values else 0.0


def settled_page(url: str, timeout_s: float = 30) -> str:
    """Return the page once the stages count nothing any more: what was asked before has ended, in every one of them.

    Each stage shows what it counts in its own time, and not every response of the engine's passes through the
    detokenizer, so their counts cannot be held against each other. They stand still over two heartbeats of each stage:
    between two heartbeats a stage shows everything once.
    """
    deadline, page, beats = time.monotonic() + timeout_s, read_page(url), 0
    beaten = _heartbeats(page)
    while time.monotonic() < deadline:
        time.sleep(0.05)
        later = read_page(url)
        if _counts(later) != _counts(page):
            page, beats, beaten = later, 0, _heartbeats(later)
        elif all(new > old for new, old in zip(_heartbeats(later), beaten, strict=True)):
            beats, beaten = beats + 1, _heartbeats(later)
            if beats == 2:
                return later
    raise AssertionError(f"the stages still count after {timeout_s:g} s: {_counts(page)}")


def _counts(page: str) -> dict[str, str]:
    """Return what the stages have counted, by series, but for the counters of their exporters."""
    return dict(re.findall(r"^(inflight_(?!metrics_export)\w+_(?:total|count)\{.*\}) (\S+)$", page, re.MULTILINE))


def _heartbeats(page: str) -> list[float]:
    return [float(value) for value in re.findall(r"^inflight_heartbeat_time_seconds\{.*\} (\S+)$", page, re.MULTILINE)]
