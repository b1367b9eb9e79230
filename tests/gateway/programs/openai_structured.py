"""Structured outputs with the OpenAI SDK: what is parsed is valid, streamed or not."""

from __future__ import annotations

import json
from typing import Any, Literal

from harness import Gateway, main, raised
from openai import BadRequestError, LengthFinishReasonError
from openai_chat import QUESTION, client_of
from pydantic import BaseModel, Field

LIMITS: dict[str, Any] = {"temperature": 0, "max_completion_tokens": 300}


class Step(BaseModel):
    """A step of an engine."""

    name: Literal["schedule", "run", "postprocess"]
    tokens: int = Field(ge=0, le=999)


class Plan(BaseModel):
    """What an engine does."""

    kind: Literal["static", "in-flight"]
    fair: bool
    steps: list[Step] = Field(min_length=1, max_length=2)
    note: str = Field(max_length=20)


def check_parse_makes_an_object(gateway: Gateway) -> None:
    """The answer is of the class, and its text is its JSON."""
    answer = client_of(gateway).chat.completions.parse(
        model=gateway.model, messages=QUESTION, response_format=Plan, **LIMITS
    )
    [choice] = answer.choices
    assert isinstance(choice.message.parsed, Plan)
    assert Plan.model_validate_json(choice.message.content or "") == choice.message.parsed


def check_a_stream_parses_to_the_same_object(gateway: Gateway) -> None:
    """With the helper."""
    client = client_of(gateway)
    answer = client.chat.completions.parse(model=gateway.model, messages=QUESTION, response_format=Plan, **LIMITS)
    with client.chat.completions.stream(
        model=gateway.model, messages=QUESTION, response_format=Plan, **LIMITS
    ) as stream:
        for _ in stream:
            pass
        final = stream.get_final_completion()
    assert final.choices[0].message.parsed == answer.choices[0].message.parsed


def check_each_draw_is_valid(gateway: Gateway) -> None:
    """At a high temperature too, for each of several choices; some reason until the limit, and have no text."""
    schema: Any = {"name": "plan", "strict": True, "schema": Plan.model_json_schema()}
    answer = client_of(gateway).chat.completions.create(
        model=gateway.model,
        messages=QUESTION,
        response_format={"type": "json_schema", "json_schema": schema},
        n=8,
        temperature=1.5,
        seed=1,
        max_completion_tokens=300,
    )
    ended = [choice.message.content or "" for choice in answer.choices if choice.finish_reason == "stop"]
    assert len(ended) > 1
    for text in ended:
        Plan.model_validate_json(text)


def check_any_json_object(gateway: Gateway) -> None:
    """``json_object`` makes an object, unless the limit cuts it, which the reason says."""
    format_: Any = {"type": "json_object"}
    answer = client_of(gateway).chat.completions.create(
        model=gateway.model, messages=QUESTION, response_format=format_, **LIMITS
    )
    [choice] = answer.choices
    assert choice.message.content
    assert choice.message.content.lstrip().startswith("{")
    if choice.finish_reason == "stop":
        assert isinstance(json.loads(choice.message.content), dict)


def check_a_limit_that_cuts_json_is_told(gateway: Gateway) -> None:
    """The SDK raises what it raises with OpenAI's own server."""
    raised(
        LengthFinishReasonError,
        lambda: client_of(gateway).chat.completions.parse(
            model=gateway.model, messages=QUESTION, response_format=Plan, max_completion_tokens=3
        ),
    )


def check_a_schema_that_cannot_be_enforced_is_refused(gateway: Gateway) -> None:
    """With the field's name and what is wrong with the schema."""
    schema: Any = {
        "type": "json_schema",
        "json_schema": {
            "name": "x",
            "strict": True,
            "schema": {"type": "number", "contentEncoding": 3, "not": {"multipleOf": 2}},
        },
    }
    error = raised(
        BadRequestError,
        lambda: client_of(gateway).chat.completions.create(
            model=gateway.model, messages=QUESTION, response_format=schema, **LIMITS
        ),
    )
    assert (error.param or "").startswith("response_format"), error.body


if __name__ == "__main__":
    main(globals())
