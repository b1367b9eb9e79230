"""/v1/rerank: documents in the order of their relevance to a query, with the fields of Jina's and Cohere's servers."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from inflight.gateway.body import read_object
from inflight.gateway.context import gateway_of
from inflight.gateway.fields import Reader, refused, served, table
from inflight.gateway.readings import read_all
from inflight.gateway.relevance import label_readings, relevance, rerank_prompts
from inflight.gateway.scores import texts
from inflight.gateway.scoring_fields import REQUEST, TRUNCATION, answer_head, usage_of
from inflight.gateway.sse import while_connected
from inflight.gateway.values import anything, boolean, integer, string

RERANK = table(
    REQUEST,
    TRUNCATION,
    served("query", string(), "a text"),
    served("documents", anything(), 'a list of texts, or of objects {"text": "..."}; 1,024 at most'),
    served("top_n", integer(1, 2**31 - 1), "so many of the best are returned; without it all"),
    served("return_documents", boolean(), "false: the answer has no texts"),
    served("instruction", string(), "what the documents are to do; `gateway.rerank_instruction` without it"),
    refused("max_chunks_per_doc max_tokens_per_doc overlap_tokens", "documents are judged whole"),
    refused("rank_fields", "documents have one field, `text`", ["text"], []),
    refused("use_activation activation", "scores are probabilities", True),
)
READER = Reader(RERANK, required=("model", "query", "documents"))


async def rerank(request: Request) -> Response:
    """Answer with the documents, the most relevant first; of equals, the first one. Raises ApiError."""
    gateway = gateway_of(request)
    fields = READER.read(await read_object(request), strict=gateway.settings.strict_fields)
    gateway.metrics.ignored_fields(fields.ignored)
    model = gateway.check_model(fields["model"])
    documents = texts(fields["documents"], "documents")
    queries = [fields["query"]] * len(documents)
    prompts = await rerank_prompts(gateway, fields, queries, documents, "documents")
    readings = label_readings(request, gateway, fields, prompts)
    deltas = await while_connected(request, read_all(gateway, readings))
    scores = [relevance(delta) for delta in deltas]
    best = sorted(range(len(scores)), key=lambda index: -scores[index])[: fields.get("top_n")]
    shown = fields.get("return_documents", True)
    results: list[dict[str, Any]] = [
        {"index": index, "relevance_score": scores[index]}
        | ({"document": {"text": documents[index]}} if shown else {})
        for index in best
    ]  # fmt: skip
    answer = answer_head(fields, "rerank") | {"object": "list", "model": model, "results": results}
    return JSONResponse({**answer, "usage": usage_of(readings, deltas)}, headers=fields.headers())
