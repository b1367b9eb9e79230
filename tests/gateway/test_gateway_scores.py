"""/v1/score, /generative_scoring and /v1/rerank beside a real server, as transformers has them."""

from __future__ import annotations

import http.client
import json
import math
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.gateway.support.demo import TOKENIZER, ids_of, next_log_probs
from tests.gateway.support.gateways import Beside, beside, until
from tests.triton.support.metrics_page import read_metric, value_in

QUERY, ITEMS = "The capital of France is the city of", [" Paris", " London and more", ""]
LABELS = [17, 400, 5]
DOCUMENTS = ["The sea is blue and deep.", "A fox lives in the forest.", "Paris is a city."]
PROMPT = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct "
    "provided. "
    'Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n<Instruct>: {instruction}\n'
    "<Query>: {query}\n<Document>: {document}<|im_end|>\n<|im_start|>assistant\n"
)
INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"


def _post(gateway: Beside, path: str, **body: Any) -> httpx.Response:
    with gateway.client() as client:
        model = client.get("/v1/models").json()["data"][0]["id"]
        return client.post(path, json={"model": model, **body})


def _answer(gateway: Beside, path: str, **body: Any) -> dict[str, Any]:
    response = _post(gateway, path, **body)
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


def _probabilities(prompt: list[int], labels: list[int], softmax: bool) -> list[float]:
    log_probs = next_log_probs(prompt)[labels].double()
    return list((log_probs.softmax(-1) if softmax else log_probs.exp()).tolist())


def _relevance(query: str, document: str, instruction: str = INSTRUCTION) -> float:
    text = PROMPT.format(query=query, document=document, instruction=instruction)
    labels = [TOKENIZER.encode_batch([word], add_special_tokens=False)[0][0] for word in ("yes", "no")]
    return _probabilities(ids_of(text, special=False), labels, True)[0]


@pytest.mark.proof
@pytest.mark.parametrize("softmax", [None, True, False])
@pytest.mark.parametrize("item_first", [False, True])
def test_labels_have_the_probabilities_of_transformers(gateway: Beside, softmax: bool | None, item_first: bool) -> None:
    more = {} if softmax is None else {"apply_softmax": softmax}
    body = {"query": QUERY, "items": ITEMS, "label_token_ids": LABELS, "item_first": item_first}
    answer = _answer(gateway, "/v1/score", **body, **more)
    assert answer["object"] == "scoring"
    prompts = [ids_of(item + QUERY if item_first else QUERY + item) for item in ITEMS]
    for scores, prompt in zip(answer["scores"], prompts, strict=True):
        assert scores == pytest.approx(_probabilities(prompt, LABELS, bool(softmax)), rel=1e-4)
    assert answer["usage"]["prompt_tokens"] == sum(map(len, prompts))


def test_token_ids_are_joined_as_they_are(gateway: Beside) -> None:
    query, items = ids_of(QUERY), [[5, 6], [7]]
    answer = _answer(gateway, "/v1/score", query=query, items=items, label_token_ids=LABELS)
    for scores, item in zip(answer["scores"], items, strict=True):
        assert scores == pytest.approx(_probabilities([*query, *item], LABELS, False), rel=1e-4)


def test_generative_scoring_is_the_first_label_s_probability_among_them(gateway: Beside) -> None:
    answer = _answer(gateway, "/generative_scoring", query=QUERY, items=ITEMS[:2], label_token_ids=LABELS)
    assert answer["object"] == "list"
    for index, (one, item) in enumerate(zip(answer["data"], ITEMS, strict=False)):
        prompt = [*ids_of(QUERY), *ids_of(item, special=False)]
        assert (one["index"], one["object"]) == (index, "score")
        assert one["score"] == pytest.approx(_probabilities(prompt, LABELS, True)[0], rel=1e-4)


@pytest.mark.parametrize(("first", "second"), [("text_1", "text_2"), ("queries", "documents"), ("data_1", "data_2")])
def test_pairs_of_texts_get_their_relevance(gateway: Beside, first: str, second: str) -> None:
    answer = _answer(gateway, "/score", **{first: QUERY, second: DOCUMENTS}, request_id="mine")
    assert answer["id"] == "score-mine"
    expected = [_relevance(QUERY, one) for one in DOCUMENTS]
    assert [one["score"] for one in answer["data"]] == pytest.approx(expected, rel=1e-4)
    pairs = _answer(gateway, "/v1/score", **{first: ["a", "b"], second: DOCUMENTS[:2]})
    expected = [_relevance(query, one) for query, one in zip("ab", DOCUMENTS, strict=False)]
    assert [one["score"] for one in pairs["data"]] == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize("path", ["/v1/rerank", "/rerank", "/v2/rerank"])
def test_documents_are_ranked(gateway: Beside, path: str) -> None:
    documents = [DOCUMENTS[0], {"text": DOCUMENTS[1]}, DOCUMENTS[2]]
    answer = _answer(gateway, path, query=QUERY, documents=documents, instruction="Find animals")
    expected = [_relevance(QUERY, one, "Find animals") for one in DOCUMENTS]
    order = sorted(range(3), key=lambda index: -expected[index])
    assert [one["index"] for one in answer["results"]] == order
    assert [one["relevance_score"] for one in answer["results"]] == pytest.approx(
        [expected[one] for one in order], rel=1e-4
    )
    assert [one["document"]["text"] for one in answer["results"]] == [DOCUMENTS[one] for one in order]
    best = _answer(gateway, path, query=QUERY, documents=documents, top_n=1, return_documents=False)["results"]
    assert len(best) == 1
    assert best[0].keys() == {"index", "relevance_score"}


