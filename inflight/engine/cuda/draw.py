"""Drawing tokens on a GPU without sorting the vocabulary: the same tokens as ``sampler``'s draw, which sorts.

A token is drawn among the likeliest, in the order of their logits and then of their ids. Where it is one of the first
``CANDIDATES``, these are all that must be known, and the sum over the others where no ``top_k`` cuts them off. Where it
may not be, a kernel looks for its place in the order, digit by digit of the logit's bits, in a few passes over the row;
for all other rows it returns at once. The device decides which rows these are, so that the host does not wait.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

CANDIDATES = 1024
_CHUNK = 4096
_BLOCK = 512


def draw(logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, numbers: Tensor) -> Tensor:
    """Return the tokens drawn, int64 ``[n]``; arguments are those of ``sampler.draw_sorted``."""
    size = logits.shape[-1]
    values, ids = _likeliest(logits)
    count = values.shape[-1]
    scaled = values.double() / temperature
    peak = scaled[:, :1].contiguous()
    inside = torch.arange(count, device=logits.device) < top_k
    weights = (scaled - peak).exp().masked_fill(~inside, 0.0)
    total = weights.sum(dim=-1, keepdim=True)
    if count < size:
        total = torch.where(top_k <= count, total, _total(logits, temperature, peak))
    probabilities = weights / total
    before = probabilities.cumsum(dim=-1) - probabilities
    kept = inside & (before < top_p) & (probabilities >= min_p * probabilities[:, :1])
    kept[:, 0] = True
    mass = (probabilities * kept).cumsum(dim=-1)
    beyond = kept[:, -1:] & (top_k > count)  # what may be drawn goes on behind the candidates
    whole = torch.where(beyond, 1.0, mass[:, -1:])
    places = torch.searchsorted(mass, numbers * whole, right=True)
    sure = (places < count) & ((top_k <= count) | (top_k >= size))
    places = places.clamp(max=count - 1)
    tokens = ids.gather(-1, places)
    if count == size:
        return tokens[:, 0]
    # Of the logits that equal the last candidate's there may be more, with smaller ids.
    sure &= values.gather(-1, places) > values[:, -1:]
    sure &= ~beyond | ((top_k >= size) & (top_p >= 1) & (min_p <= 0))
    table = torch.cat((temperature, top_k, top_p, min_p, numbers, peak), dim=-1)
    _find_kernel[(len(logits),)](logits, sure, table, tokens, size, logits.stride(0), BLOCK=_BLOCK, num_warps=8)
    return tokens[:, 0]


def _likeliest(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Return the largest logits of each row and their ids ``[n, CANDIDATES]``; the smaller one of equals is first."""
    values, ids = logits.topk(min(CANDIDATES, logits.shape[-1]), dim=-1)
    ids, order = ids.sort(dim=-1)
    # An infinite bias is as likely as can be; and there is one zero.
    values = values.gather(-1, order).clamp(max=torch.finfo(torch.float32).max) + 0.0
    values, order = values.sort(dim=-1, descending=True, stable=True)
    return values, ids.gather(-1, order)


def _total(logits: Tensor, temperature: Tensor, peak: Tensor) -> Tensor:
    """Return the sum of each row's weights, float64 ``[n, 1]``."""
    rows, size = logits.shape
    sums = torch.empty((rows, triton.cdiv(size, _CHUNK)), dtype=torch.float64, device=logits.device)
    _total_kernel[sums.shape](
        logits, temperature, peak, sums, size, logits.stride(0), temperature.stride(0), BLOCK=_CHUNK
    )
    return sums.sum(dim=-1, keepdim=True)


@triton.jit
def _total_kernel(logits, temperature, peak, sums, size, stride, temperature_stride, BLOCK: tl.constexpr):
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    value = _read(logits + row * stride, chunk * BLOCK, size, BLOCK)
    weight = _weight(value, tl.load(temperature + row * temperature_stride), tl.load(peak + row))
    tl.store(sums + row * tl.num_programs(1) + chunk, tl.sum(weight, 0))


@triton.jit
def _read(row, begin, size, BLOCK: tl.constexpr):
    """Return some logits of a row, and minus infinity behind its end."""
    places = begin + tl.arange(0, BLOCK)
    value = tl.load(row + places, mask=places < size, other=float("-inf"))
    value = tl.minimum(value, 3.4028234663852886e38)
    return tl.where(value == 0.0, 0.0, value)


@triton.jit
def _weight(value, temperature, peak):
    return tl.exp(value.to(tl.float64) / temperature - peak)


@triton.jit
def _key(value):
    """Return integers from 0 to 2**32 - 1 that are ordered as the float32 values are."""
    bits = value.to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64) + 0x80000000


@triton.jit
def _value(key):
    bits = (key - 0x80000000).to(tl.int32)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _heavy(value, temperature, peak, least, COUNT: tl.constexpr):
    """Return what logits count: one each, or with no ``COUNT`` their weights that are not below ``least``."""
    if COUNT:
        return tl.full(value.shape, 1.0, tl.float64)
    weight = _weight(value, temperature, peak)
    return tl.where(weight >= least, weight, 0.0)


