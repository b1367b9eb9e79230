"""`inflight pull org/name`: what is got, where it is, and what is said of it."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest

from inflight.hub import screen
from inflight.hub.model_manifest import read_manifest, write_manifest
from inflight.hub.names import parse_model_name
from inflight.hub.store import find_model
from tests.fakes.hub import FakeHub
from tests.hub.conftest import FILES, OURS
from tests.hub.support.commands import inflight, refused


def _names(directory: Path) -> set[str]:
    return {path.relative_to(directory).as_posix() for path in directory.rglob("*") if path.is_file()}


def test_a_model_is_got_with_a_manifest_of_every_file(hub: FakeHub, models: Path) -> None:
    done = inflight("pull", "org/name")
    commit = hub.repositories["org/name"].names["main"]
    directory = models / "org/name" / commit
    assert done.stdout == f"{directory}\n"
    assert _names(directory) == OURS | {"model-manifest.json"}
    assert all((directory / name).read_bytes() == FILES[name] for name in OURS)
    manifest = read_manifest(directory)
    assert (manifest.repo, manifest.commit, manifest.revisions) == ("org/name", commit, ("main",))
    assert (manifest.license, manifest.architecture) == ("apache-2.0", "LlamaForCausalLM")
    assert {name: (file.bytes, file.sha256) for name, file in manifest.files.items()} == {
        name: (len(FILES[name]), hashlib.sha256(FILES[name]).hexdigest()) for name in OURS
    }
    assert [path.name for path in directory.parent.iterdir()] == [commit], "neither staging nor lock is left"


def test_what_is_about_to_be_got_is_said_first(hub: FakeHub) -> None:
    hub.repositories["org/name"].card = {"license": "other", "license_name": "own-terms"}
    said = inflight("pull", "org/name").stderr
    for words in ("other (own-terms)", "LlamaForCausalLM", "6, 1.0 MB", "1.0 MB of weights", "are free", "(main)"):
        assert words in said
    assert "the portable engine does not serve it: " in said, "the config.json here has no more than a name"


@pytest.mark.proof
def test_what_a_models_author_says_does_nothing_to_the_terminal(hub: FakeHub) -> None:
    hub.repositories["org/name"].card = {"license": "other\x1b[31m", "license_name": "[/bold]\n"}
    for words in (["pull", "org/name"], ["models"]):
        said = inflight(*words).output
        assert "other??31m (?/bold??)" in said
        assert "\x1b" not in said


def test_how_far_it_is_is_told_where_there_is_no_terminal(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(screen, "_LINE_EVERY_S", 0.0)
    assert "inflight: writing: 1.0 MB of 1.0 MB" in inflight("pull", "org/name").stderr


@pytest.mark.parametrize("words", [("pull", "org/name"), ("pull", ".")], ids=" ".join)
def test_a_directory_that_cannot_become_a_model(words: tuple[str, str], hub: FakeHub) -> None:
    assert refused(*words, "--to", "/").startswith("--to: / cannot become the directory of a model")


def test_what_is_here_is_not_got_again(hub: FakeHub) -> None:
    inflight("pull", "org/name")
    hub.log.clear()
    assert "is here already" in inflight("pull", "org/name").stderr
    assert not hub.sent("model.safetensors")


def test_a_whole_commit_that_is_here_is_not_asked_for(hub: FakeHub) -> None:
    inflight("pull", "org/name")
    hub.log.clear()
    commit = hub.repositories["org/name"].names["main"]
    assert "is here already" in inflight("pull", f"org/name@{commit}").stderr
    assert not hub.log


def test_a_branch_that_moves_meanwhile_changes_nothing(hub: FakeHub, models: Path) -> None:
    """The branch is asked for once: all files are of the commit that it was at then."""
    repository = hub.repositories["org/name"]
    first = repository.names["main"]
    hub.faults.page_size = 2
    original = repository.find

    def find_and_move(revision: str) -> str | None:
        found = original(revision)
        if revision == "main":
            repository.commit({**FILES, "tokenizer.json": b'{"another": 1}'})
        return found

    repository.find = find_and_move  # type: ignore[method-assign]
    inflight("pull", "org/name")
    assert read_manifest(models / "org/name" / first).commit == first
    assert (models / "org/name" / first / "tokenizer.json").read_bytes() == b"{}"


def test_a_branch_that_has_moved_is_another_model(hub: FakeHub, models: Path) -> None:
    inflight("pull", "org/name")
    first = hub.repositories["org/name"].names["main"]
    second = hub.repositories["org/name"].commit({**FILES, "tokenizer.json": b'{"another": 1}'})
    inflight("pull", "org/name")
    assert {path.name for path in (models / "org/name").iterdir()} == {first, second}
    found = find_model(parse_model_name(f"org/name@{first[:10]}"))
    assert found is not None
    assert found.directory.name == first


def test_a_branch_that_comes_back_to_a_commit(hub: FakeHub) -> None:
    """What is served without a revision is what was pulled last, not what was downloaded last."""
    repository = hub.repositories["org/name"]
    first = repository.names["main"]
    for commit in (first, repository.commit({**FILES, "tokenizer.json": b'{"another": 1}'}), first):
        repository.names["main"] = repository.names["stable"] = commit
        inflight("pull", "org/name")
        for name in ("org/name", "org/name@main"):
            found = find_model(parse_model_name(name))
            assert found is not None
            assert found.directory.name == commit
    assert find_model(parse_model_name("org/name@stable")) is None
    inflight("pull", "org/name@stable")
    found = find_model(parse_model_name("org/name@stable"))
    assert found is not None
    assert found.manifest is not None
    assert found.manifest.revisions == ("main", "stable")


def test_a_tag_and_a_revision_with_a_slash(hub: FakeHub) -> None:
    repository = hub.repositories["org/name"]
    repository.commit({**FILES, "tokenizer.json": b'{"tag": 1}'}, "v1")
    repository.commit({**FILES, "tokenizer.json": b'{"request": 1}'}, "refs/pr/1")
    for name, said in (("v1", b'{"tag": 1}'), ("refs/pr/1", b'{"request": 1}')):
        directory = Path(inflight("pull", f"org/name@{name}").stdout.strip())
        assert (directory / "tokenizer.json").read_bytes() == said
        found = find_model(parse_model_name(f"org/name@{name}"))
        assert found is not None
        assert found.directory == directory


def test_a_directory_that_stands_alone(hub: FakeHub, models: Path, tmp_path: Path) -> None:
    target = tmp_path / "alone"
    inflight("pull", "org/name", "--to", str(target))
    assert _names(target) == OURS | {"model-manifest.json"}
    assert not models.exists()
    assert "is here already" in inflight("pull", "org/name", "--to", str(target)).stderr
    (target / "LICENSE").unlink()
    assert "LICENSE is missing" in refused("pull", "org/name", "--to", str(target))


def test_a_directory_that_holds_something_is_left_alone(hub: FakeHub, tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/thesis.txt").write_text("years of work")
    assert refused("pull", "org/name", "--to", str(tmp_path / "mine")).endswith("or one that does not exist")
    assert (tmp_path / "mine/thesis.txt").read_text() == "years of work"
    assert not hub.sent("model.safetensors")


def test_shards_are_those_of_the_index(hub: FakeHub) -> None:
    shards = {f"model-0000{n}-of-00002.safetensors": bytes([n]) * 1000 for n in (1, 2)}
    index = {"weight_map": {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}}
    others = {"consolidated.safetensors": b"x", "adapter/adapter.safetensors": b"y"}
    hub.add(
        "org/shards",
        {"config.json": b"{}", "model.safetensors.index.json": json.dumps(index).encode(), **shards, **others},
    )
    directory = Path(inflight("pull", "org/shards").stdout.strip())
    assert {path.name for path in directory.rglob("*.safetensors")} == set(shards)


def test_an_index_that_names_what_is_not_there(hub: FakeHub) -> None:
    index = json.dumps({"weight_map": {"a": "../../etc/passwd"}}).encode()
    hub.add("org/shards", {"config.json": b"{}", "model.safetensors.index.json": index, "a.safetensors": b"x"})
    assert "names '../../etc/passwd', which the repository does not have" in refused("pull", "org/shards")


@pytest.mark.parametrize(
    ("files", "said"),
    [
        ({"pytorch_model.bin": b"x", "config.json": b"{}"}, "has no model.safetensors and no model.safetensors.index"),
        ({"a-Q4_0.gguf": b"x"}, "name one, as in org/odd:a-Q4_0"),
        ({"model.safetensors": b"x"}, "has no config.json"),
        ({"model.safetensors": b"x", "config.json": b"[]"}, "config.json: a JSON object is expected"),
        ({"model.safetensors": b"x", "config.json": b"{"}, "config.json: not valid JSON"),
    ],
)
def test_a_repository_that_is_no_model(files: dict[str, bytes], said: str, hub: FakeHub, models: Path) -> None:
    hub.add("org/odd", files)
    assert said in refused("pull", "org/odd")
    assert not list(models.rglob("*")), "nothing is left"


@pytest.mark.parametrize("path", ["../evil.json", "/etc/evil.json", "a/../../evil.json", "a\\evil.json"])
def test_a_hub_that_names_files_elsewhere(path: str, hub: FakeHub, models: Path, tmp_path: Path) -> None:
    hub.add("org/evil", {**FILES, path: b"{}"})
    assert "leads out of the model's directory" in refused("pull", "org/evil")
    assert not list(tmp_path.rglob("*evil*"))


@pytest.mark.parametrize(
    "listed_as",
    ["", "https://hub.example", "https://mirror.example/artifactory/api/huggingfaceml/remote"],
    ids=["of its own", "of what it mirrors", "of a path with api in it"],
)
def test_the_list_of_files_has_pages(listed_as: str, hub: FakeHub) -> None:
    hub.faults.page_size, hub.listed_as = 3, listed_as
    directory = Path(inflight("pull", "org/name").stdout.strip())
    assert set(read_manifest(directory).files) == OURS


GGUFS = {
    **{f"tiny-{kind}.gguf": f"GGUF {kind}".encode() for kind in ("Q4_K_M", "Q4_K_S", "Q8_0")},
    "UD/tiny-UD-Q2_K-00001-of-00002.gguf": b"GGUF first",
    "UD/tiny-UD-Q2_K-00002-of-00002.gguf": b"GGUF second",
    "half-Q5_0-00001-of-00002.gguf": b"GGUF of which a part is missing",
    "mmproj-F16.gguf": b"GGUF of images",
    "README.md": b"# Quantized\n",
}


@pytest.mark.parametrize(
    ("wanted", "found"),
    [
        ("Q4_K_M", {"tiny-Q4_K_M.gguf"}),
        ("q8_0", {"tiny-Q8_0.gguf"}),
        ("tiny-Q4_K_S.gguf", {"tiny-Q4_K_S.gguf"}),
        ("UD-Q2_K", {"UD/tiny-UD-Q2_K-00001-of-00002.gguf", "UD/tiny-UD-Q2_K-00002-of-00002.gguf"}),
        (
            "UD/tiny-UD-Q2_K-00001-of-00002.gguf",
            {"UD/tiny-UD-Q2_K-00001-of-00002.gguf", "UD/tiny-UD-Q2_K-00002-of-00002.gguf"},
        ),
    ],
)
def test_one_file_of_a_gguf_repository(wanted: str, found: set[str], hub: FakeHub) -> None:
    hub.add("org/gguf", GGUFS)
    directory = Path(inflight("pull", f"org/gguf:{wanted}").stdout.strip())
    manifest = read_manifest(directory)
    assert set(manifest.files) == found | {"README.md"}
    assert manifest.format == "gguf"
    assert manifest.weights_path(directory) == directory / min(found)
    here = find_model(parse_model_name(f"org/gguf:{wanted}"))
    assert here is not None
    assert here.directory == directory


def test_the_exact_name_of_a_gguf_file_is_no_word_of_another(hub: FakeHub, models: Path) -> None:
    hub.add("org/gguf", {"tiny.gguf": b"GGUF one", "tiny-large.gguf": b"GGUF two"})
    directory = Path(inflight("pull", "org/gguf:tiny").stdout.strip())
    assert (directory / "tiny.gguf").read_bytes() == b"GGUF one"
    inflight("pull", "org/gguf:tiny-large")
    here = find_model(parse_model_name("org/gguf:tiny"))
    assert here is not None
    assert here.directory == directory


def test_gguf_files_that_share_a_place(hub: FakeHub, models: Path) -> None:
    """Dashes stand for slashes there."""
    hub.add("org/gguf", {"Q4/model.gguf": b"GGUF one", "Q4-model.gguf": b"GGUF two"})
    directory = Path(inflight("pull", "org/gguf:Q4/model.gguf").stdout.strip())
    commit = hub.repositories["org/gguf"].names["main"][:12]
    said = refused("pull", "org/gguf:Q4-model.gguf")
    assert said == (
        f"{directory} holds another model, Q4/model.gguf of org/gguf@{commit}; "
        f"`inflight models rm org/gguf@{commit}:Q4-model` removes it"
    )
    assert (directory / "Q4/model.gguf").read_bytes() == b"GGUF one"
    inflight("models", "rm", f"org/gguf@{commit}:Q4-model")
    inflight("pull", "org/gguf:Q4-model.gguf")
    assert (directory / "Q4-model.gguf").read_bytes() == b"GGUF two"


def test_a_model_that_was_got_with_fewer_files_is_completed(hub: FakeHub, tmp_path: Path) -> None:
    """As another version of the program may have chosen them."""
    for words in ([], ["--to", str(tmp_path / "mine")]):
        directory = Path(inflight("pull", "org/name", *words).stdout.strip())
        (directory / "LICENSE").unlink()
        manifest = read_manifest(directory)
        files = {name: file for name, file in manifest.files.items() if name != "LICENSE"}
        write_manifest(manifest.model_copy(update={"files": files}), directory)
    assert "holds other files of org/name@" in refused("pull", "org/name", "--to", str(tmp_path / "mine"))
    directory = Path(inflight("pull", "org/name").stdout.strip())
    assert (directory / "LICENSE").read_bytes() == FILES["LICENSE"]


@pytest.mark.parametrize(
    ("wanted", "said"),
    [
        ("Q4_K", "no GGUF file matches 'Q4_K'; there is UD/tiny-UD-Q2_K, half-Q5_0, tiny-Q4_K_M"),
        ("tiny", "4 GGUF files match 'tiny'; there is UD/tiny-UD-Q2_K, tiny-Q4_K_M, tiny-Q4_K_S, tiny-Q8_0"),
        ("F16", "no GGUF file matches 'F16'"),
        ("nowhere.gguf", "no GGUF file matches 'nowhere.gguf'"),
        ("Q5_0", "half-Q5_0 has 1 of 2 parts"),
    ],
)
def test_a_gguf_file_that_is_not_one(wanted: str, said: str, hub: FakeHub, models: Path) -> None:
    hub.add("org/gguf", GGUFS)
    assert said in refused("pull", f"org/gguf:{wanted}")
    assert not models.exists()
