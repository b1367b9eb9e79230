"""Anthropic's messages and their blocks to chat messages."""

from __future__ import annotations

import json
import re
from typing import Any

from inflight.gateway.opaque_reasoning import open_reasoning
from inflight.gateway.reading import JsonValue
from inflight.gateway.values import boolean, mapping, one_of

Message = dict[str, Any]

_ROLE = one_of("user", "assistant", "system")
_TEXT = frozenset({"type", "text", "cache_control", "citations"})
_CALL = frozenset({"type", "id", "name", "input", "cache_control", "caller"})
_RESULT = frozenset({"type", "tool_use_id", "content", "is_error", "cache_control"})
_THINKING = frozenset({"type", "thinking", "signature", "cache_control"})
_BILLING_LINE = re.compile(r"\Ax-anthropic-billing-header:[^\n]*\n?")
"""Claude Code begins the system's text with a line for Anthropic's accounts, which changes with every request: left in
the prompt, no prefix of it would ever be reused."""
_TEXT_ALONE = "the models served take text"


def read_messages(system: JsonValue | None, messages: JsonValue) -> list[Message]:
    """Return the chat of a request's ``system`` and ``messages``.

    Raises:
        ApiError: naming the block and what is wrong with it.
    """
    chat: list[Message] = []
    text = "" if system is None else _BILLING_LINE.sub("", _read_system(system))
    if text:
        chat.append({"role": "system", "content": text})
    elements = messages.elements()
    if not elements:
        raise messages.error("is empty; it must have at least one message")
    names: dict[str, str] = {}
    for message in elements:
        message.only(("role", "content"))
        role, content = message.need("role").read(_ROLE), message.need("content")
        if role == "assistant":
            chat.append(_read_assistant(content, names))
        elif role == "system":
            chat.append({"role": "system", "content": _read_system(content)})
        else:
            chat += _read_user(content, names)
    if chat[-1]["role"] == "assistant" and (not chat[-1]["content"] or "tool_calls" in chat[-1]):
        raise elements[-1].error("is the assistant's; the last message may only be so with text, which is continued")
    return chat


def _read_system(system: JsonValue) -> str:
    if isinstance(system.value, str):
        return system.text()
    texts = [_read_text(block, _block_type(block)) for block in system.elements()]
    return "\n\n".join(text for text in texts if not _BILLING_LINE.fullmatch(text))


def _read_user(content: JsonValue, names: dict[str, str]) -> list[Message]:
    """Return the messages of a user's turn: a tool's for each result, a user's for the text between them.

    ``names`` has the tool that each call before it calls, by the call's id.
    """
    if isinstance(content.value, str):
        return [{"role": "user", "content": content.text()}]
    found: list[Message] = []
    for block in content.elements():
        kind = _block_type(block)
        if kind.value == "tool_result":
            found.append(_read_result(block, names))
        elif (text := _read_text(block, kind)) and found and found[-1]["role"] == "user":
            found[-1]["content"] += f"\n{text}"
        else:
            found.append({"role": "user", "content": text})
    if not found:
        raise content.error("is empty; it must have at least one block")
    return found


def _read_result(block: JsonValue, names: dict[str, str]) -> Message:
    block.only(_RESULT)
    call_id, content, failed = block.need("tool_use_id"), block.get("content"), block.get("is_error")
    name = names.get(call_id.name())
    if name is None:
        raise call_id.error(f"is {call_id.text()[:64]!r}; no tool_use block before it has this id")
    text = _read_content(content) if content is not None else ""
    if failed is not None and failed.read(boolean()):
        text = f"Error: {text}"  # no chat template has another place for it
    return {"role": "tool", "tool_call_id": call_id.text(), "name": name, "content": text}


def _read_content(content: JsonValue) -> str:
    if isinstance(content.value, str):
        return content.text()
    return "\n".join(_read_text(block, _block_type(block)) for block in content.elements())


def _read_assistant(content: JsonValue, names: dict[str, str]) -> Message:
    """Return the message of an assistant's turn, and note the tools of its calls in ``names``."""
    if isinstance(content.value, str):
        return {"role": "assistant", "content": content.text()}
    thoughts: list[str] = []
    texts: list[str] = []
    calls: list[dict[str, Any]] = []
    for block in content.elements():
        kind = _block_type(block)
        match kind.value:
            case "thinking":
                thoughts.append(_read_thinking(block))
            case "redacted_thinking":
                raise kind.refusal("this server makes no such blocks, and cannot read it")
            case "tool_use":
                calls.append(_read_call(block))
                names[calls[-1]["id"]] = calls[-1]["function"]["name"]
            case _:
                texts.append(_read_text(block, kind))
    message: Message = {"role": "assistant", "content": "\n".join(texts) if texts or not calls else None}
    if thoughts := [one for one in thoughts if one]:
        message["reasoning_content"] = "\n".join(thoughts)
    return message | ({"tool_calls": calls} if calls else {})


def _read_thinking(block: JsonValue) -> str:
    """Return the text of thinking; where it was omitted, its signature has it."""
    block.only(_THINKING)
    text, signature = block.need("thinking").text(), block.get("signature")
    if not text and signature is not None and signature.text():
        text = open_reasoning(signature.text()) or ""
        if not text:
            raise signature.error("was not made by this server, which cannot read it")
    return text


def _read_call(block: JsonValue) -> dict[str, Any]:
    block.only(_CALL)
    if (caller := block.get("caller")) is not None:
        caller.accept("the model is the only caller", {"type": "direct"})
    arguments = json.dumps(block.need("input").read(mapping()), ensure_ascii=False)
    function = {"name": block.need("name").name(), "arguments": arguments}
    return {"id": block.need("id").name(), "type": "function", "function": function}


def _block_type(block: JsonValue) -> JsonValue:
    kind = block.need("type")
    kind.text()
    return kind


def _read_text(block: JsonValue, kind: JsonValue) -> str:
    """Return the text of a block of text. Raises ApiError: it is of another type."""
    if kind.value in ("image", "document", "search_result", "container_upload"):
        raise kind.refusal(f"{kind.value}; {_TEXT_ALONE}")
    if kind.value != "text":
        raise kind.refusal(f"blocks of type {kind.text()[:64]!r} have no place here")
    block.only(_TEXT)
    if (citations := block.get("citations")) is not None:
        citations.accept("no chat template has a place for them", [])
    return block.need("text").text()
