"""Which tests and proofs a change is said to reach (`tests/runner/choice.py`), in a small checkout and in this one."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.runner.base import find_base
from tests.runner.choice import ALSO, MOST, PROVES, STARTS, changed_files, choose, files_of_tests
from tests.runner.imports import ROOT

CHECKOUT = {
    "inflight/__main__.py": "from inflight.cli import app",
    "inflight/cli.py": "def app(): from inflight import serve",
    "inflight/serve/server.py": "",
    "inflight/serve/__init__.py": "from inflight.serve import server",
    "inflight/text.py": "",
    "inflight/worker.py": "from inflight import text",
    "inflight/contract.py": "",
    "backends/tokenizer/model.py": "import inflight.text",
    "docs/page.md": "",
    "docs/runbooks/gone.md": "",
    "native/pool.cpp": "",
    "inflight/engine/native/bindings.py": "",
    "model_repository/tokenizer/config.pbtxt": "",
    "tests/engine/test_native_step.py": "import inflight.engine.native.bindings",
    "notes.txt": "",
    "tests/conftest.py": "",
    "tests/unit/test_structure.py": "",
    "tests/a/conftest.py": "import tests.a.support.helper",
    "tests/a/support/helper.py": "import inflight.text",
    "tests/a/test_helped.py": "",
    "tests/b/test_docs.py": 'PAGES = ROOT / "docs"',
    "tests/b/test_page.py": 'PAGE = "docs/page.md"\nKIND = "a"',
    "tests/b/test_serve.py": "import inflight.serve",
    "tests/b/test_program.py": 'run([python, "-m", "inflight"])',
    "tests/b/test_worker.py": 'run([python, "-m", "inflight.worker"])',
    "tests/engine/test_native_tiles.py": "import inflight.text\nimport tests.engine.support.native",
    "tests/engine/support/native.py": "import inflight.text",
    "tests/b/test_fake.py": 'FAKE = TESTS / "fakes/backends"',
    "tests/fakes/backends/model.py": "",
    "tests/gpu/test_gpu.py": "import inflight.text",
}


def _git(root: Path, *words: str) -> str:
    who = ("-c", "user.name=a", "-c", "user.email=a@example.org", "-c", "commit.gpgsign=false")
    return subprocess.run(
        ["git", "-C", str(root), *who, *words], check=True, capture_output=True, text=True
    ).stdout.strip()


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A small checkout of the same shape as this one."""
    root = tmp_path / "checkout"
    for name, text in CHECKOUT.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    _git(root.parent, "init", "-q", "-b", "main", str(root))
    return root


def _names(files: dict[str, str]) -> set[str]:
    """Return the tests' names, without the one that looks at every file."""
    return {Path(path).stem.removeprefix("test_") for path in files} - {"structure"}


@pytest.mark.parametrize(
    ("changed", "tests", "proofs"),
    [
        ("inflight/text.py", {"helped", "serve", "program", "worker", "native_tiles"}, {"helped"}),
        ("inflight/serve/server.py", {"serve", "program"}, {"serve"}),
        ("backends/tokenizer/model.py", {"serve", "program"}, set()),
        ("inflight/worker.py", {"worker"}, set()),
        ("docs/page.md", {"docs", "page"}, {"docs", "page"}),
        ("docs/new.md", {"docs"}, {"docs"}),
        ("native/pool.cpp", {"native_tiles", "native_step"}, {"native_tiles", "native_step"}),
        ("model_repository/tokenizer/config.pbtxt", {"serve", "program"}, set()),
        ("tests/engine/support/native.py", {"native_tiles"}, {"native_tiles"}),
        ("tests/fakes/backends/model.py", {"fake"}, {"fake"}),
        ("tests/b/test_page.py", {"page"}, {"page"}),
        ("tests/a/support/helper.py", {"helped"}, {"helped"}),
    ],
)
def test_what_a_change_reaches(changed: str, tests: set[str], proofs: set[str], checkout: Path) -> None:
    choice = choose([changed], checkout)
    assert (_names(choice.tests), _names(choice.proofs)) == (tests, proofs)
    assert set(choice.tests.values()) == {changed}


@pytest.mark.parametrize(
    "changed",
    [
        "inflight/contract.py", "inflight/settings/keys.py", "tests/conftest.py", "pyproject.toml",
        "Makefile", "notes.txt", "unheard/of.yaml", "scripts/new.sh",
    ],
)  # fmt: skip
def test_what_all_rest_on_or_none_reaches_all_but_what_the_table_names(changed: str, checkout: Path) -> None:
    choice, every = choose([changed], checkout), files_of_tests(checkout)
    assert list(choice.tests) == every
    assert list(choice.proofs) == [test for test in every if test != "tests/engine/test_native_tiles.py"]


def test_a_deleted_module_reaches_what_still_names_it(checkout: Path) -> None:
    (checkout / "inflight/text.py").unlink()
    choice = choose(["inflight/text.py"], checkout)
    assert _names(choice.proofs) == {"helped"}


def test_changed_files(checkout: Path) -> None:
    _git(checkout, "add", ".")
    _git(checkout, "commit", "-q", "-m", "one")
    _git(checkout, "mv", "docs/page.md", "docs/moved.md")
    (checkout / "inflight/text.py").write_text("changed = 1")
    (checkout / "docs/new page.md").touch()
    assert changed_files("HEAD", checkout) == {"docs/page.md", "docs/moved.md", "inflight/text.py", "docs/new page.md"}


