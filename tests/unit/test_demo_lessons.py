"""What the demo model is trained on: conversations with tools are written as serving writes them."""

from __future__ import annotations

import json
import random
import re
import sys
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from inflight.text.chat import ChatTemplate

ROOT = Path(__file__).parents[2]
MESSAGES = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "The weather in Paris?"},
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"function": {"name": "weather", "arguments": {"city": "Paris"}}}] * 2,
    },
    {"role": "tool", "content": "18"},
    {"role": "tool", "content": "19"},
]
TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
        "strict": True,
    },
}


@pytest.fixture(autouse=True)
def _build_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [str(ROOT / "build"), *sys.path])


def test_training_and_serving_write_the_same() -> None:
    from demo.conversation import CHAT_TEMPLATE, render

    template = ChatTemplate(CHAT_TEMPLATE, {})
    for thinks in (False, True):
        served = template.render(MESSAGES, {"tools": [TOOL], "enable_thinking": thinks})
        assert served == render(MESSAGES, [TOOL], add_generation_prompt=True, enable_thinking=thinks)
        assert served.endswith("<|im_start|>assistant\n" + "<think>\n" * thinks)
    assert '{"name": "weather", "description": "The weather.", "parameters": {"city": {"type": "string"}}}\n' in served
    assert '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>\n<tool_call>' in served
    assert "user\n<tool_response>\n18\n</tool_response>\n<tool_response>\n19\n</tool_response><|im_end|>" in served


def test_without_tools_the_prompt_is_as_it_was() -> None:
    from demo.conversation import CHAT_TEMPLATE

    config = json.loads((ROOT / "deployments/demo/model/tokenizer_config.json").read_text())
    now, before = ChatTemplate(CHAT_TEMPLATE, {}), ChatTemplate(config["chat_template"], {})
    plain = [*MESSAGES[:2], {"role": "assistant", "content": " Warm. "}, {"role": "user", "content": "And?"}]
    assert now.render(plain) == before.render(plain)


def test_calls_name_a_tool_and_only_its_parameters() -> None:
    from demo.lessons import load_lessons

    rng, lessons, calls = random.Random(0), load_lessons(), 0
    for _ in range(200):
        segments = lessons.tools.conversation(rng)
        prompt = segments[0][0]
        lines = prompt.partition("<tools>\n")[2].partition("</tools>")[0].splitlines()
        tools = {tool["name"]: tool["parameters"] for tool in map(json.loads, lines)}
        for text, trained in segments:
            for call in re.findall(r"<tool_call>\n(.*)\n</tool_call>", text) if trained else []:
                called = json.loads(call)
                assert set(called["arguments"]) <= set(tools[called["name"]])
                calls += 1
    assert calls > 200


def test_markers_are_tokens_that_stay_in_the_text() -> None:
    from demo.lessons import load_lessons
    from demo.tokenizer import MARKERS, train_tokenizer

    lessons = load_lessons()
    tokenizer = train_tokenizer(lessons.prose(0), lessons.definitions(0), 4096)
    committed = Tokenizer.from_file(str(ROOT / "deployments/demo/model/tokenizer.json")).get_vocab()
    assert tokenizer.get_vocab_size() == 4096
    kept = [token for token, number in tokenizer.get_vocab().items() if committed.get(token) == number]
    assert len(kept) > 3800
    text = "".join(MARKERS) + '{"name": "weather"} Größe 🙂'
    ids = tokenizer.encode(text).ids
    assert ids[: len(MARKERS)] == [tokenizer.token_to_id(marker) for marker in MARKERS]
    assert tokenizer.decode(ids, skip_special_tokens=True) == text
