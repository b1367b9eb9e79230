"""What the stand-ins for TensorRT-LLM's build tools share: command lines held to the recorded tables, and faults.

A fault is set by the variable FAKE_TRTLLM_FAULT: "midway" (an exception between two ranks), "disk-full",
"missing-rank", "killed", "silent" (a bad exit without a word). FAKE_TRTLLM_SM is the chip that the tool finds, 90 by
default.
"""

from __future__ import annotations

import argparse
import errno
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

FACTS = Path(__file__).resolve().parents[1] / "facts/build_tools.json"
FAULT = "FAKE_TRTLLM_FAULT"
SM = "FAKE_TRTLLM_SM"
VERSION = "1.2.1"
_TYPES = {"int": int, "float": float}


def table(name: str) -> dict[str, Any]:
    """Return one tool's recorded facts."""
    return json.loads(FACTS.read_text())[name]


def parse(flags: list[dict[str, Any]]) -> argparse.Namespace:
    """Parse this process's command line as the real tool's parser would; it ends the process on a wrong one."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    for flag in flags:
        names = [flag["flag"], *flag.get("aliases", [])]
        if flag["type"] == "flag":
            parser.add_argument(*names, action="store_true")
            continue
        choices = flag.get("choices")
        parser.add_argument(
            *names,
            type=_TYPES.get(flag["type"], str),
            # The tables spell some numeric defaults as the name of a constant.
            default=None if flag["type"] in _TYPES and isinstance(flag["default"], str) else flag["default"],
            choices=[one for one in choices if one is not None] if isinstance(choices, list) else None,
            nargs="+" if flag["type"] in ("paths+", "list") else None,
        )
    return parser.parse_args()


def refuse(message: str) -> None:
    """End as the tools do on what they do not support: an exception."""
    raise ValueError(message)


def write_ranks(directory: Path, ranks: int, suffix: str, config: dict[str, Any]) -> None:
    """Write config.json and a file for each rank, with the fault that the environment asks for."""
    fault = os.environ.get(FAULT)
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config, indent=4))
    for rank in range(ranks):
        print(f"[TRT-LLM] [I] rank {rank}", flush=True)
        if fault == "missing-rank" and rank == ranks - 1:
            continue
        (directory / f"rank{rank}.{suffix}").write_bytes(f"rank {rank} of {ranks}".encode())
        match fault:
            case "midway":
                raise RuntimeError("CUDA error: an illegal memory access was encountered")
            case "disk-full":
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            case "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            case "silent":
                sys.exit(1)


def read_config(directory: str | None, what: str) -> dict[str, Any]:
    """Read config.json of a directory that the command line names."""
    if directory is None or not (Path(directory) / "config.json").is_file():
        refuse(f"{what}: {directory} has no config.json")
    return json.loads((Path(str(directory)) / "config.json").read_text())


def checkpoint_config(hf: dict[str, Any], args: argparse.Namespace, quantization: dict[str, Any]) -> dict[str, Any]:
    """Return config.json of a TensorRT-LLM checkpoint, with the keys that its documentation requires."""
    return {
        "producer": {"name": "stand-in"},
        "architecture": hf["architectures"][0],
        "dtype": args.dtype if args.dtype != "auto" else hf.get("dtype", hf.get("torch_dtype", "bfloat16")),
        "logits_dtype": "float32",
        "vocab_size": hf["vocab_size"],
        "hidden_size": hf["hidden_size"],
        "num_hidden_layers": hf["num_hidden_layers"],
        "num_attention_heads": hf["num_attention_heads"],
        "num_key_value_heads": hf.get("num_key_value_heads", hf["num_attention_heads"]),
        "intermediate_size": hf["intermediate_size"],
        "hidden_act": hf["hidden_act"],
        "max_position_embeddings": hf["max_position_embeddings"],
        "position_embedding_type": "rope_gpt_neox",
        "mapping": {"world_size": args.tp_size * args.pp_size, "tp_size": args.tp_size, "pp_size": args.pp_size},
        "quantization": {"quant_algo": None, "kv_cache_quant_algo": None} | quantization,
    }
