"""The Responses API with the OpenAI SDK: items, typed events, tools, structured outputs."""

from __future__ import annotations

import json
from typing import Any

from harness import Gateway, main, raised
from openai import BadRequestError
from openai_chat import client_of
from openai_structured import Plan

QUESTION = "What is in-flight batching?"
GREEDY: dict[str, Any] = {"temperature": 0, "max_output_tokens": 24}
TOOL: Any = {
    "type": "function",
    "name": "weather",
    "description": "Look up the weather.",
    "strict": True,
    "parameters": {
        "type": "object",
        "properties": {"city": {"enum": ["Paris", "Rome"]}},
        "required": ["city"],
        "additionalProperties": False,
    },
}


def check_an_answer_has_all_its_parts(gateway: Gateway) -> None:
    """Items of the output, status, usage; what was asked for comes back."""
    answer = client_of(gateway).responses.create(
        model=gateway.model, input=QUESTION, instructions="Be brief.", temperature=0
    )
    assert answer.output_text
    assert answer.status == "completed"
    assert answer.instructions == "Be brief."
    assert answer.usage
    assert answer.usage.input_tokens + answer.usage.output_tokens == answer.usage.total_tokens
    assert [item.type for item in answer.output] == ["message"]


def check_a_limit_leaves_an_answer_incomplete(gateway: Gateway) -> None:
    """The status says so, and why."""
    answer = client_of(gateway).responses.create(
        model=gateway.model, input=QUESTION, max_output_tokens=16, temperature=0
    )
    assert answer.status == "incomplete"
    assert answer.incomplete_details
    assert answer.incomplete_details.reason == "max_output_tokens"


def check_events_come_in_order(gateway: Gateway) -> None:
    """Numbers without a gap; parts open and close; deltas make the text; the last event has the whole answer."""
    client = client_of(gateway)
    answer = client.responses.create(model=gateway.model, input=QUESTION, **GREEDY)
    events: list[Any] = list(client.responses.create(model=gateway.model, input=QUESTION, stream=True, **GREEDY))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [event.type for event in events]
    assert kinds[0] == "response.created"
    assert kinds[1] == "response.in_progress"
    assert kinds[-1] in ("response.completed", "response.incomplete")
    for opening, closing in (("output_item.added", "output_item.done"), ("content_part.added", "content_part.done")):
        assert kinds.index(f"response.{opening}") < kinds.index(f"response.{closing}")
        assert kinds.count(f"response.{opening}") == kinds.count(f"response.{closing}") == 1
    text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    assert text == answer.output_text == events[-1].response.output_text


def check_the_stream_helper_ends_with_the_answer(gateway: Gateway) -> None:
    """It follows the items by their events."""
    with client_of(gateway).responses.stream(model=gateway.model, input=QUESTION, temperature=0) as stream:
        for _ in stream:
            pass
        final = stream.get_final_response()
    assert final.output_text
    assert final.usage


def check_parse_makes_an_object(gateway: Gateway) -> None:
    """From ``text.format``, streamed too."""
    client = client_of(gateway)
    answer = client.responses.parse(model=gateway.model, input=QUESTION, text_format=Plan, temperature=0)
    assert isinstance(answer.output_parsed, Plan)
    with client.responses.stream(model=gateway.model, input=QUESTION, text_format=Plan, temperature=0) as stream:
        for _ in stream:
            pass
        assert stream.get_final_response().output_parsed == answer.output_parsed


def check_a_tool_is_called_and_its_result_goes_back(gateway: Gateway) -> None:
    """The call is an item of its own; the next request echoes it, with the result."""
    client = client_of(gateway)
    answer = client.responses.create(
        model=gateway.model,
        input=QUESTION,
        tools=[TOOL],
        tool_choice="required",
        parallel_tool_calls=False,
        temperature=0,
    )
    calls: list[Any] = [item for item in answer.output if item.type == "function_call"]
    assert len(calls) == 1
    assert json.loads(calls[0].arguments)["city"] in ("Paris", "Rome")
    result = {"type": "function_call_output", "call_id": calls[0].call_id, "output": '{"sky": "clear"}'}
    turn: Any = [{"role": "user", "content": QUESTION}, *[item.to_dict() for item in answer.output], result]
    again = client.responses.create(model=gateway.model, input=turn, tools=[TOOL], tool_choice="none", temperature=0)
    assert again.status in ("completed", "incomplete")


