"""The pbtxt files in the repository are those that the contract says."""

from pathlib import Path

import pytest

from inflight import contract
from inflight.serve import pbtxt

REPOSITORY = Path(__file__).parents[2] / "model_repository"


@pytest.mark.parametrize("name", pbtxt.files())
def test_committed_file_equals_the_contract(name: str) -> None:
    assert (REPOSITORY / name).read_text() == pbtxt.files()[name]


def test_repository_has_no_other_files() -> None:
    found = {str(path.relative_to(REPOSITORY)) for path in REPOSITORY.rglob("*") if path.is_file()}
    assert found == set(pbtxt.files())


@pytest.mark.parametrize("model", contract.STAGES)
def test_names_are_unique(model: str) -> None:
    for side in contract.STAGES[model]:
        names = [tensor.name for tensor in side]
        assert len(names) == len(set(names))


def test_ensemble_wires_every_input_somewhere() -> None:
    engine = {contract.ENGINE_NAME_OF.get(t.name, t.name) for t in contract.ENSEMBLE_INPUTS}
    known = set(contract.ENGINE_INPUT) | {tensor.name for tensor in contract.TOKENIZER_INPUTS}
    assert engine <= known
