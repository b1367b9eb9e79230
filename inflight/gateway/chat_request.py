"""A chat as the engine takes it: messages, tools and guide to one ``Job``. Every endpoint with chats uses it."""

from __future__ import annotations

import functools
import secrets
from collections.abc import Mapping, Sequence
from typing import Any

from starlette.requests import Request

from inflight.errors import InflightError
from inflight.gateway.chat_guides import chat_guide
from inflight.gateway.context import Gateway
from inflight.gateway.errors import ApiError, invalid
from inflight.gateway.fields import Fields, unsupported
from inflight.gateway.generation import Job
from inflight.gateway.prompt_log_probs import asked_prompt_log_probs
from inflight.gateway.request_errors import request_error
from inflight.gateway.sampling import encode_texts, generate_request, most_tokens, sampling_arguments
from inflight.gateway.tools import read_tools
from inflight.gateway.values import same
from inflight.json_text import size
from inflight.text.chat import ChatTemplate
from inflight.text.messages import Message, check_messages
from inflight.text.output.tools import Tool

_OWN_FIELDS = frozenset({"messages", "tools", "documents", "add_generation_prompt", "continue_final_message"})
"""Variables of chat templates that requests give by fields of these names, which are checked."""


def chat_job(request: Request, fields: Fields, gateway: Gateway, *, stream: bool) -> Job:
    """Return the job of a chat; nothing is queued yet.

    Args:
        request: whose chat it is.
        fields: of its body, by the table ``field_tables.CHAT``.
        gateway: knows the deployment.
        stream: whether the engine sends tokens as they come.

    Raises:
        ApiError: 400, naming the field by its path.
    """
    tools, choice = read_tools(fields)
    prompt, ids = chat_prompt(fields, gateway, tools, most_tokens(gateway, fields))
    thinking_is_off = functools.cache(lambda: _thinking_is_off(fields, gateway, tools, prompt))
    guide = chat_guide(fields, gateway, prompt, tools, choice, thinking_is_off)
    form, sampling = gateway.chat_format, sampling_arguments(fields, gateway)
    stops = sampling["stop_strings"]
    searches = bool(stops) and form.has_thought(prompt) and not thinking_is_off()
    top = _top_log_probs(fields)
    engine_request = generate_request(
        request,
        fields,
        gateway,
        ids,
        "messages",
        **sampling | ({"stop_strings": []} if searches else {}),
        max_tokens=fields.either("max_completion_tokens", "max_tokens"),
        stream=stream,
        guide=guide.guide,
        guide_start_ids=guide.start_ids,
        log_probs=fields.get("logprobs", False),
        top_log_probs=top,
        prompt_log_probs=asked_prompt_log_probs(fields, gateway),
    )
    return Job(
        engine_request,
        form,
        tools,
        choice,
        reasoning_open=form.opens_reasoning(prompt),
        show_special=not fields.get("skip_special_tokens", True),
        show_stop=fields.get("include_stop_str_in_output", False),
        shown_stops=tuple(stops) if searches else (),
        prompt_param="messages",
        guide_param=guide.param,
        has_form=guide.has_form,
    )


def chat_prompt(
    fields: Fields, gateway: Gateway, tools: Sequence[Tool], most: int | None = None
) -> tuple[str, list[int]]:
    """Return the prompt that the chat template makes of a chat, as text and as token ids: ``most``, or any number.

    Raises:
        ApiError: 400, naming the field by its path.
    """
    prompt = _prompt(fields, gateway, tools)
    special = fields.get("add_special_tokens", False)
    [ids] = encode_texts(gateway, [prompt], "messages", add_special_tokens=special, most=most)
    return prompt, ids


def _thinking_is_off(fields: Fields, gateway: Gateway, tools: Sequence[Tool], prompt: str) -> bool:
    """Return whether a prompt is that of ``enable_thinking: false``, and with true would be another one.

    Most templates close the reasoning in the prompt then. One that just does not open it looks like that of a model
    which thinks by itself, but for this variable.
    """
    template = gateway.template_of(fields.values)
    if template is None or not template.uses("enable_thinking"):
        return False
    try:
        off = _prompt(fields, gateway, tools, {"enable_thinking": False})
        return prompt == off and off != _prompt(fields, gateway, tools, {"enable_thinking": True})
    except ApiError:  # the template refuses what the request has not asked for
        return False


