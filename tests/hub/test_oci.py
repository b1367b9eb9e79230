"""OCI image layouts: those of other tools are read, where each layer is a file."""

from __future__ import annotations

import hashlib
import io
import json
import tarfile
from pathlib import Path
from typing import Any

import pytest

from inflight.hub.model_manifest import read_manifest
from tests.hub.support.commands import inflight, refused

FILES = {"config.json": b'{"architectures": ["X"]}', "model.safetensors": b"weights", "run.py": b"", ".hidden": b""}
SAFETENSORS, RAW = "application/vnd.docker.ai.safetensors", "application/vnd.cncf.model.weight.config.v1.raw"
PATH, TITLE = "org.cncf.model.filepath", "org.opencontainers.image.title"


class Layout:
    """A layout in the making, by tools such as `docker model package`."""

    def __init__(self) -> None:
        self.blobs: dict[str, bytes] = {}
        self.layers = [self.layer(path, data) for path, data in FILES.items()]
        self.images = 1
        self.extra: dict[str, bytes] = {}

    def describe(self, kind: str, data: bytes, **more: Any) -> dict[str, Any]:
        """Return a descriptor of a blob."""
        digest = hashlib.sha256(data).hexdigest()
        self.blobs[digest] = data
        return {"mediaType": kind, "digest": f"sha256:{digest}", "size": len(data), **more}

    def layer(self, path: str | None, data: bytes, kind: str = RAW, key: str = PATH) -> dict[str, Any]:
        """Return a layer."""
        return self.describe(kind, data, annotations={} if path is None else {key: path})

    def write(self, archive: Path) -> str:
        """Write the tar, the blobs before what names them, as some tools do."""
        image = {"schemaVersion": 2, "config": self.describe("application/x", b"{}"), "layers": self.layers}
        found = self.describe("application/vnd.oci.image.manifest.v1+json", json.dumps(image).encode())
        index = {"schemaVersion": 2, "manifests": [found] * self.images}
        files = {f"blobs/sha256/{digest}": data for digest, data in self.blobs.items()}
        files |= {
            "oci-layout": b'{"imageLayoutVersion": "1.0.0"}',
            "index.json": json.dumps(index).encode(),
        } | self.extra
        with tarfile.open(archive, "w") as tar:
            for folder in ("blobs/", "blobs/sha256/"):
                info = tarfile.TarInfo(folder)
                info.type = tarfile.DIRTYPE
                tar.addfile(info)
            for name, data in files.items():
                info = tarfile.TarInfo(name)
                info.size = len(data)
                tar.addfile(info, io.BytesIO(data))
        return str(archive)


def test_a_layout_of_another_tool(models: Path, tmp_path: Path) -> None:
    layout = Layout()
    layout.layers += [layout.layer("tokenizer.json", b"{}", key=TITLE)]
    layout.layers += [layout.layer(None, b"Do what you like.", "application/vnd.docker.ai.license")]
    archive = layout.write(tmp_path / "x.tar")
    assert "say where to, with --to DIR" in refused("unpack", archive)
    inflight("unpack", archive, "--to", str(tmp_path / "there"))
    manifest = read_manifest(tmp_path / "there")
    assert set(manifest.files) == {"config.json", "model.safetensors", "tokenizer.json", "LICENSE"}
    assert (manifest.architecture, manifest.format, manifest.repo) == ("X", "safetensors", None)
    assert (tmp_path / "there/model.safetensors").read_bytes() == b"weights"


def test_blobs_of_another_content(models: Path, tmp_path: Path) -> None:
    for path, said in (("model.safetensors", "has the SHA-256"), ("config.json", "has another SHA-256")):
        layout = Layout()
        layout.blobs[hashlib.sha256(FILES[path]).hexdigest()] = FILES[path][::-1]
        assert said in refused("unpack", layout.write(tmp_path / "x.tar"), "--to", str(tmp_path / "there"))
        assert not (tmp_path / "there").exists()


@pytest.mark.parametrize(
    ("layer", "said"),
    [
        (("config.tar", b"", "application/vnd.docker.ai.vllm.config.tar"), "layers that are one file each are read"),
        (("a.gguf", b"", "application/vnd.docker.ai.gguf.v3+gzip"), "layers that are one file each are read"),
        ((None, b"", SAFETENSORS), "has no org.cncf.model.filepath that names its file"),
        (("../evil.json", b"{}", RAW), "'../evil.json' leads out of the model's directory"),
        (("config.json", b"{}", RAW), "'config.json' is in it twice"),
    ],
)
def test_layers_that_are_refused(layer: tuple[str | None, bytes, str], said: str, models: Path, tmp_path: Path) -> None:
    layout = Layout()
    layout.layers.append(layout.layer(*layer))
    assert said in refused("unpack", layout.write(tmp_path / "x.tar"), "--to", str(tmp_path / "there"))
    assert not (tmp_path / "there").exists()


def test_layouts_that_are_refused(models: Path, tmp_path: Path) -> None:
    def said(layout: Layout) -> str:
        return refused("unpack", layout.write(tmp_path / "x.tar"), "--to", str(tmp_path / "there"))

    two = Layout()
    two.images = 2
    assert "must name one image" in said(two)
    empty = Layout()
    empty.layers = []
    assert "no layer holds weights" in said(empty)
    wrong = Layout()
    wrong.layers[1]["size"] = 8
    assert "has 7 bytes, and its descriptor says 8" in said(wrong)
    odd = Layout()
    odd.layers[1]["digest"] = "md5:x"
    assert "the digest 'md5:x' is not a SHA-256" in said(odd)
    missing = Layout()
    missing.layers[1]["digest"] = "sha256:" + "0" * 64
    assert f"blobs/sha256/{'0' * 64} is missing" in said(missing)
    other = Layout()
    listed = {"model.safetensors": {"bytes": 7, "sha256": hashlib.sha256(b"weights").hexdigest()}}
    own = {"pulled": "2026-01-01T00:00:00Z", "format": "safetensors", "files": listed}
    other.layers.append(other.layer("model-manifest.json", json.dumps(own).encode()))
    assert "the layers are not the files that its model-manifest.json lists" in said(other)
    copies = Layout()
    copies.layers += [copies.layer(f"{number}.safetensors", b"w" * 9000, RAW) for number in range(20)]
    assert "many times its own" in said(copies)
    many = Layout()
    many.layers *= 3000
    assert "the image has more than 5000 layers" in said(many)
    broken = Layout()
    broken.extra = {"index.json": b"["}
    assert "index.json: not valid JSON" in said(broken)
