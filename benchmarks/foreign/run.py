"""Runs a suite: a gateway in front of the demo, one more that wants a key, and pytest in the suites' environment."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from benchmarks.environments import Home
from benchmarks.foreign.reasons import Outcome
from benchmarks.foreign.suites import KEYS, Suite
from benchmarks.gateway.served import Served, serve
from inflight.errors import EngineFailure, InvalidRequest
from inflight.resources import DEMO
from inflight.serve.gateway import GatewayProcess
from inflight.serve.server import free_ports
from inflight.settings.deployment import FILE_NAME, load_deployment

_PLUGINS = Path(__file__).with_name("plugins")
_TEST_S = 300
"""Seconds that one test may take."""
_RAN = (0, 1, 2)
"""Codes of pytest where it has run the tests; 2: some files could not be imported."""


@dataclass(frozen=True)
class Target:
    """What the suites are pointed at."""

    model: str
    """The name that requests give."""
    checkpoint: Path
    url: str
    keyed_url: str
    """Where a gateway wants a key."""


@contextmanager
def target(suite: Suite) -> Iterator[Target]:
    """Serve the demo as a suite names its models."""
    name, *others = suite.models
    with tempfile.TemporaryDirectory(prefix="inflight-foreign-") as folder:
        checkpoint = Path(shutil.copytree(DEMO / "model", Path(folder) / "demo"))
        config = checkpoint / "config.json"
        config.write_text(json.dumps(json.loads(config.read_text()) | {"max_position_embeddings": suite.context}))
        settings = {
            "model": str(checkpoint),
            "engine": {"dtype": "float32"},
            "batching": {"max_batch_size": 32},
            "gateway": {"model_name": name, "model_aliases": others},
        }
        with serve(settings) as served, _keyed(served, settings) as keyed:
            yield Target(name, checkpoint, served.url, keyed)


@contextmanager
def _keyed(served: Served, settings: dict[str, Any]) -> Iterator[str]:
    """Put a second gateway in front of the same engine, which wants a key."""
    [port] = free_ports(1)
    front = settings["gateway"] | {"port": port, "api_keys_file": "keys"}
    server = served.server.settings.model_dump(mode="json")
    with tempfile.TemporaryDirectory(prefix="inflight-foreign-") as directory:
        folder = Path(directory)
        (folder / "keys").write_text("\n".join(KEYS) + "\n")
        (folder / FILE_NAME).write_text(yaml.safe_dump(settings | {"server": server, "gateway": front}))
        gateway = GatewayProcess(folder, load_deployment(folder))
        try:
            gateway.start()
            gateway.wait_ready()
            yield gateway.url
        finally:
            gateway.stop()


def run(suite: Suite, home: Home, at: Target, given: Path | None, keep: Path) -> None:
    """Run a suite's files; ``outcomes`` reads how its tests ended.

    Args:
        suite: the suite.
        home: the environment of the suites.
        at: the server.
        given: the folder of a suite that is in no package.
        keep: where pytest's log and the outcomes go.

    Raises:
        EngineFailure: pytest could not run them.
    """
    root, told, log = suite.root(home, given), _told(suite, keep), keep / f"{suite.name}.log"
    keep.mkdir(parents=True, exist_ok=True)
    told.unlink(missing_ok=True)
    words = ["-m", "pytest", *_options(suite), *suite.files]
    with log.open("w") as file:
        environment = os.environ | _environment(suite, root, at, told)
        code = subprocess.run([home.python, *words], cwd=root, env=environment, stdout=file, stderr=file).returncode
    if code not in _RAN:
        raise EngineFailure(f"{suite.project}'s tests did not run: pytest ended with code {code}; {log} says why")


def outcomes(suite: Suite, keep: Path) -> list[Outcome]:
    """Return how the tests of the last run ended.

    Raises:
        InvalidRequest: there was none.
    """
    told = _told(suite, keep)
    if not told.exists():
        raise InvalidRequest(f"{suite.project}'s tests have not been run here: {told} is not there")
    return [Outcome(**json.loads(line)) for line in told.read_text().splitlines()]


def _told(suite: Suite, keep: Path) -> Path:
    return keep / f"{suite.name}.jsonl"


def _options(suite: Suite) -> list[str]:
    plugins = [word for name in ("tell", suite.plugin) for word in ("-p", name)]
    limits = ["--timeout", str(_TEST_S), "--continue-on-collection-errors"]
    return [*plugins, "--rootdir", ".", "-p", "no:cacheprovider", "-v", "--tb=line", "-o", "addopts=", *limits]


def _environment(suite: Suite, root: Path, at: Target, told: Path) -> dict[str, str]:
    return {
        "PYTHONPATH": str(_PLUGINS),
        "TELL_TO": str(told.resolve()),
        "SERVER_URL": at.url,
        "KEYED_URL": at.keyed_url,
        "MODEL": at.model,
        "CHECKPOINT": str(at.checkpoint),
        "HF_HUB_OFFLINE": "1",
        "PORT": "0",
        **{name: str(root / path) for name, path in suite.environment.items()},
    }
