"""Holds that behind the door the client is who the door says, on every port, whatever names a request invents."""

from __future__ import annotations

import asyncio
import http.client
import json
import re
import ssl
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

import grpc
import numpy as np
import pytest
from tritonclient.grpc import service_pb2 as pb
from tritonclient.grpc.service_pb2_grpc import GRPCInferenceServiceStub

from inflight.contract import CLIENT
from inflight.settings.api_keys import client_of
from tests.door.support.certificates import make_authority, make_certificate
from tests.door.support.tokens import jwks, token
from tests.support.waiting import wait_until
from tests.triton.support.servers import on_engine, serve_command

pytestmark = pytest.mark.proof
pytest.importorskip("envoy", reason="the door is Envoy, of the extra `door`")
TOKENS, SHARE = 200, 12
"""Tokens of an answer, and how many answers the second tenant asks for."""
CLOCK_S = 0.02
"""Seconds by which times that are made of log lines may be off."""


@dataclass
class Tenant:
    """One whom the door knows, by headers or by a certificate."""

    headers: dict[str, str] = field(default_factory=dict)
    context: ssl.SSLContext | None = None
    credentials: grpc.ChannelCredentials | None = None


@dataclass
class Served:
    """A deployment behind its door, with two tenants; the first one's name is known."""

    ports: list[int]
    tenants: tuple[Tenant, Tenant]
    said: Path

    def post(self, tenant: Tenant, path: str, **body: Any) -> tuple[int, dict[str, Any]]:
        made = {} if tenant.context is None else {"context": tenant.context}
        kind = http.client.HTTPSConnection if made else http.client.HTTPConnection
        connection = kind("127.0.0.1", self.ports[0], timeout=300, **made)
        try:
            connection.request("POST", path, json.dumps(body), {"content-type": "application/json"} | tenant.headers)
            response = connection.getresponse()
            return response.status, json.loads(response.read())
        finally:
            connection.close()

    def log(self, part: str) -> str:
        """Return the log of a part, once it is ready."""
        [path] = re.findall(rf"{part} +(?:\S+, log )?(/\S+)\n", self.said.read_text())
        return Path(path).read_text()


def completion(served: Served, tenant: Tenant, name: str) -> str:
    """Ask OpenAI's API; return what is wrong with the answer, if anything is."""
    named = {"user": name} if name else {}
    body = {"model": "demo", "prompt": "Tell a story", "max_tokens": TOKENS, "ignore_eos": True}
    status, answer = served.post(tenant, "/v1/completions", **body, **named)
    return "" if status == 200 else str(answer)


def generated(served: Served, tenant: Tenant, name: str) -> str:
    """Ask Triton over HTTP."""
    named = {"client_id": name} if name else {}
    body = {"text_input": "Tell a story", "max_tokens": TOKENS, "ignore_eos": True}
    status, answer = served.post(tenant, "/v2/models/ensemble/generate", **body, **named)
    return "" if status == 200 else str(answer)


def message(name: str = "", **parameters: str) -> pb.ModelInferRequest:
    """Return a request for Triton over gRPC."""
    asked = pb.ModelInferRequest(model_name="ensemble")
    texts = {"text_input": b"Tell a story"} | ({"client_id": name.encode()} if name else {})
    for tensor, text in texts.items():
        asked.inputs.add(name=tensor, datatype="BYTES", shape=[1, 1])
        asked.raw_input_contents.append(len(text).to_bytes(4, "little") + text)
    for tensor, value in {"max_tokens": np.int32(TOKENS), "ignore_eos": np.bool_(True)}.items():
        asked.inputs.add(name=tensor, datatype="INT32" if tensor == "max_tokens" else "BOOL", shape=[1, 1])
        asked.raw_input_contents.append(value.tobytes())
    for parameter, text in parameters.items():
        asked.parameters[parameter].string_param = text
    return asked


def streamed(served: Served, tenant: Tenant, name: str, asked: pb.ModelInferRequest | None = None) -> str:
    """Ask Triton over gRPC."""
    where = f"127.0.0.1:{served.ports[1]}"
    made = grpc.secure_channel(where, tenant.credentials) if tenant.credentials else grpc.insecure_channel(where)
    with made as channel:
        stub, headers = GRPCInferenceServiceStub(channel), tuple(tenant.headers.items())
        answers = stub.ModelStreamInfer(iter([asked or message(name)]), metadata=headers)
        return "".join(answer.error_message for answer in answers)


@contextmanager
def serving(directory: Path, tenants: tuple[Tenant, Tenant], decoupled: bool = True, **door: Any) -> Iterator[Served]:
    """Run `inflight serve` with a door, where clients take turns one after the other."""
    batching = {"max_batch_size": 1, "fairness": "client", "mode": "inflight"}
    settings = {"batching": batching, "observability": {"log_requests": "info"}, "decoupled": decoupled}
    on_engine("pytorch", directory, door={"enabled": True} | door, **settings)
    said = directory / "said"
    with serve_command(directory, said) as ports:
        yield Served(ports, tenants, said)


async def flooded(served: Served) -> None:
    """Have the first tenant ask for four times as much as the second one, each time under a name that it invents.

    Both ask over every protocol; the second one begins when the first answer has come.
    """
    ways, (first, second) = (completion, generated, streamed), served.tenants

    async def ask(way: Any, tenant: Tenant, name: str) -> None:
        assert await asyncio.to_thread(way, served, tenant, name) == ""

    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(5 * SHARE))
    flood = [asyncio.create_task(ask(ways[index % 3], first, f"name {index}")) for index in range(4 * SHARE)]
    await asyncio.wait(flood, return_when=asyncio.FIRST_COMPLETED)
    await asyncio.gather(*flood, *(ask(ways[index % 3], second, "") for index in range(SHARE)))


