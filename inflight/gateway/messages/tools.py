"""Anthropic's tools and tool choice to those of chat completions."""

from __future__ import annotations

from typing import Any

from inflight.gateway.reading import JsonValue, check_callers
from inflight.gateway.values import boolean, mapping, one_of

_TOOL = frozenset({"type", "name", "description", "input_schema", "strict", "cache_control", "eager_input_streaming"})
_ASKING = frozenset({"defer_loading", "allowed_callers", "input_examples"})
"""Fields of a tool that ask for what is not served, unless they say what is so anyway."""
_CHOICES = {"auto": "auto", "any": "required", "none": "none"}


def read_message_tools(tools: JsonValue | None, choice: JsonValue | None) -> dict[str, Any]:
    """Return the fields of a chat that say the same: tools, tool_choice and parallel_tool_calls.

    Raises:
        ApiError: naming the tool and what is wrong with it.
    """
    chat: dict[str, Any] = {}
    found = [one for tool in tools.elements() if (one := _read_tool(tool))] if tools is not None else []
    if found:
        chat = {"tools": found, "tool_choice": "auto"}
    if choice is None:
        return chat
    kind = choice.need("type")
    choice.only(("type", "name", "disable_parallel_tool_use"))
    mode = kind.read(one_of(*_CHOICES, "tool"))
    if not found and mode in ("any", "tool"):
        raise kind.error(f'is "{mode}"; it needs tools')
    if mode == "tool":
        name = choice.need("name")
        if name.text() not in [tool["function"]["name"] for tool in found]:
            raise name.error(f"is {name.text()[:64]!r}; no tool of the request that is served has this name")
        chat["tool_choice"] = {"type": "function", "function": {"name": name.text()}}
    elif found:
        chat["tool_choice"] = _CHOICES[mode]
    single = choice.get("disable_parallel_tool_use")
    if single is not None and single.read(boolean()) and found:
        chat["parallel_tool_calls"] = False
    return chat


def _read_tool(tool: JsonValue) -> dict[str, Any] | None:
    """Return a tool of chats; None: it is one of Anthropic's own, which is left out and named."""
    kind = tool.get("type")
    if kind is not None and kind.text() != "custom":
        tool.ignored.append(f"{tool.path}.{kind.value}")
        return None
    tool.only(_TOOL | _ASKING)
    _check_asking(tool)
    function = {"name": tool.need("name").name(), "parameters": tool.need("input_schema").read(mapping())}
    if (description := tool.get("description")) is not None:
        function["description"] = description.text()
    if (strict := tool.get("strict")) is not None:
        function["strict"] = strict.read(boolean())
    return {"type": "function", "function": function}


def _check_asking(tool: JsonValue) -> None:
    if (deferred := tool.get("defer_loading")) is not None:
        deferred.left_out(False)  # all tools are in the prompt
    if (examples := tool.get("input_examples")) is not None:
        examples.left_out([])  # no chat template has a place for them
    if (callers := tool.get("allowed_callers")) is not None:
        check_callers(callers)
