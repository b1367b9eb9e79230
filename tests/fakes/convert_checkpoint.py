"""Stands in for TensorRT-LLM's convert_checkpoint.py of Llama, Qwen and EAGLE: its directory says which."""

from __future__ import annotations

import sys
from pathlib import Path

from upstream_tool import checkpoint_config, parse, read_config, refuse, table, write_ranks

ARCHITECTURES = {
    "llama": ("LlamaForCausalLM", "MistralForCausalLM"),
    "qwen": ("Qwen2ForCausalLM", "Qwen3ForCausalLM"),
    "eagle": ("LlamaForCausalLM",),
}


def main() -> None:
    """Write a TensorRT-LLM checkpoint without weights."""
    family = Path(sys.argv[0]).absolute().parent.name
    args = parse(table(f"convert_checkpoint_{family}")["flags"])
    hf = read_config(args.model_dir, "model_dir")
    if hf["architectures"][0] not in ARCHITECTURES[family]:
        refuse(f"{hf['architectures'][0]} is not of the family {family}")
    quantization = {"kv_cache_quant_algo": "FP8"} if getattr(args, "fp8_kv_cache", False) else {}
    config = checkpoint_config(hf, args, quantization)
    if family == "eagle":
        if args.pp_size > 1:
            refuse("Pipeline parallelism is not supported")
        if args.max_draft_len > 256:
            raise AssertionError("args.max_draft_len > 256 is not supported")
        read_config(args.eagle_model_dir, "eagle_model_dir")
        config |= {
            "architecture": "EagleForCausalLM",
            "max_draft_len": args.max_draft_len,
            "num_eagle_layers": args.num_eagle_layers,
            "max_non_leaves_per_layer": args.max_non_leaves_per_layer,
        }
    write_ranks(Path(args.output_dir), args.tp_size * args.pp_size, "safetensors", config)


main()
