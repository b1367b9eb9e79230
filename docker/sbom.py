"""Adds the packages of the distribution to the bill of materials that cyclonedx-py wrote of the Python packages.

    python3 docker/sbom.py python.cdx.json debian-packages.txt sbom.cdx.json

The lines of the second file are those of ``dpkg-query --show --showformat '${Package} ${Version} ${Architecture}\\n'``.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from urllib.parse import quote


def main(python: Path, packages: Path, target: Path) -> None:
    """Write both as one document of CycloneDX."""
    release = _release(Path("/etc/os-release").read_text())
    document = json.loads(python.read_text())
    document["components"] += [_component(*line.split(), release) for line in packages.read_text().splitlines()]
    target.write_text(json.dumps(document, indent=1) + "\n")


def _release(text: str) -> tuple[str, str]:
    """Return the distribution's id and version, e.g. ``("debian", "12")``."""
    values = dict(line.split("=", 1) for line in text.splitlines() if "=" in line)
    return values["ID"].strip('"'), values["VERSION_ID"].strip('"')


def _component(name: str, version: str, architecture: str, release: tuple[str, str]) -> dict[str, str]:
    distribution, number = release
    qualifiers = f"arch={architecture}&distro={distribution}-{number}"
    url = f"pkg:deb/{distribution}/{quote(name)}@{quote(version, safe='')}?{qualifiers}"
    return {"type": "library", "bom-ref": url, "name": name, "version": version, "purl": url}


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
