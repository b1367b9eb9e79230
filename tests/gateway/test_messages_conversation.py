"""Anthropic's messages and their blocks as the messages of a chat."""

from __future__ import annotations

from typing import Any

from inflight.gateway.opaque_reasoning import seal_reasoning
from tests.gateway.test_messages_request import CALL, CALLED, RESULT, TOOL_MESSAGE, USER, assistant, read, text, user
from tests.support.tables import each_row

CONVERSATIONS: list[tuple[list[Any], list[dict[str, Any]]]] = [
    ([USER], [USER]),
    ([user(text("Hi"))], [USER]),
    ([user(text("Hi") | {"cache_control": {"type": "ephemeral"}})], [USER]),
    ([user(text("a"), text("b"))], [{"role": "user", "content": "a\nb"}]),
    ([USER, assistant(text("Yes.")), USER], [USER, {"role": "assistant", "content": "Yes."}, USER]),
    ([USER, assistant(CALL), user(RESULT)], [USER, CALLED, TOOL_MESSAGE]),
    ([USER, assistant(CALL), user(RESULT, text("Hi"))], [USER, CALLED, TOOL_MESSAGE, USER]),
    (
        [USER, assistant(CALL), user(RESULT | {"content": [text("3")], "is_error": False})],
        [USER, CALLED, TOOL_MESSAGE],
    ),
    (
        [USER, assistant(CALL), user(RESULT | {"content": "no", "is_error": True})],
        [USER, CALLED, TOOL_MESSAGE | {"content": "Error: no"}],
    ),
    (
        [USER, assistant(CALL), user(RESULT | {"content": [{"type": "tool_reference", "tool_name": "sub"}]})],
        [USER, CALLED, TOOL_MESSAGE | {"content": "The tool sub is available now."}],
    ),
    ([USER, assistant(CALL), user(RESULT | {"content": None})], [USER, CALLED, TOOL_MESSAGE | {"content": ""}]),
    (
        [USER, assistant({"type": "thinking", "thinking": "Hm.", "signature": "x"}, text("Yes."), CALL), user(RESULT)],
        [USER, CALLED | {"content": "Yes.", "reasoning_content": "Hm."}, TOOL_MESSAGE],
    ),
    (
        [USER, assistant({"type": "thinking", "thinking": "", "signature": seal_reasoning("Hm.")}, CALL), user(RESULT)],
        [USER, CALLED | {"reasoning_content": "Hm."}, TOOL_MESSAGE],
    ),
    (
        [USER, assistant({"type": "thinking", "thinking": "", "signature": ""}, text("Yes.")), USER],
        [USER, {"role": "assistant", "content": "Yes."}, USER],
    ),
    ([USER, {"role": "system", "content": "Now."}, USER], [USER, {"role": "system", "content": "Now."}, USER]),
    ([user(text("a"), text(""), text("b"))], [{"role": "user", "content": "a\nb"}]),
    ([user(text(""))], [{"role": "user", "content": ""}]),
    ([USER, USER], [{"role": "user", "content": "Hi\nHi"}]),
    (
        [USER, assistant(text("Yes.")), assistant(CALL), user(RESULT), USER],
        [USER, CALLED | {"content": "Yes."}, TOOL_MESSAGE, USER],
    ),
    ([USER, assistant(CALL, text("Yes.")), user(RESULT)], [USER, CALLED | {"content": "Yes."}, TOOL_MESSAGE]),
    ([USER, assistant(CALL), user(text("Hi"), RESULT)], [USER, CALLED, TOOL_MESSAGE, USER]),
    ([USER, assistant(CALL), USER, user(RESULT, text(""))], [USER, CALLED, TOOL_MESSAGE, USER]),
    (
        [USER, assistant({"type": "thinking", "thinking": "Hm.", "signature": "x"}), USER],
        [USER, {"role": "assistant", "content": "", "reasoning_content": "Hm."}, USER],
    ),
    ([USER, assistant(), USER], [USER, {"role": "assistant", "content": ""}, USER]),
]


@each_row("messages, chat", CONVERSATIONS)
def test_blocks_become_messages(messages: list[Any], chat: list[dict[str, Any]]) -> None:
    asked = read(messages=messages, strict=True)
    assert asked.chat["messages"] == chat
    assert "continue_final_message" not in asked.chat


@each_row(
    "system, content",
    [
        ("Be brief.", "Be brief."),
        ([text("a"), text("b") | {"cache_control": {"type": "ephemeral"}}], "a\n\nb"),
        ([text("x-anthropic-billing-header: cc_version=2.1; cch=0f3;"), text("a")], "a"),
        ("x-anthropic-billing-header: cc_version=2.1; cch=0f3;\nBe brief.", "Be brief."),
        ("Say x-anthropic-billing-header: y", "Say x-anthropic-billing-header: y"),
    ],
)
def test_the_system_leads_the_conversation(system: Any, content: str) -> None:
    assert read(system=system).chat["messages"] == [{"role": "system", "content": content}, USER]


def test_what_leads_the_conversation_is_one_message() -> None:
    chat = read(system="a", messages=[{"role": "system", "content": "b"}, USER]).chat
    assert chat["messages"] == [{"role": "system", "content": "a\n\nb"}, USER]


def test_a_system_of_nothing_is_none() -> None:
    for system in ("", [], [text("x-anthropic-billing-header: cch=1;")]):
        assert read(system=system).chat["messages"] == [USER]


def test_the_last_message_may_be_continued() -> None:
    asked = read(messages=[USER, {"role": "assistant", "content": "The answer is"}])
    assert asked.chat["continue_final_message"] is True
