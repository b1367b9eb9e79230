"""Results: a table, a picture and what they show; written as JSON, SVG and a page of a folder's results.

The page is made from the JSON files, so that a run of one measurement leaves the others' results where they are.
"""

from __future__ import annotations

import json
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from inflight.errors import InflightError
from inflight.report.provenance import provenance
from inflight.report.table import cell

if TYPE_CHECKING:  # results without a picture do without what draws
    from matplotlib.figure import Figure

Row = Mapping[str, float | str]
_WIDTH = 120
_PAGE = "README.md"
_FORMER = "inflight bench "
"""How the commands of results begin that are older than ``make bench``."""


@dataclass(frozen=True)
class Result:
    """What was measured."""

    name: str
    """The name of its files."""
    title: str
    finding: str
    """What it shows, and where that ends, in sentences."""
    rows: Sequence[Row]
    """The table; all rows have equal keys, with the units in them."""
    figure: Figure | None = None
    caveat: str = ""
    """What this machine cannot show, and why; it stands in the picture too."""


def write_results(path: Path, command: str, rows: Sequence[Row]) -> None:
    """Write rows as JSON, with all that is needed to read and repeat them."""
    record = {"command": command, **provenance(), "rows": [dict(row) for row in rows]}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(record, indent=1) + "\n")


def write_result(result: Result, folder: Path, command: str) -> None:
    """Write a result's JSON and picture.

    Raises:
        InflightError: the folder cannot be written.
    """
    record = {
        "command": command,
        **provenance(),
        "title": result.title,
        "finding": result.finding,
        "caveat": result.caveat,
        "rows": [dict(row) for row in result.rows],
    }
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{result.name}.json").write_text(json.dumps(record, indent=1) + "\n")
        if result.figure is not None:
            (folder / f"{result.name}.svg").write_text(_picture(result.figure, result))
    except OSError as error:
        raise InflightError(f"{folder}: cannot be written: {error.strerror}") from None


def _picture(figure: Figure, result: Result) -> str:
    from inflight.report.drawing import svg
    from inflight.report.plots import GREY

    figure.suptitle(result.title, x=0.01, ha="left", fontsize=12, fontweight="bold")
    if result.caveat:
        figure.supxlabel(textwrap.fill(result.caveat, _WIDTH), fontsize=8, color=GREY)
    return svg(figure, result.title)


def write_page(folder: Path, title: str, lead: str, order: Sequence[str]) -> None:
    """Write the page of a folder's results; ``order``: their names."""
    paths = {name: path for name in order if (path := folder / f"{name}.json").is_file()}
    records = {name: json.loads(path.read_text()) for name, path in paths.items()}
    parts = [f"# {title}", _wrapped(lead)]
    if any(record["command"].startswith(_FORMER) for record in records.values()):
        lead = "Commands below that begin with `inflight bench` or `inflight profile` were run at an earlier commit."
        parts.append(_wrapped(f"{lead} `make bench` lists the same benchmarks today; `make bench ARGS=soak` is one."))
    for name, record in records.items():
        parts.append(_section(name, record, (folder / f"{name}.svg").is_file()))
    (folder / _PAGE).write_text("\n\n".join(parts) + "\n")


def _section(name: str, record: dict[str, Any], pictured: bool) -> str:
    parts = [f"## {record['title']}", _wrapped(record["finding"])]
    if record["caveat"]:
        parts.append(_wrapped(record["caveat"]))
    if pictured:
        parts.append(f"![{record['title']}]({name}.svg)")
    parts.append(markdown_table(record["rows"]))
    made = f"`{record['command']}`, commit {record['commit']}, {record['date']}, {record['machine']}"
    return "\n\n".join([*parts, f"[{name}.json]({name}.json): {made}"])


def markdown_table(rows: Sequence[Row]) -> str:
    """Return rows with equal keys as a table."""
    names = list(rows[0])
    lines = [
        [name.replace("_", " ") for name in names],
        ["---:" if isinstance(value, int | float) else "---" for value in rows[0].values()],
        *([cell(row[name]) for name in names] for row in rows),
    ]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _wrapped(text: str) -> str:
    return textwrap.fill(text, _WIDTH, break_long_words=False, break_on_hyphens=False)
