"""Small random checkpoints quantized by ModelOpt, and ModelOpt's own simulation of each: what ours is held to."""

from __future__ import annotations

import copy
import functools
import secrets
import shutil
import tempfile
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # it has not been tested with each release of transformers
    import modelopt.torch.quantization as mtq
    from modelopt.torch.export import export_hf_checkpoint
    from modelopt.torch.export.unified_export_hf import requantize_resmooth_fused_llm_layers
    from modelopt.torch.quantization.nn import TensorQuantizer
    from modelopt.torch.quantization.nn.modules.tensor_quantizer import register_quant_backend
    from modelopt.torch.quantization.qtensor import NVFP4QTensor
    from modelopt.torch.quantization.utils import update_quant_cfg_with_kv_cache_quant

torch.set_num_threads(1)  # threads that wait for a busy core cost more than they bring for models as small as these

VOCAB = 320
_SIZE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.12,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
}
CONFIGS: dict[str, Any] = {
    "FP8": mtq.FP8_DEFAULT_CFG,
    "INT8": mtq.INT8_DEFAULT_CFG,
    "SmoothQuant": mtq.INT8_SMOOTHQUANT_CFG,
    "W8A16": mtq.INT8_WEIGHT_ONLY_CFG,
    "AWQ": mtq.INT4_AWQ_CFG,
    "W4A8": mtq.W4A8_AWQ_BETA_CFG,
    "NVFP4": mtq.NVFP4_DEFAULT_CFG,
}
ALGORITHMS = {
    "FP8": "FP8",
    "INT8": "W8A8_SQ_PER_CHANNEL",
    "SmoothQuant": "W8A8_SQ_PER_CHANNEL",
    "W8A16": "W8A16",
    "AWQ": "W4A16_AWQ",
    "W4A8": "W4A8_AWQ",
    "NVFP4": "NVFP4",
}


@dataclass(frozen=True)
class Quantized:
    """A checkpoint, and the model that ModelOpt simulates."""

    directory: Path
    simulation: Any

    @torch.inference_mode()
    def logits(self, tokens: list[int]) -> Tensor:
        """Return ``[len(tokens), vocab]``, computed in float64."""
        logits: Tensor = self.simulation(torch.tensor([tokens]), use_cache=False).logits[0].float()
        return logits


def _nvfp4_without_a_gpu(x: Tensor, quantizer: Any) -> Tensor:
    """ModelOpt simulates NVFP4 in a CUDA kernel; this is the code by which it writes NVFP4 weights."""
    scale = NVFP4QTensor.get_activation_scaling_factor(quantizer)
    packed, scales, scale = NVFP4QTensor.quantize(x.clone(), 16, None, scale)
    decoded: Tensor = packed.dequantize(x.dtype, scale=scales, double_scale=scale, block_sizes={-1: 16})
    return decoded


register_quant_backend("nvfp4_without_a_gpu", _nvfp4_without_a_gpu)


def calibration() -> list[list[int]]:
    """Return prompts."""
    generator = torch.Generator().manual_seed(3)
    return torch.randint(1, VOCAB, (8, 48), generator=generator).tolist()


def quantize(
    model: Any,
    config: Any,
    directory: Path,
    prompts: list[list[int]],
    fp8_kv_cache: bool = False,
    round_scales: bool = True,
) -> Any:
    """Quantize ``model``, export it to ``directory`` and return ModelOpt's simulation of it.

    It is calibrated on equally long prompts at once: AWQ asks again and again.
    """
    groups = {length: [prompt for prompt in prompts if len(prompt) == length] for length in map(len, prompts)}
    config = copy.deepcopy(config)
    if fp8_kv_cache:
        config = update_quant_cfg_with_kv_cache_quant(config, copy.deepcopy(mtq.FP8_KV_CFG["quant_cfg"]))
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = mtq.quantize(model, config, lambda model: [model(torch.tensor(group)) for group in groups.values()])
        requantize_resmooth_fused_llm_layers(model)  # the export does it first: it aligns scales of fused projections
        if round_scales:
            _make_scales_powers_of_two(model)
        simulation = copy.deepcopy(model).double()
        export_hf_checkpoint(model, export_dir=directory)
    for module in simulation.modules():
        if isinstance(module, TensorQuantizer) and module.num_bits == (2, 1):
            module.backend = "nvfp4_without_a_gpu"
    return simulation.eval()


