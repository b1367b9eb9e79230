"""A request of Anthropic's Messages API as the chat completion that it asks for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from inflight.gateway.agent_fields import PASSED_ON
from inflight.gateway.as_chat import FieldNames
from inflight.gateway.fields import Reader
from inflight.gateway.messages.conversation import read_turns
from inflight.gateway.messages.fields import COUNT_TOKENS_READER, MESSAGES_READER
from inflight.gateway.messages.tools import read_message_tools
from inflight.gateway.reading import JsonValue
from inflight.gateway.turns import TurnRules
from inflight.gateway.values import integer, mapping, one_of

_NAMES = FieldNames(
    {
        r"response_format\.json_schema\b": "output_config.format",
        r"response_format": "output_config.format",
        r"reasoning_effort": "output_config.effort",
        r"(tools\[\d+\])\.function\.parameters\b": r"\1.input_schema",
        r"(tools\[\d+\])\.function\b": r"\1",
        r"tool_choice\.function\b": "tool_choice",
        r"^stop": "stop_sequences",
    }
)
_THINKING = one_of("enabled", "disabled", "adaptive")


@dataclass(frozen=True)
class MessagesRequest:
    """A request, checked."""

    chat: dict[str, Any]
    """The body of the same chat completion, without a limit of tokens."""
    max_tokens: int
    """Most tokens to generate, as far as there is room for them."""
    stream: bool
    thinks: bool | None
    """Whether the model is to think; None: the request does not say."""
    omits_thinking: bool
    """Whether the text of the thinking is left out of the answer."""
    names: FieldNames
    """The chat's fields as this request has them, for errors."""
    ignored: tuple[str, ...]
    """Paths of the fields that are not known, or that nothing can be done about."""


def read_message_request(body: Mapping[str, Any], *, strict: bool, rules: TurnRules) -> MessagesRequest:
    """Check the body of a request for a message and convert it.

    Args:
        body: the JSON object of the request.
        strict: whether fields that would have no effect are refused.
        rules: what the chat template takes.

    Raises:
        ApiError: 400, naming the field by its path.
    """
    return _read(MESSAGES_READER, body, strict, rules)


def read_count_request(body: Mapping[str, Any], *, strict: bool, rules: TurnRules) -> MessagesRequest:
    """Check the body of a request for the number of a prompt's tokens and convert it, as ``read_message_request``."""
    return _read(COUNT_TOKENS_READER, body, strict, rules)


def _read(reader: Reader, body: Mapping[str, Any], strict: bool, rules: TurnRules) -> MessagesRequest:
    fields = reader.read(body, strict=strict)
    ignored: list[str] = []

    def value(name: str) -> JsonValue | None:
        return JsonValue(fields.get(name), name, ignored) if name in fields else None

    chat = {name: fields.get(name) for name in ("model", *PASSED_ON) if name in fields}
    turns = read_turns(value("system"), JsonValue(fields.get("messages"), "messages", ignored), rules)
    chat["messages"] = turns.messages()
    if chat["messages"][-1]["role"] == "assistant":
        chat["continue_final_message"] = True
    chat |= read_message_tools(value("tools"), value("tool_choice"))
    chat |= _read_output(value("output_config"), value("output_format"))
    thinking = value("thinking")
    thinks = None if thinking is None else _read_thinking(thinking)
    display = None if thinking is None else thinking.get("display")
    if stops := fields.get("stop_sequences"):
        chat["stop"] = stops
    if (metadata := value("metadata")) is not None and (user := metadata.get("user_id")) is not None:
        chat["user"] = user.text()
    return MessagesRequest(
        chat,
        max_tokens=fields.get("max_tokens", 1),
        stream=fields.get("stream", False),
        thinks=thinks,
        omits_thinking=display is not None and display.read(one_of("summarized", "omitted")) == "omitted",
        names=_NAMES.at(messages=turns.places()),
        ignored=fields.naming(ignored, strict=strict).ignored,
    )


def _read_thinking(thinking: JsonValue) -> bool:
    """Return whether the model is to think."""
    thinking.only(("type", "budget_tokens", "display"))
    if (budget := thinking.get("budget_tokens")) is not None:
        budget.read(integer(1, 2**31 - 1))
        budget.left_out()
    return bool(thinking.need("type").read(_THINKING) != "disabled")


def _read_output(config: JsonValue | None, older: JsonValue | None) -> dict[str, Any]:
    """Return the fields of a chat that ``output_config``, and the ``older`` ``output_format``, say."""
    chat: dict[str, Any] = {}
    form = older
    if config is not None:
        config.only(("effort", "format", "task_budget"))
        if (budget := config.get("task_budget")) is not None:
            budget.left_out()  # only max_tokens limits an answer
        if (effort := config.get("effort")) is not None:
            chat["reasoning_effort"] = effort.name()
        form = config.get("format")
        if form is not None and older is not None:
            raise older.error("is the older name of output_config.format, and both are given")
        form = form or older
    if form is not None:
        form.only(("type", "schema", "name"))
        form.need("type").read(one_of("json_schema"))
        schema = {"name": "output", "schema": form.need("schema").read(mapping()), "strict": True}
        chat["response_format"] = {"type": "json_schema", "json_schema": schema}
    return chat
