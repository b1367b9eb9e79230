"""`inflight serve org/name`: what is pulled is served, what is not is pulled; a directory needs no hub."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from typer.testing import CliRunner

from inflight.cli import app
from inflight.export.plan.commands import _name
from inflight.gguf.files import parts_of
from inflight.resources import DEMO
from inflight.settings.deployment import model_name
from tests.fakes.hub import FakeHub
from tests.hub.support.commands import answer_of, inflight, refused

CHECKPOINT = {path.name: path.read_bytes() for path in (DEMO / "model").iterdir()}


@pytest.mark.parametrize("words", [["org/demo"], ["--model", "org/demo"]], ids=" ".join)
def test_a_model_that_is_not_here_is_pulled(words: list[str], served: list[Path], hub: FakeHub, models: Path) -> None:
    hub.add("org/demo", CHECKPOINT)
    said = inflight("serve", *words).stderr
    commit = hub.repositories["org/demo"].names["main"]
    assert "no directory and no pulled model is called org/demo: pulling it" in said
    assert served == [models / "org/demo" / commit]
    assert model_name(served[0]) == "demo", "and not its commit"


@pytest.mark.parametrize(
    "words", [["serve"], ["serve", "--model"], ["pull"], ["pack"]], ids=["serve", "serve --model", "pull", "pack"]
)
def test_the_path_of_a_file_that_is_not_there_is_no_model_of_the_hub(
    words: list[str], hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models").mkdir()
    (tmp_path / "models/smollm2.gguf").write_bytes(b"GGUF")
    more = ["to.tar"] if words == ["pack"] else []
    said = refused(*words, "models/smolm2.gguf", *more)
    assert said == "there is no file models/smolm2.gguf (did you mean 'smollm2.gguf'?)"
    assert refused(*words, "nowhere/x.gguf", *more) == "there is no file nowhere/x.gguf"
    assert not hub.log


def test_a_model_of_the_hubs_own_cache_has_its_name(tmp_path: Path) -> None:
    assert model_name(tmp_path / "models--org--a-name--b" / "snapshots" / ("0" * 40)) == "a-name--b"


@pytest.mark.parametrize(
    "names", [["m-Q8_0.gguf"], ["m-Q8_0-00001-of-00002.gguf", "m-Q8_0-00002-of-00002.gguf"]], ids=["whole", "in parts"]
)
@pytest.mark.parametrize("way", ["directory", "file", "deployment"])
def test_a_gguf_model_of_the_hubs_own_cache(way: str, names: list[str], served: list[Path], tmp_path: Path) -> None:
    """Its files are links to others, whose names neither end in .gguf nor count parts."""
    cache = tmp_path.resolve() / "models--org--a"
    snapshot = cache / "snapshots" / ("0" * 40)
    snapshot.mkdir(parents=True)
    (cache / "blobs").mkdir()
    for number, name in enumerate(names):
        (cache / "blobs" / f"{number:064}").write_bytes(b"GGUF")
        (snapshot / name).symlink_to(f"../../blobs/{number:064}")
    (tmp_path / "deployment").mkdir()
    (tmp_path / "deployment/deployment.yaml").write_text(f"model: {snapshot / names[0]}\n")
    words = {"directory": snapshot, "file": snapshot / names[0], "deployment": tmp_path / "deployment"}
    inflight("serve", str(words[way]))
    assert served == [snapshot / names[0]]
    assert parts_of(served[0]) == [snapshot / name for name in names]
    assert model_name(served[0]) == "m-Q8_0"
    assert _name(snapshot / names[0]) == names[0], "what a plan of it is called"


def test_a_model_that_is_here_needs_no_hub(served: list[Path], hub: FakeHub, models: Path) -> None:
    hub.add("org/demo", CHECKPOINT)
    inflight("pull", "org/demo")
    hub.log.clear()
    hub.repositories["org/demo"].commit({**CHECKPOINT, "README.md": b"# Newer\n"})
    assert "serving org/demo@" in inflight("serve", "org/demo").stderr
    assert len(served) == 1
    assert not hub.log


def test_a_directory_needs_no_hub(served: list[Path], hub: FakeHub, tmp_path: Path) -> None:
    """Also where it has the form of a model's name."""
    directory = tmp_path / "org/demo"
    directory.mkdir(parents=True)
    for name, data in CHECKPOINT.items():
        (directory / name).write_bytes(data)
    inflight("serve", "org/demo")
    assert served == [directory]
    assert "is not a directory" in refused("serve", "./org/other")
    assert not hub.log


