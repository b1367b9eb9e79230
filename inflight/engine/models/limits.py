"""What of a model kernels, quantization and TensorRT-LLM's compiler do not have; and how long its sequences may be."""

from __future__ import annotations

from inflight.engine.models.config import ModelConfig
from inflight.errors import DeploymentError

_QUANTIZED = {
    "LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM", "Phi3ForCausalLM",
    "Gemma3ForCausalLM",
}  # fmt: skip
"""The architectures that ``inflight build`` was tested with."""


def longest_sequence(config: ModelConfig, wanted: int | None) -> int:
    """Return how many tokens a sequence may have; ``wanted``: ``limits.max_sequence_length``.

    Raises:
        DeploymentError: more than the model was made for. Where the base of its rotary embedding grows with the
            sequences that are served (dynamic), there is no such limit.
    """
    own = config.max_position_embeddings
    grows = any(one.rope is not None and one.rope["rope_type"] == "dynamic" for one in config.attention.values())
    if wanted is not None and wanted > own and not grows:
        raise DeploymentError(
            f"limits.max_sequence_length is {wanted}; {config.architecture} was made for {own} tokens "
            "(max_position_embeddings in its config.json)"
        )
    return wanted or own


def unknown_to_native_step(config: ModelConfig) -> list[str]:
    """Return what a model has that the native step on a CPU does not compute."""
    return _found({
        "layers of Gemma 4": config.gemma4 is not None,
        "recurrent layers": bool(config.recurrent),
        "gate behind attention": any(one.output_gate for one in config.attention.values()),
        "latent attention": any(one.latent is not None for one in config.attention.values()),
    })  # fmt: skip


def why_not_native(config: ModelConfig) -> str | None:
    """Return why the native step does not compute a model, whatever its weights are in; None: it does."""
    if config.modeling == "transformers":
        return "transformers' code computes the model"
    unknown = unknown_to_native_step(config)
    return f"the kernels have no {', no '.join(unknown)}" if unknown else None


def check_invariant(config: ModelConfig) -> None:
    """Check that ``engine.batch_invariant`` can be had on a GPU: kernels alone keep to it.

    Raises:
        DeploymentError: transformers' code computes the model, or the kernels lack a part of it.
    """
    if config.modeling == "transformers":
        raise DeploymentError("engine.batch_invariant is not supported on a GPU where transformers' code computes")
    if unknown := unknown_to_gpu_kernels(config):
        raise DeploymentError(
            f"engine.batch_invariant needs kernels on a GPU; for {config.architecture} they have no "
            f"{', no '.join(unknown)}"
        )


def unknown_to_gpu_kernels(config: ModelConfig) -> list[str]:
    """Return what a model has that the kernels on a GPU do not compute."""
    attention = config.attention.values()
    return _found({
        "layers of Gemma 4": config.gemma4 is not None,
        "recurrent layers": bool(config.recurrent),
        "gate behind attention": any(one.output_gate for one in config.attention.values()),
        "latent attention": any(one.latent is not None for one in attention),
        "attention within chunks": any(one.chunk is not None for one in attention),
        "norms of queries without a weight": any(one.qk_norm == "unit" for one in attention),
    })  # fmt: skip


def unknown_to_quantization(config: ModelConfig) -> list[str]:
    """Return what a model has that ``inflight build`` has not been shown to quantize rightly."""
    return _found({
        "experts": any(layer.experts is not None for layer in config.layers),
        "recurrent layers": bool(config.recurrent),
        "latent attention": any(one.latent is not None for one in config.attention.values()),
        "layers of Gemma 4": config.gemma4 is not None,
        "parts for images or sound": config.is_text_part,
        "an architecture that it was not tested with": config.architecture not in _QUANTIZED,
    })  # fmt: skip


def unknown_to_compiler(config: ModelConfig) -> list[str]:
    """Return what a model has for which the commands that compile TensorRT-LLM's engines were not written."""
    return _found({
        "parts for images or sound": config.is_text_part,
        "an architecture whose commands were not tested": config.architecture not in _QUANTIZED,
    })  # fmt: skip


def _found(asked: dict[str, bool]) -> list[str]:
    return [name for name, is_there in asked.items() if is_there]
