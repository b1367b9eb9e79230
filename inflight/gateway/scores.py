"""/v1/score and /generative_scoring: how likely given tokens are behind a text, and how well texts answer a query.

A body with ``query``, ``items`` and ``label_token_ids`` is SGLang's (/v1/score) or vLLM's (/generative_scoring): the
probabilities of the labels behind each item. A body with two texts, vLLM's, asks for relevance, as /v1/rerank does.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from inflight.gateway.context import Gateway, gateway_of
from inflight.gateway.engine_client import EngineDelta
from inflight.gateway.errors import invalid
from inflight.gateway.fields import Fields, Reader, refused, served, table
from inflight.gateway.preparing import prepared
from inflight.gateway.prompts import Prompt, read_prompts
from inflight.gateway.readings import Reading, read_all
from inflight.gateway.relevance import label_readings, relevance, rerank_prompts
from inflight.gateway.sampling import check_size, most_tokens
from inflight.gateway.scoring_fields import REQUEST, TRUNCATION, answer_head, label_log_probs, usage_of
from inflight.gateway.sse import while_connected
from inflight.gateway.values import anything, boolean, integer, list_of, string, wrong
from inflight.gateway.workers import off_loop, written

MOST_ITEMS = 1024
_LABELS = list_of(integer(0, 2**31 - 1), 256, least=1)
_TEXTS = anything()
_PAIRS = (("text_1", "text_2"), ("queries", "documents"), ("data_1", "data_2"))
"""What vLLM calls the two texts, now and before."""
_LABEL_FIELDS = ("items", "label_token_ids", "apply_softmax", "item_first")
GENERATIVE = table(
    REQUEST,
    served("query", anything(), "a text, or a list of token ids"),
    served("items", anything(), "a text, a list of texts, or a list of lists of token ids; 1,024 at most"),
    served("label_token_ids", _LABELS, "the tokens whose probabilities behind each item are returned"),
    served("apply_softmax", boolean(), "true: probabilities among the labels alone; false: among all tokens"),
    served("item_first", boolean(), "true: the item comes before the query"),
    served("add_special_tokens", boolean(), "true without it: a text gets the checkpoint's special tokens"),
)
SCORE = table(
    GENERATIVE.values(),
    TRUNCATION,
    *(
        served(name, _TEXTS, "a text, or a list of texts: a query, and a document")
        for pair in _PAIRS
        for name in pair
    ),
    served("instruction", string(), "what the documents are to do; `gateway.rerank_instruction` without it"),
    refused("use_activation activation", "scores are probabilities", True),
    refused("softmax normalize", "scores are probabilities", True),
    refused("encoding_format", "scores are numbers", "float"),
    refused("max_tokens_per_doc max_tokens_per_query", "texts are judged whole", 0),
    refused("chat_template_kwargs", "the gateway sets the variables of the template", {}),
    refused("return_pooled_hidden_states", "use /v1/embeddings", False),
)  # fmt: skip
SCORE_READER = Reader(SCORE)
GENERATIVE_READER = Reader(GENERATIVE, required=("query", "items", "label_token_ids"))


async def score(request: Request) -> Response:
    """Answer with the labels' probabilities, or with the relevance of each pair of texts. Raises ApiError."""
    gateway = gateway_of(request)
    fields, readings = await prepared(request, _prepare_score, grows=True)
    gateway.metrics.ignored_fields(fields.ignored)
    deltas = await while_connected(request, read_all(gateway, readings))
    if "query" not in fields:
        return await _scored(fields, readings, deltas, relevance)

    def write() -> str:
        scores = [_probabilities(fields, label_log_probs(delta), softmax=False) for delta in deltas]
        answer: dict[str, Any] = {"object": "scoring", "model": fields["model"], "scores": scores}
        return written({**answer, "usage": usage_of(readings, deltas)})

    body = await off_loop(write, len(fields["label_token_ids"]) * len(deltas))
    return Response(body, media_type="application/json", headers=fields.headers())


def _prepare_score(request: Request, gateway: Gateway, body: dict[str, Any]) -> tuple[Fields, list[Reading]]:
    fields = gateway.read(SCORE_READER, body)
    if "query" in fields:
        _only_labels(fields)
        return fields, _label_readings(request, gateway, fields, joined=True)
    queries, documents, param = _pairs(fields)
    prompts = rerank_prompts(gateway, fields, queries, documents, param)
    return fields, label_readings(request, gateway, fields, prompts)


async def generative_scoring(request: Request) -> Response:
    """Answer with the first label's probability behind each item. Raises ApiError."""
    gateway = gateway_of(request)
    fields, readings = await prepared(request, _prepare_generative, grows=True)
    gateway.metrics.ignored_fields(fields.ignored)
    deltas = await while_connected(request, read_all(gateway, readings))

    def score_of(delta: EngineDelta) -> float:
        return _probabilities(fields, label_log_probs(delta), softmax=True)[0]

    return await _scored(fields, readings, deltas, score_of, len(fields["label_token_ids"]))


def _prepare_generative(request: Request, gateway: Gateway, body: dict[str, Any]) -> tuple[Fields, list[Reading]]:
    fields = gateway.read(GENERATIVE_READER, body)
    return fields, _label_readings(request, gateway, fields, joined=False)


