"""Anthropic's messages and their blocks to the messages of a chat."""

from __future__ import annotations

import json
import re

from inflight.gateway.opaque_reasoning import open_reasoning
from inflight.gateway.reading import JsonValue
from inflight.gateway.turns import TurnRules, Turns
from inflight.gateway.values import boolean, mapping, one_of

_ROLE = one_of("user", "assistant", "system")
_TEXT = frozenset({"type", "text", "cache_control", "citations"})
_CALL = frozenset({"type", "id", "name", "input", "cache_control", "caller"})
_RESULT = frozenset({"type", "tool_use_id", "content", "is_error", "cache_control"})
_THINKING = frozenset({"type", "thinking", "signature", "cache_control"})
_REFERENCE = frozenset({"type", "tool_name", "cache_control"})
_BILLING_LINE = re.compile(r"\Ax-anthropic-billing-header:[^\n]*\n?")
"""Claude Code begins the system's text with a line for Anthropic's accounts, which changes with every request: left in
the prompt, no prefix of it would ever be reused."""
_TEXT_ALONE = "the models served take text"


def read_turns(system: JsonValue | None, messages: JsonValue, rules: TurnRules) -> Turns:
    """Return the chat of a request's ``system`` and ``messages``, by the ``rules`` of the chat template.

    Raises:
        ApiError: naming the block and what is wrong with it.
    """
    turns = Turns(rules, merges_users=True)
    text = "" if system is None else _BILLING_LINE.sub("", _read_system(system))
    if text:
        turns.say("system", text, "system")
    elements = messages.elements()
    if not elements:
        raise messages.error("is empty; it must have at least one message")
    for message in elements:
        _add_message(turns, message)
    last = turns.messages()[-1]
    if last["role"] == "assistant" and ("tool_calls" in last or not last["content"].strip()):
        raise elements[-1].error("is the assistant's; the last message may only be so with text, which is continued")
    return turns


def _add_message(turns: Turns, message: JsonValue) -> None:
    message.only(("role", "content"))
    role, content = message.need("role").read(_ROLE), message.need("content")
    if role == "system":
        turns.say("system", _read_system(content), message.path)
    elif isinstance(content.value, str):
        if role == "assistant":
            turns.answer(content.text(), message.path)
        else:
            turns.say("user", content.text(), message.path)
    elif role == "assistant":
        _add_assistant(turns, content, message.path)
    else:
        _add_user(turns, content, message.path)


def _read_system(system: JsonValue) -> str:
    if isinstance(system.value, str):
        return system.text()
    texts = [_read_text(block, _block_type(block)) for block in system.elements()]
    return "\n\n".join(text for text in texts if not _BILLING_LINE.fullmatch(text))


def _add_user(turns: Turns, content: JsonValue, place: str) -> None:
    """Add a user's turn: a tool's message for each result, and then one of the user for the text."""
    texts: list[str] = []
    for block in content.elements():
        kind = _block_type(block)
        if kind.value == "tool_result":
            _add_result(turns, block)
        else:
            texts.append(_read_text(block, kind))
    if not content.value:
        raise content.error("is empty; it must have at least one block")
    if any(texts) or len(texts) == len(content.value):
        turns.say("user", "\n".join(filter(None, texts)), place)


def _add_result(turns: Turns, block: JsonValue) -> None:
    block.only(_RESULT)
    call_id, content, failed = block.need("tool_use_id"), block.get("content"), block.get("is_error")
    if not turns.has_call(call_id.name()):
        raise call_id.error(f"is {call_id.text()[:64]!r}; no tool_use block before it has this id")
    text = _read_content(content) if content is not None else ""
    if failed is not None and failed.read(boolean()):
        text = f"Error: {text}"  # no chat template has another place for it
    turns.output(call_id.text(), text, block.path)


def _read_content(content: JsonValue) -> str:
    if isinstance(content.value, str):
        return content.text()
    return "\n".join(text for block in content.elements() if (text := _read_text(block, _block_type(block))))


def _add_assistant(turns: Turns, content: JsonValue, place: str) -> None:
    turns.answer("", place)
    for block in content.elements():
        kind = _block_type(block)
        match kind.value:
            case "thinking":
                if thought := _read_thinking(block):
                    turns.think(thought, place)
            case "redacted_thinking":
                raise kind.refusal("this server makes no such blocks, and cannot read them")
            case "tool_use":
                _add_call(turns, block, place)
            case _:
                turns.answer(_read_text(block, kind), place)


def _read_thinking(block: JsonValue) -> str:
    """Return the text of thinking; where it was omitted, its signature has it."""
    block.only(_THINKING)
    text, signature = block.need("thinking").text(), block.get("signature")
    if not text and signature is not None and signature.text():
        text = open_reasoning(signature.text()) or ""
        if not text:
            raise signature.error("was not made by this server, which cannot read it")
    return text


def _add_call(turns: Turns, block: JsonValue, place: str) -> None:
    block.only(_CALL)
    if (caller := block.get("caller")) is not None:
        caller.accept("the model is the only caller", {"type": "direct"})
    arguments = json.dumps(block.need("input").read(mapping()), ensure_ascii=False)
    turns.call(block.need("id").name(), block.need("name").name(), arguments, place)


def _block_type(block: JsonValue) -> JsonValue:
    kind = block.need("type")
    kind.text()
    return kind


def _read_text(block: JsonValue, kind: JsonValue) -> str:
    """Return the text of a block of text. Raises ApiError: it is of another type."""
    if kind.value == "tool_reference":
        block.only(_REFERENCE)
        return f"The tool {block.need('tool_name').name()} is available now."
    if kind.value in ("image", "document", "search_result", "container_upload"):
        raise kind.refusal(_TEXT_ALONE)
    if kind.value != "text":
        raise kind.refusal("blocks of this type have no place here")
    block.only(_TEXT)
    if (citations := block.get("citations")) is not None:
        citations.accept("no chat template has a place for them", [])
    return block.need("text").text()
