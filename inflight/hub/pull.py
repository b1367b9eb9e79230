"""Pulls a model from a hub: says what it is, checks the disk, downloads, checks every byte, and moves it into place."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path

from rich.console import Console

from inflight.errors import DeploymentError
from inflight.hub.download import Downloader
from inflight.hub.model_manifest import (
    MODEL_MANIFEST,
    ModelManifest,
    is_weights,
    now,
    read_manifest,
    write_manifest,
)
from inflight.hub.names import ModelName, is_commit
from inflight.hub.remote import Hub, RemoteFile, Repository, Unreachable
from inflight.hub.screen import Transfer, show_model, tell
from inflight.hub.selection import CONFIG, Selection, select_files
from inflight.hub.settings import HubSettings
from inflight.hub.staging import (
    PARTIAL,
    in_units,
    locked,
    publish,
    require_disk,
    require_empty,
    staging_of,
    sweep,
)
from inflight.hub.store import StoredModel, find_model, look_at, models_folder, place_of
from inflight.hub.verdict import Verdict, judge_config


@dataclass(frozen=True)
class Offer:
    """What a hub has under a name, before a byte of it is downloaded."""

    repository: Repository
    selection: Selection
    verdict: Verdict

    @property
    def files(self) -> Sequence[RemoteFile]:
        """The files to get."""
        return [self.repository.files[path] for path in self.selection.paths]


def pull_model(
    name: ModelName,
    console: Console,
    to: Path | None = None,
    check: Callable[[Verdict], None] = lambda verdict: None,
) -> Path:
    """Get a model that a hub has, and return its directory: ``to``, or its place in the models folder.

    What is here already is not downloaded again; a whole commit that is here is not even asked for. ``check`` is told
    what it is before anything is downloaded, and may refuse it.

    Raises:
        DeploymentError: it cannot be had, or the disk is too small; what was downloaded is kept for the next time.
        KeyboardInterrupt: of the user; the same holds.
    """
    settings = HubSettings.from_environment()
    here = find_model(name)
    if to is None and here is not None and (name.is_pinned or settings.offline):
        tell(console, f"{name} is here already: {here.directory}")
        return here.directory
    if settings.offline:
        raise DeploymentError(f"{settings.offline} is set, and {_found_offline(name, here)}")
    stop = threading.Event()
    with Hub(settings, stop.wait) as hub:
        try:
            offer = look_up(hub, name)
        except Unreachable as error:
            raise DeploymentError(f"{error}; {_found_offline(name, here)}") from None
        check(offer.verdict)
        target = to or place_of(name.repo, offer.repository.commit, offer.selection.variant)
        with locked(target, lambda: tell(console, f"another process pulls {name}; waiting for it")):
            if _is_here(target, offer, to is not None):
                _note_revision(target, name)
                tell(console, f"{name} is here already: {target}")
                return target
            _get(hub, name, offer, target, stop, console)
    return target


def look_up(hub: Hub, name: ModelName) -> Offer:
    """Return what a hub has under a name.

    Raises:
        DeploymentError: no such model, or none of a format that is got.
    """
    repository = hub.repository(name)
    selection = select_files(name, repository.files, lambda path: hub.read(repository, path))
    if selection.format == "gguf":
        from inflight.hub.gguf_header import judge_remote  # and NumPy, which pulls of other formats leave alone

        first = min(path for path in selection.paths if path.endswith(".gguf"))
        return Offer(repository, selection, judge_remote(hub, repository, first))
    verdict = judge_config(hub.read(repository, CONFIG), f"{name.repo}: {CONFIG}")
    return Offer(repository, selection, verdict)


def _get(hub: Hub, name: ModelName, offer: Offer, target: Path, stop: threading.Event, console: Console) -> None:
    repository, staging, files = offer.repository, staging_of(target), offer.files
    require_empty(target)
    _tell_of_others(name, staging, console)
    show_model(console, name, offer.repository, files, offer.verdict, target)
    wanted = {file.path for file in files}
    if staging.exists():
        sweep(staging, wanted.__contains__)
    kept = sum(_kept(staging / file.path, file.bytes) for file in files)
    require_disk(target, sum(file.bytes for file in files) - kept)
    staging.mkdir(parents=True, exist_ok=True)
    try:
        with closing(Transfer(console, sum(file.bytes for file in files), kept)) as transfer:
            done = Downloader(hub, repository, staging, stop, transfer.advance).fetch_all(files)
    except BaseException as error:
        kept = sum(_kept(staging / file.path, file.bytes) for file in files)
        if isinstance(error, KeyboardInterrupt):
            tell(console, f"stopped; {in_units(kept)} are kept, and the same command goes on from there")
        if not kept:
            shutil.rmtree(staging, ignore_errors=True)
        raise
    manifest = ModelManifest(
        pulled=now(),
        repo=repository.repo,
        revisions=(_revision(name),),
        commit=repository.commit,
        source=hub.endpoint,
        license=repository.license,
        architecture=offer.verdict.architecture,
        format=offer.selection.format,
        files={path: done[path] for path in sorted(done)},
    )
    publish(staging, target, manifest)
    tell(console, f"pulled {name}: {target}")


def _kept(path: Path, size: int) -> int:
    """Return how many bytes of a file are there already; a file that is too long begins again."""
    found = path.stat().st_size if path.is_file() else 0
    return found if found <= size else 0


def _is_here(target: Path, offer: Offer, named: bool) -> bool:
    """Return whether the model is at its place, whole.

    A damaged one in the models folder becomes what a pull goes on from; one that the user has ``named`` is left alone.

    Raises:
        DeploymentError: another model is there; or the user's directory is damaged.
    """
    if not target.exists() or (named and not (target / MODEL_MANIFEST).exists()):
        return False
    found, offered = look_at(target), offer.selection.paths
    if found.manifest is not None and _is_another(found.manifest, offer):
        first = min(filter(is_weights, found.manifest.files))
        way = "name another directory" if named else f"`inflight models rm {found.name}` removes it"
        raise DeploymentError(f"{target} holds another model, {first} of {found.manifest.name}; {way}")
    problem = found.problem
    if found.manifest is not None and problem is None and set(found.manifest.files) != set(offered):
        problem = f"{target} holds other files of {found.manifest.name} than are got now; name another directory"
    if problem is None:
        return True
    if named:
        raise DeploymentError(problem)
    shutil.rmtree(staging_of(target), ignore_errors=True)
    target.rename(staging_of(target))
    return False


def _is_another(manifest: ModelManifest, offer: Offer) -> bool:
    """Return whether a manifest is of other weights: files of a model may differ, GGUF files may share a place."""
    is_here = (manifest.repo, manifest.commit, set(filter(is_weights, manifest.files)))
    return is_here != (offer.repository.repo, offer.repository.commit, set(filter(is_weights, offer.selection.paths)))


def _note_revision(target: Path, name: ModelName) -> None:
    """Write down that a model was asked for once more, and by which name: a branch may have come back to it."""
    manifest = read_manifest(target)
    revisions = tuple(sorted({*manifest.revisions, _revision(name)}))
    write_manifest(manifest.model_copy(update={"revisions": revisions, "pulled": now()}), target)


def _revision(name: ModelName) -> str:
    return name.revision or "main"


def _tell_of_others(name: ModelName, staging: Path, console: Console) -> None:
    """Say so where a branch has moved since a pull of it was interrupted: that one is kept as it is."""
    variant = staging.name.partition("-")[2]
    for other in sorted(staging.parent.glob(f".*{PARTIAL}")):
        commit = other.name[1:41]
        if other != staging and other.name.partition("-")[2] == variant and is_commit(commit):
            tell(
                console,
                f"an interrupted pull of another commit is kept: `inflight pull {replace(name, revision=commit)}` goes "
                f"on with it, `inflight models rm {replace(name, revision=commit[:12])}` removes it",
            )


def _found_offline(name: ModelName, here: StoredModel | None) -> str:
    if here is None:
        return f"there is no {name} in {models_folder()}"
    return f"a pulled {name} is in {here.directory}"
