"""The commands of README.md, word for word, against a server with the default ports' numbers replaced."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.triton.support.servers import Running

pytestmark = pytest.mark.any_engine
ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()


def _blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", README, re.MULTILINE | re.DOTALL)


def _here(text: str, server: Running) -> str:
    return text.replace(":8000", f":{server.http_port}").replace(":8001", f":{server.grpc_port}")


CURLS = [block for block in _blocks("sh") if block.startswith("curl") and ":8080" not in block]


@pytest.mark.parametrize("command", CURLS, ids=range(len(CURLS)))
def test_readme_curl_commands_answer(server: Running, command: str) -> None:
    done = subprocess.run(_here(command, server), shell=True, capture_output=True, text=True, timeout=60, check=True)
    events = [line.removeprefix("data: ") for line in done.stdout.splitlines() if line.strip()]
    texts = [json.loads(event)["text_output"] for event in events]
    assert "batch" in "".join(texts) or "first token" in "".join(texts)


def test_readme_python_example_answers(server: Running) -> None:
    [program] = _blocks("python")
    done = subprocess.run(
        [sys.executable, "-c", _here(program, server)], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.splitlines()[-1] == "[stop]"
    assert "block" in done.stdout


def test_readme_inflight_chat_answers(server: Running) -> None:
    command = next(block for block in _blocks("sh") if "inflight chat" in block).split()
    inflight = [str(Path(sys.executable).with_name("inflight")), *command[1:], "--url", server.grpc]
    done = subprocess.run(inflight, input="What is TTFT?\n", capture_output=True, text=True, timeout=60, check=True)
    assert "first token" in done.stdout


def test_readme_names_existing_files() -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", README):
        assert target.startswith("http") or (ROOT / target).exists(), target
    makefile = (ROOT / "Makefile").read_text()
    for verb in re.findall(r"(?:`|^)make ([a-z-]+)", README, re.MULTILINE):
        assert re.search(rf"^{verb}:", makefile, re.MULTILINE), verb


def test_readme_figures_are_those_of_the_result_files() -> None:
    rows = json.loads((ROOT / "loadtest/results/pipeline.json").read_text())["rows"]
    by_row = {(row["streams"], row["step_ms"]): row for row in rows}
    for page in (README, (ROOT / "docs/performance.md").read_text()):
        words = " ".join(page.split())
        assert f"{by_row[32, 2.0]['tokens_per_second']:,} tokens/s" in words
        assert f"{by_row[32, 0.0]['tokens_per_second']:,}" in words
