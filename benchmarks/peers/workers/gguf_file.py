"""A checkpoint of Hugging Face as a GGUF file, with its byte-level tokenizer: a Llama, a Qwen3-MoE or a gpt-oss.

llama.cpp's own conversion script knows published tokenizers only, by a hash of what they do; ours are not among them.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from benchmarks.peers.workers.gpt_oss_gguf import add_gpt_oss_config, gpt_oss_name, is_packed, packed_experts

Bits = npt.NDArray[np.uint16]
_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate": "ffn_gate_inp",
    "mlp.experts.gate_proj": "ffn_gate_exps",
    "mlp.experts.up_proj": "ffn_up_exps",
    "mlp.experts.down_proj": "ffn_down_exps",
}
_KINDS = {"llama": "llama", "qwen3_moe": "qwen3moe", "gpt_oss": "gpt-oss"}
"""llama.cpp's names of the architectures."""
_TYPES = {"BF16": np.uint16, "U8": np.uint8}
"""How numpy reads the types of safetensors."""
_FLOATS = ("norm.weight", "mlp.gate.weight", "mlp.router.weight", "sinks", "bias")
"""The ends of names of tensors that llama.cpp has in float32."""


def write_gguf(source: Path, output: Path, kind: Literal["bf16", "f16"] = "bf16") -> None:
    """Write the checkpoint ``source``, whose weights are in bfloat16, to the file ``output``.

    Args:
        source: the checkpoint's directory.
        output: the file.
        kind: the type of the weights there, but for those in MXFP4, which stay as they are.

    Raises:
        ValueError: it is none of these models, or not in bfloat16.
    """
    import gguf

    config = json.loads((source / "config.json").read_text())
    if (model := config["model_type"]) not in _KINDS:
        raise ValueError(f"{source}: model_type is {model!r}; only {', '.join(_KINDS)} are converted")
    writer = gguf.GGUFWriter(output, _KINDS[model])
    _add_config(writer, config)
    _add_tokenizer(writer, source, config["vocab_size"])
    for name, bits in stacked(tensors(source)):
        if name.endswith(_FLOATS):
            writer.add_tensor(gguf_name(name, model), widened(bits))
            continue
        rows = bits
        if model == "llama":
            rows = in_ggufs_order(name, bits, config["num_attention_heads"], config["num_key_value_heads"])
        if kind == "f16":
            writer.add_tensor(gguf_name(name, model), widened(rows).astype(np.float16))
        else:
            raw = np.ascontiguousarray(rows).view(np.uint8)
            writer.add_tensor(gguf_name(name, model), raw, raw_dtype=gguf.GGMLQuantizationType.BF16)
    for name, array in packed_experts(stored(source)):
        if array.dtype == np.uint8:
            writer.add_tensor(name, array, raw_dtype=gguf.GGMLQuantizationType.MXFP4)
        else:
            writer.add_tensor(name, widened(array))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def tensors(source: Path) -> Iterator[tuple[str, Bits]]:
    """Yield the tensors of a checkpoint as the bits of bfloat16, mapped and not read; no packed experts.

    Raises:
        ValueError: one of them is of another type.
    """
    for name, array in stored(source):
        if is_packed(name):
            continue
        if array.dtype != np.uint16:
            raise ValueError(f"{source}: {name} is {array.dtype}; only BF16 is converted")
        yield name, array


def stored(source: Path) -> Iterator[tuple[str, npt.NDArray[Any]]]:
    """Yield the tensors of a checkpoint's safetensors files, mapped and not read; bfloat16 as its bits.

    Raises:
        ValueError: one of them is of a type that no checkpoint here has.
    """
    for path in sorted(source.glob("*.safetensors")):
        with path.open("rb") as file:
            size = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(size))
        header.pop("__metadata__", None)
        for name, entry in header.items():
            if entry["dtype"] not in _TYPES:
                raise ValueError(f"{path}: {name} is {entry['dtype']}; only {' and '.join(_TYPES)} are converted")
            begin = 8 + size + entry["data_offsets"][0]
            yield name, np.memmap(path, _TYPES[entry["dtype"]], "r", begin, tuple(entry["shape"]))


def widened(bits: Bits) -> npt.NDArray[np.float32]:
    """Return the float32 of bfloat16's bits."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


def stacked(found: Iterable[tuple[str, Bits]]) -> Iterator[tuple[str, Bits]]:
    """Yield tensors; those of a layer's experts as one ``[experts, rows, columns]``, under a name without a number."""
    experts = dict[str, dict[int, Bits]]()
    for name, bits in found:
        layer, inside, part = name.partition(".experts.")
        if not inside:
            yield name, bits
            continue
        number, _, rest = part.partition(".")
        experts.setdefault(f"{layer}{inside}{rest}", {})[int(number)] = bits
    for name, parts in experts.items():
        yield name, np.stack([parts[number] for number in sorted(parts)])


def gguf_name(name: str, model: str = "llama") -> str:
    """Return GGUF's name of a tensor of Hugging Face's; ``model``: the ``model_type``."""
    if model == "gpt_oss" and (own := gpt_oss_name(name)):
        return own
    module, _, kind = name.rpartition(".")
    if not module.startswith("model.layers."):
        return f"{_NAMES[module]}.{kind}"
    layer, _, part = module.removeprefix("model.layers.").partition(".")
    return f"blk.{layer}.{_NAMES[part]}.{kind}"


def in_ggufs_order(name: str, rows: Bits, heads: int, kv_heads: int) -> Bits:
    """Return a weight ``[rows, columns]`` with queries' and keys' rows reordered.

    Hugging Face rotates a head's first half with its second, llama.cpp each even row with the odd one after it.
    """
    if not name.endswith(("q_proj.weight", "k_proj.weight")):
        return rows
    count = heads if name.endswith("q_proj.weight") else kv_heads
    halves = rows.reshape(count, 2, rows.shape[0] // count // 2, rows.shape[1])
    return halves.swapaxes(1, 2).reshape(rows.shape)


def _add_config(writer: Any, config: dict[str, Any]) -> None:
    heads = config["num_attention_heads"]
    rope = config.get("rope_parameters") or config
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(rope["rope_theta"])
    if "head_dim" in config:
        writer.add_key_length(config["head_dim"])
        writer.add_value_length(config["head_dim"])
    if experts := config.get("num_experts") or config.get("num_local_experts"):
        writer.add_expert_count(experts)
        writer.add_expert_used_count(config["num_experts_per_tok"])
        writer.add_expert_feed_forward_length(config.get("moe_intermediate_size") or config["intermediate_size"])
    if config["model_type"] == "gpt_oss":
        add_gpt_oss_config(writer, config)
    writer.add_rope_dimension_count(config.get("head_dim") or config["hidden_size"] // heads)
    writer.add_vocab_size(config["vocab_size"])
    writer.add_file_type(32)  # mostly bfloat16


def _add_tokenizer(writer: Any, source: Path, vocab: int) -> None:
    tokenizer = json.loads((source / "tokenizer.json").read_text())
    special = {entry["content"]: entry["id"] for entry in tokenizer["added_tokens"]}
    by_id = {number: token for token, number in (tokenizer["model"]["vocab"] | special).items()}
    merges = [one if isinstance(one, str) else " ".join(one) for one in tokenizer["model"]["merges"]]
    control, normal = 3, 1
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("llama-bpe")
    writer.add_token_list([by_id[number] for number in range(vocab)])
    writer.add_token_types([control if by_id[number] in special else normal for number in range(vocab)])
    writer.add_token_merges(merges)
    writer.add_add_bos_token(False)
