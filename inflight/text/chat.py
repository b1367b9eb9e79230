"""Chat messages to a prompt, by the checkpoint's own Jinja template, in a sandbox.

Templates are written for the environment of ``transformers.apply_chat_template``; the same filters, globals and
whitespace rules are set up here.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from datetime import datetime
from functools import cached_property
from typing import Any, Literal, NamedTuple

import jinja2
import jinja2.ext
import jinja2.meta
import jinja2.nodes
import jinja2.parser

from inflight.errors import DeploymentError, InvalidRequest, UnsupportedFeature, nearest
from inflight.text.bounded_templates import BoundedEnvironment, to_json
from inflight.text.checkpoint import TextConfig
from inflight.text.generic_tools import EXAMPLE, with_generic_tools, with_introduced_tools
from inflight.text.messages import Message, check_messages
from inflight.text.template_budget import budget

_LONGEST_FORMAT = 256
_LONGEST_TEMPLATE = 128 << 10
"""Bytes of a template, which compile in seconds; of those that are published none has half as many."""
_LONGEST_REASON = 500
"""Characters of what a template says about messages that it refuses."""
_REFUSALS = (
    jinja2.TemplateError, TypeError, ValueError, ArithmeticError, LookupError, AttributeError, NameError, RuntimeError,
)  # fmt: skip
"""Errors that a template, or what it calls, may raise."""
_ALWAYS = {"add_generation_prompt", "tools", "documents"}
_ROLES = ("system", "developer", "user", "assistant", "tool")
_RESERVED = {"messages", "bos_token", "eos_token", "pad_token", "unk_token"}


class _GenerationTag(jinja2.ext.Extension):
    """``{% generation %}``: marks the assistant's part for training; here it is only its content."""

    tags = {"generation"}  # noqa: RUF012 (the library's own declaration)

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class ChatTemplate:
    """A compiled chat template."""

    def __init__(self, source: str, special_tokens: Mapping[str, str], tool_use: str | None = None) -> None:
        """
        Args:
            source: the template.
            special_tokens: the texts that it refers to, by name.
            tool_use: the template for chats with tools; None: this one.

        Raises:
            DeploymentError: a template is not valid Jinja, or too long.
        """
        if (size := len(source.encode(errors="replace"))) > _LONGEST_TEMPLATE:
            raise DeploymentError(f"chat template: it has {size} bytes; the most is {_LONGEST_TEMPLATE}")
        self._with_tools = None if tool_use in (None, source) else ChatTemplate(tool_use, special_tokens)
        environment = BoundedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _GenerationTag]
        )
        environment.globals["raise_exception"] = _raise
        environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form[:_LONGEST_FORMAT])
        self._special_tokens = dict(special_tokens)
        try:
            with budget():  # of the constants that the compiler computes
                self._template = environment.from_string(source)
            tree = environment.parse(source)
        except jinja2.TemplateSyntaxError as error:
            raise DeploymentError(f"chat template, line {error.lineno}: {error.message}") from None
        except (RecursionError, MemoryError, SyntaxError):  # of the parser, or of Python's compiler
            raise DeploymentError("chat template: it is nested too deep") from None
        except ValueError as error:  # of a number with thousands of digits
            raise DeploymentError(f"chat template: it cannot be compiled: {error}") from None
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

    def chosen(self, messages: Iterable[Any], tools: Any) -> ChatTemplate:
        """Return the template that shows a chat: that for tools, where there are some, or calls of them."""
        return self._with_tools if self._with_tools is not None and (tools or _has_calls(messages)) else self

    def uses(self, option: str) -> bool:
        """Return whether the template's source has a variable of this name; that for tools may have others."""
        return option in self._variables

    def reads(self, name: str) -> bool:
        """Return whether the source names a field of this name, as ``message.name`` or as ``'name'``."""
        return name in self._fields or (self._with_tools is not None and self._with_tools.reads(name))

    @property
    def knows_no_tools(self) -> bool:
        """Whether the template shows neither tools nor calls, so that both are told in other words."""
        return self._with_tools is None and "tools" in self._unused and "tool_calls" not in self._fields

    def render(self, messages: list[Message], options: Mapping[str, Any] | None = None) -> str:
        """Return the prompt for ``messages``; ``options`` are the template's own variables.

        Raises:
            InvalidRequest: the template refuses the messages or the options, or UTF-8 cannot carry the prompt.
            UnsupportedFeature: there are documents, and the template has no use of them; or tools, and its notation of
                calls is not known.
        """
        options = dict(options or {})
        self._check_roles(messages)
        if (chosen := self.chosen(messages, options.get("tools"))) is not self:
            return chosen.render(messages, options)
        if self.knows_no_tools:
            tools = options.pop("tools", None) or ()
            if tools or _has_calls(messages):
                messages = self._generic(messages, tools)
        elif "tools" in self._unused and options.get("tools") and self._notation:
            messages = self._told(with_introduced_tools, messages, options.pop("tools"), self._notation)
        for name in options:
            if name in self._unused and options[name]:
                raise UnsupportedFeature(f"{name}: this model's chat template has no use of {name}")
            if name not in self._options:
                near = nearest(name, self._options)
                raise InvalidRequest(f"chat_template_kwargs: {name!r} is not an option of this chat template{near}")
        return self._render(self._as_expected(messages), options)

    @cached_property
    def takes_late_system(self) -> bool:
        """Whether the template shows a message of the system that does not lead the conversation."""
        return self._takes("user", "system", "user") and self._takes("user", "system", "assistant", "user")

    @cached_property
    def takes_users_in_a_row(self) -> bool:
        """Whether the template shows two messages of the user one after the other."""
        return self._takes("user", "user")

    def _takes(self, *roles: str) -> bool:
        """Return whether the template shows the text of each message of a conversation with these roles."""
        messages: list[Message] = [{"role": role, "content": f"probe{index}"} for index, role in enumerate(roles)]
        try:
            prompt = self._render(self._as_expected(messages), {})
        except InvalidRequest:
            return False
        return all(message["content"] in prompt for message in messages)

    def _check_roles(self, messages: list[Message]) -> None:
        """Refuse a role that the source does not name: most templates leave such a message out without a word."""
        for index, message in enumerate(messages):
            role = message["role"]
            if role not in _ROLES and not self.reads(role):
                near = nearest(role, _ROLES)
                raise InvalidRequest(
                    f"messages[{index}].role is {role!r}; it must be one of {', '.join(_ROLES)}, or another that this "
                    f"model's chat template names{near}"
                )

    @cached_property
    def _dialect(self) -> _Dialect:
        """How the template takes calls: transformers' own form is an object of arguments and a content of None."""
        fitting = (one for one in _DIALECTS if self._shows(_probes(None), one, _CALLED))
        dialect, both = next(fitting, _DIALECTS[0]), _probes(_SAID)
        if self._shows(both, dialect, _CALLED, _SAID):
            return dialect
        if self._shows(both, apart := dialect._replace(beside_text="apart"), _CALLED, _SAID):
            return apart
        return dialect if self._shows(both, dialect, _CALLED) else dialect._replace(beside_text="lost")

    def _shows(self, messages: list[Message], dialect: _Dialect, *texts: str) -> bool:
        """Return whether a prompt for messages in a dialect has all of these texts."""
        with suppress(InvalidRequest):
            prompt = self._render(_in_dialect(messages, dialect), {})
            return all(text in prompt for text in texts)
        return False

    def _as_expected(self, messages: list[Message]) -> list[Message]:
        """Return messages in the dialect of this template."""
        if not self._knows_developer:
            messages = [
                {**message, "role": "system"} if message.get("role") == "developer" else message for message in messages
            ]
        calling = [message for message in messages if message.get("tool_calls")]
        if self._dialect_loses(calling):
            return self._generic(messages, ())
        return _in_dialect(messages, self._dialect) if calling else messages

    @cached_property
    def _notation(self) -> str | None:
        """How the template shows the call ``EXAMPLE``, alone in the assistant's message; None: not with JSON."""
        chats: list[list[Message]] = [[_USER, {"role": "assistant", "content": _SAID}], [_USER, _calling(EXAMPLE)]]
        with suppress(InvalidRequest):
            said, called = (self._render(self._as_expected(chat), _ENDS) for chat in chats)
            before, _, behind = said.partition(_SAID)
            if called.startswith(before) and EXAMPLE["name"] in called and to_json(EXAMPLE["arguments"]) in called:
                return called.removeprefix(before).removesuffix(behind)
        return None

    def _generic(self, messages: list[Message], tools: Any) -> list[Message]:
        return self._told(with_generic_tools, messages, tools)

    def _told(self, tell: Callable[..., list[Message]], messages: list[Message], *what: Any) -> list[Message]:
        """Return messages in which tools are told in other words."""
        try:
            return tell(messages, *what, self._takes("system", "user"))
        except RecursionError:
            raise InvalidRequest("tools: nested too deep") from None

    def _dialect_loses(self, calling: list[Message]) -> bool:
        """Return whether the template would drop the calls of a message: of one that also has text."""
        return any(message["content"] for message in calling) and self._dialect.beside_text == "lost"

    def _render(self, messages: list[Message], options: Mapping[str, Any]) -> str:
        variables = {"add_generation_prompt": True, "tools": None, "documents": None} | dict(options)
        try:
            with budget():
                prompt = self._template.render(messages=messages, **self._special_tokens, **variables)
            prompt.encode()
        except UnicodeEncodeError:
            raise InvalidRequest(
                "messages has a lone surrogate (half of a \\u escape pair); it is not a character"
            ) from None
        except (RecursionError, MemoryError):
            raise InvalidRequest("messages: too deeply nested or too large for the chat template") from None
        except _REFUSALS as error:
            reason = " ".join(str(error)[:_LONGEST_REASON].split()) or type(error).__name__
            raise InvalidRequest(f"messages: the chat template refuses them: {reason}") from None
        return prompt


