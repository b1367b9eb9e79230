"""Quantizes a Hugging Face checkpoint with NVIDIA ModelOpt, on a CPU or a GPU, to its unified Hugging Face format.

It also measures how much each layer suffers, and says which therefore stay in 16 bit.

ModelOpt and transformers are imported when used: they take seconds, and only a build needs them.
"""

from __future__ import annotations

import contextlib
import copy
import io
import itertools
import logging
import shutil
import warnings
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from inflight.engine.models.reading import stored_dtype
from inflight.errors import DeploymentError
from inflight.export.data import Example
from inflight.export.quantize.config_file import write_config
from inflight.export.stages import Journal, Progress, tracked
from inflight.export.verify.measures import kl_divergence
from inflight.text.files import read_json

PROBES, PROBE_TOKENS = 16, 64
"""Calibration rows that sensitivity is measured on, of the longest, and how many tokens of each."""
_JOINED = 512
"""Tokens of examples that are shown to the model in one row while it is calibrated."""
_TEXT_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "generation_config.json",
)
_KV_CACHE = "FP8_KV_CFG"
_WEIGHTS, _INTEGERS = "*weight_quantizer", (4, 8)
"""The name of the rule for weights, and ``num_bits`` of integers; of FP4 and FP8 they are pairs."""
_FUSED = ({"q_proj", "k_proj", "v_proj"}, {"gate_proj", "up_proj"})
"""Linears that an engine computes as one: they share their scales, so they share their fate."""


@dataclass(frozen=True)
class Scheme:
    """One way to hold weights and activations."""

    modelopt_config: str
    """Name of the configuration in ``modelopt.torch.quantization``."""
    algorithm: str
    """``quant_algo`` in the checkpoint, which TensorRT-LLM reads too."""
    meaning: str
    better: str
    """The option that loses less, for a build that lost too much; empty: there is none."""
    most_lost: float | None = None
    """The most that the perplexity may increase, as a fraction; None: as the deployment has it by default."""
    calibrated: bool = True
    """Whether it goes by the data that the model is shown."""


_INT8 = "`--precision int8`, in as many bytes, which rounds weights alone"
_BY_4_BITS = 0.03
"""The most that the perplexity may increase by 4 bits, as a fraction."""
_MORE_BITS = "`--precision int8`, which rounds to 8 bits"
SCHEMES = {
    "fp8": Scheme("FP8_DEFAULT_CFG", "FP8", "weights and activations in FP8 (E4M3), a scale per tensor", _INT8),
    "int8": Scheme(
        "INT8_WEIGHT_ONLY_CFG",
        "W8A16",
        "weights in INT8 with a scale per row or group of inputs, activations in 16 bit",
        "",
        calibrated=False,
    ),
    "int4-awq": Scheme(
        "INT4_AWQ_CFG", "W4A16_AWQ", "weights in INT4 with a scale per group of inputs (AWQ), activations in 16 bit",
        _MORE_BITS, _BY_4_BITS,
    ),
    "w4a8-awq": Scheme(
        "W4A8_AWQ_BETA_CFG", "W4A8_AWQ", "weights in INT4 (AWQ), activations in FP8", _MORE_BITS, _BY_4_BITS
    ),
    "nvfp4": Scheme(
        "NVFP4_DEFAULT_CFG", "NVFP4", "weights and activations in FP4 with an FP8 scale per 16 values",
        _MORE_BITS, _BY_4_BITS,
    ),
}  # fmt: skip
"""The schemes by precision; ``bf16``, ``fp16`` and ``float32`` keep the checkpoint as it is."""


def fused_group(name: str) -> tuple[str, str]:
    """Return what the linears have in common that an engine computes as one with this one."""
    parent, _, last = name.rpartition(".")
    return parent, next((min(one) for one in _FUSED if last in one), last)


@dataclass(frozen=True)
class Recipe:
    """What a checkpoint becomes."""

    precision: str
    """A key of ``SCHEMES``, or one that keeps the weights as they are."""
    fp8_kv_cache: bool
    keep: tuple[str, ...] = ()
    """Linears that stay in 16 bit, by their names in the checkpoint."""
    group: int = 0
    """Inputs of a row that share a scale, where they share one; 0: all of a row do."""

    @property
    def calibrates(self) -> bool:
        """Whether it goes by the data that the model is shown."""
        return self.fp8_kv_cache or SCHEMES[self.precision].calibrated

    @property
    def limits(self) -> dict[str, float]:
        """Limits on quality that differ from a deployment's defaults, by their names there."""
        most = SCHEMES[self.precision].most_lost if self.precision in SCHEMES else None
        return {} if most is None else {"max_perplexity_increase": most}

    @property
    def better(self) -> str:
        """The option that loses less; empty: there is none."""
        return SCHEMES[self.precision].better if self.precision in SCHEMES else "`--kv-cache bf16`"


def has_bfloat16() -> bool:
    """Return whether this processor multiplies in bfloat16; without that PyTorch takes five times as long as in
    float32."""
    return torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()


