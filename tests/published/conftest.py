"""Published models and tokenizers, fetched when the first test needs them, and numpy references of the models."""

from __future__ import annotations

import pytest

from benchmarks.environments import Home
from benchmarks.published.fetched import FETCHED, MODELS, NAME, model_path
from tests.published.support.reference import Reference
from tests.support.made import made


@pytest.fixture(scope="session")
def home() -> Home:
    """The folder of models, tokenizers and llama.cpp."""
    return made(FETCHED, NAME)


@pytest.fixture(scope="session", params=MODELS)
def model(request: pytest.FixtureRequest) -> str:
    """The name of a model: each test of one runs before those of the next."""
    return str(request.param)


@pytest.fixture(scope="session")
def reference(home: Home, model: str) -> Reference:
    """The model in numpy."""
    return Reference(model_path(home, model))
