"""The kernels at the sizes of an 8B model, against float64 by norm: the cases of the first contact with a GPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

from benchmarks.contact import kernels
from benchmarks.contact.plan import KERNELS
from benchmarks.contact.record import Recorder, lines
from benchmarks.contact.sizes import LARGE
from benchmarks.contact.stage import Contact
from benchmarks.contact.steps import BLOCK_SIZE, AttentionStep
from benchmarks.random_weights import config_of
from inflight.engine.attention.torch_backend import QueryRange
from inflight.engine.kvcache.memory_pool import Fp8KvPool, KvScales
from inflight.engine.models.reading import read_model_config
from tests.gpu.support.device import DEVICE, DRY

pytestmark = [pytest.mark.dry, pytest.mark.filterwarnings("ignore::RuntimeWarning")]
_BLOCKS = 40 if DRY else 150_000
"""Of the last one the keys of the last head lie beyond 2**31 elements, with 8 heads of 128."""


@pytest.mark.parametrize("case", KERNELS)
def test_kernels(case: str, tmp_path: Path) -> None:
    contact = Contact(Recorder(tmp_path / "contact.jsonl", "A", "tests"), DRY, True, tmp_path)
    kernels.one(contact, case)
    found = lines(tmp_path / "contact.jsonl")
    assert found
    assert not [line for line in found if line.get("good") is False]


@pytest.mark.parametrize(("start", "count"), [(70, 1), (70, 20)])
def test_heads_that_begin_beyond_32_bits(start: int, count: int) -> None:
    if not DRY and torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("the device has no FP8")
    if not DRY and torch.cuda.mem_get_info()[0] < 8 << 30:
        pytest.skip("it takes 6 GiB of the device's memory")
    config = read_model_config(config_of(kernels.SMALL.shape if DRY else LARGE) | {"num_hidden_layers": 1})
    assert DRY or (config.num_kv_heads - 1) * _BLOCKS * BLOCK_SIZE * config.head_dim > 2**31
    scales = KvScales(torch.full((1,), 2.0**-5, device=DEVICE), torch.full((1,), 2.0**-6, device=DEVICE))
    dtype = torch.float16 if DRY else torch.bfloat16
    tensors = Fp8KvPool(config, _BLOCKS, BLOCK_SIZE, dtype, DEVICE, scales)
    width = -(-(start + count) // BLOCK_SIZE)
    blocks = list(range(_BLOCKS - width, _BLOCKS))
    slots = torch.arange((_BLOCKS - width) * BLOCK_SIZE, _BLOCKS * BLOCK_SIZE, device=DEVICE)
    generator = torch.Generator(DEVICE).manual_seed(0)
    held = torch.randn(2, len(slots), config.num_kv_heads, config.head_dim, generator=generator, device=DEVICE)
    tensors.write(0, slots, *held.to(dtype))
    heads = (config.num_heads, config.num_kv_heads, config.num_kv_heads)
    new = torch.randn(count, sum(heads), config.head_dim, generator=generator, device=DEVICE).to(dtype)
    step = AttentionStep(config, tensors, [QueryRange(0, start, count, blocks)], *new.split(heads, 1))
    assert step.error(step.seen()) < kernels.LIMITS[dtype]
    assert not tensors.parts[0][0, 0, : BLOCK_SIZE * (_BLOCKS - width)].view(torch.uint8).any(), "stored somewhere else"
