"""What `inflight serve org/name` serves: the model that was pulled, or one that is pulled now."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console

from inflight.errors import DeploymentError
from inflight.hub.names import parse_typed_name
from inflight.hub.pull import pull_model
from inflight.hub.screen import tell
from inflight.hub.store import find_model
from inflight.hub.verdict import Verdict


def model_to_serve(text: str, console: Console) -> Path:
    """Return the checkpoint directory, or the GGUF file, of a model's name.

    One that is here is taken as it is, and no hub is asked. Else it is pulled, unless the engine does not serve its
    architecture.

    Raises:
        DeploymentError: there is no such model, or it cannot be had.
    """
    name = parse_typed_name(text)
    found = find_model(name)
    if found is None:
        tell(console, f"no directory and no pulled model is called {text}: pulling it")
        pull_model(name, console, check=_require_served)
        found = find_model(name)
    if found is None or found.manifest is None:
        raise DeploymentError(f"{name} was removed while it was to be served")
    tell(console, f"serving {found.name} from {found.directory}")
    return found.manifest.weights_path(found.directory)


def _require_served(verdict: Verdict) -> None:
    if verdict.problem is not None:
        raise DeploymentError(f"{verdict.problem}; `inflight pull` gets it all the same")
