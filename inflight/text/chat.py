"""Chat messages to a prompt, by the checkpoint's own Jinja template, in a sandbox.

Templates are written for the environment of ``transformers.apply_chat_template``; the same filters, globals and
whitespace rules are set up here.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import datetime
from typing import Any

import jinja2
import jinja2.ext
import jinja2.meta
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

from inflight.errors import DeploymentError, InvalidRequest, nearest

Message = dict[str, Any]
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
            self._variables = frozenset(jinja2.meta.find_undeclared_variables(environment.parse(source)))
        except jinja2.TemplateSyntaxError as error:
            raise DeploymentError(f"chat template, line {error.lineno}: {error.message}") from None
        self._options = (self._variables | _ALWAYS) - _RESERVED - environment.globals.keys()

    def uses(self, option: str) -> bool:
        """Return whether the template's source has a variable of this name."""
        return option in self._variables

    def render(self, messages: list[Message], options: Mapping[str, Any] | None = None) -> str:
        """Return the prompt for ``messages``; ``options`` are the template's own variables.

        Raises:
            InvalidRequest: the template refuses the messages or the options, or UTF-8 cannot carry the prompt.
        """
        options = options or {}
        for name in options:
            if name not in self._options:
                near = nearest(name, self._options)
                raise InvalidRequest(f"chat_template_kwargs: {name!r} is not an option of this chat template{near}")
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


def parse_json(name: str, text: str) -> Any:
    """Parse the JSON of the input ``name``. Raises InvalidRequest: naming the input."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(f"{name} is not valid JSON: {error}") from None


def parse_messages(text: str) -> list[Message]:
    """Parse the JSON of ``messages``: a list of objects with ``role`` and ``content``.

    Raises:
        InvalidRequest: naming the message and what is wrong with it.
    """
    messages = parse_json("messages", text)
    if not isinstance(messages, list) or not messages:
        raise InvalidRequest("messages must be a JSON list with at least one message")
    for index, message in enumerate(messages):
        name = f"messages[{index}]"
        if not isinstance(message, dict):
            raise InvalidRequest(f"{name} is {type(message).__name__}; it must be an object with role and content")
        role, content = message.get("role"), message.get("content")
        if not isinstance(role, str) or not role:
            raise InvalidRequest(f"{name}.role is {role!r}; it must be a name such as 'user'")
        if isinstance(content, list):
            if not content or not all(_is_text(part) for part in content):
                raise InvalidRequest(
                    f"{name}.content has a part that is not text; only parts of type 'text' are served"
                )
            message["content"] = "\n".join(part["text"] for part in content)  # most templates know no parts
        elif not isinstance(content, str) and not (content is None and message.get("tool_calls")):
            raise InvalidRequest(f"{name}.content is {json.dumps(content)}; it must be a string")
    return messages


def _is_text(part: Any) -> bool:
    return isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str)


def _to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None, **options: Any) -> str:
    """Plain JSON: Jinja's own ``tojson`` escapes for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)


def _raise(message: str) -> None:
    raise jinja2.TemplateError(message)
