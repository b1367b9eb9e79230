"""Whose a request is, as the engine's stage reads it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from inflight.contract import CLIENT
from inflight.errors import InvalidRequest, UnsupportedFeature
from inflight.inputs import MOST_CLIENT_ID, check_parameters, client_named
from inflight.resources import DEMO
from inflight.settings.deployment import DOOR_VARIABLE, LimitSettings, load_served, validate
from inflight.triton.request_reader import read_request


def asking(named: str, client: str = "", by_client: bool = True) -> str:
    arrays = {"input_ids": np.ones((1, 3), np.int32), "request_output_len": np.full((1, 1), 4, np.int32)}
    arrays["client_id"] = np.array([[named.encode()]], np.object_)
    _, [part] = read_request(
        arrays, "", LimitSettings(), 100, True, "pytorch", max_sequences=256, client=client, by_client=by_client
    )
    return part.request.client_id


def test_a_request_is_believed_where_nobody_vouches_for_its_client() -> None:
    assert asking("anna") == "anna"
    assert asking("anna", client="berta") == "berta"
    assert asking("", client="berta", by_client=False) == "berta", "guides go by it too"


def test_long_names_of_clients_stay_apart() -> None:
    one, other = (client_named({CLIENT: f"{'a' * 300}{end}"}, vouched=True) for end in "ab")
    assert one != other
    assert len(one) <= MOST_CLIENT_ID
    with pytest.raises(InvalidRequest, match="client_id has 300 characters; it may have 256"):
        asking("a" * 300)


def test_a_client_id_where_nobody_takes_turns_is_refused() -> None:
    with pytest.raises(UnsupportedFeature, match="client_id is not supported by this deployment; set `batching.fair"):
        asking("anna", by_client=False)


@pytest.mark.parametrize("name", [CLIENT, CLIENT.title()])
def test_a_name_that_nobody_vouches_for_is_refused_and_reaches_no_log(name: str) -> None:
    with pytest.raises(InvalidRequest, match=f"^{name} is not supported by this deployment"):
        check_parameters({name: "anna"}, [])
    assert client_named({CLIENT: "anna"}, vouched=False) == ""
    check_parameters({name: "anna"}, [], vouched=True)
    assert client_named({CLIENT: "anna"}, vouched=True) == "anna"


@pytest.mark.parametrize(
    ("sections", "vouches"),
    [
        ({}, False),
        ({"gateway": {"api_keys_file": "keys"}}, True),
        ({"gateway": {"enabled": False}}, False),
        ({"door": {"enabled": True}}, True),
    ],
)
def test_a_deployment_vouches_with_a_door_or_with_keys(sections: dict[str, Any], vouches: bool) -> None:
    assert validate({"model": "."} | sections, "deployment.yaml").vouches == vouches


@pytest.mark.parametrize(
    ("enabled", "told", "vouches"), [(False, "on", True), (True, "off", False), (True, None, True)]
)
def test_the_stages_know_the_door_that_an_option_chose(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, enabled: bool, told: str, vouches: bool
) -> None:
    (tmp_path / "deployment.yaml").write_text(f"model: {DEMO / 'model'}\ndoor: {{enabled: {str(enabled).lower()}}}\n")
    monkeypatch.setenv(DOOR_VARIABLE, told) if told else monkeypatch.delenv(DOOR_VARIABLE, raising=False)
    assert load_served(tmp_path).vouches == vouches
