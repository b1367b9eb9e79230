"""Who may pass the door: API keys, tokens, certificates, and how often."""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import json
import shutil
import socket
import ssl
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from tritonclient.grpc import service_pb2 as pb
from tritonclient.grpc.service_pb2_grpc import GRPCInferenceServiceStub

from inflight.errors import DeploymentError
from inflight.serve.door import DoorProcess, Upstreams
from inflight.settings.api_keys import Stamp, stamp_of
from tests.door.support.certificates import make_authority, make_certificate, openssl
from tests.door.support.doors import Answer, Door, deployment_with, door, read_answer
from tests.door.support.tokens import encoded, jwks, token
from tests.support.waiting import wait_until

KEY, OTHER = "sk-first", "sk-second"
KEPT = "goes on with what it has"
"""What the log says of a file that cannot be used."""


def as_bearer(text: str) -> str:
    return f"authorization: Bearer {text}"


def code_of(port: int, *metadata: tuple[str, str], credentials: grpc.ChannelCredentials | None = None) -> Any:
    """Return the status with which a call of gRPC ends."""
    url = f"127.0.0.1:{port}"
    with grpc.secure_channel(url, credentials) if credentials else grpc.insecure_channel(url) as channel:
        try:
            GRPCInferenceServiceStub(channel).ServerReady(pb.ServerReadyRequest(), metadata=metadata)
        except grpc.RpcError as error:
            return error.code()
    return grpc.StatusCode.OK


@pytest.fixture
def keyed(tmp_path: Path) -> Iterator[tuple[Door, Path]]:
    file = tmp_path / "keys"
    file.write_text(f"# of the tests\n{KEY}\n\n")
    with door(api_keys_file=file) as running:
        yield running, file


def test_every_route_but_liveness_and_readiness_asks_for_a_key(keyed: tuple[Door, Path]) -> None:
    running, _ = keyed
    assert [running.ask("GET", path).status for path in ("/live", "/ready", "/v2/health/ready")] == [200] * 3
    for path in ("/metrics", "/status", "/health", "/v1/models", "/v2"):
        assert running.ask("GET", path).status == 401
        assert running.ask("GET", path, as_bearer("sk-wrong")).status == 401
        assert running.ask("GET", path, as_bearer(KEY)).status == 200
    assert running.ask("GET", "/v1/models").json["error"]["type"] == "authentication_error"
    assert running.ask("GET", "/v1/models", f"x-api-key: {KEY}").status == 200
    assert code_of(running.port) == grpc.StatusCode.UNAUTHENTICATED
    assert code_of(running.port, ("authorization", f"Bearer {KEY}")) == grpc.StatusCode.OK


def test_the_key_stays_at_the_door_and_the_client_has_a_name(keyed: tuple[Door, Path]) -> None:
    running, _ = keyed
    running.ask("GET", "/v1/models", as_bearer(KEY), "x-inflight-client: somebody")
    headers = running.gateway.requests[-1]["headers"]
    assert headers["x-inflight-client"] == hashlib.sha256(KEY.encode()).hexdigest()[:16]
    assert KEY not in json.dumps(headers)


def test_a_browsers_question_before_a_request_needs_no_key(keyed: tuple[Door, Path]) -> None:
    running, _ = keyed
    asked = "origin: https://chat.example.org", "access-control-request-method: POST"
    assert running.ask("OPTIONS", "/v1/chat/completions", *asked).json["method"] == "OPTIONS"
    assert running.ask("OPTIONS", "/v1/chat/completions").status == 404


