"""API keys and CORS: who may send requests, and what a browser is told."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from inflight.errors import DeploymentError
from inflight.gateway import keys as keys_module
from inflight.gateway.engine_client import encode
from inflight.gateway.keys import ApiKeys
from inflight.settings.api_keys import LARGEST_FILE, client_of
from tests.gateway.support.gateways import Inside, inside
from tests.gateway.support.scripted import scripted

ORIGIN = "https://chat.example.org"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "keys"
    path.write_text("# those of the team\nsk-first\n\n  sk-second  \n")
    return path


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 401),
        ({"authorization": "Bearer sk-first"}, 200),
        ({"authorization": "bearer sk-second"}, 200),
        ({"x-api-key": "sk-first"}, 200),
        ({"x-api-key": "sk-first", "authorization": "Bearer no"}, 200),
        ({"authorization": "Bearer sk-firs"}, 401),
        ({"authorization": "Bearer sk-firstx"}, 401),
        ({"authorization": "Bearer"}, 401),
        ({"authorization": "Basic sk-first"}, 401),
        ({"authorization": "sk-first"}, 401),
        ({"x-api-key": "# those of the team"}, 401),
        ({"x-api-key": ""}, 401),
    ],
    ids=str,
)
def test_keys_are_asked_for(file: Path, headers: dict[str, str], status: int) -> None:
    with inside(api_keys_file=str(file)) as running, running.client() as client:
        reply = client.get("/v1/models", headers=headers)
    assert reply.status_code == status
    if status == 401:
        assert reply.json()["error"]["code"] == "invalid_api_key"
        assert reply.json()["error"]["type"] == "authentication_error"
        assert reply.headers["www-authenticate"] == "Bearer"


def test_every_route_but_the_health_needs_one(file: Path) -> None:
    with inside(api_keys_file=str(file)) as running, running.client() as client:
        paths = [route.path for route in running.server.config.app.routes]  # type: ignore[union-attr]
        refused = {path for path in [*paths, "/nothing"] if client.request("POST", path).status_code == 401}
    assert refused == {*paths, "/nothing"} - {"/health"}
    assert len(refused) > 5


def test_a_file_that_changes_is_read_again(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keys_module, "LOOK_S", 0.0)
    keys = ApiKeys(file)
    first = keys.client_of("sk-first")
    assert first
    assert first != keys.client_of("sk-second")
    file.write_text("sk-third\n")
    assert keys.client_of("sk-first") is None
    assert keys.client_of("sk-third")
    file.write_text("")
    assert keys.client_of("sk-third"), "what cannot be used leaves the keys as they were"
    assert keys.client_of("") is None
    file.unlink()
    assert keys.client_of("sk-third")
    other = file.with_name("other")
    other.write_text("sk-fourth\n")
    os.replace(other, file)
    assert keys.client_of("sk-third") is None
    assert keys.client_of("sk-fourth")


def test_a_broken_file_is_told_once(
    file: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It is looked at each second, which would fill the log."""
    monkeypatch.setattr(keys_module, "LOOK_S", 0.0)
    keys = ApiKeys(file)
    for content in ("", "", "sk-third\n", ""):
        file.write_text(content)
        for _ in range(5):
            assert keys.client_of("") is None
    said = [record.getMessage() for record in caplog.records if record.levelname == "ERROR"]
    assert len(said) == 2
    assert all("has no key" in line and "stay as they were" in line for line in said)


def test_the_file_is_looked_at_now_and_then(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keys_module, "LOOK_S", 3600)
    keys = ApiKeys(file)
    file.write_text("sk-third\n")
    assert keys.client_of("sk-first"), "it has been looked at just now"
    monkeypatch.setattr(keys_module, "LOOK_S", 0)
    assert keys.client_of("sk-first") is None


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "has no key"),
        (b"# none\n", "has no key"),
        (b"a b\n", "a key with a space"),
        ("schlüssel\n".encode(), "is not ASCII"),
        (b"a" * (LARGEST_FILE + 1), "more than 1048576 bytes"),
        (None, "cannot be read: No such file"),
    ],
)
def test_a_file_without_usable_keys_stops_the_start(tmp_path: Path, content: bytes | None, said: str) -> None:
    path = tmp_path / "keys"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(DeploymentError, match=said):
        ApiKeys(path)


