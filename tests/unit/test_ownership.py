"""Who may change what: docs/ownership.md, as far as the source shows it."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path

from inflight.engine.kvcache.blocks import BlockTable
from inflight.engine.request import RequestMetrics
from tests.unit.support.sources import parsed

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "inflight"
PAGE = (ROOT / "docs/ownership.md").read_text()
ENDINGS = {
    "engine/engine.py": ("self.stats.count_end(", "del self._sequences["),
    "trtllm/engine.py": ("self.stats.count_end(", "del self._sequences["),
    "engine/replay.py": ("self.stats.count_end(", "self._waiting.remove("),
}
"""What ends a request, by engine."""


def _trees(*folders: str) -> Iterator[tuple[str, ast.Module]]:
    for folder in folders or ("",):
        for path in [PACKAGE / folder] if folder.endswith(".py") else sorted((PACKAGE / folder).rglob("*.py")):
            yield str(path.relative_to(PACKAGE)), parsed(path)


def _writers(receivers: set[str], attributes: set[str]) -> dict[str, set[str]]:
    """Return the files that assign these attributes of what bears one of these names, each with what it assigns."""
    found: dict[str, set[str]] = {}
    for name, tree in _trees("engine", "trtllm"):
        for node in ast.walk(tree):
            if not isinstance(node, ast.Attribute) or isinstance(node.ctx, ast.Load) or node.attr not in attributes:
                continue
            if ast.unparse(node.value).rpartition(".")[2] in receivers:
                found.setdefault(name, set()).add(node.attr)
    return found


def test_only_its_own_module_changes_a_sequence() -> None:
    tree = parsed(PACKAGE / "engine/sequence.py")
    [body] = [node.body for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "Sequence"]
    own = {str(one.target.id) for one in body if isinstance(one, ast.AnnAssign) and isinstance(one.target, ast.Name)}
    assert {"tokens", "table", "metrics", "served_tokens"} <= own
    named = {"sequence", "leader", "member", "fork", "twin", "victim", "one"}
    assert set(_writers(named, own)) == {"engine/sequence.py"}


def test_only_the_cache_manager_changes_a_block_table() -> None:
    own = {field.name for field in fields(BlockTable)}
    assert set(_writers({"table"}, own)) == {"engine/kvcache/manager.py"}


def test_the_metrics_of_a_request_have_one_writer_on_each_engine() -> None:
    own = {field.name for field in fields(RequestMetrics)}
    assert set(_writers({"metrics"}, own)) == {"engine/sequence.py", "engine/replay.py", "trtllm/reading.py"}


def test_one_place_of_an_engine_ends_requests() -> None:
    for name, endings in ENDINGS.items():
        functions = [node for node in ast.walk(parsed(PACKAGE / name)) if isinstance(node, ast.FunctionDef)]
        for done in endings:
            ends = [function.name for function in functions if done in ast.unparse(function)]
            assert ends == ["_end"], f"{name}: {done} in {ends}"


def test_the_memory_of_keys_and_values_is_made_in_one_place_and_kept_in_one() -> None:
    pools = {"KvPool", "Fp8KvPool", "Int8KvPool"}
    makers, keepers = set(), set()
    for name, tree in _trees():
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in pools:
                makers.add(name)
            if isinstance(node, ast.Attribute) and node.attr == "_kv_pool" and isinstance(node.ctx, ast.Store):
                keepers.add(name)
    assert makers == {"engine/checkpoint.py"}
    assert keepers == {"engine/model_runner.py", "engine/kvcache/offload_pool.py"}, "the second one copies its blocks"


def test_the_page_names_every_thread_of_the_stages() -> None:
    started = set()
    for _, tree in _trees("engine", "triton", "trtllm", "shared_counters.py"):
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "threading.Thread":
                [name] = [keyword.value for keyword in node.keywords if keyword.arg == "name"]
                started.add(ast.literal_eval(name) if isinstance(name, ast.Constant) else "long-requests-N")
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "threading.Timer":
                started.add("watchdog")  # a Timer takes no name
    told = set(re.findall(r"^\| `([a-z -]+)` \|", PAGE, re.MULTILINE)) | {"long-requests-N"}
    assert {"engine", "responses", "metrics", "pulse"} <= started == told
    assert "`long-requests-N`" in PAGE


def test_the_page_names_files_that_exist() -> None:
    named = re.findall(r"`([a-z_/]+/[a-z_]+\.py)`", PAGE)
    assert len(named) > 20
    assert not [name for name in named if not ((PACKAGE / name).exists() or (ROOT / name).exists())]
