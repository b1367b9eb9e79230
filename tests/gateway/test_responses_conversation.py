"""Items of the Responses API as messages of a chat: turns, calls and their outputs, reasoning, and echoes."""

from __future__ import annotations

from typing import Any

from inflight.gateway.opaque_reasoning import open_reasoning, seal_reasoning
from tests.gateway.test_responses_request import read
from tests.support.tables import each_row

CALL = {"type": "function_call", "call_id": "call_1", "name": "add", "arguments": '{"a": 1}'}
OUTPUT = {"type": "function_call_output", "call_id": "call_1", "output": "3"}
CHAT_CALL = {"id": "call_1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
CHAT_OUTPUT = {"role": "tool", "tool_call_id": "call_1", "name": "add", "content": "3"}
USER = {"role": "user", "content": "Hi"}


def messages(*items: Any, **fields: Any) -> list[dict[str, Any]]:
    return list(read(strict=True, input=list(items), **fields).chat["messages"])


ASSISTANT = {"role": "assistant", "content": "Yes."}
CONVERSATIONS: list[tuple[list[Any], list[dict[str, Any]]]] = [
    ([USER], [USER]),
    ([{"type": "message", **USER}], [USER]),
    ([{"role": "user", "content": [{"type": "input_text", "text": "Hi"}]}], [USER]),
    (
        [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "input_text", "text": "b"}]}],
        [{"role": "user", "content": "a\nb"}],
    ),
    (
        [USER, {"role": "assistant", "content": [{"type": "output_text", "text": "Yes."}]}, USER],
        [USER, ASSISTANT, USER],
    ),
    (
        [
            USER,
            {
                "type": "message",
                "id": "msg_1",
                "status": "completed",
                "role": "assistant",
                "phase": "final_answer",
                "content": [{"type": "output_text", "text": "Yes.", "annotations": [], "logprobs": []}],
            },
            USER,
        ],
        [USER, ASSISTANT, USER],
    ),
    ([USER, {"role": "assistant", "content": [{"type": "refusal", "refusal": "Yes."}]}], [USER, ASSISTANT]),
    (
        [USER, CALL, OUTPUT],
        [
            USER,
            {"role": "assistant", "content": None, "tool_calls": [CHAT_CALL]},
            {"role": "tool", "tool_call_id": "call_1", "name": "add", "content": "3"},
        ],
    ),
    (
        [
            USER,
            ASSISTANT,
            CALL | {"id": "fc_1", "status": "completed"},
            OUTPUT | {"output": [{"type": "input_text", "text": "3"}]},
        ],
        [
            USER,
            ASSISTANT | {"tool_calls": [CHAT_CALL]},
            {"role": "tool", "tool_call_id": "call_1", "name": "add", "content": "3"},
        ],
    ),
    (
        [USER, CALL, CALL | {"call_id": "call_2"}],
        [USER, {"role": "assistant", "content": None, "tool_calls": [CHAT_CALL, CHAT_CALL | {"id": "call_2"}]}],
    ),
    (
        [
            USER,
            {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm."}]},
            ASSISTANT,
            USER,
        ],
        [USER, ASSISTANT | {"reasoning_content": "Hm."}, USER],
    ),
    (
        [USER, {"type": "reasoning", "summary": [], "encrypted_content": seal_reasoning("Hm.")}, CALL],
        [USER, {"role": "assistant", "content": None, "reasoning_content": "Hm.", "tool_calls": [CHAT_CALL]}],
    ),
    (
        [
            USER,
            {"type": "reasoning", "summary": [{"type": "summary_text", "text": "Hm."}], "encrypted_content": "gAAA"},
            ASSISTANT,
        ],
        [USER, ASSISTANT | {"reasoning_content": "Hm."}],
    ),
    ([USER, {"type": "reasoning", "summary": [], "encrypted_content": ""}, ASSISTANT], [USER, ASSISTANT]),
    (
        [USER, ASSISTANT, {"type": "reasoning", "summary": [{"type": "summary_text", "text": "Hm."}]}, ASSISTANT],
        [USER, ASSISTANT | {"content": "Yes.\nYes.", "reasoning_content": "Hm."}],
    ),
    (
        [USER, {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm."}]}, USER],
        [USER, {"role": "assistant", "content": "", "reasoning_content": "Hm."}, USER],
    ),
    (
        [USER, CALL, ASSISTANT, OUTPUT, USER],
        [USER, ASSISTANT | {"tool_calls": [CHAT_CALL]}, CHAT_OUTPUT, USER],
    ),
    (
        [USER, CALL, USER, OUTPUT],
        [USER, {"role": "assistant", "content": None, "tool_calls": [CHAT_CALL]}, CHAT_OUTPUT, USER],
    ),
    (
        [
            USER,
            {"type": "reasoning", "summary": [{"type": "summary_text", "text": "a"}]},
            CALL,
            {"type": "reasoning", "summary": [{"type": "summary_text", "text": "b"}]},
            CALL | {"call_id": "call_2"},
            OUTPUT,
            OUTPUT | {"call_id": "call_2"},
        ],
        [
            USER,
            {
                "role": "assistant",
                "content": None,
                "reasoning_content": "a\nb",
                "tool_calls": [CHAT_CALL, CHAT_CALL | {"id": "call_2"}],
            },
            CHAT_OUTPUT,
            CHAT_OUTPUT | {"tool_call_id": "call_2"},
        ],
    ),
    (
        [USER, CALL, USER, CALL | {"call_id": "call_2"}, OUTPUT | {"call_id": "call_2"}, OUTPUT],
        [
            USER,
            {"role": "assistant", "content": None, "tool_calls": [CHAT_CALL]},
            CHAT_OUTPUT,
            USER,
            {"role": "assistant", "content": None, "tool_calls": [CHAT_CALL | {"id": "call_2"}]},
            CHAT_OUTPUT | {"tool_call_id": "call_2"},
        ],
    ),
    (
        [USER, CALL | {"arguments": '{"a": 1, "b": "x', "status": "incomplete"}, OUTPUT],
        [USER, {"role": "assistant", "content": None, "tool_calls": [CHAT_CALL]}, CHAT_OUTPUT],
    ),
    (
        [{"role": "user", "content": [{"type": "input_text", "text": one} for one in ("a", "", "b")]}],
        [{"role": "user", "content": "a\nb"}],
    ),
    (
        [USER, CALL | {"arguments": ""}],
        [
            USER,
            {
                "role": "assistant",
                "content": None,
                "tool_calls": [CHAT_CALL | {"function": {"name": "add", "arguments": "{}"}}],
            },
        ],
    ),
    (
        [{"role": "developer", "content": "a"}, {"role": "system", "content": "b"}, USER],
        [{"role": "system", "content": "a\n\nb"}, USER],
    ),
    ([{"role": "developer", "content": "a"}, USER], [{"role": "developer", "content": "a"}, USER]),
    ([USER, {"role": "developer", "content": "a"}], [USER, {"role": "developer", "content": "a"}]),
    (
        [
            {
                "type": "agent_message",
                "author": "/a",
                "recipient": "/b",
                "content": [{"type": "input_text", "text": "Hi"}],
            }
        ],
        [{"role": "user", "content": "Message from /a to /b:\nHi"}],
    ),
]


@each_row("items, chat", CONVERSATIONS)
def test_items_become_messages(items: list[Any], chat: list[dict[str, Any]]) -> None:
    assert messages(*items) == chat


def test_instructions_lead_the_conversation() -> None:
    system = {"role": "developer", "content": "b"}
    assert messages(system, USER, instructions="a") == [{"role": "system", "content": "a\n\nb"}, USER]
    assert messages(USER, instructions="") == [USER]


@each_row("text", ["", "Hm.", "Grüße, 世界 👋\n" * 50])
def test_sealed_reasoning_is_read_again(text: str) -> None:
    sealed = seal_reasoning(text)
    assert open_reasoning(sealed) == text
    assert open_reasoning(sealed + "%") is None
    assert open_reasoning(text) is None
