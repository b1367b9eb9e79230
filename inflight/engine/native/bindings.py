"""The functions and structures of the native step's library (``native/step.h``), for ctypes.

The structures have the fields of the header, in its order; ``inflight_abi`` is counted up when one of them changes.
"""

from __future__ import annotations

import ctypes
import functools
from ctypes import POINTER, c_char_p, c_double, c_float, c_int32, c_int64, c_void_p
from enum import IntEnum
from pathlib import Path
from typing import Any

import numpy as np

LIBRARY = Path(__file__).with_name("libinflight_step.so")
ABI = 9
INSTRUCTION_SETS = ("avx512_bf16", "avx512_vnni", "avx512", "avx2", "amx")
"""Best first, but for AMX: it must be asked for by name, since no processor has run its kernels."""
_LEAST_GAIN = 0.75
"""The speed of products of bfloat16 divided by that of float32's, below which they are not worth having."""
_MESSAGE_BYTES = 256


class Packed(IntEnum):
    """A weight's type in the library, ``Type`` in ``native/kernels.h``, as it is given or packed."""

    FLOAT32 = 0
    BFLOAT16 = 1
    INT8 = 2
    E4M3 = 3
    INT4 = 4
    INT8_COLUMNS = 5
    INT8_SUMS = 6
    MXFP4 = 7
    E4M3_GROUPS = 8
    INT4_MINIMUMS = 9
    INT8_MINIMUMS = 10


class NativeError(Exception):
    """The library refuses what it is given; the message says why."""

    @property
    def refusal(self) -> str:
        """What a user is told where it is too late for PyTorch to take over."""
        return f"the native step cannot compute this model: {self}; `engine.cpu_step: pytorch` computes it"


class Rope(ctypes.Structure):
    """``InflightRope``."""

    _fields_ = [("dim", c_int32), ("scale", c_float), ("frequencies", c_void_p)]


class Experts(ctypes.Structure):
    """``InflightExperts``."""

    _fields_ = [
        *((name, c_int32) for name in ("count", "per_token", "intermediate", "routing", "normalized")),
        ("scale", c_float),
        *((name, c_int32) for name in ("groups", "groups_per_token", "group_best", "shared_gate")),
        *((name, c_float) for name in ("limit", "slope")),
    ]


class Layer(ctypes.Structure):
    """``InflightLayer``."""

    _fields_ = [
        *((name, c_int32) for name in ("heads", "kv_heads", "head_dim", "intermediate", "rope", "interleaved")),
        *((name, c_int32) for name in ("window", "chunk", "width_norm")),
        *((name, c_float) for name in ("scale", "softcap", "query_beta")),
        *((name, c_int32) for name in ("query_length", "query_offset")),
        ("experts", Experts),
    ]


class Spec(ctypes.Structure):
    """``InflightSpec``."""

    _fields_ = [
        *((name, c_int32) for name in ("layers", "hidden", "vocabulary", "gelu")),
        *((name, c_float) for name in ("eps", "embedding_scale", "logit_softcap")),
        ("embedding_type", c_int32),
        ("embedding", c_void_p),
        ("ropes", c_int32),
        ("rope", POINTER(Rope)),
        ("layer", POINTER(Layer)),
    ]


class LayerCache(ctypes.Structure):
    """``InflightLayerCache``."""

    _fields_ = [(name, c_void_p) for name in ("keys", "values", "key_scales", "value_scales")]


class Cache(ctypes.Structure):
    """``InflightCache``."""

    _fields_ = [
        ("type", c_int32),
        ("block_size", c_int32),
        ("slots", c_int64),
        ("layer", POINTER(LayerCache)),
    ]


class Weight(ctypes.Structure):
    """``InflightWeight``."""

    _fields_ = [
        ("type", c_int32),
        ("packed_type", c_int32),
        ("source", c_void_p),
        ("outputs", c_int32),
        ("inputs", c_int32),
        *((name, c_void_p) for name in ("bias", "scales", "smooth")),
        ("input_scale", c_float),
        ("group", c_int32),
        ("minimums", c_void_p),
        ("input_group", c_int32),
    ]


class Range(ctypes.Structure):
    """``InflightRange``."""

    _fields_ = [
        ("count", c_int32),
        ("start", c_int32),
        ("at", c_int32),
        ("blocks", c_void_p),
        ("num_blocks", c_int32),
        ("trunk", c_int32),
        ("path", c_void_p),
    ]


