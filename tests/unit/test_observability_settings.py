"""Settings of traces and logs: what is wrong is said by name at the start, and nothing given is without effect."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from inflight.cli import app
from inflight.errors import DeploymentError
from inflight.serve import command
from inflight.settings.deployment import Deployment, validate

ENDPOINT = "http://127.0.0.1:4318/v1/traces"


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        (
            {"trace_endpoint": "127.0.0.1:4318"},
            r"`observability.trace_endpoint` is '127.0.0.1:4318': it must be an http",
        ),
        ({"trace_endpoint": "ftp://collector/v1"}, "must be an http or https URL"),
        ({"trace_endpoint": "http://collector:99999/v1"}, "observability.trace_endpoint"),
        ({"trace_endpoint": "http:///v1/traces"}, "must be an http or https URL"),
        ({"trace_endpoint": f" {ENDPOINT}"}, "`observability.trace_endpoint` .* URL without whitespace"),
        ({"trace_endpoint": "http://collector/v1 traces"}, "URL without whitespace"),
        (
            {"log_requests": "debug"},
            "`observability.log_requests` needs `observability.log_level: debug`; it is info",
        ),
        ({"log_requests": "info", "log_level": "error"}, "needs `observability.log_level: info`; it is error"),
        ({"trace_sample_ratio": 0.1}, "`observability.trace_sample_ratio` needs `observability.trace_endpoint`"),
        ({"trace_endpoint": ENDPOINT, "trace_sample_ratio": 1.5}, "observability.trace_sample_ratio"),
        ({"log_format": "xml"}, "`observability.log_format` is 'xml'.*'text' or 'json'"),
        ({"trace_endpont": ENDPOINT}, "did you mean 'trace_endpoint'"),
    ],
)
def test_what_is_wrong_is_named(settings: dict[str, Any], says: str) -> None:
    with pytest.raises(DeploymentError, match=says):
        validate({"model": "model", "observability": settings}, "deployment.yaml")


@pytest.mark.parametrize(
    ("name", "value"), [("trace_endpoint", ENDPOINT), ("log_requests", "info"), ("inspection", True)]
)
def test_upstreams_engine_stage_tells_nothing(name: str, value: object) -> None:
    settings = {name: value}
    with pytest.raises(DeploymentError, match=f"`observability.{name}` needs Inflight's engine stage"):
        validate({"model": "m", "engine": {"kind": "tensorrtllm"}, "observability": settings}, "deployment.yaml")
    for kind in ("pytorch", "trtllm", "replay"):
        validate({"model": "m", "engine": {"kind": kind}, "observability": settings}, "deployment.yaml")


@pytest.mark.parametrize(("arguments", "expected"), [([], "json"), (["--log-format", "text"], "text")])
def test_the_command_has_the_last_word_on_the_format(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], expected: str
) -> None:
    (tmp_path / "deployment.yaml").write_text(
        yaml.safe_dump({"model": str(command.DEMO / "model"), "observability": {"log_format": "json"}})
    )
    served: list[Deployment] = []
    monkeypatch.setattr(command, "_serve", lambda _directory, deployment, *_: served.append(deployment))
    result = CliRunner().invoke(app, ["serve", str(tmp_path), *arguments])
    assert result.exit_code == 0, result.output
    assert served[0].observability.log_format == expected
