"""Tools with the OpenAI SDK: calls that parse, named once, streamed as they are told."""

from __future__ import annotations

import json
from typing import Any, Literal

import openai
from harness import Gateway, main, raised
from openai import BadRequestError
from openai_chat import client_of
from pydantic import BaseModel, Field

ASKED: Any = [{"role": "user", "content": "What is the weather in Paris?"}]
LIMITS: dict[str, Any] = {"temperature": 0, "max_completion_tokens": 200}


class Weather(BaseModel):
    """Look up the weather."""

    city: Literal["Paris", "Rome", "Berlin"]
    days: int = Field(ge=1, le=7)


class Tide(BaseModel):
    """Look up the tide."""

    harbour: Literal["Brest", "Hamburg"]


TOOLS: Any = [openai.pydantic_function_tool(Weather), openai.pydantic_function_tool(Tide)]
MODELS: dict[str, type[BaseModel]] = {"Weather": Weather, "Tide": Tide}


def check_required_calls_parse(gateway: Gateway) -> None:
    """There is at least one call, of a tool that there is, with arguments of its schema."""
    answer = client_of(gateway).chat.completions.create(
        model=gateway.model, messages=ASKED, tools=TOOLS, tool_choice="required", **LIMITS
    )
    [choice] = answer.choices
    assert choice.finish_reason == "tool_calls"
    assert choice.message.tool_calls
    _check_calls(choice.message.tool_calls)


def _check_calls(calls: list[Any]) -> None:
    for call in calls:
        MODELS[call.function.name].model_validate_json(call.function.arguments)
    assert len({call.id for call in calls}) == len(calls)


def check_a_named_tool_is_called(gateway: Gateway) -> None:
    """Once, whatever the question says, and the reason is ``stop``, as OpenAI answers."""
    choice: Any = {"type": "function", "function": {"name": "Tide"}}
    answer = client_of(gateway).chat.completions.create(
        model=gateway.model, messages=ASKED, tools=TOOLS, tool_choice=choice, **LIMITS
    )
    assert answer.choices[0].message.tool_calls
    [call] = answer.choices[0].message.tool_calls
    assert call.type == "function"
    assert call.function.name == "Tide"
    Tide.model_validate_json(call.function.arguments)
    assert answer.choices[0].finish_reason == "stop"


def check_no_tool_is_called_where_none_is_allowed(gateway: Gateway) -> None:
    """With ``none`` the answer is text."""
    answer = client_of(gateway).chat.completions.create(
        model=gateway.model, messages=ASKED, tools=TOOLS, tool_choice="none", **LIMITS
    )
    assert not answer.choices[0].message.tool_calls
    assert answer.choices[0].finish_reason in ("stop", "length")


def check_the_model_may_choose(gateway: Gateway) -> None:
    """With ``auto`` it calls or it answers; the reason says which."""
    answer = client_of(gateway).chat.completions.create(model=gateway.model, messages=ASKED, tools=TOOLS, **LIMITS)
    [choice] = answer.choices
    calls = choice.message.tool_calls or []
    _check_calls(calls)
    assert (choice.finish_reason == "tool_calls") == bool(calls) or choice.finish_reason == "length"


def check_one_call_at_a_time(gateway: Gateway) -> None:
    """Without parallel calls there is one."""
    answer = client_of(gateway).chat.completions.create(
        model=gateway.model, messages=ASKED, tools=TOOLS, tool_choice="required", parallel_tool_calls=False, **LIMITS
    )
    assert len(answer.choices[0].message.tool_calls or []) == 1


def check_streamed_calls_are_those_of_the_answer(gateway: Gateway) -> None:
    """Every delta of a call has its index; id and name come once; the arguments concatenate to the same JSON."""
    client = client_of(gateway)
    wanted: dict[str, Any] = {"tools": TOOLS, "tool_choice": "required", **LIMITS}
    answer = client.chat.completions.create(model=gateway.model, messages=ASKED, **wanted)
    calls: dict[int, dict[str, str]] = {}
    reason = None
    for chunk in client.chat.completions.create(model=gateway.model, messages=ASKED, stream=True, **wanted):
        reason = chunk.choices[0].finish_reason or reason
        for delta in chunk.choices[0].delta.tool_calls or []:
            call = calls.setdefault(delta.index, {"id": "", "name": "", "arguments": ""})
            call["id"] += delta.id or ""
            assert delta.function
            call["name"] += delta.function.name or ""
            call["arguments"] += delta.function.arguments or ""
    told = answer.choices[0].message.tool_calls or []
    assert list(calls) == list(range(len(told)))
    assert [(one["name"], one["arguments"]) for one in calls.values()] == [
        (one.function.name, one.function.arguments) for one in told if one.type == "function"
    ]
    assert all(one["id"] for one in calls.values())
    assert reason == answer.choices[0].finish_reason


def check_the_stream_helper_parses_calls(gateway: Gateway) -> None:
    """It makes the objects of the tools' classes from strict tools."""
    wanted: dict[str, Any] = {"tools": TOOLS, "tool_choice": "required", **LIMITS}
    with client_of(gateway).chat.completions.stream(model=gateway.model, messages=ASKED, **wanted) as stream:
        for _ in stream:
            pass
        message = stream.get_final_completion().choices[0].message
    assert message.tool_calls
    assert all(isinstance(call.function.parsed_arguments, Weather | Tide) for call in message.tool_calls)


def check_a_turn_with_a_result_is_answered(gateway: Gateway) -> None:
    """The call goes back as it came, with the tool's answer."""
    client = client_of(gateway)
    message = (
        client.chat.completions.create(
            model=gateway.model,
            messages=ASKED,
            tools=TOOLS,
            tool_choice="required",
            parallel_tool_calls=False,
            **LIMITS,
        )
        .choices[0]
        .message
    )
    assert message.tool_calls
    result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": json.dumps({"sky": "clear"})}
    messages: Any = [*ASKED, message.to_dict(), result]
    answer = client.chat.completions.create(
        model=gateway.model, messages=messages, tools=TOOLS, tool_choice="none", **LIMITS
    )
    assert answer.choices[0].message.role == "assistant"


def check_several_choices_call_each_for_itself(gateway: Gateway) -> None:
    """Each of ``n`` choices has its own calls."""
    answer = client_of(gateway).chat.completions.create(
        model=gateway.model, messages=ASKED, tools=TOOLS, tool_choice="required", n=2, seed=3, max_completion_tokens=200
    )
    ids = [call.id for choice in answer.choices for call in choice.message.tool_calls or []]
    assert len(answer.choices) == 2
    assert len(set(ids)) == len(ids) >= 2


def check_a_schema_that_cannot_be_enforced_is_refused(gateway: Gateway) -> None:
    """The error names the tool's schema, by its place."""
    tools: Any = [
        {"type": "function", "function": {"name": "f", "strict": True, "parameters": {"type": "no such type"}}}
    ]
    error = raised(
        BadRequestError,
        lambda: client_of(gateway).chat.completions.create(
            model=gateway.model, messages=ASKED, tools=tools, tool_choice="required", **LIMITS
        ),
    )
    assert (error.param or "").startswith("tools"), error.body


def check_a_tool_that_is_named_must_be_there(gateway: Gateway) -> None:
    """The error names the choice."""
    choice: Any = {"type": "function", "function": {"name": "nobody"}}
    error = raised(
        BadRequestError,
        lambda: client_of(gateway).chat.completions.create(
            model=gateway.model, messages=ASKED, tools=TOOLS, tool_choice=choice
        ),
    )
    assert (error.param or "").startswith("tool_choice"), error.body


if __name__ == "__main__":
    main(globals())
