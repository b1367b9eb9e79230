"""Texts have the tokens that llama.cpp finds in the same file."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from benchmarks.environments import Home
from benchmarks.published.fetched import model_path
from inflight.text.tokenizer import Tokenizer
from tests.published.support.strings import texts

pytestmark = [pytest.mark.published, pytest.mark.timeout(900)]

LLAMA = Path(__file__).parent / "support/llama_tokens.py"


def test_tokens_are_those_of_llama_cpp(home: Home, model: str, tmp_path: Path) -> None:
    path, asked = model_path(home, model), tmp_path / "texts.json"
    asked.write_text(json.dumps(texts()))
    answer = subprocess.run([home.python, LLAMA, path, asked], capture_output=True, text=True, timeout=600)
    assert answer.returncode == 0, answer.stderr[-2000:]
    theirs = json.loads(answer.stdout.splitlines()[-1])
    ours = Tokenizer.from_checkpoint(path).encode_batch(texts(), add_special_tokens=True)
    assert len(ours) >= 250
    assert not [row for row in zip(texts(), ours, theirs, strict=True) if row[1] != row[2]]
