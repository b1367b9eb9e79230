"""The command that measures published models."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from benchmarks.command import Output, Page, command_line, console, report_results
from inflight.report.failures import one_line_errors

if TYPE_CHECKING:
    from collections.abc import Iterator

    from benchmarks.result import Result

_PAGE = Page(
    "Published models",
    "SmolLM2 135M Instruct (`Q4_1`) and Gemma 3 270M (`Q4_K_M`), GGUF files as others have published them on PyPI; "
    "they are fetched into the user's cache, and nothing of them is in this repository. Written by "
    '`make bench ARGS="published --output docs/results/published"`, of builds with `--builds`.',
    ("kv-types", "builds", "served"),
)


def published(
    pieces: Annotated[int | None, typer.Option(min=1, help="Pieces of 512 tokens; the whole text by default.")] = None,
    builds: Annotated[
        bool, typer.Option("--builds", help="Build and serve SmolLM2 in each precision instead.")
    ] = False,
    output: Output = None,
) -> None:
    """Measure published models: perplexity on prose by the type of the KV cache, or of builds by precision."""
    if builds and pieces:
        raise typer.BadParameter("--pieces is for the types of the KV cache, not for --builds")
    with one_line_errors(console):
        from benchmarks.published.perplexity import measure

    def results() -> Iterator[Result]:
        if builds:
            from benchmarks.published.builds import measure_builds  # ModelOpt and a server come with it

            yield from measure_builds()
        else:
            yield from measure(pieces)

    options = [f"--pieces {pieces}"] if pieces else ["--builds"] if builds else []
    report_results(results, command_line("published", *options), output, _PAGE)
