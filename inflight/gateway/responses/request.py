"""A request of the Responses API as the chat completion that it asks for, and what its response repeats of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from inflight.gateway.agent_fields import PASSED_ON
from inflight.gateway.as_chat import FieldNames
from inflight.gateway.errors import invalid
from inflight.gateway.fields import Fields
from inflight.gateway.reading import JsonValue
from inflight.gateway.responses.conversation import read_turns
from inflight.gateway.responses.fields import LOG_PROBS, RESPONSES_READER, SEALED_REASONING
from inflight.gateway.responses.text_format import read_text_format
from inflight.gateway.responses.tools import CalledTool, Enforces, read_response_tools
from inflight.gateway.turns import TurnRules

_PASSED_ON = ("model", "stop", "parallel_tool_calls", "user", *PASSED_ON)
_NAMES = FieldNames(
    {
        r"max_completion_tokens": "max_output_tokens",
        r"response_format\.json_schema\b": "text.format",
        r"response_format": "text.format",
        r"(tools\[\d+\](?:\.tools\[\d+\])?)\.function\b": r"\1",
        r"tool_choice\.function\b": "tool_choice",
        r"reasoning_effort": "reasoning.effort",
        r"verbosity": "text.verbosity",
        r"^messages\b|(?<=in the )messages|(?<=length of the )messages": "input",
    }
)


@dataclass(frozen=True)
class ResponsesRequest:
    """A request, checked."""

    chat: dict[str, Any]
    """The body of the same chat completion."""
    shown: dict[str, Any]
    """Fields of the response that repeat the request, but for hints."""
    stream: bool
    log_probs: bool
    seals_reasoning: bool
    """Whether reasoning is returned as an opaque text too."""
    called: Mapping[str, CalledTool]
    """How calls name the tools, by the functions of the chat."""
    names: FieldNames
    """The chat's fields as this request has them, for errors."""
    ignored: tuple[str, ...]
    """Paths of the fields that are not known."""

    def repeated(self, obeyed: Fields) -> dict[str, Any]:
        """Return the fields of the response that repeat the request, with the hints of its chat that are obeyed."""
        verbosity = {"verbosity": obeyed["verbosity"]} if "verbosity" in obeyed else {}
        reasoning = {"effort": obeyed.get("reasoning_effort"), "summary": None}
        return self.shown | {"reasoning": reasoning, "text": self.shown["text"] | verbosity}


def read_request(
    body: Mapping[str, Any],
    *,
    strict: bool,
    rules: TurnRules,
    enforces: Enforces,
) -> ResponsesRequest:
    """Check a body and convert it.

    Args:
        body: the JSON object of the request.
        strict: whether fields that would have no effect are refused.
        rules: what the chat template takes.
        enforces: whether the model's format of calls can hold arguments to a schema.

    Raises:
        ApiError: 400, naming the field by its path.
    """
    fields = RESPONSES_READER.read(body, strict=strict)
    if "truncate_prompt_tokens" in fields and body.get("truncation") is not None:
        message = 'truncation is "disabled", and truncate_prompt_tokens asks to cut the prompt; give one of them'
        raise invalid(message, "truncation")
    ignored: list[str] = []
    tools = read_response_tools(_value(fields, "tools", ignored), _value(fields, "tool_choice", ignored), enforces)
    text = read_text_format(_value(fields, "text", ignored))
    included, top_log_probs = fields.get("include", ()), fields.get("top_logprobs", 0)
    reasoning = fields.get("reasoning", {})
    log_probs = LOG_PROBS in included or top_log_probs > 0
    chat = {name: fields.get(name) for name in _PASSED_ON if name in fields}
    turns = read_turns(fields.get("instructions"), JsonValue(fields.get("input"), "input", ignored), rules)
    chat["messages"] = turns.messages()
    if tools.chat:
        chat |= {"tools": tools.chat, "tool_choice": tools.choice}
    chat |= text.chat
    if log_probs:
        chat |= {"logprobs": True, "top_logprobs": top_log_probs}
    if reasoning.get("effort") is not None:
        chat["reasoning_effort"] = reasoning["effort"]
    if "max_output_tokens" in fields:
        chat["max_completion_tokens"] = fields.get("max_output_tokens")
    shown = _shown(fields) | {"tools": tools.shown, "tool_choice": tools.shown_choice, "text": text.shown}
    return ResponsesRequest(
        chat,
        shown,
        stream=fields.get("stream", False),
        log_probs=log_probs,
        seals_reasoning=SEALED_REASONING in included,
        called=tools.called,
        names=_NAMES.at(messages=turns.places(), tools=tools.places),
        ignored=fields.naming(ignored, strict=strict).ignored,
    )


def _value(fields: Fields, name: str, ignored: list[str]) -> JsonValue | None:
    return JsonValue(fields.get(name), name, ignored) if name in fields else None


def _shown(fields: Fields) -> dict[str, Any]:
    """Return what a response repeats of plain fields, with their defaults."""
    return {
        "instructions": fields.get("instructions"),
        "max_output_tokens": fields.get("max_output_tokens"),
        "max_tool_calls": fields.get("max_tool_calls"),
        "metadata": fields.get("metadata", {}),
        "parallel_tool_calls": fields.get("parallel_tool_calls", True),
        "presence_penalty": fields.get("presence_penalty", 0.0),
        "frequency_penalty": fields.get("frequency_penalty", 0.0),
        "top_logprobs": fields.get("top_logprobs", 0),
        "user": fields.get("user"),
        "safety_identifier": fields.get("safety_identifier"),
        "prompt_cache_key": fields.get("prompt_cache_key"),
        "service_tier": "default",
        "truncation": "auto" if "truncate_prompt_tokens" in fields else "disabled",
        "store": False,
        "background": False,
        "previous_response_id": None,
    }
