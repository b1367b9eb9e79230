"""``tools`` and ``tool_choice`` of a chat, as they are read."""

from __future__ import annotations

from typing import Any

import pytest

from inflight.gateway.errors import ApiError
from inflight.gateway.fields import Fields
from inflight.gateway.tools import read_tools
from inflight.text.output.tools import ToolChoice

TOOLS = [{"type": "function", "function": {"name": name}} for name in ("add", "look_up", "send")]


def allowed(mode: Any, *names: str) -> dict[str, Any]:
    tools = [{"type": "function", "function": {"name": name}} for name in names]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}


def read(choice: Any) -> tuple[list[str], ToolChoice]:
    tools, chosen = read_tools(Fields({"tools": TOOLS, "tool_choice": choice}))
    return [tool.name for tool in tools], chosen


@pytest.mark.parametrize("mode", ["auto", "required"])
def test_of_allowed_tools_no_others_can_be_called(mode: str) -> None:
    assert read(allowed(mode, "send", "add")) == (["add", "send"], ToolChoice(mode))  # type: ignore[arg-type]


def test_a_named_tool_leaves_the_others_in_the_prompt() -> None:
    choice = {"type": "function", "function": {"name": "send"}}
    assert read(choice) == (["add", "look_up", "send"], ToolChoice.named("send"))


@pytest.mark.parametrize(
    ("choice", "param"),
    [
        ({"type": "allowed_tools", "mode": "auto", "tools": []}, "tool_choice.allowed_tools"),
        (allowed("auto"), "tool_choice.allowed_tools.tools"),
        (allowed("none", "add"), "tool_choice.allowed_tools.mode"),
        (allowed([], "add"), "tool_choice.allowed_tools.mode"),
        (allowed("auto", "add", "sub"), "tool_choice.allowed_tools.tools[1].function.name"),
        (
            {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [1]}},
            "tool_choice.allowed_tools.tools[0]",
        ),
        ({"type": "custom", "custom": {"name": "add"}}, "tool_choice.type"),
        ({"type": "function", "function": {"name": "sub"}}, "tool_choice.function.name"),
        ({"type": "function"}, "tool_choice.function.name"),
        ("any", "tool_choice"),
        ([], "tool_choice"),
    ],
)
def test_a_choice_that_cannot_be_served_is_refused_by_its_path(choice: Any, param: str) -> None:
    with pytest.raises(ApiError) as caught:
        read(choice)
    assert (caught.value.status, caught.value.param) == (400, param)
    assert param in caught.value.message


@pytest.mark.parametrize(
    ("function", "param"),
    [
        ({"parameters": {"type": "array"}}, "parameters.type"),
        ({"parameters": {"type": ["object", "null"]}}, "parameters.type"),
        ({"parameters": {"type": None}}, "parameters.type"),
        ({"parameters": []}, "parameters"),
        ({"parameters": False}, "parameters"),
        ({"description": 0}, "description"),
        ({"strict": ""}, "strict"),
    ],
)
def test_what_is_no_tool_is_refused_by_its_path(function: dict[str, Any], param: str) -> None:
    tools = [*TOOLS, {"type": "function", "function": {"name": "list", **function}}]
    with pytest.raises(ApiError) as caught:
        read_tools(Fields({"tools": tools}))
    path = f"tools[3].function.{param}"
    assert (caught.value.status, caught.value.param) == (400, path)
    assert caught.value.message.startswith(f"{path} is ")


def test_of_allowed_tools_each_keeps_its_place() -> None:
    tools, _ = read_tools(Fields({"tools": TOOLS, "tool_choice": allowed("auto", "send")}))
    assert [tool.path for tool in tools] == ["tools[2].function.parameters"]


@pytest.mark.parametrize("given", [{}, {"parameters": None}], ids=str)
def test_a_tool_that_names_no_parameters_has_none(given: dict[str, Any]) -> None:
    tools, _ = read_tools(Fields({"tools": [{"type": "function", "function": {"name": "f", **given}}]}))
    assert [tool.parameters for tool in tools] == [{"type": "object", "properties": {}, "additionalProperties": False}]
