"""Errors of the engine and of the libraries in the words of a request: inputs by the names of its fields."""

from __future__ import annotations

import re

from inflight.errors import InflightError, InvalidRequest
from inflight.gateway.errors import ApiError, from_inflight, invalid
from inflight.sampling import Guide
from inflight.text.output.call_grammar import field_of_schema

_FIELD_OF = {
    "stop_strings": "stop",
    "stop_words_list": "stop",
    "bad_words_list": "bad_words",
    "embedding_bias": "logit_bias",
    "request_output_len": "max_tokens",
    "num_return_sequences": "n",
    "runtime_top_k": "top_k",
    "runtime_top_p": "top_p",
    "return_log_probs": "logprobs",
    "num_top_log_probs": "top_logprobs",
    "num_prompt_log_probs": "logprobs",
    "log_prob_token_ids": "label_token_ids",
    "end_ids": "stop_token_ids",
}
_SAME = (
    "temperature min_p min_tokens seed repetition_penalty presence_penalty frequency_penalty priority deadline_ms "
    "client_id chat_template_kwargs"
)
_PROMPT, _GUIDE = (
    ("input_ids", "text_input"),
    ("guided_decoding_guide_type", "guided_decoding_guide", "guide_start_ids"),
)
_TOO_LONG = re.compile(r"the prompt length \((\d+) tokens\) exceeds the limit; prompt and output may have (\d+) tokens")
_PATH = re.compile(r"[a-z_]\w*(?:\[\d+\]|\.\w+)*", re.ASCII)
_WORD = re.compile(r"(?<![\w./'\"])[a-z_]+\b")
"""A word that may be the name of an input: behind a dot, a slash or a quotation mark it is the client's own."""
_SCHEMA = re.compile(r"guided_decoding_guide: %json in line (\d+)")


def request_error(
    error: InflightError, prompt_param: str, guide_param: str = "", guide: Guide | None = None
) -> ApiError:
    """Return an error of the engine in the words of the request.

    Args:
        error: the error; its message begins with the name of an input, or with the path of a field.
        prompt_param: the field of the prompt.
        guide_param: the field of the guide.
        guide: the guide; its text says which field each tool's schema is from.
    """
    place = _SCHEMA.match(str(error)) if guide is not None else None
    if guide is not None and place and (field := field_of_schema(guide.text, int(place[1]))) is not None:
        return from_inflight(type(error)(f"{field}{str(error)[place.end() :]}"), field)
    names = _FIELD_OF | dict.fromkeys(_PROMPT, prompt_param)
    names |= {name: guide_param for name in _GUIDE if guide_param}
    if isinstance(error, InvalidRequest) and (longest := _TOO_LONG.search(str(error))):
        return context_length_exceeded(int(longest[2]), int(longest[1]), prompt_param)
    message = _WORD.sub(lambda word: names.get(word[0], word[0]), str(error))
    known = {*names.values(), *_SAME.split()}
    path = _PATH.match(message)
    param = (
        path[0] if path and re.split(r"[.\[]", path[0])[0] in {re.split(r"[.\[]", one)[0] for one in known} else None
    )
    return from_inflight(type(error)(message), param)


def context_length_exceeded(
    longest: int, prompt_tokens: int, param: str, asked: int | None = None, *, counted: bool = True
) -> ApiError:
    """Return the error of a request that does not fit into the context, in the words that clients look for.

    ``counted``: whether the prompt has been encoded to its end; else it has more tokens.
    """
    more = "" if counted else "more than "
    parts = f"{more}{prompt_tokens} in the {param}" + (f", {asked} in the completion" if asked else "")
    message = (
        f"This model's maximum context length is {longest} tokens. However, you requested "
        f"{more}{prompt_tokens + (asked or 0)} tokens ({parts}). Please reduce the length of the {param} or completion."
    )
    return invalid(message, param, "context_length_exceeded")
