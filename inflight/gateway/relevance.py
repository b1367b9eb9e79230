"""Relevance of documents to queries: a model is asked whether a document fits, and how likely its yes is.

It is the manner of Qwen3-Reranker, with whose prompt the chat template of those checkpoints writes exactly what they
were trained on: instruction, query and document as one message, and the probability of `yes` against `no` as the next
token. Any chat model can be asked so; how well it judges is another matter.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

from starlette.requests import Request

from inflight.errors import InvalidRequest
from inflight.gateway.context import Gateway
from inflight.gateway.engine_client import EngineDelta, GenerateRequest
from inflight.gateway.errors import from_inflight
from inflight.gateway.fields import Fields, unsupported
from inflight.gateway.readings import Reading
from inflight.gateway.sampling import check_size, encode_texts, most_tokens, request_arguments, truncated
from inflight.gateway.scoring_fields import label_log_probs

SYSTEM = (
    "Judge whether the Document meets the requirements based on the Query and the Instruct provided. "
    'Note that the answer can only be "{yes}" or "{no}".'
)
USER = "<Instruct>: {instruction}\n<Query>: {query}\n<Document>: {document}"
"""Qwen3-Reranker's own words."""
_PLACE = re.compile(r"\{(instruction|query|document|yes|no)\}")
LabelledPrompt = tuple[list[int], str]
"""Token ids, and the field that they come from."""


def rerank_prompts(
    gateway: Gateway, fields: Fields, queries: Sequence[str], documents: Sequence[str], param: str
) -> list[LabelledPrompt]:
    """Return one prompt for each pair of a query and a document.

    Raises:
        ApiError: the checkpoint cannot be asked, or a prompt cannot be encoded.
    """
    _labels(gateway)
    instruction = fields.get("instruction", gateway.settings.rerank_instruction)
    size = sum(map(len, queries)) + sum(map(len, documents)) + len(instruction) * len(documents)
    check_size(gateway, size, param, "characters with the query and the instruction for each")
    try:
        texts = [_text(gateway, instruction, *pair) for pair in zip(queries, documents, strict=True)]
    except InvalidRequest as error:
        raise from_inflight(error, param) from None
    encoded = encode_texts(gateway, texts, param, add_special_tokens=False, most=most_tokens(gateway, fields))
    return [(ids, f"{param}[{index}]") for index, ids in enumerate(encoded)]


def label_readings(
    request: Request, gateway: Gateway, fields: Fields, prompts: Sequence[LabelledPrompt]
) -> list[Reading]:
    """Return the engine's requests for the log-probs of the labels behind prompts: the request's, or yes and no."""
    labels = fields.get("label_token_ids") or _labels(gateway)
    return [
        Reading(
            GenerateRequest(
                prompt=truncated(gateway, fields, ids, 1),
                max_tokens=1,
                stream=False,
                log_prob_token_ids=labels,
                **request_arguments(request, fields, gateway),
            ),
            param,
        )
        for ids, param in prompts
    ]


def relevance(delta: EngineDelta) -> float:
    """Return the probability of the first of two labels against the second."""
    yes, no = label_log_probs(delta)
    difference = no - yes
    return 1 / (1 + math.exp(difference)) if difference < 700 else 0.0


def _labels(gateway: Gateway) -> list[int]:
    """Return the token ids of yes and no: the first of each. Raises ApiError: they are the same."""
    spellings = gateway.tokenizer.encode_batch(list(gateway.settings.rerank_labels), add_special_tokens=False)
    first = [ids[0] for ids in spellings if ids]
    if len(set(first)) < 2:
        said = " and ".join(map(repr, gateway.settings.rerank_labels))
        message = f"gateway.rerank_labels: this checkpoint's tokens for {said} do not begin differently"
        raise unsupported("model", message)
    return first


def _text(gateway: Gateway, instruction: str, query: str, document: str) -> str:
    """Return the prompt of one pair. Raises InvalidRequest, ApiError."""
    yes, no = gateway.settings.rerank_labels
    words = {"instruction": instruction, "query": query, "document": document, "yes": yes, "no": no}

    def fill(template: str) -> str:
        return _PLACE.sub(lambda place: words[place[1]], template)

    if (template := gateway.settings.rerank_template) is not None:
        return fill(template)
    chat = gateway.chat_template
    if chat is None:
        raise unsupported("model", "this checkpoint has no chat template; set gateway.rerank_template")
    messages = [{"role": "system", "content": fill(SYSTEM)}, {"role": "user", "content": fill(USER)}]
    return chat.render(messages, {"enable_thinking": False} if chat.uses("enable_thinking") else {})
