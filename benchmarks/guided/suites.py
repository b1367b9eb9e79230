"""JSON Schema's own test suite, and instances of other suites: read from a package's archive, or from a folder.

The source archive of `jsonschema` on PyPI has the suite of json-schema-org. It is fetched by pip at a set version.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from inflight.errors import InflightError

PACKAGE = "jsonschema==4.26.0"
_DRAFTS = {
    "draft4": "http://json-schema.org/draft-04/schema#",
    "draft6": "http://json-schema.org/draft-06/schema#",
    "draft7": "http://json-schema.org/draft-07/schema#",
    "draft2019-09": "https://json-schema.org/draft/2019-09/schema",
    "draft2020-12": "https://json-schema.org/draft/2020-12/schema",
}


@dataclass(frozen=True, slots=True)
class Case:
    """A schema, with instances that are valid or not."""

    suite: str
    topic: str
    """The keyword or the source that it is about."""
    schema: Any
    instances: tuple[tuple[Any, bool], ...]


def official_suite(folder: Path) -> Iterator[Case]:
    """Yield JSON-Schema-Test-Suite's cases, which are fetched into ``folder`` where they are not there yet.

    Raises:
        InflightError: they cannot be fetched.
    """
    archive = folder / f"{PACKAGE.replace('==', '-')}.tar.gz"
    if not archive.is_file():
        _fetch(folder)
    with tarfile.open(archive) as files:
        for member in sorted(files.getmembers(), key=lambda one: one.name):
            _, _, path = member.name.partition("/json/tests/")
            draft, _, topic = path.partition("/")
            if draft in _DRAFTS and topic.endswith(".json") and (content := files.extractfile(member)) is not None:
                for group in json.load(content):
                    instances = tuple((test["data"], test["valid"]) for test in group["tests"])
                    yield Case(draft, topic.removesuffix(".json"), _of_draft(group["schema"], draft), instances)


def _of_draft(schema: Any, draft: str) -> Any:
    """Return a schema that says which draft it is of: whoever runs the suite is to assume it."""
    return {"$schema": _DRAFTS[draft], **schema} if isinstance(schema, dict) else schema


def _fetch(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-binary", ":all:"]
    done = subprocess.run([*command, PACKAGE, "--dest", str(folder)], capture_output=True, text=True)
    if done.returncode:
        raise InflightError(f"pip cannot download {PACKAGE}: {done.stderr.strip().splitlines()[-1:]}")


def instances_of(folder: Path) -> Iterator[Case]:
    """Yield the cases of MaskBench's data, a folder of JSON files, each with a schema and its tests.

    Raises:
        InflightError: there are none.
    """
    paths = sorted(folder.glob("*.json"))
    if not paths:
        raise InflightError(f"{folder}: no JSON files; MaskBench's are in its repository, in maskbench/data")
    for path in paths:
        record = json.loads(path.read_text())
        instances = tuple((test["data"], test["valid"]) for test in record.get("tests", ()))
        yield Case("MaskBench", path.name.partition("---")[0].split("_")[0], record["schema"], instances)