@pytest.fixture
def history(checkout: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], str]:
    """Commits, and returns the commit; the environment names no base."""
    monkeypatch.delenv("BASE", raising=False)

    def commit(message: str) -> str:
        _git(checkout, "add", ".")
        _git(checkout, "commit", "-q", "--allow-empty", "-m", message)
        return _git(checkout, "rev-parse", "HEAD")

    return commit


def test_the_base_is_the_merge_base_or_else_the_last_on_record(
    history: Callable[[str], str], checkout: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    passed = tmp_path / "passed.json"
    first, second = history("one"), history("two")
    assert find_base(None, checkout, passed) is None
    passed.write_text(json.dumps({"commit": first[:12]}))
    assert find_base(None, checkout, passed).commit == first  # type: ignore[union-attr]
    _git(checkout, "update-ref", "refs/remotes/origin/main", second)
    assert find_base(None, checkout, passed).commit == first, "the branch itself has no merge base"  # type: ignore[union-attr]
    history("three")
    assert find_base(None, checkout, passed).commit == second  # type: ignore[union-attr]
    monkeypatch.setenv("BASE", "HEAD")
    assert find_base(None, checkout, passed).commit == _git(checkout, "rev-parse", "HEAD")  # type: ignore[union-attr]
    assert find_base(first, checkout, passed).commit == first  # type: ignore[union-attr]
    with pytest.raises(ValueError, match="there is no commit 'nowhere' here"):
        find_base("nowhere", checkout, passed)


def test_a_record_of_another_history_is_no_base(history: Callable[[str], str], checkout: Path, tmp_path: Path) -> None:
    passed = tmp_path / "passed.json"
    history("one")
    other = history("two")
    _git(checkout, "reset", "-q", "--soft", "HEAD~1")
    history("another two")
    passed.write_text(json.dumps({"commit": other}))
    assert find_base(None, checkout, passed) is None


def test_no_file_of_this_checkout_is_named_that_is_not_there() -> None:
    """A table that names what was moved would leave out proofs for good."""
    named = {*MOST, *STARTS, *PROVES, *(name for name in ALSO if name.endswith(".py"))}
    named |= {path for table in (PROVES, ALSO, STARTS) for paths in table.values() for path in paths}
    named = {name.removeprefix("=") for name in named}
    assert not [name for name in named if not (ROOT / name).exists()]
    assert all((ROOT / name).is_dir() == name.endswith("/") for name in named)
    assert all(any(test.startswith(begin) for test in files_of_tests()) for begin in PROVES)


REACHED = [
    ("inflight/load/group.py", "tests", "tests/unit/test_optional_dependencies.py"),
    ("inflight/triton/process.py", "proofs", "tests/unit/test_process.py"),
    ("inflight/engine/engine.py", "proofs", "tests/engine/test_cold_start.py"),
    ("inflight/triton/tracing/stages.py", "tests", "tests/engine/test_factory.py"),
    ("inflight/engine/factory.py", "tests", "tests/unit/test_request_trace.py"),
    ("inflight/trtllm/reading.py", "proofs", "tests/triton/test_trtllm.py"),
    ("inflight/engine/loop.py", "proofs", "tests/triton/test_cancellation.py"),
    ("inflight/client/keyboard.py", "proofs", "tests/unit/test_chat_terminal.py"),
    ("inflight/serve/door_command.py", "proofs", "tests/door/test_door_replicas.py"),
    ("inflight/export/plan/commands.py", "proofs", "tests/export/test_plan_command.py"),
    ("inflight/load/sweep/command.py", "proofs", "tests/load/test_sweep_steps.py"),
    ("inflight/hub/commands.py", "proofs", "tests/hub/test_pull.py"),
    ("inflight/engine/scheduler.py", "proofs", "tests/unit/test_data_path.py"),
    ("inflight/text/postprocess.py", "tests", "tests/unit/test_metrics_export.py"),
    ("inflight/hub/store.py", "tests", "tests/unit/test_security_page.py"),
    ("inflight/gateway/usage.py", "tests", "tests/unit/test_gateway_fields.py"),
    ("loadtest/scenarios/chat.toml", "proofs", "tests/load/test_load_scenarios_run.py"),
    ("deployments/demo/model/config.json", "proofs", "tests/triton/test_guided.py"),
    ("build/gpus.toml", "proofs", "tests/export/test_plan_command.py"),
    ("Makefile", "proofs", "tests/export/test_commands_of_docs.py"),
    ("inflight/export/quantize/modelopt.py", "proofs", "tests/triton/test_built_deployment.py"),
    ("tests/gpu/test_engines.py", "proofs", "tests/benchmarks/test_gpu_suite.py"),
    ("tests/engine/support/compile_kernels.py", "proofs", "tests/engine/test_kernels_compile.py"),
    ("tests/engine/native/absent.cpp", "proofs", "tests/engine/test_native_tiles.py"),
    ("tests/engine/test_native_step.py", "proofs", "tests/engine/test_native_sanitizers.py"),
    ("inflight/gguf/names.py", "proofs", "tests/published/test_greedy.py"),
    ("inflight/settings/kv_cache.py", "proofs", "tests/published/test_greedy.py"),
    ("tests/monitoring/test_trends.py", "tests", "tests/monitoring/test_rules.py"),
    ("client/a_file_that_is_gone.py", "tests", "tests/unit/test_docs_commands.py"),
    ("inflight/client/__init__.py", "tests", "tests/unit/test_client_calls.py"),
]
"""Changes of this checkout, each with a file whose tests or proofs it breaks, which no import of the file shows."""


@pytest.mark.proof
def test_what_no_import_shows_is_reached() -> None:
    assert not [row for row in REACHED if row[2] not in getattr(choose([row[0]]), row[1])]