def _make_scales_powers_of_two(model: Any) -> None:
    """Make scales exact numbers: whether one divides by them or multiplies by their inverse no longer matters.

    Otherwise the two simulations would differ in a last bit here and there, that bit would tip a value to its next
    rounding, and a few layers later the logits would differ by as much as quantization itself changes them.
    """
    for quantizer in model.modules():
        if isinstance(quantizer, TensorQuantizer) and getattr(quantizer, "_amax", None) is not None:
            bound = quantizer.maxbound * (448 if quantizer.num_bits == (2, 1) else 1)
            quantizer._amax.copy_(bound * 2 ** (quantizer._amax / bound).log2().ceil())


def random_model(kind: str = "Llama", **special: Any) -> Any:
    """Return a small model in float32; its projections' largest weights differ, as those of trained models do."""
    torch.manual_seed(len(kind) + len(special))
    model_class = f"{kind.removesuffix('Text')}ForCausalLM"  # Gemma3Text is the only one whose names differ
    config = getattr(transformers, f"{kind}Config")(**(_SIZE | special), architectures=[model_class])
    model = getattr(transformers, model_class)(config).float().eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1:
                parameter += 0.3 * torch.randn_like(parameter)
            elif name.endswith(("k_proj.weight", "gate_proj.weight")):
                parameter *= 1.7
        if config.tie_word_embeddings:
            model.get_input_embeddings().weight *= 0.3
    return model


@functools.cache
def quantized(scheme: str, kind: str = "Llama", tied: bool = False, fp8_kv_cache: bool = False) -> Quantized:
    """Return a checkpoint in one scheme of ``CONFIGS``, or in ``none``; made once per session."""
    directory = Path(_folder().name) / f"{scheme}-{kind}-{tied}-{fp8_kv_cache}"
    model = random_model(kind, tie_word_embeddings=tied)
    if scheme == "none":
        model.save_pretrained(directory)
        return Quantized(directory, model.double())
    simulation = quantize(model, CONFIGS[scheme], directory, calibration(), fp8_kv_cache)
    return Quantized(directory, simulation)


@functools.cache
def mixed() -> Quantized:
    """Return a checkpoint with several schemes, within one fused projection too, and linears without any."""
    directory = Path(_folder().name) / "mixed"
    rules: list[dict[str, Any]] = [{"quantizer_name": "*", "enable": False}]
    fp8, int8 = {"cfg": {"num_bits": (4, 3), "axis": None}}, {"cfg": {"num_bits": 8, "axis": 0}}
    for pattern, weight, given in (
        ("*.self_attn.q_proj.", fp8, fp8),
        ("*.self_attn.k_proj.", int8, None),
        ("*.mlp.down_proj.", {"cfg": {"num_bits": 4, "block_sizes": {-1: 64, "type": "static"}}}, None),
        ("*.layers.1.mlp.gate_proj.", fp8, fp8),
    ):
        rules.append({"quantizer_name": f"{pattern}weight_quantizer", **weight})
        if given:
            rules.append({"quantizer_name": f"{pattern}input_quantizer", **given})
    config = {"quant_cfg": rules, "algorithm": "max"}
    return Quantized(directory, quantize(random_model(), config, directory, calibration()))


def copied(directory: Path) -> Path:
    """Return a copy of a checkpoint, to damage."""
    return Path(shutil.copytree(directory, Path(_folder().name) / f"copy-{secrets.token_hex(4)}"))


@functools.cache
def _folder() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="inflight-quantized-")
