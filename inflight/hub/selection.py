"""Which files of a repository are got: the weights that are served, and what belongs to them.

Repositories hold the same weights in several formats, e.g. ``original/`` or ``consolidated.safetensors`` beside the
shards. Of safetensors, those that the engine would load are taken: by the index, or the one ``model.safetensors``.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass

from inflight.errors import DeploymentError
from inflight.gguf.files import SPLIT_NAME, is_of_images
from inflight.hub.model_manifest import MODEL_MANIFEST, ModelFormat, ModelManifest, decode_object, is_weights
from inflight.hub.names import ModelName, is_hidden, is_model_file, require_model_file

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
CONFIG = "config.json"
_MOST_LISTED = 20


@dataclass(frozen=True)
class Selection:
    """The files of a model."""

    format: ModelFormat
    paths: tuple[str, ...]
    variant: str | None = None
    """Of a GGUF file its name without the suffix and the number of the part."""


def select_files(name: ModelName, paths: Iterable[str], read: Callable[[str], bytes]) -> Selection:
    """Return which of a repository's ``paths`` make up the model; ``read`` gives the bytes of a small file.

    Raises:
        DeploymentError: there is no such model among them, or more than one; what there is, is listed.
    """
    ours = [path for path in paths if is_model_file(path) and not is_hidden(path) and path != MODEL_MANIFEST]
    for path in ours:
        require_model_file(path, name.repo)
    settings = [path for path in ours if not is_weights(path)]
    if name.gguf is not None:
        variant, parts = select_gguf(name, [path for path in ours if path.endswith(".gguf")])
        return Selection("gguf", (*settings, *parts), variant)
    weights = _select_safetensors(name, ours, read)
    if CONFIG not in settings:
        raise DeploymentError(f"{name.repo} has no {CONFIG}, so it is no checkpoint of a language model")
    return Selection("safetensors", (*settings, *weights))


def _select_safetensors(name: ModelName, paths: Collection[str], read: Callable[[str], bytes]) -> list[str]:
    if INDEX in paths:
        places = decode_object(read(INDEX), f"{name.repo}: {INDEX}").get("weight_map")
        if not isinstance(places, dict) or not places:
            raise DeploymentError(f"{name.repo}: {INDEX}: weight_map must say which file holds which tensor")
        wanted = sorted(set(map(str, places.values())))
        missing = next((path for path in wanted if path not in paths or not path.endswith(".safetensors")), None)
        if missing is not None:
            raise DeploymentError(f"{name.repo}: {INDEX} names {missing!r}, which the repository does not have")
        return wanted
    if SINGLE in paths:
        return [SINGLE]
    ggufs = sorted(_variants(paths))
    if ggufs:
        raise DeploymentError(
            f"{name.repo} has GGUF files and no {SINGLE}; name one, as in {name.repo}:{ggufs[0]}; {_listed(ggufs)}"
        )
    raise DeploymentError(f"{name.repo} has no {SINGLE} and no {INDEX}; other formats of weights are not got")


def select_gguf(name: ModelName, paths: Iterable[str]) -> tuple[str, list[str]]:
    """Return the name and the paths of the GGUF file that ``name.gguf`` means: several where it is split.

    A name that ends in ``.gguf`` is a path, or that of a file in any folder. Else it is a word of the file's or
    folder's name, such as ``Q4_K_M``; case does not matter. Projections for images (``mmproj``) are no models.

    Raises:
        DeploymentError: none matches, or several do, or parts are missing.
    """
    variants, wanted = _variants(paths), name.gguf or ""
    found = sorted(
        variant
        for variant, parts in variants.items()
        if is_variant(variant, wanted) or any(wanted in (path, path.rpartition("/")[2]) for path in parts)
    )
    found = [variant for variant in found if _same(variant, wanted)] or found
    if len(found) != 1:
        problem = f"{len(found)} GGUF files match" if found else "no GGUF file matches"
        known = found or sorted(variants)
        raise DeploymentError(f"{name.repo}: {problem} {wanted!r}; {_listed(known)}")
    parts = variants[found[0]]
    of_split = SPLIT_NAME.fullmatch(parts[0])
    if of_split and len(parts) != int(of_split[3]):
        raise DeploymentError(f"{name.repo}: {found[0]} has {len(parts)} of {int(of_split[3])} parts")
    return found[0], parts


def _variants(paths: Iterable[str]) -> Mapping[str, list[str]]:
    """Return the GGUF files by name without suffix; the parts of a split one together, in order."""
    variants: dict[str, list[str]] = {}
    for path in sorted(path for path in paths if path.endswith(".gguf")):
        if is_of_images(path):
            continue
        part = SPLIT_NAME.fullmatch(path)
        variants.setdefault(part[1] if part else path.removesuffix(".gguf"), []).append(path)
    return variants


def is_variant(variant: str, wanted: str) -> bool:
    """Return whether ``wanted`` is the name of a GGUF file, with its suffix or without, or a word of it."""
    if wanted.endswith(".gguf"):
        return wanted.removesuffix(".gguf") in (variant, variant.rpartition("/")[2])
    if _same(variant, wanted):
        return True
    return bool(re.search(rf"(?:^|[-./]){re.escape(wanted)}(?:$|[-./])", variant, re.IGNORECASE))


def _same(variant: str, wanted: str) -> bool:
    """Return whether a name is meant whole; in the models folder's names dashes stand for slashes."""
    return variant.lower().replace("/", "-") == wanted.lower().replace("/", "-")


def variant_of(manifest: ModelManifest) -> str | None:
    """Return the name of a model's GGUF file, without its suffix; None: it is a safetensors checkpoint."""
    return None if manifest.format == "safetensors" else min(_variants(manifest.files), default=None)


def _listed(variants: Collection[str]) -> str:
    shown = sorted(variants)[:_MOST_LISTED]
    more = f" and {len(variants) - len(shown)} more" if len(variants) > len(shown) else ""
    return f"there is {', '.join(shown)}{more}" if shown else "there is none at all"