def test_without_origins_there_are_no_headers_of_cors(alone: Inside) -> None:
    with alone.client() as client:
        asked = client.get("/v1/models", headers={"origin": ORIGIN})
        preflight = {"origin": ORIGIN, "access-control-request-method": "POST"}
        refused = client.options("/v1/models", headers=preflight)
    assert not [name for name in [*asked.headers, *refused.headers] if name.startswith("access-control")]
    assert refused.status_code == 405


def test_listed_origins_may_read_answers_and_errors(file: Path) -> None:
    with inside(cors_origins=(ORIGIN,), api_keys_file=str(file)) as running, running.client() as client:
        preflight = {
            "origin": ORIGIN,
            "access-control-request-method": "POST",
            "access-control-request-headers": "authorization, x-stainless-os",
        }
        allowed = client.options("/tokenize", headers=preflight)
        assert allowed.status_code == 204
        assert allowed.headers["access-control-allow-origin"] == ORIGIN
        assert "POST" in allowed.headers["access-control-allow-methods"]
        assert allowed.headers["access-control-allow-headers"] == "authorization, x-stainless-os"
        refused = client.get("/v1/models", headers={"origin": ORIGIN})
        assert (refused.status_code, refused.headers["access-control-allow-origin"]) == (401, ORIGIN)
        assert "x-request-id" in refused.headers["access-control-expose-headers"]
        assert "origin" in refused.headers["vary"].lower()


@pytest.mark.parametrize("origin", ["https://evil.example", "null", "https://chat.example.org.evil", ""])
def test_other_origins_are_told_nothing(origin: str) -> None:
    with inside(cors_origins=(ORIGIN,)) as running, running.client() as client:
        preflight = {"origin": origin, "access-control-request-method": "POST"}
        assert client.options("/tokenize", headers=preflight).status_code == 403
        asked = client.get("/v1/models", headers={"origin": origin})
    assert not [name for name in asked.headers if name.startswith("access-control")]


def test_a_star_allows_all_origins_and_never_credentials() -> None:
    with inside(cors_origins=("*",)) as running, running.client() as client:
        asked = client.get("/v1/models", headers={"origin": "https://any.example"})
    assert asked.headers["access-control-allow-origin"] == "https://any.example"
    assert "access-control-allow-credentials" not in asked.headers


@pytest.mark.parametrize(
    ("behind", "keys", "asking"),
    [
        (True, False, ("anna", "")),
        (True, True, ("anna", "")),
        (False, True, (client_of("sk-first"), "")),
        (False, False, ("", "invented")),
    ],
)
def test_the_body_names_the_client_where_nobody_vouches_for_it(
    file: Path, behind: bool, keys: bool, asking: tuple[str, str]
) -> None:
    sections = {"door": {"enabled": behind}, "batching": {"fairness": "client"}}
    body = {"model": "demo", "messages": [{"role": "user", "content": "Hi"}], "user": "invented"}
    with scripted(sections=sections, api_keys_file=str(file) if keys else None) as (running, script):
        script.text = "Hello"
        headers = {"authorization": "Bearer sk-first", "x-inflight-client": "anna"}
        with running.client(headers=headers) as client:
            assert client.post("/v1/chat/completions", json=body).status_code == 200
    assert script.request is not None
    assert (script.request.client, script.request.client_id) == asking
    parameters = encode(script.request, "tensorrt_llm").parameters
    assert parameters["x-inflight-client"].string_param == asking[0]
