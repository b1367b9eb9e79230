"""Whose a request is, as the engine's stage reads it."""

from __future__ import annotations

import numpy as np
import pytest

from inflight.errors import InvalidRequest, UnsupportedFeature
from inflight.settings.deployment import LimitSettings
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
    one, other = (asking("", client=f"{'a' * 300}{end}") for end in "ab")
    assert one != other
    assert len(one) <= 256
    with pytest.raises(InvalidRequest, match="client_id has 300 characters; it may have 256"):
        asking("a" * 300)


def test_a_client_id_where_nobody_takes_turns_is_refused() -> None:
    with pytest.raises(UnsupportedFeature, match="client_id is not supported by this deployment; set `batching.fair"):
        asking("anna", by_client=False)
