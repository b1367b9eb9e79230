"""What hostile requests are made of: sizes, values, nesting, tensors. Everything follows from a seeded generator."""

from __future__ import annotations

import struct
from random import Random
from typing import Any

from inflight.contract import ENGINE, ENSEMBLE, STAGES, Tensor

MODELS = tuple(STAGES)
PUBLIC = (ENSEMBLE, ENGINE)
"""The models that are for clients."""
ITEM_BYTES = {"BOOL": 1, "UINT8": 1, "FP16": 2, "INT32": 4, "FP32": 4, "INT64": 8, "UINT64": 8}
TYPES = (*ITEM_BYTES, "BYTES", "BF16", "INT4", "", "\0", "X" * 9000)
ODD_NUMBERS = (0, -1, 1, 2, 2**31 - 1, -(2**31), 2**31, 2**32, 2**62, 2**63 - 1, -(2**63), 2**63, 2**64, 10**40, 1e308)
ODD_TEXTS = ("", "\0", "\ud800", "\N{BOM}", "%s%n", "../../etc/passwd", "{{7*7}}", "[" * 99, "\N{GRINNING FACE}" * 99)
_NAMES = tuple(tensor.name for inputs, outputs in STAGES.values() for tensor in (*inputs, *outputs))


def size(random: Random, most: int) -> int:
    """Return a size from 1 to ``most``; each order of magnitude is as likely as the next."""
    return max(1, min(most, int(most ** random.random())))


def name(random: Random) -> str:
    """Return the name of an input: most often one that some stage has."""
    if random.random() < 0.8:
        return random.choice(_NAMES)
    return random.choice([*ODD_TEXTS, "x" * size(random, 1 << 20), "stream", "id", "parameters"])


def text(random: Random, most: int = 1 << 20) -> str:
    """Return a text, odd or long."""
    if random.random() < 0.3:
        return random.choice(ODD_TEXTS)
    return random.choice(["x", "hello ", "\n", "\N{CJK UNIFIED IDEOGRAPH-8BF7}", '"\\', "\u0301"]) * size(
        random, most // 6
    )


def nested(random: Random, most: int) -> str:
    """Return JSON of so many levels at most, sometimes without its end."""
    levels = size(random, most)
    opening, closing = random.choice([("[", "]"), ('{"a":', "}"), ('[{"text_input":', "}]")])
    return opening * levels + ("0" + closing * levels if random.random() < 0.7 else "")


def value(random: Random, depth: int = 2) -> Any:
    """Return any JSON value."""
    kind = random.randrange(7)
    if kind == 0 and depth:
        return [value(random, depth - 1) for _ in range(size(random, 50))]
    if kind == 1 and depth:
        return {name(random)[:999]: value(random, depth - 1) for _ in range(size(random, 20))}
    if kind in (2, 3):
        return random.choice(ODD_NUMBERS)
    return random.choice([None, True, False, 0.5, text(random, 10_000)])


def shape(random: Random, most: int = 2**63 - 1) -> list[int]:
    """Return a shape: small, or with dimensions whose product overflows, or with very many."""
    dims = random.choice([1, 2, 2, 2, 3, 3, 4, size(random, 2000)]) if most > 2**31 else random.randint(0, 2)
    odd = [dim for dim in (-1, -(2**62), 0, 2**31, 2**32, 2**62, 2**63 - 1, 129) if dim <= most]
    return [random.choice(odd) if random.random() < 0.3 else random.randint(1, 8) for _ in range(dims)]


def wild_inputs(random: Random, model: str) -> list[Tensor]:
    """Return some of the inputs that ``model`` declares, sometimes one of them twice."""
    inputs = random.sample(STAGES[model][0], random.randint(1, 4))
    return inputs + random.sample(inputs, 1) if random.random() < 0.05 else inputs


def wild_numbers(random: Random, count: int) -> list[int | float]:
    """Return numbers of which some are in no range, or are ids that no vocabulary has; or all are small ones."""
    odd = random.random() < 0.5
    return [
        random.choice(ODD_NUMBERS) if odd and random.random() < 0.5 else random.randrange(300) for _ in range(count)
    ]


def packed(random: Random, dtype: str, count: int) -> bytes:
    """Return the bytes of so many elements of a type, wild ones among them: as large as it allows, infinite, no number.

    The elements of a BYTES tensor have their right lengths.
    """
    if dtype == "BYTES":
        texts = [text(random, 300).encode("utf-8", "surrogatepass") for _ in range(count)]
        return b"".join(struct.pack("<I", len(one)) + one for one in texts)
    letter = {"BOOL": "?", "UINT8": "B", "FP16": "e", "INT32": "i", "FP32": "f", "INT64": "q", "UINT64": "Q"}[dtype]
    if letter in "ef":
        odd = [0.0, -1.0, 0.5, 1.0, 60000.0, float("inf"), float("-inf"), float("nan")]
        return struct.pack(f"<{count}{letter}", *(random.choice(odd) for _ in range(count)))
    bits = 8 * ITEM_BYTES[dtype]
    signed = letter in "iq"
    most, least = (1 << (bits - signed)) - 1, -(1 << (bits - 1)) if signed else 0
    numbers = (max(least, min(most, int(one))) for one in wild_numbers(random, count))
    return struct.pack(f"<{count}{letter}", *(bool(one) if dtype == "BOOL" else one for one in numbers))


def strings(random: Random, count: int) -> bytes:
    """Return the bytes of a BYTES tensor; some of the lengths in them are not those of what follows."""
    parts = []
    for _ in range(count):
        content = text(random, 1000).encode("utf-8", "surrogatepass")
        length = len(content) if random.random() < 0.6 else random.choice([0, 1, 2**31, 2**32 - 1, len(content) + 1])
        parts.append(struct.pack("<I", length) + content)
    return b"".join(parts)


def forged(random: Random, model: str) -> tuple[str, str, list[int], bytes]:
    """Return a tensor that looks like one of ``model``'s inputs: name, type, shape, and bytes that often fit them."""
    tensor: Tensor = random.choice(STAGES[model][0] if model in STAGES else STAGES[MODELS[0]][0])
    dims = [1, *(random.choice([0, 1, 2, 5, 64]) if dim < 0 else dim for dim in tensor.dims)]
    if random.random() < 0.1:
        dims[0] = random.choice([0, 2, 128, 129])
    count = 1
    for dim in dims:
        count *= dim
    if tensor.dtype == "BYTES":
        return tensor.name, tensor.dtype, dims, strings(random, count)
    width = ITEM_BYTES[tensor.dtype] * count
    content = random.choice(
        [bytes(width), random.randbytes(width), b"\xff" * width, b"\x01".ljust(max(1, width), b"\0")]
    )
    return tensor.name, tensor.dtype, dims, content[: width if random.random() < 0.9 else random.randint(0, width)]
