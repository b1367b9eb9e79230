"""Writes the page of a folder with results of first contacts: ``python -m benchmarks.contact.report FOLDER``.

The folder has a ``GPU-COMMIT.jsonl`` for each machine: the lines of its ``contact.jsonl``.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmarks.contact.record import lines
from benchmarks.contact.table import number_text, predictions

_HEAD = """# Measured on a GPU

What `make gpu-contact` measured, by machine and commit; [predictions](../README.md) are for an H200. The model has the
shape of Llama 3.1 8B, and random weights. A line in bold is a stage that did not end well or was skipped, or a result
that is not as it must be. The `.jsonl` files have all results, those of details too; `make gpu-report` writes this
page.

From commit 8b43c08 on, times of attention are measured inside CUDA graphs. Before, they contained the host's time to
plan and launch a step, up to nine tenths of the whole; only `varlen_attn` was in a graph already. In `kernels` and
`check` several processes share the GPU: times to compare are those of the stage `attention`.
"""


def page(folder: Path) -> str:
    """Return the page in Markdown."""
    predicted, parts = predictions(), [_HEAD]
    for file in sorted(folder.glob("*.jsonl")):
        gpu, _, commit = file.stem.rpartition("-")
        found = lines(file)
        days = sorted({datetime.fromtimestamp(line["at"], UTC).date().isoformat() for line in found})
        parts += [f"\n## {gpu.upper()}, commit {commit}, {' to '.join(days)}\n", *_table(found, predicted)]
    return "\n".join(parts) + "\n"


def _table(found: list[dict[str, Any]], predicted: Mapping[str, float]) -> Iterator[str]:
    yield "| stage | result | measured | predicted | unit | note |"
    yield "| --- | --- | ---: | ---: | --- | --- |"
    for line in found:
        if line.get("detail") or line.get("outcome") == "done":
            continue
        wrong = "outcome" in line or line.get("good") is False
        value = line["outcome"] if "outcome" in line else number_text(line["value"])
        name, note = line.get("result", ""), " ".join(str(line.get("note", "")).replace("|", "\\|").split())
        cells = [line["stage"], name, value, number_text(predicted.get(name, "")), line.get("unit", ""), note]
        yield "| " + " | ".join(f"**{cell}**" if wrong and cell else cell for cell in cells) + " |"


def _folder(text: str) -> Path:
    if not any(Path(text).glob("*.jsonl")):
        raise argparse.ArgumentTypeError(f"{text} has no GPU-COMMIT.jsonl")
    return Path(text)


if __name__ == "__main__":
    parser = argparse.ArgumentParser("gpu-report", description="Writes the page of what was measured on GPUs.")
    parser.add_argument("folder", type=_folder, help="of the results, GPU-COMMIT.jsonl, and of the page, README.md")
    folder = parser.parse_args().folder
    (folder / "README.md").write_text(page(folder))