def test_what_prompts_share_is_read_once(gateway: Beside) -> None:
    """Many documents for one long query: all but the first find the query in the prefix cache."""
    query = "What do we know about the fox in the forest near the sea? " * 12
    answer = _answer(gateway, "/v1/rerank", query=query, documents=[f"Number {index}." for index in range(20)])
    usage = answer["usage"]
    shared = len(ids_of(PROMPT.format(query=query, document="", instruction=INSTRUCTION), special=False)) - 80
    assert usage["prompt_tokens_details"]["cached_tokens"] >= 19 * shared


@pytest.mark.parametrize(
    ("path", "body", "param", "words"),
    [
        ("/v1/score", {}, "text_1", "are missing"),
        ("/v1/score", {"query": "x"}, "items", "items is missing"),
        ("/v1/score", {"query": "x", "items": ["y"]}, "label_token_ids", "is missing"),
        ("/v1/score", {"query": "x", "items": [], "label_token_ids": [1]}, "items", "1 to 1024"),
        ("/v1/score", {"query": "x", "items": ["y"], "label_token_ids": []}, "label_token_ids", "must be"),
        ("/v1/score", {"query": "x", "items": ["y"], "label_token_ids": [9999]}, "label_token_ids", "9999"),
        ("/v1/score", {"query": "x", "items": [[1]], "label_token_ids": [1]}, "items", "must be texts"),
        ("/v1/score", {"query": [[1]], "items": [[1]], "label_token_ids": [1]}, "query", "must be"),
        ("/v1/score", {"query": "x", "items": ["y"], "label_token_ids": [1], "text_1": "z"}, "text_1", "both given"),
        (
            "/v1/score",
            {"query": "x", "items": ["y"], "label_token_ids": [1], "truncation_side": "right"},
            "truncation_side",
            "both given",
        ),
        ("/v1/score", {"text_1": "a", "text_2": "b", "request_id": "c", "rid": "d"}, "rid", "contradict"),
        ("/v1/score", {"text_1": ["a", "b"], "text_2": ["c"]}, "text_1", "must have one, or as many"),
        ("/v1/score", {"text_1": "a"}, "text_2", "text_2 is missing"),
        ("/v1/score", {"text_1": "a", "text_2": [5]}, "text_2[0]", "must be a string"),
        ("/v1/score", {"text_1": "a", "text_2": "b", "item_first": True}, "item_first", "goes with query"),
        ("/generative_scoring", {"query": "x", "items": ["y"]}, "label_token_ids", "is missing"),
        ("/v1/rerank", {"query": "x"}, "documents", "is missing"),
        ("/v1/rerank", {"query": "x", "documents": []}, "documents", "1 to 1024"),
        ("/v1/rerank", {"query": "x", "documents": [{"image": "y"}]}, "documents[0]", "must be a string"),
        ("/v1/rerank", {"query": "x", "documents": ["y"], "top_n": 0}, "top_n", "from 1"),
        ("/v1/rerank", {"query": "x", "documents": ["y"], "rank_fields": ["title"]}, "rank_fields", "not supported"),
        ("/v1/rerank", {"query": "x", "documents": ["ok", "a b c " * 3000]}, "documents[1]", "maximum context length"),
    ],
)
def test_bad_requests_name_the_field(gateway: Beside, path: str, body: dict[str, Any], param: str, words: str) -> None:
    response = _post(gateway, path, **body)
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert error["param"] == param
    assert words in error["message"]


def test_a_client_that_leaves_leaves_nothing_behind(gateway: Beside) -> None:
    documents = [f"Document {index}: " + "a fox in the forest. " * 100 for index in range(1000)]
    body = {"model": "demo", "query": QUERY, "documents": documents}

    def read() -> float:
        return read_metric(gateway.triton.metrics, "inflight_prompt_tokens_total")

    def active() -> float:
        return read_metric(gateway.triton.metrics, "nv_trt_llm_request_metrics", request_type="active")

    def left() -> float:
        with gateway.client() as other:
            return value_in(other.get("/metrics").text, "inflight_gateway_disconnects_total", route="/v1/rerank")

    read_before, left_before = read(), left()
    connection = http.client.HTTPConnection(httpx.URL(gateway.url).host, httpx.URL(gateway.url).port, timeout=60)
    connection.request("POST", "/v1/rerank", json.dumps(body), {"content-type": "application/json"})
    until(active)
    connection.close()
    until(lambda: left() > left_before and not active())
    whole = _answer(gateway, "/v1/rerank", query=QUERY, documents=documents[:1])
    assert whole["usage"]["prompt_tokens"] * len(documents) > 2 * (read() - read_before), "most were never read"
    assert _answer(gateway, "/v1/rerank", query="x", documents=["y"])["results"]


@pytest.fixture(scope="module")
def configured() -> Iterator[Beside]:
    """A gateway with labels and a prompt of its own."""
    settings = {"rerank_labels": [" good", " bad"], "rerank_template": "{query}? {document}! It is {yes} or{no}: it is"}
    with beside(gateway=settings) as running:
        yield running


@pytest.mark.proof
def test_labels_and_prompt_are_the_deployment_s(configured: Beside) -> None:
    [result] = _answer(configured, "/v1/rerank", query="The {document}", documents=["A fox"])["results"]
    labels = [TOKENIZER.encode_batch([word], add_special_tokens=False)[0][0] for word in (" good", " bad")]
    prompt = ids_of("The {document}? A fox! It is  good or bad: it is", special=False)
    expected = _probabilities(prompt, labels, True)[0]
    assert result["relevance_score"] == pytest.approx(expected, rel=1e-4)
    assert 0 < expected < 1
    assert math.isfinite(expected)
