"""Deployments, sampling parameters and errors: what is refused is refused by name."""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import ValidationError

from inflight import errors
from inflight.contract import STAGES
from inflight.errors import DeploymentError, InvalidRequest, nearest
from inflight.inputs import FOREIGN_NAMES, check_parameters
from inflight.sampling import SamplingParams
from inflight.settings.deployment import Deployment, load_deployment
from inflight.settings.gateway_quality import GatewayQualitySettings
from scripts import write_reference as reference
from tests.support.tables import each_row

ROOT = Path(__file__).parents[2]


@each_row("name", reference.files())
def test_generated_pages_are_up_to_date(name: str) -> None:
    assert (ROOT / "docs" / name).read_text() == reference.files()[name], "run `make contract`"


def test_the_page_writes_each_default_as_yaml_reads_it() -> None:
    rows = re.findall(r"^\| `([\w.]+)` \| `(.+?)` \|", reference.deployment_page(), re.M)
    assert len(rows) > 100
    for key, text in rows:
        *sections, name = key.split(".")
        section: Any = Deployment
        for one in sections:
            section = section.model_fields[one].annotation
        default = section.model_fields[name].default
        assert yaml.safe_load(text) == (list(default) if isinstance(default, tuple) else default), key


def test_every_error_has_a_status_and_a_label() -> None:
    family = [one for _, one in inspect.getmembers(errors, inspect.isclass) if issubclass(one, errors.InflightError)]
    labels = [one.label for one in family if one not in (errors.InflightError, errors.EngineFailure)]
    assert len(labels) == len(set(labels)) == len(family) - 2
    assert InvalidRequest("top_k is -1").wire_message() == "INVALID_ARGUMENT: top_k is -1"


def test_nearest_names_only_what_is_near() -> None:
    assert nearest("tempreature", ["temperature", "top_k"]) == " (did you mean 'temperature'?)"
    assert nearest("zzz", ["temperature"]) == ""


@each_row(
    ("name", "ensemble", "engine"),
    [
        ("prompt", "text_input", "input_ids"),
        ("inputs", "text_input", "input_ids"),
        ("stop", "stop_words", None),
        ("max_new_tokens", "max_tokens", "request_output_len"),
        ("max_tokens", None, "request_output_len"),
        ("top_p", None, "runtime_top_p"),
        ("Logprobs", "return_log_probs", "return_log_probs"),
        ("user", "client_id", "client_id"),
        ("streaming", "stream", None),
        ("tempreature", "temperature", "temperature"),
    ],
)
def test_a_name_that_others_use_is_understood(name: str, ensemble: str | None, engine: str | None) -> None:
    for model, meant in (("ensemble", ensemble), ("tensorrt_llm", engine)):
        if meant is not None:
            with pytest.raises(InvalidRequest, match=rf"unknown parameter '{name}' \(did you mean '{meant}'\?\)"):
                check_parameters({name: 1}, [tensor.name for tensor in STAGES[model][0]])


@pytest.mark.parametrize("name", ["traceparent", "Traceparent", "TRACESTATE"])
def test_a_trace_context_is_known_however_its_header_is_written(name: str) -> None:
    check_parameters({name: "00-1-2-01"}, [])


def test_hints_name_inputs_that_there_are() -> None:
    inputs = {tensor.name for model in ("ensemble", "tensorrt_llm") for tensor in STAGES[model][0]}
    assert {name for names in FOREIGN_NAMES for name in names.split()} <= inputs


@each_row(
    ("values", "reason"),
    [
        ({"max_tokens": 0}, "max_tokens is 0"),
        ({"min_tokens": 9}, r"min_tokens is 9; it must be between 0 and max_tokens \(4\)"),
        ({"temperature": float("nan")}, "temperature is nan"),
        ({"temperature": -1.0}, "temperature is -1.0"),
        ({"top_k": -1}, "top_k is -1"),
        ({"top_p": 0.0}, "top_p is 0.0"),
        ({"top_p": float("nan")}, "top_p is nan"),
        ({"min_p": 1.1}, "min_p is 1.1"),
        ({"repetition_penalty": 0.0}, "repetition_penalty is 0.0"),
        ({"presence_penalty": float("inf")}, "presence_penalty is inf"),
        ({"seed": -1}, "seed is -1"),
        ({"seed": 2**64}, "seed is"),
        ({"top_log_probs": 21}, "num_top_log_probs is 21"),
        ({"logit_bias": {3: float("nan")}}, "embedding_bias"),
    ],
)
def test_bad_sampling_values_are_named(values: dict[str, Any], reason: str) -> None:
    with pytest.raises(InvalidRequest, match=reason):
        SamplingParams(**({"max_tokens": 4} | values))


def test_what_is_greedy() -> None:
    assert SamplingParams(1).greedy
    assert SamplingParams(1, temperature=0.0).greedy
    assert SamplingParams(1, temperature=0.8, top_k=1).greedy
    assert not SamplingParams(1, temperature=0.8).greedy


def test_a_deployment_says_all_its_faults_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "deployment.yaml").write_text("model: x\nlimits: {max_sequence_lenght: 3}\nserver: {http_port: 0}\n")
    with pytest.raises(DeploymentError) as caught:
        load_deployment(tmp_path)
    said = str(caught.value)
    assert "\n" not in said
    assert "did you mean 'max_sequence_length'?" in said
    assert "`server.http_port` is 0" in said


@each_row("value", ["2024-13-01", "!!int x", "!!timestamp x", "!!float x", "[", "\x00"])
def test_a_value_that_yaml_cannot_read_is_one_line(tmp_path: Path, value: str) -> None:
    (tmp_path / "deployment.yaml").write_text(f"model: {value}\n")
    with pytest.raises(DeploymentError, match="not valid YAML") as caught:
        load_deployment(tmp_path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("engine", "accepted"),
    [
        ("{kind: replay, replay_step_ms: 2}", True),
        ("{replay_step_ms: 2, kind: replay}", True),
        ("{replay_step_ms: 0}", True),
        ("{replay_step_ms: 2}", False),
        ("{kind: pytorch, replay_step_ms: 2}", False),
        ("{replay_queue_ms: 2}", False),
        ("{kind: trtllm, replay_prefill_ms: 2}", False),
    ],
)
def test_a_replays_pace_needs_the_replay_engine(tmp_path: Path, engine: str, accepted: bool) -> None:
    model = ROOT / "deployments/demo/model"
    (tmp_path / "deployment.yaml").write_text(f"model: {model}\nengine: {engine}\n")
    if accepted:
        load_deployment(tmp_path)
        return
    with pytest.raises(DeploymentError, match=r"`engine\.replay_\w+_ms` is 2(\.0)?: it needs `kind: replay`"):
        load_deployment(tmp_path)


def test_the_demo_is_a_deployment() -> None:
    assert load_deployment(ROOT / "deployments/demo").model.name == "model"


@pytest.mark.parametrize("address", ["10.0.0.7", "10.0.0.7:99999", "grpc://10.0.0.7:8001", "a b:1", ":8001"])
def test_an_address_of_a_reference_is_a_host_and_a_port(address: str) -> None:
    with pytest.raises(ValidationError, match="reference"):
        GatewayQualitySettings(reference=address)
