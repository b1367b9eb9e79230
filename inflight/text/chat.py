"""Chat messages to a prompt, by the checkpoint's own Jinja template, in a sandbox.

Templates are written for the environment of ``transformers.apply_chat_template``; the same filters, globals and
whitespace rules are set up here.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from contextlib import suppress
from datetime import datetime
from functools import cached_property
from typing import Any, NamedTuple

import jinja2
import jinja2.ext
import jinja2.meta
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

from inflight.errors import DeploymentError, InvalidRequest, UnsupportedFeature, nearest
from inflight.text.messages import Message, check_messages
from inflight.text.output.incremental_json import escape_surrogates

_ALWAYS = {"add_generation_prompt", "tools", "documents"}
_RESERVED = {"messages", "bos_token", "eos_token", "pad_token", "unk_token"}


class _GenerationTag(jinja2.ext.Extension):
    """``{% generation %}``: marks the assistant's part for training; here it is only its content."""

    tags = {"generation"}  # noqa: RUF012 (the library's own declaration)

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class ChatTemplate:
    """A compiled chat template."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        """
        Raises:
            DeploymentError: the template is not valid Jinja.
        """
        environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _GenerationTag]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise
        environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
        self._special_tokens = dict(special_tokens)
        try:
            self._template = environment.from_string(source)
            tree = environment.parse(source)
        except jinja2.TemplateSyntaxError as error:
            raise DeploymentError(f"chat template, line {error.lineno}: {error.message}") from None
        read = {name.name for name in tree.find_all(jinja2.nodes.Name) if name.ctx == "load"}
        # A variable with a default, set where the request does not say it, is the request's too.
        given = jinja2.meta.find_undeclared_variables(tree) | {
            test.node.name
            for test in tree.find_all(jinja2.nodes.Test)
            if test.name == "defined" and isinstance(test.node, jinja2.nodes.Name)
        }
        self._variables = frozenset(given)
        self._options = (self._variables | _ALWAYS) - _RESERVED - environment.globals.keys()
        self._unused = {"tools", "documents"} - read
        self._knows_developer = "developer" in source
        self._fields = frozenset(re.findall(r"""[.'"](\w+)""", source))

    def uses(self, option: str) -> bool:
        """Return whether the template's source has a variable of this name."""
        return option in self._variables

    def reads(self, name: str) -> bool:
        """Return whether the source names a field of this name, as ``message.name`` or as ``'name'``."""
        return name in self._fields

    @property
    def uses_tools(self) -> bool:
        """Whether the template shows the model the tools of a request."""
        return "tools" not in self._unused

    def render(self, messages: list[Message], options: Mapping[str, Any] | None = None) -> str:
        """Return the prompt for ``messages``; ``options`` are the template's own variables.

        Raises:
            InvalidRequest: the template refuses the messages or the options, or UTF-8 cannot carry the prompt.
            UnsupportedFeature: there are tools or documents, and the template has no use of them.
        """
        options = options or {}
        for name in options:
            if name in self._unused and options[name]:
                raise UnsupportedFeature(f"{name}: this model's chat template has no use of {name}")
            if name not in self._options:
                near = nearest(name, self._options)
                raise InvalidRequest(f"chat_template_kwargs: {name!r} is not an option of this chat template{near}")
        return self._render(self._as_expected(messages), options)

    @cached_property
    def _dialect(self) -> _Dialect:
        """How the template takes calls: transformers' own form is an object of arguments and a content of None."""
        for dialect in _DIALECTS:
            with suppress(InvalidRequest):
                if _PROBE in self._render([_in_dialect(message, dialect) for message in _PROBES], {}):
                    return dialect
        return _DIALECTS[0]

    def _as_expected(self, messages: list[Message]) -> list[Message]:
        """Return messages in the dialect of this template."""
        if not self._knows_developer:
            messages = [
                {**message, "role": "system"} if message.get("role") == "developer" else message for message in messages
            ]
        if any(message.get("tool_calls") for message in messages):
            messages = [_in_dialect(message, self._dialect) for message in messages]
        return messages

    def _render(self, messages: list[Message], options: Mapping[str, Any]) -> str:
        variables = {"add_generation_prompt": True, "tools": None, "documents": None} | dict(options)
        try:
            prompt = self._template.render(messages=messages, **self._special_tokens, **variables)
            prompt.encode()
        except UnicodeEncodeError:
            raise InvalidRequest(
                "messages has a lone surrogate (half of a \\u escape pair); it is not a character"
            ) from None
        except (jinja2.TemplateError, TypeError, ValueError, ArithmeticError, LookupError, AttributeError) as error:
            reason = " ".join(str(error).split()) or type(error).__name__
            raise InvalidRequest(f"messages: the chat template refuses them: {reason}") from None
        except (RecursionError, MemoryError):
            raise InvalidRequest("messages: too deeply nested or too large for the chat template") from None
        return prompt


class _Dialect(NamedTuple):
    """How a template takes a message with calls."""

    arguments_as_text: bool
    content: str | None
    """Where the message has none."""


_DIALECTS = [_Dialect(False, None), _Dialect(False, ""), _Dialect(True, None), _Dialect(True, "")]
_PROBE = "probe_of_calls"
_PROBES: list[Message] = [
    {"role": "user", "content": "a"},
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": "call00000", "type": "function", "function": {"name": _PROBE, "arguments": {"a": 1}}}],
    },
    {"role": "tool", "content": "b", "tool_call_id": "call00000", "name": _PROBE},
]


def _in_dialect(message: Message, dialect: _Dialect) -> Message:
    if not message.get("tool_calls"):
        return message
    calls = message["tool_calls"]
    if dialect.arguments_as_text:
        calls = [_call_with_text(call) for call in calls]
    content = dialect.content if message["content"] is None else message["content"]
    return {**message, "content": content, "tool_calls": calls}


def _call_with_text(call: dict[str, Any]) -> dict[str, Any]:
    function = call["function"]
    return {**call, "function": {**function, "arguments": _to_json(function["arguments"])}}


def parse_json(name: str, text: str) -> Any:
    """Parse the JSON of the input ``name``. Raises InvalidRequest: naming the input."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(f"{name} is not valid JSON: {error}") from None


def parse_messages(text: str) -> list[Message]:
    """Parse the JSON of ``messages``, and bring them into the form that templates expect.

    Raises:
        InvalidRequest: naming the message and what is wrong with it.
    """
    return check_messages(parse_json("messages", text))


def _to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None, **options: Any) -> str:
    """Plain JSON: Jinja's own ``tojson`` escapes for HTML. What is no character in a call's arguments is escaped."""
    return escape_surrogates(json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options))


def _raise(message: str) -> None:
    raise jinja2.TemplateError(message)
