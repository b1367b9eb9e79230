"""The fields of a request that say how to generate, as the engine takes them; chats and completions share them."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from starlette.requests import Request

from inflight import contract
from inflight.errors import InflightError
from inflight.gateway.context import Gateway
from inflight.gateway.engine_client import GenerateRequest
from inflight.gateway.errors import ApiError, from_inflight, invalid
from inflight.gateway.fields import Fields, unsupported
from inflight.gateway.request_errors import context_length_exceeded
from inflight.gateway.requests import state_of
from inflight.sampling import MAX_SEED
from inflight.text.preprocess import word_spellings

_SMALLEST_TOP_P = 1e-9
"""In place of 0, which to the engine is no limit, and to OpenAI the likeliest token alone."""
_MOST_CLIENT_ID = 256
_TRACE_HEADERS = ("traceparent", "tracestate")
_TRACE_VALUE = re.compile(r"[ -~]{1,512}", re.ASCII)


def sampling_arguments(fields: Fields, gateway: Gateway) -> dict[str, Any]:
    """Return the arguments of ``GenerateRequest`` that say how tokens are chosen and what ends them.

    A field that the request has not goes by the checkpoint's own defaults, and then by OpenAI's. Where neither says how
    to choose tokens, the likeliest one is taken, as over KServe: most small models talk nonsense at a temperature of 1.

    Raises:
        ApiError: 400, naming the field.
    """
    defaults, vocab_size = gateway.tokenizer.config.sampling_defaults, gateway.tokenizer.config.vocab_size
    get = {name: fields.get(name, defaults.get(name, value)) for name, value in _NEUTRAL.items()}
    if not any(name in fields or name in defaults for name in _CHOOSING) and fields.get("n", 1) == 1:
        get["temperature"] = 0.0
    arguments: dict[str, Any] = get | {
        "top_p": get["top_p"] or _SMALLEST_TOP_P,
        "top_k": max(0, int(get["top_k"])),
        "seed": fields["seed"] % (MAX_SEED + 1) if "seed" in fields else None,
        "sequences": _sequences(fields, gateway),
        "stop_strings": _words(fields, "stop", gateway),
        "bias": _bias(fields, vocab_size),
        "bad_words": _bad_words(fields, gateway),
    }
    arguments["end_ids"] = [] if fields.get("ignore_eos") else sorted(gateway.end_ids)
    stops = _tokens(fields, "stop_token_ids", vocab_size)
    arguments["end_ids"] += [one for one in stops if one not in arguments["end_ids"]]
    return arguments


_CHOOSING = ("temperature", "top_p", "top_k", "min_p", "seed")
"""Whoever names one of these, or asks for several answers, wants them drawn."""


def wants_stream(fields: Fields) -> bool:
    """Return whether the answer is to be streamed.

    Raises:
        ApiError: 400: ``stream_options`` are given and would change nothing.
    """
    streams = bool(fields.get("stream", False))
    if "stream_options" in fields and not streams:
        raise invalid("stream_options is given; it needs stream to be true", "stream_options")
    return streams


_NEUTRAL: dict[str, Any] = {
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": 0,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "min_tokens": 0,
}


def request_arguments(request: Request, fields: Fields, gateway: Gateway) -> dict[str, Any]:
    """Return the arguments of ``GenerateRequest`` that say whose request it is and how urgent.

    The body names the client only where nobody vouches for who asks.

    Raises:
        ApiError: 400: the deployment has no clients' turns, or the request has two ids.
    """
    fields.either("request_id", "rid")  # they are part of the answer, which is made when the engine has worked
    state = state_of(request)
    by_client = gateway.deployment.batching.fairness == "client"
    named = "" if state.client else fields.get("client_id") or fields.get("user") or ""
    if "client_id" in fields and not by_client:
        raise ApiError(
            400,
            "client_id is not supported by this deployment; set `batching.fairness: client`",
            code="unsupported_parameter",
            param="client_id",
        )
    return {
        "priority": fields.get("priority", 0),
        "deadline_ms": fields.get("deadline_ms"),
        "client_id": named[:_MOST_CLIENT_ID] if by_client else "",
        "client": state.client or "",
        "request_id": state.engine_id(),
        "trace_context": trace_context(request.headers),
    }


def trace_context(headers: Mapping[str, str]) -> dict[str, str]:
    """Return the W3C headers of a request's trace, as far as they can be handed on."""
    given = {name: headers[name] for name in _TRACE_HEADERS if name in headers}
    return {name: value for name, value in given.items() if _TRACE_VALUE.fullmatch(value)}


