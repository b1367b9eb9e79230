"""Certificates of an authority of the tests' own."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest


def make_authority(folder: Path) -> Path:
    """Return the certificate of a new authority; its key lies beside it."""
    folder.mkdir(exist_ok=True)
    openssl(folder, *"req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 36500".split(),
             *"-subj /CN=authority -keyout ca.key -out ca.crt".split())  # fmt: skip
    return folder / "ca.crt"


def make_certificate(authority: Path, name: str) -> tuple[Path, Path]:
    """Return the files of a new certificate and its key, for 127.0.0.1."""
    folder = authority.parent
    extra = folder / f"{name}.ext"
    extra.write_text("subjectAltName=IP:127.0.0.1,DNS:localhost\n")
    openssl(folder, *"req -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes".split(),
             *f"-subj /CN={name} -keyout {name}.key -out {name}.csr".split())  # fmt: skip
    openssl(folder, *f"x509 -req -in {name}.csr -CA ca.crt -CAkey ca.key -CAcreateserial -days 36500".split(),
             *f"-extfile {name}.ext -out {name}.crt".split())  # fmt: skip
    return folder / f"{name}.crt", folder / f"{name}.key"


def openssl(folder: Path, *arguments: str) -> bytes:
    """Run the program in a folder, and return what it prints; where it is not installed, the test is skipped."""
    if shutil.which("openssl") is None:
        pytest.skip("openssl is not installed")
    return subprocess.run(["openssl", *arguments], cwd=folder, check=True, capture_output=True).stdout
