"""What can be had of a native step behind it: logits as the step gives them, and hidden states behind the last norm."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from inflight.engine.attention.torch_backend import QueryRange, TorchAttention
from inflight.engine.native.bindings import NativeError
from inflight.engine.native.model import NativeModel
from tests.engine.support.native import SHAPES, VOCAB, each_set, make_pool, random_decoder

TOKENS = [1 + index * 7 % (VOCAB - 1) for index in range(45)]
RANGES = [QueryRange(0, 0, 45, [3, 0, 5])]


def _step(name: str, instruction_set: str) -> NativeModel:
    """Return a model that has computed ``TOKENS``, and no logits."""
    model = random_decoder(name)
    native = NativeModel(model, instruction_set, 2)
    native.use(make_pool(model, "float32", 8, 16), 16)
    assert native(np.array(TOKENS), RANGES, []).shape == (0, VOCAB)
    return native


@pytest.mark.sweep
@each_set
@pytest.mark.parametrize("name", [name for name in SHAPES if name != "many heads"])  # the library refuses those
@torch.inference_mode()
def test_they_are_those_of_the_step(name: str, instruction_set: str) -> None:
    native, rows = _step(name, instruction_set), [44, 0, 7, 44]
    hidden = native.hidden(rows)
    logits = native.logits(rows)
    assert torch.equal(native.logits(rows[1:3]), logits[1:3]), "rows do not depend on each other"
    assert torch.equal(native.hidden(range(45))[rows], hidden), "the logits have changed no state"
    assert torch.equal(native(np.array(TOKENS), RANGES, rows), logits)
    model = random_decoder(name)
    attend = TorchAttention(make_pool(model, "float32", 8, 16), RANGES, 16)
    expected = model(torch.tensor(TOKENS), attend.positions, attend)[rows]
    torch.testing.assert_close(hidden, expected, atol=2e-3, rtol=2e-3)
    torch.testing.assert_close(logits, model.logits(hidden), atol=2e-2, rtol=2e-2)


@each_set
def test_rows_that_are_not_there_are_refused(instruction_set: str) -> None:
    native = _step("llama", instruction_set)
    for read in (native.logits, native.hidden):
        assert len(read([])) == 0
        for row in (45, -1):
            with pytest.raises(NativeError, match=f"row 0 is token {row}; the step has 45"):
                read([row])


def test_before_a_step_there_are_none() -> None:
    native = NativeModel(random_decoder("llama"), "avx2", 1)
    with pytest.raises(NativeError, match="row 0 is token 0; the step has 0"):
        native.hidden([0])
