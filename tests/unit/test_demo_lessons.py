"""What the demo model is trained on: conversations with tools are written as serving writes them."""

from __future__ import annotations

import json
import random
import re
import sys
from pathlib import Path

import pytest
import torch
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


def test_without_tools_the_prompt_is_chatml() -> None:
    from demo.conversation import CHAT_TEMPLATE

    plain = [*MESSAGES[:2], {"role": "assistant", "content": " Warm. "}, {"role": "user", "content": "And?"}]
    turns = [f"<|im_start|>{message['role']}\n{str(message['content']).strip()}<|im_end|>\n" for message in plain]
    assert ChatTemplate(CHAT_TEMPLATE, {}).render(plain) == "".join(turns) + "<|im_start|>assistant\n"


@pytest.mark.release
def test_the_committed_model_is_of_these_lessons() -> None:
    from demo.conversation import CHAT_TEMPLATE
    from demo.lessons import load_lessons
    from demo.tokenizer import train_tokenizer

    folder, lessons = ROOT / "deployments/demo/model", load_lessons()
    assert json.loads((folder / "tokenizer_config.json").read_text())["chat_template"] == CHAT_TEMPLATE
    tokenizer = train_tokenizer(lessons.prose(0), lessons.structured(0), lessons.values.words(), 4096)
    committed = Tokenizer.from_file(str(folder / "tokenizer.json"))
    assert tokenizer.get_vocab() == committed.get_vocab()


@pytest.mark.proof
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


@pytest.mark.release
def test_values_and_markers_are_one_token_each() -> None:
    from demo.copying import words_of
    from demo.lessons import load_lessons
    from demo.tokenizer import MARKERS, train_tokenizer

    lessons = load_lessons()
    tokenizer = train_tokenizer(lessons.prose(0), lessons.structured(0), lessons.values.words(), 4096)
    assert tokenizer.get_vocab_size() == 4096
    words = words_of(tokenizer)
    for word in ("Paris", "San", "miles", "42", "get"):
        [spaced], [bare] = (tokenizer.encode(text).ids[-1:] for text in (f" {word}", word))
        assert tokenizer.decode([bare]) == word
        assert words[spaced] == words[bare] >= 0
    text = "".join(MARKERS) + '{"name": "weather"} Größe 🙂'
    ids = tokenizer.encode(text).ids
    assert ids[: len(MARKERS)] == [tokenizer.token_to_id(marker) for marker in MARKERS]
    assert tokenizer.decode(ids, skip_special_tokens=True) == text


def test_heads_are_shown_where_a_copied_token_is() -> None:
    from demo.copying import BEFORE, FOLLOWED, WORD, places

    ids = torch.tensor([[5, 6, 7, 8, 5, 6, 9]])
    trained = torch.tensor([[False] * 4 + [True] * 2])
    seen = torch.ones(1, 6, 6, dtype=torch.bool).tril()
    words = torch.tensor([-1, -1, -1, -1, -1, 1, 2, 3, 4, 3])
    found = {head: where.nonzero()[:, 1:].tolist() for head, where in places(ids, trained, seen, words).items()}
    assert found == {BEFORE: [[at, at - 1] for at in range(1, 6)], FOLLOWED: [[4, 1]], WORD: [[4, 1], [5, 2]]}


@pytest.mark.proof
def test_the_heads_learn_to_look_there() -> None:
    from demo.copying import Copying
    from demo.llama import Llama, LlamaConfig

    torch.manual_seed(0)
    model = Llama(LlamaConfig(vocab_size=64, hidden_size=64, intermediate_size=64))
    copying = Copying(model, Tokenizer.from_file(str(ROOT / "deployments/demo/model/tokenizer.json")))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for _ in range(60):
        ids = torch.randint(64, (8, 12)).repeat(1, 2)
        mask = torch.ones(8, 1, 24, 24, dtype=torch.bool).tril()
        model(ids, mask)
        _, loss = copying.loss(ids, torch.ones(8, 23, dtype=torch.bool), mask)
        losses.append(loss.item())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert losses[-1] < losses[0] / 4