async def _scored(
    fields: Fields,
    readings: Sequence[Reading],
    deltas: Sequence[EngineDelta],
    score_of: Callable[[EngineDelta], float],
    labels: int = 2,
) -> Response:
    """Return vLLM's answer, whose scores are made of the log-probs of so many ``labels`` each."""

    def write() -> str:
        data = [{"index": index, "object": "score", "score": score_of(delta)} for index, delta in enumerate(deltas)]
        answer = answer_head(fields, "score") | {"object": "list", "model": fields["model"], "data": data}
        return written({**answer, "usage": usage_of(readings, deltas)})

    body = await off_loop(write, labels * len(deltas))
    return Response(body, media_type="application/json", headers=fields.headers())


def _only_labels(fields: Fields) -> None:
    """Raise ApiError for a body with a query that lacks its other fields, or has those of pairs of texts."""
    for name in ("items", "label_token_ids"):
        if name not in fields:
            raise invalid(f"{name} is missing; it goes with query", name, "missing_required_parameter")
    for name in (*(name for pair in _PAIRS for name in pair), "instruction", *(one.name for one in TRUNCATION)):
        if name in fields:
            raise invalid(f"{name} and query are both given; a request has one of them", name)


def _pairs(fields: Fields) -> tuple[list[str], list[str], str]:
    """Return queries and documents, as many of both, and the documents' field. Raises ApiError."""
    for name in _LABEL_FIELDS:
        if name in fields:
            raise invalid(f"{name} goes with query, which is missing", name)
    given = [pair for pair in _PAIRS if pair[0] in fields or pair[1] in fields]
    if len(given) != 1:
        what = "are missing" if not given else "are given by several names"
        wanted = "a request has text_1 and text_2, or query, items and label_token_ids"
        raise invalid(f"the texts {what}; {wanted}", "text_1", "missing_required_parameter")
    first, second = given[0]
    queries, documents = (texts(fields.get(name), name) for name in (first, second))
    if len(queries) == 1:
        queries *= len(documents)
    if len(queries) != len(documents):
        message = f"{first} has {len(queries)} texts and {second} {len(documents)}; {first} must have one, or as many"
        raise invalid(message, first)
    return queries, documents, second


def texts(value: Any, name: str) -> list[str]:
    """Return a field's texts: one, or a list of them, each a string or ``{"text": "..."}``. Raises ApiError."""
    if value is None:
        raise invalid(f"{name} is missing", name, "missing_required_parameter")
    several = value if isinstance(value, list) else [value]
    if not 1 <= len(several) <= MOST_ITEMS:
        raise invalid(f"{name} has {len(several)} texts; it must have 1 to {MOST_ITEMS}", name)
    found = []
    for index, one in enumerate(several):
        path = f"{name}[{index}]" if isinstance(value, list) else name
        text = one.get("text") if isinstance(one, dict) else one
        if not isinstance(text, str):
            raise invalid(f'{path} must be a string, or an object {{"text": "..."}}', path)
        found.append(text)
    return found


def _label_readings(request: Request, gateway: Gateway, fields: Fields, *, joined: bool) -> list[Reading]:
    """Return the prompts of query and items. ``joined``: texts are encoded as one, else each by itself."""
    items, special = fields["items"], fields.get("add_special_tokens", True)
    query = fields["query"]
    several = items if isinstance(items, list) else [items]
    if not several or len(several) > MOST_ITEMS:
        raise invalid(f"items has {len(several)} items; it must have 1 to {MOST_ITEMS}", "items")
    if not isinstance(query, str) and not (isinstance(query, list) and all(type(one) is int for one in query)):
        raise wrong("query", query, "a string, or a list of token ids")
    if not all(isinstance(one, type(query)) for one in several):
        raise invalid("items must be texts where query is one, and lists of token ids where query is one", "items")
    what, tokens = "characters" if isinstance(query, str) else "token ids", most_tokens(gateway, fields)
    check_size(gateway, sum(map(len, several)) + len(query) * len(several), "items", f"{what} with the query for each")
    if isinstance(query, str) and joined:
        both = [one + query if fields.get("item_first") else query + one for one in several]
        prompts = read_prompts(both, gateway, add_special_tokens=special, param="items", most=MOST_ITEMS, tokens=tokens)
        return label_readings(request, gateway, fields, [(one.ids, _path(items, n)) for n, one in enumerate(prompts)])
    heads = read_prompts(query, gateway, add_special_tokens=special, param="query", most=1, tokens=tokens)
    tails = read_prompts(several, gateway, add_special_tokens=False, param="items", most=MOST_ITEMS, tokens=tokens)
    prompts = [_join(heads[0], tail, fields.get("item_first", False)) for tail in tails]
    return label_readings(request, gateway, fields, [(one.ids, _path(items, n)) for n, one in enumerate(prompts)])


def _path(items: Any, number: int) -> str:
    return f"items[{number}]" if isinstance(items, list) else "items"


def _join(query: Prompt, item: Prompt, item_first: bool) -> Prompt:
    return Prompt(item.ids + query.ids if item_first else query.ids + item.ids, item.param)


def _probabilities(fields: Fields, log_probs: Sequence[float], *, softmax: bool) -> list[float]:
    """Return the labels' probabilities; ``softmax``: whether those among the labels are the default."""
    if not fields.get("apply_softmax", softmax):
        return [math.exp(one) for one in log_probs]
    most = max(log_probs)
    weights = [math.exp(one - most) for one in log_probs]
    whole = math.fsum(weights)
    return [weight / whole for weight in weights]
