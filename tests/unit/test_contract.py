"""The pbtxt files in the repository are those that the contract says."""

from pathlib import Path

from inflight import contract
from inflight.serve.repository import variant_name
from scripts import write_pbtxt as pbtxt
from tests.support.tables import each_row

REPOSITORY = Path(__file__).parents[2] / "model_repository"


@each_row("name", pbtxt.files())
def test_committed_file_equals_the_contract(name: str) -> None:
    assert (REPOSITORY / name).read_text() == pbtxt.files()[name]


def test_repository_has_no_other_files() -> None:
    found = {str(path.relative_to(REPOSITORY)) for path in REPOSITORY.rglob("*") if path.is_file()}
    assert found == {"README.md", *pbtxt.files()}


def test_each_engine_has_a_variant_of_the_repository() -> None:
    backends = {"pytorch": "inflight_engine", "replay": "inflight_engine", "trtllm": "trtllm_engine"}
    backends |= {"tensorrtllm": "tensorrtllm"}
    found = {
        variant_name(kind, decoupled): pbtxt.Variant(backend, decoupled)
        for kind, backend in backends.items()
        for decoupled in (True, False)
    }
    assert found == pbtxt.VARIANTS


@each_row("model", contract.STAGES)
def test_names_are_unique(model: str) -> None:
    for side in contract.STAGES[model]:
        names = [tensor.name for tensor in side]
        assert len(names) == len(set(names))


def test_ensemble_wires_every_input_somewhere() -> None:
    engine = {contract.ENGINE_NAME_OF.get(t.name, t.name) for t in contract.ENSEMBLE_INPUTS}
    known = set(contract.ENGINE_INPUT) | {tensor.name for tensor in contract.TOKENIZER_INPUTS}
    assert engine <= known
