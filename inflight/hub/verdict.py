"""Whether the portable engine serves a model, by what can be read of it before it is downloaded."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from inflight.engine.models.adapted.known import require_known
from inflight.engine.models.reading import is_known, read_model_config
from inflight.errors import DeploymentError
from inflight.hub.model_manifest import architecture_of, decode_object


@dataclass(frozen=True)
class Verdict:
    """What a model is, and whether the portable engine serves it."""

    architecture: str | None
    """None: nothing says it."""
    problem: str | None = None
    """Why it is not served; None: it is, or may be."""
    is_adapted: bool = False
    """Whether transformers' code would compute it."""
    cpu_bytes: int | None = None
    """Memory of the weights on a CPU; None: it is that of their files, as far as is known."""

    @property
    def line(self) -> str:
        """In words."""
        if self.problem is not None:
            return f"{self.architecture or 'unknown'}; the portable engine does not serve it: {self.problem}"
        adapted = "; Inflight has no code of its own for it: transformers' may serve it (docs/adapter.md)"
        return f"{self.architecture or 'unknown'}{adapted if self.is_adapted else ''}"


def judge_config(config: bytes, where: str) -> Verdict:
    """Judge a checkpoint by its config.json, which is called ``where``. Raises DeploymentError: it is not JSON."""
    data = decode_object(config, where)
    return Verdict(architecture_of(config, where), why_not_served(data), not is_known(data))


def why_not_served(config: Mapping[str, Any]) -> str | None:
    """Return why the engine does not serve a model, by its config.json; None: it does, or may.

    What transformers' code makes of an architecture that Inflight has no code for is found when it is loaded.
    """
    try:
        if is_known(config):
            read_model_config(config)
        else:
            require_known(config)
    except DeploymentError as error:
        return str(error)
    return None
