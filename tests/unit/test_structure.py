"""The architecture's rules, held: who imports what, and how large things get."""

from __future__ import annotations

import ast
import statistics
import sys
from collections.abc import Iterator
from pathlib import Path

from tests.runner.imports import import_graph
from tests.support.tables import each_row
from tests.unit.support.sources import parsed

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "inflight"
PURE = {"numpy", "pydantic", "yaml", "tokenizers", "jinja2", "regex"}
LAYERS: dict[str, set[str]] = {
    # part of the package: the parts of the package that it may import
    "errors": set(),
    "precedence": set(),
    "turn_ends": set(),
    "addresses": set(),
    "clock": set(),
    "resources": set(),
    "json_text": set(),
    "sampling": {"errors", "json_text"},
    "contract": set(),
    "inputs": {"contract", "errors", "settings"},
    "metrics": {"contract"},
    "settings": {"errors", "gguf"},
    "gguf": {"errors", "precedence", "turn_ends"},
    "machine": set(),
    "shared_counters": set(),
    "logs": {"errors", "settings"},
    "manifest": {"errors", "machine", "settings"},
    "compiled_engine": {"errors", "settings"},
    "text": {"contract", "errors", "gguf", "inputs", "json_text", "precedence", "sampling", "settings", "turn_ends"},
    "engine": {"clock", "errors", "gguf", "metrics", "precedence", "sampling", "settings", "text"},
    "triton": {
        "clock",
        "contract",
        "engine",
        "errors",
        "inputs",
        "logs",
        "metrics",
        "sampling",
        "settings",
        "shared_counters",
        "text",
    },
    "hub": {"engine", "errors", "gguf", "report", "resources"},
    "serve": {
        "addresses",
        "compiled_engine",
        "contract",
        "errors",
        "gguf",
        "hub",
        "manifest",
        "metrics",
        "resources",
        "settings",
        "shared_counters",
    },
    "trtllm": {"clock", "contract", "engine", "errors", "manifest", "sampling", "settings", "text"},
    "client": {"addresses", "contract", "errors", "sampling"},
    "gateway": {
        "addresses",
        "client",
        "contract",
        "errors",
        "inputs",
        "json_text",
        "logs",
        "metrics",
        "resources",
        "sampling",
        "settings",
        "text",
    },
    "report": {"errors", "resources"},
    "export": {
        "engine",
        "errors",
        "gguf",
        "hub",
        "machine",
        "manifest",
        "report",
        "resources",
        "sampling",
        "serve",
        "settings",
        "text",
        "trtllm",
    },
    "load": {"addresses", "client", "errors", "gguf", "report", "resources", "serve", "settings"},
    "top": {"addresses", "client", "contract", "engine", "errors", "metrics", "report"},
    "cli": {"client", "export", "hub", "load", "resources", "serve", "top"},
    "__main__": {"cli"},
}
THIRD_PARTY: dict[str, set[str]] = {
    "addresses": {"httpx"},
    "gguf": {"numpy"},
    "machine": {"pydantic", "pynvml"},
    "engine": {"llguidance", "numpy", "torch", "triton", "safetensors", "transformers"},
    "triton": {"numpy", "opentelemetry", "pydantic", "triton_python_backend_utils"},
    "gateway": {
        "grpc",
        "httptools",
        "jinja2",
        "numpy",
        "prometheus_client",
        "pydantic",
        "starlette",
        "tritonclient",
        "uvicorn",
    },
    "hub": {"httpx", "psutil", "pydantic", "rich", "typer"},
    "serve": {"grpc", "pydantic", "rich", "tritonclient", "typer", "yaml"},
    "trtllm": {"numpy", "tensorrt_llm"},
    "report": {"jinja2", "matplotlib", "numpy", "rich", "typer"},
    "export": {
        "jinja2",
        "matplotlib",
        "modelopt",
        "numpy",
        "psutil",
        "pydantic",
        "pynvml",
        "rich",
        "safetensors",
        "scipy",
        "tensorrt",
        "tensorrt_llm",
        "torch",
        "transformers",
        "typer",
        "yaml",
    },
    "client": {
        "numpy",
        "grpc",
        "opentelemetry",
        "tritonclient",
        "httpx",
        "typer",
        "rich",
        "prompt_toolkit",
        "wcwidth",
    },
    "load": {"matplotlib", "numpy", "pydantic", "rich", "tokenizers", "typer"},
    "top": {"httpx", "prometheus_client", "rich", "typer"},
    "cli": {"typer"},
    "__main__": set(),
}
MAX_FILE_LINES, MAX_BACKEND_LINES, MAX_FUNCTION_LINES = 400, 150, 60
LONG_FILES: dict[str, str] = {}
"""Files over the budget, each with the reason."""


def _files(*folders: str) -> list[Path]:
    return [path for folder in folders for path in sorted((ROOT / folder).rglob("*.py"))]


