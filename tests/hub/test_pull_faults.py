"""What goes wrong on the way: each is one clear line, and nothing that is half there is taken for a model."""

from __future__ import annotations

import errno
import gzip
import os
import pwd
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import NoReturn

import pytest
from typer.testing import CliRunner

from inflight.cli import app
from inflight.hub import download, remote
from inflight.hub.model_manifest import read_manifest
from tests.fakes.hub import FakeHub
from tests.hub.conftest import FILES, OURS, WEIGHTS
from tests.hub.support.commands import inflight, refused

SIZE = len(WEIGHTS)


def _partial(models: Path) -> Path:
    """Return the one staging directory."""
    (found,) = models.glob("org/name/.*.partial")
    return found


def test_a_cut_connection_is_taken_up_at_the_byte(hub: FakeHub) -> None:
    hub.faults.cut_after["model.safetensors"] = [300_000, 200_000, 0]
    directory = Path(inflight("pull", "org/name").stdout.strip())
    asked = hub.sent("model.safetensors")[1::2]  # each from the hub and then from its storage
    assert asked[0] is None
    starts = [int(str(one).removeprefix("bytes=").removesuffix("-")) for one in asked[1:]]
    assert starts == sorted(starts)
    assert 0 < starts[0] <= 300_000
    assert starts[-1] < SIZE
    assert (directory / "model.safetensors").read_bytes() == WEIGHTS


def test_the_next_pull_goes_on_at_the_byte(hub: FakeHub, models: Path) -> None:
    hub.faults.cut_after["model.safetensors"] = [300_000, 0, 0, 0, 0, 0, 0, 0]
    assert "model.safetensors: no byte more in 5 tries" in refused("pull", "org/name")
    kept = (_partial(models) / "model.safetensors").stat().st_size
    assert 0 < kept <= 300_000
    assert not list(models.rglob("model-manifest.json"))
    hub.faults.cut_after.clear()
    hub.log.clear()
    directory = Path(inflight("pull", "org/name").stdout.strip())
    assert hub.sent("model.safetensors") == [f"bytes={kept}-"] * 2
    assert (directory / "model.safetensors").read_bytes() == WEIGHTS


def test_what_was_changed_between_two_pulls_is_got_again(hub: FakeHub, models: Path) -> None:
    hub.faults.cut_after["model.safetensors"] = [300_000, 0, 0, 0, 0, 0, 0, 0]
    refused("pull", "org/name")
    staging = _partial(models)
    with (staging / "model.safetensors").open("r+b") as file:
        file.write(b"another")
    (staging / "tokenizer.json").write_bytes(b"[]")
    (staging / "evil.py").write_text("import os")
    (staging / "LICENSE").unlink(missing_ok=True)
    (staging / "LICENSE").symlink_to("/etc/hostname")
    hub.faults.cut_after.clear()
    directory = Path(inflight("pull", "org/name").stdout.strip())
    assert all((directory / name).read_bytes() == FILES[name] for name in OURS)
    assert {path.name for path in directory.iterdir()} == OURS | {"model-manifest.json"}
    assert not any(path.is_symlink() for path in directory.iterdir())


def test_a_hub_without_ranges_sends_the_whole_file_again(hub: FakeHub) -> None:
    hub.faults.no_ranges = True
    hub.faults.cut_after["model.safetensors"] = [300_000]
    directory = Path(inflight("pull", "org/name").stdout.strip())
    assert (directory / "model.safetensors").read_bytes() == WEIGHTS


@pytest.mark.parametrize("path", ["model.safetensors", "tokenizer.json"])
def test_wrong_bytes(path: str, hub: FakeHub, models: Path) -> None:
    hub.faults.wrong_bytes.add(path)
    said = refused("pull", "org/name")
    kind = "SHA-256" if path == "model.safetensors" else "git hash"
    assert f"{path} has the {kind}" in said
    assert said.endswith("it was removed")
    assert not list(models.rglob("model-manifest.json"))
    hub.faults.wrong_bytes.clear()
    inflight("pull", "org/name")


@pytest.mark.parametrize("unsized", [False, True], ids=["with a length", "without a length"])
def test_more_bytes_than_listed(unsized: bool, hub: FakeHub, models: Path) -> None:
    hub.faults.extra_bytes["model.safetensors"] = 5_000_000
    hub.faults.unsized = unsized
    said = refused("pull", "org/name")
    assert f"model.safetensors has {SIZE} bytes by the hub's list, and it sends" in said
    assert all(path.stat().st_size <= SIZE for path in models.rglob("*") if path.is_file())