@pytest.mark.proof
def test_keys_are_read_again_and_a_broken_file_changes_nothing(
    keyed: tuple[Door, Path], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    running, file = keyed
    file.write_text(f"{OTHER}\n")
    assert wait_until(lambda: running.ask("GET", "/v2", as_bearer(OTHER)).status == 200)
    assert wait_until(lambda: running.ask("GET", "/v2", as_bearer(KEY)).status == 401)
    file.write_text("two words\n")
    assert wait_until(lambda: KEPT in caplog.text)
    assert running.ask("GET", "/v2", as_bearer(OTHER)).status == 200
    looks: list[Path] = []

    def look(path: Path) -> Stamp:
        looks.append(path)
        return stamp_of(path)

    file.unlink()
    monkeypatch.setattr("inflight.serve.door.stamp_of", look)
    assert wait_until(lambda: len(looks) > 1)  # the first look has ended
    assert running.ask("GET", "/v2", as_bearer(OTHER)).status == 200
    file.write_text(f"{KEY}\n")
    assert wait_until(lambda: running.ask("GET", "/v2", as_bearer(KEY)).status == 200)


@pytest.mark.parametrize(
    "headers",
    [
        (f"authorization: bearer {KEY}",),
        (f"authorization: BEARER   {KEY} ",),
        (as_bearer("sk-wrong"), f"x-api-key: {KEY}"),
        ("authorization: Basic c2s6", f"x-api-key: {KEY}"),
        (as_bearer(KEY), "x-api-key: sk-wrong"),
    ],
    ids=str,
)
def test_a_key_in_either_header_will_do(keyed: tuple[Door, Path], headers: tuple[str, ...]) -> None:
    running, _ = keyed
    assert running.ask("GET", "/v1/models", *headers).status == 200
    assert KEY not in json.dumps(running.gateway.requests[-1]["headers"])


@pytest.mark.parametrize(
    "header", [f"authorization: {KEY}", f"authorization: Bearer{KEY}", as_bearer(f"{KEY} {KEY}"), "x-api-key: "]
)
def test_what_is_no_key_is_refused(keyed: tuple[Door, Path], header: str) -> None:
    running, _ = keyed
    answer = running.ask("GET", "/v1/models", header)
    assert (answer.status, answer.headers["www-authenticate"]) == (401, "Bearer")


@pytest.mark.parametrize("key", ['sk-"quoted"', "sk-\\back", "sk-]]", "sk-%d", "sk-\\u0041"])
def test_keys_may_have_any_printable_characters(tmp_path: Path, key: str) -> None:
    (tmp_path / "keys").write_text(f"{key}\n")
    with door(api_keys_file=tmp_path / "keys") as running:
        assert running.ask("GET", "/v1/models", as_bearer(key)).status == 200
        assert running.ask("GET", "/v1/models", as_bearer("sk-A")).status == 401


@pytest.fixture(scope="module")
def by_token(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Door]:
    file = tmp_path_factory.mktemp("jwt") / "jwks"
    file.write_text(jwks(SECRET))
    with door(jwt={"jwks_file": file}) as running:
        yield running


SECRET, LATER = b"0123456789abcdef0123456789abcdef", 3600


@pytest.mark.parametrize(
    ("claims", "named"),
    [
        ({"sub": "anna"}, "anna"),
        ({"sub": "auth0|anna@example.org"}, "auth0|anna@example.org"),
        ({"sub": "anna\r\nx-inflight-client: berta"}, "anna%0D%0Ax-inflight-client:%20berta"),
        ({"sub": 'ä"%\\\0'}, "%C3%A4%22%25%5C%00"),
        ({"sub": "127.0.0.1"}, "%3127.0.0.1"),
        ({"sub": "fe80::7"}, "%66e80::7"),
        ({"sub": "0123456789abcdef"}, "%30123456789abcdef"),
        ({"sub": "ab" * 32}, "%61b" + "ab" * 31),
        ({"sub": "123456789"}, "123456789"),
        ({"sub": "g" * 4096}, "g" * 4096),
        ({"sub": ""}, "127.0.0.1"),
        ({}, "127.0.0.1"),
        ({"sub": "anna", "nbf": 1.5, "iat": 1.25}, "anna"),
    ],
    ids=lambda one: str(one)[:40],
)
def test_a_token_names_its_client(by_token: Door, claims: dict[str, Any], named: str) -> None:
    given = token(SECRET, **claims, exp=time.time() + LATER)  # a time may have a fraction (RFC 7519, 2)
    for scheme in ("Bearer", "bearer"):
        assert by_token.ask("GET", "/v1/models", f"authorization: {scheme} {given}").status == 200
        assert by_token.gateway.requests[-1]["headers"]["x-inflight-client"] == named


@pytest.mark.parametrize(("name", "length"), [("g" * 20_000, 20_000), ("ä" * 2000, 12_000)], ids=["ascii", "beyond"])
def test_a_name_that_no_header_carries_is_refused(by_token: Door, name: str, length: int) -> None:
    given = as_bearer(token(SECRET, sub=name, exp=time.time() + LATER))
    said = f"the token's sub has {length} characters, encoded; the most is 4096"
    assert by_token.ask("GET", "/v1/models", given).json["error"]["message"] == said
    assert by_token.ask("POST", "/v2/models/ensemble/generate", given).json["error"] == said
    assert code_of(by_token.port, ("authorization", given.partition(": ")[2])) == grpc.StatusCode.INVALID_ARGUMENT


@pytest.mark.parametrize("name", ["crit", "cr\\u0069t"])
def test_a_token_with_extensions_that_must_be_known_is_refused(by_token: Door, name: str) -> None:
    """RFC 7515, 4.1.11."""
    exp = int(time.time()) + LATER
    head = f'{{"alg": "HS256", "kid": "1", "{name}" : ["b64"], "b64": false}}'
    signed = f"{encoded(head.encode())}.{encoded(json.dumps({'sub': 'anna', 'exp': exp}).encode())}"
    given = f"{signed}.{encoded(hmac.digest(SECRET, signed.encode(), 'sha256'))}"
    assert by_token.ask("GET", "/v1/models", as_bearer(given)).status == 401
    assert by_token.ask("GET", "/ready", as_bearer(given)).status == 200
    known = token(SECRET, {"typ": "critical", "x": "crit"}, sub="anna", exp=exp)
    assert by_token.ask("GET", "/v1/models", as_bearer(known)).status == 200


@pytest.mark.parametrize(
    ("body", "passed"),
    [
        (b'{"text_input": "a"}', b'{"x-inflight-client":"anna","text_input": "a"}'),
        (b" \n{ }", b' \n{"x-inflight-client":"anna" }'),
        (b'{"x-inflight-client":"berta","a":1}', b'{"x-inflight-client":"anna","a":1}'),
        (b'{"x-inflight-client":"berta"}', b'{"x-inflight-client":"anna"}'),
        (
            b'{"text_input":"is \\"x-inflight-client\\": a header?"}',
            b'{"x-inflight-client":"anna","text_input":"is \\"x-inflight-client\\": a header?"}',
        ),
        (b"", b""),
    ],
)
def test_the_name_is_first_in_a_body_of_generate(by_token: Door, body: bytes, passed: bytes) -> None:
    given = as_bearer(token(SECRET, sub="anna", exp=time.time() + LATER))
    for call in ("generate", "generate_stream"):
        assert by_token.ask("POST", f"/v2/models/ensemble/{call}", given, body=body).status == 200
        assert by_token.http.requests[-1]["body"].encode() == passed
        assert by_token.http.requests[-1]["body_bytes"] == len(passed)
    assert by_token.ask("POST", "/v1/completions", given, body=body).status == 200
    assert by_token.gateway.requests[-1]["body"].encode() == body


@pytest.mark.parametrize(
    "body",
    [
        b"[1]",
        b'\xef\xbb\xbf{"x-inflight-client":"berta"}',
        b'{"a":1,"parameters":{"x-inflight-client":"berta"}}',
        b'{"parameters":{"b":{},"\\u0078-inflight\\u002dclient" : "berta"}}',
        b'{"x-inflight-client":"berta","x-inflight-client":"berta"}',
        b'{"a":1,"x-inflight-client":5}',
    ],
)
def test_a_body_of_generate_names_nobody(by_token: Door, body: bytes) -> None:
    given = as_bearer(token(SECRET, sub="anna", exp=time.time() + LATER))
    before = len(by_token.http.requests)
    for call in ("generate", "generate_stream"):
        answer = by_token.ask("POST", f"/v2/models/ensemble/{call}", given, body=body)
        assert answer.status == 400
        assert answer.json["error"].startswith("INVALID_ARGUMENT: ")
    assert len(by_token.http.requests) == before


def signed_by(key: Path, **claims: Any) -> str:
    """Return a token signed by RS256, with the private key in a file."""
    signed = ".".join(encoded(json.dumps(part).encode()) for part in ({"alg": "RS256", "kid": "1"}, claims))
    data = key.with_suffix(".signed")
    data.write_text(signed)
    return f"{signed}.{encoded(openssl(key.parent, 'dgst', '-sha256', '-sign', key.name, data.name))}"


def public_jwks(key: Path) -> str:
    """Return the set of keys that an issuer publishes for its private RSA key."""
    modulus = openssl(key.parent, "rsa", "-in", key.name, "-noout", "-modulus").decode().strip().partition("=")[2]
    numbers = {"n": encoded(bytes.fromhex(modulus)), "e": encoded((65537).to_bytes(3))}
    return json.dumps({"keys": [{"kty": "RSA", "alg": "RS256", "kid": "1", "use": "sig", **numbers}]})


@pytest.mark.proof
def test_tokens_are_held_against_an_issuers_public_keys(tmp_path: Path) -> None:
    keys = [tmp_path / f"{name}.pem" for name in ("issuer", "other")]
    for key in keys:
        openssl(tmp_path, "genrsa", "-out", key.name, "2048")
    file = tmp_path / "jwks.json"
    file.write_text(public_jwks(keys[0]))
    claims: dict[str, Any] = {"sub": "anna", "exp": int(time.time()) + 3600}
    with door(jwt={"jwks_file": file}) as running:
        good, forged = (as_bearer(signed_by(key, **claims)) for key in keys)
        assert running.ask("GET", "/v1/models", good).status == 200
        assert running.ask("GET", "/v1/models", forged).status == 401
        by_secret = as_bearer(token(public_jwks(keys[0]).encode(), **claims))  # the public key taken for a secret
        assert running.ask("GET", "/v1/models", by_secret).status == 401


def test_tokens_are_held_against_the_issuers_keys(tmp_path: Path) -> None:
    file = tmp_path / "jwks.json"
    first, second = b"a" * 32, b"b" * 32
    file.write_text(jwks(first))
    claims: dict[str, Any] = {"iss": "https://id.example.org", "aud": "inflight", "sub": "anna"}
    soon = {"exp": int(time.time()) + 3600}
    rules = {"jwks_file": file, "issuer": "https://id.example.org", "audiences": ("inflight",)}
    with door(jwt=rules, rate_limit={"requests": 1, "interval_s": 3600, "burst": 3}) as running:

        def status(*headers: str) -> int:
            return running.ask("GET", "/v1/models", *headers).status

        assert status() == 401
        assert status(as_bearer(token(second, **claims, **soon))) == 401
        assert status(as_bearer(token(first, **claims, exp=1))) == 401
        assert status(as_bearer(token(first, **claims))) == 401
        assert status(as_bearer(token(first, **(claims | {"aud": "other"}), **soon))) == 403
        assert status(as_bearer(token(first, **(claims | {"iss": "other"}), **soon))) == 401
        good = as_bearer(token(first, **claims, **soon))
        assert status(good, "x-inflight-client: berta") == 200
        headers = running.gateway.requests[-1]["headers"]
        assert (headers["x-inflight-client"], "authorization" in headers) == ("anna", False)
        nameless = as_bearer(token(first, **{name: claims[name] for name in ("iss", "aud")}, **soon))
        assert [status(nameless) for _ in range(4)] == [200, 200, 200, 429]
        assert running.gateway.requests[-1]["headers"]["x-inflight-client"] == "127.0.0.1"
        assert running.ask("GET", "/ready").status == 200
        assert [status(good), status(good), status(good)] == [200, 200, 429]
        assert status(as_bearer(token(first, **(claims | {"sub": "carl"}), **soon))) == 200
        file.write_text(jwks(second))
        assert wait_until(lambda: status(as_bearer(token(second, **(claims | {"sub": "dora"}), **soon))) != 401)
        assert status(good) == 401


def test_a_client_gets_its_share_of_requests(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text(f"{KEY}\n{OTHER}\n")
    with door(api_keys_file=file, rate_limit={"requests": 2, "interval_s": 3600}) as running:
        answers = [running.ask("GET", "/v2", as_bearer(KEY)) for _ in range(3)]
        assert [answer.status for answer in answers] == [200, 200, 429]
        assert int(answers[-1].headers["retry-after"]) > 0
        assert code_of(running.port, ("authorization", f"Bearer {KEY}")) == grpc.StatusCode.RESOURCE_EXHAUSTED
        assert running.ask("GET", "/v2", as_bearer(OTHER)).status == 200
        assert running.ask("GET", "/ready").status == 200
        assert "inflight_door_rate_limited_total 2" in running.process.metrics()


def ask_by_tls(port: int, authority: Path, certificate: tuple[Path, Path] | None = None) -> Answer:
    """Ask for the list of models."""
    context = ssl.create_default_context(cafile=str(authority))
    if certificate is not None:
        context.load_cert_chain(*certificate)
    with (
        socket.create_connection(("127.0.0.1", port), 30) as connection,
        context.wrap_socket(connection, server_hostname="127.0.0.1") as wrapped,
    ):
        wrapped.sendall(b"GET /v1/models HTTP/1.1\r\nhost: door\r\nconnection: close\r\n\r\n")
        return read_answer(wrapped)


def test_tls_serves_both_versions_and_new_certificates(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    authority, other = make_authority(tmp_path / "first"), make_authority(tmp_path / "second")
    certificate, key = make_certificate(authority, "server")
    with door(tls={"certificate": certificate, "private_key": key}) as running:
        assert ask_by_tls(running.port, authority).status == 200
        trusted = grpc.ssl_channel_credentials(authority.read_bytes())
        assert code_of(running.ports[1], credentials=trusted) == grpc.StatusCode.OK
        assert running.ask("GET", "/v1/models").status == 0
        key.write_text("not a key")
        assert wait_until(lambda: KEPT in caplog.text)
        assert ask_by_tls(running.port, authority).status == 200
        for new, old in zip(make_certificate(other, "server"), (certificate, key), strict=True):
            shutil.move(new, old)

        def served_by_the_other() -> bool:
            try:
                return ask_by_tls(running.port, other).status == 200
            except ssl.SSLError:
                return False

        assert wait_until(served_by_the_other)


def test_mutual_tls_asks_for_a_clients_certificate(tmp_path: Path) -> None:
    authority, stranger = make_authority(tmp_path / "ours"), make_authority(tmp_path / "theirs")
    certificate, key = make_certificate(authority, "server")
    authority.write_text(f"# Főtanúsítvány\n{authority.read_text()}")  # such comments are in lists of authorities
    tls = {"certificate": certificate, "private_key": key, "client_ca": authority}
    with door(tls=tls, rate_limit={"requests": 2, "interval_s": 3600}) as running:
        for refused in (None, make_certificate(stranger, "client")):
            with contextlib.suppress(ssl.SSLError, ConnectionError):
                assert ask_by_tls(running.port, authority, refused).status == 0
        known, another = make_certificate(authority, "anna"), make_certificate(authority, "berta")
        assert [ask_by_tls(running.port, authority, known).status for _ in range(3)] == [200, 200, 429]
        assert ask_by_tls(running.port, authority, another).status == 200
        names = [one["headers"]["x-inflight-client"] for one in running.gateway.requests]
        assert len(set(names)) == 2
        assert all(len(name) == 64 for name in names)  # fingerprints


@pytest.mark.parametrize(
    ("content", "settings", "message"),
    [
        (None, {"api_keys_file": "f"}, "door.api_keys_file: .* cannot be read"),
        ("\n", {"api_keys_file": "f"}, "door.api_keys_file: .* has no key"),
        ("{}", {"jwt": {"jwks_file": "f"}}, "door.jwt.jwks_file: .* is not a set of keys"),
        ("[", {"jwt": {"jwks_file": "f"}}, "door.jwt.jwks_file: .* is not a set of keys"),
        pytest.param(5000 * "[", {"jwt": {"jwks_file": "f"}}, "door.jwt.jwks_file: .* is not a set of keys", id="deep"),
        ("x", {"tls": {"certificate": "f", "private_key": "f"}}, "door.tls: .* are not a certificate and its key"),
        (None, {"tls": {"certificate": "f", "private_key": "f"}}, "door.tls.certificate: .* cannot be read"),
    ],
)
def test_files_that_cannot_be_used_stop_the_start(
    tmp_path: Path, content: str | None, settings: dict[str, Any], message: str
) -> None:
    file = tmp_path / "f"
    if content is not None:
        file.write_text(content)
    deployment = deployment_with(**settings)
    located = deployment.model_copy(update={"door": deployment.door.located(lambda path: tmp_path / path)})
    with pytest.raises(DeploymentError, match=message):
        DoorProcess(located, Upstreams("127.0.0.1:1", "127.0.0.1:2", None, None)).check()
