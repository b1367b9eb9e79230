"""The models folder: ``$INFLIGHT_MODELS``, else ``~/.cache/inflight/models``; in it ``org/name/COMMIT`` is a model.

A GGUF file of a repository is a model of its own, ``org/name/COMMIT-FILE``. Hidden directories there are pulls that
were interrupted (``staging``).
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from inflight.errors import DeploymentError
from inflight.hub.model_manifest import ModelManifest, read_manifest, require_sizes
from inflight.hub.names import ModelName
from inflight.hub.selection import is_variant, select_gguf
from inflight.hub.settings import expand_home
from inflight.hub.staging import PARTIAL, locked, remove_empty, staging_of, target_of

_PARTIAL_NAME = re.compile(rf"\.([0-9a-f]{{40}}.*){re.escape(PARTIAL)}")
_SHORTEST_COMMIT = 7


@dataclass(frozen=True)
class StoredModel:
    """One entry of the models folder."""

    directory: Path
    manifest: ModelManifest | None
    problem: str | None = None
    """Why it cannot be used; None: every file is there, in its size."""

    @property
    def is_partial(self) -> bool:
        """Whether it is a pull that was interrupted."""
        return self.directory.name.endswith(PARTIAL)

    @property
    def repo(self) -> str:
        """The repository's name, by where the entry is."""
        return "/".join(self.directory.parts[-3:-1])

    @property
    def name(self) -> str:
        """The name that commands take for this entry."""
        place = target_of(self.directory).name
        commit, _, variant = place.partition("-")
        return f"{self.repo}@{commit[:12]}" + (f":{variant}" if variant else "")


def models_folder() -> Path:
    """Return where models are kept.

    Raises:
        DeploymentError: ``INFLIGHT_MODELS`` is a relative path, which would be another folder in each directory; or
            the folder is in a home directory, and there is none.
    """
    given = os.environ.get("INFLIGHT_MODELS")
    named = Path(given or os.environ.get("XDG_CACHE_HOME") or "~/.cache")
    path = expand_home(named)
    if path is None:
        raise DeploymentError(f"{named}: there is no such home directory; set INFLIGHT_MODELS to an absolute path")
    if given and not path.is_absolute():
        raise DeploymentError(f"INFLIGHT_MODELS is {given!r}; it must be an absolute path")
    return path if given else path / "inflight/models"


def place_of(repo: str, commit: str, variant: str | None) -> Path:
    """Return the directory of a model."""
    name = commit if variant is None else f"{commit}-{variant.replace('/', '-')}"
    return models_folder() / repo / name


def stored_models() -> list[StoredModel]:
    """Return all entries of the models folder, by name; those that are broken, or not whole, say so."""
    return [_entry(path) for path in sorted(models_folder().glob("*/*/*")) if path.is_dir() and _is_entry(path)]


def _is_entry(path: Path) -> bool:
    return not path.name.startswith(".") or bool(_PARTIAL_NAME.fullmatch(path.name))


def _entry(path: Path) -> StoredModel:
    if path.name.startswith("."):
        return StoredModel(path, None, "its pull was interrupted; the same pull goes on from there")
    return look_at(path)


def look_at(path: Path) -> StoredModel:
    """Return what is in the directory of a model, at its place or elsewhere."""
    manifest = None
    try:
        manifest = read_manifest(path)
        require_sizes(manifest, path)
    except DeploymentError as error:
        return StoredModel(path, manifest, str(error))
    return StoredModel(path, manifest)


def find_model(name: ModelName) -> StoredModel | None:
    """Return the model that is here under a name, of several the one that was pulled last; None: there is none.

    A revision finds what was pulled under that branch or tag, or a commit that begins so.
    """
    found = _by_whole_name([model for model in _whole(name.repo) if _is_meant(model, name)], name)
    return max(found, key=_pulled, default=None)


def _whole(repo: str) -> Iterator[StoredModel]:
    for path in sorted((models_folder() / repo).glob("[!.]*")):
        model = _entry(path)
        if model.problem is None:
            yield model


def _pulled(model: StoredModel) -> tuple[float, str]:
    assert model.manifest is not None
    return model.manifest.pulled.timestamp(), model.directory.name


def _is_meant(model: StoredModel, name: ModelName) -> bool:
    manifest, revision = model.manifest, name.revision
    assert manifest is not None
    if revision is not None and revision not in manifest.revisions and not _begins(manifest.commit or "", revision):
        return False
    if name.gguf is None or manifest.format != "gguf":
        return (manifest.format == "gguf") == (name.gguf is not None)
    try:
        select_gguf(name, manifest.files)
    except DeploymentError:
        return False
    return True


def find_entries(name: ModelName) -> list[StoredModel]:
    """Return every entry that a name means, broken and interrupted ones too: what ``inflight models rm`` removes.

    Raises:
        DeploymentError: there is none.
    """
    found = [
        model
        for model in stored_models()
        if model.repo == name.repo and _has_revision(model, name.revision) and _has_variant(model, name.gguf)
    ]
    if not found:
        raise DeploymentError(f"there is no model {name} in {models_folder()}")
    return _by_whole_name(found, name)


def _by_whole_name(found: list[StoredModel], name: ModelName) -> list[StoredModel]:
    """Return the models whose GGUF file is called so; all, if none is, and the name is a word of theirs."""
    wanted = (name.gguf or "").removesuffix(".gguf").replace("/", "-").lower()
    return [model for model in found if wanted and _variant(model).lower() == wanted] or found


def _has_revision(model: StoredModel, revision: str | None) -> bool:
    commit = model.name.partition("@")[2].partition(":")[0]
    asked = model.manifest.revisions if model.manifest else ()
    return revision is None or revision in asked or _begins(commit, revision) or _begins(revision, commit)


def _begins(commit: str, revision: str) -> bool:
    return len(revision) >= _SHORTEST_COMMIT and commit.startswith(revision)


def _variant(model: StoredModel) -> str:
    return model.name.partition(":")[2]


def _has_variant(model: StoredModel, gguf: str | None) -> bool:
    variant = _variant(model)
    return gguf is None or (bool(variant) and is_variant(variant, gguf.replace("/", "-")))


def remove_entry(model: StoredModel) -> None:
    """Remove an entry: at once from its place, then from the disk.

    Raises:
        DeploymentError: another process writes it, or has moved it since it was found.
    """

    def refuse() -> NoReturn:
        raise DeploymentError(f"another process pulls {model.name}; it is not removed")

    doomed = model.directory
    with locked(target_of(model.directory), refuse):
        if not model.directory.exists():
            raise DeploymentError(f"{model.name} is not there any more; `inflight models` lists what is")
        if not model.is_partial:
            doomed = staging_of(model.directory)
            if doomed.exists():
                shutil.rmtree(doomed)
            os.replace(model.directory, doomed)
        shutil.rmtree(doomed)
    remove_empty((doomed.parent, doomed.parent.parent))  # of the repository and its owner
