"""What a chat's answer must be: the choice of tools, the form of the answer, or both, around reasoning that stays free.

The engine holds to a guide from the start of the output, or from certain tokens on. Where the prompt ends inside the
reasoning, those that end it are such tokens. Where it ends before, the model may think or not, and its reasoning
becomes a part of the grammar.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import NamedTuple

from inflight.errors import InflightError
from inflight.gateway.context import Gateway
from inflight.gateway.errors import ApiError
from inflight.gateway.fields import Fields, unsupported
from inflight.gateway.guides import FieldGuide, read_guide
from inflight.gateway.request_errors import request_error
from inflight.sampling import Guide
from inflight.text.output.format import ChatFormat
from inflight.text.output.harmony import HarmonyFormat
from inflight.text.output.sections import SectionFormat
from inflight.text.output.tools import Tool, ToolChoice

_START = "start:"


class ChatGuide(NamedTuple):
    """A guide, the tokens from which on it holds, and the field that asks for it."""

    guide: Guide | None = None
    start_ids: tuple[int, ...] = ()
    param: str = ""


def chat_guide(fields: Fields, gateway: Gateway, prompt: str, tools: Sequence[Tool], choice: ToolChoice) -> ChatGuide:
    """Return what the answer to a prompt must be.

    Raises:
        ApiError: 400, naming the field: it asks for what cannot be enforced.
    """
    form, answer = gateway.chat_format, read_guide(fields)
    if answer is not None and tools and choice.kind in ("required", "named"):
        _check_beside_calls(answer, choice)
        answer = None
    calls = _calls(form, tools, choice, fields.get("parallel_tool_calls", True)) if tools else None
    if answer is not None and tools:
        both = _either(form, answer, tools, fields.get("parallel_tool_calls", True))
        return _from_start(form, gateway, prompt, both, answer.param)
    if answer is not None:
        if _sections(form) is None:
            return ChatGuide(answer.guide, form.answer_start(gateway.tokenizer), answer.param)
        return _from_start(form, gateway, prompt, answer.guide, answer.param)
    return ChatGuide() if calls is None else _from_start(form, gateway, prompt, calls, "tools")


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


def _calls(form: ChatFormat, tools: Sequence[Tool], choice: ToolChoice, parallel: bool) -> Guide | None:
    try:
        return form.guide(tools, choice, parallel)
    except InflightError as error:
        raise request_error(error, "tools") from None


def _either(form: ChatFormat, answer: FieldGuide, tools: Sequence[Tool], parallel: bool) -> Guide:
    """Return the guide of calls or an answer of a form: both by schema, whatever the tools' ``strict`` says."""
    calls, item = _calls(form, tools, ToolChoice.required(), parallel), _item(answer.guide)
    if calls is None or item is None or not _embeds(form, calls):
        raise _not_beside(answer.param)
    return Guide("lark_grammar", f"start: answer | called\nanswer: {item}\n{_renamed(calls, 'called:')}")


def _from_start(form: ChatFormat, gateway: Gateway, prompt: str, guide: Guide, param: str) -> ChatGuide:
    """Return a guide that leaves the reasoning free, where the model may think before the answer."""
    sections = _sections(form)
    if sections is None or not form.has_reasoning or form.opens_reasoning(prompt):
        return ChatGuide(guide, form.guide_start(gateway.tokenizer), param)
    item = _item(guide)
    if prompt.rstrip().endswith(sections.thinking[1].rstrip()) or (item is None and not _embeds(form, guide)):
        return ChatGuide(guide, (), param)  # the prompt has closed the reasoning, or it cannot be put before the guide
    rest = f"after: {item}\n" if item else _renamed(guide, "after:")
    return ChatGuide(Guide("lark_grammar", f"start: thought? after\n{_thought(sections)}{rest}"), (), param)


def _sections(form: ChatFormat) -> SectionFormat | None:
    """Return a format whose reasoning and calls are parts of one text; None: it has messages of its own, or neither."""
    return form if isinstance(form, SectionFormat) and not isinstance(form, HarmonyFormat) else None


def _thought(form: SectionFormat) -> str:
    """Return the rules of a part of reasoning and the white space behind it."""
    opening, closing = (form.word(one) for one in form.thinking)
    if closing.startswith("<"):
        return f"thought: {opening} THOUGHT {closing} THOUGHTSPACE?\nTHOUGHT: /(?s:.*)/\nTHOUGHTSPACE: /\\s{{1,4}}/\n"
    return (
        f"thought: {opening} thinking THOUGHTSPACE?\nthinking[lazy]: THOUGHT {closing}\n"
        "THOUGHT: /(?s:.*)/\nTHOUGHTSPACE: /\\s{1,4}/\n"
    )


def _item(guide: Guide) -> str | None:
    """Return a guide as an item of Lark; None for kinds that are none."""
    match guide.kind:
        case "json_schema":
            return f"%json {guide.text}"
        case "choice":
            return " | ".join(json.dumps(text, ensure_ascii=False) for text in json.loads(guide.text))
    return None


def _embeds(form: ChatFormat, guide: Guide) -> bool:
    """Return whether a guide is a grammar whose first rule can be given another name."""
    return _sections(form) is not None and guide.kind == "lark_grammar" and guide.text.startswith(_START)


def _renamed(guide: Guide, name: str) -> str:
    return guide.text.replace(_START, name, 1)


def _not_beside(param: str) -> ApiError:
    return unsupported(
        param, f"{param} is not supported beside tools with tool_choice auto; set tool_choice to none or required"
    )
