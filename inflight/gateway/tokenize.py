"""``/tokenize``, ``/detokenize`` and ``/tokenizer_info``, with the fields of vLLM's."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from inflight.errors import InvalidRequest
from inflight.gateway.body import read_object
from inflight.gateway.context import Gateway, gateway_of
from inflight.gateway.errors import field_of, from_inflight, invalid
from inflight.text.chat import parse_messages

_LONG = 16 << 10
"""Characters from which on text is encoded in another thread, so that other requests go on."""
_TEXT: dict[str, type] = {"model": str, "prompt": str, "add_special_tokens": bool, "return_token_strs": bool}
_CHAT: dict[str, type] = {
    "model": str,
    "messages": list,
    "add_generation_prompt": bool,
    "add_special_tokens": bool,
    "return_token_strs": bool,
    "chat_template_kwargs": dict,
}
_TOKENS: dict[str, type] = {"model": str, "tokens": list}
_NAMES = {str: "a string", bool: "a boolean", list: "an array", dict: "an object"}


async def tokenize(request: Request) -> Response:
    """Answer with the token ids of ``prompt``, or of the prompt that the chat template makes of ``messages``."""
    gateway, body = gateway_of(request), await read_object(request)
    if "messages" in body and "prompt" in body:
        raise invalid("prompt and messages are both given; a request has one of them", "messages")
    fields, ignored = _take(gateway, body, _CHAT if "messages" in body else _TEXT)
    if "messages" in fields:
        text, special = _render(gateway, fields), fields.get("add_special_tokens", False)
    elif "prompt" in fields:
        text, special = fields["prompt"], fields.get("add_special_tokens", True)
    else:
        raise invalid("prompt is missing; a request needs prompt or messages", "prompt")
    tokens = await _encode(gateway, text, special)
    answer: dict[str, Any] = {"count": len(tokens), "max_model_len": gateway.max_model_len, "tokens": tokens}
    answer["token_strs"] = gateway.tokenizer.pieces(tokens) if fields.get("return_token_strs") else None
    return JSONResponse(answer, headers=ignored)


async def detokenize(request: Request) -> Response:
    """Answer with the text of ``tokens``, special tokens included."""
    gateway, body = gateway_of(request), await read_object(request)
    fields, ignored = _take(gateway, body, _TOKENS)
    if "tokens" not in fields:
        raise invalid("tokens is missing", "tokens")
    vocabulary = gateway.tokenizer.config.vocab_size
    for index, token in enumerate(fields["tokens"]):
        if type(token) is not int or not 0 <= token < vocabulary:
            shown = json.dumps(token)[:100]
            raise invalid(f"tokens[{index}] is {shown}; it must be from 0 to {vocabulary - 1}", f"tokens[{index}]")
    text = gateway.tokenizer.decode(fields["tokens"], skip_special_tokens=False)
    return JSONResponse({"prompt": text}, headers=ignored)


async def tokenizer_info(request: Request) -> Response:
    """Answer with what clients need to know of the tokenizer: its special tokens and the chat template."""
    gateway = gateway_of(request)
    config = gateway.tokenizer.config
    special = {name: config.special_tokens.get(name) for name in ("bos_token", "eos_token", "pad_token", "unk_token")}
    answer = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        **special,
        "chat_template": config.chat_template,
        "vocab_size": config.vocab_size,
        "model_max_length": gateway.max_model_len,
    }
    return JSONResponse(answer)


def _take(
    gateway: Gateway, body: Mapping[str, Any], known: Mapping[str, type]
) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the fields of a body that are given, and the header that names those that are not known.

    Raises:
        ApiError: a field has the wrong type, or is not known where ``gateway.strict_fields`` is set; or there is no
            such model.
    """
    fields = {name: value for name, value in body.items() if name in known and value is not None}
    for name, value in fields.items():
        if type(value) is not known[name]:
            raise invalid(f"{name} is {json.dumps(value)[:100]}; it must be {_NAMES[known[name]]}", name)
    if "model" in fields:
        gateway.check_model(fields["model"])
    unknown = sorted(set(body) - set(known))
    if unknown and gateway.settings.strict_fields:
        raise invalid(f"{unknown[0][:100]} is not a field of this request", unknown[0], "unknown_parameter")
    gateway.metrics.ignored_fields(unknown)
    shown = ", ".join(name for name in unknown if name.isascii() and name.isprintable())[:1000]
    return fields, {"x-ignored-fields": shown} if unknown else {}


def _render(gateway: Gateway, fields: Mapping[str, Any]) -> str:
    if gateway.chat_template is None:
        raise invalid("messages: this model has no chat template; send prompt", "messages", "unsupported_parameter")
    options = dict(fields.get("chat_template_kwargs", {}))
    options["add_generation_prompt"] = fields.get("add_generation_prompt", True)
    try:
        return gateway.chat_template.render(parse_messages(json.dumps(fields["messages"])), options)
    except InvalidRequest as error:
        raise from_inflight(error, field_of(str(error)) or "messages") from None


async def _encode(gateway: Gateway, text: str, special: bool) -> list[int]:
    def encode() -> list[int]:
        return gateway.tokenizer.encode_batch([text], add_special_tokens=special)[0]

    try:
        return encode() if len(text) < _LONG else await asyncio.to_thread(encode)
    except Exception as error:  # the library raises bare Exception
        raise invalid(f"the text cannot be encoded by this model's tokenizer: {error}") from None
