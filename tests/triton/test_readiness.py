"""The generation that makes a server ready passes on every engine, streaming or not."""

from __future__ import annotations

import pytest

from inflight.serve.generation import generate
from tests.triton.support.servers import Running


@pytest.mark.any_engine
def test_a_token_is_generated_where_models_stream(server: Running) -> None:
    assert generate(server.http, 180) == ""


@pytest.mark.any_engine
def test_a_token_is_generated_where_models_answer_once(unary_server: Running) -> None:
    assert generate(unary_server.http, 180) == ""