def _imports(path: Path) -> Iterator[str]:
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: a relative import"
            yield str(node.module)
            if node.module == "inflight":
                yield from (f"inflight.{alias.name}" for alias in node.names)


def _part(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


STAGES = LAYERS["triton"] | {"compiled_engine", "manifest", "triton", "trtllm"}
"""The parts of the package that run inside Triton; the supervisor's, the tools' and the client's do not."""


@each_row("path", _files("backends"), ids=lambda path: str(path.relative_to(ROOT)))
def test_backends_import_what_runs_inside_triton(path: Path) -> None:
    imported = {name.split(".")[1] for name in _imports(path) if name.startswith("inflight.")}
    assert imported <= STAGES, f"a stage must not import {imported - STAGES}"


@each_row("path", _files("inflight"), ids=lambda path: str(path.relative_to(ROOT)))
def test_arrows_point_down_only(path: Path) -> None:
    part = _part(path)
    if part == "__init__":
        assert not path.read_text(), "the package's __init__ stays empty"
        return
    for name in _imports(path):
        top, *rest = name.split(".")
        if top == "inflight":
            assert not rest or rest[0] == part or rest[0] in LAYERS[part], f"{part} must not import {name}"
        elif top not in sys.stdlib_module_names:
            assert top in THIRD_PARTY.get(part, PURE), f"{part} must not import {name}"


def test_no_imports_run_in_a_circle() -> None:
    """Between files, imports for type checking too: of a circle of files none can be read, or changed, alone."""
    graph = import_graph(str(path.relative_to(ROOT)) for path in _files("inflight", "benchmarks"))
    found = {frozenset(circle): " -> ".join([*circle, circle[0]]) for circle in _circles(graph)}
    assert not list(found.values())


def _circles(graph: dict[str, set[str]]) -> Iterator[list[str]]:
    """Yield circles by a search in depth: at least one where there is any."""
    done: set[str] = set()
    path: list[str] = []

    def visit(name: str) -> Iterator[list[str]]:
        path.append(name)
        for imported in sorted(graph[name]):
            if imported in path:
                yield path[path.index(imported) :]
            elif imported not in done:
                yield from visit(imported)
        path.pop()
        done.add(name)

    for name in sorted(graph):
        if name not in done:
            yield from visit(name)


def test_circles_are_found() -> None:
    graph = {"a": {"b"}, "b": {"c", "d"}, "c": {"a"}, "d": set(), "e": {"e2"}, "e2": {"e"}}
    assert list(_circles(graph)) == [["a", "b", "c"], ["e", "e2"]]


def test_only_the_adapters_speak_tritons_python_api() -> None:
    speakers = [path for path in _files("inflight", "backends", "build", "client") if _speaks_triton(path)]
    allowed = [PACKAGE / "triton", ROOT / "backends"]
    assert speakers
    assert all(any(folder in path.parents for folder in allowed) for path in speakers)


def _speaks_triton(path: Path) -> bool:
    return "triton_python_backend_utils" in set(_imports(path))


def test_scripts_are_not_imported() -> None:
    for path in _files("inflight", "backends"):
        tops = {name.split(".")[0] for name in _imports(path)}
        assert not tops & {"benchmarks", "build", "client", "loadtest", "monitoring", "scripts", "tests"}, path


def test_files_stay_within_their_budgets() -> None:
    for path in _files(
        "inflight", "benchmarks", "build", "client", "loadtest", "monitoring", "scripts", "tests", "backends"
    ):
        limit = MAX_BACKEND_LINES if "backends" in path.parts[len(ROOT.parts) : -1][:1] else MAX_FILE_LINES
        lines = len(path.read_text().splitlines())
        name = str(path.relative_to(ROOT))
        assert lines <= limit or name in LONG_FILES, f"{name} has {lines} lines; the budget is {limit}"


def test_functions_stay_within_their_budgets() -> None:
    sizes = []
    for path in _files("inflight", "benchmarks", "backends", "build", "monitoring", "scripts"):
        for node in ast.walk(parsed(path)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                size = (node.end_lineno or 0) - node.lineno + 1
                assert size <= MAX_FUNCTION_LINES, f"{path.name}: {node.name} has {size} lines"
                sizes.append(size)
    assert statistics.median(sizes) <= 10
    assert statistics.quantiles(sizes, n=10)[-1] <= 30


def test_public_things_have_docstrings_and_types() -> None:
    missing = []
    for path in _files("inflight"):
        tree = parsed(path)
        if path.name != "__init__.py" and not ast.get_docstring(tree):
            missing.append(str(path))
        for node in tree.body:
            if not isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                continue
            if not node.name.startswith("_") and not ast.get_docstring(node):
                missing.append(f"{path.name}: {node.name}")
    assert not missing