def check_streamed_arguments_are_those_of_the_call(gateway: Gateway) -> None:
    """Deltas of the arguments concatenate to what ``done`` has."""
    events: list[Any] = list(
        client_of(gateway).responses.create(
            model=gateway.model, input=QUESTION, tools=[TOOL], tool_choice="required", temperature=0, stream=True
        )
    )
    deltas = "".join(one.delta for one in events if one.type == "response.function_call_arguments.delta")
    done = [one.arguments for one in events if one.type == "response.function_call_arguments.done"]
    assert deltas == "".join(done)
    assert done


def check_a_conversation_goes_on_from_its_items(gateway: Gateway) -> None:
    """Messages of all roles, an assistant's turn without a status, and fields that are null."""
    turn: Any = [
        {"type": "message", "role": "developer", "content": "Be brief."},
        {"role": "user", "content": [{"type": "input_text", "text": QUESTION}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "A way to serve."}]},
        {"role": "user", "content": "Why?"},
    ]
    answer = client_of(gateway).responses.create(
        model=gateway.model,
        input=turn,
        extra_body={"tools": None, "metadata": None, "previous_response_id": None, "client_metadata": {"a": "b"}},
        **GREEDY,
    )
    assert answer.output_text


def check_a_tool_of_the_servers_own_is_left_out_unless_the_choice_demands_it(gateway: Gateway) -> None:
    """The answer's header names it."""
    client, search = client_of(gateway), {"type": "web_search"}
    asked: dict[str, Any] = {"model": gateway.model, "input": QUESTION, "tools": [TOOL, search]}
    answer = client.responses.with_raw_response.create(**asked, **GREEDY)
    assert answer.headers["x-ignored-fields"] == "tools[1].web_search"
    error = raised(BadRequestError, lambda: client.responses.create(**asked, tool_choice=search))
    assert error.param == "tool_choice.type", error.body


def check_a_custom_tool_gets_text_under_its_grammar(gateway: Gateway) -> None:
    """Streamed and not; the call and its output go back."""
    client = client_of(gateway)
    grammar = 'start: "*** Begin" LF line~1..2 "*** End"\nline: ("+" | "-") /[a-z ]{1,8}/ LF\n%import common.LF'
    form = {"type": "grammar", "syntax": "lark", "definition": grammar}
    patch = {"type": "custom", "name": "patch", "description": "Changes a file.", "format": form}
    asked: dict[str, Any] = {"model": gateway.model, "input": QUESTION, "tools": [patch], "temperature": 0}
    forced: dict[str, Any] = {"tool_choice": {"type": "custom", "name": "patch"}, "max_output_tokens": 300}
    body = {"extra_body": {"chat_template_kwargs": {"enable_thinking": False}}}
    answer = client.responses.create(**asked, **forced, **body)
    [call] = answer.output
    assert call.type == "custom_tool_call"
    assert call.name == "patch"
    assert call.input.startswith("*** Begin\n")
    events: list[Any] = list(client.responses.create(**asked, **forced, **body, stream=True))
    deltas = [event.delta for event in events if event.type == "response.custom_tool_call_input.delta"]
    assert "".join(deltas) == call.input
    output = {"type": "custom_tool_call_output", "call_id": call.call_id, "output": "done"}
    asked["input"] = [{"role": "user", "content": QUESTION}, call.model_dump(exclude_none=True), output]
    assert client.responses.create(**asked, max_output_tokens=8).output


def check_a_call_of_a_namespace_names_it(gateway: Gateway) -> None:
    """As Codex wants it."""
    client = client_of(gateway)
    space = {"type": "namespace", "name": "home", "description": "Of the house.", "tools": [TOOL]}
    answer = client.responses.create(
        model=gateway.model,
        input=QUESTION,
        tools=[space],
        tool_choice="required",
        parallel_tool_calls=False,
        temperature=0,
        extra_body={"chat_template_kwargs": {"enable_thinking": False}},
    )
    [call] = answer.output
    assert call.type == "function_call"
    assert (call.namespace, call.name) == ("home", "weather")
    assert json.loads(call.arguments)["city"] in ("Paris", "Rome")


def check_what_needs_a_store_is_refused_by_name(gateway: Gateway) -> None:
    """The server is stateless."""
    client = client_of(gateway)
    error = raised(
        BadRequestError,
        lambda: client.responses.create(model=gateway.model, input=QUESTION, previous_response_id="resp_1"),
    )
    assert error.param == "previous_response_id", error.body


if __name__ == "__main__":
    main(globals())
