"""OCI image layouts in a tar: ``index.json``, one image manifest, and a blob for each file of the model.

Media types and annotations are those of the CNCF's ModelPack (github.com/modelpack/model-spec), which ``docker model
package`` names files by as well. A layer is one file as it is: layers that are tars themselves are refused.
"""

from __future__ import annotations

import hashlib
import json
import re
import tarfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from inflight.errors import DeploymentError
from inflight.hub.model_manifest import (
    LARGEST_MANIFEST,
    MODEL_MANIFEST,
    ModelFile,
    ModelManifest,
    architecture_of,
    decode_manifest,
    decode_object,
    encode_manifest,
    is_weights,
    now,
)
from inflight.hub.names import is_hidden, is_model_file, require_model_file
from inflight.hub.tar_files import MOST_MEMBERS, add_bytes

LAYOUT = "oci-layout"
_INDEX = "index.json"
_IMAGE = "application/vnd.oci.image.manifest.v1+json"
_MODEL = "application/vnd.cncf.model.manifest.v1+json"
_CONFIG = "application/vnd.cncf.model.config.v1+json"
_WEIGHTS, _SETTINGS, _TEXT = (
    f"application/vnd.cncf.model.{kind}.v1.raw" for kind in ("weight", "weight.config", "doc")
)
_NAMES = ("org.cncf.model.filepath", "org.opencontainers.image.title")
"""Annotations that hold a layer's file name."""
_ARCHIVED = re.compile(r"tar\b|gzip|zstd")

Members = Mapping[str, tarfile.TarInfo]


def read_layout(tar: tarfile.TarFile, members: Members, archive: Path) -> tuple[ModelManifest, Members]:
    """Return the manifest of the model in a layout, and where each of its files is.

    Where a layer is a manifest of Inflight's, it says where the model came from, and must list the same files.

    Raises:
        DeploymentError: it is no layout, has several images, or layers that cannot be read.
    """
    blobs = _Blobs(tar, members, archive)
    images = blobs.document(_INDEX).get("manifests")
    if not isinstance(images, list) or len(images) != 1 or not isinstance(images[0], dict):
        raise DeploymentError(f"{archive}: {_INDEX} must name one image")
    if images[0].get("mediaType") != _IMAGE:
        raise DeploymentError(f"{archive}: {_INDEX}: mediaType {images[0].get('mediaType')!r}; {_IMAGE} is read")
    image = decode_object(blobs.read(images[0]), f"{archive}: the image's manifest")
    layers = image.get("layers")
    if not isinstance(layers, list) or not all(isinstance(layer, dict) for layer in layers):
        raise DeploymentError(f"{archive}: the image's manifest has no layers")
    if len(layers) > MOST_MEMBERS:
        raise DeploymentError(f"{archive}: the image has more than {MOST_MEMBERS} layers")
    found = _by_path(layers, archive)
    own = found.pop(MODEL_MANIFEST, None)
    files = {path: ModelFile(bytes=blobs.find(layer).size, sha256=_digest(layer)) for path, layer in found.items()}
    places = {path: blobs.find(layer) for path, layer in found.items()}
    if own is not None:
        manifest = decode_manifest(blobs.read(own), f"{archive}: {MODEL_MANIFEST}")
        if manifest.files != files:
            raise DeploymentError(f"{archive}: the layers are not the files that its {MODEL_MANIFEST} lists")
        return manifest, places
    if not any(is_weights(path) for path in files):
        raise DeploymentError(f"{archive}: no layer holds weights, neither *.safetensors nor *.gguf")
    config = blobs.read(found["config.json"]) if "config.json" in found else None
    manifest = ModelManifest(
        pulled=now(),
        format="safetensors" if any(path.endswith(".safetensors") for path in files) else "gguf",
        architecture=architecture_of(config, f"{archive}: config.json"),
        files=files,
    )
    return manifest, places


def _by_path(layers: list[dict[str, Any]], archive: Path) -> dict[str, dict[str, Any]]:
    """Return the layers that are a model's files; what else a model's repository has is left out, as from a hub."""
    found: dict[str, dict[str, Any]] = {}
    for number, layer in enumerate(layers):
        kind = str(layer.get("mediaType"))
        if _ARCHIVED.search(kind):
            raise DeploymentError(f"{archive}: layer {number} is of {kind!r}; layers that are one file each are read")
        annotations = layer.get("annotations")
        annotations = annotations if isinstance(annotations, dict) else {}
        path = next((str(annotations[key]) for key in _NAMES if annotations.get(key)), None)
        if path is None and kind.endswith(".license"):
            path = "LICENSE"
        if path is None:
            raise DeploymentError(f"{archive}: layer {number} ({kind!r}) has no {_NAMES[0]} that names its file")
        if is_hidden(path) or not is_model_file(path):
            continue
        require_model_file(path, str(archive))
        if path in found:
            raise DeploymentError(f"{archive}: {path!r} is in it twice")
        found[path] = layer
    return found


