"""Stands in for TensorRT-LLM's examples/quantization/quantize.py."""

from __future__ import annotations

from pathlib import Path

from upstream_tool import checkpoint_config, parse, read_config, refuse, table, write_ranks

ALGORITHMS = {
    "fp8": "FP8",
    "fp8_pc_pt": "FP8_PER_CHANNEL_PER_TOKEN",
    "nvfp4": "NVFP4",
    "int8_sq": "W8A8_SQ_PER_CHANNEL",
    "int4_awq": "W4A16_AWQ",
    "w4a8_awq": "W4A8_AWQ",
    "int8_wo": "W8A16",
    "int4_wo": "W4A16",
    "full_prec": None,
}


def main() -> None:
    """Write a TensorRT-LLM checkpoint without weights."""
    args = parse(table("quantize_py")["flags"])
    hf = read_config(args.model_dir, "model_dir")
    if "quantization_config" in hf:
        refuse("the model is quantized already")
    data = Path(args.calib_dataset)
    if data.is_dir():
        if not [file for file in data.iterdir() if file.suffix == ".jsonl" and '"text"' in file.read_text()]:
            refuse(f"no train split with a text column in {data}")
    elif args.calib_dataset != "cnn_dailymail":
        raise NotImplementedError(f"Unsupported dataset name or local repo directory: {data}.")
    quantization = {"quant_algo": ALGORITHMS[args.qformat]}
    if args.kv_cache_dtype:
        if args.qformat == "full_prec":
            refuse("a KV cache is quantized with the weights only")
        quantization["kv_cache_quant_algo"] = args.kv_cache_dtype.upper()
    config = checkpoint_config(hf, args, quantization)
    if args.medusa_model_dir:
        read_config(args.medusa_model_dir, "medusa_model_dir")
        config |= {
            "architecture": "MedusaForCausalLM",
            "num_medusa_heads": args.num_medusa_heads,
            "max_draft_len": args.max_draft_len,
        }
    write_ranks(Path(args.output_dir), args.tp_size * args.pp_size, "safetensors", config)


main()
