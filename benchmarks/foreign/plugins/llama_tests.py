"""A plugin for pytest: llama.cpp's tests of its server, with servers that run already in the place of theirs.

``SERVER_URL`` is where one listens, and ``KEYED_URL`` one that wants a key. llama.cpp has some of OpenAI's paths
without ``/v1`` too, and needs no ``model``: the paths are asked for with it, and the name ``MODEL`` is given.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import utils  # of the suite, in whose folder pytest runs

_PATHS = ("/chat/completions", "/embeddings", "/models", "/responses")


def _start(server: utils.ServerProcess, timeout_seconds: int = 0) -> None:
    """Take the server that runs, in the place of one with the settings that the test gave."""
    server.external_server = True  # which the suite does not stop
    url = os.environ["KEYED_URL" if server.api_key else "SERVER_URL"]
    server.server_port = int(url.rpartition(":")[2])


def _make_url(server: utils.ServerProcess, path: str, host: str | None = None) -> str:
    beginning = "/v1" if path.startswith(_PATHS) else ""
    return f"http://{host or server.server_host}:{server.server_port}{beginning}{path}"


def _with_model(ask: Callable[..., Any]) -> Callable[..., Any]:
    """Return a method that asks with a body, and names the model in it."""

    def asked(server: utils.ServerProcess, method: str, path: str, data: Any = None, *more: Any, **named: Any) -> Any:
        if method == "POST" and isinstance(data, dict):
            data = data | {"model": data.get("model") or os.environ["MODEL"]}
        return ask(server, method, path, data, *more, **named)

    return asked


for _name in ("make_request", "make_stream_request"):
    setattr(utils.ServerProcess, _name, _with_model(getattr(utils.ServerProcess, _name)))
utils.ServerProcess.start = _start
utils.ServerProcess.make_url = _make_url
