"""A checkpoint whose chat template never ends and whose tokenizer's expression backtracks: its server serves on."""

from __future__ import annotations

import json
import re
import shutil
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from inflight.resources import DEMO
from tests.support.waiting import wait_until
from tests.triton.support.servers import on_engine, serve_command

pytestmark = pytest.mark.proof
ENDLESS = "{% for _ in range(99999) %}{% for _ in range(99999) %}{% endfor %}{% endfor %}"
BACKTRACKS = "(a|aa)+$"
EVIL = "hello " + "a" * 60 + "b"
"""Text for which the expression above is tried in more ways than the library allows."""
CHATS = 3
"""Chats over each port; their template takes a second of processor time, and they run one after the other."""
GAVE_UP = "the tokenizer's regular expression gave up on this text (too much backtracking)"


@dataclass
class Served:
    """A server of the hostile checkpoint."""

    http: str
    gateway: str
    said: Path

    def chat(self) -> httpx.Response:
        body = {"model": "stranger", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2}
        return httpx.post(f"{self.gateway}/v1/chat/completions", json=body, timeout=300)

    def complete(self, prompt: str) -> httpx.Response:
        body = {"model": "stranger", "prompt": prompt, "max_tokens": 2}
        return httpx.post(f"{self.gateway}/v1/completions", json=body, timeout=300)

    def running_chats(self) -> int:
        """Return how many chats the gateway has begun and not answered."""
        page = httpx.get(f"{self.gateway}/metrics", timeout=300).text
        found = re.search(r'^inflight_gateway_running_requests\{route="/v1/chat/completions"\} (\d+)', page, re.M)
        return int(found[1]) if found else 0

    def generate(self, **body: Any) -> httpx.Response:
        return httpx.post(f"{self.http}/v2/models/ensemble/generate", json={"max_tokens": 2} | body, timeout=300)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    directory = tmp_path_factory.mktemp("hostile")
    model = shutil.copytree(DEMO / "model", directory / "stranger")
    settings = json.loads((model / "tokenizer_config.json").read_text())
    (model / "tokenizer_config.json").write_text(json.dumps(settings | {"chat_template": ENDLESS}))
    tokenizer = json.loads((model / "tokenizer.json").read_text())
    split = {"type": "Split", "pattern": {"Regex": BACKTRACKS}, "behavior": "Isolated", "invert": False}
    tokenizer["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [split, tokenizer["pre_tokenizer"]]}
    (model / "tokenizer.json").write_text(json.dumps(tokenizer))
    on_engine("pytorch", directory, model=str(model))
    said = directory / "said"
    with serve_command(directory, said) as ports:
        yield Served(f"http://127.0.0.1:{ports[0]}", f"http://127.0.0.1:{ports[3]}", said)


def test_others_are_answered_while_a_template_runs(served: Served) -> None:
    """Over both ports, and before the chats are."""
    chats: list[str] = []

    def ask(way: Any) -> None:
        response = way()
        chats.append(f"{response.status_code} {response.text}")

    messages = json.dumps([{"role": "user", "content": "Hi"}])
    ways = [served.chat] * CHATS + [lambda: served.generate(messages=messages)] * CHATS
    threads = [threading.Thread(target=ask, args=(way,)) for way in ways]
    for thread in threads:
        thread.start()
    meanwhile = 0
    assert wait_until(lambda: chats or served.running_chats() == CHATS)
    while not chats:
        assert httpx.get(f"{served.gateway}/health", timeout=300).status_code == 200
        assert served.complete("Hi").status_code == 200
        assert served.generate(text_input="Hi").status_code == 200
        meanwhile += not chats
    for thread in threads:
        thread.join()
    assert meanwhile, "answers that came before any chat's"
    assert len(chats) == 2 * CHATS
    for said in chats:
        assert said.startswith("400 ")
        assert "the chat template refuses them: it takes more than 1 s of processor time" in said


def test_text_that_the_tokenizer_gives_up_is_refused_in_one_line(served: Served) -> None:
    for response, param in ((served.complete(EVIL), "prompt"), (served.generate(text_input=EVIL), "text_input")):
        assert response.status_code == 400
        assert f"{param} cannot be encoded by this checkpoint's tokenizer: {GAVE_UP}" in response.text
        assert "Traceback" not in response.text
    assert served.complete("Hi").status_code == 200
    assert served.generate(text_input="Hi").status_code == 200
