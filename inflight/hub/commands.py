"""``inflight pull``, ``inflight pack`` and ``inflight unpack``: models in, and models between machines."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from inflight.errors import DeploymentError
from inflight.hub.archive import ArchiveFormat, pack_model, require_new, unpack_archive
from inflight.hub.local import find_to_pack, pull_path
from inflight.hub.names import parse_typed_name
from inflight.hub.pull import pull_model
from inflight.report.failures import one_line_errors

_console = Console(stderr=True, highlight=False)
_INTERRUPTED = 130

To = Annotated[Path | None, typer.Option(help="Write a directory that stands alone, in place of the models folder.")]


@contextmanager
def _told() -> Iterator[None]:
    with one_line_errors(_console):
        try:
            yield
        except KeyboardInterrupt:
            raise typer.Exit(_INTERRUPTED) from None


def _absolute(to: Path) -> Path:
    path = Path(os.path.abspath(to))
    if not path.name:
        raise DeploymentError(f"--to: {path} cannot become the directory of a model")
    return path


def pull(
    model: Annotated[
        str,
        typer.Argument(help="org/name, org/name@revision, org/name:Q4_K_M; or a directory or archive that is here."),
    ],
    to: To = None,
) -> None:
    """Get a model from the Hugging Face Hub or a mirror, or check one that is here."""
    with _told():
        target = to and _absolute(to)
        if model and Path(model).exists():
            typer.echo(pull_path(Path(model), target, _console))
        else:
            typer.echo(pull_model(parse_typed_name(model), _console, target))


def pack(
    model: Annotated[str, typer.Argument(help="A model that was pulled, by its name, or a checkpoint directory.")],
    archive: Annotated[Path, typer.Argument(help="The file to write.")],
    kind: Annotated[ArchiveFormat, typer.Option("--format", help="tar, or an OCI image layout in a tar.")] = "tar",
) -> None:
    """Write a model as one file, for a machine without a network."""
    with _told():
        require_new(archive)
        directory, manifest = find_to_pack(model, _console)
        pack_model(directory, manifest, archive, kind, _console)


def unpack(archive: Annotated[Path, typer.Argument(help="What `inflight pack` wrote.")], to: To = None) -> None:
    """Check a model that was packed, and write it into the models folder or a directory."""
    with _told():
        typer.echo(unpack_archive(archive, to and _absolute(to), _console))
