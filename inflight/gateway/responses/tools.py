"""Tools and their choice, as the Responses API writes them, to those of chat completions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from inflight.gateway.reading import JsonValue, check_callers
from inflight.gateway.values import boolean, mapping, one_of

_TOOL = frozenset({"type", "name", "description", "parameters", "strict"})
_ASKING = frozenset({"allowed_callers", "async", "defer_loading", "output_schema"})
"""Fields of a function that ask for what is not served, unless they say what is so anyway."""
_OWN_TOOLS = "this server runs no tools; it serves functions, which the client calls"


@dataclass(frozen=True)
class ResponseTools:
    """The tools of a request."""

    chat: list[dict[str, Any]]
    """As chat completions take them: those that may be called."""
    choice: str | dict[str, Any]
    """As chat completions take it."""
    shown: list[dict[str, Any]]
    """As the response repeats them."""
    shown_choice: str | dict[str, Any]
    places: list[str]
    """The path in the request of each tool that may be called."""


def read_response_tools(tools: JsonValue | None, choice: JsonValue | None) -> ResponseTools:
    """Return the tools and their choice.

    Raises:
        ApiError: naming the tool and what is wrong with it.
    """
    given = tools.elements() if tools is not None else []
    shown = [_read_tool(tool) for tool in given]
    places = [tool.path for tool in given]
    names = [tool["name"] for tool in shown]
    if choice is None:
        return ResponseTools(_as_chat(shown), "auto", shown, "auto", places)
    if isinstance(choice.value, str):
        mode = choice.read(one_of("none", "auto", "required"))
        if mode == "required" and not shown:
            raise choice.error('is "required"; it needs tools')
        return ResponseTools(_as_chat(shown), mode, shown, mode, places)
    kind = choice.need("type")
    match kind.text():
        case "function":
            named = {"type": "function", "name": _known(choice, names)}
            chat_choice = {"type": "function", "function": {"name": named["name"]}}
            return ResponseTools(_as_chat(shown), chat_choice, shown, named, places)
        case "allowed_tools":
            return _allowed(choice, shown, places)
    raise kind.refusal(_OWN_TOOLS)


def _allowed(choice: JsonValue, shown: list[dict[str, Any]], places: list[str]) -> ResponseTools:
    """Return the tools that a choice allows, of all that there are."""
    names = [tool["name"] for tool in shown]
    allowed = [_known(tool, names) for tool in choice.need("tools").elements()]
    mode = choice.need("mode").read(one_of("auto", "required"))
    if not allowed:
        raise choice.need("tools").error("is empty; it must name at least one tool")
    rest = [(tool, place) for tool, place in zip(shown, places, strict=True) if tool["name"] in allowed]
    chat = _as_chat([tool for tool, _ in rest])
    return ResponseTools(chat, mode, shown, choice.object(), [place for _, place in rest])


def _read_tool(tool: JsonValue) -> dict[str, Any]:
    """Return a tool as the response repeats it: whole, with what is absent as null."""
    kind = tool.need("type")
    if kind.text() != "function":
        raise kind.refusal(f"{kind.text()[:64]!r}; {_OWN_TOOLS}")
    tool.only(_TOOL | _ASKING)
    _check_asking(tool)
    description, parameters, strict = (tool.get(name) for name in ("description", "parameters", "strict"))
    return {
        "type": "function",
        "name": tool.need("name").name(),
        "description": description and description.text(),
        "parameters": parameters and parameters.read(mapping()),
        "strict": bool(strict is not None and strict.read(boolean())),
    }


def _check_asking(tool: JsonValue) -> None:
    if (later := tool.get("async")) is not None:
        later.accept("tools are called at once", False)
    if (callers := tool.get("allowed_callers")) is not None:
        check_callers(callers)
    if (deferred := tool.get("defer_loading")) is not None:
        deferred.left_out(False)  # all tools are in the prompt
    if (schema := tool.get("output_schema")) is not None:
        schema.left_out({})  # no chat template has a place for it


def _as_chat(tools: list[dict[str, Any]]) -> list[dict[str, Any]]:
    chat = []
    for tool in tools:
        function = {name: value for name, value in tool.items() if name != "type" and value is not None}
        chat.append({"type": "function", "function": function})
    return chat


def _known(choice: JsonValue, names: list[str]) -> str:
    """Return the name of the function that a choice names. Raises ApiError: no tool has the name."""
    kind = choice.need("type")
    if kind.text() != "function":
        raise kind.refusal(_OWN_TOOLS)
    name = choice.need("name")
    if name.text() not in names:
        raise name.error(f"is {name.text()[:64]!r}; no tool of the request has this name")
    return name.text()
