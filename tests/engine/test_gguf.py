"""GGUF files, written by the package of their makers, give the tokens of transformers on the decoded weights."""

from __future__ import annotations

import pytest
import torch

from inflight.engine.quant.gguf_blocks import FORMATS
from inflight.engine.scoring import Scorer
from tests.engine.support.checkpoints import PROMPTS, TOKENS
from tests.engine.support.driving import ask, load, run
from tests.engine.support.gguf_files import NAMES, GgufFile, gguf_file, wide_gguf_file
from tests.engine.support.native import each_step

COUNT = 12
MIXED = (("v_proj", "Q6_K"), ("down_proj", "Q6_K"), ("embed_tokens", "Q6_K"), ("lm_head", "Q6_K"))
"""What llama.cpp stores otherwise in a file that it calls Q4_K_M."""


def _check(file: GgufFile, **settings: object) -> None:
    requests = [ask(prompt, COUNT) for prompt in PROMPTS[:8]]
    outputs = run(load(file.path, num_blocks=512, **settings), requests)
    made = [(request.prompt, outputs[request.key].tokens) for request in requests]
    assert [tokens for _, tokens in made] == file.likeliest(made)


@each_step
@pytest.mark.parametrize("name", NAMES)
def test_architectures(name: str, cpu_step: str) -> None:
    _check(gguf_file(name), cpu_step=cpu_step)


@each_step
@pytest.mark.parametrize("kind", ["F16", "BF16", *FORMATS])
def test_types(kind: str, cpu_step: str) -> None:
    _check(wide_gguf_file(kind), cpu_step=cpu_step)


@pytest.mark.parametrize("kind", FORMATS)
def test_logits_are_those_of_the_decoded_weights(kind: str) -> None:
    file = wide_gguf_file(kind)
    made, expected = (Scorer(path, "float32", device="cpu").logits(TOKENS) for path in (file.path, file.plain))
    assert torch.equal(made, expected)


@each_step
@pytest.mark.parametrize("tied", [False, True])
def test_types_are_mixed(tied: bool, cpu_step: str) -> None:
    _check(wide_gguf_file("Q4_K", MIXED, tied), cpu_step=cpu_step)
