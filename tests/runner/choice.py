"""Chooses the tests and proofs that a change can reach.

A test file is chosen for a changed file that it rests on. It rests on what it imports, directly or not; on what its own
folder's conftest.py imports; and on the files, folders and modules that it names in a string, e.g. ``ROOT / "docs"``. A
test also rests on what the processes import that it starts. A long proof does not, or each change of the engine would
build container images: ``PROVES`` says what such proofs are about.
"""

from __future__ import annotations

import functools
import re
import subprocess
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from tests.runner.imports import ROOT, backwards, import_graph, module_name, reachable, read_source, tracked_files

PINS = ("pyproject.toml", "constraints.txt")
MOST = (
    *PINS, "Makefile", "deployments/demo/model/", "inflight/contract.py", "inflight/errors.py", "inflight/settings/",
    "tests/conftest.py", "tests/support/", "tests/runner/plugin.py",
)  # fmt: skip
"""A change of one of these reaches all tests, and all long proofs except those of ``PROVES`` that do not list it."""
PROVES = {
    "tests/benchmarks/": ("benchmarks/",),
    "tests/docker/": (
        "docker/", "Dockerfile", "docker-compose.yml", ".dockerignore", ".env.example", "scripts/setup_image.py",
        "docs/upgrading.md", ".ci/docker-engine", "tests/docker/",
    ),
    "tests/monitoring/": (
        "monitoring/", "docs/runbooks/", "docs/monitoring.md", "inflight/metrics.py", "inflight/shared_counters.py",
        "inflight/triton/metrics.py", "inflight/gateway/metrics.py", "inflight/engine/stats.py",
    ),
    "tests/gateway/programs/": (
        *PINS, "inflight/gateway/", "inflight/contract.py", "inflight/errors.py", "benchmarks/clients.py",
        "benchmarks/gateway/", ".ci/", "docs/gateway-agents.md", "tests/gateway/programs/",
    ),
    "tests/published/": (
        *PINS, "inflight/contract.py", "inflight/engine/", "inflight/errors.py", "inflight/gateway/", "inflight/gguf/",
        "inflight/sampling.py", "inflight/settings/", "inflight/text/", "inflight/turn_ends.py", "native/",
        "benchmarks/clients.py", "benchmarks/environments.py", "benchmarks/published/", "tests/published/",
    ),
    "tests/engine/test_attention_compile.py": (*PINS, "inflight/engine/attention/", "inflight/engine/cuda/"),
    "tests/engine/test_between_compile.py": (*PINS, "inflight/engine/attention/", "inflight/engine/cuda/"),
    "tests/engine/test_kernels_compile.py": (*PINS, "inflight/engine/attention/", "inflight/engine/cuda/"),
    "tests/engine/test_fused_layers.py": (
        *PINS, "inflight/engine/attention/", "inflight/engine/cuda/", "inflight/engine/kvcache/memory_pool.py",
        "inflight/engine/model_runner.py", "inflight/engine/models/", "inflight/engine/quant/",
    ),
    "tests/engine/test_native_sanitizers.py": (
        "native/", "inflight/engine/native/", "tests/engine/native/", "tests/engine/test_native_step.py",
    ),
    "tests/engine/test_native_tiles.py": ("native/", "inflight/engine/native/", "tests/engine/native/"),
    "tests/export/test_both_transformers.py": (
        *PINS, "inflight/engine/checkpoint.py", "inflight/engine/models/", "inflight/export/",
    ),
}  # fmt: skip
"""Long proofs of a file or folder run for changes of these paths and of their own helpers, not of what these import."""
_STAGES = tuple(f"backends/{stage}/model.py" for stage in ("tokenizer", "inflight_engine", "detokenizer"))
LINKS = "tests/unit/test_docs_commands.py"
"""It sees where a link of the docs leads nowhere, as one to a file that is deleted."""
READ_ALL = {"tests/unit/test_security_page.py", "tests/unit/test_structure.py"}
"""These look at each file, and prove nothing of what a file does."""
ALSO = {
    "inflight/engine/native/bindings.py": ("native/",),
    "tests/door/test_": ("inflight/serve/", "inflight/gateway/app.py"),
    "tests/export/test_": ("build/", "inflight/export/"),
    "tests/hub/test_": ("inflight/hub/",),
    "tests/load/test_": ("inflight/load/", "inflight/report/", "loadtest/"),
    "tests/monitoring/test_rules.py": ("tests/monitoring/",),
    "tests/triton/test_": (
        "backends/", "model_repository/", "=inflight/engine/factory.py", "=inflight/engine/loop.py",
        "inflight/triton/", "inflight/trtllm/",
    ),
    "tests/triton/test_built_deployment.py": ("build/", "inflight/export/", "scripts/setup.py"),
    "tests/unit/test_chat_terminal.py": ("inflight/client/",),
    "tests/unit/test_data_path.py": _STAGES,
    LINKS: ("CHANGELOG.md", "LICENSE", ".gitignore"),
    "tests/unit/test_demands_and_hints.py": ("inflight/gateway/",),
    "tests/unit/test_gateway_fields.py": ("inflight/gateway/",),
    "tests/unit/test_metrics_export.py": _STAGES,
    "tests/unit/test_program.py": ("inflight/__main__.py", "inflight/cli.py"),
    "tests/unit/test_security_page.py": ("inflight/", "backends/", "model_repository/", "tests/"),
    "tests/unit/test_structure.py": (
        "inflight/", "benchmarks/", "backends/", "build/", "client/", "loadtest/", "monitoring/", "scripts/", "tests/",
    ),
}  # fmt: skip
"""Files rest on these paths besides, which no import shows; on one with ``=`` without what that imports."""
STARTS = {"inflight/serve/server.py": ("backends/", "model_repository/")}
"""A module starts these by other means than the name of a Python module: Triton loads the backends."""
PACKAGES = ("inflight", "benchmarks", "tests")


