"""Reads a server's Prometheus page."""

from __future__ import annotations

import re
import time
import urllib.request
from collections.abc import Callable


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


def wait_until(holds: Callable[[], bool], timeout_s: float) -> bool:
    """Wait for a condition; return whether it came to hold in time."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        if holds():
            return True
        time.sleep(0.05)
    return holds()