class _Blobs:
    """The blobs of a layout, by what describes them."""

    def __init__(self, tar: tarfile.TarFile, members: Members, archive: Path) -> None:
        self._tar, self._members, self._archive = tar, members, archive

    def find(self, descriptor: Mapping[str, Any]) -> tarfile.TarInfo:
        """Return the blob's place; its size is the described one."""
        name = f"blobs/sha256/{_digest(descriptor)}"
        if name not in self._members:
            raise DeploymentError(f"{self._archive}: {name} is missing")
        member = self._members[name]
        if member.size != descriptor.get("size"):
            raise DeploymentError(
                f"{self._archive}: {name} has {member.size} bytes, and its descriptor says {descriptor.get('size')!r}"
            )
        return member

    def read(self, descriptor: Mapping[str, Any]) -> bytes:
        """Return the bytes of a small blob, whose hash is the described one."""
        data = self._bytes(self.find(descriptor))
        if hashlib.sha256(data).hexdigest() != _digest(descriptor):
            raise DeploymentError(f"{self._archive}: the blob {_digest(descriptor)} has another SHA-256")
        return data

    def document(self, name: str) -> dict[str, Any]:
        """Return a JSON object that is not a blob."""
        if name not in self._members:
            raise DeploymentError(f"{self._archive}: {name} is missing")
        return decode_object(self._bytes(self._members[name]), f"{self._archive}: {name}")

    def _bytes(self, member: tarfile.TarInfo) -> bytes:
        if member.size > LARGEST_MANIFEST:
            raise DeploymentError(f"{self._archive}: {member.name} has {member.size} bytes, too many")
        file = self._tar.extractfile(member)
        assert file is not None, "regular files have bytes"
        with file:
            return b"".join(iter(lambda: file.read(1 << 20), b""))


def _digest(descriptor: Mapping[str, Any]) -> str:
    found = re.fullmatch(r"sha256:([0-9a-f]{64})", str(descriptor.get("digest")))
    if found is None:
        raise DeploymentError(f"the digest {descriptor.get('digest')!r} is not a SHA-256")
    return found[1]


def write_layout(tar: tarfile.TarFile, manifest: ModelManifest, add: Callable[[str, str], None]) -> None:
    """Write a model as a layout; ``add`` adds a blob's name and, by its path, one of the model's files."""
    blobs: dict[str, bytes] = {}

    def descriptor(kind: str, data: bytes, **more: Any) -> dict[str, Any]:
        blobs[hashlib.sha256(data).hexdigest()] = data
        return _described(kind, hashlib.sha256(data).hexdigest(), len(data)) | more

    layers = [
        _described(_kind(path), file.sha256, file.bytes) | {"annotations": dict.fromkeys(_NAMES, path)}
        for path, file in manifest.files.items()
    ]
    named = {"annotations": dict.fromkeys(_NAMES, MODEL_MANIFEST)}
    layers.append(descriptor(_TEXT, encode_manifest(manifest), **named))
    config = descriptor(_CONFIG, _encode(_configuration(manifest, [layer["digest"] for layer in layers])))
    image = {"schemaVersion": 2, "mediaType": _IMAGE, "artifactType": _MODEL, "config": config, "layers": layers}
    index = {"schemaVersion": 2, "manifests": [descriptor(_IMAGE, _encode(image), artifactType=_MODEL)]}
    add_bytes(tar, LAYOUT, _encode({"imageLayoutVersion": "1.0.0"}))
    add_bytes(tar, _INDEX, _encode(index))
    for digest, data in blobs.items():
        add_bytes(tar, f"blobs/sha256/{digest}", data)
    places = {file.sha256: path for path, file in manifest.files.items()}  # files of equal bytes are one blob
    for digest, path in places.items():
        if digest not in blobs:
            add(f"blobs/sha256/{digest}", path)


def _configuration(manifest: ModelManifest, digests: list[str]) -> dict[str, Any]:
    facts = {"name": manifest.repo, "revision": manifest.commit, "createdAt": f"{manifest.pulled:%Y-%m-%dT%H:%M:%SZ}"}
    facts |= {"sourceURL": f"{manifest.source}/{manifest.repo}"} if manifest.source else {}
    descriptor: dict[str, Any] = {name: value for name, value in facts.items() if value is not None}
    descriptor |= {"licenses": [manifest.license]} if manifest.license else {}
    config = {"format": manifest.format}
    return {"descriptor": descriptor, "config": config, "modelfs": {"type": "layers", "diffIds": digests}}


def _described(kind: str, digest: str, size: int) -> dict[str, Any]:
    return {"mediaType": kind, "digest": f"sha256:{digest}", "size": size}


def _kind(path: str) -> str:
    if is_weights(path):
        return _WEIGHTS
    return _SETTINGS if path.endswith((".json", ".jinja", ".model")) else _TEXT


def _encode(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()
