"""A fake hub, and an environment in which it is the only one."""

from __future__ import annotations

import json
import os
import shutil
from collections import namedtuple
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from inflight.hub import remote
from inflight.serve import command
from inflight.settings.deployment import Deployment
from tests.fakes.hub import FakeHub
from tests.support.measured_once import this_machine_measured_once

WEIGHTS = bytes(range(256)) * 4096
"""A megabyte: several reads of a connection."""
FILES = {
    "config.json": json.dumps({"architectures": ["LlamaForCausalLM"], "model_type": "llama"}).encode(),
    "tokenizer.json": b"{}",
    "model.safetensors": WEIGHTS,
    "chat_template.jinja": b"{{ messages }}",
    "LICENSE": b"Do what you like.",
    "README.md": b"# A model\n",
    # None of these belongs to a model that is served.
    ".gitattributes": b"*.safetensors filter=lfs\n",
    "modeling_llama.py": b"import os",
    "pytorch_model.bin": b"pickle",
    "original/consolidated.00.pth": b"pickle",
    "consolidated.safetensors": b"the same weights again",
}
OURS = {"config.json", "tokenizer.json", "model.safetensors", "chat_template.jinja", "LICENSE", "README.md"}
"""What is got of them."""


@pytest.fixture(scope="session", autouse=True)
def _this_machine_is_measured_once() -> Iterator[None]:
    with this_machine_measured_once():
        yield


@pytest.fixture
def models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The models folder of a test; nothing in the environment leads to a real hub."""
    for name in list(os.environ):
        if name.startswith(("HF_", "HUGGING_FACE_", "TRANSFORMERS_OFFLINE")) or name.lower().endswith("_proxy"):
            monkeypatch.delenv(name)
    for name in ("SSL_CERT_FILE", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE"):
        monkeypatch.delenv(name, raising=False)
    folder = tmp_path / "models"
    monkeypatch.setenv("INFLIGHT_MODELS", str(folder))
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")  # the port where nobody listens
    return folder


@pytest.fixture
def hub(models: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    """A hub with the model ``org/name``, between whose tries nobody waits."""
    monkeypatch.setattr(remote, "_FIRST_WAIT_S", 0.001)
    fake = FakeHub()
    fake.add("org/name", FILES)
    monkeypatch.setenv("HF_ENDPOINT", fake.address)
    with fake.running():
        yield fake


@pytest.fixture
def no_room(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Make every disk have half a megabyte, from the call on."""

    def fill() -> None:
        usage = namedtuple("usage", "total used free")
        monkeypatch.setattr(shutil, "disk_usage", lambda _path: usage(10**9, 10**9, 500_000))

    return fill


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[Path]:
    """The checkpoints of the deployments that were to be served; no server is started."""
    found: list[Path] = []

    def serve(_directory: Path, deployment: Deployment, *_others: object) -> None:
        found.append(deployment.model)

    monkeypatch.setattr(command, "_serve", serve)
    monkeypatch.chdir(tmp_path)
    return found
