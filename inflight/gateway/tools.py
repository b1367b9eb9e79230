"""``tools`` and ``tool_choice`` of a request, checked by path."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from inflight.gateway.errors import invalid
from inflight.gateway.fields import Fields, unsupported
from inflight.gateway.values import wrong
from inflight.json_text import shown
from inflight.text.output.tools import Tool, ToolChoice

MOST_TOOLS = 512
_NO_PARAMETERS = {"type": "object", "properties": {}, "additionalProperties": False}
"""The parameters of a tool that names none: by OpenAI's reference the list is empty."""
_NAME = re.compile(r"[A-Za-z0-9_.:/-]{1,128}", re.ASCII)


def read_tools(fields: Fields) -> tuple[tuple[Tool, ...], ToolChoice]:
    """Return the tools that the model may call, and what the request says about their use.

    Of ``allowed_tools`` the model is shown no others, so it can call none of them.

    Raises:
        ApiError: 400, naming the field by its path.
    """
    value = fields.get("tools", [])
    if not isinstance(value, list):
        raise wrong("tools", value, "a list of tools")
    if len(value) > MOST_TOOLS:
        raise invalid(f"tools has {len(value)} tools; the limit is {MOST_TOOLS}", "tools")
    places = {f"tools[{index}]": one for index, one in enumerate(value) if _left_out_type(one) is None}
    tools = tuple(_tool(one, path) for path, one in places.items())
    seen: set[str] = set()
    for path, tool in zip(places, tools, strict=True):
        if tool.name in seen:
            path += ".function.name"
            raise invalid(f"{path} is {tool.name!r}, as that of another tool", path)
        seen.add(tool.name)
    asked = fields.get("tool_choice")
    if isinstance(asked, dict) and asked.get("type") == "allowed_tools":
        allowed, asked = _allowed(asked.get("allowed_tools"), seen)
        tools, seen = tuple(tool for tool in tools if tool.name in allowed), allowed
    choice = _choice(asked, seen)
    return (tools if choice.kind != "none" else ()), choice


def shows_tools(chat: Mapping[str, Any]) -> bool:
    """Return whether the body of a chat, checked or not, has tools that the model is shown."""
    tools = chat.get("tools") if chat.get("tool_choice") != "none" else None
    return isinstance(tools, list) and any(_left_out_type(tool) is None for tool in tools)


def tools_left_out(fields: Fields) -> list[str]:
    """Return the paths of tools that are no functions, each with its type: the model is not shown them."""
    choice = fields.get("tool_choice")
    allowed = choice.get("allowed_tools") if isinstance(choice, dict) else None
    listed = {
        "tools": fields.get("tools"),
        "tool_choice.allowed_tools.tools": allowed.get("tools") if isinstance(allowed, dict) else None,
    }
    return [
        f"{path}[{index}].{kind}"
        for path, tools in listed.items()
        for index, kind in enumerate(map(_left_out_type, tools if isinstance(tools, list) else []))
        if kind is not None
    ]


def _left_out_type(tool: Any) -> str | None:
    """Return the type of a tool that is no function; None: it is one, or no tool at all."""
    kind = tool.get("type") if isinstance(tool, dict) else None
    return kind if isinstance(kind, str) and kind != "function" else None


def _tool(value: Any, path: str) -> Tool:
    if not isinstance(value, dict):
        raise wrong(path, value, "an object with type and function")
    if value.get("type") not in (None, "function"):
        raise wrong(f"{path}.type", value["type"], '"function"')
    function = value.get("function")
    if not isinstance(function, dict):
        raise wrong(f"{path}.function", function, "an object with name and parameters")
    path += ".function"
    given = {key: one for key, one in function.items() if one is not None}
    name, description = given.get("name"), given.get("description", "")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise wrong(f"{path}.name", name, "1 to 128 letters, digits, or any of _ . : / -")
    if not isinstance(description, str):
        raise wrong(f"{path}.description", description, "a string")
    parameters, strict = given.get("parameters", _NO_PARAMETERS), given.get("strict", False)
    if not isinstance(parameters, dict):
        raise wrong(f"{path}.parameters", parameters, "an object: the JSON schema of the arguments")
    if (kind := parameters.get("type", "object")) != "object":
        raise wrong(f"{path}.parameters.type", kind, '"object", since arguments have names')
    if not isinstance(strict, bool):
        raise wrong(f"{path}.strict", strict, "true or false")
    return Tool(name, description, parameters, strict, f"{path}.parameters")


def _choice(value: Any, names: set[str]) -> ToolChoice:
    path = "tool_choice"
    if value is None:
        return ToolChoice.auto() if names else ToolChoice.none()
    if isinstance(value, dict):
        return ToolChoice.named(_known_name(value, path, names))
    if value not in ("none", "auto", "required"):
        raise wrong(
            path, value, 'none, auto, required, or {"type": "function", "function": {"name": ...}}, or allowed_tools'
        )
    if value == "required" and not names:
        raise invalid("tool_choice is required; there are no tools", path)
    return ToolChoice(value) if names else ToolChoice.none()


def _allowed(value: Any, names: set[str]) -> tuple[set[str], str]:
    """Return the names of the tools that a choice allows, and the mode: auto or required.

    Where one must be called, all that are listed must be functions; otherwise those that are not are left out.
    """
    path = "tool_choice.allowed_tools"
    if not isinstance(value, dict):
        raise wrong(path, value, "an object with mode and tools")
    mode, allowed = value.get("mode"), value.get("tools")
    if mode not in ("auto", "required"):
        raise wrong(f"{path}.mode", mode, "auto or required")
    if not isinstance(allowed, list) or not allowed:
        raise wrong(f"{path}.tools", allowed, "a list of at least one tool")
    given = {f"{path}.tools[{index}]": one for index, one in enumerate(allowed)}
    if mode == "auto":
        given = {place: one for place, one in given.items() if _left_out_type(one) is None}
        if not given:
            raise invalid(f"{path}.tools names no function; only functions are served", f"{path}.tools")
    return {_known_name(one, place, names) for place, one in given.items()}, mode


def _known_name(value: Any, path: str, names: set[str]) -> str:
    """Return the name of the tool to which ``{"type": "function", "function": {"name": ...}}`` points."""
    if not isinstance(value, dict):
        raise wrong(path, value, "an object with type and function")
    if (kind := value.get("type")) not in (None, "function"):
        raise unsupported(f"{path}.type", f"{path}.type is {shown(kind)}; only function is served")
    function = value.get("function")
    name = function.get("name") if isinstance(function, dict) else None
    path += ".function.name"
    if not isinstance(name, str):
        raise wrong(path, name, "the name of one of the tools")
    if name not in names:
        raise invalid(f"{path} is {shown(name)}, which is none of the tools", path)
    return name
