"""Input items of the Responses API to the messages of a chat."""

from __future__ import annotations

from collections.abc import Callable

from inflight.gateway.opaque_reasoning import open_reasoning
from inflight.gateway.partial_json import corrected_object, is_object
from inflight.gateway.reading import JsonValue
from inflight.gateway.responses.tools import custom_arguments, function_name
from inflight.gateway.turns import TurnRules, Turns
from inflight.gateway.values import one_of

_MESSAGE = frozenset({"type", "role", "content", "id", "status", "phase"})
_CALL = frozenset({"type", "id", "call_id", "name", "namespace", "arguments", "status", "caller"})
_CUSTOM_CALL = frozenset({"type", "id", "call_id", "name", "namespace", "input", "status", "caller"})
_OUTPUT = frozenset({"type", "id", "call_id", "output", "status", "name", "caller"})
_REASONING = frozenset({"type", "id", "summary", "content", "encrypted_content", "status"})
_AGENT = frozenset({"type", "id", "author", "recipient", "content", "status"})
_TEXT = frozenset({"type", "text", "annotations", "logprobs", "refusal", "id", "prompt_cache_breakpoint"})
_ROLE = one_of("user", "assistant", "system", "developer")
_PHASE = one_of("commentary", "final_answer")
MOST_CUT = 1 << 18
"""Characters of all arguments of calls that are not whole, which are read one by one: half a second's work at most."""
_NO_STORE = "nothing is stored; send the item itself"


def read_turns(instructions: str | None, source: JsonValue, rules: TurnRules) -> Turns:
    """Return the chat of a request's ``instructions`` and its ``input``, the ``source``, by the template's ``rules``.

    Raises:
        ApiError: naming the item and what is wrong with it.
    """
    turns = Turns(rules)
    if instructions:
        turns.say("system", instructions, "instructions")
    if isinstance(source.value, str):
        turns.say("user", source.text(), source.path)
        return turns
    for item in source.elements():
        _add_item(turns, item)
    if not source.value:
        raise source.error("is empty; it must have at least one item")
    return turns


def _add_item(turns: Turns, item: JsonValue) -> None:
    kind = item.get("type")
    if kind is None:
        name = "message" if "role" in item.object() or "id" not in item.object() else "item_reference"
    else:
        name = kind.text()
    if name == "item_reference":
        raise (kind or item).refusal(_NO_STORE)
    if name not in _READERS:
        raise (kind or item).refusal(f"items of type {', '.join(_READERS)} are served")
    _READERS[name](turns, item)


def _add_message(turns: Turns, item: JsonValue) -> None:
    item.only(_MESSAGE)
    role = item.need("role").read(_ROLE)
    if (phase := item.get("phase")) is not None:
        phase.read(_PHASE)  # no chat template has a place for it
    text = read_text(item.need("content"))
    if role == "assistant":
        turns.answer(text, item.path)
    else:
        turns.say(role, text, item.path)


def _add_agent_message(turns: Turns, item: JsonValue) -> None:
    """Add what another agent says to this one; to the model that is a user's message which names the two."""
    item.only(_AGENT)
    ends = [
        f"{word} {end.text()}" for word, name in (("from", "author"), ("to", "recipient")) if (end := item.get(name))
    ]
    head = f"Message {' '.join(ends)}:\n" if ends else ""
    turns.say("user", head + read_text(item.need("content")), item.path)


def _add_call(turns: Turns, item: JsonValue) -> None:
    item.only(_CALL)
    _check_caller(item)
    arguments = _read_arguments(turns, item.need("arguments"))
    turns.call(item.need("call_id").name(), _called_name(item), arguments, item.path)


def _add_custom_call(turns: Turns, item: JsonValue) -> None:
    item.only(_CUSTOM_CALL)
    _check_caller(item)
    arguments = custom_arguments(item.need("input").text())
    turns.call(item.need("call_id").name(), _called_name(item), arguments, item.path)


def _called_name(item: JsonValue) -> str:
    """Return the name of the function of the chat that a call is of."""
    namespace = item.get("namespace")
    return function_name(item.need("name").name(), namespace.text() if namespace else None)


def _read_arguments(turns: Turns, arguments: JsonValue) -> str:
    """Return the arguments of a call as JSON; of those that a limit has cut, the fields that are complete."""
    text = arguments.text() or "{}"
    if is_object(text):
        return text
    turns.cut_characters += len(text)
    if turns.cut_characters > MOST_CUT:
        raise arguments.error(f"is no JSON of an object; such arguments have {MOST_CUT} characters together at most")
    if (whole := corrected_object(text)) is None:
        raise arguments.error("must be the JSON of an object, or its beginning where the call was cut off")
    return whole


def _check_caller(item: JsonValue) -> None:
    if (caller := item.get("caller")) is not None:
        caller.accept("the client is the only caller", {"type": "direct"})


def _add_output(turns: Turns, item: JsonValue) -> None:
    item.only(_OUTPUT)
    _check_caller(item)
    call_id, text = item.need("call_id"), read_text(item.need("output"))
    if not turns.has_call(call_id.name()):
        raise call_id.error(f"is {call_id.text()[:64]!r}; no call before it has this call_id")
    turns.output(call_id.text(), text, item.path)


def _add_reasoning(turns: Turns, item: JsonValue) -> None:
    """Add the reasoning of an item: its text, or else the opaque form of it, or else its summary."""
    item.only(_REASONING)
    content, sealed, summary = (item.get(name) for name in ("content", "encrypted_content", "summary"))
    text = read_text(content) if content else ""
    if not text and sealed is not None and sealed.text():
        text = open_reasoning(sealed.text()) or ""
        if not text and not (summary and summary.value):
            raise sealed.error("was not made by this server, which cannot read it")
    if not text and summary is not None:
        text = read_text(summary)
    if text:
        turns.think(text, item.path)


def read_text(content: JsonValue) -> str:
    """Return the text of a string or of a list of parts that are text.

    Raises:
        ApiError: naming the part, which is no text.
    """
    if isinstance(content.value, str):
        return content.text()
    return "\n".join(text for part in content.elements() if (text := _part_text(part)))


def _part_text(part: JsonValue) -> str:
    kind = part.need("type")
    match kind.text():
        case "input_text" | "output_text" | "text" | "reasoning_text" | "summary_text":
            part.only(_TEXT)
            return part.need("text").text()
        case "refusal":
            part.only(_TEXT)
            return part.need("refusal").text()
        case "input_image" | "input_file" | "input_audio" | "input_video" | "image" | "computer_screenshot":
            raise kind.refusal("this model takes text alone")
        case other:
            raise kind.error(f"is {other[:64]!r}; parts of type input_text, output_text and refusal are served")


_READERS: dict[str, Callable[[Turns, JsonValue], None]] = {
    "message": _add_message,
    "function_call": _add_call,
    "function_call_output": _add_output,
    "custom_tool_call": _add_custom_call,
    "custom_tool_call_output": _add_output,
    "reasoning": _add_reasoning,
    "agent_message": _add_agent_message,
}
