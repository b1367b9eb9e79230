"""GGUF files of small random checkpoints, written by the ``gguf`` package, and the weights that they are decoded to."""

from __future__ import annotations

import functools
import json
import math
import re
import tempfile
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
import torch
import transformers
from gguf import GGMLQuantizationType, quants
from safetensors.torch import load_file, save_file

from tests.engine.support.checkpoints import ARCHITECTURES, checkpoint, make_checkpoint

Array = npt.NDArray[Any]
_ARCHITECTURE = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "llama",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    "Qwen3MoeForCausalLM": "qwen3moe",
    "Gemma3ForCausalLM": "gemma3",
    "Phi3ForCausalLM": "phi3",
    "MixtralForCausalLM": "llama",
    "Ministral3ForCausalLM": "mistral3",
    "Qwen2MoeForCausalLM": "qwen2moe",
    "Gemma2ForCausalLM": "gemma2",
    "GptOssForCausalLM": "gpt-oss",
    "Olmo2ForCausalLM": "olmo2",
    "Olmo3ForCausalLM": "olmo2",
    "OlmoeForCausalLM": "olmoe",
    "SmolLM3ForCausalLM": "smollm3",
    "Glm4ForCausalLM": "glm4",
    "Glm4MoeForCausalLM": "glm4moe",
}
_SAYABLE: dict[str, dict[str, Any]] = {
    "qwen3moe": {"mlp_only_layers": []},
    "qwen2moe": {"decoder_sparse_step": 1},
    "smollm3": {"no_rope_layers": None, "num_hidden_layers": 4, "use_sliding_window": False, "sliding_window": None},
    "gemma2": {"tie_word_embeddings": True},
    "gpt-oss": {"swiglu_limit": 7.0},
    "glm4moe": {"first_k_dense_replace": 1},
}
"""What checkpoints have in place of what a GGUF file cannot say."""
_WIDE = {"hidden_size": 256, "intermediate_size": 256, "vocab_size": 320, "num_hidden_layers": 2}
"""Rows of whole blocks of 256."""
_EXPERTS = {
    "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 256, "norm_topk_prob": True, "head_dim": 64,
}  # fmt: skip
_LARGEST = 0.2
"""Of weights whose blocks are drawn."""


@dataclass(frozen=True)
class GgufFile:
    """A file, and the checkpoint that its weights are decoded to."""

    path: Path
    plain: Path

    def likeliest(self, sequences: Sequence[tuple[list[int], list[int]]]) -> list[list[int]]:
        """Return what transformers finds likeliest in place of each token of each output (see ``checkpoints``)."""
        whole = [torch.tensor([*prompt, *output]) for prompt, output in sequences]
        padded = torch.nn.utils.rnn.pad_sequence(whole, batch_first=True)
        with torch.inference_mode():
            best = _reference(self.plain)(padded, use_cache=False).logits.argmax(-1)
        return [
            best[row, len(prompt) - 1 : len(prompt) + len(output) - 1].tolist()
            for row, (prompt, output) in enumerate(sequences)
        ]


@functools.cache
def gguf_file(name: str, kind: str = "F32", special: tuple[tuple[str, str], ...] = ()) -> GgufFile:
    """Return the file of a checkpoint of ``checkpoints.ARCHITECTURES``.

    Args:
        name: the checkpoint's.
        kind: the type of the linears' weights; ``special`` has other types, by parts of names of tensors.
        special: see there.
    """
    folder = Path(tempfile.mkdtemp(dir=_folder().name))
    source = checkpoint(name) if name not in _SAYABLE else _sayable(name)
    return write_gguf(source, folder, lambda tensor: next((type for part, type in special if part in tensor), kind))


@functools.cache
def _sayable(name: str) -> Path:
    architecture, special = ARCHITECTURES[name]
    return make_checkpoint(f"{name}, gguf", architecture, special | _SAYABLE[name])


@functools.cache
def wide_gguf_file(
    kind: str, special: tuple[tuple[str, str], ...] = (), tied: bool = False, experts: bool = False
) -> GgufFile:
    """Return the file of a Llama, or of a Qwen3 with experts, that is wide enough for all types of blocks."""
    folder = Path(tempfile.mkdtemp(dir=_folder().name))
    torch.manual_seed(len(kind))
    name = "Qwen3Moe" if experts else "Llama"
    config = getattr(transformers, f"{name}Config")(
        **_WIDE, **(_EXPERTS if experts else {}), num_attention_heads=4, num_key_value_heads=2,
        max_position_embeddings=512, initializer_range=0.1, bos_token_id=None, eos_token_id=None,
        tie_word_embeddings=tied,
    )  # fmt: skip
    getattr(transformers, f"{name}ForCausalLM")(config).save_pretrained(folder / "source")
    kinds = dict(special)
    return write_gguf(
        folder / "source", folder, lambda tensor: next((kinds[part] for part in kinds if part in tensor), kind)
    )


