"""Writes what Envoy reads before the servers of the profile ``replicas``: docker/replicas/envoy.json and routes.json.

    python3 docker/replicas.py

It is the door of `inflight serve`, before two servers in turn: see docs/container.md.
"""

from __future__ import annotations

import json
from pathlib import Path

from inflight.resources import DEMO
from inflight.serve.envoy.bootstrap import bootstrap, discovered, public_addresses, routes
from inflight.serve.envoy.values import Config, Upstreams
from inflight.settings.deployment import load_deployment

FOLDER = Path(__file__).resolve().parent / "replicas"
MOUNTED = Path("/etc/inflight")
"""Where the folder is mounted in the container."""
ADMIN_SOCKET = "/tmp/admin.sock"
REPLICAS = ("replica-1", "replica-2")


def files() -> dict[str, Config]:
    """Return the contents of the files by their names."""
    found = load_deployment(DEMO)
    door = found.door.model_copy(update={"enabled": True})
    deployment = found.model_copy(update={"door": door})
    upstreams = [Upstreams(f"{name}:8000", f"{name}:8001", f"{name}:8080", None) for name in REPLICAS]
    start = bootstrap(deployment, upstreams, public_addresses(deployment, "0.0.0.0"), MOUNTED)
    start["admin"]["address"]["pipe"]["path"] = ADMIN_SOCKET  # what is mounted there cannot be written
    return {"envoy.json": start, "routes.json": discovered(routes(deployment, upstreams))}


def main() -> None:
    """Write the files."""
    FOLDER.mkdir(exist_ok=True)
    for name, content in files().items():
        (FOLDER / name).write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
