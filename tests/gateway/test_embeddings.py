"""/v1/embeddings beside a real server: vectors as transformers has them, in every form of input."""

from __future__ import annotations

import base64
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
import yaml

from inflight.resources import DEMO
from tests.gateway.support.demo import ids_of, states
from tests.gateway.support.gateways import Beside, beside

TEXT, OTHER = "Once upon a time, there was a small fox.", "The sea is blue."


def _post(gateway: Beside, **body: Any) -> httpx.Response:
    with gateway.client() as client:
        model = client.get("/v1/models").json()["data"][0]["id"]
        return client.post("/v1/embeddings", json={"model": model, **body})


def _vectors(response: httpx.Response) -> np.ndarray:
    assert response.status_code == 200, response.text
    answer = response.json()
    assert answer["object"] == "list"
    assert [one["index"] for one in answer["data"]] == list(range(len(answer["data"])))
    assert {one["object"] for one in answer["data"]} == {"embedding"}
    return np.array([one["embedding"] for one in answer["data"]], np.float32)


def _expected(text: str, pooling: str = "last") -> np.ndarray:
    rows = states(ids_of(text))
    vector = rows[-1] if pooling == "last" else rows.mean(0)
    return np.asarray((vector / vector.norm()).float())


def test_a_text_gets_the_hidden_state_of_its_last_token(gateway: Beside) -> None:
    response = _post(gateway, input=TEXT)
    [vector] = _vectors(response)
    np.testing.assert_allclose(vector, _expected(TEXT), atol=1e-5)
    assert abs(np.linalg.norm(vector) - 1) < 1e-6
    tokens = len(ids_of(TEXT))
    usage = response.json()["usage"]
    assert (usage["prompt_tokens"], usage["total_tokens"]) == (tokens, tokens)


def test_all_forms_of_input_give_the_same(gateway: Beside) -> None:
    texts = _vectors(_post(gateway, input=[TEXT, OTHER]))
    ids = [ids_of(TEXT), ids_of(OTHER)]
    assert np.array_equal(texts, _vectors(_post(gateway, input=ids)))
    assert np.array_equal(texts[:1], _vectors(_post(gateway, input=TEXT)))
    assert np.array_equal(texts[1:], _vectors(_post(gateway, input=ids[1])))
    many = _vectors(_post(gateway, input=[TEXT, OTHER] * 70))
    assert np.array_equal(many, np.tile(texts, (70, 1)))


def test_base64_is_the_same_floats(gateway: Beside) -> None:
    [vector] = _vectors(_post(gateway, input=TEXT))
    answer = _post(gateway, input=TEXT, encoding_format="base64").json()
    raw = base64.b64decode(answer["data"][0]["embedding"])
    assert np.array_equal(np.frombuffer(raw, "<f4"), vector)


@pytest.mark.parametrize(
    ("side", "ids"),
    [({}, slice(-3, None)), ({"truncation_side": "left"}, slice(-3, None)), ({"truncation_side": "right"}, slice(3))],
)
def test_one_end_of_a_prompt_can_be_kept(gateway: Beside, side: dict[str, str], ids: slice) -> None:
    [kept] = _vectors(_post(gateway, input=TEXT, truncate_prompt_tokens=3, **side))
    [same] = _vectors(_post(gateway, input=ids_of(TEXT)[ids]))
    assert np.array_equal(kept, same)


@pytest.mark.parametrize(
    ("body", "param", "words"),
    [
        ({}, "input", "input is missing"),
        ({"input": ""}, "input", "no token"),
        ({"input": []}, "input", "must be"),
        ({"input": [TEXT, ""]}, "input[1]", "no token"),
        ({"input": [[1], [99999]]}, "input[1][0]", "a token id from 0 to"),
        ({"input": [True]}, "input", "must be"),
        ({"input": {"text": "x"}}, "input", "must be"),
        ({"input": ["x"] * 2049}, "input", "the limit is 2048"),
        ({"input": "x", "dimensions": 12}, "dimensions", "not trained"),
        ({"input": "x", "encoding_format": "int8"}, "encoding_format", "float"),
        ({"input": "x", "normalize": False}, "normalize", "not supported"),
        ({"input": "x", "extra_key": "a"}, "extra_key", "prefix cache"),
        ({"input": "x", "endianness": "big"}, "endianness", "little-endian"),
        ({"messages": [], "input": "x"}, "messages", "not supported"),
        ({"input": [7] * 3000}, "input", "maximum context length"),
    ],
)
def test_bad_requests_name_the_field(gateway: Beside, body: dict[str, Any], param: str, words: str) -> None:
    response = _post(gateway, **body)
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert error["param"] == param
    assert words in error["message"]


def test_the_length_that_vectors_have_asks_for_nothing(gateway: Beside) -> None:
    [vector] = _vectors(_post(gateway, input=TEXT))
    assert np.array_equal([vector], _vectors(_post(gateway, input=TEXT, dimensions=len(vector), normalize=True)))


def test_an_unknown_model_is_not_found(gateway: Beside) -> None:
    assert _post(gateway, model="other", input="x").status_code == 404


@pytest.fixture(scope="module")
def embedder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Beside]:
    """The demo as an embedding model's checkpoint: mean pooling, and lengths that it was trained for."""
    folder = tmp_path_factory.mktemp("embedder")
    shutil.copytree(DEMO / "model", folder / "model")
    config = json.loads((folder / "model/config.json").read_text()) | {"matryoshka_dimensions": [64, 128]}
    (folder / "model/config.json").write_text(json.dumps(config))
    modules = [
        {"idx": index, "name": str(index), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for index, (path, kind) in enumerate([("", "Transformer"), ("1_Pooling", "Pooling"), ("2_N", "Normalize")])
    ]
    (folder / "model/modules.json").write_text(json.dumps(modules))
    (folder / "model/1_Pooling").mkdir()
    pooling = {"word_embedding_dimension": 256, "pooling_mode_mean_tokens": True, "pooling_mode_cls_token": False}
    (folder / "model/1_Pooling/config.json").write_text(json.dumps(pooling))
    (folder / "deployment.yaml").write_text(yaml.safe_dump({"model": "model", "engine": {"dtype": "float32"}}))
    with beside(Path(folder)) as running:
        yield running


@pytest.mark.proof
def test_a_checkpoint_s_own_pooling_and_lengths_are_served(embedder: Beside) -> None:
    [vector] = _vectors(_post(embedder, input=TEXT))
    np.testing.assert_allclose(vector, _expected(TEXT, "mean"), atol=1e-5)
    [short] = _vectors(_post(embedder, input=TEXT, dimensions=64))
    cut = torch.tensor(vector[:64]).double()
    np.testing.assert_allclose(short, (cut / cut.norm()).float().numpy(), atol=1e-6)
    response = _post(embedder, input=TEXT, dimensions=65)
    assert response.json()["error"]["param"] == "dimensions"
    assert "64, 128" in response.json()["error"]["message"]