def write_gguf(
    source: Path,
    folder: Path,
    kind_of: Callable[[str], str],
    add_tokenizer: Callable[[gguf.GGUFWriter, int], None] | None = None,
) -> GgufFile:
    """Write the checkpoint ``source`` to a file in ``folder``, and what its weights are decoded to beside it.

    Args:
        source, folder: see above.
        kind_of: returns the type of a tensor of two dimensions, by its name in the checkpoint.
        add_tokenizer: adds the tokenizer for a vocabulary of so many tokens; None: one of single characters.
    """
    config = json.loads((source / "config.json").read_text())
    config.setdefault("rope_parameters", {"rope_type": "default", "rope_theta": config.get("rope_theta", 10_000.0)})
    architecture = _ARCHITECTURE[config["architectures"][0]]
    writer = gguf.GGUFWriter(folder / "model.gguf", architecture)
    _add_config(writer, config, architecture)
    (add_tokenizer or add_tokens)(writer, config["vocab_size"])
    names = gguf.get_tensor_name_map(
        next(key for key, value in gguf.MODEL_ARCH_NAMES.items() if value == architecture), config["num_hidden_layers"]
    )
    tensors, plain = load_file(source / "model.safetensors"), dict[str, torch.Tensor]()
    experts = defaultdict[tuple[str, str], dict[int, Array]](dict)
    for ours, tensor in _by_experts(tensors).items():
        expert = re.search(r"\.experts\.(\d+)(?=\.)", ours)
        module = ours.replace(expert[0], ".experts") if expert else ours.replace("correction_bias", "correction.bias")
        theirs = str(names.get_name(module, try_suffixes=(".weight", ".bias"))) + ".weight" * module.endswith("sinks")
        linear = tensor.dim() == 2 and not _ROUTER.search(ours)
        data, kind = tensor.float().numpy(), kind_of(ours) if linear else "F32"
        stored, decoded = _blocks(data, kind, seed=len(plain))
        plain[ours] = torch.from_numpy(decoded.copy())
        if expert:
            experts[theirs, kind][int(expert[1])] = stored
        else:
            _add_tensor(writer, theirs, _as_llama_cpp(ours, stored, config, architecture), kind)
    for (theirs, kind), parts in experts.items():
        _add_tensor(writer, theirs, np.stack([parts[number] for number in sorted(parts)]), kind)
    _add_factors(writer, config, architecture)
    for step in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file, writer.close):
        step()
    (folder / "plain").mkdir()
    save_file(
        _stacked(plain) if architecture == "gpt-oss" else plain, folder / "plain/model.safetensors", {"format": "pt"}
    )
    if architecture in ("gemma2", "gemma3"):  # a file does not say it; in all models but one it is this
        config["query_pre_attn_scalar"] = config["head_dim"]
    (folder / "plain" / "config.json").write_text(json.dumps(config | {"dtype": "float32"}))
    return GgufFile(folder / "model.gguf", folder / "plain")


_ROUTER = re.compile(r"(mlp|block_sparse_moe)\.(gate|router|shared_expert_gate)\.weight")


