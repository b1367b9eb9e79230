"""Which architectures TensorRT-LLM serves: by its own list, since nothing here can ask it."""

from __future__ import annotations

from inflight.engine.models.config import ModelConfig
from inflight.manifest import TENSORRT_LLM_LINE

LISTED = frozenset({
    "DeciLMForCausalLM", "DeepseekV3ForCausalLM", "Exaone4ForCausalLM", "Gemma3ForCausalLM",
    "Gemma3ForConditionalGeneration", "GptOssForCausalLM", "LlamaForCausalLM", "Llama4ForConditionalGeneration",
    "MistralForCausalLM", "Mistral3ForConditionalGeneration", "MixtralForCausalLM", "NemotronForCausalLM",
    "NemotronNASForCausalLM", "Phi3ForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM", "Qwen3MoeForCausalLM",
})  # fmt: skip
"""Those that the documentation of its PyTorch backend names: the first list of
``tests/facts/tensorrt_llm_models.json``, which says where it is from."""


def why_unlisted(config: ModelConfig) -> str | None:
    """Return why TensorRT-LLM is not taken to serve a model; None: its list names the architecture."""
    return why_not_named(config.published_as or config.architecture)


def why_not_named(architecture: str) -> str | None:
    """Return what is said of an architecture that the list does not name; None: it does."""
    if architecture in LISTED:
        return None
    return f"TensorRT-LLM {TENSORRT_LLM_LINE}'s list of models does not name {architecture}"
