"""The demo model calls tools and writes JSON of its own accord: nothing here is enforced by a grammar."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path
from typing import Any

from tests.gateway.support.gateways import Beside
from tests.gateway.test_agents_server import answer
from tests.support.tables import each_row

Json = dict[str, Any]
PAGE = (Path(__file__).parents[2] / "docs/tools.md").read_text()


def function(name: str, **properties: Json) -> Json:
    schema = {"type": "object", "properties": properties, "required": list(properties)}
    return {"type": "function", "function": {"name": name, "parameters": schema}}


TEXT, NUMBER = {"type": "string"}, {"type": "integer"}
TOOLS = [function("get_weather", city=TEXT), function("add", a=NUMBER, b=NUMBER)]


def message(gateway: Beside, *messages: Json, **more: Any) -> Json:
    body = {"messages": messages, "temperature": 0, "max_tokens": 160, **more}
    [choice] = answer(gateway, "/v1/chat/completions", body)["choices"]
    assert choice["finish_reason"] in ("stop", "tool_calls")
    answered: Json = choice["message"]
    return answered


def user(text: str) -> Json:
    return {"role": "user", "content": text}


def calls(answered: Json) -> list[tuple[str, Json]]:
    functions = [call["function"] for call in answered.get("tool_calls") or []]
    return [(one["name"], json.loads(one["arguments"])) for one in functions]


def test_the_command_of_the_page_has_a_call(gateway: Beside) -> None:
    [command] = re.findall(r"^curl .*?^}'$", PAGE, re.MULTILINE | re.DOTALL)
    here = command.replace("http://127.0.0.1:8080", gateway.url)
    done = subprocess.run(here, shell=True, capture_output=True, text=True, timeout=120, check=True)
    [choice] = json.loads(done.stdout)["choices"]
    assert calls(choice["message"]) == [("get_weather", {"city": "Paris"})]


@each_row(
    "question, wanted",
    [
        ("What is the weather in Paris?", [("get_weather", {"city": "Paris"})]),
        ("What's the weather like in San Francisco?", [("get_weather", {"city": "San Francisco"})]),
        ("What is 3 plus 4?", [("add", {"a": 3, "b": 4})]),
        ("What is the weather in Paris and London?", [("get_weather", {"city": city}) for city in ("Paris", "London")]),
        ("What is in-flight batching?", []),
        ("Who are you?", []),
    ],
)
def test_it_calls_the_tool_that_fits(gateway: Beside, question: str, wanted: list[tuple[str, Json]]) -> None:
    answered = message(gateway, user(question), tools=TOOLS)
    assert calls(answered) == wanted
    assert bool(answered["content"]) != bool(wanted)


def test_it_tells_what_the_tool_has_found(gateway: Beside) -> None:
    asked = user("What is the weather in Paris?")
    called = message(gateway, asked, tools=TOOLS)
    result = {"role": "tool", "tool_call_id": called["tool_calls"][0]["id"], "content": '{"temperature": 18}'}
    assert message(gateway, asked, called, result, tools=TOOLS)["content"] == "Paris: temperature 18."


@each_row(
    "text, wanted",
    [
        ("Ada is 36 years old and lives in London.", {"name": "Ada", "age": 36, "city": "London"}),
        (
            "Alice and Bob are going to a science fair on Friday.",
            {"name": "science fair", "date": "Friday", "participants": ["Alice", "Bob"]},
        ),
    ],
)
def test_it_answers_with_json_when_asked(gateway: Beside, text: str, wanted: Json) -> None:
    assert json.loads(message(gateway, user(f"{text} Answer in JSON."))["content"]) == wanted