def _sequences(fields: Fields, gateway: Gateway) -> int:
    count, limit = fields.get("n", 1), gateway.deployment.limits.max_return_sequences
    if count > limit:
        raise invalid(f"n is {count}; the limit of this deployment is {limit}", "n")
    return int(count)


def _words(fields: Fields, name: str, gateway: Gateway) -> list[str]:
    """Return the strings of a field that are not empty, within the deployment's limits."""
    words, limits = [word for word in fields.get(name, ()) if word], gateway.deployment.limits
    if len(words) > limits.max_words:
        raise invalid(f"{name} has {len(words)} strings; the limit is {limits.max_words}", name)
    size = sum(len(word.encode()) for word in words)
    if size > limits.max_words_bytes:
        raise invalid(f"{name} has {size} bytes of strings; the limit is {limits.max_words_bytes}", name)
    return words


def _bad_words(fields: Fields, gateway: Gateway) -> list[list[int]]:
    words = _words(fields, "bad_words", gateway)
    if not words:
        return []
    try:
        return word_spellings("bad_words", words, gateway.tokenizer)
    except InflightError as error:
        raise from_inflight(error, "bad_words") from None


def _bias(fields: Fields, vocab_size: int) -> np.ndarray | None:
    """Return what is added to the logits, float32 [vocab]; None: nothing."""
    given, allowed = fields.get("logit_bias", {}), _tokens(fields, "allowed_token_ids", vocab_size)
    if not given and not allowed:
        return None
    bias = np.zeros(vocab_size, np.float32)
    if allowed:
        bias[:] = -np.inf
        bias[allowed] = 0
    for name, value in given.items():
        path = f"logit_bias.{name}"
        if not name.isascii() or not name.isdigit() or len(name) > 10:
            raise invalid(f'{path[:100]}: the key must be a token id, such as "50256"', path[:100])
        bias[_token(int(name), path, vocab_size)] += value
    return bias


def _tokens(fields: Fields, name: str, vocab_size: int) -> list[int]:
    """Return the token ids of a field, which the vocabulary has."""
    return [_token(one, f"{name}[{index}]", vocab_size) for index, one in enumerate(fields.get(name, ()))]


def _token(token: int, path: str, vocab_size: int) -> int:
    if token >= vocab_size:
        raise invalid(f"{path} has token {token}; the vocabulary has {vocab_size}", path)
    return token


def most_tokens(gateway: Gateway, fields: Fields) -> int | None:
    """Return how many tokens a prompt may have; None: any number, as what is too much is cut off, or not known."""
    return None if "truncate_prompt_tokens" in fields else gateway.max_model_len


def encode_texts(
    gateway: Gateway, texts: Sequence[str], param: str, *, add_special_tokens: bool, most: int | None
) -> list[list[int]]:
    """Return the token ids of texts. One that certainly has more than ``most`` (None: any) is not encoded to its end.

    Raises:
        ApiError: 400, naming ``param``: they are too long for the deployment, or cannot be encoded.
    """
    check_size(gateway, sum(len(text.encode()) for text in texts), param)
    try:
        for index, text in enumerate(texts if most is not None else ()):
            if (found := gateway.tokenizer.excess(text, most or 0)) is not None:
                path = param if len(texts) == 1 else f"{param}[{index}]"
                raise context_length_exceeded(most or 0, found, path, counted=False)
        return gateway.tokenizer.encode_batch(texts, add_special_tokens=add_special_tokens)
    except ApiError:
        raise
    except Exception as error:  # the library raises bare Exception
        raise invalid(f"{param} cannot be encoded by this checkpoint's tokenizer: {error}", param) from None