class Step(ctypes.Structure):
    """``InflightStep``."""

    _fields_ = [
        ("tokens", c_int32),
        ("ids", c_void_p),
        ("ranges", c_int32),
        ("range", POINTER(Range)),
        ("rows", c_int32),
        ("row", c_void_p),
        ("logits", c_void_p),
    ]


SAMPLE = np.dtype(
    [*((name, "f8") for name in ("temperature", "top_p", "min_p", "number")), ("top_k", "i4")], align=True
)
"""``InflightSample``."""


@functools.cache
def load_library() -> ctypes.CDLL:
    """Return the library.

    Raises:
        NativeError: it is not there, or has another version of the interface.
        OSError: it cannot be loaded.
    """
    if not LIBRARY.is_file():
        raise NativeError("the native step was not built; install a C++ compiler and then Inflight once more")
    library = ctypes.CDLL(str(LIBRARY))
    if library.inflight_abi() != ABI:
        raise NativeError(f"{LIBRARY} has version {library.inflight_abi()} of the interface; {ABI} is expected")
    message = [c_char_p, c_int32]
    for name, result, arguments in (
        ("inflight_has", c_int32, [c_char_p]),
        ("inflight_bf16_gain", c_double, [c_char_p]),
        ("inflight_create", c_void_p, [POINTER(Spec), c_char_p, c_int32, *message]),
        ("inflight_destroy", None, [c_void_p]),
        ("inflight_set_weight", c_int32, [c_void_p, c_int32, c_int32, c_int32, POINTER(Weight), *message]),
        ("inflight_set_vector", c_int32, [c_void_p, c_int32, c_int32, c_void_p, *message]),
        ("inflight_set_cache", c_int32, [c_void_p, POINTER(Cache), *message]),
        ("inflight_step", c_int32, [c_void_p, POINTER(Step), *message]),
        ("inflight_logits", c_int32, [c_void_p, c_int32, c_void_p, c_void_p, *message]),
        ("inflight_hidden", c_int32, [c_void_p, c_int32, c_void_p, c_void_p, *message]),
        ("inflight_draw", c_int32, [c_void_p, c_int32, c_void_p, c_void_p, c_void_p, *message]),
        ("inflight_phases", c_int32, [c_void_p, POINTER(c_double), c_int32]),
        ("inflight_phase_name", c_char_p, [c_int32]),
    ):
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    return library


def instruction_sets() -> list[str]:
    """Return those of ``INSTRUCTION_SETS`` that the library has kernels for and this processor has; the best is first.

    That is their order, but for processors whose products of bfloat16 are slower than those of float32: Intel's Xeons
    since Sapphire Rapids leave them to AMX, and do half as many multiply-adds by them.

    Raises:
        NativeError, OSError: as ``load_library``.
    """
    library = load_library()
    found = [name for name in INSTRUCTION_SETS if library.inflight_has(name.encode())]
    if bf16_gain() < _LEAST_GAIN:
        found.sort(key=lambda name: (not name.startswith("avx512"), name == "avx512_bf16"))
    return found


@functools.cache
def bf16_gain() -> float:
    """Return how many multiply-adds of bfloat16 this processor does for each of float32, measured once; 0: none.

    Raises:
        NativeError, OSError: as ``load_library``.
    """
    return float(load_library().inflight_bf16_gain(b"avx512_bf16"))


def call(name: str, *arguments: Any) -> Any:
    """Call a function that explains what it refuses, and return its result.

    Raises:
        NativeError: with its explanation.
        MemoryError: there is not enough memory for what it was asked for.
    """
    message = ctypes.create_string_buffer(_MESSAGE_BYTES)
    result = getattr(load_library(), name)(*arguments, message, _MESSAGE_BYTES)
    if message.value == b"std::bad_alloc":
        raise MemoryError("the native step cannot allocate memory")
    if message.value:
        raise NativeError(message.value.decode(errors="replace"))
    return result


def phase_seconds(model: c_void_p) -> dict[str, float]:
    """Return the seconds that each phase of a model's steps has taken so far, by its name."""
    library, most = load_library(), 32
    seconds = (c_double * most)()
    count = library.inflight_phases(model, seconds, most)
    return {library.inflight_phase_name(phase).decode(): seconds[phase] for phase in range(count)}