@dataclass(frozen=True)
class Choice:
    """The chosen files of tests, each with the changed file that it was chosen for."""

    tests: dict[str, str] = field(default_factory=dict)
    proofs: dict[str, str] = field(default_factory=dict)


def choose(changed: Iterable[str], root: Path = ROOT) -> Choice:
    """Return what a change of these files reaches; a file that no test rests on counts as one of ``MOST``.

    Args:
        changed: paths relative to ``root``, those of deleted files too.
        root: the checkout.
    """
    tests, changed = files_of_tests(root), sorted(changed)
    rests_on = RestsOn.of(root, frozenset(path for path in changed if not (root / path).is_file()))
    choice = Choice()
    for path in changed:
        wide, narrow = (rests_on.reached(path, graph).intersection(tests) for graph in (rests_on.wide, rests_on.narrow))
        if path.startswith(MOST) or wide <= READ_ALL:
            wide, narrow = set(tests), narrow | {test for test in tests if not proves(test)}
        if not (root / path).is_file():
            wide.add(LINKS)
        for test in tests:
            if test in wide:
                choice.tests.setdefault(test, path)
            if test in narrow:
                choice.proofs.setdefault(test, path)
    return choice


def files_of_tests(root: Path = ROOT) -> list[str]:
    """Return the files of tests that need no GPU."""
    paths = (path for path in tracked_files(root) if re.fullmatch(r"tests/(.+/)?test_\w+\.py", path))
    return sorted(path for path in paths if not path.startswith("tests/gpu/"))


def changed_files(base: str, root: Path = ROOT) -> set[str]:
    """Return the paths that differ between a commit and the working tree, untracked files included.

    Raises:
        subprocess.CalledProcessError: there is no such commit.
    """
    differs = _git(root, "diff", "--name-only", "--no-renames", "-z", base).split("\0")
    untracked = _git(root, "ls-files", "-z", "--others", "--exclude-standard").split("\0")
    return {path for path in (*differs, *untracked) if path}


def _git(root: Path, *words: str) -> str:
    return subprocess.run(["git", "-C", str(root), *words], check=True, capture_output=True, text=True).stdout


