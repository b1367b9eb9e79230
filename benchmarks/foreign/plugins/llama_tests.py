"""A plugin for pytest: llama.cpp's tests of its server, with servers that run already in the place of theirs.

``SERVER_URL`` is where one listens, and ``KEYED_URL`` one that wants a key. llama.cpp has some of OpenAI's paths
without ``/v1`` too: they are asked for with it.
"""

from __future__ import annotations

import os

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


utils.ServerProcess.start = _start
utils.ServerProcess.make_url = _make_url
