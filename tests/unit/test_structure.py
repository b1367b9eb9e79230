"""The architecture's rules, held: who imports what, and how large things get."""

from __future__ import annotations

import ast
import statistics
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "inflight"
PURE = {"numpy", "pydantic", "yaml", "tokenizers", "jinja2"}
LAYERS: dict[str, set[str]] = {
    # part of the package: the parts of the package that it may import
    "errors": set(),
    "addresses": set(),
    "resources": set(),
    "sampling": {"errors"},
    "contract": set(),
    "inputs": {"contract", "errors"},
    "speculation": {"errors"},
    "explain": {"errors"},
    "metrics": {"contract"},
    "sizes": set(),
    "batching": {"sizes"},
    "kv_cache": {"sizes"},
    "observability": set(),
    "deployment": {"batching", "errors", "explain", "kv_cache", "observability", "speculation"},
    "tracing": {"observability"},
    "compiled_engine": {"deployment", "errors", "speculation"},
    "machine": set(),
    "pulse": set(),
    "manifest": {"deployment", "errors", "machine"},
    "limits": {"deployment", "errors", "inputs"},
    "text": {"contract", "deployment", "errors", "inputs", "limits", "sampling"},
    "engine": {"deployment", "errors", "metrics", "sampling", "sizes", "speculation", "text"},
    "triton": {
        "contract",
        "deployment",
        "engine",
        "errors",
        "inputs",
        "limits",
        "metrics",
        "observability",
        "pulse",
        "sampling",
        "text",
        "tracing",
    },
    "serve": {
        "addresses",
        "compiled_engine",
        "contract",
        "deployment",
        "errors",
        "manifest",
        "metrics",
        "observability",
        "pulse",
        "resources",
        "speculation",
    },
    "trtllm": {
        "contract",
        "deployment",
        "engine",
        "errors",
        "manifest",
        "sampling",
        "sizes",
        "text",
    },
    "client": {"addresses", "contract", "errors"},
    "report": {"errors", "resources", "serve"},
    "export": {
        "deployment",
        "engine",
        "errors",
        "machine",
        "manifest",
        "report",
        "resources",
        "sampling",
        "serve",
        "speculation",
        "text",
        "trtllm",
    },
    "bench": {
        "addresses",
        "client",
        "contract",
        "deployment",
        "engine",
        "errors",
        "export",
        "load",
        "observe",
        "pulse",
        "report",
        "resources",
        "sampling",
        "serve",
        "speculation",
        "text",
    },
    "load": {
        "addresses",
        "client",
        "deployment",
        "errors",
        "explain",
        "machine",
        "metrics",
        "report",
        "resources",
        "serve",
    },
    "monitoring": {"addresses", "contract", "errors", "metrics", "report", "serve"},
    "observe": {
        "addresses",
        "client",
        "contract",
        "deployment",
        "engine",
        "errors",
        "load",
        "metrics",
        "report",
        "resources",
        "sampling",
        "serve",
    },
    "cli": {"bench", "client", "export", "load", "monitoring", "observe", "resources", "serve"},
    "__main__": {"cli"},
}
THIRD_PARTY: dict[str, set[str]] = {
    "addresses": {"httpx"},
    "machine": {"pydantic", "pynvml"},
    "engine": {"numpy", "torch", "triton", "safetensors"},
    "triton": {"numpy", "triton_python_backend_utils"},
    "serve": {"typer", "rich", "yaml", "pydantic"},
    "trtllm": {"numpy", "tensorrt_llm"},
    "report": {"jinja2", "matplotlib", "rich", "typer"},
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
    "tracing": {"opentelemetry"},
    "bench": {
        "grpc",
        "httpx",
        "matplotlib",
        "numpy",
        "psutil",
        "rich",
        "safetensors",
        "torch",
        "transformers",
        "triton",
        "tritonclient",
        "typer",
    },
    "load": {
        "flask",
        "gevent",
        "grpc",
        "httpx",
        "locust",
        "matplotlib",
        "numpy",
        "prometheus_client",
        "psutil",
        "pydantic",
        "rich",
        "tokenizers",
        "tritonclient",
        "typer",
        "yaml",
    },
    "monitoring": {"grafana_foundation_sdk", "httpx", "matplotlib", "prometheus_client", "rich", "typer", "yaml"},
    "observe": {"httpx", "numpy", "prometheus_client", "rich", "torch", "typer"},
    "cli": {"typer"},
    "__main__": set(),
}
MAX_FILE_LINES, MAX_BACKEND_LINES, MAX_FUNCTION_LINES = 400, 150, 60
LONG_FILES: dict[str, str] = {}
"""Files over the budget, each with the reason."""


def _files(*folders: str) -> list[Path]:
    return [path for folder in folders for path in sorted((ROOT / folder).rglob("*.py"))]


def _imports(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: a relative import"
            yield str(node.module)
            if node.module == "inflight":
                yield from (f"inflight.{alias.name}" for alias in node.names)


def _part(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


@pytest.mark.parametrize("path", _files("inflight"), ids=lambda path: str(path.relative_to(ROOT)))
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
        assert not tops & {"build", "client", "loadtest", "tests"}, path


def test_files_stay_within_their_budgets() -> None:
    for path in _files("inflight", "build", "client", "loadtest", "scripts", "tests", "backends"):
        limit = MAX_BACKEND_LINES if "backends" in path.parts[len(ROOT.parts) : -1][:1] else MAX_FILE_LINES
        lines = len(path.read_text().splitlines())
        name = str(path.relative_to(ROOT))
        assert lines <= limit or name in LONG_FILES, f"{name} has {lines} lines; the budget is {limit}"


def test_functions_stay_within_their_budgets() -> None:
    sizes = []
    for path in _files("inflight", "backends", "build", "scripts"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                size = (node.end_lineno or 0) - node.lineno + 1
                assert size <= MAX_FUNCTION_LINES, f"{path.name}: {node.name} has {size} lines"
                sizes.append(size)
    assert statistics.median(sizes) <= 10
    assert statistics.quantiles(sizes, n=10)[-1] <= 30


def test_public_things_have_docstrings_and_types() -> None:
    missing = []
    for path in _files("inflight"):
        tree = ast.parse(path.read_text())
        if path.name != "__init__.py" and not ast.get_docstring(tree):
            missing.append(str(path))
        for node in ast.walk(tree):
            if not isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) or node not in tree.body:
                continue
            if not node.name.startswith("_") and not ast.get_docstring(node):
                missing.append(f"{path.name}: {node.name}")
    assert not missing