class QuantizedModel:
    """A checkpoint in transformers with ModelOpt's simulated quantization in it.

    It is computed in its own type, or in float32 where this machine is slow in that; it is written in its own.
    """

    def __init__(
        self, checkpoint: Path, recipe: Recipe, examples: Sequence[Example], device: str, progress: Progress
    ) -> None:
        """Load and calibrate.

        Raises:
            DeploymentError: the checkpoint cannot be loaded, or ModelOpt refuses it.
        """
        import modelopt.torch.quantization as mtq
        from transformers import AutoModelForCausalLM

        self._checkpoint, self._device = checkpoint, device
        progress(f"loading {checkpoint.name} in transformers", 0, 0)
        dtype = "auto" if device != "cpu" or has_bfloat16() else torch.float32
        try:
            model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=dtype, local_files_only=True).to(device)
        except (OSError, ValueError, RuntimeError) as error:
            raise DeploymentError(f"{checkpoint}: transformers cannot load it: {_line(error)}") from None

        passes = itertools.count(1)

        def calibrate(model: nn.Module) -> None:
            for tokens in tracked(joined(examples), f"calibrating, pass {next(passes)}", progress):
                model(torch.tensor([tokens], device=device))

        try:
            shown = calibrate if recipe.calibrates else None
            self.model = mtq.quantize(model.eval(), quantizer_rules(recipe, vars(mtq)), shown)
        except (ValueError, RuntimeError, AssertionError, NotImplementedError) as error:
            raise DeploymentError(
                f"ModelOpt cannot quantize {checkpoint} to {recipe.precision}: {_line(error)}"
            ) from None
        self._stored = getattr(torch, stored_dtype(read_json(checkpoint / "config.json")))
        self._quantizers = {
            name: [one for one in (module.weight_quantizer, module.input_quantizer) if one.is_enabled]
            for name, module in self.model.named_modules()
            if hasattr(module, "weight_quantizer") and module.weight_quantizer.is_enabled
        }

    @torch.inference_mode()
    def logits(self, rows: Tensor) -> Tensor:
        """Return the float32 logits ``[rows, tokens, vocab]`` of rows of token ids."""
        return self.model(rows.to(self._device)).logits.float()

    def groups(self) -> list[tuple[str, ...]]:
        """Return the names of the quantized linears, those together that an engine computes as one."""
        groups: dict[tuple[str, str], list[str]] = {}
        for name in self._quantizers:
            groups.setdefault(fused_group(name), []).append(name)
        return [tuple(group) for group in groups.values()]

    def quantize_only(self, names: Collection[str]) -> None:
        """Have these linears quantized, and compute the others in 16 bit."""
        for name, quantizers in self._quantizers.items():
            for quantizer in quantizers:
                quantizer.enable() if name in names else quantizer.disable()

    def save(self, directory: Path) -> None:
        """Write the unified Hugging Face checkpoint, with the original's ``config.json`` and files of its text side.

        Raises:
            OSError: the disk is full or the directory cannot be written.
        """
        from modelopt.torch.export import export_hf_checkpoint

        with torch.inference_mode():
            export_hf_checkpoint(self.model, export_dir=directory)
        if self._stored is not torch.float32 and next(self.model.parameters()).dtype is torch.float32:
            for file in sorted(directory.glob("*.safetensors")):
                _round_weights(file, self._stored)
        write_config(self._checkpoint, directory)
        copy_text_files(self._checkpoint, directory)


def joined(examples: Sequence[Example]) -> list[list[int]]:
    """Return the tokens of examples, as many in a row as fit: AWQ rounds all weights eleven times for each row.

    An example that is longer than that is a row of its own.
    """
    rows: list[list[int]] = []
    for example in examples:
        if not rows or len(rows[-1]) + len(example.tokens) > _JOINED:
            rows.append([])
        rows[-1] += example.tokens
    return rows


def _round_weights(file: Path, dtype: torch.dtype) -> None:
    """Round what a file holds in float32 to a type, but for scales."""
    tensors = load_file(file)
    rounded = {
        name: tensor.to(dtype) if tensor.dtype is torch.float32 and "scale" not in name.rpartition(".")[2] else tensor
        for name, tensor in tensors.items()
    }
    save_file(rounded, file, metadata={"format": "pt"})


@dataclass(frozen=True)
class Sensitivity:
    """One group of linears that an engine computes as one."""

    linears: tuple[str, ...]
    kl_divergence: float
    """Mean over positions, in nats, with this group alone quantized."""


