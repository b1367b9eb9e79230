"""`inflight pack` and `inflight unpack`: what goes in comes out, and what someone has made up is refused."""

from __future__ import annotations

import hashlib
import io
import json
import os
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from inflight.hub.model_manifest import read_manifest, write_manifest
from tests.fakes.hub import FakeHub
from tests.hub.conftest import FILES, OURS, WEIGHTS
from tests.hub.support.commands import inflight, refused

Member = tuple[tarfile.TarInfo, bytes]


@pytest.fixture
def pulled(hub: FakeHub) -> Path:
    """The directory of a model that was pulled."""
    return Path(inflight("pull", "org/name").stdout.strip())


@pytest.fixture
def checkpoint(models: Path, tmp_path: Path) -> Path:
    """A directory of one's own."""
    directory = tmp_path / "mine"
    directory.mkdir()
    for name in ("config.json", "tokenizer.json", "model.safetensors", "modeling_llama.py"):
        (directory / name).write_bytes(FILES[name])
    return directory


@pytest.mark.parametrize("kind", ["tar", "oci"])
def test_a_model_goes_to_another_machine(
    kind: str, pulled: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    archive = tmp_path / "model.tar"
    inflight("pack", "org/name", str(archive), "--format", kind)
    monkeypatch.setenv("INFLIGHT_MODELS", str(tmp_path / "elsewhere"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    unpacked = Path(inflight("unpack", str(archive)).stdout.strip())
    assert unpacked == tmp_path / "elsewhere/org/name" / pulled.name
    assert read_manifest(unpacked) == read_manifest(pulled)
    assert all((unpacked / name).read_bytes() == FILES[name] for name in OURS)
    assert "is here already" in inflight("pull", "org/name").stderr
    assert inflight("unpack", str(archive)).stdout.strip() == str(unpacked), "a second time nothing happens"
    alone = tmp_path / "alone"
    assert inflight("pull", str(archive), "--to", str(alone)).stdout.strip() == str(alone)
    assert "6 files are as model-manifest.json says" in inflight("pull", str(alone)).stderr


@pytest.mark.parametrize("kind", ["tar", "oci"])
def test_the_same_model_is_the_same_archive(kind: str, pulled: Path, tmp_path: Path) -> None:
    for name in ("a.tar", "b.tar"):
        inflight("pack", str(pulled), str(tmp_path / name), "--format", kind)
    assert (tmp_path / "a.tar").read_bytes() == (tmp_path / "b.tar").read_bytes()
    assert "b.tar exists" in refused("pack", str(pulled), str(tmp_path / "b.tar"))


@pytest.fixture
def archive(pulled: Path, tmp_path: Path) -> str:
    """An archive of the model that was pulled."""
    inflight("pack", "org/name", str(tmp_path / "model.tar"))
    return str(tmp_path / "model.tar")


@pytest.mark.parametrize("damage", ["a file is gone", "a file is shorter", "the manifest is none", "all is gone"])
def test_a_damaged_model_is_mended_by_its_archive(damage: str, archive: str, pulled: Path, tmp_path: Path) -> None:
    inflight("unpack", archive, "--to", str(tmp_path / "mine"))
    for directory in (pulled, tmp_path / "mine"):
        if damage == "a file is shorter":
            os.truncate(directory / "model.safetensors", 1000)
        elif damage == "the manifest is none":
            (directory / "model-manifest.json").write_text("{")
        for path in directory.iterdir():
            if damage == "all is gone" or (damage == "a file is gone" and path.name == "LICENSE"):
                path.unlink()
    assert inflight("unpack", archive).stdout.strip() == str(pulled)
    assert all((pulled / name).read_bytes() == FILES[name] for name in OURS)
    assert [path.name for path in pulled.parent.iterdir()] == [pulled.name], "nothing else is left"
    if damage != "all is gone":
        refused("unpack", archive, "--to", str(tmp_path / "mine"))


def test_a_model_with_other_files_is_left_alone(archive: str, pulled: Path) -> None:
    manifest = read_manifest(pulled)
    files = {name: file for name, file in manifest.files.items() if name != "LICENSE"}
    write_manifest(manifest.model_copy(update={"files": files}), pulled)
    name = f"org/name@{pulled.name[:12]}"
    said = f"{pulled} holds {name}, with other files; `inflight models rm {name}` removes it"
    assert refused("unpack", archive) == said
    inflight("models", "rm", name)
    inflight("unpack", archive)


def test_what_a_pull_has_kept_stays_until_the_archive_proves_whole(
    archive: str, pulled: Path, hub: FakeHub, tmp_path: Path
) -> None:
    inflight("models", "rm", "org/name")
    hub.faults.cut_after["model.safetensors"] = [300_000] + [0] * 9
    refused("pull", "org/name")
    kept = pulled.with_name(f".{pulled.name}.partial")
    before = {path.name: path.read_bytes() for path in kept.iterdir()}
    data = bytearray(Path(archive).read_bytes())
    data[data.rindex(WEIGHTS[:1024])] ^= 1
    (tmp_path / "broken.tar").write_bytes(data)
    assert "model.safetensors has the SHA-256" in refused("unpack", str(tmp_path / "broken.tar"))
    assert {path.name: path.read_bytes() for path in kept.iterdir()} == before
    inflight("unpack", archive)
    assert [path.name for path in pulled.parent.iterdir()] == [pulled.name]


def test_a_directory_of_ones_own(checkpoint: Path, tmp_path: Path) -> None:
    archive = str(tmp_path / "mine.tar")
    inflight("pack", str(checkpoint), archive)
    assert not (checkpoint / "model-manifest.json").exists(), "packing only reads"
    assert "say where to, with --to DIR" in refused("unpack", archive)
    inflight("unpack", archive, "--to", str(tmp_path / "there"))
    assert {path.name for path in (tmp_path / "there").iterdir()} == {
        "config.json", "tokenizer.json", "model.safetensors", "model-manifest.json"
    }  # fmt: skip
    assert "written, of 3 files" in inflight("pull", str(checkpoint)).stderr
    (checkpoint / "model.safetensors").write_bytes(WEIGHTS[:-1] + b"?")
    assert "has the SHA-256" in refused("pull", str(checkpoint))
    assert "has the SHA-256" in refused("pack", str(checkpoint), str(tmp_path / "again.tar"))
    assert not list(tmp_path.glob("*again*")), "no archive is left, nor half of one"


def test_a_gguf_model_beside_projections_for_images(models: Path, tmp_path: Path) -> None:
    for name in ("mmproj-F16.gguf", "tiny-Q8_0.gguf"):
        (tmp_path / name).write_bytes(name.encode())
    inflight("pull", str(tmp_path))
    assert read_manifest(tmp_path).weights_path(tmp_path) == tmp_path / "tiny-Q8_0.gguf"


def test_a_directory_without_weights(tmp_path: Path, models: Path) -> None:
    assert "there are no weights" in refused("pull", str(tmp_path))
    assert "--to: " in refused("pull", str(tmp_path), "--to", "x")


def _file(name: str, data: bytes, kind: bytes = tarfile.REGTYPE, target: str = "") -> Member:
    info = tarfile.TarInfo(name)
    info.size, info.type, info.linkname = len(data), kind, target
    return info, data


def _manifest(files: dict[str, bytes], **changes: Any) -> Member:
    listed = {name: {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()} for name, data in files.items()}
    value = {"pulled": "2026-01-01T00:00:00Z", "repo": "org/name", "commit": "a" * 40, "format": "safetensors"}
    return _file("model-manifest.json", json.dumps(value | {"files": listed} | changes).encode())


def _write(archive: Path, *members: Member) -> str:
    with tarfile.open(archive, "w") as tar:
        for info, data in members:
            tar.addfile(info, io.BytesIO(data))
    return str(archive)


GOOD = {"config.json": b"{}", "model.safetensors": b"weights"}
MANIFEST = _manifest(GOOD)
CONFIG, MODEL = _file("config.json", b"{}"), _file("model.safetensors", b"weights")
LINK = b"x" * 7


@pytest.mark.parametrize(
    ("members", "said"),
    [
        ([CONFIG, MODEL], "neither model-manifest.json nor oci-layout is in it"),
        ([MANIFEST, CONFIG], "'model.safetensors' is missing"),
        ([MANIFEST, CONFIG, MODEL, _file("run.py", b"")], "'run.py' is in it, and not in its model-manifest.json"),
        ([MANIFEST, CONFIG, MODEL, CONFIG], "'config.json' is in it twice"),
        ([MANIFEST, CONFIG, MODEL, _file("./config.json", b"{}")], "'config.json' is in it twice"),
        ([MANIFEST, CONFIG, _file("model.safetensors", b"weight!")], "has the SHA-256"),
        ([MANIFEST, CONFIG, _file("model.safetensors", b"weights" * 9)], "has 63 bytes, and model-manifest"),
        ([MANIFEST, CONFIG, MODEL, _file("../evil.json", b"{}")], "'../evil.json' leads out of the model's directory"),
        ([MANIFEST, CONFIG, MODEL, _file("/evil.json", b"{}")], "'/evil.json' leads out of the model's directory"),
        ([MANIFEST, CONFIG, _file("model.safetensors", b"", tarfile.SYMTYPE, "/etc/passwd")], "is a link; only plain"),
        ([MANIFEST, CONFIG, _file("model.safetensors", b"", tarfile.LNKTYPE, "config.json")], "is a link; only plain"),
        ([MANIFEST, CONFIG, _file("model.safetensors", b"", tarfile.CHRTYPE)], "is a device; only plain"),
        ([MANIFEST, CONFIG, _file("model.safetensors", b"", tarfile.FIFOTYPE)], "is a device; only plain"),
        ([MANIFEST, CONFIG, _file("evil/", b"", tarfile.DIRTYPE)], "is a directory; only plain"),
        ([_manifest({**GOOD, "../evil.json": b"{}"})], "the file name '../evil.json' leads out of"),
        ([_manifest({**GOOD, "/evil.json": b"{}"})], "the file name '/evil.json' leads out of"),
        ([_manifest({**GOOD, "evil.py": b""})], "'evil.py' is no file of a model"),
        ([_manifest(GOOD, repo="../../evil"), CONFIG, MODEL], "'../../evil' is not the name of a model"),
        ([_manifest(GOOD, commit="../evil"), CONFIG, MODEL], "commit: string should match pattern"),
        ([_manifest(GOOD, commit=None), CONFIG, MODEL], "must be org/name, with a commit"),
        ([_manifest({"config.json": b"{}"}), CONFIG], "it lists no weights in safetensors"),
        ([_manifest(GOOD, format="gguf"), CONFIG, MODEL], "it lists no weights in gguf"),
        ([_manifest(GOOD, surprise=1), CONFIG, MODEL], "surprise: extra inputs are not permitted"),
        ([_file("model-manifest.json", b"{")], "invalid JSON"),
        ([_file("model-manifest.json", b" " * (17 << 20))], "model-manifest.json has 17825792 bytes, too many"),
        ([_manifest({**GOOD, "a.json": b"1", "a.json/b.json": b"2"}), CONFIG, MODEL, _file("a.json", b"1"),
          _file("a.json/b.json", b"2")], "a.json"),
    ],
)  # fmt: skip
def test_what_is_made_up_is_refused(members: list[Member], said: str, models: Path, tmp_path: Path) -> None:
    assert said in refused("unpack", _write(tmp_path / "x.tar", *members))
    assert [path.name for path in tmp_path.rglob("*")] == ["x.tar"], "nothing is left"


def test_an_archive_that_is_none(models: Path, tmp_path: Path) -> None:
    whole = Path(_write(tmp_path / "whole.tar", MANIFEST, CONFIG, _file("model.safetensors", b"weights")))
    broken = tmp_path / "broken.tar"
    for data in (b"", b"no tar at all" * 1000, b"\x1f\x8b" + whole.read_bytes()):
        broken.write_bytes(data)
        assert "not a sound tar archive without compression" in refused("unpack", str(broken))
    assert "nowhere.tar: No such file" in refused("unpack", str(tmp_path / "nowhere.tar"))


def test_an_archive_that_is_cut_off(pulled: Path, tmp_path: Path) -> None:
    whole, cut = tmp_path / "whole.tar", tmp_path / "cut.tar"
    inflight("pack", "org/name", str(whole))
    cut.write_bytes(whole.read_bytes()[:600_000])
    assert str(cut) in refused("unpack", str(cut), "--to", str(tmp_path / "there"))
    assert not (tmp_path / "there").exists()


def test_headers_take_neither_memory_nor_time(models: Path, tmp_path: Path) -> None:
    """A header of the extended format may claim any length, and is read whole; a chain of them is followed by calls."""
    info = tarfile.TarInfo("long")
    info.type, info.size = tarfile.XHDTYPE, 1 << 20
    assert "a header of 1048576 bytes" in refused("unpack", _write(tmp_path / "x.tar", (info, b"1" * (1 << 20))))
    chain = [_file("x", b"9 path=a\n", tarfile.XHDTYPE) for _ in range(5000)]
    assert "not a sound tar archive" in refused("unpack", _write(tmp_path / "y.tar", *chain))


def test_folders_count_as_files_do(models: Path, tmp_path: Path) -> None:
    folders = [_file("blobs", b"", tarfile.DIRTYPE)] * 5000
    assert "more than 5000 files and folders" in refused("unpack", _write(tmp_path / "x.tar", *folders, MANIFEST))


def test_a_file_with_holes(models: Path, tmp_path: Path) -> None:
    """Of a few bytes in the archive it would make any number on the disk."""
    info = tarfile.TarInfo("model.safetensors")
    info.pax_headers = {
        "GNU.sparse.major": "0",
        "GNU.sparse.minor": "1",
        "GNU.sparse.size": "99",
        "GNU.sparse.map": "0,7",
    }
    info.size = 7
    said = refused("unpack", _write(tmp_path / "x.tar", MANIFEST, CONFIG, (info, b"weights")))
    assert "a file with holes" in said


def test_a_disk_that_is_too_small(
    pulled: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, no_room: Callable[[], None]
) -> None:
    archive = tmp_path / "x.tar"
    inflight("pack", "org/name", str(archive))
    no_room()
    assert "are needed" in refused("unpack", str(archive), "--to", str(tmp_path / "there"))
    assert "are needed" in refused("pack", "org/name", str(tmp_path / "y.tar"))
