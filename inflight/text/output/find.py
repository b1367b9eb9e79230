"""Which chat format a checkpoint has."""

from __future__ import annotations

from collections.abc import Callable

from inflight.errors import DeploymentError, nearest
from inflight.text.chat import chat_template_of
from inflight.text.output.families import (
    DeepSeekFormat,
    GenericFormat,
    HermesFormat,
    LlamaFormat,
    MistralFormat,
    ThinkFormat,
    XmlFormat,
)
from inflight.text.output.format import ChatFormat
from inflight.text.output.gemma import Gemma3Format, Gemma4Format
from inflight.text.output.harmony import HarmonyFormat
from inflight.text.output.response_template import TemplateFormat
from inflight.text.tokenizer import Tokenizer

_SIGNS: list[tuple[str, Callable[[Tokenizer], ChatFormat]]] = [
    ("<|channel|>", HarmonyFormat),
    ("<|tool_call>", Gemma4Format),
    ("[TOOL_CALLS]", MistralFormat),
    ("<｜tool▁calls▁begin｜>", DeepSeekFormat),
    ("<function=", XmlFormat),
    ("<tool_call>", HermesFormat),
    ("```tool_code", Gemma3Format),
    ("<|python_tag|>", LlamaFormat),
    ('"parameters": dictionary', LlamaFormat),
    ("<|python_start|>", LlamaFormat),
]
"""What a chat template has in it, and the format that this means: the first that fits."""
FORMATS: dict[str, Callable[[Tokenizer], ChatFormat]] = {
    "none": ChatFormat,
    "generic": GenericFormat,
    "think": ThinkFormat,
    "hermes": HermesFormat,
    "qwen_xml": XmlFormat,
    "llama": LlamaFormat,
    "mistral": MistralFormat,
    "deepseek": DeepSeekFormat,
    "gemma3": Gemma3Format,
    "gemma4": Gemma4Format,
    "harmony": HarmonyFormat,
}
"""The formats by the names that a deployment may give."""


def find_chat_format(tokenizer: Tokenizer, override: str | None = None) -> ChatFormat:
    """Return the chat format of a checkpoint, or the one that ``override`` names; ``auto`` is as good as None.

    The checkpoint's own ``response_template`` comes first, then what its chat template has in it.

    Raises:
        DeploymentError: there is no format of that name, or the ``response_template`` is not what it should be.
    """
    if override not in (None, "auto"):
        make = FORMATS.get(str(override))
        if make is None:
            known = ", ".join(["auto", *FORMATS])
            raise DeploymentError(
                f"tool_parser is {override!r}; it must be one of {known}{nearest(str(override), FORMATS)}"
            )
        return make(tokenizer)
    found = _by_template(tokenizer)
    if tokenizer.config.response_template is not None:
        return TemplateFormat(tokenizer, tokenizer.config.response_template, found)
    return found


def _by_template(tokenizer: Tokenizer) -> ChatFormat:
    template = tokenizer.config.templates
    for sign, make in _SIGNS:
        if sign in template:
            return make(tokenizer)
    chat = chat_template_of(tokenizer.config)
    if chat is not None and chat.knows_no_tools:
        return GenericFormat(tokenizer)
    thinks = "</think>" in template or (template and tokenizer.token_id("</think>") is not None)
    return ThinkFormat(tokenizer) if thinks else ChatFormat(tokenizer)
