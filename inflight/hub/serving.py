"""What `inflight serve org/name` serves: the model that was pulled, or one that is pulled now."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console

from inflight.errors import DeploymentError
from inflight.hub.model_manifest import decode_object
from inflight.hub.names import parse_model_name
from inflight.hub.pull import pull_model
from inflight.hub.screen import tell, why_not_served
from inflight.hub.selection import CONFIG
from inflight.hub.store import find_model


def model_to_serve(text: str, console: Console) -> Path:
    """Return the checkpoint directory of a model's name.

    One that is here is taken as it is, and no hub is asked. Else it is pulled, unless the engine does not serve its
    architecture.

    Raises:
        DeploymentError: there is no such model, or it cannot be had.
    """
    name = parse_model_name(text)
    if name.gguf is not None:
        raise DeploymentError(f"{name}: GGUF files are not served yet; `inflight pull` gets them all the same")
    found = find_model(name)
    if found is None:
        tell(console, f"no directory and no pulled model is called {text}: pulling it")
        pull_model(name, console, check=_require_served)
        found = find_model(name)
    if found is None or found.manifest is None:
        raise DeploymentError(f"{name} was removed while it was to be served")
    tell(console, f"serving {found.name} from {found.directory}")
    return found.manifest.weights_path(found.directory)


def _require_served(config: bytes | None) -> None:
    if config is not None and (problem := why_not_served(decode_object(config, CONFIG))) is not None:
        raise DeploymentError(f"{problem}; `inflight pull` gets it all the same")
