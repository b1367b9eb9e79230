"""Checkpoints of other formats, seen as if they were stored as the schemes of ``quant.linears`` have it.

A reader (``quant.readers``) says of each tensor of a checkpoint what it becomes. ``RelaidTensors`` then stands in place
of the checkpoint's files: it has the names that the model looks for, and lays each tensor out anew when it is read, so
that no more than a few are in memory twice, and none is decoded.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from inflight.errors import DeploymentError


class Tensors(Protocol):
    """What holds the tensors of a checkpoint."""

    names: frozenset[str]

    def load(self, names: Collection[str], take: Callable[[str, Tensor], None]) -> None:
        """Call ``take`` with each of the tensors ``names``, in several threads at once. Raises DeploymentError."""


@dataclass(frozen=True)
class Relay:
    """What becomes of a tensor."""

    name: str | None
    """As the model looks for it; None: it holds nothing that a scheme needs, and is only checked."""
    convert: Callable[[Tensor], Tensor]
    """Lays it out anew. Raises ValueError, which says what is wrong with it, as in "is torch.int8; ...": the name of
    the tensor comes before it."""


class RelaidTensors:
    """The tensors of a checkpoint under the names, and in the layouts, that the model looks for."""

    def __init__(self, tensors: Tensors, relays: Mapping[str, Relay]) -> None:
        """``relays``: by name in the checkpoint; what is not there is taken as it is.

        Raises:
            DeploymentError: two tensors would have the same name.
        """
        self._tensors = tensors
        self._relays = {name: relay for name, relay in relays.items() if name in tensors.names}
        self._sources = {name: name for name in tensors.names - self._relays.keys()}
        for source, relay in self._relays.items():
            if relay.name is not None and relay.name in self._sources:
                raise DeploymentError(f"checkpoint: tensors {self._sources[relay.name]} and {source} are the same")
            self._sources |= {relay.name: source} if relay.name is not None else {}
        self.names = frozenset(self._sources)

    def load(self, names: Collection[str], take: Callable[[str, Tensor], None]) -> None:
        """Call ``take`` with each of the tensors ``names``, in several threads at once; check what belongs to none.

        Raises:
            DeploymentError: a file cannot be read; a tensor is not what its format says; or what ``take`` raises.
        """
        checked = {source for source, relay in self._relays.items() if relay.name is None}
        wanted = {self._sources[name] for name in names if name in self._sources}
        self._tensors.load(wanted | checked, lambda source, tensor: self._take(source, tensor, take))

    def _take(self, source: str, tensor: Tensor, take: Callable[[str, Tensor], None]) -> None:
        relay = self._relays.get(source)
        if relay is None:
            take(source, tensor)
            return
        try:
            relaid = relay.convert(tensor)
        except ValueError as error:
            raise DeploymentError(f"checkpoint: tensor {source} {error}") from None
        if relay.name is None:
            return
        try:
            take(relay.name, relaid)
        except DeploymentError as error:
            if relay.name == source:
                raise
            raise DeploymentError(f"{error} (the checkpoint calls it {source})") from None