def _by_experts(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return gpt-oss' tensors with those of each expert, and with gate and up, for themselves; others as they are."""
    apart = dict[str, torch.Tensor]()
    for name, tensor in tensors.items():
        match = re.fullmatch(r"(.*\.experts)\.(gate_up|down)_proj(_bias)?", name)
        if match is None:
            apart[name] = tensor
            continue
        kind = "bias" if match[3] else "weight"
        for number, values in enumerate(tensor):
            rows = values if match[3] else values.t()
            parts = {"gate": rows[::2], "up": rows[1::2]} if match[2] == "gate_up" else {"down": rows}
            for part, held in parts.items():
                apart[f"{match[1]}.{number}.{part}_proj.{kind}"] = held.contiguous()
    return apart


def _stacked(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return tensors of ``_by_experts`` as gpt-oss' checkpoint has them."""
    held, experts = dict[str, torch.Tensor](), defaultdict[str, list[torch.Tensor]](list)
    for name, tensor in tensors.items():
        match = re.fullmatch(r"(.*\.experts)\.\d+\.(up|down)_proj\.(weight|bias)", name)
        if match:
            gate = tensors[name.replace("up_proj", "gate_proj")]
            rows = tensor if match[2] == "down" else torch.stack((gate, tensor), 1).flatten(0, 1)
            part = "gate_up" if match[2] == "up" else "down"
            ours = f"{match[1]}.{part}_proj" + ("_bias" if match[3] == "bias" else "")
            experts[ours].append(rows if match[3] == "bias" else rows.t())
        elif ".experts." not in name:
            held[name] = tensor
    return held | {name: torch.stack(parts).contiguous() for name, parts in experts.items()}


def draw_blocks(kind: str, rows: int, columns: int, seed: int = 0) -> Array:
    """Return blocks with any bits, and scales by which weights are small numbers."""
    generator, type = np.random.default_rng(seed), GGMLQuantizationType[kind]
    block, size = gguf.GGML_QUANT_SIZES[type]
    drawn = generator.integers(0, 256, (rows * columns // block, size), dtype=np.uint8)
    steps = generator.uniform(-_LARGEST, _LARGEST, len(drawn)) / _STEPS.get(kind, 1)
    for at, scales in zip(SCALES_AT[kind], (steps, steps * _MIDDLE.get(kind, 0)), strict=False):
        drawn[:, at : at + 2] = scales.astype(np.float16)[:, None].view(np.uint8)
    if kind == "MXFP4":
        drawn[:, 0] = generator.integers(118, 122, len(drawn))
    return drawn.reshape(rows, -1)


SCALES_AT = {
    "Q4_0": (0,), "Q4_1": (0, 2), "Q5_0": (0,), "Q5_1": (0, 2), "Q8_0": (0,), "Q2_K": (80, 82), "Q3_K": (108,),
    "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,), "IQ4_NL": (0,), "IQ4_XS": (0,), "MXFP4": (),
}  # fmt: skip
"""Where a block has its scale, and its minimum, in float16."""
_STEPS = {
    "Q4_0": 8, "Q4_1": 15, "Q5_0": 16, "Q5_1": 31, "Q8_0": 127, "Q2_K": 15 * 3, "Q3_K": 32 * 4, "Q4_K": 63 * 15,
    "Q5_K": 63 * 31, "Q6_K": 127 * 32, "IQ4_NL": 127, "IQ4_XS": 32 * 127,
}  # fmt: skip
"""How many times its block's scale a weight is at the most."""
_MIDDLE = {"Q4_1": -7.5, "Q5_1": -15.5, "Q2_K": 1.5, "Q4_K": 7.5, "Q5_K": 15.5}
"""How many times its scale a block's minimum is, so that weights are about zero."""


def add_tokens(writer: gguf.GGUFWriter, count: int) -> None:
    """Add a tokenizer of single characters, of which the first is padding."""
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list([chr(0x4E00 + number) for number in range(count)])
    writer.add_token_types([gguf.TokenType.CONTROL] + [gguf.TokenType.NORMAL] * (count - 1))
    writer.add_token_merges([])
    writer.add_pad_token_id(0)


def _blocks(data: Array, kind: str, seed: int) -> tuple[Array, Array]:
    """Return a weight as it is stored, and decoded: what the package cannot quantize is drawn."""
    type = GGMLQuantizationType[kind]
    try:
        stored = quants.quantize(data, type)
    except NotImplementedError:
        stored = draw_blocks(kind, *data.shape, seed=seed)
    return stored, quants.dequantize(stored, type) if kind != "F32" else data


def _add_tensor(writer: gguf.GGUFWriter, name: str, stored: Array, kind: str) -> None:
    raw = None if kind in ("F32", "F16") else GGMLQuantizationType[kind]
    writer.add_tensor(name, np.ascontiguousarray(stored), raw_dtype=raw)


def _as_llama_cpp(name: str, stored: Array, config: dict[str, Any], architecture: str) -> Array:
    """Change a tensor as llama.cpp's conversion does."""
    module = name.rpartition(".")[0]
    if architecture in ("gemma2", "gemma3") and name.endswith("norm.weight"):
        return stored + np.float32(1)
    if module.endswith("shared_expert_gate"):
        return stored.squeeze(0)
    if architecture in ("llama", "mistral3", "smollm3") and module.endswith(("q_proj", "k_proj")):
        heads = config["num_attention_heads" if module.endswith("q_proj") else "num_key_value_heads"]
        halves = stored.reshape(heads, 2, stored.shape[0] // heads // 2, *stored.shape[1:])
        return halves.swapaxes(1, 2).reshape(stored.shape)
    return stored


def _add_config(writer: gguf.GGUFWriter, config: dict[str, Any], architecture: str) -> None:
    ropes = config["rope_parameters"]
    rope = ropes.get("full_attention", ropes)
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(rope["rope_theta"])
    writer.add_rope_dimension_count(int(head_dim * rope.get("partial_rotary_factor", 1.0)))
    _add_experts(writer, config, architecture)
    if caps := config.get("attn_logit_softcapping"):
        writer.add_attn_logit_softcapping(caps)
        writer.add_final_logit_softcapping(config["final_logit_softcapping"])
    if "llama_4_scaling_beta" in rope:
        writer.add_attn_temperature_scale(rope["llama_4_scaling_beta"])
    if config.get("sliding_window"):
        writer.add_sliding_window(config["sliding_window"])
    if architecture == "gemma3" or "Olmo3ForCausalLM" in config["architectures"]:
        writer.add_sliding_window_pattern([kind == "sliding_attention" for kind in config["layer_types"]])
    if architecture == "gemma3":
        writer.add_rope_freq_base_swa(ropes["sliding_attention"]["rope_theta"])
    if rope["rope_type"] in ("linear", "yarn"):
        writer.add_rope_scaling_type(gguf.RopeScalingType(rope["rope_type"]))
        writer.add_rope_scaling_factor(rope["factor"])
    if "original_max_position_embeddings" in rope and rope["rope_type"] != "llama3":
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])


def _add_experts(writer: gguf.GGUFWriter, config: dict[str, Any], architecture: str) -> None:
    count = next(
        (config[name] for name in ("num_local_experts", "n_routed_experts", "num_experts") if name in config), 0
    )
    if not count:
        return
    writer.add_expert_count(count)
    writer.add_expert_used_count(config["num_experts_per_tok"])
    if architecture != "olmoe" and "MixtralForCausalLM" not in config["architectures"]:
        writer.add_expert_feed_forward_length(config.get("moe_intermediate_size") or config["intermediate_size"])
    if architecture == "qwen2moe":
        writer.add_expert_shared_feed_forward_length(config["shared_expert_intermediate_size"])
    if architecture == "glm4moe":
        writer.add_expert_shared_count(config["n_shared_experts"])
        writer.add_leading_dense_block_count(config["first_k_dense_replace"])
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
        writer.add_expert_weights_scale(config["routed_scaling_factor"])
        writer.add_expert_weights_norm(config["norm_topk_prob"])
        writer.add_expert_group_count(config["n_group"])
        writer.add_expert_group_used_count(config["topk_group"])


def _add_factors(writer: gguf.GGUFWriter, config: dict[str, Any], architecture: str) -> None:
    """Write what frequencies are divided by, as llama.cpp's conversion does."""
    rope = config["rope_parameters"]
    if rope.get("rope_type") == "longrope":
        for kind in ("long", "short"):
            writer.add_tensor(f"rope_factors_{kind}.weight", np.array(rope[f"{kind}_factor"], np.float32))
        original = rope["original_max_position_embeddings"]
        scale = config["max_position_embeddings"] / original
        writer.add_rope_scaling_orig_ctx_len(original)
        writer.add_rope_scaling_attn_factors(math.sqrt(1 + math.log(scale) / math.log(original)) if scale > 1 else 1.0)
    if rope.get("rope_type") == "llama3":
        head_dim = config["head_dim"]
        frequencies = rope["rope_theta"] ** -(torch.arange(0, head_dim, 2).float() / head_dim)
        scaled, _ = transformers.modeling_rope_utils.ROPE_INIT_FUNCTIONS["llama3"](
            transformers.LlamaConfig(**{key: config[key] for key in ("hidden_size", "num_attention_heads", "head_dim")},
                                     rope_parameters=rope), torch.device("cpu"))  # fmt: skip
        writer.add_tensor("rope_freqs.weight", (frequencies / scaled).numpy())


@functools.cache
def _reference(plain: Path) -> Any:
    model = transformers.AutoModelForCausalLM.from_pretrained(plain, dtype=torch.float32, attn_implementation="eager")
    return model.eval()


@functools.cache
def _folder() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="inflight-gguf-")


_KINDS = (
    "Llama", "Mistral", "Ministral3", "Mixtral", "Qwen2", "Qwen2Moe", "Qwen3", "Qwen3Moe", "Gemma2", "Gemma3Text",
    "Phi3", "GptOss", "Olmo2", "Olmo3", "Olmoe", "SmolLM3", "Glm4", "Glm4Moe",
)  # fmt: skip
_UNSAID = (
    "qwen2, windows", "qwen2moe, windows", "qwen3moe, windows", "llama, yarn, all", "qwen3, biases", "gemma2, no caps",
)  # fmt: skip
NAMES = [name for name, (kind, _) in ARCHITECTURES.items() if kind in _KINDS and name not in _UNSAID]
"""The checkpoints that a GGUF file can say all of."""
