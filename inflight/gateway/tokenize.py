"""``/tokenize``, ``/detokenize`` and ``/tokenizer_info``, with the fields of vLLM's."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from inflight.gateway.chat_request import chat_prompt
from inflight.gateway.chat_shapes import MESSAGE, TOOL
from inflight.gateway.context import Gateway, gateway_of
from inflight.gateway.errors import invalid
from inflight.gateway.fields import Fields, Reader, refused, served, table
from inflight.gateway.preparing import prepared
from inflight.gateway.sampling import encode_texts
from inflight.gateway.tools import read_tools, tools_left_out
from inflight.gateway.values import anything, boolean, mapping, string, wrong
from inflight.gateway.workers import written

_MODEL = served("model", string(empty=False), "one of the names that `/v1/models` lists; without it the first")
_SHARED = (
    _MODEL,
    served("return_token_strs", boolean(), "return the tokens as the vocabulary spells them, too"),
    *refused("mm_processor_kwargs media_io_kwargs", "the models served take text", {}),
)
TOKENIZE_TEXT = Reader(
    table(
        *_SHARED,
        served("prompt", string(), "the text"),
        served("add_special_tokens", boolean(), "true without it: add what the checkpoint puts around a text"),
        *refused("tools chat_template_kwargs", "they need `messages`", [], {}),
    ),
    required=("prompt",),
)
TOKENIZE_CHAT = Reader(
    table(
        *_SHARED,
        served("messages", anything(), "a chat, of which the chat template makes the text", MESSAGE),
        served("tools", anything(), "functions that the model may call", TOOL),
        served("add_generation_prompt", boolean(), "false: the text does not begin the assistant's message"),
        served("continue_final_message", boolean(), "the text ends within the last message, the assistant's"),
        served("add_special_tokens", boolean(), "false without it: a chat template has them"),
        served("chat_template_kwargs", mapping(), "variables of the chat template"),
        *refused("chat_template", "the checkpoint's own template is used", ""),
        *refused("prompt", "a request has prompt or messages", ""),
    ),
    required=("messages",),
)
DETOKENIZE = Reader(table(_MODEL, served("tokens", anything(), "a list of token ids")), required=("tokens",))
_SPECIAL = ("bos_token", "eos_token", "pad_token", "unk_token")


async def tokenize(request: Request) -> Response:
    """Answer with the token ids of ``prompt``, or of the prompt that the chat template makes of ``messages``."""
    gateway = gateway_of(request)
    fields, response = await prepared(request, _tokenized)
    gateway.metrics.ignored_fields(fields.ignored)
    return response


def _tokenized(_: Request, gateway: Gateway, body: dict[str, Any]) -> tuple[Fields, Response]:
    if body.get("messages") is not None:
        fields = gateway.read(TOKENIZE_CHAT, body)
        fields = fields.naming(tools_left_out(fields), strict=gateway.settings.strict_fields)
        tokens = chat_prompt(fields, gateway, read_tools(fields)[0])[1]
    else:
        fields = gateway.read(TOKENIZE_TEXT, body)
        special = fields.get("add_special_tokens", True)
        [tokens] = encode_texts(gateway, [fields["prompt"]], "prompt", add_special_tokens=special, most=None)
    content = {
        "count": len(tokens),
        "max_model_len": gateway.max_model_len,
        "tokens": tokens,
        "token_strs": gateway.tokenizer.pieces(tokens) if fields.get("return_token_strs") else None,
    }
    return fields, _response(fields, content)


async def detokenize(request: Request) -> Response:
    """Answer with the text of ``tokens``, special tokens included."""
    gateway = gateway_of(request)
    fields, response = await prepared(request, _detokenized)
    gateway.metrics.ignored_fields(fields.ignored)
    return response


def _detokenized(_: Request, gateway: Gateway, body: dict[str, Any]) -> tuple[Fields, Response]:
    fields, text = _text(gateway, body)
    return fields, _response(fields, {"prompt": text})


def _response(fields: Fields, content: dict[str, Any]) -> Response:
    return Response(written(content), media_type="application/json", headers=fields.headers())


def _text(gateway: Gateway, body: dict[str, Any]) -> tuple[Fields, str]:
    """Return the fields of a body, and the text of its tokens."""
    fields = gateway.read(DETOKENIZE, body)
    tokens, vocabulary = fields["tokens"], gateway.tokenizer.config.vocab_size
    if not isinstance(tokens, list):
        raise wrong("tokens", tokens, "a list of token ids")
    if len(tokens) > gateway.deployment.limits.max_prompt_bytes:
        limit = gateway.deployment.limits.max_prompt_bytes
        raise invalid(f"tokens has {len(tokens)} token ids; the limit is {limit}", "tokens")
    for index, token in enumerate(tokens):
        if type(token) is not int or not 0 <= token < vocabulary:
            raise wrong(f"tokens[{index}]", token, f"a token id from 0 to {vocabulary - 1}")
    return fields, gateway.tokenizer.decode(tokens, skip_special_tokens=False)


async def tokenizer_info(request: Request) -> Response:
    """Answer with what clients need to know of the tokenizer: its special tokens and the chat template."""
    gateway = gateway_of(request)
    config = gateway.tokenizer.config
    answer: dict[str, Any] = {name: config.special_tokens.get(name) for name in _SPECIAL}
    answer |= {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "chat_template": config.chat_template,
        "vocab_size": config.vocab_size,
        "model_max_length": gateway.max_model_len,
    }
    return JSONResponse(answer)
