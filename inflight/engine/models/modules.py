"""Going through a loaded model's modules to put others in their place."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TypeVar, cast

from torch import nn

_Kind = TypeVar("_Kind", bound=nn.Module)


def each_of(model: nn.Module, kind: type[_Kind]) -> Iterator[tuple[str, _Kind]]:
    """Yield the modules of a kind that a model has now, each with its name; none may lie within another one.

    Only names are kept meanwhile. A list of the modules would hold the weights of all that were replaced, and take as
    much memory as the model once more.
    """
    for name in [name for name, module in model.named_modules() if isinstance(module, kind)]:
        yield name, cast(_Kind, model.get_submodule(name))