@triton.jit
def _search(row, size, temperature, peak, least, target, COUNT: tl.constexpr, BLOCK: tl.constexpr):
    """Return the largest key for which what it and larger ones count is more than the target."""
    found = tl.full((), 0, tl.int64)
    for digit in range(8):  # of 4 bits each
        unit = tl.full((), 1, tl.int64) << (28 - 4 * digit)
        steps = found + tl.arange(0, 16) * unit
        sums = tl.zeros((BLOCK, 16), tl.float64)
        for begin in range(0, size, BLOCK):
            value = _read(row, begin, size, BLOCK)
            counts = tl.where(begin + tl.arange(0, BLOCK) < size, _heavy(value, temperature, peak, least, COUNT), 0.0)
            sums += tl.where(_key(value)[:, None] >= steps[None, :], counts[:, None], 0.0)
        reached = (tl.sum(sums, 0) > target).to(tl.int64)
        found += tl.maximum(tl.sum(reached, 0) - 1, 0) * unit
    return found


@triton.jit
def _above(row, size, temperature, peak, least, key, COUNT: tl.constexpr, BLOCK: tl.constexpr):
    """Return what larger keys count, and how many keys equal this one."""
    above, equal = tl.zeros((BLOCK,), tl.float64), tl.zeros((BLOCK,), tl.float64)
    for begin in range(0, size, BLOCK):
        value = _read(row, begin, size, BLOCK)
        counts = tl.where(begin + tl.arange(0, BLOCK) < size, _heavy(value, temperature, peak, least, COUNT), 0.0)
        keys = _key(value)
        above += tl.where(keys > key, counts, 0.0)
        equal += tl.where((keys == key) & (begin + tl.arange(0, BLOCK) < size), 1.0, 0.0)
    return tl.sum(above, 0), tl.sum(equal, 0)


@triton.jit
def _find_kernel(logits, sure, table, tokens, size, stride, BLOCK: tl.constexpr):
    """Draw the token of a row for which the candidates do not suffice."""
    index = tl.program_id(0).to(tl.int64)
    if tl.load(sure + index):
        return
    row, own = logits + index * stride, table + index * 6
    temperature, top_k, top_p = tl.load(own), tl.load(own + 1), tl.load(own + 2)
    min_p, number, peak = tl.load(own + 3), tl.load(own + 4), tl.load(own + 5)
    # What may be drawn: the keys above `cut`, and the first `ties` of those that equal it.
    cut, ties = tl.full((), 0, tl.int64), top_k
    if top_k < size:
        cut = _search(row, size, temperature, peak, 0.0, top_k - 1.0, True, BLOCK)
        larger, _ = _above(row, size, temperature, peak, 0.0, cut, True, BLOCK)
        ties = top_k - larger
    if top_p < 1.0:
        total, _ = _above(row, size, temperature, peak, 0.0, cut, False, BLOCK)
        nucleus = top_p * (total + ties * _weight(_value(cut), temperature, peak)) if top_k < size else top_p * total
        edge = _search(row, size, temperature, peak, 0.0, nucleus, False, BLOCK)
        larger, equal = _above(row, size, temperature, peak, 0.0, edge, False, BLOCK)
        needed = tl.minimum(tl.ceil((nucleus - larger) / _weight(_value(edge), temperature, peak)), equal)
        ties = needed if edge > cut else (tl.minimum(needed, ties) if edge == cut else ties)
        cut = tl.maximum(edge, cut)
    total, _ = _above(row, size, temperature, peak, min_p, cut, False, BLOCK)
    last = _weight(_value(cut), temperature, peak)
    target = number * (total + tl.where((cut > 0) & (last >= min_p), ties * last, 0.0))
    found = tl.maximum(_search(row, size, temperature, peak, min_p, target, False, BLOCK), cut)
    larger, equal = _above(row, size, temperature, peak, min_p, found, False, BLOCK)
    most = tl.where(found == cut, ties, equal)
    place = tl.floor((target - larger) / _weight(_value(found), temperature, peak))
    place = tl.minimum(tl.maximum(place, 0.0), most - 1.0)
    _take(row, size, found, place, tokens + index, BLOCK)


@triton.jit
def _take(row, size, key, place, token, BLOCK: tl.constexpr):
    """Store the id of one of those that equal a key, in the order of their ids."""
    passed = tl.full((), 0.0, tl.float64)
    for begin in range(0, size, BLOCK):
        ids = begin + tl.arange(0, BLOCK)
        equal = ((_key(_read(row, begin, size, BLOCK)) == key) & (ids < size)).to(tl.float64)
        ranks = passed + tl.cumsum(equal, 0)
        tl.store(token + ids * 0, ids.to(tl.int64), mask=(equal > 0) & (ranks == place + 1.0))
        passed += tl.sum(equal, 0)
