"""What a chat's answer must be: the choice of tools, the form of the answer, or both, around reasoning that stays free.

The engine holds to a guide from the start of the output, or from certain tokens on. Where the prompt ends inside the
reasoning, those that end it are such tokens. Where it ends before, the model may think or not, and its reasoning
becomes a part of the grammar. Where thinking is off the model does not do so, and the guide leaves no room for it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from inflight.errors import InflightError
from inflight.gateway.context import Gateway
from inflight.gateway.errors import ApiError
from inflight.gateway.fields import Fields, unsupported
from inflight.gateway.guides import FieldGuide, read_guide
from inflight.gateway.request_errors import request_error
from inflight.sampling import Guide
from inflight.text.output.format import ChatFormat
from inflight.text.output.tools import Tool, ToolChoice


class ChatGuide(NamedTuple):
    """A guide, the tokens from which on it holds, the field that asks for it, and whether an answer has a form."""

    guide: Guide | None = None
    start_ids: tuple[int, ...] = ()
    param: str = ""
    has_form: bool = False


def chat_guide(
    fields: Fields,
    gateway: Gateway,
    prompt: str,
    tools: Sequence[Tool],
    choice: ToolChoice,
    thinking_is_off: Callable[[], bool],
) -> ChatGuide:
    """Return what the answer to a prompt must be.

    Args:
        fields: of the request.
        gateway: knows the chat format.
        prompt: as the template makes it.
        tools: those of the request.
        choice: which of them must, may or must not be called.
        thinking_is_off: whether the template makes this prompt for a model that does not think.

    Raises:
        ApiError: 400, naming the field: it asks for what cannot be enforced.
    """
    form, answer = gateway.chat_format, read_guide(fields, gateway.deployment.most_guide_bytes)
    if answer is None and not tools:
        return ChatGuide()
    if answer is not None and tools and choice.kind in ("required", "named"):
        _check_beside_calls(answer, choice)
        answer = None
    param = "tools" if answer is None else answer.param
    try:
        if answer is not None and not form.takes(answer.guide, beside_calls=bool(tools)):
            raise _refused(answer.param, bool(tools))
        guide = form.guide(
            tools,
            choice if tools else ToolChoice.none(),
            fields.get("parallel_tool_calls", True),
            answer=None if answer is None else answer.guide,
            reasoning=form.may_reason(prompt) and not thinking_is_off(),
            max_bytes=gateway.deployment.most_guide_bytes,
        )
    except InflightError as error:
        raise request_error(error, "tools", param) from None
    if guide is None:
        return ChatGuide()
    start = form.guide_start(gateway.tokenizer) if form.opens_reasoning(prompt) else ()
    return ChatGuide(guide, start, param, has_form=answer is not None)


def can_enforce(form: ChatFormat, max_bytes: int, parameters: dict[str, Any]) -> bool:
    """Return whether a chat format can hold the arguments of a call to a schema, in a guide of ``max_bytes``."""
    tool = Tool("f", "", parameters, True, "tools")
    try:
        guide = form.guide((tool,), ToolChoice.named(tool.name), False, max_bytes=max_bytes)
    except InflightError:
        return False
    return guide is not None and len(guide.text.encode()) <= max_bytes


def _check_beside_calls(answer: FieldGuide, choice: ToolChoice) -> None:
    """Raise ApiError for a guide of the whole answer where calls must come.

    ``response_format`` is the form of the answer's text. Where calls must come there is none, so it holds, as with
    OpenAI, whose agents keep it in each of their requests.
    """
    if not answer.param.startswith("response_format"):
        raise unsupported(
            answer.param,
            f"{answer.param} says what the whole answer is, and tool_choice ({choice.kind}) that it is a call of a "
            "tool; give one of them",
        )


def _refused(param: str, beside_calls: bool) -> ApiError:
    if beside_calls:
        advice = "beside tools with tool_choice auto; set tool_choice to none or required"
    else:
        advice = "with this model, whose answers stand behind a header; a JSON schema or a choice is"
    return unsupported(param, f"{param} is not supported {advice}")