def by_keys(directory: Path) -> tuple[tuple[Tenant, Tenant], dict[str, Any]]:
    (directory / "keys").write_text("sk-first\nsk-second\n")
    first, second = (Tenant({"authorization": f"Bearer {key}"}) for key in ("sk-first", "sk-second"))
    return (first, second), {"api_keys_file": "keys"}


def by_tokens(directory: Path) -> tuple[tuple[Tenant, Tenant], dict[str, Any]]:
    secret, exp = b"0" * 32, int(time.time()) + 3600
    (directory / "jwks").write_text(jwks(secret))
    first, second = (
        Tenant({"authorization": f"Bearer {token(secret, sub=name, exp=exp)}"}) for name in ("anna", "berta")
    )
    return (first, second), {"jwt": {"jwks_file": "jwks"}}


def by_certificates(directory: Path) -> tuple[tuple[Tenant, Tenant], dict[str, Any]]:
    authority = make_authority(directory / "ca")
    certificate, key = make_certificate(authority, "server")

    def tenant(name: str) -> Tenant:
        own, secret = make_certificate(authority, name)
        context = ssl.create_default_context(cafile=str(authority))
        context.load_cert_chain(own, secret)
        texts = authority.read_bytes(), secret.read_bytes(), own.read_bytes()
        return Tenant(context=context, credentials=grpc.ssl_channel_credentials(*texts))

    files = {"certificate": certificate, "private_key": key, "client_ca": authority}
    return (tenant("anna"), tenant("berta")), {"tls": {name: str(file) for name, file in files.items()}}


@pytest.mark.parametrize("known", [by_keys, by_tokens, by_certificates])
def test_two_tenants_take_turns_whatever_names_one_invents(tmp_path: Path, known: Any) -> None:
    """Exact shares are the queue's own test; here only turns count that began while the second tenant waited."""
    tenants, door = known(tmp_path)
    with serving(tmp_path, tenants, **door) as served:
        asyncio.run(flooded(served))
        assert wait_until(lambda: len(finished(served)) == 5 * SHARE)
        turns = finished(served)
    counts = Counter(turn.client for turn in turns)
    (first, _), (_, number) = counts.most_common()
    assert number == SHARE
    waits = [(turn.asked_s, turn.began_s) for turn in turns if turn.client != first]
    before = [
        turn
        for turn in turns
        if turn.client == first and any(asked + CLOCK_S < turn.began_s < began - CLOCK_S for asked, began in waits)
    ]
    assert len(before) <= 2 * SHARE, "one before each of the second tenant's, and one more when it comes back"


class Turn(NamedTuple):
    """A request that has ended: whose it was, and when it came and began, in seconds."""

    client: str
    asked_s: float
    began_s: float


def finished(served: Served) -> list[Turn]:
    """Return the requests that have ended, in order, as the engine's stage has logged them."""
    form = r"^(\S+ \S+) .*request finished .*client=(\S+) .*queue_ms=(\S+) .*total_ms=(\S+)"
    turns = []
    for at, client, queue_ms, total_ms in re.findall(form, served.log("\n  log"), re.M):
        asked = datetime.strptime(at, "%Y-%m-%d %H:%M:%S,%f").timestamp() - float(total_ms) / 1000
        turns.append(Turn(client, asked, asked + float(queue_ms) / 1000))
    return turns


def infer(served: Served, tenant: Tenant, asked: pb.ModelInferRequest) -> str:
    """Ask Triton over HTTP by its own protocol; return what is wrong with the answer, if anything is."""
    values = {"BYTES": lambda raw: raw[4:].decode(), "INT32": lambda raw: int.from_bytes(raw, "little"), "BOOL": any}
    inputs = [
        {"name": one.name, "shape": [1, 1], "datatype": one.datatype, "data": [values[one.datatype](raw)]}
        for one, raw in zip(asked.inputs, asked.raw_input_contents, strict=True)
    ]
    parameters = {name: value.string_param for name, value in asked.parameters.items()}
    status, answer = served.post(tenant, "/v2/models/ensemble/infer", inputs=inputs, parameters=parameters)
    return "" if status == 200 else str(answer)


@pytest.mark.parametrize("decoupled", [True, False])
def test_nobody_but_the_door_names_the_client(tmp_path: Path, decoupled: bool) -> None:
    """Neither a header nor a parameter of a body or a message does."""
    tenants, door = by_keys(tmp_path)
    first, name, other = tenants[0], *map(client_of, ("sk-first", "sk-second"))
    forger = Tenant(first.headers | {CLIENT: other})
    fields = {"text_input": "Hi", "max_tokens": 4}
    with serving(tmp_path, tenants, decoupled, **door) as served:
        assert [way(served, forger, "") for way in (completion, generated, streamed)] == ["", "", ""]
        for body in (fields | {CLIENT: other}, fields | {"parameters": {CLIENT: other}}):
            assert served.post(first, "/v2/models/ensemble/generate", **body)[0] == 400
        assert streamed(served, first, "", message(**{CLIENT: other})) == ""
        if not decoupled:
            assert infer(served, forger, message(**{CLIENT: other})) == ""
        stages, own = served.log("\n  log"), f"client={name}"
        assert (stages.count(own), stages.count(other)) == (4 if decoupled else 5, 0)
        assert served.log("OpenAI").count(own) == 1
