"""What each route of the shell answers, and how it refuses: statuses, bodies and headers, on a real socket."""

from __future__ import annotations

import json
from dataclasses import replace
from datetime import datetime
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from inflight.gateway.app import Served, make_app
from inflight.metrics import GATEWAY
from tests.gateway.support.answers import MODEL
from tests.gateway.support.gateways import Inside, inside

MESSAGE = {"role": "user", "content": "a"}


def _error(reply: httpx.Response) -> dict[str, Any]:
    body = reply.json()
    assert set(body) == {"error"}
    assert set(body["error"]) == {"message", "type", "param", "code"}
    assert reply.headers["content-type"] == "application/json"
    return body["error"]


def test_health_is_503_while_the_engine_is_away(alone: Inside) -> None:
    with alone.client() as client:
        reply = client.get("/health")
    assert reply.status_code == 503
    assert reply.headers["retry-after"] == "1"
    assert _error(reply)["code"] == "server_unavailable"


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "Hi"}]}),
        ("/v1/completions", {"prompt": "Hi", "stream": True}),
        ("/v1/embeddings", {"input": "Hi"}),
    ],
)
def test_a_route_that_needs_the_engine_is_503_while_it_is_away(path: str, body: dict[str, Any]) -> None:
    with inside() as running, running.client() as client:
        reply = client.post(path, json={"model": MODEL, **body})
    assert (reply.status_code, reply.headers["retry-after"]) == (503, "1")
    assert reply.headers["x-should-retry"] == "true"


@pytest.mark.parametrize(
    ("method", "path", "status", "code"),
    [
        ("GET", "/v1/nothing", 404, "not_found"),
        ("POST", "/v1/models", 405, "method_not_allowed"),
        ("GET", "/tokenize", 405, "method_not_allowed"),
        ("DELETE", "/v1/models/demo", 405, "method_not_allowed"),
        ("GET", "/v1/models/", 404, "model_not_found"),
        ("GET", "/v1/models/org/other", 404, "model_not_found"),
        ("GET", "/", 404, "not_found"),
        ("GET", "//v1/models", 404, "not_found"),
    ],
)
def test_what_is_not_there_has_openais_shape(alone: Inside, method: str, path: str, status: int, code: str) -> None:
    with alone.client() as client:
        reply = client.send(httpx.Request(method, f"{alone.url}{path}"))
    assert (reply.status_code, _error(reply)["code"]) == (status, code)
    assert ("allow" in reply.headers) == (status == 405)


@pytest.mark.parametrize(
    ("path", "meant"),
    [
        ("/chat/completions", "/v1/chat/completions"),
        ("/responses", "/v1/responses"),
        ("/v1/v1/messages", "/v1/messages"),
        ("/models/demo", None),
        ("/v1/chat", None),
    ],
)
def test_a_path_without_v1_or_with_two_says_which_one_is_meant(alone: Inside, path: str, meant: str | None) -> None:
    with alone.client() as client:
        reply = client.post(path, json={})
    assert reply.status_code == 404
    message = reply.json()["error"]["message"]
    hint = "base URLs of OpenAI's clients end with /v1, those of Anthropic's do not"
    assert message == f"there is no POST {path}" + (f"; {meant} is meant: {hint}" if meant else "")


def test_a_model_is_described_as_anthropics_clients_want_it() -> None:
    with inside(model_name="org/demo", model_aliases=("gpt-4o",)) as running, running.client() as client:
        listed = client.get("/v1/models?limit=1000").json()
        assert (listed["has_more"], listed["first_id"], listed["last_id"]) == (False, "org/demo", "gpt-4o")
        first, second = listed["data"]
        assert (first["type"], first["display_name"], second["display_name"]) == ("model", "org/demo", "gpt-4o")
        assert datetime.fromisoformat(first["created_at"]).timestamp() == first["created"]
        assert first["max_input_tokens"] == first["max_model_len"]


def test_models_lists_the_name_and_the_aliases() -> None:
    with inside(model_name="org/demo", model_aliases=("gpt-4o",)) as running, running.client() as client:
        listed = client.get("/v1/models").json()
        assert listed["object"] == "list"
        assert [model["id"] for model in listed["data"]] == ["org/demo", "gpt-4o"]
        assert client.get("/v1/models/org/demo").json() == listed["data"][0]
        assert client.get("/v1/models/gpt-4o").json() == listed["data"][1]
        assert client.head("/v1/models").status_code == 200


def test_tokenize_and_detokenize_are_each_others_inverse(alone: Inside) -> None:
    text = "In-flight batching, bit by bit: <|im_end|> naïve 🙂"
    with alone.client() as client:
        said = client.post("/tokenize", json={"prompt": text, "add_special_tokens": False}).json()
        assert said["count"] == len(said["tokens"])
        assert said["max_model_len"] == 2048
        assert said["token_strs"] is None
        assert client.post("/detokenize", json={"tokens": said["tokens"]}).json() == {"prompt": text}
        named = client.post("/tokenize", json={"prompt": "a<|im_end|>", "return_token_strs": True}).json()
        assert named["token_strs"][-1] == "<|im_end|>"


