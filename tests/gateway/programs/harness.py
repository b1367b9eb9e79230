"""Runs the checks of a program with the client that it is about, and prints a line of JSON for each of them.

A program runs in its client's own environment: this file imports nothing that Python itself does not bring.

    python openai_chat.py http://127.0.0.1:8080 KEY [NAMES OF CHECKS]
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import json
import sys
import time
import traceback
import urllib.request
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Gateway:
    """The gateway that a program speaks to."""

    url: str
    """As ``http://127.0.0.1:8080``."""
    key: str
    model: str
    """The name of the model that it serves first."""

    @property
    def v1(self) -> str:
        """The base URL of OpenAI's clients."""
        return f"{self.url}/v1"

    def post(self, path: str, body: Mapping[str, Any]) -> Any:
        """Send a body as JSON, and return the JSON of the answer."""
        return self._ask(urllib.request.Request(f"{self.url}{path}", json.dumps(body).encode()))

    def get(self, path: str) -> Any:
        """Return the JSON at a path."""
        return self._ask(urllib.request.Request(f"{self.url}{path}"))

    def _ask(self, request: urllib.request.Request) -> Any:
        request.add_header("authorization", f"Bearer {self.key}")
        request.add_header("content-type", "application/json")
        with urllib.request.urlopen(request, timeout=60) as answer:
            return json.load(answer)


def main(names: Mapping[str, Any]) -> None:
    """Run the functions whose names begin with ``check_``, or those that the command line names."""
    url, key, *wanted = sys.argv[1:]
    gateway = Gateway(url, key, "")
    gateway = Gateway(url, key, gateway.get("/v1/models")["data"][0]["id"])
    for name in wanted or [name for name in names if name.startswith("check_")]:
        began, error = time.monotonic(), _error_of(names[name], gateway)
        seconds = round(time.monotonic() - began, 2)
        print(json.dumps({"check": name, "error": error, "seconds": seconds}), flush=True)


def _error_of(check: Callable[[Gateway], Any], gateway: Gateway) -> str:
    """Return what went wrong, with the traceback; empty where nothing did. What a client prints goes to stderr."""
    try:
        with contextlib.redirect_stdout(sys.stderr):
            if inspect.iscoroutinefunction(check):
                asyncio.run(check(gateway))
            else:
                check(gateway)
    except Exception:
        return traceback.format_exc()
    return ""


def raised(expected: type[Exception], call: Callable[[], object]) -> Any:
    """Return the error of a class that a call raises.

    Raises:
        AssertionError: it raises none. Errors of other classes are raised as they are.
    """
    try:
        answer = call()
    except expected as error:
        return error
    raise AssertionError(f"{expected.__name__} was expected; the answer is {answer!r}")