def check_size(gateway: Gateway, size: int, param: str, what: str = "bytes") -> None:
    """Refuse prompts of a request that are larger, taken together, than the deployment allows.

    Raises:
        ApiError: 400, naming ``param``.
    """
    limit = gateway.deployment.limits.max_prompt_bytes
    if size > limit:
        raise invalid(f"{param} has {size} {what}; the limit is {limit}", param)


def token_limit(gateway: Gateway, prompt_tokens: int, asked: int | None, param: str) -> int:
    """Return how many tokens may be generated: those that were asked for, or the rest of the context.

    Args:
        gateway: knows the longest context.
        prompt_tokens: tokens of the prompt.
        asked: by the request; None: it says nothing.
        param: the field of the prompt.

    Raises:
        ApiError: 400 ``context_length_exceeded``, in the words that clients look for.
    """
    longest = gateway.max_model_len
    if longest is None:
        return asked or gateway.deployment.limits.default_max_tokens
    if prompt_tokens + (asked or 1) <= longest:
        return asked or longest - prompt_tokens
    raise context_length_exceeded(longest, prompt_tokens, param, asked)


def generate_request(
    request: Request, fields: Fields, gateway: Gateway, prompt: Sequence[int], param: str, **more: Any
) -> GenerateRequest:
    """Return the engine's request for one prompt.

    Args:
        request: whose it is.
        fields: of its body.
        gateway: knows the deployment.
        prompt: token ids, at least one.
        param: the field of the prompt.
        more: those of ``sampling_arguments``, which are the same for all prompts of a request, and further ones;
            ``max_tokens`` as the request has it, None where it has none.

    Raises:
        ApiError: 400, naming the field.
    """
    prompt = truncated(gateway, fields, prompt, more["max_tokens"])
    if not prompt:
        raise invalid(f"{param} has no token; it must have at least one", param)
    more["max_tokens"] = token_limit(gateway, len(prompt), more["max_tokens"], param)
    arguments = request_arguments(request, fields, gateway) | more
    arguments["timed"] = not more["stream"]
    if arguments["min_tokens"] > arguments["max_tokens"]:
        limit = arguments["max_tokens"]
        raise invalid(f"min_tokens is {arguments['min_tokens']}; at most {limit} tokens are generated", "min_tokens")
    penalizes = arguments["presence_penalty"] or arguments["frequency_penalty"]
    if penalizes and contract.ENGINE_INPUT["prompt_ignore_length"].served(gateway.deployment.engine.kind):
        arguments["prompt_ignore_length"] = len(prompt)
    return GenerateRequest(prompt=prompt, **arguments)


def truncated(gateway: Gateway, fields: Fields, prompt: Sequence[int], max_tokens: int | None) -> Sequence[int]:
    """Return the prompt's end, or its beginning, where ``truncate_prompt_tokens`` asks for it.

    Args:
        gateway: knows the longest context.
        fields: of the request.
        prompt: token ids.
        max_tokens: of the answer, for which -1 keeps room; None: the request has none.

    Raises:
        ApiError: 400: nothing would be left; or the longest context is not known, and -1 is given.
    """
    kept = fields.get("truncate_prompt_tokens")
    if kept == -1:
        default = gateway.deployment.limits.default_max_tokens
        kept = prompt_room(gateway, default) if max_tokens is None else prompt_room(gateway, max_tokens, whole=True)
    if kept == 0:
        raise invalid("truncate_prompt_tokens is 0; a prompt has at least one token", "truncate_prompt_tokens")
    if kept is not None and fields.get("truncation_side") == "right":
        return prompt[:kept]
    return prompt if kept is None else prompt[max(0, len(prompt) - kept) :]


def prompt_room(gateway: Gateway, answer: int, *, whole: bool = False) -> int:
    """Return how many tokens a prompt may have, for ``truncate_prompt_tokens: -1``.

    Args:
        gateway: knows the longest context.
        answer: tokens that may be generated.
        whole: whether there must be room for all of these; else the prompt may have half of the context.

    Raises:
        ApiError: 400: the longest context is not known.
    """
    longest = gateway.max_model_len
    if longest is None:
        message = "truncate_prompt_tokens is -1, which needs `limits.max_sequence_length` of the deployment"
        raise unsupported("truncate_prompt_tokens", message)
    return max(1, longest - answer) if whole else longest - min(answer, longest // 2)
