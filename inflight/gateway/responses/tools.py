"""Tools and their choice, as the Responses API writes them, to those of chat completions.

Chats have functions alone. A namespace is its functions, under joined names; a custom tool is a function with one text.
Tools that a server would run, and what the model's format cannot hold, are left out and named.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from inflight.gateway.reading import JsonValue, check_callers
from inflight.gateway.responses.grammars import pattern_of_lark, pattern_of_regex
from inflight.gateway.values import boolean, mapping, one_of

_FUNCTION = frozenset({"type", "name", "description", "parameters", "strict"})
_CUSTOM = frozenset({"type", "name", "description", "format"})
_NAMESPACE = frozenset({"type", "name", "description", "tools"})
_ASKING = frozenset({"allowed_callers", "async", "defer_loading", "output_schema"})
"""Fields of a tool that ask for what is not served, unless they say what is so anyway."""
_OWN_TOOLS = "this server runs no tools; it serves functions and custom tools, which the client calls"
_CALLED = ("function", "custom")
"""Types of tools that calls name."""
Enforces = Callable[[dict[str, Any]], bool]
"""Tells whether the model's format of calls can hold arguments to a schema."""
_INPUT = "input"
"""The one argument of a custom tool's function."""
_LONGEST_ESCAPE = len(r"\ud83d\ude00")
"""Characters of JSON that are one character of a text."""


@dataclass(frozen=True)
class CalledTool:
    """A tool as calls name it."""

    name: str
    namespace: str | None = None
    is_custom: bool = False

    @property
    def function(self) -> str:
        """The name of its function in the chat."""
        return function_name(self.name, self.namespace)


@dataclass(frozen=True)
class ResponseTools:
    """The tools of a request."""

    chat: list[dict[str, Any]] = field(default_factory=list)
    """As chat completions take them: those that may be called."""
    choice: str | dict[str, Any] = "auto"
    """As chat completions take it."""
    shown: list[dict[str, Any]] = field(default_factory=list)
    """As the response repeats them."""
    shown_choice: str | dict[str, Any] = "auto"
    places: list[str] = field(default_factory=list)
    """The path in the request of each tool that may be called."""
    called: Mapping[str, CalledTool] = field(default_factory=dict)
    """How a call names a tool, by the name of its function in the chat."""


@dataclass(frozen=True)
class _Callable:
    """A tool that may be called."""

    called: CalledTool
    chat: dict[str, Any]
    """The function of a chat."""
    place: str


def function_name(name: str, namespace: str | None) -> str:
    """Return the name that the model sees: a function of a namespace has the namespace's before its own."""
    return name if namespace is None else f"{namespace}__{name}"


def custom_arguments(text: str) -> str:
    """Return the arguments of a custom tool's function, which gets this text."""
    return json.dumps({_INPUT: text}, ensure_ascii=False)


def custom_input(arguments: str) -> str:
    """Return the text that a custom tool gets, of the arguments that the model has written for its function.

    Of arguments that a limit has cut it is the beginning of the text; arguments of another form are the text.
    """
    ends = (f'{arguments[: len(arguments) - cut]}"}}' for cut in range(min(_LONGEST_ESCAPE, len(arguments))))
    for whole in (arguments, *ends):
        try:
            text = json.loads(whole)[_INPUT]
            text.encode()
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            continue
        return str(text)
    return arguments


def read_response_tools(tools: JsonValue | None, choice: JsonValue | None, enforces: Enforces) -> ResponseTools:
    """Return the tools and their choice.

    Args:
        tools: of the request.
        choice: its ``tool_choice``.
        enforces: whether the model's format of calls can hold arguments to a schema.

    Raises:
        ApiError: naming the tool and what is wrong with it.
    """
    reader = _Reader(enforces)
    shown = [one for tool in (tools.elements() if tools is not None else []) for one in reader.read(tool)]
    found = reader.found
    if choice is None:
        return _tools(found, "auto", shown, "auto")
    if isinstance(choice.value, str):
        mode = choice.read(one_of("none", "auto", "required"))
        if mode == "required" and not found:
            raise choice.error('is "required"; it needs tools')
        return _tools(found, mode, shown, mode)
    kind = choice.need("type")
    if kind.text() == "allowed_tools":
        return _allowed(choice, reader, shown)
    if kind.text() not in _CALLED:
        raise kind.refusal(_OWN_TOOLS)
    named = _known(choice, reader)
    if named is None:
        name = choice.need("name")
        raise name.error(f"is {_short(name)}, which is left out: its grammar cannot be enforced")
    chat_choice = {"type": "function", "function": {"name": named.called.function}}
    return _tools(found, chat_choice, shown, choice.object())


def _tools(
    found: list[_Callable], choice: str | dict[str, Any], shown: list[dict[str, Any]], shown_choice: Any
) -> ResponseTools:
    chat = [{"type": "function", "function": one.chat} for one in found]
    called = {one.called.function: one.called for one in found}
    return ResponseTools(chat, choice, shown, shown_choice, [one.place for one in found], called)


def _allowed(choice: JsonValue, reader: _Reader, shown: list[dict[str, Any]]) -> ResponseTools:
    """Return the tools that a choice allows, of all that there are; those that are left out are so here too."""
    given, mode = choice.need("tools"), choice.need("mode").read(one_of("auto", "required"))
    allowed: list[_Callable] = []
    obeyed: list[dict[str, Any]] = []
    for tool in given.elements():
        named = _named(tool, reader)
        if not named and mode == "required":
            raise tool.refusal('this tool is left out, and the mode "required" may ask for it')
        if not named:
            tool.ignored.append(f"{tool.path}.{tool.need('type').text()}")
        else:
            obeyed.append(tool.object())
        allowed += named
    if not allowed:
        raise given.error("names no tool that is served; it must name at least one")
    shown_choice = choice.object() | {"tools": obeyed}
    return _tools([one for one in reader.found if one in allowed], mode, shown, shown_choice)


