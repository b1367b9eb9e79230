"""What is predicted of a GPU: by arithmetic that can be checked, and under the names that the measurements have."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.contact import predict
from benchmarks.contact.predict import Assumptions, Design, cache_bytes, rows
from benchmarks.contact.sizes import FULL, LARGE, Batch

FOLDER = Path(__file__).parents[2] / "docs" / "results" / "gpu"


def _designs() -> dict[str, Design]:
    designs = {}
    for name, file in predict._NAMES.items():
        steps = json.loads((FOLDER / file).read_text())["steps"]
        designs[name] = Design({step["name"]: step for step in steps}, Assumptions())
    return designs


def test_bytes_and_weights_are_llamas() -> None:
    # Llama 3.1 8B has 8.03e9 parameters; the embedding, 0.53e9 of them, is not read but for some rows.
    assert predict._layer_weights() + predict._head_weights() == pytest.approx(8.03e9 - 0.525e9, rel=1e-3)
    assert cache_bytes() == 128 * 1024
    assert LARGE.heads * 128 == LARGE.hidden


def test_no_step_is_faster_than_the_roofline() -> None:
    for design in _designs().values():
        for batch in FULL.batches:
            assert batch.streams / design.decode_s(batch) < predict._roofline(batch, fp8=False)
        for batch in FULL.fp8_batches:
            assert batch.streams / design.decode_s(batch, fp8=True) < predict._roofline(batch, fp8=True)


def test_one_stream_is_bound_by_the_weights() -> None:
    one = Assumptions(bandwidth=1e12, product_bandwidth=1, launch_s=0, step_s=0, idle_wave_s=0, cache_bandwidth=1e9)
    steps = _designs()["now"].steps
    seconds = Design(steps, one).decode_s(Batch(1, 512, 128))
    assert seconds == pytest.approx(2 * 7.505e9 / 1e12, rel=0.01)


def test_what_was_fused_launches_less() -> None:
    designs = _designs()
    before, now = (designs[name].launches("decode 1 x 512") for name in ("before", "now"))
    assert before == 32 * 14 + 13 + 6
    assert now < before


def test_names_are_those_of_the_measurements() -> None:
    """The table puts a prediction beside a measurement by its name."""
    names = {row["result"] for row in rows(_designs())}
    measured = {f"decode {batch.name}, bf16" for batch in FULL.batches}
    measured |= {f"decode {batch.name}, FP8" for batch in FULL.fp8_batches}
    measured |= {name.replace("decode", "prefill") for name in measured} | {"copy", "mixed step, time of kernels"}
    modes = ("as it is", "no graph either")
    measured |= {f"decode {batch.name}, {mode}" for batch in FULL.mode_batches for mode in modes}
    measured |= {f"launches of a decode step at {streams}" for streams in (1, 64)}
    assert measured == names


def test_the_files_are_of_this_command(tmp_path: Path) -> None:
    for name in predict._NAMES.values():
        (tmp_path / name).write_text((FOLDER / name).read_text())
    predict.main(tmp_path)
    for name in ("rows", "launches", "assumptions", "designs"):
        made, kept = (json.loads((folder / "predictions.json").read_text())[name] for folder in (tmp_path, FOLDER))
        assert made == kept, "make gpu-predictions"
    assert "Nothing on this page was measured on a GPU" in (FOLDER / "README.md").read_text()