def measure_sensitivity(
    checkpoint: Path, recipe: Recipe, examples: Sequence[Example], device: str, progress: Progress, journal: Journal
) -> list[Sensitivity]:
    """Quantize one group of linears at a time, and compare the next token's distribution with the original's.

    The rows that are compared do not calibrate: static scales cut nothing off of the rows that they come from. What
    ``journal`` has is not measured again.

    Returns:
        The groups, the most sensitive first.

    Raises:
        DeploymentError: there is a single row; or as ``QuantizedModel`` does.
    """
    if len(examples) < 2:
        raise DeploymentError("--kl-budget needs two calibration rows at least: one to calibrate with, one to measure")
    longest = sorted(examples, key=lambda one: len(one.tokens), reverse=True)
    probed = longest[: 2 * min(PROBES, len(longest) // 2) : 2]
    calibrating = [one for one in examples if not any(one is row for row in probed)]
    quantized = QuantizedModel(checkpoint, recipe, calibrating, device, progress)
    quantized.quantize_only(())
    rows, real = _padded([one.tokens[:PROBE_TOKENS] for one in probed])
    original = quantized.logits(rows)[real]

    def loss(group: tuple[str, ...]) -> float:
        quantized.quantize_only(group)
        return float(kl_divergence(original, quantized.logits(rows)[real]).mean())

    found = [
        Sensitivity(group, journal.step(" ".join(group), partial(loss, group)))
        for group in tracked(quantized.groups(), "measuring sensitivity", progress)
    ]
    return sorted(found, key=lambda one: -one.kl_divergence)


def _padded(rows: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor]:
    """Return rows of equal length, and what of them is real; causal attention sees nothing of what is behind."""
    length = max(map(len, rows))
    ids = torch.tensor([[*row, *[row[-1]] * (length - len(row))] for row in rows])
    return ids, torch.arange(length) < torch.tensor([[len(row)] for row in rows])


def choose_kept(sensitivities: Sequence[Sensitivity], budget: float) -> tuple[str, ...]:
    """Return the linears to keep in 16 bit, so that what the others lose together stays within ``budget`` (nats).

    Losses of single groups are added up, as if they were independent; for small losses that is nearly so
    (HAWQ-V2, arXiv:1911.03852, adds up per-layer perturbations in the same way).
    """
    kept: list[str] = []
    rest = sum(one.kl_divergence for one in sensitivities)
    for one in sorted(sensitivities, key=lambda one: -one.kl_divergence):
        if rest <= budget:
            break
        kept += one.linears
        rest -= one.kl_divergence
    return tuple(sorted(kept))


def copy_text_files(source: Path, target: Path) -> None:
    """Copy what the text stages read; a quantized checkpoint keeps its tokenizer."""
    for name in _TEXT_FILES:
        if (source / name).is_file():
            shutil.copyfile(source / name, target / name)


@contextlib.contextmanager
def quiet(log: Path) -> Iterator[None]:
    """Send what ModelOpt and transformers print to a file: the terminal shows progress."""
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()
    transformers_logging.set_verbosity_error()
    logging.getLogger("modelopt").setLevel(logging.ERROR)
    printed = io.StringIO()
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
            warnings.simplefilter("ignore")
            yield
    finally:
        with log.open("a", encoding="utf-8") as file:
            file.write(printed.getvalue())


def quantizer_rules(recipe: Recipe, known: Mapping[str, Any]) -> dict[str, Any]:
    """Return ModelOpt's configuration: its own for the precision, the KV cache's rule added, the kept linears off.

    ``quant_cfg`` is a list of rules in ModelOpt 0.47, and a dictionary by pattern in older releases, that of NVIDIA's
    image among them. In both, a later rule wins. ``known`` are ModelOpt's own configurations by name.

    Raises:
        DeploymentError: this release of ModelOpt has none of the name.
    """
    cache_rules = _known(_KV_CACHE, known)["quant_cfg"]
    by_pattern = isinstance(cache_rules, dict)
    if recipe.precision in SCHEMES:
        config = _known(SCHEMES[recipe.precision].modelopt_config, known)
        if recipe.group:
            _set_group(config["quant_cfg"], recipe.group)
    else:
        off: Any = {"*": {"enable": False}} if by_pattern else [{"quantizer_name": "*", "enable": False}]
        config = {"quant_cfg": off, "algorithm": "max"}
    kept = [f"{name}.*" for name in recipe.keep]
    if by_pattern:
        added = cache_rules if recipe.fp8_kv_cache else {}
        added |= {pattern: {"enable": False} for pattern in kept}
        # A pattern that is there already would keep its place, before the rules that it is to overrule.
        before = {pattern: rule for pattern, rule in config["quant_cfg"].items() if pattern not in added}
        return {**config, "quant_cfg": before | added}
    rules = config["quant_cfg"] + (cache_rules if recipe.fp8_kv_cache else [])
    return {**config, "quant_cfg": rules + [{"quantizer_name": pattern, "enable": False} for pattern in kept]}


def _set_group(rules: Any, size: int) -> None:
    """Have rules that hold weights in integers do so by groups of this size."""
    named = rules.items() if isinstance(rules, dict) else [(rule["quantizer_name"], rule.get("cfg")) for rule in rules]
    for name, setting in named:
        for one in setting if isinstance(setting, list) else [setting]:
            if name == _WEIGHTS and isinstance(one, dict) and one.get("num_bits") in _INTEGERS:
                one.pop("axis", None)
                one["block_sizes"] = {-1: size, "type": "static"}


def _known(name: str, known: Mapping[str, Any]) -> dict[str, Any]:
    if name not in known:
        raise DeploymentError(f"this release of ModelOpt has no {name}; use the one of: make setup EXTRAS=build")
    config: dict[str, Any] = copy.deepcopy(known[name])
    return config


def _line(error: Exception) -> str:
    return " ".join(str(error).split())[:300] or type(error).__name__