class RestsOn:
    """Finds the files that rest on a path, in two graphs: ``narrow`` for long proofs, ``wide`` for tests.

    A node is the path of a file, or of a folder with a slash at the end.
    """

    @classmethod
    @functools.cache
    def of(cls, root: Path, deleted: frozenset[str] = frozenset()) -> RestsOn:
        """Return the graphs of a checkout, with names of files that were deleted; they are made once."""
        return cls(root, deleted)

    def __init__(self, root: Path, deleted: frozenset[str]) -> None:
        self._root = root
        self._files = tracked_files(root) | deleted
        self._folders = {f"{parent}/" for path in self._files for parent in Path(path).parents if parent.name}
        self._of_tests = {f"{Path(test).parent}/" for test in files_of_tests(root)}
        python = [path for path in self._files if path.endswith(".py")]
        self._imports = import_graph(python, root)
        self._modules = {module_name(path): path for path in python}
        there = [path for path in python if (root / path).is_file()]
        narrow = {path: self._direct(path) for path in there}
        wide = {path: direct | self._starts(path) for path, direct in narrow.items()}
        for test in files_of_tests(root):  # in the wide graph all of it counts
            if proven := set(proves(test)):
                narrow[test] = {path if path.endswith("/") else _alone(path) for path in proven} | self._own(test)
                wide[test] |= proven
        self.narrow, self.wide = backwards(narrow), backwards(wide)

    def reached(self, path: str, graph: Mapping[str, Iterable[str]]) -> set[str]:
        """Return the files that rest on a path, directly or not, and the path itself."""
        return reachable({path, _alone(path), *(f"{parent}/" for parent in Path(path).parents)}, graph)

    def _direct(self, path: str) -> set[str]:
        """Return what a file imports and the packages of that; of tests and helpers what they name, and conftest.py."""
        packages = {str(parent / "__init__.py") for one in self._imports[path] for parent in Path(one).parents}
        direct = self._imports[path] | (packages & self._imports.keys())
        direct |= {one for begin, paths in ALSO.items() if path.startswith(begin) for one in paths}
        if path.startswith("tests/"):
            direct |= self._named(path)
        if Path(path).name.startswith("test_"):
            direct |= self._conftests(path)
        return direct

    def _own(self, test: str) -> set[str]:
        """Return the helpers of a file of tests, without what these import of the package."""
        helpers = {
            path: {one for one in self._imports[path] | self._starts(path) if one.startswith("tests/")}
            for path in self._imports
            if path.startswith("tests/") and (self._root / path).is_file()
        }
        return {_alone(path) for path in reachable({test} | (self._conftests(test) - set(MOST)), helpers)}

    def _conftests(self, test: str) -> set[str]:
        return {str(parent / "conftest.py") for parent in Path(test).parents} & self._imports.keys()

    def _named(self, path: str) -> set[str]:
        """Return the files and folders that a file names, from the root, from tests/ or from its own folder.

        A word such as ``engine`` is no folder of tests.
        """
        said = {name.rstrip("/") for name in read_source(self._root / path).strings}
        names = {f"{begin}{name}" for name in said for begin in ("", "tests/", f"{Path(path).parent}/")}
        folders = {f"{name}/" for name in names} & self._folders
        return names & self._files | {one for one in folders if one[:-1] in said or one not in self._of_tests}

    def _starts(self, path: str) -> set[str]:
        """Return the files that run in the processes that a file starts, and what a module of the package names."""
        source = read_source(self._root / path)
        folders = STARTS.get(path, ())
        found = {one for one in self._imports if one.startswith(folders)} if folders else set()
        if path.startswith("tests/") and source.program:
            found.add("inflight/__main__.py")
        found.update(*map(self._module_files, source.strings))
        return (found | self._named(path) | set(folders)) - {path}

    def _module_files(self, name: str) -> Iterator[str]:
        """Yield the file of a module; of a name that ends with a dot those of the modules whose names begin so."""
        if name.endswith(".") and name.partition(".")[0] in PACKAGES:
            yield from (path for module, path in self._modules.items() if module.startswith(name))
        elif f"{name}.__main__" in self._modules:
            yield self._modules[f"{name}.__main__"]
        elif name in self._modules:
            yield self._modules[name]


def _alone(path: str) -> str:
    """Return the node of a file without what it rests on."""
    return f"={path}"


def proves(test: str) -> tuple[str, ...]:
    """Return what the long proofs of a file are about, by ``PROVES``; nothing: what they import."""
    return next((paths for begin, paths in PROVES.items() if test.startswith(begin)), ())


def by_folder(files: Mapping[str, str]) -> dict[str, int]:
    """Return the number of files in each folder of tests."""
    counts: dict[str, int] = {}
    for path in files:
        folder = path.split("/")[1]
        counts[folder] = counts.get(folder, 0) + 1
    return counts
