"""/v1/rerank: documents in the order of their relevance to a query, with the fields of Jina's and Cohere's servers."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from inflight.gateway.context import Gateway, gateway_of
from inflight.gateway.fields import Fields, Reader, refused, served, table
from inflight.gateway.preparing import prepared
from inflight.gateway.readings import Reading, read_all
from inflight.gateway.relevance import label_readings, relevance, rerank_prompts
from inflight.gateway.scores import texts
from inflight.gateway.scoring_fields import REQUEST, TRUNCATION, answer_head, usage_of
from inflight.gateway.sse import while_connected
from inflight.gateway.values import anything, boolean, integer, string
from inflight.gateway.workers import off_loop, written

RERANK = table(
    REQUEST,
    TRUNCATION,
    served("query", string(), "a text"),
    served("documents", anything(), 'a list of texts, or of objects {"text": "..."}; 1,024 at most'),
    served("top_n", integer(1, 2**31 - 1), "so many of the best are returned; without it all"),
    served("return_documents", boolean(), "false: the answer has no texts"),
    served("instruction", string(), "what the documents are to do; `gateway.rerank_instruction` without it"),
    refused("max_chunks_per_doc overlap_tokens", "documents are judged whole"),
    refused("max_tokens_per_doc max_tokens_per_query", "texts are judged whole", 0),
    refused("chat_template_kwargs", "the gateway sets the variables of the template", {}),
    refused("rank_fields", "documents have one field, `text`", ["text"], []),
    refused("use_activation activation", "scores are probabilities", True),
)
READER = Reader(RERANK, required=("query", "documents"))


async def rerank(request: Request) -> Response:
    """Answer with the documents, the most relevant first; of equals, the first one. Raises ApiError."""
    gateway = gateway_of(request)
    fields, documents, readings = await prepared(request, _prepare, grows=True)
    gateway.metrics.ignored_fields(fields.ignored)
    deltas = await while_connected(request, read_all(gateway, readings))
    scores = [relevance(delta) for delta in deltas]
    best = sorted(range(len(scores)), key=lambda index: -scores[index])[: fields.get("top_n")]
    shown = fields.get("return_documents", True)
    results: list[dict[str, Any]] = [
        {"index": index, "relevance_score": scores[index]}
        | ({"document": {"text": documents[index]}} if shown else {})
        for index in best
    ]  # fmt: skip
    answer = answer_head(fields, "rerank") | {"object": "list", "model": fields["model"], "results": results}
    answer["usage"] = usage_of(readings, deltas)
    size = len(best) + (sum(len(documents[index]) for index in best) if shown else 0)
    body = await off_loop(lambda: written(answer), size)
    return Response(body, media_type="application/json", headers=fields.headers())


def _prepare(request: Request, gateway: Gateway, body: dict[str, Any]) -> tuple[Fields, list[str], list[Reading]]:
    """Return the fields, the documents, and their prompts."""
    fields = gateway.read(READER, body)
    documents = texts(fields["documents"], "documents")
    queries = [fields["query"]] * len(documents)
    prompts = rerank_prompts(gateway, fields, queries, documents, "documents")
    return fields, documents, label_readings(request, gateway, fields, prompts)
