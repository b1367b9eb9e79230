"""Finds the reader of a checkpoint: one for each way to quantize, by the ``quant_method`` of its configuration.

A reader is a function of ``quantization_config`` and of the names of the checkpoint's tensors. It returns how each
linear is held, and what each tensor becomes (``quant.relay``); nothing else knows of formats.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from inflight.engine.quant.config import Quantization
from inflight.engine.quant.readers import awq, compressed_tensors, fp8, gguf, gptq, modelopt, mxfp4
from inflight.errors import DeploymentError
from inflight.gguf.files import is_gguf
from inflight.precedence import overruled
from inflight.text.files import read_json

Reader = Callable[[Mapping[str, Any], frozenset[str]], Quantization]
READERS: dict[str, Reader] = {
    "modelopt": modelopt.read,
    "fp8": fp8.read,
    "compressed-tensors": compressed_tensors.read,
    "gptq": gptq.read,
    "awq": awq.read,
    "mxfp4": mxfp4.read,
}


def load_quantization(directory: Path, names: frozenset[str]) -> Quantization | None:
    """Read how the checkpoint in ``directory``, or in a GGUF file, is quantized; None: it is not.

    Args:
        directory: the checkpoint's, or the file.
        names: of its tensors; none: where it is only asked whether it is quantized.

    Raises:
        DeploymentError: it is quantized in a way that is not supported, or lacks a tensor that its format needs.
    """
    if is_gguf(directory):
        return gguf.read(directory)
    foreign = read_json(directory / "config.json").get("quantization_config")
    method = foreign.get("quant_method") if isinstance(foreign, dict) else None
    if foreign is not None and (not isinstance(method, str) or method not in READERS):
        raise DeploymentError(
            f"config.json: quantization_config.quant_method is {method!r}; it must be one of {', '.join(READERS)}"
        )
    own = read_json(directory / modelopt.FILE_NAME, optional=True)
    if own and (foreign is None or foreign["quant_method"] == "modelopt"):
        return modelopt.read_own(own)
    if own:
        overruled(
            "quantization", f"`quant_method` {method!r} of config.json", modelopt.FILE_NAME, own.get("quantization")
        )
    return None if foreign is None else READERS[foreign["quant_method"]](foreign, names)