def _named(choice: JsonValue, reader: _Reader) -> list[_Callable]:
    """Return the tools that an allowed one names: those of a namespace, or one; [] where they are left out.

    Raises:
        ApiError: the request has no tool of this name.
    """
    kind = choice.need("type").text()
    if kind in _CALLED:
        known = _known(choice, reader)
        return [] if known is None else [known]
    if kind != "namespace":
        return []
    name = choice.need("name")
    if name.text() not in reader.namespaces:
        raise name.error(f"is {_short(name)}; the request has no namespace of this name")
    return [one for one in reader.found if one.called.namespace == name.text()]


def _known(choice: JsonValue, reader: _Reader) -> _Callable | None:
    """Return the tool that a choice names; None: it is left out. Raises ApiError: the request has no such tool."""
    kind, name, namespace = choice.need("type").text(), choice.need("name"), choice.get("namespace")
    wanted = CalledTool(name.text(), namespace.text() if namespace else None, kind == "custom")
    for one in reader.found:
        if one.called == wanted:
            return one
    if wanted in reader.left_out:
        return None
    raise name.error(f"is {_short(name)}; the request has no {kind} tool of this name")


def _short(name: JsonValue) -> str:
    """Return a name as an error shows it."""
    return repr(name.text()[:64])


class _Reader:
    """Reads the tools of one request."""

    def __init__(self, enforces: Enforces) -> None:
        self.found: list[_Callable] = []
        """The tools that may be called."""
        self.left_out: set[CalledTool] = set()
        """Custom tools whose grammar cannot be enforced."""
        self.namespaces: set[str] = set()
        self._enforces = enforces

    def read(self, tool: JsonValue, namespace: str | None = None) -> list[dict[str, Any]]:
        """Add what may be called to ``found``; return the tool as the response repeats it, if it is not left out."""
        kind = tool.need("type").text()
        shown = None
        if kind == "function":
            shown = self._function(tool, namespace)
        elif kind == "custom":
            shown = self._custom(tool, namespace)
        elif kind == "namespace" and namespace is None:
            shown = self._namespace(tool)
        if shown is None:
            tool.ignored.append(f"{tool.path}.{kind}")
        return [] if shown is None else [shown]

    def _namespace(self, tool: JsonValue) -> dict[str, Any]:
        tool.only(_NAMESPACE)
        name, description = tool.need("name").name(), tool.get("description")
        self.namespaces.add(name)
        inner = [shown for one in tool.need("tools").elements() for shown in self.read(one, name)]
        return {"type": "namespace", "name": name, "description": description and description.text(), "tools": inner}

    def _function(self, tool: JsonValue, namespace: str | None) -> dict[str, Any]:
        """Return a function whole, with what is absent as null."""
        tool.only(_FUNCTION | _ASKING)
        _check_asking(tool)
        description, parameters, strict = (tool.get(name) for name in ("description", "parameters", "strict"))
        shown: dict[str, Any] = {
            "type": "function",
            "name": tool.need("name").name(),
            "description": description and description.text(),
            "parameters": parameters and parameters.read(mapping()),
            "strict": bool(strict is not None and strict.read(boolean())),
        }
        given = {name: value for name, value in shown.items() if name != "type" and value is not None}
        self._add(CalledTool(shown["name"], namespace), given, tool)
        return shown

    def _custom(self, tool: JsonValue, namespace: str | None) -> dict[str, Any] | None:
        """Return a custom tool; None: its grammar cannot be enforced."""
        tool.only(_CUSTOM | _ASKING)
        _check_asking(tool)
        name, description, form = tool.need("name").name(), tool.get("description"), tool.get("format")
        text: dict[str, Any] = {"type": "string"}
        parameters: dict[str, Any] = {"type": "object", "properties": {_INPUT: text}, "required": [_INPUT]}
        strict = form is not None and form.need("type").read(one_of("text", "grammar")) == "grammar"
        if form is not None and strict:
            pattern = _pattern(form)
            text["pattern"], parameters["additionalProperties"] = f"^(?:{pattern})$", False
            if pattern is None or not self._enforces(parameters):
                self.left_out.add(CalledTool(name, namespace, is_custom=True))
                return None
        function = {"description": description.text() if description else "", "parameters": parameters}
        self._add(CalledTool(name, namespace, is_custom=True), function | {"strict": strict}, tool)
        shown = {"type": "custom", "name": name, "description": description and description.text()}
        return shown | ({"format": form.object()} if form is not None else {})

    def _add(self, called: CalledTool, function: dict[str, Any], tool: JsonValue) -> None:
        self.found.append(_Callable(called, function | {"name": called.function}, tool.path))


def _pattern(form: JsonValue) -> str | None:
    """Return the regular expression of a grammar; None: it has none that can be enforced."""
    definition, syntax = form.need("definition").name(), form.need("syntax").read(one_of("lark", "regex"))
    return pattern_of_regex(definition) if syntax == "regex" else pattern_of_lark(definition)


def _check_asking(tool: JsonValue) -> None:
    if (later := tool.get("async")) is not None:
        later.accept("tools are called at once", False)
    if (callers := tool.get("allowed_callers")) is not None:
        check_callers(callers)
    if (deferred := tool.get("defer_loading")) is not None:
        deferred.left_out(False)  # all tools are in the prompt
    if (schema := tool.get("output_schema")) is not None:
        schema.left_out({})  # no chat template has a place for it
