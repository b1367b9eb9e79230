"""Tools for a model whose chat template has no use of them.

The tools stand in the system message, with the notation of a call. Templates that show calls lend their own; others get
``hermes``, and their earlier calls become text of the assistant's, and the outputs text of the user's. Whether such a
model calls a tool of its own accord depends on its training. With ``tool_choice: required`` it does, since a grammar
holds the notation.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from inflight.errors import InvalidRequest
from inflight.text.bounded_templates import to_json
from inflight.text.messages import Message

EXAMPLE: dict[str, Any] = {"name": "the function's name", "arguments": {"an argument's name": "its value"}}
"""The call that shows the notation."""
_INTRODUCTION = """\
These functions can be called:
<tools>
{tools}
</tools>
To call one, write its name and its arguments as JSON {call}"""
_CALL = """\
between two tags:
{call}
What a function returns comes between <tool_response> and </tool_response>."""


def with_generic_tools(messages: Sequence[Message], tools: Sequence[Any], takes_system: bool) -> list[Message]:
    """Return messages of a chat with tools as a template shows them that knows neither tools nor calls.

    Args:
        messages: as ``check_messages`` returns them.
        tools: as the request gives them; none: there may be calls of earlier ones all the same.
        takes_system: whether the template shows a system message; else the tools stand in the user's first one.

    Raises:
        InvalidRequest: ``tools`` is no list of objects.
    """
    tools = _checked(tools)
    made, in_outputs = list[Message](), False
    for message in messages:
        goes_on = in_outputs and message["role"] in ("tool", "user")  # roles alternate in most templates
        in_outputs = message["role"] == "tool" or goes_on
        if calls := message.get("tool_calls"):
            texts = [message["content"] or "", *(_call(call["function"]) for call in calls)]
            made.append({"role": "assistant", "content": "\n".join(filter(None, texts))})
            continue
        said = message["content"]
        text = f"<tool_response>\n{said}\n</tool_response>" if message["role"] == "tool" else said
        if goes_on:
            made[-1] = {**made[-1], "content": f"{made[-1]['content']}\n{text}"}
        else:
            made.append({"role": "user", "content": text} if message["role"] == "tool" else message)
    return _introduced(made, tools, _CALL.format(call=_call(EXAMPLE)), takes_system) if tools else made


def with_introduced_tools(
    messages: Sequence[Message], tools: Sequence[Any], notation: str, takes_system: bool
) -> list[Message]:
    """Return messages of a chat with tools as a template shows them that knows calls alone.

    Args:
        messages: as ``check_messages`` returns them.
        tools: as the request gives them.
        notation: the call ``EXAMPLE`` as the template shows it.
        takes_system: whether the template shows a system message; else the tools stand in the user's first one.

    Raises:
        InvalidRequest: ``tools`` is no list of objects.
    """
    return _introduced([*messages], _checked(tools), f"like this:\n{notation}", takes_system)


def _checked(tools: Any) -> Sequence[Any]:
    if not isinstance(tools, Sequence) or not all(isinstance(tool, dict) for tool in tools):
        raise InvalidRequest("tools must be a list of objects")
    return tools


def _call(function: dict[str, Any]) -> str:
    call = {"name": function["name"], "arguments": function["arguments"]}
    return f"<tool_call>\n{to_json(call)}\n</tool_call>"


def _introduced(made: list[Message], tools: Sequence[Any], call: str, takes_system: bool) -> list[Message]:
    """Return messages with tools in the first one, behind what it says, if it is of the right role; else before all."""
    text = _INTRODUCTION.format(tools="\n".join(map(to_json, tools)), call=call)
    role = "system" if takes_system else "user"
    if made and (made[0]["role"] == role or (role, made[0]["role"]) == ("system", "developer")):
        made[0] = {**made[0], "content": "\n\n".join(filter(None, (made[0]["content"], text)))}
    else:
        made.insert(0, {"role": role, "content": text})
    return made
