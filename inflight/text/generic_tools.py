"""Tools for a model whose chat template has no use of them, in the notation ``hermes``.

The tools stand in the system message, with the notation of a call; earlier calls are text of the assistant's, and their
outputs text of the user's. Whether such a model calls a tool of its own accord depends on its training. With
``tool_choice: required`` it does, since a grammar holds the notation.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from inflight.text.messages import Message

_INTRODUCTION = """\
These functions can be called:
<tools>
{tools}
</tools>
To call one, write its name and its arguments as JSON between two tags:
<tool_call>
{{"name": "the function's name", "arguments": {{"an argument's name": "its value"}}}}
</tool_call>
What a function returns comes between <tool_response> and </tool_response>."""


def with_generic_tools(messages: Sequence[Message], tools: Sequence[Any], takes_system: bool) -> list[Message]:
    """Return messages of a chat with tools as a template shows them that knows neither tools nor calls.

    Args:
        messages: as ``check_messages`` returns them.
        tools: as the request gives them; none: there may be calls of earlier ones all the same.
        takes_system: whether the template shows a system message; else the tools stand in the user's first one.
    """
    made = list[Message]()
    for message in messages:
        if calls := message.get("tool_calls"):
            texts = [message["content"] or "", *(_call(call["function"]) for call in calls)]
            made.append({"role": "assistant", "content": "\n".join(filter(None, texts))})
        elif message["role"] == "tool":
            _answer(made, f"<tool_response>\n{message['content']}\n</tool_response>")
        elif message["role"] == "user" and made and made[-1].get("of_tools"):
            _answer(made, message["content"])
        else:
            made.append(message)
    if tools:
        text = _INTRODUCTION.format(tools="\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools))
        _introduce(made, text, "system" if takes_system else "user")
    return [{name: value for name, value in message.items() if name != "of_tools"} for message in made]


def _call(function: dict[str, Any]) -> str:
    call = {"name": function["name"], "arguments": function["arguments"]}
    return f"<tool_call>\n{json.dumps(call, ensure_ascii=False)}\n</tool_call>"


def _answer(made: list[Message], text: str) -> None:
    """Add text to the user's turn that outputs of tools have begun, or begin one: roles alternate in most templates."""
    if made and made[-1].get("of_tools"):
        made[-1]["content"] += f"\n{text}"
    else:
        made.append({"role": "user", "content": text, "of_tools": True})


def _introduce(made: list[Message], text: str, role: str) -> None:
    """Put text into the first message, behind what that says, if it is of this role; else before all."""
    if made and (made[0]["role"] == role or (role, made[0]["role"]) == ("system", "developer")):
        made[0] = {**made[0], "content": "\n\n".join(filter(None, (made[0]["content"], text)))}
    else:
        made.insert(0, {"role": role, "content": text})
