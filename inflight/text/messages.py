"""The messages of a chat: checked by path, and brought into the form that chat templates expect."""

from __future__ import annotations

import json
from typing import Any

from inflight.errors import InvalidRequest
from inflight.json_text import shown

Message = dict[str, Any]
_REASONING = ("reasoning_content", "reasoning", "thinking")
"""Names of the reasoning of an earlier answer: clients send one, templates read one."""


def check_messages(messages: Any) -> list[Message]:
    """Return messages as templates expect them: content as text, arguments of calls as objects, nothing that is null.

    Raises:
        InvalidRequest: naming the place, such as ``messages[3].tool_calls[0].function.name``, and what is wrong.
    """
    if not isinstance(messages, list) or not messages:
        raise InvalidRequest("messages must be a JSON list with at least one message")
    return [_message(message, f"messages[{index}]") for index, message in enumerate(messages)]


def _message(given: Any, place: str) -> Message:
    if not isinstance(given, dict):
        raise InvalidRequest(f"{place} is {type(given).__name__}; it must be an object with role and content")
    message = {key: value for key, value in given.items() if value is not None}
    role = message.get("role")
    if not isinstance(role, str) or not role:
        raise InvalidRequest(f"{place}.role is {role!r}; it must be a name such as 'user'")
    if "tool_calls" in message:
        message["tool_calls"] = _calls(message["tool_calls"], role, f"{place}.tool_calls")
        if not message["tool_calls"]:
            del message["tool_calls"]
    for key in ("tool_call_id", "name"):
        if not isinstance(message.get(key, ""), str):
            raise InvalidRequest(f"{place}.{key} is {shown(message[key])}; it must be a string")
    reasoning = next((key for key in _REASONING if key in message), None)
    if reasoning is not None:
        if not isinstance(message[reasoning], str):
            raise InvalidRequest(f"{place}.{reasoning} is {shown(message[reasoning])}; it must be a string")
        message |= dict.fromkeys(_REASONING, message[reasoning])
    message["content"] = _content(message, place)
    return message


def _content(message: Message, place: str) -> str | None:
    content = message.get("content")
    if isinstance(content, str) or (content is None and "tool_calls" in message):
        return content
    if content is None and message.get("role") == "assistant":
        return ""  # an answer of nothing, or one that was cut off in its reasoning
    if not isinstance(content, list):
        raise InvalidRequest(f"{place}.content is {shown(content)}; it must be a string")
    if not content:
        raise InvalidRequest(f"{place}.content is []; it must be a string, or parts of type 'text'")
    for index, part in enumerate(content):
        name = f"{place}.content[{index}]"
        kind = part.get("type") if isinstance(part, dict) else None
        if kind != "text":
            raise InvalidRequest(f"{name}.type is {shown(kind)}; only parts of type 'text' are served")
        if not isinstance(part.get("text"), str):
            raise InvalidRequest(f"{name}.text is {shown(part.get('text'))}; it must be a string")
    return "\n".join(part["text"] for part in content)  # most templates know no parts


def _calls(calls: Any, role: str, place: str) -> list[dict[str, Any]]:
    if role != "assistant":
        raise InvalidRequest(f"{place} is given in a message of {role!r}; only those of 'assistant' have calls")
    if not isinstance(calls, list):
        raise InvalidRequest(f"{place} is {shown(calls)}; it must be a list")
    return [_call(call, f"{place}[{index}]") for index, call in enumerate(calls)]


def _call(call: Any, place: str) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict):
        raise InvalidRequest(f"{place}.function is {shown(function)}; it must be an object with name and arguments")
    name = function.get("name")
    if not isinstance(name, str) or not name:
        raise InvalidRequest(f"{place}.function.name is {shown(name)}; it must be the name of a tool")
    if call.get("type") not in (None, "function"):
        raise InvalidRequest(f"{place}.type is {shown(call['type'])}; it must be 'function'")
    if not isinstance(call.get("id") or "", str):
        raise InvalidRequest(f"{place}.id is {shown(call['id'])}; it must be a string")
    arguments = _arguments(function.get("arguments"), f"{place}.function.arguments")
    return {**call, "type": "function", "function": {**function, "arguments": arguments}}


def _arguments(arguments: Any, place: str) -> dict[str, Any]:
    """Return arguments as an object; clients send them as a string of JSON."""
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments) if arguments.strip() else {}
        except (ValueError, RecursionError) as error:
            raise InvalidRequest(f"{place} is not valid JSON: {error}") from None
    if arguments is None:
        return {}
    if not isinstance(arguments, dict):
        raise InvalidRequest(f"{place} is {type(arguments).__name__}; it must be an object, as a string of JSON")
    return arguments