def _has_calls(messages: Iterable[Any]) -> bool:
    """Return whether a chat, checked or not, has calls of tools or what came of them."""
    return any(isinstance(one, dict) and (one.get("role") == "tool" or one.get("tool_calls")) for one in messages)


def chat_template_of(config: TextConfig) -> ChatTemplate | None:
    """Return the chat template of a checkpoint; None: it is a base model's. Raises DeploymentError."""
    if config.chat_template is None:
        return None
    return ChatTemplate(config.chat_template, config.special_tokens, config.tool_template)


class _Dialect(NamedTuple):
    """How a template takes a message with calls."""

    arguments_as_text: bool
    content: str | None
    """Where the message has none."""
    beside_text: Literal["together", "apart", "lost"] = "together"
    """How a message with text and calls is shown: as it is; as two messages, where the template drops one of the two;
    or as text, where it drops the calls even so. A template that drops the text alone is taken as it is."""


_DIALECTS = [_Dialect(False, None), _Dialect(False, ""), _Dialect(True, None), _Dialect(True, "")]
_CALLED, _SAID = "probe_of_calls", "probe of text"
_USER: Message = {"role": "user", "content": "a"}
_ENDS = {"add_generation_prompt": False}


def _calling(function: dict[str, Any], content: str | None = None) -> Message:
    call = {"id": "call00000", "type": "function", "function": function}
    return {"role": "assistant", "content": content, "tool_calls": [call]}


def _probes(content: str | None) -> list[Message]:
    calling = _calling({"name": _CALLED, "arguments": {"a": 1}}, content)
    return [_USER, calling, {"role": "tool", "content": "b", "tool_call_id": "call00000", "name": _CALLED}]


def _in_dialect(messages: list[Message], dialect: _Dialect) -> list[Message]:
    made = list[Message]()
    for message in messages:
        if not (calls := message.get("tool_calls")):
            made.append(message)
            continue
        said = message["content"] or None  # "" is no text: some templates take any string for one, and drop the calls
        if said is not None and dialect.beside_text == "apart":
            made.append({name: value for name, value in message.items() if name != "tool_calls"})
            said = None
        if dialect.arguments_as_text:
            calls = [_call_with_text(call) for call in calls]
        made.append({**message, "content": dialect.content if said is None else said, "tool_calls": calls})
    return made


def _call_with_text(call: dict[str, Any]) -> dict[str, Any]:
    function = call["function"]
    return {**call, "function": {**function, "arguments": to_json(function["arguments"])}}


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


def _raise(message: str) -> None:
    raise jinja2.TemplateError(message)