def test_fewer_bytes_than_listed(hub: FakeHub, models: Path) -> None:
    hub.faults.listed_size["model.safetensors"] = SIZE + 1
    assert f"has {SIZE + 1} bytes by the hub's list, and it sends {SIZE}" in refused("pull", "org/name")
    hub.faults.unsized = True
    assert "model.safetensors" in refused("pull", "org/name")
    assert not list(models.rglob("model-manifest.json"))


def test_a_busy_hub_is_asked_again_when_it_says(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[float | None] = []
    monkeypatch.setattr(remote, "waiting", lambda attempt, asked: waits.append(asked) or 0.0)
    hub.faults.busy = [(503, 7), (429, 11), (500, None)]
    inflight("pull", "org/name")
    assert waits == [7, 11, None]


def test_the_wait_is_what_the_hub_asks_for_within_reason() -> None:
    assert [remote.waiting(attempt, None) for attempt in (0, 1, 2, 10)] == [1, 2, 4, 60]
    assert [remote.waiting(0, asked) for asked in (0, 7, 86400)] == [0, 7, 60]


def test_a_hub_that_stays_busy(hub: FakeHub) -> None:
    hub.faults.busy = [(429, 0)] * 100
    assert f"{hub.address} does not answer after 5 tries: status 429" in refused("pull", "org/name")


def test_a_gated_model(hub: FakeHub, models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.faults.gated = True
    said = refused("pull", "org/name")
    assert said.startswith(f"org/name is gated: accept its terms at {hub.address}/org/name, then set HF_TOKEN")
    assert not models.exists()
    monkeypatch.setenv("HF_TOKEN", "of another account")
    assert "HF_TOKEN holds characters that no token has" in refused("pull", "org/name")
    monkeypatch.setenv("HF_TOKEN", "another")
    assert "org/name is gated, and the token's account has no access" in refused("pull", "org/name")
    monkeypatch.setenv("HF_TOKEN", "accepted")  # and is not sent to the storage, which would refuse it
    inflight("pull", "org/name")


def test_the_token_of_a_login(hub: FakeHub, tmp_path: Path) -> None:
    hub.faults.private = True
    assert "if it is private, set HF_TOKEN" in refused("pull", "org/name")
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf/token").write_text("mine\n")
    inflight("pull", "org/name")


def test_what_does_not_exist(hub: FakeHub, models: Path) -> None:
    assert refused("pull", "org/nothing").startswith(f"there is no model org/nothing at {hub.address}")
    assert refused("pull", "org/name@v9") == f"org/name has no revision 'v9' at {hub.address}"
    assert not models.exists()


def test_a_token_that_is_refused_is_named_by_where_it_is_from(
    hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.faults.answers["/revision/"] = (401, {}, b"")
    assert refused("pull", "org/name") == f"{hub.address} wants a token: set HF_TOKEN (org/name)"
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf/token").write_text("mine\n")
    (tmp_path / "another").write_text("mine\n")
    places = {"HF_TOKEN_PATH": str(tmp_path / "another"), "HUGGING_FACE_HUB_TOKEN": "mine", "HF_TOKEN": "mine"}
    assert f"refuses the token of {tmp_path / 'hf/token'} (org/name)" in refused("pull", "org/name")
    for name, value in places.items():
        monkeypatch.setenv(name, value)
        named = name if value == "mine" else value
        assert refused("pull", "org/name") == f"{hub.address} refuses the token of {named} (org/name)"


def test_offline(hub: FakeHub, models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRANSFORMERS_OFFLINE", "1")
    assert refused("pull", "org/name") == f"TRANSFORMERS_OFFLINE is set, and there is no org/name in {models}"
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert refused("pull", "org/name") == f"HF_HUB_OFFLINE is set, and there is no org/name in {models}"
    assert not hub.log
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    inflight("pull", "org/name")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    hub.log.clear()
    assert "is here already" in inflight("pull", "org/name").stderr
    assert not hub.log


def test_no_route(models: Path) -> None:
    said = refused("pull", "org/name")
    assert said.startswith("cannot reach http://127.0.0.1:9: ")
    assert said.endswith(f"; there is no org/name in {models}")


def test_no_route_and_a_pulled_model(hub: FakeHub, models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    inflight("pull", "org/name")
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    assert f"; a pulled org/name is in {models / 'org/name'}" in refused("pull", "org/name")


@pytest.mark.parametrize("address", ["huggingface.co", "ftp://hub", "http://:80", "http://hub:port"])
def test_an_address_that_is_none(address: str, models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", address)
    assert refused("pull", "org/name").startswith(f"HF_ENDPOINT is {address!r}; it must be an address")


@pytest.mark.parametrize(
    "address", ["https://me:secret@hub", "http://secret@hub:port", "me:secret@hub", "http://[me:secret@hub"]
)
def test_a_password_in_the_address(address: str, models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It would be in every manifest and archive."""
    monkeypatch.setenv("HF_ENDPOINT", address)
    said = refused("pull", "org/name")
    assert said.startswith("HF_ENDPOINT has a user's name or password before an @, which is not taken")
    assert "secret" not in said


def test_a_models_folder_that_moves_with_the_user(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INFLIGHT_MODELS", "models")
    assert refused("pull", "org/name") == "INFLIGHT_MODELS is 'models'; it must be an absolute path"


def test_a_home_directory_that_is_not_there(hub: FakeHub, models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(_uid: int) -> NoReturn:
        raise KeyError

    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(pwd, "getpwuid", unknown)
    monkeypatch.delenv("HF_HOME")
    inflight("pull", "org/name")  # without a token, which needs a home
    monkeypatch.delenv("INFLIGHT_MODELS")
    for words in (("pull", "org/name"), ("models",), ("models", "rm", "org/name"), ("serve", "org/name")):
        said = "~/.cache: there is no such home directory; set INFLIGHT_MODELS to an absolute path"
        assert refused(*words) == said
    monkeypatch.setenv("INFLIGHT_MODELS", "~nobody-is-called-so/models")
    assert refused("models").startswith("~nobody-is-called-so/models: there is no such home directory")


def test_a_disk_that_is_too_small_is_said_before_the_first_byte(
    hub: FakeHub, models: Path, no_room: Callable[[], None]
) -> None:
    no_room()
    said = refused("pull", "org/name")
    assert "has 500.0 kB free, and 1.0 MB are needed: 548." in said
    assert not hub.sent("model.safetensors")
    assert not list(models.rglob("*.safetensors"))


def test_a_disk_that_fills_up_meanwhile(hub: FakeHub, models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By an error of the write; a file system that is full is in test_processes.py."""
    write = download._Writer.write

    def full(self: download._Writer, chunk: bytes) -> None:
        if self.size + len(chunk) > 500_000:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        write(self, chunk)

    monkeypatch.setattr(download._Writer, "write", full)
    said = refused("pull", "org/name")
    assert "model.safetensors: No space left on device, and " in said
    assert said.endswith("make room, and the same command goes on from there")
    assert not list(models.rglob("model-manifest.json"))
    monkeypatch.undo()
    kept = (_partial(models) / "model.safetensors").stat().st_size
    assert 0 < kept <= 500_000


def test_a_damaged_model_is_mended_by_a_pull(hub: FakeHub, models: Path) -> None:
    directory = Path(inflight("pull", "org/name").stdout.strip())
    (directory / "LICENSE").unlink()
    with (directory / "model.safetensors").open("r+b") as file:
        file.truncate(1000)
    hub.log.clear()
    inflight("pull", "org/name")
    assert hub.sent("model.safetensors")[0] == "bytes=1000-"
    assert not hub.sent("tokenizer.json"), "it was whole"
    assert (directory / "model.safetensors").read_bytes() == WEIGHTS


@pytest.mark.parametrize("left", ["model-manifest.json", "model.safetensors", None])
def test_a_half_removed_model_is_mended_by_a_pull(left: str | None, hub: FakeHub) -> None:
    directory = Path(inflight("pull", "org/name").stdout.strip())
    for path in directory.iterdir():
        if path.name != left:
            path.unlink()
    inflight("pull", "org/name")
    assert {path.name for path in directory.iterdir()} == OURS | {"model-manifest.json"}


def test_an_answer_without_an_end(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "LARGEST_MANIFEST", 100)
    assert "the answer has no end" in refused("pull", "org/name")


def _listed(size: str) -> bytes:
    return b'[{"type": "file", "path": "x.safetensors", "lfs": {"oid": "%s", "size": %s}, "size": 1}]' % (
        b"0" * 64,
        size.encode(),
    )


@pytest.mark.parametrize(
    ("part", "answer", "said"),
    [
        ("/tree/", (200, {}, b"[" * 100_000), "not a list of files: RecursionError"),
        ("/tree/", (200, {}, _listed("1e999")), "not a list of files"),
        ("/tree/", (200, {}, _listed("-5")), "not a list of files"),
        ("/tree/", (200, {}, _listed("true")), "not a list of files"),
        ("/tree/", (200, {}, _listed("9" * 5000)), "not a list of files"),
        ("/tree/", (200, {"Link": '</api/models/x>; rel="next"'}, b"[]"), "is no address of the list's next page"),
        ("/tree/", (200, {"Link": '<http://[>; rel="next"'}, b"[]"), "is no address of the list's next page"),
        ("/revision/", (200, {}, b"[" * 100_000), "not valid JSON"),
        ("/revision/", (200, {"Content-Encoding": "gzip"}, gzip.compress(b"{}")), "not valid JSON"),
        ("/revision/", (503, {"Retry-After": "\xb2"}, b""), "does not answer after 5 tries"),
        ("/revision/", (418, {"X-Error-Message": "\x1b[2J"}, b""), "answers 418 \\x1b[2J"),
        ("/storage/", (206, {"Content-Range": f"bytes 0-1/{'9' * 5000}"}, b""), "no byte more in 5 tries"),
        ("/storage/", (302, {"Location": "file:///etc/passwd"}, b""), "unsupported protocol 'file://'"),
        ("/storage/", (302, {"Location": "http://[::g]/"}, b""), "Invalid URL in location header"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_answers_that_no_hub_gives(part: str, answer: tuple[int, dict[str, str], bytes], said: str,
                                   hub: FakeHub) -> None:  # fmt: skip
    hub.faults.answers[part] = answer
    assert said in refused("pull", "org/name")


def test_a_list_of_files_that_goes_on(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "_MOST_ENTRIES", 5)
    hub.faults.page_size = 3
    assert "org/name has more than 5 files and folders" in refused("pull", "org/name")


def test_no_token_goes_to_another_host(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "accepted")
    elsewhere = FakeHub()
    hub.faults.answers["/revision/"] = (302, {"Location": f"{elsewhere.address}/steal"}, b"")
    with elsewhere.running():
        refused("pull", "org/name")
    assert [route for _, route, _ in elsewhere.log] == ["/steal"]
    assert elsewhere.tokens == {""}
    assert hub.tokens == {"accepted"}


@pytest.mark.proof
def test_a_manifest_in_a_repository_is_not_taken_for_ours(hub: FakeHub, models: Path) -> None:
    """A model that was pulled, and uploaded with all that lies in its directory."""
    hub.add("org/name", {**FILES, "model-manifest.json": b"{}"})
    directory = Path(inflight("pull", "org/name").stdout.strip())
    assert set(read_manifest(directory).files) == OURS
    assert "org/name" in inflight("models").stdout


def test_a_pull_that_got_nothing_leaves_nothing(hub: FakeHub, models: Path) -> None:
    hub.add("org/gguf", {"tiny-Q8_0.gguf": b"GGUF"})
    hub.faults.gated = True
    assert "org/gguf is gated" in refused("pull", "org/gguf:Q8_0")
    assert "no model is in" in inflight("models").stdout


def test_an_interrupted_pull_of_a_commit_that_the_branch_has_left(hub: FakeHub, models: Path) -> None:
    hub.faults.cut_after["model.safetensors"] = [300_000, 0, 0, 0, 0, 0, 0, 0]
    refused("pull", "org/name")
    first = hub.repositories["org/name"].names["main"]
    hub.faults.cut_after.clear()
    hub.repositories["org/name"].commit({**FILES, "tokenizer.json": b'{"another": 1}'})
    assert f"`inflight pull org/name@{first}` goes on with it" in inflight("pull", "org/name").stderr
    hub.log.clear()
    inflight("pull", f"org/name@{first}")
    assert str(hub.sent("model.safetensors")[0]).startswith("bytes=")


def test_an_interruption_before_a_connection_has_begun(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    class Interrupted(threading.Thread):
        def start(self) -> None:
            raise KeyboardInterrupt

    monkeypatch.setattr(download, "threading", SimpleNamespace(Thread=Interrupted))
    done = CliRunner().invoke(app, ["pull", "org/name"])
    assert done.exit_code == 130, done.output
    assert done.stderr.endswith("are kept, and the same command goes on from there\n")