def _prompt(fields: Fields, gateway: Gateway, tools: Sequence[Tool], variables: Mapping[str, Any] | None = None) -> str:
    """Return the text of the prompt; ``variables`` take the place of those that the request gives the template."""
    template = gateway.template_of(fields.values)
    if template is None:
        raise unsupported("messages", "messages: this checkpoint has no chat template; use /v1/completions")
    options = {**_template_options(fields, template, gateway, tools), **(variables or {})}
    limit = gateway.deployment.limits.max_prompt_bytes
    for name in ("messages", "tools", "documents", "chat_template_kwargs"):
        if name in fields and (found := size(fields[name], limit)) > limit:
            raise invalid(f"{name} has {found} characters or more; the limit is {limit}", name)
    try:
        messages = check_messages(fields["messages"])
        if fields.get("continue_final_message"):
            return _continued(template, messages, options)
        return template.render(messages, options)
    except InflightError as error:
        raise request_error(error, "messages") from None


def _template_options(
    fields: Fields, template: ChatTemplate, gateway: Gateway, tools: Sequence[Tool]
) -> dict[str, Any]:
    options = _given_options(fields)
    continues = fields.get("continue_final_message", False)
    if continues and fields.get("add_generation_prompt"):
        raise invalid(
            "add_generation_prompt and continue_final_message are both true; a prompt ends in one way",
            "continue_final_message",
        )
    options["add_generation_prompt"] = fields.get("add_generation_prompt", not continues)
    if tools:
        if not gateway.chat_format.has_tools:
            raise unsupported("tools", "tools: this checkpoint's chat format has no calls of tools")
        options["tools"] = [tool.for_template() for tool in tools]
    if "documents" in fields:
        if not template.uses("documents"):
            raise unsupported("documents", "documents: this checkpoint's chat template does not use them")
        options["documents"] = fields["documents"]
    for hint, variables in fields.hints.items():
        for name, value in variables.items():
            if not same(options.setdefault(name, value), value):
                path = f"chat_template_kwargs.{name}"
                raise invalid(f"{path} and {hint} contradict each other; give one of them", path)
    return options


def _given_options(fields: Fields) -> dict[str, Any]:
    """Return the template's variables that the request gives. Raises ApiError: one has a field of its own."""
    options: dict[str, Any] = dict(fields.get("chat_template_kwargs", {}))
    for name in options:
        if name in _OWN_FIELDS:
            path = f"chat_template_kwargs.{name}"
            raise invalid(f"{path} is not an option; use the field {name}", path)
    return options


def _continued(template: ChatTemplate, messages: Sequence[Message], options: Mapping[str, Any]) -> str:
    """Return the prompt up to the end of its last message, so that the output goes on with it.

    The place is found by a mark behind the message's text, since the text itself may stand elsewhere in the prompt too.
    """
    *before, last = messages
    content = last.get("content")
    path = f"messages[{len(before)}]"
    if last.get("role") != "assistant" or not isinstance(content, str) or not content.strip():
        raise invalid(f"{path} must be the assistant's, with content, where continue_final_message is true", path)
    mark = secrets.token_hex(16)
    whole = template.render([*messages], options)
    prompt, *rest = template.render([*before, {**last, "content": content + mark}], options).split(mark)
    if len(rest) == 1 and prompt.rstrip().endswith(content.strip()):
        for end in (prompt, prompt.rstrip()):  # the second is the end where the template strips the text
            if whole.startswith(end):
                return end
    raise invalid(f"{path}.content does not stand once in the prompt as it is, and cannot be continued", path)


def _top_log_probs(fields: Fields) -> int:
    count = fields.get("top_logprobs", 0)
    if count and not fields.get("logprobs"):
        raise invalid("top_logprobs needs logprobs to be true", "top_logprobs")
    return int(count)