def test_an_architecture_that_is_not_served_is_refused_before_the_download(
    served: list[Path], hub: FakeHub, models: Path
) -> None:
    config = json.loads(CHECKPOINT["config.json"]) | {"architectures": ["NobodyForCausalLM"]}
    hub.add("org/odd", {**CHECKPOINT, "config.json": json.dumps(config).encode()})
    said = refused("serve", "org/odd")
    assert "NobodyForCausalLM" in said
    assert said.endswith("`inflight pull` gets it all the same")
    assert not hub.sent("model.safetensors")
    inflight("pull", "org/odd")


def test_what_cannot_be_had_is_said_in_one_line(
    served: list[Path], hub: FakeHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "there is no model org/nothing at" in refused("serve", "org/nothing")
    assert "has no revision 'v9'" in refused("serve", "org/name@v9")
    assert "'' is not a revision" in refused("serve", "org/name@")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert "HF_HUB_OFFLINE is set, and there is no org/demo in" in refused("serve", "org/demo")
    assert not served


def test_a_damaged_model_is_not_served(served: list[Path], hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.add("org/demo", CHECKPOINT)
    directory = Path(inflight("pull", "org/demo").stdout.strip())
    os.truncate(directory / "model.safetensors", 1000)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert "there is no org/demo in" in refused("serve", "org/demo")
    monkeypatch.delenv("HF_HUB_OFFLINE")
    inflight("serve", "org/demo")
    assert (directory / "model.safetensors").read_bytes() == CHECKPOINT["model.safetensors"], "it was mended"


@pytest.mark.proof
def test_models_are_listed_with_what_this_machine_can_do(hub: FakeHub, models: Path) -> None:
    assert f"no model is in {models}" in inflight("models").stdout
    hub.add("org/demo", CHECKPOINT)
    hub.add("org/gguf", {"tiny-Q8_0.gguf": b"GGUF"})
    directories = [Path(inflight("pull", name).stdout.strip()) for name in ("org/demo", "org/gguf:Q8_0", "org/name")]
    rows = {line.split()[0]: line for line in inflight("models").stdout.splitlines() if "org/" in line}
    demo, gguf, name = (f"{one.parent.parent.name}/{one.parent.name}@{one.name[:12]}" for one in directories)
    assert "LlamaForCausalLM   safetensors   apache-2.0   fits: " in rows[demo]
    assert "tokens/s alone" in rows[demo]
    assert "not served: tiny-Q8_0.gguf: version: the file ends before it does" in rows[f"{gguf}:tiny-Q8_0"]
    assert "not served: " in rows[name]
    config = json.loads(CHECKPOINT["config.json"]) | {"architectures": ["PhiForCausalLM"], "model_type": "phi"}
    hub.add("org/phi", {**CHECKPOINT, "config.json": json.dumps(config).encode()})
    inflight("pull", "org/phi")
    [phi] = [line for line in inflight("models").stdout.splitlines() if "org/phi" in line]
    assert "tokens/s alone" in phi
    (directories[0] / "tokenizer.json").unlink()
    (directories[2] / "model-manifest.json").write_text("{")
    rows = {line.split()[0]: line for line in inflight("models").stdout.splitlines() if "org/" in line}
    assert "tokenizer.json is missing" in rows[demo]
    assert "model-manifest.json: the file: invalid JSON" in rows[name]


@pytest.mark.proof
def test_models_are_removed(hub: FakeHub, models: Path) -> None:
    hub.add("org/gguf", {"tiny-Q8_0.gguf": b"GGUF", "tiny-Q4_0.gguf": b"GGUF"})
    inflight("pull", "org/gguf:Q8_0")
    inflight("pull", "org/gguf:Q4_0")
    hub.faults.cut_after["model.safetensors"] = [300_000] + [0] * 9
    refused("pull", "org/name")
    assert "its pull was interrupted" in inflight("models").stdout
    commit = hub.repositories["org/gguf"].names["main"][:12]
    assert inflight("models", "rm", "org/gguf:Q8_0").stdout == f"removed org/gguf@{commit}:tiny-Q8_0\n"
    assert "there is no model org/gguf:Q8_0 in" in refused("models", "rm", "org/gguf:Q8_0")
    assert inflight("models", "rm", f"org/gguf@{commit}").stdout == f"removed org/gguf@{commit}:tiny-Q4_0\n"
    inflight("models", "rm", "org/name")
    assert not list(models.iterdir()), "folders without models go too"


@pytest.mark.proof
def test_one_pulled_model_answers_a_request(hub: FakeHub) -> None:
    hub.add("org/demo", CHECKPOINT)
    said, answer = answer_of("org/demo")
    assert "pulled org/demo" in said
    assert answer, said


def test_help_names_the_commands() -> None:
    said = CliRunner().invoke(app, ["--help"]).output
    assert all(f" {name} " in said for name in ("pull", "models", "pack", "unpack"))