def test_tokenize_renders_messages(alone: Inside) -> None:
    messages = [{"role": "user", "content": "Hi"}]
    rendered = "<|im_start|>user\nHi<|im_end|>\n"
    with alone.client() as client:

        def tokens(**more: Any) -> list[int]:
            return list(client.post("/tokenize", json={"model": "demo", **more}).json()["tokens"])

        assert tokens(messages=messages, add_generation_prompt=False) == tokens(prompt=rendered)
        assert tokens(messages=messages) == tokens(prompt=f"{rendered}<|im_start|>assistant\n")


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": 3}, "prompt"),
        ("/tokenize", {"prompt": "a", "add_special_tokens": "yes"}, "add_special_tokens"),
        ("/tokenize", {"prompt": "a", "messages": []}, "prompt"),
        ("/tokenize", {"messages": []}, "messages"),
        ("/tokenize", {"messages": [{"role": "user"}]}, "messages[0].content"),
        ("/tokenize", {"messages": [MESSAGE], "chat_template_kwargs": {"x": 1}}, "chat_template_kwargs"),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": "1"}, "tokens"),
        ("/detokenize", {"tokens": [1, -1]}, "tokens[1]"),
        ("/detokenize", {"tokens": [4096]}, "tokens[0]"),
        ("/detokenize", {"tokens": [1, True]}, "tokens[1]"),
    ],
    ids=json.dumps,
)
def test_bad_fields_are_named(alone: Inside, path: str, body: dict[str, Any], param: str) -> None:
    with alone.client() as client:
        reply = client.post(path, json=body)
    assert (reply.status_code, _error(reply)["param"]) == (400, param)
    assert param.partition("[")[0] in _error(reply)["message"]


def test_unknown_fields_are_named_or_refused(alone: Inside) -> None:
    body = {"prompt": "a", "zeta": 1, "alpha": 2, "model": None, "other": None}
    with alone.client() as client:
        reply = client.post("/tokenize", json=body)
        assert (reply.status_code, reply.headers["x-ignored-fields"]) == (200, "zeta, alpha")
        assert 'inflight_gateway_ignored_fields_total{field="zeta"} 1.0' in client.get("/metrics").text
        assert client.post("/tokenize", json={"model": "other", "prompt": "a"}).status_code == 404
    with inside(strict_fields=True) as strict, strict.client() as client:
        reply = client.post("/tokenize", json=body)
        assert (reply.status_code, _error(reply)["param"]) == (400, "zeta")
        assert _error(reply)["code"] == "unknown_parameter"


def test_tokenizer_info_has_what_evaluation_harnesses_read(alone: Inside) -> None:
    with alone.client() as client:
        said = client.get("/tokenizer_info").json()
    assert said["eos_token"] == "<|im_end|>"
    assert "<|im_start|>assistant" in said["chat_template"]


def test_the_page_of_metrics_has_the_families_of_the_table() -> None:
    with inside() as running, running.client() as client:
        client.get("/v1/models/demo")
        client.get("/v1/models/other")
        client.get("/../secret/path")
        for names in (["x y"], [f"field{index}" for index in range(200)]):
            running.gateway.metrics.ignored_fields(names)
        page = client.get("/metrics").text
    families = {family.name: family for family in text_string_to_metric_families(page)}
    told = {name if family.type != "counter" else f"{name}_total" for name, family in families.items()}
    assert {family.name for family in GATEWAY} == {name for name in told if not name.endswith("_created")}
    for family in GATEWAY:
        found = families[family.name.removesuffix("_total")]
        assert found.documentation == family.help
        labels = {label for sample in found.samples for label in sample.labels} - {"le"}
        assert labels <= set(family.labels)
    samples = {sample.labels["field"] for sample in families["inflight_gateway_ignored_fields"].samples}
    assert len(samples) == 101, "clients choose the names: there is an end to them"
    assert 'requests_total{route="/v1/models/{id:path}",status="404"} 1.0' in page
    assert 'requests_total{route="other",status="404"} 1.0' in page


def test_metrics_are_not_served_where_they_are_off() -> None:
    with inside() as running:
        deployment = running.gateway.deployment
        off = deployment.observability.model_copy(update={"metrics": False})
        gateway = replace(running.gateway, deployment=deployment.model_copy(update={"observability": off}))
        paths = [getattr(route, "path", "") for route in make_app(gateway).routes]
    assert "/metrics" not in paths
    assert "/health" in paths


@pytest.mark.parametrize("given", ["abc-123", "a" * 128, "req_1.2:3/4+5=6@7"])
def test_a_request_id_comes_back(alone: Inside, given: str) -> None:
    with alone.client() as client:
        assert client.get("/v1/models", headers={"x-request-id": given}).headers["x-request-id"] == given
        mine = {client.get("/v1/models").headers["x-request-id"] for _ in range(3)}
    assert len(mine) == 3


@pytest.mark.parametrize("given", ["", "a" * 129, "a b", 'a"b', "é".encode()], ids=repr)
def test_a_request_id_that_could_forge_lines_is_refused(alone: Inside, given: str | bytes) -> None:
    with alone.client() as client:
        reply = client.get(
            "/v1/models", headers=[(b"x-request-id", given if isinstance(given, bytes) else given.encode())]
        )
    assert (reply.status_code, _error(reply)["param"]) == (400, "x-request-id")
    assert reply.headers["x-request-id"].startswith("req_")


def test_a_fault_of_ours_is_told_without_details(caplog: pytest.LogCaptureFixture) -> None:
    async def endpoint(_request: Any) -> Any:
        raise RuntimeError("secret detail")

    with inside(Served("GET", "/fault", endpoint)) as running, running.client() as client:
        reply = client.get("/fault")
        assert client.get("/v1/models").status_code == 200
    assert (reply.status_code, _error(reply)["code"]) == (500, "internal_error")
    assert "secret" not in reply.text
    assert "secret detail" in caplog.text


def test_counters_begin_at_zero() -> None:
    with inside() as running, running.client() as client:
        page = client.get("/metrics").text
    for series in (
        'resumed_total{outcome="repeated"}',
        'slow_clients_total{route="/v1/messages"}',
        'disconnects_total{route="other"}',
        'quality_answers_total{outcome="failed"}',
    ):
        assert f"inflight_gateway_{series} 0.0" in page
