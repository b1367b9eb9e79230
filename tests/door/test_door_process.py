"""The door as a process: it starts, starts again and ends; what it writes down; and what Envoy says of it all."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import stat
import subprocess
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from inflight.errors import DeploymentError
from inflight.serve import log as log_module
from inflight.serve.door import DoorProcess, Upstreams, envoy_path
from inflight.serve.envoy.bootstrap import bootstrap, discovered, routes
from inflight.serve.envoy.conflicts import check_settings
from inflight.serve.envoy.files import ADMIN_SOCKET, named_files, write, write_configuration
from inflight.serve.envoy.values import KEYS, ROUTES, typed
from inflight.settings.deployment import validate
from tests.door.support.doors import Recorder, Relay, deployment_with, door
from tests.support.waiting import wait_until

ONE = Upstreams("127.0.0.1:1", "127.0.0.1:2", "127.0.0.1:3", "127.0.0.1:4")

TWO = [Upstreams("10.0.0.1:1", "10.0.0.1:2", "10.0.0.1:3", None), Upstreams("localhost:5", "[::1]:6", "h:7", None)]


def test_a_door_that_is_killed_starts_again() -> None:
    with door() as running:
        first = running.process.process.pid
        os.kill(first, signal.SIGKILL)
        assert wait_until(lambda: running.process.restarts == 1 and running.process.process.pid != first)

        def serves() -> bool:
            try:
                return running.ask("GET", "/v2").status == 200
            except ConnectionRefusedError:
                return False

        assert wait_until(serves)
        assert "inflight_door_restarts_total 1" in running.process.metrics()


def test_a_door_that_hangs_is_killed_and_starts_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("inflight.serve.door._PROBE_TIMEOUT_S", 0.2)
    with door(hang_timeout_s=2) as running:
        first = running.process.process
        first.send_signal(signal.SIGSTOP)
        assert wait_until(lambda: running.process.restarts >= 1, within_s=120)
        assert first.poll() == -signal.SIGKILL

        def serves() -> bool:
            with contextlib.suppress(OSError):
                return running.ask("GET", "/v2").status == 200
            return False

        assert wait_until(serves)


UNUSABLE = typed(
    "config.route.v3.RouteConfiguration",
    name=ROUTES,
    virtual_hosts=[{"name": "all", "domains": ["*"], "routes": [{"match": {"safe_regex": {"regex": "("}}}]}],
)


def test_routes_that_envoy_cannot_use_are_found_at_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("inflight.serve.envoy.files.routes", lambda *_: UNUSABLE)
    monkeypatch.setattr("inflight.serve.door.START_S", 3)
    with pytest.raises(DeploymentError, match="did not serve"), door():
        pass


def test_routes_that_envoy_cannot_use_later_change_nothing_and_are_told(caplog: pytest.LogCaptureFixture) -> None:
    with door() as running:
        write(running.process.folder / f"{ROUTES}.json", discovered(UNUSABLE))
        assert wait_until(lambda: "Envoy cannot use its new http.http" in caplog.text)
        assert running.ask("GET", "/v2").status == 200


def test_its_files_are_private_and_go_with_it(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("sk-secret\n")
    with door(api_keys_file=keys) as running:
        folder = running.process.folder
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        assert stat.S_IMODE((folder / f"{KEYS}.json").stat().st_mode) == 0o600
        process = running.process.process
    assert not folder.exists()
    assert process.returncode is not None


def test_what_lies_in_a_folder_already_does_not_open_its_files_to_others(tmp_path: Path) -> None:
    planted, elsewhere = tmp_path / f".{KEYS}.json.new", tmp_path / "elsewhere"
    elsewhere.touch()
    for plant in (lambda: planted.touch(0o666), lambda: planted.symlink_to(elsewhere)):
        plant()
        write(tmp_path / f"{KEYS}.json", {"key": "sk-secret"}, 0o600)
        assert stat.S_IMODE((tmp_path / f"{KEYS}.json").lstat().st_mode) == 0o600
    assert elsewhere.read_text() == ""


def test_a_busy_port_is_told_before_the_start() -> None:
    deployment = deployment_with()
    process = DoorProcess(deployment, ONE)
    with (
        socket.create_server(("127.0.0.1", deployment.gateway.port)),
        pytest.raises(DeploymentError, match="choose another --gateway-port"),
    ):
        process.check()


def test_the_access_log_has_no_prompts_and_no_keys(tmp_path: Path) -> None:
    file, keys = tmp_path / "access.log", tmp_path / "keys"
    keys.write_text("sk-secret\n")
    with door(access_log=file, api_keys_file=keys) as running:
        running.ask("POST", "/v1/messages?key=sk-secret", "authorization: Bearer sk-secret", body=b'{"a": "my prompt"}')
    *_, line = file.read_text().splitlines()  # behind those of the door's own look at /live
    told = json.loads(line)
    assert (told["method"], told["path"], told["status"], told["server"]) == ("POST", "/v1/messages", 200, "gateway")
    assert told["bytes_received"] == 18
    assert "sk-secret" not in line
    assert "prompt" not in line


def test_a_long_log_begins_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    with door() as running:
        log = running.process.log_path
        with log.open("a") as file:
            file.write("x" * 4001)
        monkeypatch.setattr(log_module, "MOST_BYTES", 4000)
        before = log.with_name("envoy.log.1")
        assert wait_until(lambda: before.exists() and log.stat().st_size < 4001)
        monkeypatch.setattr(log_module, "MOST_BYTES", 1 << 20)
        with socket.socket(socket.AF_UNIX) as administration:
            administration.connect(str(running.process.folder / ADMIN_SOCKET))
            administration.sendall(b"POST /logging?level=debug HTTP/1.1\r\nhost: door\r\n\r\n")
            administration.recv(1)
        assert wait_until(lambda: running.ask("GET", "/v2").status == 200 and log.stat().st_size > 0)
        assert before.read_text().endswith("x" * 4001)
        assert b"\0" not in log.read_bytes(), "Envoy writes at the end, wherever that is"


def test_a_second_deployment_gets_its_share_and_sticks() -> None:
    second = Recorder("second")
    ab: dict[str, Any] = {"address": second.address, "percent": 50, "sticky_header": "x-session-id", "name": "int8"}
    with door(ab=ab) as running:
        answers = [running.ask("GET", "/v1/models") for _ in range(60)]
        served = Counter((one.json["server"], one.headers["x-inflight-variant"]) for one in answers)
        assert set(served) == {("gateway", "a"), ("second", "int8")}
        for session in range(10):
            same = {running.ask("GET", "/v2", f"x-session-id: {session}").json["server"] for _ in range(4)}
            assert len(same) == 1
        page = running.process.metrics()
        asked = Counter(not one["path"].startswith("/v1") for one in second.requests if "health" not in one["path"])
        assert f'server="variant_gateway",code="200"}} {asked[False]}' in page
        assert f'server="variant_http",code="200"}} {asked[True]}' in page
    second.close()


@pytest.mark.proof
def test_while_a_second_deployment_is_away_the_first_one_answers_for_it() -> None:
    second = Recorder("second")
    relay = Relay(second.address)
    with door(ab={"address": relay.address, "percent": 100}) as running:

        def answers() -> tuple[str | None, str | None, int]:
            answer = running.ask("POST", "/v1/messages", body=b"{}")
            return answer.json.get("server"), answer.headers.get("x-inflight-variant"), answer.status

        assert wait_until(lambda: answers() == ("second", "b", 200))
        second.status = 503  # it starts again
        assert wait_until(lambda: answers() == ("gateway", "a", 200))
        second.status = 200
        assert wait_until(lambda: answers() == ("second", "b", 200))
        relay.cut()
        assert wait_until(lambda: answers() == ("gateway", "a", 200))
        relay.open()
        assert wait_until(lambda: answers() == ("second", "b", 200))
    relay.cut()
    second.close()


def test_keys_that_change_while_the_door_starts_are_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keys = tmp_path / "keys"
    keys.write_text("sk-old\n")

    def write_and_change(*arguments: Any) -> None:
        write_configuration(*arguments)
        keys.write_text("sk-newer\n")

    monkeypatch.setattr("inflight.serve.door.write_configuration", write_and_change)
    with door(api_keys_file=keys) as running:
        assert wait_until(lambda: running.ask("GET", "/v2", "x-api-key: sk-newer").status == 200)


KEY_FILE: dict[str, Any] = {"api_keys_file": Path("keys")}


@pytest.mark.parametrize(
    ("door_settings", "gateway", "message"),
    [
        ({}, {"host": "127.0.0.2"}, "gateway.host has no effect with the door"),
        ({"jwt": {"jwks_file": "j"}}, KEY_FILE, "gateway.api_keys_file and door.jwt.jwks_file exclude each other"),
        (
            {"behind_a_door": True, "tls": {"certificate": "c", "private_key": "k"}},
            {},
            "door.tls and door.behind_a_door exclude each other",
        ),
        ({"behind_a_door": True, "rate_limit": {"requests": 1}}, {}, "need api_keys_file or jwt"),
    ],
)
def test_settings_that_cannot_hold_together_are_refused(
    door_settings: dict[str, Any], gateway: dict[str, Any], message: str
) -> None:
    deployment = deployment_with(**door_settings)
    changed = deployment.model_copy(update={"gateway": deployment.gateway.model_copy(update=gateway)})
    with pytest.raises(DeploymentError, match=message):
        check_settings(changed)
    check_settings(deployment_with(behind_a_door=True, rate_limit={"requests": 1}, **KEY_FILE))


@pytest.mark.parametrize(
    ("door_settings", "message"),
    [
        ({"enabled": True, "tls": {"certificate": "a"}}, "`certificate` and `private_key` need each other"),
        ({"enabled": True, "tls": {"client_ca": "a"}}, "`client_ca` needs `certificate`"),
        ({"enabled": True, "ab": {"percent": 3}}, "`percent` needs `address`"),
        ({"enabled": True, "ab": {"address": "nowhere"}}, "it must be host:port"),
        ({"enabled": True, "ab": {"address": "a:1", "sticky_header": "A b"}}, "it must be a header's name"),
        ({"enabled": True, "ab": {"address": "a:1", "name": "a"}}, "and not `a`"),
        ({"enabled": True, "jwt": {"issuer": "a"}}, "`issuer` needs `jwks_file`"),
        ({"enabled": True, "rate_limit": {"burst": 3}}, "`burst` needs `requests`"),
        ({"enabled": True, "jwt": {"jwks_file": "a"}, "api_keys_file": "b"}, "exclude each other"),
        ({"retries": 3}, "`retries` needs `enabled: true`"),
    ],
)
def test_settings_without_effect_are_refused(door_settings: dict[str, Any], message: str) -> None:
    with pytest.raises(DeploymentError, match=message):
        validate({"model": "m", "door": door_settings}, "deployment.yaml")


@pytest.mark.parametrize("replicas", [[ONE], TWO])
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {
            "tls": {"certificate": "c", "private_key": "k", "client_ca": "a"},
            "jwt": {"jwks_file": "j"},
            "rate_limit": {"requests": 5},
            "access_log": "-",
            "ab": {"address": "localhost:1", "sticky_header": "x-session-id"},
        },
    ],
)
def test_envoy_finds_every_configuration_valid(
    tmp_path: Path, replicas: list[Upstreams], settings: dict[str, Any]
) -> None:
    deployment = deployment_with(**settings)
    file = tmp_path / "envoy.json"
    file.write_text(json.dumps(bootstrap(deployment, replicas, ["127.0.0.1:1", "[::1]:2"], tmp_path, tmp_path / "s")))
    (tmp_path / f"{ROUTES}.json").write_text(json.dumps(discovered(routes(deployment, replicas))))
    for name in named_files(deployment):
        (tmp_path / f"{name}.json").write_text('{"resources": []}')
    command = [str(envoy_path()), "--mode", "validate", "--config-path", str(file), "--log-level", "error"]
    assert subprocess.run(command, capture_output=True, text=True).stdout.strip().endswith("OK")
